package bpf

import (
	"fmt"
	"math"
	"net/netip"
	"testing"

	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
)

// gpu is an IPv4 or IPv6 loopback with separate ports: one sub-port of each plane.
type gpu struct {
	loopback netip.Prefix
	sub      int
	weights  []uint32 // by plane
	ports    []uint32
}

// newGPUs returns two GPUs of the bed's family, the second on sub-ports 1, with different vectors.
func newGPUs(b *bed) [2]gpu {
	second := netip.MustParsePrefix("10.255.0.11/32")
	if b.family.source.Addr().Is6() {
		second = netip.MustParsePrefix("fd00:255::11/128")
	}
	b.Server.Addr("lo", second.String())
	return [2]gpu{
		{b.family.source, 0, []uint32{1, 1, 0, 1}, sequence(6, 700, 10127)},
		{second, 1, []uint32{3, 1, 2, 2}, sequence(8, 900, 10127)},
	}
}

func (g gpu) device(plane int) string { return testbed.Device(plane, g.sub) }

func (g gpu) devices() (all []string) {
	for p := range testPlanes {
		all = append(all, g.device(p))
	}
	return all
}

// group returns the GPU's group, with its slots assigned to the planes that have a weight.
func (g gpu) group(id uint32) *farev1.Vector {
	v := &farev1.Vector{Id: id, Source: g.loopback.String()}
	for p, w := range g.weights {
		if w > 0 {
			v.Members = append(v.Members, &farev1.VectorMember{Plane: fmt.Sprintf("p%d", p), Device: g.device(p), Weight: w})
		}
	}
	for slot := range g.ports {
		m := v.Members[slot%len(v.Members)]
		v.Slots = append(v.Slots, &farev1.VectorSlot{Slot: uint32(slot), Plane: m.Plane, Device: m.Device, SharePpb: 1e9 / uint32(len(g.ports))})
	}
	v.Slots[0].SharePpb += 1e9 % uint32(len(g.ports))
	v.Slots[1].DrainBeforeMove = true
	return v
}

func (g gpu) set(id uint32) contract.Change {
	return contract.Change{Kind: contract.GroupChange, Group: id, Source: g.loopback, After: g.group(id)}
}

func (g gpu) to(destination netip.Prefix, id uint32) contract.Change {
	c := setDestination(destination, id, g.loopback, g.ports)
	c.Source = g.loopback
	return c
}

// forwardingOf returns the bed's forwarding with the GPUs as source groups.
func (b *bed) forwardingOf(mode farev1.Mode, gpus ...gpu) *farev1.Forwarding {
	f := b.forwarding(mode)
	f.Loopbacks = nil
	for _, g := range gpus {
		f.Loopbacks = append(f.Loopbacks, g.loopback.String())
		f.SourceGroups = append(f.SourceGroups, &farev1.SourceGroup{Loopbacks: []string{g.loopback.String()}, Devices: g.devices()})
	}
	return f
}

// sentFrom sends n packets of a flow and returns the number of packets by receiving device.
func (b *bed) sentFrom(g gpu, port uint32, n int) map[string]int {
	b.Helper()
	return b.sentTo(g, b.family.destination.Addr(), port, n)
}

func (b *bed) sentTo(g gpu, to netip.Addr, port uint32, n int) map[string]int {
	b.Helper()
	had, before := map[string]int{}, b.total()
	for dev := range b.taps {
		had[dev] = b.at(dev, port)
	}
	f := b.flowFrom(g.loopback.Addr(), to, port)
	if err := f.send(n); err != nil {
		b.Fatal(err)
	}
	f.Close()
	b.arrived(before + n)
	got := map[string]int{}
	for dev := range b.taps {
		if more := b.at(dev, port) - had[dev]; more > 0 {
			got[dev] = more
		}
	}
	return got
}

// leaveBySlot fails unless each slot's packets leave on its sub-port.
func (b *bed) leaveBySlot(gpus ...gpu) {
	b.Helper()
	for _, g := range gpus {
		v := g.group(1)
		for slot, port := range g.ports {
			if got := b.sentFrom(g, port, 3); got[v.Slots[slot].Device] != 3 {
				b.Errorf("%v, slot %d: 3 packets at %v, want %s", g.loopback, slot, got, v.Slots[slot].Device)
			}
		}
	}
}

// leave calls leaveBySlot, and fails unless flows without a slot leave on the GPU's sub-ports only, by weight.
func (b *bed) leave(gpus ...gpu) {
	b.Helper()
	b.leaveBySlot(gpus...)
	for _, g := range gpus {
		const flows, first = 400, 2000
		before, had := b.total(), b.strays(first, flows)
		for i := range flows {
			f := b.flowFrom(g.loopback.Addr(), b.family.destination.Addr(), uint32(first+i))
			if err := f.send(1); err != nil {
				b.Fatal(err)
			}
			f.Close()
		}
		b.arrived(before + flows)
		all, sum := b.strays(first, flows), uint32(0)
		for _, w := range g.weights {
			sum += w
		}
		for p, w := range g.weights {
			// Six standard deviations of a binomial distribution.
			share, dev := float64(w)/float64(sum), g.device(p)
			if n := all[dev] - had[dev]; math.Abs(float64(n)-flows*share) > 6*math.Sqrt(flows*share*(1-share)) {
				b.Errorf("%v: %d of %d flows at %s, want a share of %.2f", g.loopback, n, flows, dev, share)
			}
			delete(all, dev)
		}
		for dev, n := range all {
			if n != had[dev] {
				b.Errorf("%v: %d packets at %s, which is another GPU's", g.loopback, n-had[dev], dev)
			}
		}
	}
}

// strays counts the packets of n ports, by device.
func (b *bed) strays(first, n int) map[string]int {
	all := map[string]int{}
	for dev := range b.taps {
		for port := first; port < first+n; port++ {
			all[dev] += b.at(dev, uint32(port))
		}
	}
	return all
}

// TestSourceGroups checks that packets to one destination from two GPUs leave on the sub-ports of their own GPU, by its
// vectors, pinned or not, also after a sub-port of one GPU fails, after a restart, and after changes of the source
// groups.
func TestSourceGroups(t *testing.T) {
	gate.WithoutRaceDetector(t, "drives the kernel in one goroutine")
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			if f.name != families[0].name {
				gate.Slow(t, gate.Kernel, "another address family")
			}
			b := newBed(t, f)
			gpus := newGPUs(b)
			b.Resolve()
			b.open()
			forwarding := b.forwardingOf(farev1.Mode_MODE_PER_FLOW, gpus[:]...)
			set := func(f *farev1.Forwarding) {
				t.Helper()
				if err := b.s.SetForwarding(f); err != nil {
					t.Fatal(err)
				}
			}
			set(forwarding)
			state := []contract.Change{gpus[0].set(1), gpus[1].set(2), gpus[0].to(f.destination, 1), gpus[1].to(f.destination, 2)}
			b.commit(state...)
			b.leave(gpus[:]...)
			// A sub-port of the second GPU fails: its other sub-ports carry the slots, and the first GPU is not
			// affected.
			b.commit(contract.Change{Kind: contract.SubPortChange, Device: "p0.1"})
			for slot, port := range gpus[1].ports {
				for dev := range b.sentFrom(gpus[1], port, 2) {
					if dev == "p0.1" || dev[len(dev)-1] != '1' {
						t.Errorf("p0.1 down: slot %d of the second GPU at %s", slot, dev)
					}
				}
			}
			b.leave(gpus[0])
			b.commit(contract.Change{Kind: contract.SubPortChange, Device: "p0.1", Up: true})
			// A restart, before and after the acknowledged state is committed.
			if err := b.s.Close(); err != nil {
				t.Fatal(err)
			}
			b.open()
			b.leaveBySlot(gpus[:]...)
			set(forwarding)
			b.leaveBySlot(gpus[:]...)
			b.commit(state...)
			if err := b.s.Settle(); err != nil {
				t.Fatal(err)
			}
			b.leave(gpus[:]...)
			// The same source groups in the other order and with other members: the programmed state is matched by
			// name.
			swapped := b.forwardingOf(farev1.Mode_MODE_PER_FLOW, gpus[1], gpus[0])
			set(swapped)
			b.leave(gpus[:]...)
			b.commit(contract.Change{Kind: contract.DestinationChange, Source: gpus[1].loopback, Prefix: f.destination, From: state[3].To})
			b.leave(gpus[0])
			lost := b.drops()[DropDestination]
			flow := b.flowFrom(gpus[1].loopback.Addr(), f.destination.Addr(), gpus[1].ports[0])
			_ = flow.send(3) // the socket may return the drop as an error
			netnstest.Eventually(t, patience, func() error {
				if n := b.drops()[DropDestination] - lost; n != 3 {
					return fmt.Errorf("the second GPU's destination is deleted: %d packets dropped for it, want 3", n)
				}
				return nil
			})
		})
	}
}

// TestReplacedSourceGroups replaces the source groups by a single one, and back: no packet is lost, and each pair takes
// the new slots when its new destination is set. The earlier entries are removed with their destinations.
func TestReplacedSourceGroups(t *testing.T) {
	gate.WithoutRaceDetector(t, "drives the kernel in one goroutine")
	f := families[0]
	b := newBed(t, f)
	gpus := newGPUs(b)
	b.Resolve()
	b.open()
	forwarding := b.forwardingOf(farev1.Mode_MODE_PER_FLOW, gpus[:]...)
	single := proto.CloneOf(forwarding)
	single.SourceGroups = nil
	set := func(f *farev1.Forwarding) {
		t.Helper()
		if err := b.s.SetForwarding(f); err != nil {
			t.Fatal(err)
		}
	}
	state := []contract.Change{gpus[0].set(1), gpus[1].set(2), gpus[0].to(f.destination, 1), gpus[1].to(f.destination, 2)}
	gone := func(changes ...contract.Change) (all []contract.Change) {
		for i := range changes {
			all = append(all, changes[len(changes)-1-i].Inverse())
		}
		return all
	}
	holds := func(groups, destinations int) {
		t.Helper()
		stats, err := b.s.Stats()
		if err != nil || stats.Groups != groups || stats.Destinations != destinations || stats.Pairs != 2 {
			t.Errorf("%d groups, %d destinations, %d pairs (%v); want %d, %d, 2", stats.Groups, stats.Destinations, stats.Pairs, err, groups, destinations)
		}
	}
	whole := testGroup(3, 8, false, 1, 1, 1, 1)
	one := []contract.Change{setGroup(whole), setDestination(f.destination, 3, gpus[0].loopback, gpus[0].ports)}
	one[1].To.Pairs = append(one[1].To.Pairs, gpus[1].to(f.destination, 2).To.Pairs...)
	ofWhole := func() {
		t.Helper()
		for _, g := range gpus {
			for slot, port := range g.ports {
				if got := b.sentFrom(g, port, 3); got[whole.Slots[slot].Device] != 3 {
					t.Errorf("%v, slot %d: 3 packets at %v, want %s", g.loopback, slot, got, whole.Slots[slot].Device)
				}
			}
		}
	}

	set(forwarding)
	b.commit(state...)
	b.leave(gpus[:]...)
	set(single)
	b.leave(gpus[:]...)
	b.commit(one...)
	ofWhole()
	holds(3, 3)
	b.commit(gone(state...)...)
	ofWhole()
	holds(1, 1)

	set(forwarding)
	ofWhole()
	b.commit(state...)
	b.leaveBySlot(gpus[:]...)
	holds(3, 3)
	b.commit(gone(one...)...)
	b.leave(gpus[:]...)
	holds(2, 2)
	if lost := b.drops(); len(lost) > 0 {
		t.Errorf("dropped: %v", lost)
	}
}

// TestSourceGroupsSpray checks that in per-packet mode a slot is sprayed over the sub-ports of its plane that serve its
// GPU, and a flow without a slot over all sub-ports of the GPU.
func TestSourceGroupsSpray(t *testing.T) {
	gate.WithoutRaceDetector(t, "drives the kernel in one goroutine")
	b := newBed(t, families[0])
	gpus := newGPUs(b)
	b.Resolve()
	b.open()
	// The first GPU has both sub-ports of plane 0 and nothing else, the second all except p0.0.
	f := b.forwardingOf(farev1.Mode_MODE_PER_PACKET, gpus[:]...)
	f.SourceGroups[0].Devices = []string{"p0.0", "p0.1"}
	f.SourceGroups[1].Devices = []string{"p0.1", "p1.0", "p1.1", "p2.0", "p2.1", "p3.0", "p3.1"}
	if err := b.s.SetForwarding(f); err != nil {
		t.Fatal(err)
	}
	first, second := testGroup(1, 2, true, 1), testGroup(2, 4, true, 1, 1, 1, 1)
	first.Source, second.Source = gpus[0].loopback.String(), gpus[1].loopback.String()
	first.Slots[1].Plane = "p0"
	first.Members[0].Weight = 3
	second.Members = second.Members[1:]
	b.commit(contract.Change{Kind: contract.GroupChange, Group: 1, Source: gpus[0].loopback, After: first},
		contract.Change{Kind: contract.GroupChange, Group: 2, Source: gpus[1].loopback, After: second},
		gpus[0].to(b.family.destination, 1), gpus[1].to(b.family.destination, 2))
	near := func(what string, got map[string]int, n int, want map[string]float64) {
		t.Helper()
		for dev, share := range want {
			if math.Abs(float64(got[dev])/float64(n)-share) > 0.01 {
				t.Errorf("%s: %v, want %.3f of %d at %s", what, got, share, n, dev)
			}
			delete(got, dev)
		}
		if len(got) > 0 {
			t.Errorf("%s: also at %v", what, got)
		}
	}
	const n = 20000
	near("a slot of the first", b.sentFrom(gpus[0], gpus[0].ports[1], n), n, map[string]float64{"p0.0": 0.75, "p0.1": 0.25})
	near("no slot of the first", b.sentFrom(gpus[0], 3000, n), n, map[string]float64{"p0.0": 0.75, "p0.1": 0.25})
	near("a slot of the second in plane 0", b.sentFrom(gpus[1], gpus[1].ports[0], n), n, map[string]float64{"p0.1": 1})
	near("a slot of the second in plane 1", b.sentFrom(gpus[1], gpus[1].ports[1], n), n, map[string]float64{"p1.0": 0.5, "p1.1": 0.5})
	const each = 1.0 / 7
	near("no slot of the second", b.sentFrom(gpus[1], 3001, n), n,
		map[string]float64{"p0.1": each, "p1.0": each, "p1.1": each, "p2.0": each, "p2.1": each, "p3.0": each, "p3.1": each})
}
