package packets

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
	"github.com/fared/fared/wecmp"
)

// drivers are the data planes under test.
var drivers = []string{"linux", "bpf"}

// each runs a test with every driver and address family.
func each(t *testing.T, test func(t *testing.T, driver string, f family)) {
	for _, driver := range drivers {
		for _, f := range families {
			t.Run(driver+" "+f.name, func(t *testing.T) { test(t, driver, f) })
		}
	}
}

// background sends over flows without a pause, until stop.
type background struct {
	cancel context.CancelFunc
	done   sync.WaitGroup
	err    error
}

func send(ctx context.Context, flows []*flow) *background {
	ctx, cancel := context.WithCancel(ctx)
	bg := &background{cancel: cancel}
	bg.done.Go(func() {
		for ctx.Err() == nil {
			for _, f := range flows {
				if err := f.send(batchSize / 4); err != nil {
					bg.err = err
					return
				}
			}
		}
	})
	return bg
}

func (bg *background) stop(t *testing.T) {
	t.Helper()
	bg.cancel()
	bg.done.Wait()
	if bg.err != nil {
		t.Fatal(bg.err)
	}
}

// busy waits until each flow has sent n more packets, so that traffic was present while nothing was to change.
func busy(t *testing.T, flows []*flow, n uint64) {
	t.Helper()
	from := make([]uint64, len(flows))
	for i, f := range flows {
		from[i] = f.sent.Load()
	}
	netnstest.Eventually(t, time.Minute, func() error {
		for i, f := range flows {
			if now := f.sent.Load(); now < from[i]+n {
				return fmt.Errorf("%s has sent %d packets, not %d", f.socket.LocalAddr(), now-from[i], n)
			}
		}
		return nil
	})
}

// sentBy returns the number of packets sent by flows.
func sentBy(flows []*flow) (n uint64) {
	for _, f := range flows {
		n += f.sent.Load()
	}
	return n
}

// settled waits until as many packets have arrived as were sent, and returns them.
func (b *bed) settled(before arrivals, sent uint64) arrivals {
	b.t.Helper()
	return b.settledAfter(before, sent, 0)
}

// settledAfter is settled after a number of weight changes during the traffic. With IPv6 routes to nexthop groups, when
// the kernel replaces a group, it discards packets whose routing is in progress: it releases the routes that its CPUs
// have cached for all members of the old group (net/ipv4/nexthop.c, nh_rt_cache_flush). That affects at most one packet
// per CPU and change. A busy machine discards packets before they reach a leaf, and counts them (backlogDrops). No
// other loss is accepted.
func (b *bed) settledAfter(before arrivals, sent uint64, changes int) arrivals {
	b.t.Helper()
	slack := backlogDrops(b.t) - b.drops
	if b.driver == "linux" && !b.family.source.Addr().Is4() {
		slack = uint64(changes * runtime.NumCPU())
	}
	var a arrivals
	var last uint64
	still := 0
	netnstest.Eventually(b.t, time.Minute, func() error {
		a = b.arrivals().since(before)
		n := a.total()
		if n == last {
			still++
		} else {
			last, still = n, 0
		}
		if n == sent || n < sent && n+slack >= sent && still > 20 {
			return nil
		}
		return fmt.Errorf("%d packets sent, %d arrived", sent, n)
	})
	if last < sent {
		b.t.Logf("the kernel discarded %d of %d packets: that it was routing while it replaced a group, %d times, or that found a full queue", sent-last, sent, changes)
	}
	return a
}

// backlogDrops returns the number of packets that the kernel has dropped on the way from one device to the next,
// because the processor's queue was full (net.core.netdev_max_backlog). It is that of the whole machine: the second
// column of /proc/net/softnet_stat.
func backlogDrops(t testing.TB) (n uint64) {
	t.Helper()
	text, err := os.ReadFile("/proc/net/softnet_stat")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		dropped, err := strconv.ParseUint(strings.Fields(line)[1], 16, 32)
		if err != nil {
			t.Fatal(err)
		}
		n += dropped
	}
	return n
}

// strays counts the packets of slots that arrived elsewhere than at the slot's sub-port.
func strays(a arrivals, ports []uint16, places []wecmp.Place, only func(slot int) bool) (n uint64, where string) {
	for p := range planes {
		for s := range subPorts {
			for slot, port := range ports {
				at := wecmp.Place{Plane: p, SubPort: s}
				if c := a[p][s][port]; c > 0 && at != places[slot] && only(slot) {
					n += c
					where = fmt.Sprintf("slot %d, port %d, of p%d.%d arrived at %s", slot, port, places[slot].Plane, places[slot].SubPort, testbed.Device(p, s))
				}
			}
		}
	}
	return n, where
}

func all(int) bool { return true }

// draftWeights lists the draft's weights in order: healthy, half a Y-cable failed at the receiver, a plane failed, and
// back.
var draftWeights = [][]uint64{{2, 2, 2, 2}, {2, 2, 1, 2}, {1, 1, 0, 1}, {2, 2, 2, 2}}

// TestSlotsLand stripes a million packets (over IPv6, and in the gate, a tenth) over 64 slots by share and checks that
// each leaf port receives exactly the packets sent for its slots, and no other packet arrives anywhere. While the
// weights change, the slots of planes that keep their weight continue to send, and none of their packets moves either
// (F4).
func TestSlotsLand(t *testing.T) {
	gate.Needed(t, "each packet of a slot arrives at its sub-port, over changes of weights, through the agent")
	each(t, func(t *testing.T, driver string, f family) {
		if kind := driver + " " + f.name; kind != "bpf v4" && kind != "linux v6" {
			gate.Slow(t, gate.Packets, "another driver or family")
		}
		b := newBed(t, driver, f)
		b.start()
		b.Resolve()
		c := b.connect(farev1.Mode_MODE_PER_FLOW, wecmp.Reweight, 3)
		c.weigh(draftWeights[0]...)
		dst := c.dst[1]
		ports, places := c.ports(dst), c.view().Places()
		flows := b.flows(t, dst, ports)
		var unaffected []*flow
		for slot, f := range flows {
			if places[slot].Plane != 2 {
				unaffected = append(unaffected, f)
			}
		}
		packets := uint64(100_000)
		if f.name == families[0].name {
			packets = uint64(gate.Count(t, gate.Packets, 100_000, 1_000_000)) // other families are the same with other headers
		}
		start := b.arrivals()
		for step, weights := range draftWeights {
			bg := send(t.Context(), unaffected)
			busy(t, unaffected, 200)
			c.weigh(weights...)
			busy(t, unaffected, 200)
			bg.stop(t)
			for slot, port := range c.ports(dst) {
				if port != ports[slot] || c.view().Places()[slot] != places[slot] {
					t.Fatalf("%s: slot %d is at %v with port %d, was at %v with port %d", ratio(weights), slot, c.view().Places()[slot], port, places[slot], ports[slot])
				}
			}
			b.atRest()
			b.settledAfter(start, sentBy(flows), 2*(step+1))

			var parts []uint64
			var upTo, given uint64 // sums of the shares and of the parts: each part is the share's, up to one packet
			for _, s := range c.view().Slots {
				upTo += uint64(s.SharePPB)
				parts = append(parts, upTo*(packets/uint64(len(draftWeights)))/wecmp.Parts-given)
				given += parts[len(parts)-1]
			}
			before := b.arrivals()
			stripe(t, flows, parts)
			got := b.settled(before, packets/uint64(len(draftWeights)))
			lost := packets/uint64(len(draftWeights)) - got.total()
			var perPlane [planes]uint64
			for slot, port := range ports {
				at := places[slot]
				if n := got[at.Plane][at.SubPort][port]; n > parts[slot] || n+lost < parts[slot] {
					t.Errorf("%s: slot %d: %d of %d packets at %s", ratio(weights), slot, n, parts[slot], testbed.Device(at.Plane, at.SubPort))
				}
				perPlane[at.Plane] += got[at.Plane][at.SubPort][port]
			}
			t.Logf("step %d, %s: %v packets a plane", step, ratio(weights), perPlane)
		}
		if n, where := strays(b.arrivals().since(start), ports, places, all); n > 0 {
			t.Errorf("%d strays of %d packets, the last: %s", n, sentBy(flows), where)
		}
	})
}

// TestStorm changes weights as fast as they can be programmed, hundreds of times, and sets sub-ports down and up in
// between. The slots of the planes whose weight only shrinks and grows send all the time: none of their packets may be
// lost or arrive elsewhere.
func TestStorm(t *testing.T) {
	gate.Slow(t, gate.Packets, "300 changes of weights under traffic, for each driver and family")
	each(t, func(t *testing.T, driver string, f family) {
		b := newBed(t, driver, f)
		b.start()
		b.Resolve()
		c := b.connect(farev1.Mode_MODE_PER_FLOW, wecmp.Reweight, 3)
		c.weigh(draftWeights[0]...)
		dst := c.dst[2]
		ports, places := c.ports(dst), c.view().Places()
		flows := b.flows(t, dst, ports)
		var steady []*flow
		for slot, f := range flows {
			if places[slot].Plane != 2 {
				steady = append(steady, f)
			}
		}
		before := b.arrivals()
		bg := send(t.Context(), steady)
		const changes = 300
		random := rand.New(rand.NewPCG(1, 2))
		for range changes {
			if random.IntN(4) == 0 {
				c.subPort(2, random.IntN(subPorts), random.IntN(2) == 0)
			}
			c.weigh(1+random.Uint64N(9), 1+random.Uint64N(9), random.Uint64N(9), 1+random.Uint64N(9))
		}
		bg.stop(t)
		got := b.settledAfter(before, sentBy(steady), changes)
		if n, where := strays(got, ports, places, all); n > 0 {
			t.Errorf("%d strays of %d packets, the last: %s", n, sentBy(steady), where)
		}
		t.Logf("%d packets through %d changes", sentBy(steady), changes)
	})
}

// TestCableCut takes the carrier from a sub-port, and later from the other half of the plane too; the kernel moves the
// flows before the agent receives new weights. The slots of all other sub-ports continue to send, and lose and move
// nothing. When the carrier is back, all slots are at their original sub-ports.
func TestCableCut(t *testing.T) {
	gate.Needed(t, "a failed link moves no packet of another one")
	each(t, func(t *testing.T, driver string, f family) {
		if driver != "linux" || f.name != families[0].name {
			gate.Slow(t, gate.Packets, "another driver or family")
		}
		b := newBed(t, driver, f)
		b.start()
		b.Resolve()
		c := b.connect(farev1.Mode_MODE_PER_FLOW, wecmp.Reweight, 3)
		c.weigh(draftWeights[0]...)
		dst := c.dst[0]
		ports, places := c.ports(dst), c.view().Places()
		flows := b.flows(t, dst, ports)
		var others, cut []*flow
		for slot, f := range flows {
			if places[slot].Plane == 2 {
				cut = append(cut, f)
			} else {
				others = append(others, f)
			}
		}
		before := b.arrivals()
		bg := send(t.Context(), others)
		for _, reported := range []bool{true, false} {
			for s := range subPorts {
				b.Leaves[2].IP("link", "set", testbed.LeafPort(s), "down")
				busy(t, others, 400)
				if reported {
					c.subPort(2, s, false)
					c.weigh(2, 2, uint64(1-s), 2)
					busy(t, others, 400)
				}
			}
			for s := range subPorts {
				b.Leaves[2].IP("link", "set", testbed.LeafPort(s), "up")
				// The leaf's IPv6 address was removed with the carrier, and would be tentative after its return.
				b.Leaves[2].IP("addr", "replace", fmt.Sprintf("fd00:16:2:%d::2/64", s), "dev", testbed.LeafPort(s), "nodad")
				busy(t, others, 400)
				if reported {
					c.subPort(2, s, true)
					c.weigh(2, 2, uint64(1+s), 2)
					busy(t, others, 400)
				}
			}
		}
		bg.stop(t)
		got := b.settledAfter(before, sentBy(others), 24)
		if n, where := strays(got, ports, places, all); n > 0 {
			t.Errorf("%d strays of %d packets, the last: %s", n, sentBy(others), where)
		}
		// Everything is as at the start, also for the failed plane. The kernel needs a moment after the carrier
		// returns; packets are counted only after that.
		b.Resolve()
		netnstest.Eventually(t, time.Minute, func() error {
			before := b.arrivals()
			from := sentBy(cut)
			for _, f := range cut {
				if err := f.send(10); err != nil {
					return err
				}
			}
			got := b.settled(before, sentBy(cut)-from)
			if n, where := strays(got, ports, places, all); n > 0 {
				return fmt.Errorf("%d strays, the last: %s", n, where)
			}
			return nil
		})
	})
}

// TestSubPortDown lets the control plane set down a sub-port that has a carrier (a failed session, a drain). Once that
// is in effect, no packet leaves through it, and the packets of other sub-ports do not move.
func TestSubPortDown(t *testing.T) {
	gate.Slow(t, gate.Packets, "a sub-port that is set down under traffic, for each driver and family")
	each(t, func(t *testing.T, driver string, f family) {
		b := newBed(t, driver, f)
		b.start()
		b.Resolve()
		c := b.connect(farev1.Mode_MODE_PER_FLOW, wecmp.Reweight, 2)
		c.weigh(draftWeights[0]...)
		dst := c.dst[0]
		ports, places := c.ports(dst), c.view().Places()
		flows := b.flows(t, dst, ports)
		before := b.arrivals()
		bg := send(t.Context(), flows)
		down := func(slot int) bool { return places[slot] == wecmp.Place{Plane: 1, SubPort: 1} }
		other := func(slot int) bool { return !down(slot) }
		for range 5 {
			busy(t, flows, 200)
			c.subPort(1, 1, false)
			busy(t, flows, 200) // a packet may be between the routing decision and the wire
			drained := b.arrivals()
			busy(t, flows, 200)
			silent := b.arrivals().since(drained)
			for slot, port := range ports {
				if n := silent[1][1][port]; n > 0 {
					t.Errorf("%d packets of slot %d left over p1.1 while it was down", n, slot)
				}
			}
			c.subPort(1, 1, true)
		}
		bg.stop(t)
		got := b.settledAfter(before, sentBy(flows), 10)
		if n, where := strays(got, ports, places, other); n > 0 {
			t.Errorf("%d strays of %d packets, the last: %s", n, sentBy(flows), where)
		}
		moved, _ := strays(got, ports, places, down)
		if moved == 0 {
			t.Error("nothing of the sub-port that was down was carried by others: this test has lost its subject")
		}
	})
}

// TestRemap checks that under remap the slots of a failed plane move to other sub-ports with other source ports, the
// remaining slots keep port and leaf, and all are at their original sub-ports in the end.
func TestRemap(t *testing.T) {
	gate.Slow(t, gate.Packets, "failures under remap, for each driver and family")
	each(t, func(t *testing.T, driver string, f family) {
		b := newBed(t, driver, f)
		b.start()
		b.Resolve()
		c := b.connect(farev1.Mode_MODE_PER_FLOW, wecmp.Remap, 2)
		c.weigh(draftWeights[0]...)
		dst := c.dst[0]
		home := c.ports(dst)
		for _, weights := range draftWeights {
			c.weigh(weights...)
			b.atRest()
			ports, places := c.ports(dst), c.view().Places()
			flows := b.flows(t, dst, ports)
			before := b.arrivals()
			for _, f := range flows {
				if err := f.send(500); err != nil {
					t.Fatal(err)
				}
			}
			got := b.settled(before, sentBy(flows))
			if n, where := strays(got, ports, places, all); n > 0 {
				t.Errorf("%s: %d strays of %d packets, the last: %s", ratio(weights), n, sentBy(flows), where)
			}
			for _, f := range flows {
				f.socket.Close()
			}
		}
		for slot, port := range c.ports(dst) {
			if port != home[slot] {
				t.Errorf("slot %d came home with port %d, left with %d", slot, port, home[slot])
			}
		}
	})
}
