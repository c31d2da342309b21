package linux

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/fared/fared/internal/rtnl"
)

// TestUnrejectSetsTheGroupsRoutes: when a group carries packets again, its routes and no others are set once more.
func TestUnrejectSetsTheGroupsRoutes(t *testing.T) {
	d := offline(t, 2)
	d.set(1, 1, 1)
	d.set(2, 1, 2)
	for i := range 2 {
		d.leads(target6(i), 0, 1)
		d.leads(target6(2+i), 0, 2)
		d.leads(target4(i), 0, 1)
	}
	d.obey(t)
	g := d.state.have.groups[groupKey{1, v6}]
	// A route that leads to it by mistake is another's.
	d.state.have.routes.set(routeKey{mustPrefix(target4(1)), 254}, routeState{nexthop: g.id})
	d.state.have.routes.set(routeKey{mustPrefix(target6(3)), 254}, routeState{nexthop: g.id})
	for _, c := range []struct {
		rejecting, live bool
		want            []string
	}{
		{false, true, nil}, {true, false, nil}, {true, true, []string{target6(0), target6(1)}}, {false, true, nil},
	} {
		g.rejecting = c.rejecting
		pl := d.planner()
		pl.unreject(g, c.live)
		pl.planUnrejected()
		d.state.adoptPlan(&pl.plan)
		var got []string
		for _, o := range pl.routeOps {
			got = append(got, o.at.prefix.String())
			if o.kind != setRoute || o.id != g.id || o.key != g.key || o.flags != rtnl.Change || o.at.table != 254 {
				t.Errorf("%+v", o)
			}
		}
		slices.Sort(got)
		if !slices.Equal(got, c.want) || g.rejecting != (c.rejecting && !c.live) {
			t.Errorf("rejecting %v, live %v: routes %v, want %v; rejecting afterwards: %v", c.rejecting, c.live, got, c.want, g.rejecting)
		}
	}
}

// TestPlansByHand takes a group from its creation to its removal and checks the ops and the owners of buckets.
func TestPlansByHand(t *testing.T) {
	d := offline(t, 4)
	d.set(1, 1, 1, 1, 1)
	d.leads(target4(0), 0, 1)
	ops := d.obey(t)
	if countOps(ops, makeNexthop) != 5 || countOps(ops, setGroup) != 1 || countOps(ops, setRoute) != 1 || len(ops) != 7 {
		t.Errorf("the first destination: %+v", ops)
	}
	g := d.state.have.groups[groupKey{1, v4}]
	quarters := map[string]int{"p0": 16, "p1": 16, "p2": 16, "p3": 16}
	if got := d.sharesOf(g); !maps.Equal(got, quarters) || !g.exists || g.dropping || g.rejecting {
		t.Errorf("%v, %+v", got, g)
	}
	kept := func(ids map[uint32]bool) (n int) {
		for _, s := range g.segments {
			if ids[s.id] {
				n += s.size
			}
		}
		return n
	}
	before := map[uint32]bool{}
	for _, s := range g.segments {
		before[s.id] = true
	}
	d.set(1, 1, 1, 0, 1)
	ops = d.obey(t)
	if countOps(ops, setGroup) != 1 || countOps(ops, setRoute) != 0 || kept(before) != 48 || len(g.witnesses) != 1 || g.moved {
		t.Errorf("a weight of 0 moves its 16 buckets in one message, with a witness: %d kept, %+v", kept(before), g)
	}
	d.set(1, 2, 2, 0, 2)
	if ops = d.obey(t); len(ops) != 0 {
		t.Errorf("weights in the same ratio: %+v", ops)
	}
	// The witness goes some time later.
	d.state.config.witnessTime = 1
	d.state.staleGroups[g.key] = true
	members := len(g.members)
	if ops = d.obey(t); len(ops) != 1 || ops[0].kind != setGroup || len(g.witnesses) != 0 || len(g.members) != members-1 || g.segments == nil || g.dropping {
		t.Errorf("the witness: %+v, %+v", ops, g)
	}
	d.state.staleGroups[g.key] = true
	if ops = d.obey(t); len(ops) != 0 {
		t.Errorf("at rest: %+v", ops)
	}
	d.state.config.witnessTime = time.Hour
	// Nothing left.
	d.set(1)
	if ops = d.obey(t); countOps(ops, setGroup) != 1 || !g.dropping || g.segments != nil || len(g.members) != 1 || d.state.have.owners[g.members[0].ID] != d.state.have.hole[v4] {
		t.Errorf("no members: %+v, %+v", ops, g)
	}
	d.state.want.generation++
	d.state.staleGroups[g.key] = true
	if ops = d.obey(t); len(ops) != 0 || g.generation != d.state.want.generation {
		t.Errorf("no members still: %+v, %+v", ops, g)
	}
	// It drops, and another program has changed it.
	g.moved = true
	d.state.staleGroups[g.key] = true
	if ops = d.obey(t); countOps(ops, setGroup) != 1 || g.moved || !g.dropping {
		t.Errorf("a group that drops was changed: %+v", ops)
	}
	d.set(1, 0, 0, 0, 5)
	if d.obey(t); !maps.Equal(d.sharesOf(g), map[string]int{"p3": 64}) || g.dropping {
		t.Errorf("%v", d.sharesOf(g))
	}
	d.set(1, 1, 1, 1, 1)
	d.obey(t)

	// A lost carrier costs one message, and the equal weights of the control plane none.
	d.links.takeLinks([]rtnl.LinkEvent{{Link: rtnl.Link{Index: 12, Name: "p2", Up: true}}})
	if !g.moved || !slices.Equal(g.weights, []uint32{1, 1, 0, 1}) {
		t.Errorf("a lost carrier: %+v", g)
	}
	if ops = d.obey(t); countOps(ops, setGroup) != 1 || g.moved || !maps.Equal(d.sharesOf(g), map[string]int{"p0": 22, "p1": 21, "p3": 21}) {
		t.Errorf("a lost carrier: %+v, %v", ops, d.sharesOf(g))
	}
	d.set(1, 2, 2, 0, 2)
	if ops = d.obey(t); len(ops) != 0 {
		t.Errorf("equal weights: %+v", ops)
	}
	// Weights and a lost carrier together cost one message.
	d.links.takeLinks([]rtnl.LinkEvent{{Link: rtnl.Link{Index: 11, Name: "p1", Up: true}}})
	d.set(1, 3, 0, 0, 1)
	if ops = d.obey(t); countOps(ops, setGroup) != 1 || !maps.Equal(d.sharesOf(g), map[string]int{"p0": 48, "p3": 16}) {
		t.Errorf("weights and a lost carrier: %+v, %v", ops, d.sharesOf(g))
	}
	d.set(1, 1, 1, 1, 1)
	d.obey(t)
	d.links.takeLinks([]rtnl.LinkEvent{{Link: rtnl.Link{Index: 10, Name: "p0", Up: true}}})
	d.links.takeLinks([]rtnl.LinkEvent{{Link: rtnl.Link{Index: 11, Name: "p1", Up: true, Carrier: true}}})
	if ops = d.obey(t); countOps(ops, setGroup) != 1 || !maps.Equal(d.sharesOf(g), map[string]int{"p1": 32, "p3": 32}) {
		t.Errorf("a carrier returns meanwhile: %+v, %v", ops, d.sharesOf(g))
	}
	for i := range 4 {
		d.links.takeLinks([]rtnl.LinkEvent{{Link: rtnl.Link{Index: 10 + i, Name: fmt.Sprintf("p%d", i), Up: true, Carrier: true}}})
	}
	d.obey(t)
	if got := d.sharesOf(g); !maps.Equal(got, quarters) {
		t.Errorf("all carriers: %v", got)
	}

	// A sub-port that gets another next hop for the family leaves the nexthops of the first.
	for i := range 4 {
		d.state.want.subPorts[i].hops[v4] = netip.Addr{}
		d.state.setHop(d.state.want.subPorts[i], v4)
	}
	d.state.want.generation++
	d.state.staleGroups[g.key] = true
	d.obey(t)
	for _, s := range g.segments {
		if q := d.state.have.owners[s.id]; q == nil || q.family != v6 {
			t.Errorf("without IPv4 next hops: %+v", s)
		}
	}
	for i := range 4 {
		d.state.want.subPorts[i].hops[v4] = netip.AddrFrom4([4]byte{10, 1, byte(i), 2})
		d.state.setHop(d.state.want.subPorts[i], v4)
	}
	d.state.want.generation++
	d.state.staleGroups[g.key] = true
	d.obey(t)
	for _, s := range g.segments {
		if q := d.state.have.owners[s.id]; q == nil || q.family != v4 {
			t.Errorf("with IPv4 next hops again: %+v", s)
		}
	}
	if len(d.state.have.retired) != 0 {
		t.Errorf("nexthops of no next hop are left: %v", d.state.have.retired)
	}
	// A segment whose device is unknown is replaced.
	d.state.have.owners[g.segments[0].id] = &pool{}
	d.set(1, 1, 1, 1, 2)
	d.obey(t)
	if got := d.sharesOf(g); got["p3"] != 25 || got[""] != 0 {
		t.Errorf("%v", got)
	}
	d.leads(target4(0), 1, 0)
	if ops = d.obey(t); countOps(ops, deleteRoute) != 1 || countOps(ops, deleteGroup) != 1 || len(ops) != 2 || len(d.state.have.groups) != 0 || d.state.have.routes.len() != 0 {
		t.Errorf("the end: %+v", ops)
	}
}

// TestPiecesStayFew: a group has few members after hundreds of changes, and a change of a group with few members moves
// only the buckets that change their owner.
func TestPiecesStayFew(t *testing.T) {
	d := offline(t, 8)
	d.state.resize(1024, 8)
	d.set(1, 1, 1, 1, 1, 1, 1, 1, 1)
	d.leads(target4(0), 0, 1)
	d.obey(t)
	g := d.state.have.groups[groupKey{1, v4}]
	for round := range 200 {
		weights := make([]uint32, 8)
		for i := range weights {
			weights[i] = uint32(1 + (round*7+i*i*5)%9)
		}
		d.set(1, weights...)
		d.obey(t)
		target := d.state.want.sources[netip.Prefix{}].layout.runs(weights)
		if most := 2*d.state.want.scaling.pieces(target) + 2*8 + 1; len(g.members) > most {
			t.Fatalf("round %d: %d members, above %d", round, len(g.members), most)
		}
		at := 0
		table := d.devices(g)
		for _, r := range target {
			for range r.size {
				if table[at] != fmt.Sprintf("p%d", r.subPort) {
					t.Fatalf("round %d: bucket %d is %s's, want p%d's", round, at, table[at], r.subPort)
				}
				at++
			}
		}
	}
	d.set(1, 1, 1, 1, 1, 1, 1, 1, 1)
	d.obey(t)
	g.segments = nil // all buckets are dealt
	g.weights = nil
	d.state.staleGroups[g.key] = true
	d.obey(t)
	before := map[uint32]bool{}
	for _, s := range g.segments {
		before[s.id] = true
	}
	if len(before) != 8 {
		t.Fatalf("%d nexthops, want one for each sub-port", len(before))
	}
	d.set(1, 1, 1, 1, 0, 1, 1, 1, 1)
	d.obey(t)
	kept := 0
	for _, s := range g.segments {
		if before[s.id] {
			kept += s.size
		}
	}
	if kept != 7*128 {
		t.Errorf("%d buckets stayed on their nexthops, want those of the 7 others", kept)
	}
}

// TestAsDealt checks which groups are recognized as dealt by an earlier run.
func TestAsDealt(t *testing.T) {
	d := offline(t, 3)
	scale := uint32(d.state.want.scaling.scale)
	d.state.have.owners[90] = d.state.have.drop[v4]
	d.state.have.owners[91] = d.state.have.drop[v4]
	d.state.have.owners[92] = d.state.have.drop[v6]
	segments := []segment{{1, 20}, {2, 24}, {1, 4}, {3, 16}}
	right := []rtnl.Member{{ID: 3, Weight: 16 * scale}, {ID: 1, Weight: 24 * scale}, {ID: 2, Weight: 24 * scale}, {ID: 90, Weight: 1}}
	with := func(change func(m []rtnl.Member) []rtnl.Member) []rtnl.Member { return change(slices.Clone(right)) }
	for _, c := range []struct {
		what    string
		members []rtnl.Member
		want    bool
	}{
		{"as dealt", right, true},
		{"with a witness", with(func(m []rtnl.Member) []rtnl.Member { return append(m, rtnl.Member{ID: 7, Weight: 1}) }), true},
		{"without the one that drops", right[:3], false},
		{"with two that drop", with(func(m []rtnl.Member) []rtnl.Member { return append(m, rtnl.Member{ID: 91, Weight: 1}) }), false},
		{"dropping for another family", with(func(m []rtnl.Member) []rtnl.Member { m[3].ID = 92; return m }), false},
		{"another weight", with(func(m []rtnl.Member) []rtnl.Member { m[1].Weight++; return m }), false},
		{"a weight of 1", with(func(m []rtnl.Member) []rtnl.Member { m[0].Weight = 1; return m }), false},
		{"a member without buckets, and a weight", with(func(m []rtnl.Member) []rtnl.Member { return append(m, rtnl.Member{ID: 7, Weight: 2}) }), false},
		{"no member for a segment", right[1:], false},
	} {
		if got := d.planner().asDealt(&group{key: groupKey{1, v4}, members: c.members, segments: segments}); got != c.want {
			t.Errorf("%s: %v", c.what, got)
		}
	}
}

// TestClaim checks which groups of an earlier run are claimed, and the state of a claimed group.
func TestClaim(t *testing.T) {
	scale := func(d *Driver) uint32 { return uint32(d.state.want.scaling.scale) }
	for _, c := range []struct {
		what                                     string
		key                                      groupKey
		change                                   func(d *Driver, s *stray)
		claimed, dropping, moved, rejecting, all bool
	}{
		{"as it was dealt", groupKey{1, v4}, nil, true, false, false, false, true},
		{"as it was dealt, IPv6", groupKey{1, v6}, func(d *Driver, s *stray) { s.Members[1].ID = 92 }, true, false, false, false, true},
		{"of another size", groupKey{1, v4}, func(_ *Driver, s *stray) { s.Buckets = 63 }, false, false, false, false, false},
		{"not resilient", groupKey{1, v4}, func(_ *Driver, s *stray) { s.Resilient = false }, false, false, false, false, false},
		{"with an idle timer", groupKey{1, v4}, func(_ *Driver, s *stray) { s.IdleTimer = 1 }, false, false, false, false, false},
		{"not there", groupKey{1, v4}, func(d *Driver, _ *stray) { clear(d.state.have.strays) }, false, false, false, false, false},
		{"dropping", groupKey{1, v4}, func(_ *Driver, s *stray) {
			s.Members, s.segments = []rtnl.Member{{ID: 80, Weight: 1}}, []segment{{80, 64}}
		}, true, true, false, false, false},
		{"dropping, IPv6", groupKey{1, v6}, func(_ *Driver, s *stray) {
			s.Members, s.segments = []rtnl.Member{{ID: 82, Weight: 1}}, []segment{{82, 64}}
		}, true, true, false, true, false},
		{"emptied by the kernel", groupKey{1, v6}, func(_ *Driver, s *stray) {
			s.Members, s.segments = []rtnl.Member{{ID: 92, Weight: 1}}, []segment{{92, 64}}
		}, true, false, true, true, false},
		{"moved by the kernel", groupKey{1, v4}, func(_ *Driver, s *stray) { s.segments = []segment{{1, 63}, {90, 1}} }, true, false, true, false, false},
		{"two members, the first a blackhole", groupKey{1, v4}, func(_ *Driver, s *stray) { s.Members[0].ID = 80 }, true, false, true, false, false},
	} {
		d := offline(t, 2)
		d.state.have.owners[80], d.state.have.owners[82], d.state.have.owners[90], d.state.have.owners[92] = d.state.have.hole[v4], d.state.have.hole[v6], d.state.have.drop[v4], d.state.have.drop[v6]
		at := routeKey{mustPrefix(target4(0)), 254}
		s := stray{rtnl.Nexthop{ID: 500, Members: []rtnl.Member{{ID: 1, Weight: 64 * scale(d)}, {ID: 90, Weight: 1}}, Resilient: true, Buckets: 64}, []segment{{1, 64}}}
		d.state.have.strays[500] = stray{}
		d.state.have.routes.set(at, routeState{nexthop: 500})
		if c.change != nil {
			c.change(d, &s)
		}
		if _, ok := d.state.have.strays[500]; ok {
			d.state.have.strays[500] = s
		}
		d.state.have.groups[c.key] = &group{key: c.key}
		pl := d.planner()
		pl.claim(c.key, at)
		d.state.adoptPlan(&pl.plan)
		g := d.state.have.groups[c.key]
		if claimed := g.id == 500; claimed != c.claimed || g.exists != claimed || g.dropping != c.dropping || g.moved != c.moved || g.rejecting != c.rejecting ||
			d.state.staleGroups[c.key] != claimed || (g.segments != nil) != c.all || claimed && !slices.Equal(g.members, s.Members) {
			t.Errorf("%s: %+v", c.what, g)
		}
		if _, ok := d.state.have.strays[500]; ok == c.claimed && c.what != "not there" {
			t.Errorf("%s: among what nothing has claimed: %v", c.what, ok)
		}
		if g.id == 0 {
			t.Errorf("%s: no id", c.what)
		}
		pl = d.planner()
		if again := pl.claim(c.key, at); again != g || len(pl.groups)+len(pl.incomplete) != 0 {
			t.Errorf("%s: claimed twice", c.what)
		}
	}
}

// TestNewPlan checks the ops of single plans, from a driver at rest with four sub-ports, vector 1 and a destination of
// each family, and that planning changes none of its inputs.
func TestNewPlan(t *testing.T) {
	type kinds struct{ makeNexthop, changeNexthop, setGroup, setRoute, deleteRoute, deleteGroup, deleteNexthop int }
	lose := func(d *Driver) {
		d.links.takeLinks([]rtnl.LinkEvent{{Link: rtnl.Link{Index: 12, Name: "p2", Up: true}}})
	}
	at := routeKey{mustPrefix(target4(0)), offlineTable}
	for _, c := range []struct {
		name   string
		change func(d *Driver)
		want   kinds
	}{
		{"at rest", func(*Driver) {}, kinds{}},
		{"all stale", func(d *Driver) { d.state.staleEverywhere(); d.state.stale(d.state.want.subPorts[0]) }, kinds{}},
		{"same weights", func(d *Driver) { d.set(1, 2, 2, 2, 2) }, kinds{}},
		{"a weight of 0", func(d *Driver) { d.set(1, 1, 1, 0, 1) }, kinds{makeNexthop: 6, setGroup: 2}},
		{"no weight", func(d *Driver) { d.set(1) }, kinds{makeNexthop: 2, setGroup: 2}},
		{"a destination", func(d *Driver) { d.leads(target4(1), 0, 1) }, kinds{setRoute: 1}},
		{"a destination less", func(d *Driver) { d.leads(target4(0), 1, 0) }, kinds{deleteRoute: 1, deleteGroup: 1}},
		{"another vector", func(d *Driver) { d.set(2, 1, 1, 1, 1); d.leads(target4(0), 1, 2) }, kinds{setGroup: 1, setRoute: 1, deleteGroup: 1}},
		{"a destination that comes and goes", func(d *Driver) { d.leads(target4(1), 0, 3); d.leads(target4(1), 3, 0) }, kinds{}},
		{"a failed link", lose, kinds{makeNexthop: 10, setGroup: 2}},
		{"a failed link, with new weights", func(d *Driver) { lose(d); d.set(1, 1, 1, 1, 1) }, kinds{makeNexthop: 10, setGroup: 2}},
		{"another gateway", func(d *Driver) {
			d.state.want.subPorts[0].hops[v4] = netip.MustParseAddr("10.1.0.9")
			d.state.setHop(d.state.want.subPorts[0], v4)
		}, kinds{changeNexthop: 1}},
		{"another source address", func(d *Driver) {
			d.state.want.order[0].loopbacks = []netip.Prefix{mustPrefix("10.255.0.1/32")}
			d.state.have.addresses[netip.MustParseAddr("10.255.0.1")] = true
			d.state.staleSources()
		}, kinds{setRoute: 1}},
		{"a route that is gone", func(d *Driver) { d.state.have.routes.remove(at); d.state.staleRoutes[at] = true }, kinds{setRoute: 1}},
		{"an unwanted route", func(d *Driver) {
			standing, _ := d.state.have.routes.get(at)
			d.state.have.routes.set(routeKey{mustPrefix(target4(9)), offlineTable}, standing)
			d.state.staleRoutes[routeKey{mustPrefix(target4(9)), offlineTable}] = true
		}, kinds{deleteRoute: 1}},
		{"routes that may reject", func(d *Driver) {
			g := d.state.have.groups[groupKey{1, v6}]
			g.rejecting, d.state.staleGroups[g.key] = true, true
		}, kinds{setRoute: 1}},
		{"a retired nexthop", func(d *Driver) {
			d.state.have.retired = []uint32{4711, d.state.have.groups[groupKey{1, v4}].members[0].ID}
		}, kinds{deleteNexthop: 1}},
	} {
		d := offline(t, 4)
		d.set(1, 1, 1, 1, 1)
		d.leads(target4(0), 0, 1)
		d.leads(target6(0), 0, 1)
		d.obey(t)
		c.change(d)
		s := d.state.scope()
		before := d.planInputs()
		pl := newPlan(&d.state.want, &d.state.have, s)
		if after := d.planInputs(); after != before {
			t.Errorf("%s: planning changed\n%s\nto\n%s", c.name, before, after)
		}
		var got kinds
		for _, o := range slices.Concat(pl.nexthopOps, pl.groupOps, pl.closeOps, pl.routeOps, pl.lastOps, pl.openOps) {
			*[]*int{&got.makeNexthop, &got.changeNexthop, &got.setGroup, &got.setRoute, &got.deleteRoute, &got.deleteGroup, &got.deleteNexthop}[o.kind]++
		}
		if got != c.want {
			t.Errorf("%s: %+v, want %+v", c.name, got, c.want)
		}
	}
}
