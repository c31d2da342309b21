package linux

import (
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/rtnl"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// marked counts the marked groups in the kernel and their buckets.
func (h *host) marked() (groups, buckets int) {
	h.t.Helper()
	all := h.objects()
	for _, n := range all {
		if len(n.Members) > 0 && n.Protocol == DefaultProtocol {
			groups++
			buckets = int(n.Buckets)
		}
	}
	return groups, buckets
}

// refuse makes the kernel refuse messages of the Driver whose description has one of the prefixes, up to a number of
// times. refused returns the number of refusals so far.
func refuse(d *Driver, times int, begins ...string) (refused func() int) {
	n := 0
	d.mu.Lock()
	defer d.mu.Unlock()
	d.kernel.conn.Refuse(func(what string) unix.Errno {
		for _, b := range begins {
			if strings.HasPrefix(what, b) && strings.Contains(what, "group") == strings.HasSuffix(b, "nexthop ") && n < times {
				n++
				return unix.EINVAL
			}
		}
		return 0
	})
	return func() int {
		d.mu.Lock()
		defer d.mu.Unlock()
		return n
	}
}

// TestUnusedGroupsGo checks that the kernel has exactly one group for each weight vector and family that a destination
// uses.
func TestUnusedGroupsGo(t *testing.T) {
	h := newHost(t, 3)
	h.config.inPlace = true
	d, c := h.start()
	s := program(t, c.server)
	s.do(h.group(1, 1, 1, 1), h.group(2, 1, 2, 3), h.group(3, 1))
	for _, step := range []struct {
		op   *farev1.Operation
		want int
	}{
		{destination(target4(0), 1), 1}, {destination(target4(1), 1), 1}, {destination(target6(0), 1), 2}, {destination(target4(2), 2), 3},
		{destination(target4(2), 3), 3}, {deleteDestination(target4(0)), 3}, {deleteDestination(target4(1)), 2},
		{destination(target4(0), 1), 3}, {deleteDestination(target4(0)), 2}, {deleteDestination(target6(0)), 1},
		{deleteGroupOp(1), 1}, {deleteDestination(target4(2)), 0},
	} {
		s.do(step.op)
		if got, _ := h.marked(); got != step.want {
			t.Errorf("after %v the kernel has %d groups, want %d", step.op, got, step.want)
		}
		h.counted(d)
	}
}

// TestNothingRejectsForEver checks that an IPv6 route that was set while its group had no way out carries packets as
// soon as the group has one, whether the group was created so, emptied, lost its links, was restored after a restart or
// changed by another program.
func TestNothingRejectsForEver(t *testing.T) {
	h := newHost(t, 2)
	h.config.AuditInterval = time.Hour
	d, c := h.start()
	s := program(t, c.server)
	e := h.tap()
	carries := func(what string, to ...string) {
		t.Helper()
		netnstest.Eventually(t, time.Minute, func() error {
			for _, to := range to {
				if got := e.send("fd00:255::1", to, 64); got["p0"]+got["p1"] < 63 {
					return fmt.Errorf("%s: packets to %s: %v", what, to, got)
				}
			}
			return nil
		})
	}
	links := func(state string) {
		for _, device := range []string{"p0", "p1"} {
			h.leaf.IP("link", "set", device, state)
		}
	}
	s.do(h.group(1), destination(target6(0), 1))
	s.do(h.group(1, 1, 1))
	carries("made without members", target6(0))
	s.do(h.group(1))
	s.do(destination(target6(1), 1))
	s.do(h.group(1, 0, 1))
	carries("emptied, and another route set", target6(0), target6(1))
	links("down")
	h.wants(target6(0), map[string]int{"blackhole": testBuckets})
	s.do(destination(target6(2), 1))
	links("up")
	carries("no links", target6(0), target6(1), target6(2))
	links("down")
	h.wants(target6(0), map[string]int{"blackhole": testBuckets})
	journal := c.snapshot()
	crash(t, d)
	d, c = h.restart(journal)
	s = program(t, c.server)
	links("up")
	carries("restarted without links", target6(0), target6(1), target6(2))
	// Another program leaves only the dropping member in the group, and then sets a route.
	d.mu.Lock()
	id, hole := d.state.have.groups[groupKey{1, v6}].id, d.state.have.drop[v6].ids[0]
	h.IP("nexthop", "replace", "id", fmt.Sprint(id), "group", fmt.Sprint(hole), "type", "resilient", "proto", "179")
	h.IP("route", "replace", target6(3), "nhid", fmt.Sprint(id), "metric", "20", "proto", "179")
	h.IP("route", "replace", target6(0), "nhid", fmt.Sprint(id), "metric", "20", "proto", "179")
	d.mu.Unlock()
	carries("tampered with", target6(0), target6(1))
	s.do(destination(target6(3), 1))
	carries("a route that was in the way", target6(3))
}

// TestAnotherNumberOfBuckets checks that a restart or a Hello with a different number of buckets replaces every group
// without loss.
func TestAnotherNumberOfBuckets(t *testing.T) {
	h := newHost(t, 4)
	d, c := h.start()
	s := program(t, c.server)
	s.do(h.group(1, 1, 1, 2, 4), destination(target4(0), 1), destination(target6(0), 1))
	journal := c.snapshot()
	e := h.tap()
	split := map[string]float64{"p0": 1, "p1": 1, "p2": 2, "p3": 4}
	check := func(want int) {
		t.Helper()
		h.counted(d)
		if groups, buckets := h.marked(); groups != 2 || buckets != want {
			t.Errorf("%d groups of %d buckets, want 2 of %d", groups, buckets, want)
		}
		for to, source := range map[string]string{target4(0): "10.255.0.1", target6(0): "fd00:255::1"} {
			if err := e.split(source, to, split); err != nil {
				t.Error(err)
			}
		}
	}
	check(testBuckets)
	for _, buckets := range []uint16{4096, 0} {
		crash(t, d)
		h.config.Buckets = buckets
		d, c = h.restart(journal)
		want := int(buckets)
		if want == 0 {
			want = 4 * DefaultBuckets
		}
		check(want)
	}
	// A Hello with fewer sub-ports, and then with all of them.
	fewer := proto.CloneOf(h.forwarding)
	fewer.Planes = fewer.Planes[:3]
	split = map[string]float64{"p0": 1, "p1": 1, "p2": 2}
	c.hello(fewer)
	check(3 * DefaultBuckets)
	split["p3"] = 4
	c.hello(h.forwarding)
	check(4 * DefaultBuckets)
	if got := c.hello(h.forwarding).Capabilities; got.FlowHash.GetBuckets() != 4*DefaultBuckets || got.MaxVectors != DefaultMemory/(32*4*DefaultBuckets*2) {
		t.Errorf("capabilities %v", got)
	}
}

// TestForeignIDsInTheWay checks that ids taken by another program after the read-back are skipped.
func TestForeignIDsInTheWay(t *testing.T) {
	h := newHost(t, 3)
	d, c := h.start()
	s := program(t, c.server)
	var lines []string
	for i := range 12 {
		if i%3 != 2 {
			lines = append(lines, fmt.Sprintf("nexthop add id %d blackhole proto 11", DefaultFirstID+i))
		}
	}
	batch(h.t, h.Namespace, lines)
	foreign := func() string {
		var text strings.Builder
		for line := range strings.Lines(h.IP("nexthop")) {
			if strings.Contains(line, "blackhole") && !strings.Contains(line, "proto 179") {
				text.WriteString(line)
			}
		}
		return text.String()
	}
	before := foreign()
	ops := []*farev1.Operation{h.group(1, 1, 1, 2)}
	for i := range 4 {
		ops = append(ops, destination(target4(i), 1), destination(target6(i), 1))
	}
	s.try(ops...)
	s.do(ops...) // a refusal concerns one moment only
	h.wants(target4(3), map[string]int{"p0": 256, "p1": 256, "p2": 512})
	h.wants(target6(3), map[string]int{"p0": 256, "p1": 256, "p2": 512})
	if err := d.Settle(); err != nil {
		t.Error(err)
	}
	d.audit()
	if after := foreign(); after != before || strings.Count(after, "\n") != len(lines) {
		t.Errorf("nexthops of another program\n%s\nbefore\n%s", after, before)
	}
}

// TestNexthopsInUseStay checks that a retired next hop stays while a group has it because the kernel refused the
// replacement.
func TestNexthopsInUseStay(t *testing.T) {
	h := newHost(t, 4)
	h.config.inPlace = true
	h.config.Logger = slog.New(slog.DiscardHandler)
	d, c := h.start()
	s := program(t, c.server)
	s.do(h.group(1, 1, 1, 1, 1), destination(target4(0), 1))
	before := h.state()
	fewer := proto.CloneOf(h.forwarding)
	fewer.Planes = fewer.Planes[:3]
	refused := refuse(d, 1<<30, "set nexthop ")
	c.hello(fewer)
	if refused() == 0 {
		t.Fatal("nothing was refused")
	}
	if d := diff(h.state(), before); d != "" {
		t.Errorf("the kernel refused another division, and\n%s", d)
	}
	d.mu.Lock()
	d.kernel.conn.Refuse(nil)
	d.mu.Unlock()
	h.wants(target4(0), map[string]int{"p0": 341, "p1": 342, "p2": 341})
	netnstest.Eventually(t, time.Minute, func() error {
		if text := h.IP("nexthop", "show", "dev", "p3"); text != "" {
			return fmt.Errorf("left of unwanted objects:\n%s", text)
		}
		return nil
	})
}

// TestRefusedOnce checks that a message refused once is retried immediately, and that background refusals are retried
// soon and reported.
func TestRefusedOnce(t *testing.T) {
	h := newHost(t, 4)
	h.config.Logger = slog.New(slog.DiscardHandler)
	h.config.AuditInterval = time.Hour
	d, c := h.start()
	var received reports
	d.Guard(received.report)
	s := program(t, c.server)
	s.do(h.group(1, 1, 1, 1, 1), h.group(2, 1, 2, 3, 4))
	for _, step := range []struct {
		begins string
		op     *farev1.Operation
	}{
		{"add nexthop ", destination(target4(0), 1)}, {"add route ", destination(target6(0), 1)}, {"set nexthop ", h.group(1, 1, 1, 2, 2)},
		{"set route ", destination(target4(0), 2)}, {"delete route ", deleteDestination(target6(0))},
	} {
		refused := refuse(d, 1, step.begins)
		s.do(step.op)
		if refused() != 1 {
			t.Errorf("%s: %d messages were refused", step.begins, refused())
		}
	}
	received.take()
	refused := refuse(d, 1<<30, "set nexthop ")
	h.leaf.IP("link", "set", "p1", "down")
	netnstest.Eventually(t, time.Minute, func() error {
		if all := received.take(); refused() == 0 || len(all) == 0 || all[len(all)-1].Intact {
			return fmt.Errorf("%d refused, reports %v; want one that is not intact", refused(), all)
		}
		return nil
	})
	d.mu.Lock()
	d.kernel.conn.Refuse(nil)
	d.mu.Unlock()
	received.settled(t)
	h.wants(target4(0), map[string]int{"p0": 128, "p2": 384, "p3": 512})

	refused = refuse(d, 1<<30, "add route ")
	h.IP("route", "del", target4(0))
	netnstest.Eventually(t, time.Minute, func() error {
		if refused() < tries {
			return fmt.Errorf("%d refused", refused())
		}
		return nil
	})
	d.mu.Lock()
	d.kernel.conn.Refuse(nil)
	d.mu.Unlock()
	received.settled(t)
	h.wants(target4(0), map[string]int{"p0": 128, "p2": 384, "p3": 512})
}

// TestRoutesAreSetAgain covers kernels that classify an IPv6 route by the first member of its group at that moment: a
// route set while that was the loopback rejects packets permanently. Every such route must be set again once its group
// has a way out, which the test observes with its own netlink listener.
func TestRoutesAreSetAgain(t *testing.T) {
	h := newHost(t, 2)
	h.config.AuditInterval = time.Hour
	h.config.Logger = slog.New(slog.DiscardHandler)
	d, c := h.start()
	s := program(t, c.server)
	var watch *rtnl.ObjectWatch
	h.Must(func() (err error) { watch, err = rtnl.WatchObjects(0, DefaultProtocol); return err })
	defer watch.Close()
	received := map[string]bool{}
	listen := func() {
		t.Helper()
		events, err := watch.Poll()
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range events {
			if e.Route != nil && !e.Gone && e.Route.Protocol == DefaultProtocol {
				received[e.Route.Prefix.String()] = true
			}
		}
	}
	again := func(what string, do func()) {
		t.Helper()
		listen()
		clear(received)
		do()
		netnstest.Eventually(t, time.Minute, func() error {
			if listen(); !received[target6(0)] {
				return fmt.Errorf("%s: the route was not set again", what)
			}
			return nil
		})
	}
	links := func(state string) {
		for _, device := range []string{"p0", "p1"} {
			h.leaf.IP("link", "set", device, state)
		}
	}
	dark := func() {
		links("down")
		h.wants(target6(0), map[string]int{"blackhole": testBuckets})
	}
	s.do(h.group(1), destination(target6(0), 1), destination(target4(0), 1))
	again("made without members", func() { s.do(h.group(1, 1, 1)) })
	s.do(h.group(1))
	again("emptied", func() { s.do(h.group(1, 0, 1)) })
	dark()
	again("no links", func() { links("up") })
	dark()
	journal := c.snapshot()
	crash(t, d)
	d, c = h.restart(journal)
	s = program(t, c.server)
	again("restarted without links", func() { links("up") })
	s.do(h.group(1))
	again("refused", func() {
		refused := refuse(d, tries-1, "set route ")
		s.do(h.group(1, 1, 1))
		if refused() != tries-1 {
			t.Errorf("%d messages were refused", refused())
		}
	})
	again("tampered with", func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		b := h.conn.Begin()
		b.SetNexthop(rtnl.Nexthop{
			ID: d.state.have.groups[groupKey{1, v6}].id, Protocol: DefaultProtocol, Resilient: true,
			Members: []rtnl.Member{{ID: d.state.have.drop[v6].ids[0], Weight: 1}},
		}, rtnl.Change)
		for _, err := range h.conn.Do(b) {
			if err != nil {
				t.Error(err)
			}
		}
	})
	if received[target4(0)] {
		t.Error("an IPv4 route was set again, for nothing")
	}
}

// TestAuditFindsMovedBuckets checks that the audit finds buckets that moved in the kernel with equal members and
// without an event.
func TestAuditFindsMovedBuckets(t *testing.T) {
	h := newHost(t, 4)
	h.config.AuditInterval = time.Hour
	d, c := h.start()
	s := program(t, c.server)
	s.do(h.group(1, 1, 2, 3, 4), destination(target4(0), 1), destination(target6(0), 1))
	if err := d.Settle(); err != nil {
		t.Fatal(err)
	}
	rest(t, d)
	if err := d.others.news.Close(); err != nil { // no further events arrive
		t.Fatal(err)
	}
	before := h.state()
	all := h.objects()
	for _, g := range all {
		if len(g.Members) == 0 {
			continue
		}
		some := g
		some.Members = g.Members[1:]
		b := h.conn.Begin()
		b.SetNexthop(some, rtnl.Change)
		b.SetNexthop(g, rtnl.Change)
		for _, err := range h.conn.Do(b) {
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	if diff(h.state(), before) == "" {
		t.Fatal("no bucket moved")
	}
	d.audit()
	if d := diff(h.state(), before); d != "" {
		t.Error(d)
	}
	if got := d.Stats().Differences; got != 2 {
		t.Errorf("%d differences, want the two groups", got)
	}
}
