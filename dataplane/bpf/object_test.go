package bpf

import (
	"testing"

	"github.com/cilium/ebpf"

	"github.com/fared/fared/dataplane/internal/bpftest"
	"github.com/fared/fared/internal/netnstest"
)

// TestObjectsAreFresh: what is committed is what clang-14 makes of the source, in any directory.
func TestObjectsAreFresh(t *testing.T) { bpftest.Fresh(t, "steer") }

// TestLayouts: each type that Go writes has the size and the offsets of the program's, and no holes, so that it is written
// as it is.
func TestLayouts(t *testing.T) {
	spec, err := loadSteer()
	if err != nil {
		t.Fatal(err)
	}
	bpftest.Layouts(t, spec, map[string]any{
		"settings": steerSettings{}, "live": steerLive{}, "place": steerPlace{}, "plane": steerPlane{}, "group": steerGroup{}, "run": steerRun{},
		"destination": steerDestination{}, "address": steerAddress{}, "pair": steerPair{}, "pins": steerPins{}, "table": steerTable{},
		"slot_counter": steerSlotCounter{}, "counter": steerCounter{},
	})
	if n := spec.Maps[steerMapFaredDrops].MaxEntries; n != uint32(drops) {
		t.Errorf("the program has %d reasons to drop, Go %d", n, drops)
	}
}

// TestVerifierHasRoom: the program stays far below the verifier's million instructions, so that older kernels, which prune
// less, take it too.
func TestVerifierHasRoom(t *testing.T) {
	netnstest.Require(t)
	spec, err := loadSteer()
	if err != nil {
		t.Fatal(err)
	}
	c, err := ebpf.NewCollection(spec)
	if err != nil {
		t.Fatalf("%+v", err)
	}
	defer c.Close()
	bpftest.VerifierHasRoom(t, c.Programs[steerProgFaredSteer], 200_000)
}
