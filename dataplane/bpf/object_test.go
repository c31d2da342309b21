package bpf

import (
	"testing"

	"github.com/cilium/ebpf"

	"github.com/fared/fared/internal/testkit/bpftest"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// TestObjectsAreFresh checks that the committed objects equal the output of clang-14 for the source, in any directory.
func TestObjectsAreFresh(t *testing.T) { bpftest.Fresh(t, "steer") }

// TestLayouts checks that each type that Go writes has the size and offsets of the program's type and no padding.
func TestLayouts(t *testing.T) {
	spec, err := loadSteer()
	if err != nil {
		t.Fatal(err)
	}
	bpftest.Layouts(t, spec, map[string]any{
		"settings": steerSettings{}, "source": steerSource{}, "target": steerTarget{}, "live": steerLive{}, "place": steerPlace{}, "plane": steerPlane{}, "group": steerGroup{}, "run": steerRun{},
		"destination": steerDestination{}, "address": steerAddress{}, "pair": steerPair{}, "pins": steerPins{}, "table": steerTable{},
		"slot_counter": steerSlotCounter{}, "counter": steerCounter{}, "device": steerDevice{}, "device_places": steerDevicePlaces{},
	})
	if n := spec.Maps[steerMapFaredDrops].MaxEntries; n != uint32(drops) {
		t.Errorf("the program has %d reasons to drop, Go %d", n, drops)
	}
}

// TestVerifierHasRoom checks that the program stays far below the verifier's limit of one million instructions, so that
// older kernels, which prune fewer paths, accept it too.
func TestVerifierHasRoom(t *testing.T) {
	netnstest.Require(t)
	spec, err := loadSteer()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{steerProgFaredCarrierOff, steerProgFaredCarrierOn} {
		delete(spec.Programs, name) // kernels may refuse them; TestCarrierWithoutAgent runs them
	}
	c, err := ebpf.NewCollection(spec)
	if err != nil {
		t.Fatalf("%+v", err)
	}
	defer c.Close()
	bpftest.VerifierHasRoom(t, c.Programs[steerProgFaredSteer], 200_000)
}
