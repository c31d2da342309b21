package transports

import (
	"context"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/transport/nupa"
	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/roce"
	"github.com/fared/fared/transport/superp"
	"github.com/fared/fared/transport/tcpqp"
	"github.com/fared/fared/wecmp"
)

// TestMixedFabric runs a set over two Ethernet planes and one of shared memory through the loss of every Ethernet
// plane, then of the shared memory, and their return, under load: each addition is executed once, and no error occurs.
// Datagrams are tunneled meanwhile; outstanding operations of TCP wait for a cable.
func TestMixedFabric(t *testing.T) {
	gate.Slow(t, gate.Models, "three transports and two orderings")
	netnstest.Require(t)
	for name, ethernet := range map[string]func() rdma.Transport{
		"roce":   func() rdma.Transport { return roce.New(roce.Config{}) },
		"superp": func() rdma.Transport { return superp.New(superp.Config{}) },
		"tcp":    func() rdma.Transport { return tcpqp.New(tcpqp.Config{}) },
	} {
		for _, ordering := range []wecmp.Ordering{wecmp.Weak, wecmp.Strong} {
			t.Run(fmt.Sprint(name, " ", ordering), func(t *testing.T) {
				shared := filepath.Join(t.TempDir(), "plane3")
				c := newCable(t)
				mixed := contender{make: func() []rdma.Transport {
					return []rdma.Transport{ethernet(), nupa.New(nupa.Config{File: shared, Size: 64 << 20})}
				}, planes: map[string]string{"plane3": "nupa"}}
				given := func(ethernet, memory uint32) []rdma.Slot {
					return []rdma.Slot{{Slot: 0, Plane: "plane1", Port: 50000, Share: ethernet}, {Slot: 1, Plane: "plane2", Port: 50001, Share: ethernet},
						{Slot: 2, Plane: "plane3", Port: 50002, Share: memory}}
				}
				p := c.connect(t, mixed, given(4e8, 2e8), ordering)

				const words, ahead, rounds = 64, 48, 12
				posted, done := 0, 0
				post := func() {
					at := posted % words
					wr := rdma.SendWR{ID: uint64(posted), Opcode: rdma.FetchAdd, Add: 1, Local: rdma.SGE{MR: p.local, Offset: 8 * (posted % 4096), Length: 8},
						RemoteAddress: p.remote.Address()&^4095 + 4096*uint64(1+at), RemoteKey: p.remote.Key()}
					if posted%3 == 0 { // and a message longer than a packet
						wr.Opcode, wr.Local, wr.RemoteAddress = rdma.Write, rdma.SGE{MR: p.local, Offset: 1 << 20, Length: 20_000}, p.remote.Address()+2<<20
					}
					if _, err := p.set.PostSend(wr); err != nil {
						t.Fatal(err)
					}
					posted++
				}
				ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
				defer cancel()
				until := func(n int) {
					t.Helper()
					buf := make([]rdma.Completion, 64)
					for done < n {
						k, err := p.cq.Wait(ctx, buf)
						if err != nil {
							t.Fatalf("%d of %d done: %v; counters %v", done, posted, err, p.devices[0].Counters())
						}
						for _, completion := range buf[:k] {
							if completion.Err != nil {
								t.Fatal(completion.Err)
							}
							done++
						}
					}
				}
				slots := func(ethernet, memory uint32) {
					t.Helper()
					for _, s := range p.sets {
						if err := s.SetSlots(given(ethernet, memory)); err != nil {
							t.Fatal(err)
						}
					}
				}
				for round := range rounds {
					for posted-done < ahead {
						post()
					}
					switch round % 3 {
					case 0: // every cable fails, with packets in flight; the weights follow
						c.b.IP("link", "set", "eth0", "down")
						for range ahead {
							post()
						}
						slots(0, 1e9)
						if name == "tcp" {
							continue
						}
					case 1: // the shared memory fails, the cables are back
						c.b.IP("link", "set", "eth0", "up")
						slots(5e8, 0)
					default:
						slots(4e8, 2e8)
					}
					until(posted - ahead/3)
				}
				c.b.IP("link", "set", "eth0", "up")
				slots(4e8, 2e8)
				until(posted)
				sum, added := uint64(0), 0
				for i := range posted {
					if i%3 != 0 {
						added++
					}
				}
				for at := range words {
					sum += rdma.Uint64(p.remote.Bytes()[p.remote.Address()&^4095+4096*uint64(1+at)-p.remote.Address():])
				}
				if sum != uint64(added) {
					t.Errorf("%d additions were posted, %d executed", added, sum)
				}
			})
		}
	}
}
