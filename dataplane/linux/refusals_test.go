package linux

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/internal/rtnl"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// captured returns the log of the host's Drivers, and disables audits by time.
func (h *host) captured() *logged {
	var log logged
	h.config.Logger, h.config.AuditInterval = slog.New(slog.NewTextHandler(&log, nil)), time.Hour
	return &log
}

// refusing runs do while the functions decide which messages and dumps of a Driver the kernel refuses.
func refusing(d *Driver, messages, dumps func(what string) unix.Errno, do func()) {
	set := func(messages, dumps func(what string) unix.Errno) {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.kernel.conn.Refuse(messages)
		d.kernel.conn.RefuseDumps(dumps)
	}
	set(messages, dumps)
	defer set(nil, nil)
	do()
}

// beginning returns a function for refusing: requests whose description has the prefix are refused with the code.
func beginning(errno unix.Errno, begins string) func(string) unix.Errno {
	return func(what string) unix.Errno {
		if strings.HasPrefix(what, begins) {
			return errno
		}
		return 0
	}
}

// descriptors counts the open files of the process.
func descriptors(t *testing.T) int {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}

// TestGoneAlready: the removal of an object that another program has removed succeeds.
func TestGoneAlready(t *testing.T) {
	h := newHost(t, 2)
	h.captured()
	d, c := h.start()
	s := program(t, c.server)
	s.do(h.group(1, 1, 1), destination(target4(0), 1), destination(target6(0), 1))
	if err := d.others.news.Close(); err != nil { // no events are received from here on
		t.Fatal(err)
	}
	h.IP("route", "del", target4(0))
	h.IP("-6", "route", "del", target6(0))
	s.do(deleteDestination(target4(0)), deleteDestination(target6(0)), deleteGroupOp(1))
	d.mu.Lock()
	failures := d.kernel.execute(&plan{lastOps: []op{{kind: deleteGroup, id: 4711}, {kind: deleteNexthop, id: 4712}}}, false)
	d.mu.Unlock()
	if len(failures) != 0 {
		t.Errorf("%v", failures)
	}
	if got := d.Stats(); got.Errors != 0 || got.Retries != 0 || got.RouteObjects != 0 || got.GroupObjects != 0 {
		t.Errorf("%+v", got)
	}
}

// TestMessagesAreCounted compares the counters of each kind with the messages that the kernel receives.
func TestMessagesAreCounted(t *testing.T) {
	h := newHost(t, 3)
	h.captured()
	h.config.witnessTime, h.config.inPlace = time.Hour, true
	d, c := h.start()
	s := program(t, c.server)
	type counts struct{ nexthops, groups, routes uint64 }
	var seen counts
	count := func(what string) unix.Errno {
		switch words := strings.Fields(what); {
		case words[1] == "route":
			seen.routes++
		case strings.Contains(what, "group") || what == fmt.Sprint("delete nexthop ", d.state.have.groups[groupKey{1, v4}].idOf()):
			seen.groups++
		default:
			seen.nexthops++
		}
		return 0
	}
	for _, step := range []struct {
		what string
		do   func()
		want counts
	}{
		{"a destination", func() { s.do(h.group(1, 1, 1, 1), destination(target4(0), 1)) }, counts{4, 1, 1}},
		{"another", func() { s.do(destination(target4(1), 1)) }, counts{0, 0, 1}},
		{"a weight", func() { s.do(h.group(1, 1, 1)) }, counts{2, 1, 0}},
		{"none", func() { s.do(h.group(1)) }, counts{1, 1, 0}},
		{"one less", func() { s.do(deleteDestination(target4(1))) }, counts{0, 0, 1}},
		{"the last", func() { s.do(deleteDestination(target4(0))) }, counts{0, 1, 1}},
		{"a sub-port less", func() {
			fewer := proto.CloneOf(h.forwarding)
			fewer.Planes = fewer.Planes[:2]
			c.hello(fewer)
		}, counts{1, 0, 0}},
	} {
		before := d.Stats()
		seen = counts{}
		asks := step.what == "a sub-port less" // Hello asks the kernel how it hashes, by other messages
		if asks {
			step.do()
			seen = step.want
		} else {
			refusing(d, count, nil, step.do)
		}
		after := d.Stats()
		got := counts{after.Nexthops - before.Nexthops, after.Groups - before.Groups, after.Routes - before.Routes}
		if got != seen || got != step.want {
			t.Errorf("%s: counted %+v, the kernel got %+v, want %+v", step.what, got, seen, step.want)
		}
		h.counted(d)
	}
}

// idOf returns the kernel's id of a group, or 0 for nil.
func (g *group) idOf() uint32 {
	if g == nil {
		return 0
	}
	return g.id
}

// TestAttempts: a refused message is sent tries times, each time after the kernel was read back. A refused removal of
// an object that is gone is not a failure.
func TestAttempts(t *testing.T) {
	h := newHost(t, 2)
	h.captured()
	d, c := h.start()
	s := program(t, c.server)
	s.do(h.group(1, 1, 1), destination(target4(0), 1))
	for refusals := range tries + 2 {
		before, n := d.Stats(), 0
		var refused []*farev1.Ack
		refusing(d, func(what string) unix.Errno {
			if strings.HasPrefix(what, "add route") && n < refusals {
				n++
				return unix.EINVAL
			}
			return 0
		}, nil, func() { refused = s.try(destination(target4(1), 1)) })
		fails := min(refusals, tries)
		after := d.Stats()
		if fails < tries != (len(refused) == 0) || n != fails || after.Errors-before.Errors != uint64(fails) ||
			fails < tries && (after.Retries-before.Retries != uint64(fails) || after.Resyncs-before.Resyncs != uint64(fails)) {
			t.Errorf("%d refusals: %d messages were refused, %v; %+v, before %+v", refusals, n, refused, after, before)
		}
		if len(refused) == 0 {
			s.do(deleteDestination(target4(1)))
		}
	}
	// Another program removes the route first, and the kernel refuses the removal by another error.
	s.do(destination(target4(2), 1))
	n := 0
	refusing(d, func(what string) unix.Errno {
		if strings.HasPrefix(what, "delete route") {
			n++
			b := h.conn.Begin()
			b.DelRoute(rtnl.Route{Prefix: mustPrefix(target4(2)), Protocol: DefaultProtocol})
			if err := errors.Join(h.conn.Do(b)...); err != nil {
				t.Error(err)
			}
			return unix.EINVAL
		}
		return 0
	}, nil, func() {
		if refused := s.try(deleteDestination(target4(2))); len(refused) != 0 || n != 1 {
			t.Errorf("refused %v after %d messages", refused, n)
		}
	})
}

// TestNoWayBack: a change that is refused in the middle and cannot be undone at once is reported, and undone once the
// kernel allows it.
func TestNoWayBack(t *testing.T) {
	h := newHost(t, 2)
	h.config.inPlace = true // else the routes need no change to be back
	log := h.captured()
	d := h.open()
	var received reports
	c := &client{t: t, server: newServer(d)}
	d.Guard(received.report) // in place of the server
	c.hello(h.forwarding)
	s := program(t, c.server)
	s.do(h.group(1, 1, 1), h.group(2, 1, 3), destination(target4(0), 1), destination(target4(1), 2), destination(target4(2), 2))
	before := h.state()
	d.mu.Lock()
	was := d.state.want.vectors[1]
	d.mu.Unlock()
	other := proto.CloneOf(was)
	other.Members[0].Weight = 7
	changes := []contract.Change{{Kind: contract.GroupChange, Group: 1, Before: was, After: other}, {Kind: contract.DestinationChange, Prefix: mustPrefix(target4(1))}}
	changes[1].From.Group, changes[1].To.Group = 2, 1
	received.take()
	ended := false
	refusing(d, func(what string) unix.Errno {
		if ended = ended || strings.HasPrefix(what, "set route"); ended {
			return unix.EPERM
		}
		return 0
	}, nil, func() {
		if err := d.Commit(changes); status.Code(err) != codes.Unavailable {
			t.Errorf("Commit: %v", err)
		}
	})
	if all := received.take(); len(all) == 0 || all[0].Intact || !strings.Contains(all[0].Message, "the kernel refused") {
		t.Errorf("reports %v; want one that is not intact", all)
	}
	if lines := log.lines("cannot restore the state before"); len(lines) != 1 {
		t.Errorf("logged %q", lines)
	}
	received.settled(t)
	if d := diff(h.state(), before); d != "" {
		t.Error(d)
	}
	// A refusal that can be undone is not reported.
	refusing(d, beginning(unix.EPERM, "set route"), nil, func() {
		if err := d.Commit(changes); status.Code(err) != codes.Unavailable {
			t.Errorf("Commit: %v", err)
		}
	})
	if all := received.take(); len(all) != 0 || len(log.lines("cannot restore the state before")) != 1 {
		t.Errorf("reports %v; logged %q", all, log.lines("level="))
	}
	if d := diff(h.state(), before); d != "" {
		t.Error(d)
	}
}

// TestRefusedMoveKeepsTheRoute checks that a group stays while the kernel refuses to move the last route away from it:
// the kernel deletes a group's routes with the group.
func TestRefusedMoveKeepsTheRoute(t *testing.T) {
	h := newHost(t, 2)
	h.captured()
	d, c := h.start()
	s := program(t, c.server)
	s.do(h.group(1, 1, 1), h.group(2, 1, 3), destination(target4(0), 1), destination(target4(1), 2))
	before := h.state()
	d.mu.Lock()
	standing, _ := d.state.have.routes.get(routeKey{mustPrefix(target4(1)), 254})
	d.mu.Unlock()
	move := contract.Change{Kind: contract.DestinationChange, Prefix: mustPrefix(target4(1))}
	move.From.Group, move.To.Group = 2, 1
	var deleted []string
	refusing(d, func(what string) unix.Errno {
		if strings.HasPrefix(what, "delete nexthop") {
			deleted = append(deleted, what)
		}
		if strings.HasPrefix(what, "set route") {
			return unix.EPERM
		}
		return 0
	}, nil, func() {
		if err := d.Commit([]contract.Change{move}); status.Code(err) != codes.Unavailable {
			t.Errorf("Commit: %v", err)
		}
	})
	if standing.nexthop == 0 {
		t.Fatal("the route has no group")
	}
	if slices.Contains(deleted, fmt.Sprintf("delete nexthop %d", standing.nexthop)) {
		t.Errorf("group %d, which the route still used, was deleted: %q", standing.nexthop, deleted)
	}
	if d := diff(h.state(), before); d != "" {
		t.Error(d)
	}
	if err := d.Commit([]contract.Change{move}); err != nil {
		t.Error(err)
	}
	if text := h.state()["10.255.1.2"]; text != h.state()["10.255.1.1"] {
		t.Errorf("after the kernel allowed it: %s", text)
	}
}

// TestHelloWithoutRoom: a Hello that the kernel has no room for is refused, and the previous forwarding continues.
func TestHelloWithoutRoom(t *testing.T) {
	h := newHost(t, 3)
	log := h.captured()
	h.forwarding.Planes = h.forwarding.Planes[:2]
	d, c := h.start()
	s := program(t, c.server)
	s.do(h.group(1, 1, 1), destination(target4(0), 1), destination(target6(0), 1))
	if err := d.Settle(); err != nil {
		t.Fatal(err)
	}
	before := h.state()
	less := proto.CloneOf(h.forwarding)
	less.Planes = less.Planes[:1]
	for _, c := range []struct {
		back  bool // there is room for what was before
		lines int
	}{{true, 0}, {false, 1}} {
		lines := len(log.lines("cannot restore the forwarding before"))
		refusing(d, func(what string) unix.Errno {
			if (strings.HasPrefix(what, "set nexthop") || strings.HasPrefix(what, "add nexthop")) && (len(d.state.want.subPorts) == 1 || !c.back) {
				return unix.ENOMEM
			}
			return 0
		}, nil, func() {
			if err := d.SetForwarding(less); status.Code(err) != codes.ResourceExhausted {
				t.Errorf("%+v: %v", c, err)
			}
		})
		if n := len(log.lines("cannot restore the forwarding before")) - lines; n != c.lines {
			t.Errorf("%+v: logged %d lines", c, n)
		}
		netnstest.Eventually(t, time.Minute, func() error { // the Driver retries, and may replace nexthop objects meanwhile
			if d := diff(h.state(), before); d != "" {
				return fmt.Errorf("%+v: %s", c, d)
			}
			return nil
		})
		d.mu.Lock()
		if len(d.state.want.subPorts) != 2 || !proto.Equal(d.forwarding, h.forwarding) {
			t.Errorf("%+v: %d sub-ports, %v", c, len(d.state.want.subPorts), d.forwarding)
		}
		d.mu.Unlock()
	}
	d.audit()
	if d := diff(h.state(), before); d != "" {
		t.Error(d)
	}
	// Settings that cannot be read refuse a node that forwards for others.
	leaf := proto.CloneOf(h.forwarding)
	leaf.Loopbacks, leaf.UdpPorts = nil, nil
	release := exhaustDescriptors(t)
	err := d.SetForwarding(leaf)
	release()
	if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "forwards for others") {
		t.Errorf("without descriptors: %v", err)
	}
	// A loopback that the kernel refused once is tried again.
	h.sends("10.255.0.1", "fd00:255::1")
	d.mu.Lock()
	d.state.have.unfit[mustPrefix("10.255.0.1/32").Addr()] = true
	d.mu.Unlock()
	s.do(deleteDestination(target4(0)), destination(target4(0), 1))
	h.sends("", "fd00:255::1")
	c.hello(h.forwarding)
	h.sends("10.255.0.1", "fd00:255::1")
}

// TestDroppingRouteRefused: a refused route that drops packets is retried before the destination is acknowledged.
func TestDroppingRouteRefused(t *testing.T) {
	h := gpus(t)
	h.captured()
	h.config.Logger = slog.New(slog.DiscardHandler)
	d, c := h.start()
	s := program(t, c.server)
	h.someSources(s)
	n := 0
	refusing(d, func(what string) unix.Errno {
		if strings.HasPrefix(what, "add route") && strings.Contains(what, strings.TrimSuffix(target4(5), "/32")) && n == 0 {
			n++
			return unix.EINVAL
		}
		return 0
	}, nil, func() { s.do(of(sourceA, destination(target4(5), 1))) })
	for _, source := range []string{sourceB, sourceC} {
		table := fmt.Sprint(d.state.want.sources[mustPrefix(source)].own)
		if text := h.IP("route", "show", "table", table, "to", target4(5)); n != 1 || text == "" {
			t.Errorf("%d refusals; table %s: %q", n, table, text)
		}
	}
	h.counted(d)
}

// TestNexthopsThatCannotGo: a refused removal of nexthops on a device without a carrier is logged, unless the kernel
// has removed them.
func TestNexthopsThatCannotGo(t *testing.T) {
	h := newHost(t, 2)
	log := h.captured()
	d, c := h.start()
	s := program(t, c.server)
	s.do(h.group(1, 1, 1), destination(target4(0), 1))
	lines := func() int { return len(log.lines("packets go to a device without a carrier")) }
	d.mu.Lock()
	d.kernel.remove(map[uint32]*pool{4711: nil})
	d.mu.Unlock()
	if lines() != 0 {
		t.Errorf("logged %q", log.lines("level="))
	}
	refusing(d, beginning(unix.EPERM, "delete nexthop"), nil, func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.kernel.remove(map[uint32]*pool{4711: nil})
	})
	if lines() != 1 {
		t.Errorf("logged %q", log.lines("level="))
	}
	// Packets that wait are given up once no group sends more of them.
	d.mu.Lock()
	defer d.mu.Unlock()
	g := d.state.have.groups[groupKey{1, v4}]
	d.links.dark[4711] = true
	g.moved = true
	if d.links.abandon(); !d.links.dark[4711] {
		t.Error("given up while a group may send more")
	}
	g.moved = false
	if d.links.abandon(); len(d.links.dark) != 0 || len(log.lines("connections may stall")) != 0 {
		t.Errorf("dark %v; logged %q", d.links.dark, log.lines("level="))
	}
}

// TestRulesRefused: a Hello whose rules the kernel refuses is refused.
func TestRulesRefused(t *testing.T) {
	h := gpus(t)
	h.config.Logger = slog.New(slog.DiscardHandler)
	d := h.open()
	refusing(d, beginning(unix.EPERM, "add rule"), nil, func() {
		if err := d.SetForwarding(h.forwarding); status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "rules: ") {
			t.Errorf("%v", err)
		}
	})
	if err := d.SetForwarding(h.forwarding); err != nil || d.Stats().Differences != 0 {
		t.Errorf("%v, %+v", err, d.Stats())
	}
}
