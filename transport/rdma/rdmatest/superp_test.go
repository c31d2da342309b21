package rdmatest_test

import (
	"testing"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/transport/internal/wire"
	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/rdma/rdmatest"
	"github.com/fared/fared/transport/superp"
)

// newSUPERp returns a constructor of cores whose connection identifiers are determined by the seed.
func newSUPERp(seed uint64) rdmatest.Constructor {
	return func(out wire.Out) rdmatest.Core {
		return superp.NewCore(superp.Config{FirstCID: uint16(1 + seed), Timing: rdma.Timing{Stall: shortStall}}, out)
	}
}

func TestSUPERpChannels(t *testing.T) {
	channels(t, newSUPERp, conditions, gate.Count(t, gate.Models, 1, 4))
}

func TestSUPERpSets(t *testing.T) {
	sets(t, newSUPERp, gate.Count(t, gate.Models, 50_000, 1_000_000))
}

func TestSUPERpShares(t *testing.T) {
	shares(t, newSUPERp, gate.Count(t, gate.Models, 2, 8))
}

// FuzzSUPERp sets no Checksum: the UDP checksum is the only one that SUPERp has.
func FuzzSUPERp(f *testing.F) { rdmatest.Fuzz(f, newSUPERp(1), rdmatest.FuzzOptions{}) }

func TestSUPERpRefusals(t *testing.T) {
	rdmatest.Refusals(t, newSUPERp(1))
}
