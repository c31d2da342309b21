package tcpslots

import (
	"testing"

	"github.com/cilium/ebpf"

	"github.com/fared/fared/internal/testkit/bpftest"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// TestObjectsAreFresh checks that the committed objects equal the output of clang-14 for the source, in any directory.
func TestObjectsAreFresh(t *testing.T) { bpftest.Fresh(t, "connect") }

// TestLayouts checks that each type that Go writes has the size and offsets of the program's type and no padding, and
// that both have equal bounds.
func TestLayouts(t *testing.T) {
	spec, err := loadConnect()
	if err != nil {
		t.Fatal(err)
	}
	bpftest.Layouts(t, spec, map[string]any{
		"address": connectAddress{}, "pair": connectPair{}, "ports": connectPorts{}, "range": connectRange{}, "bin": connectBin{}, "deal": connectDeal{}, "claim": connectClaim{},
	})
	var d connectDeal
	if len(d.Turn) != maxTurns || len(d.Slot) != maxSlots || len(connectPorts{}.Port) != maxSlots {
		t.Error("the program has other bounds than Go")
	}
	if n := spec.Maps[connectMapFaredCounts].MaxEntries; n != maxPlanes+5 {
		t.Errorf("the program has %d counters, Go %d", n, maxPlanes+5)
	}
}

// TestVerifierHasRoom checks that the programs stay far below the verifier's limit of one million instructions.
func TestVerifierHasRoom(t *testing.T) {
	netnstest.Require(t)
	spec, err := loadConnect()
	if err != nil {
		t.Fatal(err)
	}
	c, err := ebpf.NewCollection(spec)
	if err != nil {
		t.Fatalf("%+v", err)
	}
	defer c.Close()
	for _, p := range c.Programs {
		bpftest.VerifierHasRoom(t, p, 100_000)
	}
}
