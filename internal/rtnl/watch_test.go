package rtnl_test

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/rtnl"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// name describes an event by the corresponding ip(8) command.
func name(e rtnl.ObjectEvent) string {
	verb := map[bool]string{true: "gone", false: "set"}[e.Gone]
	switch {
	case e.Nexthop != nil:
		return fmt.Sprint(verb, " nexthop ", e.Nexthop.ID)
	case e.Route != nil:
		return fmt.Sprint(verb, " ", e.Route)
	case e.Address != nil:
		return fmt.Sprint(verb, " address ", e.Address.Addr, map[bool]string{false: " tentative"}[e.Address.Usable])
	default:
		return fmt.Sprint(verb, " ", e.Rule, " of family ", e.Rule.Family)
	}
}

// TestWatchObjectsHearsOthers checks that changes by other programs to nexthops, rules, addresses, marked routes,
// routes to an address and routes of other tables than main are reported in order, but neither changes by the own
// socket nor unmarked routes of main to networks.
func TestWatchObjectsHearsOthers(t *testing.T) {
	s := newSpace(t)
	// Without compatibility mode the kernel announces no routes whose nexthop changed.
	s.Sysctl("net.ipv4.nexthop_compat_mode=0")
	port, err := s.conn.Port()
	if err != nil {
		t.Fatal(err)
	}
	var watch *rtnl.ObjectWatch
	s.Must(func() (err error) { watch, err = rtnl.WatchObjects(0, protocol, port); return err })
	defer watch.Close()
	b := s.conn.Begin()
	b.SetNexthop(rtnl.Nexthop{ID: 70, Protocol: protocol, Family: unix.AF_INET, Blackhole: true}, rtnl.Create)
	b.SetRoute(rtnl.Route{Prefix: netip.MustParsePrefix("10.9.0.7/32"), Protocol: protocol, Metric: 20, Nexthop: 70}, rtnl.Create)
	b.SetRule(rtnl.Rule{Family: unix.AF_INET, Priority: 70, Table: 10, Protocol: protocol})
	b.DelRule(rtnl.Rule{Family: unix.AF_INET, Priority: 70, Table: 10, Protocol: protocol})
	b.SetRule(rtnl.Rule{Family: unix.AF_INET6, Priority: 71, Table: 10, Protocol: protocol})
	if err := errors.Join(s.conn.Do(b)...); err != nil {
		t.Fatal(err)
	}
	var want []string
	for _, step := range []struct{ command, hears string }{
		{"route add 10.8.0.0/16 via 10.1.0.2", ""},
		{"-6 route add fd08::/64 via fd01:0::2", ""},
		{"route add 10.9.0.1/32 via 10.1.0.2 metric 5", "set route 10.9.0.1/32 table 254 metric 5 nexthop 0"},
		{"-6 route add fd09::1/128 via fd01:0::2 metric 5", "set route fd09::1/128 table 254 metric 5 nexthop 0"},
		{"route add 10.9.0.0/24 via 10.1.0.2 proto 179", "set route 10.9.0.0/24 table 254 metric 0 nexthop 0"},
		{"route add 10.8.1.0/24 via 10.1.0.2 table 10", "set route 10.8.1.0/24 table 10 metric 0 nexthop 0"},
		{"nexthop add id 7 via 10.1.0.2 dev p0", "set nexthop 7"},
		{"nexthop replace id 7 via 10.1.1.2 dev p1", "set nexthop 7"},
		{"nexthop del id 7", "gone nexthop 7"},
		{"route del 10.9.0.1/32", "gone route 10.9.0.1/32 table 254 metric 5 nexthop 0"},
		{"route del 10.9.0.7/32", "gone route 10.9.0.7/32 table 254 metric 20 nexthop 70"},
		{"rule add pref 80 lookup 10", "set rule 80 to table 10 of family 2"},
		{"-6 rule del pref 71", "gone rule 71 to table 10 of family 10"},
		{"addr add 10.255.0.9/32 dev lo", "set address 10.255.0.9"},
		{"addr del 10.255.0.9/32 dev lo", "gone address 10.255.0.9"},
		{"addr add fd00:255::9/128 dev lo nodad", "set address fd00:255::9"},
	} {
		s.IP(strings.Fields(step.command)...)
		if step.hears != "" {
			want = append(want, step.hears)
		}
	}
	var got []string
	for len(got) < len(want) {
		if err := watch.Wait(); err != nil {
			t.Fatal(err)
		}
		events, err := watch.Poll()
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range events {
			switch {
			case e.Route != nil && e.Route.Protocol == unix.RTPROT_KERNEL: // the kernel adds them together with an address
			case strings.Contains(name(e), "address fe80:"), strings.Contains(name(e), "address fd01:"): // those of the cables, once their devices are up
			default:
				got = append(got, name(e))
			}
		}
	}
	if g, w := strings.Join(got, "\n"), strings.Join(want, "\n"); g != w {
		t.Errorf("heard\n%s\nwant\n%s", g, w)
	}
}

// TestWatchDeadline checks that Wait returns at its deadline, that a deadline ends a Wait in progress, that an event
// ends a Wait without deadline also after an earlier one has passed, and that Close ends a Wait.
func TestWatchDeadline(t *testing.T) {
	netnstest.Require(t)
	space := netnstest.New(t) // without devices that have late events
	var watch *rtnl.Watch
	space.Must(func() (err error) { watch, err = rtnl.WatchLinks(0); return err })
	deadline := func(at time.Time) {
		t.Helper()
		if err := watch.SetDeadline(at); err != nil {
			t.Fatal(err)
		}
	}
	waits := func() <-chan error {
		done := make(chan error, 1)
		go func() { done <- watch.Wait() }()
		return done
	}
	ends := func(done <-chan error) {
		t.Helper()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	}
	for _, at := range []time.Time{time.Now().Add(-time.Hour), time.Now(), time.Now().Add(20 * time.Millisecond)} {
		deadline(at)
		if ends(waits()); time.Now().Before(at) {
			t.Errorf("Wait has ended %v before its deadline", time.Until(at))
		}
	}
	ends(waits()) // a passed deadline remains
	for _, at := range []time.Time{{}, time.Now().Add(time.Hour)} {
		deadline(at)
		done := waits()
		deadline(time.Now())
		ends(done)
	}
	deadline(time.Time{})
	done := waits()
	space.IP("link", "add", "cable0", "type", "veth", "peer", "name", "cable1")
	ends(done)
	if events, err := watch.Poll(); err != nil || len(events) == 0 {
		t.Errorf("%d events, %v", len(events), err)
	}
	done = waits()
	if err := watch.Close(); err != nil {
		t.Error(err)
	}
	if err := <-done; !errors.Is(err, os.ErrClosed) {
		t.Errorf("Wait after Close: %v", err)
	}
	if err := watch.SetDeadline(time.Now()); !errors.Is(err, os.ErrClosed) {
		t.Errorf("SetDeadline after Close: %v", err)
	}
}

// TestWatchRests requires that Wait waits after Poll has returned the events: a Watch without Signs must not receive
// those that only Signs discards.
func TestWatchRests(t *testing.T) {
	netnstest.Require(t)
	space := netnstest.New(t)
	var watch *rtnl.Watch
	space.Must(func() (err error) { watch, err = rtnl.WatchLinks(0); return err })
	defer watch.Close()
	space.IP("link", "set", "lo", "mtu", "9000")
	events, err := watch.Next()
	if err != nil || len(events) == 0 {
		t.Fatalf("%v, %v", events, err)
	}
	const rest = 50 * time.Millisecond
	for range 20 { // further events of the device may follow
		at := time.Now().Add(rest)
		if err := watch.SetDeadline(at); err != nil {
			t.Fatal(err)
		}
		if err := watch.Wait(); err != nil {
			t.Fatal(err)
		}
		if !time.Now().Before(at) {
			return
		}
		if _, err := watch.Poll(); err != nil {
			t.Fatal(err)
		}
	}
	t.Error("Wait never waits until its deadline")
}
