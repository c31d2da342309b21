package linux

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// reports records the integrity reports of a Driver.
type reports struct {
	mu  sync.Mutex // guards all
	all []*farev1.Integrity
}

func (r *reports) report(i *farev1.Integrity) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all = append(r.all, i)
}

// take returns the reports since the last call.
func (r *reports) take() []*farev1.Integrity {
	r.mu.Lock()
	defer r.mu.Unlock()
	defer func() { r.all = nil }()
	return r.all
}

// settled waits until the last report is intact and returns all reports.
func (r *reports) settled(t testing.TB) (all []*farev1.Integrity) {
	t.Helper()
	netnstest.Eventually(t, time.Minute, func() error {
		all = append(all, r.take()...)
		if len(all) == 0 || !all[len(all)-1].Intact {
			return fmt.Errorf("reports %v; want an intact one at the end", all)
		}
		return nil
	})
	return all
}

// TestOthersAreUndone removes and changes the Driver's objects in every way that ip(8) offers, and checks packets, the
// kernel state and the reports. The next audit is an hour away.
func TestOthersAreUndone(t *testing.T) {
	h := newHost(t, 4)
	h.config.AuditInterval, h.config.Table = time.Hour, 7000
	d := h.open()
	var received reports
	d.Guard(received.report)
	c := &client{t: t, server: newServer(d)}
	c.hello(h.forwarding)
	d.Guard(received.report)
	s := program(t, c.server)
	var ops []*farev1.Operation
	ops = append(ops, h.group(1, 1, 1, 1, 1), h.group(2, 1, 3, 0, 0))
	for i := range 20 {
		ops = append(ops, destination(target4(i), uint32(1+i%2)), destination(target6(i), uint32(1+i%2)))
	}
	s.do(ops...)
	if err := d.Settle(); err != nil {
		t.Fatal(err)
	}
	rest(t, d)
	e := h.tap()
	before := h.state()
	want := map[string][]string{target4(0): {"p0", "p1", "p2", "p3"}, target6(0): {"p0", "p1", "p2", "p3"}, target4(1): {"p0", "p1"}, target6(1): {"p0", "p1"}}
	packets := func() error {
		for to, devices := range want {
			source := strings.Split(h.forwarding.Loopbacks[familyOf(mustPrefix(to).Addr())], "/")[0]
			if got := slices.Sorted(maps.Keys(e.send(source, to, 256))); !slices.Equal(got, devices) {
				return fmt.Errorf("packets to %s came out of %v, want %v", to, got, devices)
			}
		}
		return nil
	}
	if err := packets(); err != nil {
		t.Fatal(err)
	}
	// table returns the IPv4 group over four sub-ports, and its member for each of them.
	table := func() (group uint32, by map[string]uint32) {
		all := h.objects()
		for _, g := range all {
			if len(g.Members) == 0 {
				continue
			}
			buckets, err := h.conn.Buckets(g.ID)
			if err != nil {
				t.Fatal(err)
			}
			by = map[string]uint32{}
			for _, n := range all {
				if n.Gateway.Is4() && slices.Contains(buckets, n.ID) {
					by[n.Gateway.String()] = n.ID
				}
			}
			if len(by) == 4 {
				return g.ID, by
			}
		}
		t.Fatal("no group over four sub-ports")
		return 0, nil
	}
	group := func() string { id, _ := table(); return fmt.Sprint(id) }
	member := func(gateway string) string { _, by := table(); return fmt.Sprint(by[gateway]) }
	for _, step := range []struct {
		what string
		do   func()
	}{
		{"all nexthop objects", func() { h.IP("nexthop", "flush") }},
		{"all IPv4 routes", func() { h.IP("route", "flush", "table", "7000", "proto", "179") }},
		{"all IPv6 routes", func() { h.IP("-6", "route", "flush", "table", "7000", "proto", "179") }},
		{"one IPv4 route", func() { h.IP("route", "del", target4(0), "table", "7000") }},
		{"one IPv6 route", func() { h.IP("route", "del", target6(0), "table", "7000") }},
		{"one group", func() { h.IP("nexthop", "del", "id", group()) }},
		{"one member", func() { h.IP("nexthop", "del", "id", member("10.1.2.2")) }},
		{"the IPv4 rule", func() { h.IP("rule", "del", "pref", "10000") }},
		{"the IPv6 rule", func() { h.IP("-6", "rule", "del", "pref", "10000") }},
		{"a route to a blackhole", func() {
			h.IP("route", "replace", "blackhole", target4(0), "table", "7000", "metric", "20", "proto", "179")
		}},
		{"a route over one sub-port", func() {
			h.IP("route", "replace", target4(0), "via", "10.1.3.2", "table", "7000", "metric", "20", "proto", "179")
		}},
		{"a member that leads elsewhere", func() {
			h.IP("nexthop", "replace", "id", member("10.1.2.2"), "via", "10.1.3.2", "dev", "p3", "proto", "179")
		}},
		{"a member that another program replaced", func() {
			h.IP("nexthop", "replace", "id", member("10.1.2.2"), "via", "10.1.3.2", "dev", "p3", "proto", "11")
		}},
		{"a group with another member", func() {
			h.IP("nexthop", "replace", "id", group(), "group", member("10.1.3.2"), "type", "resilient", "proto", "179")
		}},
		{"a group that another program replaced", func() {
			h.IP("nexthop", "replace", "id", group(), "group", member("10.1.3.2"), "type", "resilient", "proto", "11")
		}},
	} {
		t.Run(step.what, func(t *testing.T) {
			received.take()
			repairs := d.Stats().Differences
			step.do()
			all := received.settled(t)
			if all[0].Intact || all[0].Message == "" || all[len(all)-1].Repairs <= repairs {
				t.Errorf("reports %v; want one that is not intact, with the cause and a count", all)
			}
			// A flush by ip(8) is a series of removals, and a repair may run between them.
			netnstest.Eventually(t, time.Minute, func() error {
				if err := packets(); err != nil {
					return err
				}
				return different(h.state(), before)
			})
			if got := d.Stats().Audits; got != 0 {
				t.Errorf("%d audits repaired what news should have", got)
			}
		})
	}
	// Changes of unrelated objects cause no work.
	d.mu.Lock()
	d.others.disturbed() // a look may have repaired what the last step changed before its event came
	n := d.state.stats.Disturbances
	d.mu.Unlock()
	h.IP("route", "add", "10.99.0.1/32", "via", "10.1.0.2")
	h.IP("nexthop", "add", "id", "5", "via", "10.1.0.2", "dev", "p0")
	h.IP("rule", "add", "pref", "500", "lookup", "90")
	h.IP("route", "del", target4(3), "table", "7000") // noticed after the others
	netnstest.Eventually(t, time.Minute, func() error {
		if d.Stats().Disturbances == n {
			return errors.New("no disturbance")
		}
		return nil
	})
	if more := d.Stats().Disturbances - n; more != 1 {
		t.Errorf("%d disturbances, want the one that concerned the Driver", more)
	}
	t.Logf("%+v", d.Stats())
}

// TestDisturbancesAreCounted checks that a change by another program is counted once, also where a look for other
// programs' routes, which is due after every change of rules, finds it before attend reads its event.
func TestDisturbancesAreCounted(t *testing.T) {
	h := newHost(t, 2)
	h.config.AuditInterval = time.Hour
	d, c := h.start()
	s := program(t, c.server)
	s.do(h.group(1, 1, 1), destination(target4(0), 1), destination(target4(1), 1))
	before := d.Stats()
	for i, found := range []func(){d.mend, func() {}} {
		func() {
			d.mu.Lock() // attend waits
			defer d.mu.Unlock()
			h.IP("route", "del", target4(i), "proto", "179")
			found()
		}()
	}
	// When the second route is back, attend has handled the events before its own.
	netnstest.Eventually(t, time.Minute, func() error {
		if h.IP("route", "show", target4(1), "proto", "179") == "" {
			return errors.New("no route")
		}
		return nil
	})
	after := d.Stats()
	if got := after.Disturbances - before.Disturbances; got != 2 || after.Differences-before.Differences != 2 {
		t.Errorf("%d disturbances and %d differences after two changes", got, after.Differences-before.Differences)
	}
}

// TestOthersInTheWay checks that a foreign route in the place of a route of the Driver is left unchanged, and reported
// until it is removed.
func TestOthersInTheWay(t *testing.T) {
	h := newHost(t, 2)
	h.config.AuditInterval = time.Hour
	d, c := h.start()
	var received reports
	d.Guard(received.report)
	s := program(t, c.server)
	s.do(h.group(1, 1, 1), destination(target4(0), 1), destination(target4(1), 1))
	e := h.tap()
	h.IP("route", "replace", target4(0), "via", "10.1.1.2", "metric", "20", "proto", "11")
	var all []*farev1.Integrity
	netnstest.Eventually(t, time.Minute, func() error {
		all = append(all, received.take()...)
		if len(all) == 0 || !strings.Contains(all[len(all)-1].Message, "another program's") || all[len(all)-1].Intact {
			return fmt.Errorf("reports %v; want one that names the route", all)
		}
		return nil
	})
	if got := e.send("10.255.0.1", target4(0), 64); got["p1"] != 64 {
		t.Errorf("the foreign route carries %v, want 64 packets over p1", got)
	}
	if got := e.send("10.255.0.1", target4(1), 256); got["p0"] == 0 || got["p1"] == 0 {
		t.Errorf("another destination: %v", got)
	}
	h.IP("route", "del", target4(0), "metric", "20", "proto", "11")
	received.settled(t)
	if got := e.send("10.255.0.1", target4(0), 256); got["p0"] == 0 || got["p1"] == 0 {
		t.Errorf("after the foreign route: %v", got)
	}
}
