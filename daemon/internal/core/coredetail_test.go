package core

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/fared/fared/daemon/internal/coretest"
	"github.com/fared/fared/fare"
	"github.com/fared/fared/wecmp"
)

// handedOut returns the sessions for which Advertise emits routes, with the number of these routes.
func handedOut(c *Core) map[int]int {
	out := map[int]int{}
	c.Advertise(func(session int, routes []Route) { out[session] = len(routes) })
	return out
}

// TestRoutesAreHandedOutOnce checks that routes are applied when they may have changed, and for a session in each of
// its generations, but not again.
func TestRoutesAreHandedOutOnce(t *testing.T) {
	s := shape{Planes: 3, SubPorts: 1}
	c := coreOf(t, s.Text())
	is := func(what string, want map[int]int) {
		t.Helper()
		if got := handedOut(c); fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%s: sessions with their routes %v, want %v", what, got, want)
		}
	}
	session := func(i int, generation uint64) Event {
		return Fabric{fare.SessionUp{Session: i, Generation: generation, Node: leafNode(i), PeerAS: s.PeerAS(i)}}
	}
	is("before anything", map[int]int{})
	do(t, c, up(0, 200e9))
	is("a link with another speed", map[int]int{0: 1, 1: 1, 2: 1})
	is("nothing more", map[int]int{})
	do(t, c, up(0, 200e9))
	is("the same speed", map[int]int{})
	do(t, c, session(1, 1))
	is("a session", map[int]int{1: 1})
	is("nothing more", map[int]int{})
	do(t, c, session(1, 2))
	is("its next generation", map[int]int{1: 1})

	// A leaf emits nothing before a session is up, except for a drain, which withdraws routes from before it.
	s = shape{Planes: 2, SubPorts: 1, Leaf: true}
	c = coreOf(t, s.Text())
	do(t, c, up(0, 0), up(1, 0), session(0, 1), Fabric{fare.RouteUpdate{Session: 0, Generation: 1, Prefix: destination(0), Attrs: attributes(400e9, s.PeerAS(0))}})
	is("a leaf with one session", map[int]int{0: 0})
	do(t, c, session(1, 1))
	is("a second session", map[int]int{1: 1})
	do(t, c, Fabric{fare.SessionDown{Session: 1, Generation: 1}})
	is("it is lost", map[int]int{})
	target := DrainTarget{Plane: "p1"}
	do(t, c, DrainRequest{target, true}, DrainStep{target, true})
	is("and drained", map[int]int{0: 0, 1: 0})
	is("nothing more", map[int]int{})
	do(t, c, DrainRequest{target, false})
	is("its drain is reversed", map[int]int{0: 0})
}

// TestUnknownSpeed checks that a link whose speed is reported as unknown no longer counts with its former speed.
func TestUnknownSpeed(t *testing.T) {
	s := shape{Planes: 1, SubPorts: 1, NoSpeed: true}
	c := coreOf(t, s.Text())
	do(t, c, Fabric{fare.SessionUp{Generation: 1, Node: leafNode(0), PeerAS: s.PeerAS(0)}})
	for _, step := range []struct {
		link fare.LinkState
		want string
	}{
		{fare.LinkState{Up: true, Speed: 400e9}, "400G"}, {fare.LinkState{Up: true}, "400G"}, {fare.LinkState{Up: true, Unknown: true}, "nothing"},
		{fare.LinkState{Up: true, Speed: 100e9}, "100G"},
	} {
		do(t, c, Fabric{step.link})
		var got string
		c.advertDirty = true
		c.Advertise(func(_ int, routes []Route) {
			value, _ := fare.Codec{}.Judge(routes[0].Communities, nil)
			got = value.String()
		})
		if got != step.want {
			t.Errorf("%+v: advertised %s, want %s", step.link, got, step.want)
		}
	}
}

// TestFaultsAreReportedOnce checks that an unknown flow hash is one fault, not one for each connection of the data
// plane.
func TestFaultsAreReportedOnce(t *testing.T) {
	c := coreOf(t, shape{Planes: 2, SubPorts: 1}.Text())
	unknown := DataplaneReady{FlowHash: FlowHash{Algorithm: "crc"}}
	for i, want := range []int{1, 0, 0} {
		do(t, c, unknown)
		if got := c.Faults(); len(got) != want {
			t.Errorf("connection %d: faults %v, want %d", i, got, want)
		}
	}
	do(t, c, DataplaneReady{}, unknown)
	if first, second := c.Faults(), c.Faults(); len(first) != 1 || len(second) != 0 {
		t.Errorf("after another hash: faults %v, then %v", first, second)
	}
}

// TestFlowHashBounds checks that a hash with too few buckets, and an answer that cannot name every sub-port, are
// rejected with the reason, so that ports are uniform.
func TestFlowHashBounds(t *testing.T) {
	asked := wecmp.Asked(func(netip.Addr, netip.Addr) []byte { return nil })
	for _, c := range []struct {
		hash     FlowHash
		subPorts int
		asked    wecmp.Asked
		want     string // type of the hasher
		err      string
	}{
		{FlowHash{}, 4, asked, "<nil>", ""},
		{FlowHash{Algorithm: "linux-l4", Seed: 7, Buckets: 1024, Lasting: 16}, 4, nil, "{7 1024 16}", ""},
		{FlowHash{Algorithm: "linux-l4", Buckets: 4, Lasting: 1}, 4, nil, "{0 4 1}", ""},
		{FlowHash{Algorithm: "linux-l4", Buckets: 4, Lasting: 9}, 4, nil, "{0 4 4}", ""},
		{FlowHash{Algorithm: "linux-l4", Buckets: 3, Lasting: 1}, 4, nil, "<nil>", "3 buckets for 4 sub-ports"},
		{FlowHash{Algorithm: "linux-l4", Buckets: 1024}, 4, nil, "<nil>", "0 lasting each"},
		{FlowHash{Algorithm: "ask"}, 4, nil, "<nil>", ""},
		{FlowHash{Algorithm: "ask"}, 255, asked, "asked", ""},
		{FlowHash{Algorithm: "ask"}, 256, asked, "<nil>", "can distinguish 255 sub-ports"},
		{FlowHash{Algorithm: "crc"}, 4, asked, "<nil>", "does not recognize"},
	} {
		hasher, err := c.hash.hasher(c.subPorts, c.asked)
		got := "<nil>"
		switch h := hasher.(type) {
		case wecmp.LinuxL4:
			got = fmt.Sprintf("{%d %d %d}", h.Seed, h.Buckets, h.Lasting)
		case wecmp.Asked:
			got = "asked"
		}
		if got != c.want || (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%+v over %d sub-ports: %s, %v; want %s, %q", c.hash, c.subPorts, got, err, c.want, c.err)
		}
	}
}

// TestDrainOfKeptBandwidth checks that a session whose routes keep their received community advertises zero while it is
// drained.
func TestDrainOfKeptBandwidth(t *testing.T) {
	c := coreOf(t, `
role: leaf
as: 65000
router_id: 10.9.0.1
accept: [10.255.0.0/16]
planes:
- name: p0
  sub_ports:
  - {device: s, speed: 400G, sessions: [{peer: 192.0.2.1}]}
  - {device: k, speed: 400G, sessions: [{peer: 192.0.2.3, bandwidth: keep}]}
`)
	for i := range 2 {
		do(t, c, up(i, 0), Fabric{fare.SessionUp{Session: i, Generation: 1, Node: leafNode(i), PeerAS: uint32(65100 + i)}})
	}
	kept := fare.Community{0, 4, 0, 9, 0x51, 0x3a, 0x43, 0xb7}
	do(t, c, Fabric{fare.RouteUpdate{Generation: 1, Prefix: destination(0), Attrs: &fare.Attributes{Communities: []fare.Community{kept}, ASPath: []uint32{65100}}}})
	target := DrainTarget{SubPort: "k"}
	for _, step := range []struct {
		ev   Event
		want string
	}{{DrainRequest{target, true}, fmt.Sprint([]fare.Community{kept})}, {DrainStep{target, true}, "[0004fde800000000]"}, {DrainRequest{target, false}, fmt.Sprint([]fare.Community{kept})}} {
		do(t, c, step.ev)
		c.advertDirty = true
		if got := advertisedBy(c, destination(0))[1]; got != step.want {
			t.Errorf("%v: advertised %s, want %s", step.ev, got, step.want)
		}
	}
}

// TestStrandedAreNamed checks that the error about a drain that strands destinations names three of them with their
// source and their planes, and counts the others.
func TestStrandedAreNamed(t *testing.T) {
	for n, want := range map[int]string{
		1: "it would leave 1 destinations without any plane: 10.255.1.0/32 (by p1 now; p0: no-route)",
		3: "it would leave 3 destinations without any plane: 10.255.1.0/32 (by p1 now; p0: no-route), 10.255.1.1/32 (by p1 now; p0: no-route), 10.255.1.2/32 (by p1 now; p0: no-route)",
		5: "it would leave 5 destinations without any plane: 10.255.1.0/32 (by p1 now; p0: no-route), 10.255.1.1/32 (by p1 now; p0: no-route), 10.255.1.2/32 (by p1 now; p0: no-route) and 2 more",
	} {
		s := shape{Planes: 2, SubPorts: 1}
		c := coreOf(t, s.Text())
		bring(t, s, c, 0, nil)
		for _, d := range coretest.Destinations(n) {
			do(t, c, Fabric{fare.RouteUpdate{Session: 1, Generation: 1, Prefix: d, Attrs: attributes(400e9, s.PeerAS(1), 65001)}})
		}
		if err := c.CheckStranded(DrainTarget{Plane: "p1"}); err == nil || err.Error() != want {
			t.Errorf("%d destinations: %v\nwant %s", n, err, want)
		}
		if err := c.CheckStranded(DrainTarget{Plane: "p0"}); err != nil {
			t.Errorf("a plane that carries nothing: %v", err)
		}
	}
	s := coretest.OwnPorts(2, 3)
	c := coreOf(t, s.Text())
	bring(t, s, c, 0, nil)
	for g := range 2 { // the second GPU has one destination and the third three, all by p0
		for d := range 1 + 2*g {
			do(t, c, Fabric{fare.RouteUpdate{Session: 1 + g, Generation: 1, Prefix: destination(d), Attrs: attributes(400e9, s.PeerAS(0), 65001)}})
		}
	}
	for plane := range 2 { // the first GPU has both planes
		do(t, c, Fabric{fare.RouteUpdate{Session: 3 * plane, Generation: 1, Prefix: destination(0), Attrs: attributes(400e9, s.PeerAS(3*plane), 65001)}})
	}
	want := "it would leave 4 destinations without any plane: 10.255.1.0/32 from 10.255.0.2/32 (by p0 now; p1: no-route), " +
		"10.255.1.0/32 from 10.255.0.3/32 (by p0 now; p1: no-route), 10.255.1.1/32 from 10.255.0.3/32 (by p0 now; p1: no-route) and 1 more"
	if err := c.CheckStranded(DrainTarget{Plane: "p0"}); err == nil || err.Error() != want {
		t.Errorf("GPUs with ports of their own: %v\nwant %s", err, want)
	}
	if err := c.CheckStranded(DrainTarget{SubPort: "p0.0"}); err != nil {
		t.Errorf("a port of the first GPU: %v", err)
	}
}

// TestLeavesAreListedOnce checks that the error about an unknown leaf lists each known leaf once, in the order of the
// sessions.
func TestLeavesAreListedOnce(t *testing.T) {
	s := shape{Planes: 3, SubPorts: 2}
	c := coreOf(t, s.Text())
	for _, i := range []int{0, 1, 3} {
		do(t, c, Fabric{fare.SessionUp{Session: i, Generation: 1, Node: leafNode(i / 2), PeerAS: s.PeerAS(i)}})
	}
	if err := c.CheckTarget(DrainTarget{Leaf: leafNode(9)}); err == nil || err.Error() != "no leaf 10.1.0.10: the known leaves are 10.1.0.1, 10.1.0.2" {
		t.Error(err)
	}
}

// TestOutOfService checks that a sub-port is out of service if each covered session has carried the withdrawals or is
// closed, and no drain is in progress or being reversed.
func TestOutOfService(t *testing.T) {
	s := shape{Planes: 2, SubPorts: 2}
	target, other := DrainTarget{Plane: "p1"}, DrainTarget{Plane: "p0"}
	lost := Fabric{fare.SessionDown{Session: 2, Generation: 1}}
	shares := DrainRequest{target, true}
	routes, withdrawals := DrainStep{target, true}, DrainStep{target, false}
	for what, c := range map[string]struct {
		events []Event
		want   string // of sub-ports p1.0 and p1.1
	}{
		"in service":                     {nil, "false false"},
		"shares":                         {[]Event{shares}, "false false"},
		"shares, lost":                   {[]Event{lost, shares}, "false false"},
		"routes, lost":                   {[]Event{lost, shares, routes}, "false false"},
		"withdrawing, lost":              {[]Event{lost, shares, routes, withdrawals}, "true false"},
		"withdrawing":                    {[]Event{shares, routes, withdrawals}, "false false"},
		"one has carried it":             {[]Event{shares, routes, withdrawals, RoutesWritten{Session: 3, Generation: 1, Mark: 4}}, "false true"},
		"one has carried it, one is out": {[]Event{shares, routes, withdrawals, RoutesWritten{Session: 3, Generation: 1, Mark: 4}, lost}, "true true"},
		"on the way back, lost":          {[]Event{lost, shares, routes, withdrawals, DrainRequest{target, false}}, "false false"},
		"lost, another is drained":       {[]Event{lost, DrainRequest{other, true}}, "true false"},
	} {
		core := coreOf(t, s.Text())
		bring(t, s, core, 0, nil)
		do(t, core, c.events...)
		if got := fmt.Sprint(core.OutOfService(2), " ", core.OutOfService(3)); got != c.want {
			t.Errorf("%s: out of service %s, want %s", what, got, c.want)
		}
	}
}

// TestLeafDrained checks that a sub-port is drained by its leaf if drains of leaves cover all its sessions with the
// leaves that they had last, and that the drain of a plane is none of a leaf.
func TestLeafDrained(t *testing.T) {
	s := shape{Planes: 2, SubPorts: 2}
	session := func(i int, node byte) Event {
		return Fabric{fare.SessionUp{Session: i, Generation: 1, Node: netip.AddrFrom4([4]byte{10, 254, 0, node}), PeerAS: s.PeerAS(i)}}
	}
	leaf := func(node byte) DrainTarget { return DrainTarget{Leaf: netip.AddrFrom4([4]byte{10, 254, 0, node})} }
	c := coreOf(t, s.Text())
	for _, step := range []struct {
		ev   Event
		want string
	}{
		{session(0, 1), "[false false false false]"}, {session(1, 2), "[false false false false]"}, {session(2, 3), "[false false false false]"}, {session(3, 3), "[false false false false]"},
		{DrainRequest{DrainTarget{Plane: "p0"}, true}, "[false false false false]"},
		{DrainRequest{leaf(2), true}, "[false true false false]"},
		{DrainRequest{leaf(3), true}, "[false true true true]"},
		{Fabric{fare.SessionDown{Session: 2, Generation: 1}}, "[false true true true]"},
		{DrainRequest{leaf(2), false}, "[false true true true]"},
		{DrainStep{leaf(2), false}, "[false false true true]"},
	} {
		do(t, c, step.ev)
		var got []bool
		for i := range c.Layout().SubPorts {
			got = append(got, c.LeafDrained(i))
		}
		if fmt.Sprint(got) != step.want {
			t.Errorf("%v: drained by leaves %v, want %s", step.ev, got, step.want)
		}
	}
	views := c.SessionViews()
	if len(views) != 4 || views[2].Up || !views[3].Up || views[1].Node != leaf(2).Leaf || views[3].Generation != 1 {
		t.Errorf("%+v", views)
	}
}

// TestLayoutLists checks that a layout lists the sub-ports of each plane, once and in order.
func TestLayoutLists(t *testing.T) {
	l := coreOf(t, shape{Planes: 3, SubPorts: 2}.Text()).Layout()
	if got := fmt.Sprint(l.OfPlane); got != "[[0 1] [2 3] [4 5]]" {
		t.Errorf("sub-ports by plane: %s", got)
	}
	if got := fmt.Sprint(l.Devices(), l.Device(1, 0), l.Device(2, 1)); got != "[p0.0 p0.1 p1.0 p1.1 p2.0 p2.1]p1.0p2.1" {
		t.Errorf("devices: %s", got)
	}
}

// TestSessionDrain checks that a session is draining from the first stage of a drain on, drained when it has carried
// the withdrawals, and in service with the reversal.
func TestSessionDrain(t *testing.T) {
	s := shape{Planes: 2, SubPorts: 1}
	c := coreOf(t, s.Text())
	bring(t, s, c, 0, nil)
	target := DrainTarget{Plane: "p1"}
	for _, step := range []struct {
		ev   Event
		want string // draining, drained
	}{
		{up(0, 400e9), "false false"}, {DrainRequest{target, true}, "true false"}, {DrainStep{target, true}, "true false"}, {DrainStep{target, false}, "true false"},
		{RoutesWritten{Session: 1, Generation: 1, Mark: 2}, "false true"}, {DrainRequest{target, false}, "false false"},
	} {
		do(t, c, step.ev)
		draining, drained := c.SessionDrain(1)
		if got := fmt.Sprint(draining, " ", drained); got != step.want {
			t.Errorf("%v: draining and drained %s, want %s", step.ev, got, step.want)
		}
		if draining, drained = c.SessionDrain(0); draining || drained {
			t.Errorf("%v: the other session is shown as drained", step.ev)
		}
	}
}

// TestIgnoredBandwidthIsForgotten checks that the records of ignored bandwidth end with the routes, and that a change
// that neither begins nor ends any is not reported.
func TestIgnoredBandwidthIsForgotten(t *testing.T) {
	s := shape{Planes: 2, SubPorts: 1, Extra: bounds}
	c := coreOf(t, s.Text())
	bring(t, s, c, 1, func(int, int) fare.Bandwidth { return 400e9 })
	route := func(session int, generation uint64, d int, b fare.Bandwidth) Event {
		return Fabric{fare.RouteUpdate{Session: session, Generation: generation, Prefix: destination(d), Attrs: attributes(b, s.PeerAS(session), 65001)}}
	}
	for _, step := range []struct {
		what    string
		ev      Event
		groups  int
		changes bool
	}{
		{"a valid value", route(1, 1, 0, 200e9), 0, false},
		{"one below the minimum", route(1, 1, 0, 1e9), 1, true},
		{"a valid value of another destination", route(0, 1, 5, 200e9), 1, false},
		{"the session is lost", Fabric{fare.SessionDown{Session: 1, Generation: 1}}, 0, true},
		{"it returns", Fabric{fare.SessionUp{Session: 1, Generation: 2, Node: leafNode(1), PeerAS: s.PeerAS(1)}}, 0, false},
		{"a destination that is its alone", route(1, 2, 9, 1e9), 1, true},
		{"is withdrawn", Fabric{fare.RouteWithdraw{Session: 1, Generation: 2, Prefix: destination(9)}}, 0, true},
	} {
		do(t, c, step.ev)
		if changed := c.TakeIgnored(func(int, netip.Prefix) {}); len(c.unbelieved.groups) != step.groups || changed != step.changes {
			t.Errorf("%s: %d groups, to be reported: %v; want %d, %v", step.what, len(c.unbelieved.groups), changed, step.groups, step.changes)
		}
		if again := c.TakeIgnored(func(_ int, d netip.Prefix) { t.Errorf("%s: a change of %s is kept", step.what, d) }); again {
			t.Errorf("%s: to be reported again", step.what)
		}
	}
}

// TestOneSourceGroupHasNoName checks that loopbacks that all sub-ports serve are one source group without a name, and
// that GPUs with ports of their own have one source group each.
func TestOneSourceGroupHasNoName(t *testing.T) {
	for _, c := range []struct {
		s    shape
		want []string
	}{
		{shape{Planes: 2, SubPorts: 2}, []string{"invalid Prefix"}},
		{coretest.OwnPorts(2, 2), []string{"10.255.0.1/32", "10.255.0.2/32"}},
	} {
		l := NewLayout(c.s.Config(t))
		var got []string
		for i := range l.Sources {
			got = append(got, l.Sources[i].Name.String())
			if at := l.SourceNamed(l.Sources[i].Name); at != i {
				t.Errorf("source group %d is found as %d", i, at)
			}
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("source groups %q, want %q", got, c.want)
		}
		for i := range l.SubPorts {
			if got := l.sourceOf(i); got != i%len(c.want) {
				t.Errorf("sub-port %d is of source group %d, want %d", i, got, i%len(c.want))
			}
			if got := l.subPortByDevice(c.s.Device(i)); got != i {
				t.Errorf("%s is sub-port %d, want %d", c.s.Device(i), got, i)
			}
		}
		if got := l.subPortByDevice("eth9"); got != -1 {
			t.Errorf("an unknown device is sub-port %d", got)
		}
	}
}

// TestPoliciesReachEverySourceGroup checks that a policy that a reload changes applies to the traffic of each GPU.
func TestPoliciesReachEverySourceGroup(t *testing.T) {
	s := coretest.OwnPorts(2, 2)
	c := coreOf(t, s.Text())
	bring(t, s, c, 1, func(int, int) fare.Bandwidth { return 0 })
	weights := func() string { return fmt.Sprint(weightsFrom(c, 0, destination(0)), weightsFrom(c, 1, destination(0))) }
	if got := weights(); got != "[1 1] [1 1]" {
		t.Errorf("of routes that all advertise zero: weights %s, want equal ones", got)
	}
	s.Extra = "path_bandwidth: {all_zero: unreachable}\n"
	do(t, c, Reload{Config: s.Text()})
	if got := weights(); got != "[] []" {
		t.Errorf("with all_zero: unreachable: weights %s, want none", got)
	}
}

// TestVectorsHaveOneNumber checks that the vectors of all source groups have different numbers, from which the source
// group and its own number follow, and that 0, no vector, stays 0.
func TestVectorsHaveOneNumber(t *testing.T) {
	for n := range 4 {
		c := &Core{sources: make([]sourceGroup, n+1), stride: uint32(n + 3)} // with lanes without a source group
		for i := range c.sources {
			c.sources[i].lane = uint32(n + 1 - i)
		}
		seen := map[uint32]bool{}
		for source := range c.sources {
			if id := c.vectorID(source, 0); id != 0 {
				t.Errorf("%d source groups: no vector of source group %d has the number %d", n+1, source, id)
			}
			for vector := uint32(1); vector < 20; vector++ {
				id := c.vectorID(source, vector)
				if gotSource, gotVector := c.OwnerOf(id); id == 0 || seen[id] || gotSource != source || gotVector != vector {
					t.Errorf("%d source groups: vector %d of %d has the number %d, which is vector %d of %d", n+1, vector, source, id, gotVector, gotSource)
				}
				seen[id] = true
			}
		}
		if source, vector := c.OwnerOf(0); source != 0 || vector != 0 {
			t.Errorf("%d source groups: the number 0 is vector %d of %d", n+1, vector, source)
		}
	}
}

// TestTheTighterLimitHolds checks that the lower of the configuration's limit and the data plane's applies, and that 0
// is no limit.
func TestTheTighterLimitHolds(t *testing.T) {
	for _, c := range []struct {
		config string
		plane  uint32
		want   uint32
	}{{"", 0, 8}, {"max_weight: 4", 0, 4}, {"max_weight: 4", 100, 4}, {"max_weight: 100", 4, 4}, {"", 4, 4}, {"max_weight: 100", 50, 8}} {
		s := shape{Planes: 2, SubPorts: 1, NoSpeed: true, Extra: "weights: {" + c.config + "}\n"}
		core := coreOf(t, s.Text())
		do(t, core, DataplaneReady{MaxWeight: c.plane})
		bring(t, s, core, 1, func(_, subPort int) fare.Bandwidth { return []fare.Bandwidth{400e9, 50e9}[subPort] })
		core.Updates()
		if got := weightsOf(core, destination(0)); len(got) != 2 || got[0] > c.want || (got[0] == 8) != (c.want == 8) {
			t.Errorf("configured %q, the data plane's %d: weights %v, want 8:1 within %d", c.config, c.plane, got, c.want)
		}
	}
}

// TestEndOfRIBOfBothFamilies checks that the routes of an earlier incarnation of a session are kept until End-of-RIB
// has arrived for each of the session's families, in the current incarnation.
func TestEndOfRIBOfBothFamilies(t *testing.T) {
	prefixes := []netip.Prefix{destination(0), netip.MustParsePrefix("fd00::9/128")}
	for _, c := range []struct {
		families string
		last     int // the End-of-RIB below that ends it
	}{{"ipv4, ipv6", 3}, {"ipv6, ipv4", 3}, {"ipv4", 2}, {"ipv6", 3}} {
		s := shape{Planes: 1, SubPorts: 1, Session: "families: [" + c.families + "], "}
		s.Loopbacks = []string{"10.255.0.1/32", "\"fd00::1/128\""}
		switch c.families {
		case "ipv4":
			s.Loopbacks = s.Loopbacks[:1]
		case "ipv6":
			s.Loopbacks = s.Loopbacks[1:]
		}
		text := strings.NewReplacer("accept: [", "accept: [\"fd00::/16\", ", s.Defaults().There(0).String(), "\"fd99::1\"", s.Defaults().Here(0).String(), "\"fd99::2\"")
		core, err := New(coretest.Parse(t, text.Replace(s.Text())))
		if err != nil {
			t.Fatal(err)
		}
		peer := fare.SessionUp{Generation: 1, Node: leafNode(0), PeerAS: s.PeerAS(0)}
		do(t, core, up(0, 400e9), Fabric{peer})
		for _, p := range prefixes {
			do(t, core, Fabric{fare.RouteUpdate{Generation: 1, Prefix: p, Attrs: attributes(400e9, s.PeerAS(0), 65001)}})
		}
		do(t, core, EndOfRIB{Generation: 1}, EndOfRIB{Generation: 1, IPv6: true}, Fabric{fare.SessionDown{Generation: 1}})
		peer.Generation = 2
		do(t, core, Fabric{peer})
		for i, ev := range []EndOfRIB{{Generation: 1}, {Generation: 1, IPv6: true}, {Generation: 2}, {Generation: 2, IPv6: true}} {
			do(t, core, ev)
			want := len(prefixes)
			if i >= c.last {
				want = 0
			}
			if got := core.sources[0].table.Stats().Leftovers; got != want {
				t.Errorf("families %s: after %+v %d leftovers, want %d", c.families, ev, got, want)
			}
		}
	}
}
