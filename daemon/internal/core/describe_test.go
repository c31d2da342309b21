package core

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/fared/fared/daemon/internal/coretest"
	"github.com/fared/fared/fare"
)

// TestReplayNamesEvents checks that a replay describes every event with the names of the configuration, and an index
// outside the configuration by its number.
func TestReplayNamesEvents(t *testing.T) {
	c := coreOf(t, shape{Planes: 2, SubPorts: 1}.Text())
	const prefix = "10.255.1.0/32"
	for want, ev := range map[string]Event{
		"session p0/p0.0 up, generation 3, node 10.1.0.1":                   Fabric{fare.SessionUp{Session: 0, Generation: 3, Node: leafNode(0), PeerAS: 65100}},
		"session p1/p1.0 up, generation 4, node 10.1.0.2":                   Fabric{fare.SessionUp{Session: 1, Generation: 4, Node: leafNode(1), PeerAS: 65101}},
		"session p1/p1.0 down, generation 4":                                Fabric{fare.SessionDown{Session: 1, Generation: 4}},
		"session p0/p0.0 has " + prefix:                                     Fabric{fare.RouteUpdate{Session: 0, Generation: 3, Prefix: destination(0)}},
		"session p0/p0.0 has no " + prefix:                                  Fabric{fare.RouteWithdraw{Session: 0, Generation: 3, Prefix: destination(0)}},
		"session p1/p1.0 sent End-of-RIB":                                   EndOfRIB{Session: 1, Generation: 4},
		"session 2 sent End-of-RIB":                                         EndOfRIB{Session: 2},
		"session -1 sent End-of-RIB":                                        EndOfRIB{Session: -1},
		"session p1/p1.0 has sent the routes of the drain":                  RoutesWritten{Session: 1, Generation: 4, Mark: 7},
		"sub-port p0.0 up, 400G":                                            up(0, 400e9),
		"sub-port p1.0 down, 100G":                                          Fabric{fare.LinkState{SubPort: 1, Speed: 100e9}},
		"sub-port 2 up, 400G":                                               up(2, 400e9),
		"sub-port -1 up, 400G":                                              up(-1, 400e9),
		"drain of plane p1":                                                 DrainRequest{DrainTarget{Plane: "p1"}, true},
		"undrain of leaf 10.1.0.2":                                          DrainRequest{DrainTarget{Leaf: leafNode(1)}, false},
		"drain of sub-port p1.0 continues":                                  DrainStep{DrainTarget{SubPort: "p1.0"}, true},
		"drain of plane p1 is restored":                                     DrainRestored{DrainTarget{Plane: "p1"}},
		"start-deadline":                                                    StartDeadline{},
		"dataplane-ready":                                                   DataplaneReady{},
		"reload":                                                            Reload{},
		"session p1/p1.0 has next hop 192.0.2.7":                            NextHop{Session: 1, Address: netip.MustParseAddr("192.0.2.7")},
		"landing of flows from 10.255.0.1 to 10.255.1.0":                    Landing{Source: own.Addr(), Destination: destination(0).Addr(), Table: LandingTable{1}},
		"landing of flows from 10.255.0.1 to 10.255.1.0 is no longer known": Landing{Source: own.Addr(), Destination: destination(0).Addr()},
		"probes by plane p1 to 10.255.1.0/32 are lost":                      Avoid{Destination: destination(0), Plane: 1, On: true},
		"probes by plane p0 to 10.255.1.0/32 are answered":                  Avoid{Destination: destination(0)},
		"probes by plane 2 to 10.255.1.0/32 are lost":                       Avoid{Source: 1, Destination: destination(0), Plane: 2, On: true},
		"fare.EndOfRIB":                                                     Fabric{fare.EndOfRIB{}}, // not an event of a recording
	} {
		if got := c.layout.describe(ev); got != want {
			t.Errorf("%#v is described as %q, want %q", ev, got, want)
		}
	}
}

// TestReplayShowsChanges checks that each event of a replay contains the weights, destinations and slots that it
// changed.
func TestReplayShowsChanges(t *testing.T) {
	s := shape{Planes: 2, SubPorts: 1}
	c := coreOf(t, s.Text())
	for i := range 2 {
		do(t, c, up(i, 400e9), Fabric{fare.SessionUp{Session: i, Generation: 1, Node: leafNode(i), PeerAS: s.PeerAS(i)}})
	}
	c.settle()
	route := func(session int, b fare.Bandwidth) Event {
		return Fabric{fare.RouteUpdate{Session: session, Generation: 1, Prefix: destination(0), Attrs: attributes(b, s.PeerAS(session), 65001)}}
	}
	for _, step := range []struct {
		what string
		ev   Event
		want []string
	}{
		{"a new destination", route(0, 400e9), []string{"vector 1: weights [1 0], 0 slots moved", "10.255.1.0/32: vector 1"}},
		{"the same route once more", route(0, 400e9), nil},
		{"its only route is withdrawn", Fabric{fare.RouteWithdraw{Session: 0, Generation: 1, Prefix: destination(0)}}, []string{"10.255.1.0/32: gone"}},
	} {
		do(t, c, step.ev)
		if got := c.settle(); !slices.Equal(got, step.want) {
			t.Errorf("%s: changed %q, want %q", step.what, got, step.want)
		}
	}
}

// TestDigestTellsStatesApart checks that any change of a fact of the state, decided or received, changes the digest;
// otherwise a replay could differ from the recorded daemon unnoticed.
func TestDigestTellsStatesApart(t *testing.T) {
	s := shape{Planes: 2, SubPorts: 2}
	hash := FlowHash{Algorithm: FlowHashLinux, Seed: 7, Buckets: 1024, Lasting: 16}
	// Not yet converged: session 3 has not sent End-of-RIB.
	made := func(more ...Event) string {
		c := coreOf(t, s.Text())
		for i := range 4 {
			do(t, c, up(i, 400e9), Fabric{fare.SessionUp{Session: i, Generation: 1, Node: leafNode(i / 2), PeerAS: s.PeerAS(i)}})
			do(t, c, Fabric{fare.RouteUpdate{Session: i, Generation: 1, Prefix: destination(0), Attrs: attributes(400e9, s.PeerAS(i), 65001)}})
		}
		do(t, c, EndOfRIB{Session: 0, Generation: 1}, EndOfRIB{Session: 1, Generation: 1})
		do(t, c, more...)
		c.settle()
		return c.Digest()
	}
	landing := func(d int, subPort byte) Event {
		return Landing{Source: own.Addr(), Destination: destination(d).Addr(), Table: LandingTable{subPort}}
	}
	drained, target := DrainRequest{DrainTarget{Plane: "p1"}, true}, DrainTarget{Plane: "p1"}
	states := map[string][]Event{
		"as it is":            nil,
		"converged":           {StartDeadline{}},
		"link":                {down(3)},
		"speed":               {up(3, 200e9)},
		"session":             {Fabric{fare.SessionDown{Session: 3, Generation: 1}}},
		"generation":          {Fabric{fare.SessionUp{Session: 3, Generation: 2, Node: leafNode(1), PeerAS: s.PeerAS(3)}}},
		"node":                {Fabric{fare.SessionUp{Session: 3, Generation: 2, Node: leafNode(5), PeerAS: s.PeerAS(3)}}},
		"End-of-RIB":          {EndOfRIB{Session: 2, Generation: 1}},
		"bandwidth":           {Fabric{fare.RouteUpdate{Session: 3, Generation: 1, Prefix: destination(0), Attrs: attributes(100e9, s.PeerAS(3), 65001)}}},
		"another destination": {Fabric{fare.RouteUpdate{Session: 3, Generation: 1, Prefix: destination(1), Attrs: attributes(400e9, s.PeerAS(3), 65001)}}},
		"drain":               {drained},
		"drain of before":     {DrainRestored{target}},
		"drain of another":    {DrainRequest{DrainTarget{SubPort: "p1.0"}, true}, DrainRequest{DrainTarget{SubPort: "p1.1"}, true}},
		"zero bandwidth":      {drained, DrainStep{target, true}},
		"drained":             {drained, DrainStep{target, true}, DrainStep{target, false}},
		"undraining":          {drained, DrainRequest{target, false}},
		"flow hash":           {DataplaneReady{FlowHash: hash}},
		"flow hash's seed":    {DataplaneReady{FlowHash: FlowHash{Algorithm: FlowHashLinux, Seed: 8, Buckets: 1024, Lasting: 16}}},
		"next hop":            {NextHop{Session: 3, Address: leafNode(7)}},
		"another next hop":    {NextHop{Session: 3, Address: leafNode(8)}},
		"landing":             {landing(0, 1)},
		"another landing":     {landing(0, 2)},
		"landing of another":  {landing(1, 1)},
		"avoidance":           {Avoid{Destination: destination(0), Plane: 1, On: true}},
		"of another":          {Avoid{Destination: destination(1), Plane: 1, On: true}},
		"of another plane":    {Avoid{Destination: destination(0), On: true}},
		"limit of weights":    {DataplaneReady{MaxWeight: 1}, Fabric{fare.RouteUpdate{Session: 3, Generation: 1, Prefix: destination(0), Attrs: attributes(100e9, s.PeerAS(3), 65001)}}},
	}
	seen := map[string]string{}
	for what, events := range states {
		digest := made(events...)
		if len(digest) != 32 || digest != made(events...) {
			t.Errorf("%s: digest %q; want 32 digits, the same each time", what, digest)
		}
		if other, ok := seen[digest]; ok {
			t.Errorf("%q and %q have one digest", what, other)
		}
		seen[digest] = what
	}

	// The routes that a leaf passes on are facts too: their bandwidth and their AS path.
	leaf := shape{Planes: 1, SubPorts: 2, Leaf: true}
	passed := func(b fare.Bandwidth, path ...uint32) string {
		c := coreOf(t, leaf.Text())
		do(t, c, up(0, 0), Fabric{fare.SessionUp{Generation: 1, Node: leafNode(0), PeerAS: leaf.PeerAS(0)}})
		do(t, c, Fabric{fare.RouteUpdate{Generation: 1, Prefix: destination(0), Attrs: attributes(b, path...)}})
		return c.Digest()
	}
	all := []string{passed(400e9, 65100), passed(200e9, 65100), passed(400e9, 65100, 65001), passed(400e9, 65100, 65002)}
	slices.Sort(all)
	if len(slices.Compact(all)) != 4 {
		t.Errorf("the digests of 4 states of a leaf are %v", all)
	}

	// On a server whose GPUs have their own ports, the digest covers which GPU reaches a destination.
	gpus := coretest.OwnPorts(2, 2)
	reached := func(g int) string {
		c := coreOf(t, gpus.Text())
		bring(t, gpus, c, 0, nil)
		for plane := range 2 {
			i := 2*plane + g
			do(t, c, Fabric{fare.RouteUpdate{Session: i, Generation: 1, Prefix: destination(0), Attrs: attributes(400e9, gpus.PeerAS(i), 65001)}})
		}
		return coretest.Describe(c)
	}
	first, second := reached(0), reached(1)
	if first == second {
		t.Errorf("a destination of the first GPU and one of the second are described alike:\n%s", first)
	}
	if !strings.Contains(first, "source 10.255.0.1/32\ndestination ") || !strings.Contains(second, "source 10.255.0.2/32\ndestination ") {
		t.Errorf("the sources are not named before their destinations:\n%s\n%s", first, second)
	}
	if one := coretest.Describe(coreOf(t, s.Text())); strings.Contains(one, "source") {
		t.Errorf("a server without ports of single GPUs has sources:\n%s", one)
	}
}
