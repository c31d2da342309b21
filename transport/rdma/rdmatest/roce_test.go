package rdmatest_test

import (
	"math/rand/v2"
	"testing"

	"github.com/fared/fared/transport/internal/wire"
	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/rdma/rdmatest"
	"github.com/fared/fared/transport/roce"
)

// newRoCE returns a constructor of cores whose numbers are determined by the seed.
func newRoCE(seed uint64) rdmatest.Constructor {
	return func(out wire.Out) rdmatest.Core {
		rng := rand.New(rand.NewPCG(seed, 0x726f6365))
		return roce.NewCore(roce.Config{Random: rng.Uint32, Timing: rdma.Timing{Stall: shortStall}}, out)
	}
}

func TestRoCEChannels(t *testing.T) {
	channels(t, newRoCE, append(conditions,
		condition{"corruption", rdmatest.Options{Corrupt: 0.05, MaxSize: 16 << 10, MTU: 1024 + 64}},
		condition{"corruption, IPv6", rdmatest.Options{Corrupt: 0.05, MaxSize: 16 << 10, IPv6: true}}))
}

func FuzzRoCE(f *testing.F) { rdmatest.Fuzz(f, newRoCE(1), rdmatest.FuzzOptions{Checksum: true}) }

func TestRoCESets(t *testing.T) { sets(t, newRoCE) }

func TestRoCEShares(t *testing.T) { shares(t, newRoCE) }

func TestRoCERefusals(t *testing.T) { rdmatest.Refusals(t, newRoCE(1)) }
