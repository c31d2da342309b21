package fare

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
)

// TestViewsOfNothing verifies the results for indexes, groups and destinations beyond those of a table.
func TestViewsOfNothing(t *testing.T) {
	for _, role := range []Role{RoleServer, RoleLeaf} {
		table, err := NewTable(Config{Role: role, Planes: []string{"a", "b"}, SubPorts: []SubPort{{Device: "a", Speed: 400e9}, {Device: "b", Plane: 1, Speed: 400e9}},
			Sessions: []Session{{Name: "a"}, {Name: "b", SubPort: 1}}})
		if err != nil {
			t.Fatal(err)
		}
		known, unknown := testPrefixes[0], testPrefixes[1]
		for i := range 2 {
			table.Step(LinkState{SubPort: i, Up: true})
			table.Step(SessionUp{i, 1, testNodes[i], 65001})
			table.Step(RouteUpdate{i, 1, known, route(400e9)})
		}
		for _, i := range []int{-1, 2} {
			if v := table.SubPort(i); v != (SubPortView{}) {
				t.Errorf("sub-port %d: %+v", i, v)
			}
			if v := table.Plane(i); v != (PlaneView{}) {
				t.Errorf("plane %d: %+v", i, v)
			}
		}
		for i := range 2 {
			if table.SubPort(i).Reason != ReasonUsed || !table.SubPort(i).Up || table.Plane(i) != (PlaneView{Up: true, Bandwidth: 400e9}) {
				t.Errorf("sub-port and plane %d: %+v, %+v", i, table.SubPort(i), table.Plane(i))
			}
		}
		id, ok := table.Destination(known)
		if !ok || !table.Group(id).Reachable || !slices.Equal(slices.Collect(table.Members(id)), []netip.Prefix{known}) {
			t.Errorf("destination in group %d: %+v", id, table.Group(id))
		}
		if got, ok := table.Destination(unknown); got != 0 || ok || table.Route(0, unknown) != nil || table.Describe(unknown).String() != unknown.String()+" unknown: no session has a route\n" {
			t.Errorf("an unknown destination is in group %d", got)
		}
		for _, none := range []GroupID{0, id + 1, id + 99} {
			if v := table.Group(none); v.Planes != nil || v.Reachable || slices.Collect(table.Members(none)) != nil {
				t.Errorf("group %d: %+v", none, v)
			}
		}
		for _, prefix := range []netip.Prefix{known, unknown} {
			b, path, ok := table.Readvertise(prefix)
			communities, wide := table.ReadvertisedCommunities(prefix)
			if want := role == RoleLeaf && prefix == known; ok != want || (b != 0) != want || (path != nil) != want || (communities != nil) != want || wide != (IPv6Community{}) || table.ReadvertisedSignals(prefix) != 0 {
				t.Errorf("%s of %s is readvertised: %v, %s, %v, %v", prefix, role, ok, b, path, communities)
			}
		}
		// Loops that end early.
		table.Step(RouteUpdate{0, 1, unknown, route(100e9)})
		table.Step(RouteUpdate{1, 1, testPrefixes[2], route(400e9)})
		table.Step(RouteUpdate{0, 1, testPrefixes[2], route(400e9)})
		visits := 0
		for range table.Groups {
			visits++
			break
		}
		for range table.Destinations {
			visits++
			break
		}
		for range table.Members(id) {
			visits++
			break
		}
		for range Reasons {
			visits++
			break
		}
		if visits != 4 {
			t.Errorf("%d visits in 4 loops of one", visits)
		}
		if n := len(slices.Collect(table.Members(id))); n != 2 {
			t.Errorf("the group has %d members, want 2", n)
		}
	}
}

// TestRouteOfASession verifies that a session has its route from its update to its end.
func TestRouteOfASession(t *testing.T) {
	table, prefixes := bigTable(t, 1, 2, 2)
	first := table.Route(0, prefixes[0])
	if first == nil || len(first.Communities) != 1 || table.Route(1, prefixes[0]) == nil {
		t.Fatalf("routes %v and %v", first, table.Route(1, prefixes[0]))
	}
	if table.Step(RouteWithdraw{1, 1, prefixes[0]}); table.Route(1, prefixes[0]) != nil || table.Route(0, prefixes[0]) != first {
		t.Error("the withdrawn route is still there, or the other one is not")
	}
	if table.Step(SessionDown{Session: 0, Generation: 1}); table.Route(0, prefixes[0]) != nil {
		t.Error("a closed session has a route")
	}
	if table.Step(SessionUp{0, 2, testNodes[0], 65000}); table.Route(0, prefixes[0]) != nil {
		t.Error("a session has a route of its previous incarnation")
	}
	second := route(200e9)
	if table.Step(RouteUpdate{0, 2, prefixes[0], second}); table.Route(0, prefixes[0]) != second {
		t.Error("a session has no route after its update")
	}
}

// TestWhySubPortsDoNotCount verifies the reason of a sub-port with two sessions, whichever of them has which state.
func TestWhySubPortsDoNotCount(t *testing.T) {
	drained := Drain{Scope: DrainNode, Node: testNodes[0], On: true}
	for name, c := range map[string]struct {
		events []Event
		want   Reason
	}{
		"nothing":               {nil, ReasonLinkDown},
		"a link":                {[]Event{LinkState{Up: true, Speed: 400e9}}, ReasonSessionDown},
		"of unknown speed":      {[]Event{LinkState{Up: true}}, ReasonSpeedUnknown},
		"the first session":     {[]Event{LinkState{Up: true, Speed: 400e9}, SessionUp{0, 1, testNodes[0], 65001}}, ReasonUsed},
		"the second session":    {[]Event{LinkState{Up: true, Speed: 400e9}, SessionUp{1, 1, testNodes[0], 65001}}, ReasonUsed},
		"the first is drained":  {[]Event{LinkState{Up: true, Speed: 400e9}, SessionUp{0, 1, testNodes[0], 65001}, drained}, ReasonDrained},
		"the second is drained": {[]Event{LinkState{Up: true, Speed: 400e9}, SessionUp{1, 1, testNodes[0], 65001}, drained}, ReasonDrained},
		"the first is drained, not the second": {[]Event{LinkState{Up: true, Speed: 400e9}, SessionUp{0, 1, testNodes[0], 65001}, SessionUp{1, 1, testNodes[1], 65001}, drained},
			ReasonUsed},
		"the second is drained, not the first": {[]Event{LinkState{Up: true, Speed: 400e9}, SessionUp{1, 1, testNodes[0], 65001}, SessionUp{0, 1, testNodes[1], 65001}, drained},
			ReasonUsed},
		"the sub-port is drained": {[]Event{LinkState{Up: true, Speed: 400e9}, SessionUp{0, 1, testNodes[0], 65001}, Drain{Scope: DrainSubPort, On: true}}, ReasonDrained},
		"the plane is drained":    {[]Event{LinkState{Up: true, Speed: 400e9}, SessionUp{0, 1, testNodes[0], 65001}, Drain{Scope: DrainPlane, On: true}}, ReasonDrained},
	} {
		table, err := NewTable(Config{Planes: []string{"p"}, SubPorts: []SubPort{{Device: "d"}}, Sessions: []Session{{Name: "s"}, {Name: "v"}}})
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range c.events {
			table.Step(e)
		}
		if v := table.SubPort(0); v.Reason != c.want || v.Drained != (name == "the sub-port is drained" || name == "the plane is drained") {
			t.Errorf("%s: %+v, want %s", name, v, c.want)
		}
	}
}

// TestBoundsOfAConfiguration verifies the greatest numbers of planes, sub-ports and sessions, and the indexes between
// them.
func TestBoundsOfAConfiguration(t *testing.T) {
	config := func(planes, subPorts, sessions int) (c Config) {
		for i := range planes {
			c.Planes = append(c.Planes, "p"+string(rune('a'+i)))
		}
		c.SubPorts = make([]SubPort, subPorts)
		for i := range sessions {
			c.Sessions = append(c.Sessions, Session{Name: "s" + string(rune(i+1))})
		}
		return c
	}
	edited := func(edit func(*Config)) Config {
		c := config(2, 2, 2)
		edit(&c)
		return c
	}
	for want, c := range map[string]Config{
		"":                        config(MaxPlanes, MaxSubPorts, MaxSessions),
		"planes: 65 given":        config(MaxPlanes+1, 1, 1),
		"more than 64 sub-ports":  config(1, MaxSubPorts+1, 1),
		"sessions: 4097 given":    config(1, 1, MaxSessions+1),
		"sub-ports[1]: plane 2":   edited(func(c *Config) { c.SubPorts[1].Plane = 2 }),
		"sub-ports[1]: plane -1":  edited(func(c *Config) { c.SubPorts[1].Plane = -1 }),
		"sessions[1]: sub-port 2": edited(func(c *Config) { c.Sessions[1].SubPort = 2 }),
		"sessions[0]: sub-port -": edited(func(c *Config) { c.Sessions[0].SubPort = -1 }),
		"sub-ports[0]: speed":     edited(func(c *Config) { c.SubPorts[0].Speed = MaxBandwidth + 1 }),
		"least preferred":         edited(func(c *Config) { c.LeastPreferred = AllSignals + 1 }),
		"missing bandwidth":       edited(func(c *Config) { c.Missing = MissingPolicy(len(missingNames)) }),
		"all missing":             edited(func(c *Config) { c.AllMissing = AllMissingPolicy(len(allMissingNames)) }),
		"all zero":                edited(func(c *Config) { c.AllZero = ZeroPolicy(len(zeroNames)) }),
		"conflict":                edited(func(c *Config) { c.Conflict = ConflictPolicy(len(conflictNames)) }),
		"role":                    edited(func(c *Config) { c.Role = Role(len(roleNames)) }),
		"scale 1000001":           edited(func(c *Config) { c.Sessions[1].Codec.Scale = MaxScale + 1 }),
		"FARE community":          edited(func(c *Config) { c.Sessions[1].Codec.FARESubType = 4 }),
	} {
		_, err := NewTable(c)
		if want == "" && err != nil || want != "" && (err == nil || strings.Count(err.Error(), want) != 1 || strings.Count(err.Error(), "\n") != 0) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	leaf := config(1, MaxSubPorts+1, 1)
	leaf.Role = RoleLeaf
	greatest := edited(func(c *Config) {
		c.Sessions[1] = Session{Name: "x", SubPort: 1, Codec: Codec{Scale: MaxScale, Min: 1, Max: 1}}
		c.SubPorts[1] = SubPort{Plane: 1, Speed: MaxBandwidth}
		c.LeastPreferred = AllSignals
	})
	for _, c := range []Config{leaf, greatest} {
		if _, err := NewTable(c); err != nil {
			t.Error(err)
		}
	}
}

// TestWeightsThatNeed128Bits verifies the weights of a node with two sub-ports whose parts and share exceed 64 bits
// together.
func TestWeightsThatNeed128Bits(t *testing.T) {
	c := Config{Planes: []string{"p"}, SubPorts: []SubPort{{Speed: 1<<51 - 1}, {Speed: 1<<51 - 3}, {Speed: 1<<51 - 5}}, Sessions: []Session{{Name: "a"}, {Name: "b", SubPort: 1}, {Name: "c", SubPort: 2}}}
	table, err := NewTable(c)
	if err != nil {
		t.Fatal(err)
	}
	for i, node := range []netip.Addr{testNodes[0], testNodes[0], testNodes[1]} {
		table.Step(LinkState{SubPort: i, Up: true})
		table.Step(SessionUp{i, 1, node, 65001})
		table.Step(RouteUpdate{i, 1, testPrefixes[0], &Attributes{ASPath: []uint32{65001, 64001}}})
	}
	id, _ := table.Destination(testPrefixes[0])
	if got, want := table.Group(id).Planes[0].SubPorts, []SubPortWeight{{0, 1}, {1, 1}, {2, 1}}; !slices.Equal(got, want) {
		t.Errorf("weights %v, want %v", got, want)
	}
}
