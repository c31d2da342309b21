package bpf

import (
	"maps"
	"net/netip"
	"slices"
	"testing"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/rtnl"
)

// TestLinkEvents checks which link events change the links, darken a device, and concern the groups of which names.
func TestLinkEvents(t *testing.T) {
	up := rtnl.Link{Index: 1, Name: "d0", AltNames: "fabric0", Up: true, Carrier: true, MTU: 1500}
	down, smaller, renamed := up, up, up
	down.Carrier, smaller.MTU, renamed.Name = false, 1400, "e0"
	for _, c := range []struct {
		name    string
		event   rtnl.LinkEvent
		dark    bool
		changed []string
	}{
		{"the same", rtnl.LinkEvent{Link: up}, false, nil},
		{"another MTU", rtnl.LinkEvent{Link: smaller}, false, nil},
		{"a lost carrier", rtnl.LinkEvent{Link: down}, true, []string{"d0", "fabric0"}},
		{"a new name", rtnl.LinkEvent{Link: renamed}, false, []string{"d0", "e0", "fabric0"}},
		{"a deleted device", rtnl.LinkEvent{Link: up, Gone: true}, false, []string{"d0", "fabric0"}},
	} {
		n := &neighbors{own: map[int][6]byte{1: {}}}
		m := mirror{links: map[int]rtnl.Link{1: up}, neighbors: n}
		dark, changed := m.applyLinks([]rtnl.LinkEvent{c.event})
		if slices.Contains(dark, 1) != c.dark || !slices.Equal(slices.Sorted(maps.Keys(changed)), c.changed) {
			t.Errorf("%s: dark %v, changed %v; want %v, %v", c.name, dark, changed, c.dark, c.changed)
		}
		if now, there := m.links[1]; there == c.event.Gone || there && now != c.event.Link {
			t.Errorf("%s: %+v, %v", c.name, now, there)
		}
		if _, known := n.own[1]; known != c.dark {
			t.Errorf("%s: the device's own address is known: %v", c.name, known)
		}
	}
}

// TestUnresolved checks that each next hop behind an existing device is listed once, without the resolved ones unless
// all are due.
func TestUnresolved(t *testing.T) {
	want := desired{subPorts: map[string]*farev1.ForwardingSubPort{
		"d0": {NextHopV4: "10.0.0.1", NextHopV6: "fe80::1"}, "d1": {NextHopV4: "10.0.1.1"}, "absent": {NextHopV4: "10.0.2.1"},
	}}
	place := map[string]int{"d0": 0, "d1": 1, "absent": 2}
	want.layout.sources = []source{{number: 0, place: place}, {number: 1, place: place}}
	m := mirror{places: toyArray[steerPlace](2 * maxPlaces)}
	for _, block := range []int{0, maxPlaces} {
		m.places.have[block].Ifindex = 7
		m.places.have[block+1] = steerPlace{Ifindex: 8, Flags: placeResolved}
	}
	four, six := hop{7, netip.MustParseAddr("10.0.0.1")}, hop{7, netip.MustParseAddr("fe80::1")}
	if got := m.unresolved(&want, false); !maps.Equal(got, map[hop]bool{four: true, six: true}) {
		t.Errorf("unresolved %v", got)
	}
	if got := m.unresolved(&want, true); !maps.Equal(got, map[hop]bool{four: true, six: true, {8, netip.MustParseAddr("10.0.1.1")}: true}) {
		t.Errorf("all %v", got)
	}
}
