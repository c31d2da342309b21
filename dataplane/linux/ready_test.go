package linux

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// TestSwappedForAReadyGroup checks by the kernel's objects that weights that return cost one route and no group, that
// every bucket of an unaffected sub-port stays, and that neither anchors nor ready groups outlive the last destination.
func TestSwappedForAReadyGroup(t *testing.T) {
	h := newHost(t, 4)
	d, c := h.start()
	s := program(t, c.server)
	id := func() string {
		_, id, _ := strings.Cut(h.IP("route", "show", target4(0)), "nhid ")
		return strings.Fields(id)[0]
	}
	s.do(h.group(1, 2, 2, 2, 2), destination(target4(0), 1))
	whole, first := h.state(), id()
	s.do(h.group(1, 2, 2, 1, 2))
	halved, second := h.state(), id()
	if first == second {
		t.Error("the group was replaced in place")
	}
	if text := h.IP("route", "show", "root", "0.0.0.0/8"); strings.Count(text, "nhid") != 2 {
		t.Errorf("want two anchors:\n%s", h.IP("route"))
	}
	before := d.Stats()
	for range 3 {
		s.do(h.group(1, 1, 1, 1, 1))
		if got := id(); got != first || diff(h.state(), whole) != "" {
			t.Errorf("group %s, want the ready one %s: %s", got, first, diff(h.state(), whole))
		}
		s.do(h.group(1, 2, 2, 1, 2))
		if got := id(); got != second || diff(h.state(), halved) != "" {
			t.Errorf("group %s, want the ready one %s: %s", got, second, diff(h.state(), halved))
		}
	}
	if after := d.Stats(); after.Groups != before.Groups || after.Nexthops != before.Nexthops || after.Routes != before.Routes+6 {
		t.Errorf("6 changes between ready groups cost %d groups, %d nexthops, %d routes", after.Groups-before.Groups, after.Nexthops-before.Nexthops, after.Routes-before.Routes)
	}

	// A lost carrier takes members out of both groups, so that the ready one is of no use.
	h.IP("link", "set", "p0", "down")
	h.carriers(3)
	h.IP("link", "set", "p0", "up")
	h.carriers(4)
	s.do(h.group(1, 2, 2, 2, 2))
	netnstest.Eventually(t, time.Minute, func() error {
		if d := diff(h.state(), whole); d != "" {
			return fmt.Errorf("after a lost carrier: %s", d)
		}
		return nil
	})
	d.audit()
	quiet(t, d)

	s.do(deleteDestination(target4(0)))
	if groups, _ := h.marked(); groups != 0 || strings.Contains(h.IP("route"), "179") {
		t.Errorf("%d groups are left:\n%s", groups, h.IP("route"))
	}
}

// TestTrails compares the routes of each group with a twin that counts them anew, around the limit of few routes.
func TestTrails(t *testing.T) {
	m := newMirror(1)
	twin := map[routeKey]uint32{}
	at := func(i int) routeKey { return routeKey{mustPrefix(target4(i)), offlineTable} }
	check := func() {
		t.Helper()
		for id := range uint32(3) {
			var want []routeKey
			for at, to := range twin {
				if to == id {
					want = append(want, at)
				}
			}
			slices.SortFunc(want, routeKey.compare)
			got, few := m.few(id)
			got = slices.SortedFunc(slices.Values(got), routeKey.compare)
			if few && !slices.Equal(got, want) || !few && len(want) == 0 || len(want) > mostSwapped && few {
				t.Fatalf("id %d: %d routes, few %v, want %d", id, len(got), few, len(want))
			}
		}
	}
	for step := range 200 {
		i, to := step*7%40, uint32(step%3)
		if step%5 == 4 {
			m.removeRoute(at(i))
			delete(twin, at(i))
		} else {
			m.setRoute(at(i), routeState{nexthop: to})
			twin[at(i)] = to
		}
		check()
	}
	routes := map[routeKey]routeState{}
	for at, to := range twin {
		routes[at] = routeState{nexthop: to}
	}
	m.replaceRoutes(statesOf(routes), nil)
	check()
	for at := range maps.Clone(twin) {
		m.removeRoute(at)
		delete(twin, at)
		check()
	}
	if len(m.trails) != 0 {
		t.Errorf("%d trails of no routes", len(m.trails))
	}
}

// TestRefusedSwap checks that a group is replaced in place after the kernel has refused another one, without a pause.
func TestRefusedSwap(t *testing.T) {
	h := newHost(t, 2)
	d, c := h.start()
	s := program(t, c.server)
	s.do(h.group(1, 1, 1), destination(target4(0), 1))
	d.mu.Lock()
	was := d.state.want.vectors[1]
	d.mu.Unlock()
	other := h.group(1, 1, 3).GetSetVector()
	refusing(d, func(what string) unix.Errno {
		if strings.HasPrefix(what, "add nexthop") && strings.Contains(what, "group") {
			return unix.ENOMEM
		}
		return 0
	}, nil, func() {
		if err := d.Commit([]contract.Change{{Kind: contract.GroupChange, Group: 1, Before: was, After: other}}); err != nil {
			t.Error(err)
		}
	})
	h.wants(target4(0), map[string]int{"p0": 256, "p1": 768})
	d.audit()
	quiet(t, d)
}
