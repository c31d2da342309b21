package bpf

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// wholeState returns a whole state: groups of each mode, parked slots, pins of both kinds, and a sub-port that is down.
func wholeState(b *bed, mode farev1.Mode, gpus []gpu) *farev1.SnapshotResponse {
	all := &farev1.SnapshotResponse{SubPorts: []*farev1.SubPortState{{Device: "p2.1"}}}
	for i, g := range gpus {
		v := g.group(uint32(7 + i))
		if mode == farev1.Mode_MODE_PER_PACKET {
			for _, slot := range v.Slots {
				slot.Device = ""
			}
		}
		all.Vectors = append(all.Vectors, v)
	}
	parked := gpus[0].group(11)
	parked.Members = nil
	for _, slot := range parked.Slots {
		slot.SharePpb = 0
	}
	all.Vectors = append(all.Vectors, parked, &farev1.Vector{Id: 12, Source: gpus[1].loopback.String(), Members: gpus[1].group(1).Members[:2]})
	for i, g := range gpus {
		table := append(sequence(3, 5, 10126), sequence(5, 6, 10128)...)
		for n, pair := range [][]uint32{g.ports, table, nil} {
			d := &farev1.Destination{Prefix: benchDestination(n).String(), Source: g.loopback.String(), Vector: uint32(7 + i)}
			if n == 0 {
				d.Prefix = b.family.destination.String()
			}
			if pair != nil {
				d.Pairs = []*farev1.PairPorts{{Source: g.loopback.String(), SourcePorts: pair}}
			}
			all.Destinations = append(all.Destinations, d)
		}
	}
	for _, d := range all.Destinations {
		if d.Vector == 8 && len(d.Pairs) == 0 {
			d.Vector = 12
		}
	}
	return all
}

// TestRecover checks that an agent without a journal recovers the programmed state from the maps, and that no packet
// leaves its slot at any moment.
func TestRecover(t *testing.T) {
	gate.Needed(t, "an agent without a journal recovers from its maps, under traffic")
	for _, mode := range []farev1.Mode{farev1.Mode_MODE_PER_FLOW, farev1.Mode_MODE_PER_PACKET} {
		t.Run(mode.String(), func(t *testing.T) {
			if mode != farev1.Mode_MODE_PER_FLOW {
				gate.Slow(t, gate.Kernel, "the other mode")
			}
			b := newBed(t, families[0])
			gpus := newGPUs(b)
			b.Resolve()
			b.open()
			forwarding := b.forwardingOf(mode, gpus[:]...)
			server := contract.New(contract.Config{Forwarder: b.s})
			if refused, err := server.Restore(forwarding, wholeState(b, mode, gpus[:])); err != nil || len(refused) > 0 {
				t.Fatal(refused, err)
			}
			snapshot := func(s *contract.Server) (all *farev1.SnapshotResponse) {
				s.View(func(state *contract.State) { all = proto.CloneOf(state.Snapshot()) })
				return all
			}
			before := snapshot(server)
			var flows []*flow
			for _, g := range gpus {
				for _, port := range g.ports {
					flows = append(flows, b.flowFrom(g.loopback.Addr(), b.family.destination.Addr(), port))
				}
			}
			quit, sent := make(chan struct{}), make(chan error, 1)
			go func() {
				for {
					for _, f := range flows {
						if err := f.send(1); err != nil {
							sent <- err
							return
						}
					}
					select {
					case <-quit:
						sent <- nil
						return
					default:
					}
				}
			}()
			busy := func() {
				t.Helper()
				had := b.total()
				netnstest.Eventually(t, patience, func() error {
					if b.total() < had+10*len(flows) {
						return errors.New("no traffic")
					}
					return nil
				})
			}
			for range 3 {
				busy()
				if err := b.s.Close(); err != nil {
					t.Fatal(err)
				}
				busy()
				b.open()
				busy()
				var unrecovered []error
				again := contract.New(contract.Config{Forwarder: b.s, Recovered: func(_ *farev1.SnapshotResponse, refused []error) { unrecovered = refused }})
				if _, err := again.Hello(t.Context(), &farev1.HelloRequest{Forwarding: forwarding}); err != nil || len(unrecovered) > 0 {
					t.Fatal(err, unrecovered)
				}
				if diff := cmp.Diff(before, snapshot(again), protocmp.Transform()); diff != "" {
					t.Fatalf("recovered (-before +after):\n%s", diff)
				}
				busy()
				if err := b.s.Settle(); err != nil {
					t.Fatal(err)
				}
				if found := b.s.Recover(); found != nil {
					t.Errorf("recovered from what is settled: %v", found)
				}
			}
			busy()
			close(quit)
			if err := <-sent; err != nil {
				t.Fatal(err)
			}
			all := 0
			for _, f := range flows {
				all += f.sent
			}
			b.arrived(all)
			i := 0
			for _, g := range gpus {
				v := g.group(1)
				for slot, port := range g.ports {
					own := b.at(v.Slots[slot].Device, port)
					if v.Slots[slot].Device == "p2.1" {
						if own != 0 {
							t.Errorf("%v, slot %d: %d packets at p2.1, which is down", g.loopback, slot, own)
						}
					} else if own != flows[i].sent {
						t.Errorf("%v, slot %d: %d of %d packets at %s", g.loopback, slot, own, flows[i].sent, v.Slots[slot].Device)
					}
					i++
				}
			}
		})
	}
}
