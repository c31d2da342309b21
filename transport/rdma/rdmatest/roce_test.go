package rdmatest_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/transport/internal/wire"
	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/rdma/rdmatest"
	"github.com/fared/fared/transport/roce"
	"github.com/fared/fared/wecmp"
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
		condition{"corruption, IPv6", rdmatest.Options{Corrupt: 0.05, MaxSize: 16 << 10, IPv6: true}}), gate.Count(t, gate.Models, 1, 4))
}

func FuzzRoCE(f *testing.F) { rdmatest.Fuzz(f, newRoCE(1), rdmatest.FuzzOptions{Checksum: true}) }

func TestRoCESets(t *testing.T) {
	sets(t, newRoCE, gate.Count(t, gate.Models, 25_000, 1_000_000))
}

// TestRoCEPlainSets posts on sets of one slot, whose only queue pair is plain: messages have no header, and wait for
// receives by RNR NAKs.
func TestRoCEPlainSets(t *testing.T) {
	for _, ordering := range []wecmp.Ordering{wecmp.Weak, wecmp.Partial, wecmp.Strong} {
		few := uint64(0) // RNR NAKs with few receives; a short run with many losses may have none
		for _, loss := range []float64{0, 0.02, 0.2} {
			for _, receives := range []int{96, 3} {
				o := rdmatest.SetOptions{Ordering: ordering, Slots: 1, Receives: receives}
				o.Ops, o.Loss, o.MaxSize, o.Window, o.NotReady, o.Flap, o.Notice = gate.Count(t, gate.Models, 3000, 10_000)/effort, loss, 16<<10, 48, 0.02, time.Millisecond, 2*time.Millisecond
				o.Duplicate, o.Reorder = loss/2, loss/2
				t.Run(fmt.Sprintf("%v, %d receives", o, receives), func(t *testing.T) {
					r := rdmatest.Sets(t, newRoCE(o.Seed), o)
					notReady := r.Counters[0]["rnr_received"] + r.Counters[1]["rnr_received"]
					if r.Ops != uint64(o.Ops) || notReady > 0 && receives >= o.Window {
						t.Errorf("%d work requests, %d RNR NAKs", r.Ops, notReady)
					}
					few += notReady
				})
			}
		}
		if few == 0 {
			t.Errorf("%v: no RNR NAK", ordering)
		}
	}
}

func TestRoCEShares(t *testing.T) {
	shares(t, newRoCE, gate.Count(t, gate.Models, 2, 8))
}

func TestRoCERefusals(t *testing.T) {
	rdmatest.Refusals(t, newRoCE(1))
}
