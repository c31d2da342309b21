package linux

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/internal/rtnl"
)

// Names of the source groups of partition; noName is that of all loopbacks where a Forwarding lists no source groups.
var nameA, nameB, nameC, noName = mustPrefix("10.255.0.1/32"), mustPrefix("10.255.0.2/32"), mustPrefix("10.255.0.3/32"), netip.Prefix{}

// partition returns a Forwarding with the source groups A, B, ... over p0 to p3: A has p0 and p1, B p1 to p3, C p3.
func partition(d *Driver, groups string) *farev1.Forwarding {
	f := &farev1.Forwarding{Planes: d.forwarding.Planes}
	for _, g := range groups {
		i := int(g - 'A')
		loopbacks := []string{fmt.Sprintf("10.255.0.%d/32", i+1), fmt.Sprintf("fd00:255::%d/128", i+1)}
		f.Loopbacks = append(f.Loopbacks, loopbacks...)
		f.SourceGroups = append(f.SourceGroups, &farev1.SourceGroup{
			Loopbacks: loopbacks, Devices: [][]string{{"p0", "p1"}, {"p1", "p2", "p3"}, {"p3"}}[i],
		})
	}
	return f
}

// serves moves a destination of a source group from one group to another; 0 is no group.
func (d *Driver) serves(source netip.Prefix, prefix string, from, to uint32) {
	c := contract.Change{Kind: contract.DestinationChange, Source: source, Prefix: mustPrefix(prefix)}
	c.From.Group, c.To.Group = from, to
	d.state.applyChange(c, map[groupKey]bool{}, map[routeKey]bool{})
}

// TestTablesOfSources checks the tables of source groups through a sequence of Hellos.
func TestTablesOfSources(t *testing.T) {
	const main, first = offlineTable, DefaultSourceTable
	d := offline(t, 4)
	tables := func() map[netip.Prefix][2]uint32 {
		all := map[netip.Prefix][2]uint32{}
		for name, s := range d.state.want.sources {
			all[name] = [2]uint32{s.table, s.own}
		}
		return all
	}
	hello := func(groups string, other bool, want map[netip.Prefix][2]uint32, claimants map[uint32][]netip.Prefix) {
		t.Helper()
		if got := d.state.setSources(partition(d, groups)); got != other {
			t.Errorf("%q: differs from before is %v", groups, got)
		}
		if got := tables(); !maps.Equal(got, want) || !maps.EqualFunc(d.state.want.claimants, claimants, slices.Equal) {
			t.Errorf("%q: tables %v, want %v; claimants %v, want %v", groups, got, want, d.state.want.claimants, claimants)
		}
		for own, s := range d.state.want.tables {
			if s.own != own {
				t.Errorf("%q: table %d is %v's", groups, own, s.name)
			}
		}
		n := 0
		for _, s := range d.state.want.sources {
			if s.own != 0 && !s.gone {
				n++
			}
		}
		if len(d.state.want.tables) != n {
			t.Errorf("%q: tables %v, want %d", groups, d.state.want.tables, n)
		}
	}
	hello("", false, map[netip.Prefix][2]uint32{noName: {main, 0}}, map[uint32][]netip.Prefix{main: {noName}})
	d.leads(target4(0), 0, 1)
	// B's table is known from the rules of an earlier run, and C's rule leads to a table that another source group has.
	d.state.have.ruled = map[netip.Prefix]uint32{nameB: first + 1, nameC: first + 1}
	hello("ABC", true, map[netip.Prefix][2]uint32{noName: {main, 0}, nameA: {main, first}, nameB: {first + 1, first + 1}, nameC: {first + 2, first + 2}},
		map[uint32][]netip.Prefix{main: {nameA, noName}, first + 1: {nameB}, first + 2: {nameC}})
	if !d.state.want.sources[noName].gone || len(d.state.want.sources[noName].subPorts) != 4 || d.state.want.sources[nameA].gone {
		t.Errorf("%+v", d.state.want.sources[noName])
	}
	hello("ABC", false, tables(), maps.Clone(d.state.want.claimants))
	d.leads(target4(0), 1, 0)
	hello("ABC", true, map[netip.Prefix][2]uint32{nameA: {main, first}, nameB: {first + 1, first + 1}, nameC: {first + 2, first + 2}},
		map[uint32][]netip.Prefix{main: {nameA}, first + 1: {nameB}, first + 2: {nameC}})
	// Another order: the first one's routes are in the main table.
	hello("BAC", true, map[netip.Prefix][2]uint32{nameA: {first, first}, nameB: {main, first + 1}, nameC: {first + 2, first + 2}},
		map[uint32][]netip.Prefix{main: {nameB}, first: {nameA}, first + 2: {nameC}})
	// One goes: its table is free, unless something is programmed for it.
	hello("BC", true, map[netip.Prefix][2]uint32{nameB: {main, first + 1}, nameC: {first + 2, first + 2}}, map[uint32][]netip.Prefix{main: {nameB}, first + 2: {nameC}})
	d.serves(nameC, target4(1), 0, 3)
	hello("BA", true, map[netip.Prefix][2]uint32{nameB: {main, first + 1}, nameA: {first, first}, nameC: {first + 2, first + 2}},
		map[uint32][]netip.Prefix{main: {nameB}, first: {nameA}, first + 2: {nameC}})
	if s := d.state.want.sources[nameC]; !s.gone || len(s.subPorts) != 1 || d.state.want.sources[nameA].gone {
		t.Errorf("%+v", s)
	}
	delete(d.state.want.byDevice, "p3")
	f := partition(d, "BA")
	f.Planes = f.Planes[:3]
	f.SourceGroups[0].Devices = []string{"p1", "p2"}
	if !d.state.setSources(f) || len(d.state.want.sources[nameC].subPorts) != 0 || d.state.want.sources[nameC].index(d.state.want.subPorts[3]) != -1 || len(d.state.want.sources[nameB].subPorts) != 2 ||
		d.state.want.sources[nameB].index(d.state.want.subPorts[2]) != 1 || d.state.want.sources[nameB].index(d.state.want.subPorts[0]) != -1 {
		t.Errorf("without p3: %+v, %+v", d.state.want.sources[nameB], d.state.want.sources[nameC])
	}
	if d.state.want.sources[nameB].layout != (layout{64, 2}) || d.state.want.lasting != 4 {
		t.Errorf("%+v, lasting %d", d.state.want.sources[nameB].layout, d.state.want.lasting)
	}
	// One that is alone needs no table.
	d.serves(nameC, target4(1), 3, 0)
	d.state.setSources(partition(d, "")) // as Server has it: none is listed, so that all loopbacks are in one
	if got := tables(); !maps.Equal(got, map[netip.Prefix][2]uint32{noName: {main, 0}}) || len(d.state.want.tables) != 0 {
		t.Errorf("alone: %v, %v", got, d.state.want.tables)
	}
}

// TestOrderOfSubPorts: a Hello with the same sub-ports in another order differs.
func TestOrderOfSubPorts(t *testing.T) {
	d := offline(t, 3)
	f := &farev1.Forwarding{Planes: slices.Clone(d.forwarding.Planes)}
	if d.state.setSources(f) {
		t.Error("the same is another one")
	}
	f.Planes[0], f.Planes[1] = f.Planes[1], f.Planes[0]
	if !d.state.setSources(f) {
		t.Error("another order is the same")
	}
	if s := d.state.want.sources[noName]; s.index(d.state.want.subPorts[1]) != 0 || s.index(d.state.want.subPorts[0]) != 1 || s.index(d.state.want.subPorts[2]) != 2 || s.index(&subPort{}) != -1 {
		t.Errorf("%+v", s)
	}
	if s := d.state.want.sourceOf(nameA); s == nil || s.name != nameA || len(s.subPorts) != 0 || s.index(d.state.want.subPorts[0]) != -1 {
		t.Errorf("a source group that is not there: %+v", s)
	}
	if (&source{}).text() != "" || (&source{name: nameA}).text() != "10.255.0.1/32" {
		t.Error("names")
	}
}

// TestRoutesOfSources compares the routes of all tables of three source groups with the rule of doc.go: a source
// group's own table drops the destinations that only other source groups have.
func TestRoutesOfSources(t *testing.T) {
	d := offline(t, 4)
	d.state.setSources(partition(d, "ABC"))
	d.set(1, 1, 1)
	d.set(2, 0, 1, 1, 1)
	d.set(3, 0, 0, 0, 1)
	groups := map[netip.Prefix]uint32{nameA: 1, nameB: 2, nameC: 3}
	order := []netip.Prefix{nameA, nameB, nameC}
	has := map[netip.Prefix]map[int]bool{nameA: {}, nameB: {}, nameC: {}}
	check := func(step int) {
		t.Helper()
		closed := map[routeKey]bool{}
		for i := range 3 {
			prefix := mustPrefix(target4(i))
			anywhere := false
			for _, name := range order {
				anywhere = anywhere || has[name][i]
			}
			for k, name := range order {
				own := d.state.want.sources[name].own
				at := routeKey{prefix, own}
				wanted, ok := d.state.want.wantedAt(at)
				switch {
				case k > 0 && has[name][i]:
					if !ok || wanted != groups[name] {
						t.Fatalf("step %d: %v of %v: %d, %v", step, prefix, name, wanted, ok)
					}
				case anywhere && !(has[name][i]):
					closed[at] = true
					if !ok || wanted != 0 || !d.state.want.closedAt(at) {
						t.Fatalf("step %d: %v, which %v does not have: %d, %v", step, prefix, name, wanted, ok)
					}
				default: // no source group has it, or the first one, in the main table
					if ok {
						t.Fatalf("step %d: %v of %v: %d, want no route", step, prefix, name, wanted)
					}
				}
			}
			wanted, ok := d.state.want.wantedAt(routeKey{prefix, offlineTable})
			if ok != has[nameA][i] || ok && wanted != 1 {
				t.Fatalf("step %d: %v in the main table: %d, %v", step, prefix, wanted, ok)
			}
		}
		got := map[routeKey]bool{}
		for _, at := range d.state.want.closedRoutes() {
			got[at] = true
		}
		if !maps.Equal(got, closed) {
			t.Fatalf("step %d: closed %v, want %v", step, got, closed)
		}
		// Plans brought about exactly that.
		d.obey(t)
		for at, r := range d.state.have.routes.all() {
			wanted, ok := d.state.want.wantedAt(at)
			if g := d.state.have.groups[groupKey{wanted, v4}]; !ok || wanted == 0 && d.state.have.owners[r.nexthop] != d.state.have.hole[v4] || wanted != 0 && r.nexthop != g.id {
				t.Fatalf("step %d: at %v stands %v, want %d, %v", step, at, r, wanted, ok)
			}
		}
		n := len(closed)
		for _, name := range order {
			n += len(has[name])
		}
		if d.state.have.routes.len() != n || d.state.want.destinations.Len() != n-len(closed) {
			t.Fatalf("step %d: %d routes, want %d", step, d.state.have.routes.len(), n)
		}
	}
	check(-1)
	for step := range 200 {
		name, i := order[step*step%7%3], (step*5+step/3)%3
		from, to := uint32(0), groups[name]
		if has[name][i] {
			from, to = to, 0
			delete(has[name], i)
		} else {
			has[name][i] = true
		}
		d.serves(name, target4(i), from, to)
		check(step)
	}
	for k := range d.state.want.destinations.All() {
		key := contract.DestinationKey{Source: k.Group, Prefix: k.Prefix}
		if place, ok := d.state.want.place(key); !ok || place != (routeKey{key.Prefix, d.state.want.sources[key.Source].table}) {
			t.Errorf("%v is at %v, %v", key, place, ok)
		}
	}
	if _, ok := d.state.want.place(contract.DestinationKey{Source: noName, Prefix: mustPrefix(target4(0))}); ok {
		t.Error("a source group that is not there has a place")
	}
	for address, want := range map[string]netip.Prefix{"10.255.0.1": nameA, "10.255.0.2": nameB, "fd00:255::3": nameC, "10.1.0.1": nameA} {
		if got := d.state.want.sourceFrom(netip.MustParseAddr(address)).name; got != want {
			t.Errorf("packets from %s are %v's, want %v", address, got, want)
		}
	}
}

// TestOrderOfAPlan: routes that drop packets are set before, and removed after, the routes that these packets would
// take.
func TestOrderOfAPlan(t *testing.T) {
	d := offline(t, 4)
	d.state.setSources(partition(d, "AB"))
	d.set(1, 1, 1)
	d.serves(nameA, target4(0), 0, 1)
	index := func(ops []op, kind opKind, table uint32) int {
		i := slices.IndexFunc(ops, func(o op) bool { return o.kind == kind && o.at.table == table })
		if i < 0 {
			t.Fatalf("no op of kind %d in table %d: %+v", kind, table, ops)
		}
		return i
	}
	own := d.state.want.sources[nameB].own
	ops := d.obey(t)
	if index(ops, setRoute, own) > index(ops, setRoute, offlineTable) || d.state.have.routes.len() != 2 {
		t.Errorf("set: %+v", ops)
	}
	d.serves(nameA, target4(0), 1, 0)
	ops = d.obey(t)
	if index(ops, deleteRoute, own) < index(ops, deleteRoute, offlineTable) || d.state.have.routes.len() != 0 {
		t.Errorf("removed: %+v", ops)
	}
	if i := slices.IndexFunc(ops, func(o op) bool { return o.kind == deleteGroup }); i < index(ops, deleteRoute, offlineTable) {
		t.Errorf("a group goes before its routes: %+v", ops)
	}
	// A Hello without source groups has no place for routes that drop.
	d.serves(nameA, target4(0), 0, 1)
	d.obey(t)
	d.state.setSources(partition(d, ""))
	at := routeKey{mustPrefix(target4(0)), own}
	if standing, _ := d.state.have.routes.get(at); !d.state.staleRoutes[at] || standing.nexthop == 0 {
		t.Errorf("%v is not looked at: %v", at, d.state.staleRoutes)
	}
	if d.obey(t); d.state.have.routes.len() != 1 {
		t.Errorf("%v", maps.Collect(d.state.have.routes.all()))
	}
}

// TestRulesOfSources: a rule for each loopback of each source group that has a table, before the one for a table
// outside main.
func TestRulesOfSources(t *testing.T) {
	d := offline(t, 4)
	if got := d.rules.wanted(); len(got) != 0 {
		t.Errorf("nothing but the main table: %v", got)
	}
	d.state.setSources(partition(d, "AB"))
	rule := func(family uint8, priority, table uint32, source string) rtnl.Rule {
		r := rtnl.Rule{Family: family, Priority: priority, Table: table, Protocol: 179}
		if source != "" {
			r.Source = mustPrefix(source)
		}
		return r
	}
	const a, b = DefaultSourceTable, DefaultSourceTable + 1
	four := []rtnl.Rule{rule(unix.AF_INET, 9999, a, "10.255.0.1/32"), rule(unix.AF_INET, 9999, b, "10.255.0.2/32")}
	six := []rtnl.Rule{rule(unix.AF_INET6, 9999, a, "fd00:255::1/128"), rule(unix.AF_INET6, 9999, b, "fd00:255::2/128")}
	if got := d.rules.wanted(); !slices.Equal(got, slices.Concat(four, six)) {
		t.Errorf("%v", got)
	}
	d.state.ipv6, d.state.config.Table = false, 7000
	if got := d.rules.wanted(); !slices.Equal(got, slices.Concat([]rtnl.Rule{rule(unix.AF_INET, 10000, 7000, "")}, four)) {
		t.Errorf("IPv4 alone, another table: %v", got)
	}
}

// TestPreferredSources: a route names the first loopback of its family and source group that the kernel takes.
func TestPreferredSources(t *testing.T) {
	d := offline(t, 4)
	f := partition(d, "AB")
	f.SourceGroups[0].Loopbacks = append(f.SourceGroups[0].Loopbacks, "10.255.0.11/32", "fd00:255::11/128")
	d.state.setSources(f)
	d.set(1, 1, 1)
	for _, to := range []string{target4(0), target6(0)} {
		d.serves(nameA, to, 0, 1)
	}
	addr := netip.MustParseAddr
	four, six := routeKey{mustPrefix(target4(0)), offlineTable}, routeKey{mustPrefix(target6(0)), offlineTable}
	for _, c := range []struct {
		has, unfit []string
		four, six  string // "": none
	}{
		{nil, nil, "", ""}, {[]string{"10.255.0.1", "fd00:255::1", "10.255.0.11", "fd00:255::11"}, nil, "10.255.0.1", "fd00:255::1"},
		{[]string{"10.255.0.11", "fd00:255::11"}, nil, "10.255.0.11", "fd00:255::11"}, {[]string{"10.255.0.2", "fd00:255::2"}, nil, "", ""},
		{[]string{"10.255.0.1", "10.255.0.11"}, []string{"10.255.0.1"}, "10.255.0.11", ""},
	} {
		clear(d.state.have.addresses)
		clear(d.state.have.unfit)
		for _, a := range c.has {
			d.state.have.addresses[addr(a)] = true
		}
		for _, a := range c.unfit {
			d.state.have.unfit[addr(a)] = true
		}
		for at, want := range map[routeKey]string{four: c.four, six: c.six} {
			first := map[bool]string{true: "10.255.0.1", false: "fd00:255::1"}[at.prefix.Addr().Is4()]
			got, could := d.state.want.loopbackFor(at, &d.state.have)
			if got.IsValid() != (want != "") || want != "" && got != addr(want) || could != addr(first) || d.state.want.preferred(at, &d.state.have) != got {
				t.Errorf("%+v: %v names %v, want %q; the first is %v", c, at, got, want, could)
			}
		}
		// One that names another is to be set again, and what drops is none of it.
		for f, at := range []routeKey{four, six} {
			clear(d.state.staleRoutes)
			closed := routeKey{at.prefix, d.state.want.sources[nameB].own}
			d.state.have.routes = statesOf(map[routeKey]routeState{at: {source: d.state.want.preferred(at, &d.state.have)}, closed: {source: addr("10.9.9.9")}})
			if d.state.staleSources(); len(d.state.staleRoutes) != 0 {
				t.Errorf("%+v, family %d: %v", c, f, d.state.staleRoutes)
			}
			d.state.have.routes.set(at, routeState{source: addr("10.9.9.9")})
			if d.state.staleSources(); !maps.Equal(d.state.staleRoutes, map[routeKey]bool{at: true}) {
				t.Errorf("%+v, family %d, another address: %v", c, f, d.state.staleRoutes)
			}
		}
	}
	if got, first := d.state.want.loopbackFor(routeKey{mustPrefix(target4(0)), d.state.want.sources[nameB].own}, &d.state.have); got.IsValid() || first.IsValid() {
		t.Errorf("a route that drops names %v", got)
	}
	for a, want := range map[string]bool{"10.255.0.1": true, "fd00:255::2": true, "10.255.0.11": true, "10.1.0.1": false} {
		if d.state.want.isLoopback(addr(a)) != want {
			t.Errorf("%s: is a loopback is %v", a, !want)
		}
	}
}

// TestRecoverByHand checks the weights, source groups and destinations recovered from an earlier run, and their order.
func TestRecoverByHand(t *testing.T) {
	d := offline(t, 4)
	d.state.setSources(partition(d, "AB"))
	own := d.state.want.sources[nameB].own
	for i, sp := range d.state.want.subPorts {
		for f := range sp.pools {
			id := uint32(10 + 2*i + f)
			d.state.have.owners[id] = sp.pools[f]
		}
	}
	d.state.have.owners[90] = d.state.have.drop[v4]
	d.state.have.strays[500] = stray{segments: []segment{{10, 8}, {12, 12}, {10, 12}, {90, 1}, {99, 31}}}
	d.state.have.strays[501] = stray{segments: []segment{{13, 21}, {15, 21}, {17, 22}, {11, 3}}} // p0 is none of B's
	d.state.have.strays[502] = stray{}
	at := func(prefix string, table uint32) routeKey { return routeKey{mustPrefix(prefix), table} }
	d.state.have.routes = statesOf(map[routeKey]routeState{
		at(target6(0), own): {nexthop: 501}, at(target4(2), offlineTable): {nexthop: 500}, at(target4(1), offlineTable): {nexthop: 502},
		at(target4(0), offlineTable): {nexthop: 500}, at(target4(4), offlineTable): {nexthop: 77}, at(target4(5), own+7): {nexthop: 500},
	})
	// The tables are in the order of their numbers.
	first, second := int(offlineTable), int(own)
	if first > second {
		t.Fatal("the test takes the main table for the first one")
	}
	got := d.Recover()
	var text []string
	for _, g := range got.GetVectors() {
		line := fmt.Sprint("group ", g.Id, " ", g.Source)
		for _, m := range g.Members {
			line += fmt.Sprintf(" %s/%s*%d", m.Plane, m.Device, m.Weight)
		}
		text = append(text, line)
	}
	for _, d := range got.GetDestinations() {
		text = append(text, fmt.Sprint(d.Prefix, " ", d.Source, " ", d.Vector))
	}
	want := []string{
		"group 1 10.255.0.1/32 p0/p0*5 p1/p1*3", "group 2 10.255.0.1/32", "group 3 10.255.0.2/32 p1/p1*21 p2/p2*21 p3/p3*22",
		target4(0) + " 10.255.0.1/32 1", target4(1) + " 10.255.0.1/32 2", target4(2) + " 10.255.0.1/32 1", target6(0) + " 10.255.0.2/32 3",
	}
	if !slices.Equal(text, want) {
		t.Errorf("%q\nwant\n%q", text, want)
	}
	clear(d.state.have.strays)
	if got := d.Recover(); got != nil {
		t.Errorf("nothing is left: %v", got)
	}
	if planeOf(d.forwarding, "p3") != "p3" || planeOf(d.forwarding, "p9") != "" {
		t.Error("planes", planeOf(d.forwarding, "p3"), planeOf(d.forwarding, "p9"))
	}
	for _, c := range [][3]uint32{{12, 18, 6}, {0, 5, 5}, {5, 0, 5}, {7, 3, 1}, {8, 8, 8}} {
		if got := gcd(c[0], c[1]); got != c[2] {
			t.Errorf("gcd of %v is %d", c, got)
		}
	}
}

// TestGroupsReadBack checks the state of a group after the kernel was read back.
func TestGroupsReadBack(t *testing.T) {
	type result struct {
		exists, moved, dropping, rejecting, knowsWeights, knowsSegments, keepsID, stale bool
		differences                                                                     uint64
	}
	intact := result{exists: true, knowsWeights: true, knowsSegments: true, keepsID: true}
	gone := result{keepsID: true, differences: 1}
	for _, c := range []struct {
		what   string
		f      family
		change func(d *Driver, g *group, ours map[uint32]rtnl.Nexthop)
		want   result
	}{
		{"as it was", v4, nil, intact},
		{"gone", v4, func(_ *Driver, g *group, ours map[uint32]rtnl.Nexthop) { delete(ours, g.id) }, gone},
		{"gone as it should be", v4, func(_ *Driver, g *group, ours map[uint32]rtnl.Nexthop) { delete(ours, g.id); g.exists = false }, result{keepsID: true}},
		{"no group", v4, func(_ *Driver, g *group, ours map[uint32]rtnl.Nexthop) {
			edit(ours, g.id, func(n *rtnl.Nexthop) { n.Members = nil })
		}, result{stale: true, differences: 1}},
		{"not resilient", v4, func(_ *Driver, g *group, ours map[uint32]rtnl.Nexthop) {
			edit(ours, g.id, func(n *rtnl.Nexthop) { n.Resilient = false })
		}, result{stale: true, differences: 1}},
		{"another size", v4, func(_ *Driver, g *group, ours map[uint32]rtnl.Nexthop) {
			edit(ours, g.id, func(n *rtnl.Nexthop) { n.Buckets = 63 })
		}, result{stale: true, differences: 1}},
		{"an idle timer", v4, func(_ *Driver, g *group, ours map[uint32]rtnl.Nexthop) {
			edit(ours, g.id, func(n *rtnl.Nexthop) { n.IdleTimer = 1 })
		}, result{stale: true, differences: 1}},
		{"made by a batch without answers", v4, func(_ *Driver, g *group, _ map[uint32]rtnl.Nexthop) {
			g.exists, g.members, g.segments, g.weights = false, nil, nil, nil
		}, result{exists: true, moved: true, keepsID: true}},
		{"another weight", v4, func(_ *Driver, g *group, ours map[uint32]rtnl.Nexthop) {
			edit(ours, g.id, func(n *rtnl.Nexthop) { n.Members[0].Weight++ })
		}, result{exists: true, moved: true, keepsID: true, differences: 1}},
		{"without a member", v4, func(_ *Driver, g *group, ours map[uint32]rtnl.Nexthop) {
			edit(ours, g.id, func(n *rtnl.Nexthop) { n.Members = n.Members[1:] })
		}, result{exists: true, moved: true, keepsID: true, differences: 1}},
		{"without a member, as known from an event", v4, func(_ *Driver, g *group, ours map[uint32]rtnl.Nexthop) {
			edit(ours, g.id, func(n *rtnl.Nexthop) { n.Members = n.Members[1:] })
			g.moved = true
		}, result{exists: true, moved: true, keepsID: true, knowsWeights: true}},
		{"a member that is gone", v4, func(d *Driver, g *group, ours map[uint32]rtnl.Nexthop) { delete(ours, g.members[1].ID) }, result{exists: true, moved: true, keepsID: true, differences: 1}},
		{"a member that leads elsewhere", v4, func(d *Driver, g *group, ours map[uint32]rtnl.Nexthop) {
			edit(ours, g.members[1].ID, func(n *rtnl.Nexthop) { n.Gateway = netip.MustParseAddr("10.9.9.9") })
		}, result{exists: true, moved: true, keepsID: true, differences: 1}},
		{"a member without an owner", v4, func(d *Driver, g *group, _ map[uint32]rtnl.Nexthop) { delete(d.state.have.owners, g.members[1].ID) }, intact},
		{"it drops", v6, func(d *Driver, g *group, ours map[uint32]rtnl.Nexthop) { g.dropping = true }, result{exists: true, dropping: true, knowsWeights: true, knowsSegments: true, keepsID: true}},
		{"it no longer drops", v6, func(d *Driver, g *group, ours map[uint32]rtnl.Nexthop) {
			g.dropping = true
			edit(ours, g.id, func(n *rtnl.Nexthop) { n.Members = n.Members[:1] })
		}, result{exists: true, moved: true, keepsID: true, differences: 1}},
		{"IPv6, and a first member without a gateway", v6, func(d *Driver, g *group, ours map[uint32]rtnl.Nexthop) {
			edit(ours, g.id, func(n *rtnl.Nexthop) { n.Members = n.Members[len(n.Members)-1:] })
		}, result{exists: true, moved: true, rejecting: true, keepsID: true, differences: 1}},
		{"IPv6, and a first member that is gone", v6, func(d *Driver, g *group, ours map[uint32]rtnl.Nexthop) { delete(ours, g.members[0].ID) }, result{exists: true, moved: true, rejecting: true, keepsID: true, differences: 1}},
		{"IPv4, and a first member without a gateway", v4, func(d *Driver, g *group, ours map[uint32]rtnl.Nexthop) {
			edit(ours, g.id, func(n *rtnl.Nexthop) { n.Members = n.Members[len(n.Members)-1:] })
		}, result{exists: true, moved: true, keepsID: true, differences: 1}},
	} {
		d := offline(t, 3)
		d.set(1, 1, 2, 3)
		d.leads([]string{target4(0), target6(0)}[c.f], 0, 1)
		d.obey(t)
		g := d.state.have.groups[groupKey{1, c.f}]
		id := g.id
		ours := map[uint32]rtnl.Nexthop{id: {ID: id, Protocol: 179, Members: slices.Clone(g.members), Resilient: true, Buckets: 64}}
		for _, q := range d.state.pools() {
			for _, id := range q.ids {
				ours[id] = q.nexthop(d.state, id)
			}
		}
		if c.change != nil {
			c.change(d, g, ours)
		}
		n := ours[id]
		if err := d.reader.rereadGroup(g, ours, false); err != nil {
			t.Error(err)
		}
		got := result{g.exists, g.moved, g.dropping, g.rejecting, g.weights != nil, g.segments != nil, g.id == id, d.state.staleGroups[g.key], d.state.stats.Differences}
		if got != c.want {
			t.Errorf("%s: %+v\nwant %+v", c.what, got, c.want)
		}
		if g.exists && !maps.Equal(weightsOf(g.members), weightsOf(n.Members)) || !g.exists && g.members != nil {
			t.Errorf("%s: members %v, the kernel's %v", c.what, g.members, n.Members)
		}
	}
}

func edit(all map[uint32]rtnl.Nexthop, id uint32, change func(n *rtnl.Nexthop)) {
	n := all[id]
	n.Members = slices.Clone(n.Members)
	change(&n)
	all[id] = n
}

// TestRoutesReadBack checks which routes are stale after the kernel was read back, and which count as differences.
func TestRoutesReadBack(t *testing.T) {
	addr := netip.MustParseAddr
	for _, c := range []struct {
		what        string
		change      func(d *Driver, routes map[routeKey]routeState)
		settled     bool
		stale       []string // in the main table; B's own table
		staleB      []string
		differences uint64
	}{
		{"as they were", func(*Driver, map[routeKey]routeState) {}, true, nil, nil, 0},
		{"one is gone", func(_ *Driver, r map[routeKey]routeState) { delete(r, routeKey{mustPrefix(target4(0)), offlineTable}) }, true, []string{target4(0)}, nil, 1},
		{"one leads elsewhere", func(_ *Driver, r map[routeKey]routeState) {
			r[routeKey{mustPrefix(target4(0)), offlineTable}] = routeState{nexthop: 77, source: addr("10.255.0.1")}
		}, false, []string{target4(0)}, nil, 1},
		{"its group is gone too", func(d *Driver, r map[routeKey]routeState) {
			delete(r, routeKey{mustPrefix(target4(0)), offlineTable})
			d.state.have.groups[groupKey{1, v4}].exists = false
		}, true, []string{target4(0)}, nil, 0},
		{"known to be looked at", func(d *Driver, r map[routeKey]routeState) {
			delete(r, routeKey{mustPrefix(target4(0)), offlineTable})
			d.state.staleRoutes[routeKey{mustPrefix(target4(0)), offlineTable}] = true
		}, true, []string{target4(0)}, nil, 0},
		{"another source address", func(_ *Driver, r map[routeKey]routeState) {
			at := routeKey{mustPrefix(target4(0)), offlineTable}
			r[at] = routeState{r[at].nexthop, addr("10.9.9.9")}
		}, true, []string{target4(0)}, nil, 1},
		{"the host has another address", func(d *Driver, _ map[routeKey]routeState) { delete(d.state.have.addresses, addr("10.255.0.1")) }, true, []string{target4(0)}, nil, 0},
		{"one that drops is gone", func(d *Driver, r map[routeKey]routeState) {
			delete(r, routeKey{mustPrefix(target4(0)), d.state.want.sources[nameB].own})
		}, true, nil, []string{target4(0)}, 1},
		{"one that drops carries", func(d *Driver, r map[routeKey]routeState) {
			r[routeKey{mustPrefix(target4(0)), d.state.want.sources[nameB].own}] = routeState{nexthop: d.state.have.groups[groupKey{2, v4}].id}
		}, true, nil, []string{target4(0)}, 1},
		{"one that drops is known to be looked at", func(d *Driver, r map[routeKey]routeState) {
			at := routeKey{mustPrefix(target4(0)), d.state.want.sources[nameB].own}
			delete(r, at)
			d.state.staleRoutes[at] = true
		}, true, nil, []string{target4(0)}, 0},
		{"one too many", func(_ *Driver, r map[routeKey]routeState) {
			r[routeKey{mustPrefix(target4(9)), offlineTable}] = routeState{nexthop: 77}
		}, true, []string{target4(9)}, nil, 1},
		{"one too many, known", func(d *Driver, r map[routeKey]routeState) {
			r[routeKey{mustPrefix(target4(9)), offlineTable}] = routeState{nexthop: 77}
			d.state.staleRoutes[routeKey{mustPrefix(target4(9)), offlineTable}] = true
		}, true, []string{target4(9)}, nil, 0},
		{"one of an earlier run", func(_ *Driver, r map[routeKey]routeState) {
			r[routeKey{mustPrefix(target4(9)), offlineTable}] = routeState{nexthop: 77}
		}, false, nil, nil, 0},
	} {
		d := offline(t, 4)
		d.state.setSources(partition(d, "AB"))
		d.state.have.addresses[addr("10.255.0.1")] = true
		d.set(1, 1, 1)
		d.set(2, 0, 1, 1)
		d.serves(nameA, target4(0), 0, 1)
		d.serves(nameB, target4(1), 0, 2)
		d.obey(t)
		d.state.settled = c.settled
		routes := maps.Collect(d.state.have.routes.all())
		c.change(d, routes)
		d.reader.rereadRoutes(found{routes: statesOf(routes)})
		want := map[routeKey]bool{}
		for _, prefix := range c.stale {
			want[routeKey{mustPrefix(prefix), offlineTable}] = true
		}
		for _, prefix := range c.staleB {
			want[routeKey{mustPrefix(prefix), d.state.want.sources[nameB].own}] = true
		}
		if !maps.Equal(d.state.staleRoutes, want) || d.state.stats.Differences != c.differences || !maps.Equal(maps.Collect(d.state.have.routes.all()), routes) {
			t.Errorf("%s: looks at %v, want %v; %d differences, want %d", c.what, d.state.staleRoutes, want, d.state.stats.Differences, c.differences)
		}
	}
	// A change of source groups marks all existing routes, once Settle has been called, and all wanted ones.
	for _, settled := range []bool{false, true} {
		d := offline(t, 4)
		d.state.setSources(partition(d, "AB"))
		d.set(1, 1, 1)
		d.serves(nameA, target4(0), 0, 1)
		d.state.settled = settled
		own := d.state.want.sources[nameB].own
		stranger := routeKey{mustPrefix(target4(9)), offlineTable}
		d.state.have.routes = statesOf(map[routeKey]routeState{stranger: {nexthop: 77}})
		clear(d.state.staleRoutes)
		d.state.staleEverywhere()
		want := map[routeKey]bool{{mustPrefix(target4(0)), offlineTable}: true, {mustPrefix(target4(0)), own}: true}
		if settled {
			want[stranger] = true
		}
		if !maps.Equal(d.state.staleRoutes, want) {
			t.Errorf("settled %v: %v, want %v", settled, d.state.staleRoutes, want)
		}
	}
	if r := byNexthop(rtnl.Route{Nexthop: 7, Type: unix.RTN_BLACKHOLE}); r.Type != 0 {
		t.Errorf("by nexthop: %+v", r)
	}
	if r := byNexthop(rtnl.Route{Type: unix.RTN_BLACKHOLE}); r.Type != unix.RTN_BLACKHOLE {
		t.Errorf("a blackhole: %+v", r)
	}
	if len(families(true)) != 2 || len(families(false)) != 1 || families(false)[0] != unix.AF_INET {
		t.Error("families", families(true), families(false))
	}
}

// TestWarnsOnce: a missing loopback is logged once until the host has had it.
func TestWarnsOnce(t *testing.T) {
	d := offline(t, 2)
	d.state.want.sources[noName].loopbacks = []netip.Prefix{mustPrefix("10.255.0.1/32")}
	d.set(1, 1, 1)
	d.leads(target4(0), 0, 1)
	d.leads(target6(0), 0, 1)
	loopback := netip.MustParseAddr("10.255.0.1")
	four, six := routeKey{mustPrefix(target4(0)), offlineTable}, routeKey{mustPrefix(target6(0)), offlineTable}
	routeOf := func(at routeKey) rtnl.Route {
		return d.state.routeOf(&op{kind: setRoute, at: at, id: 7, source: d.state.want.preferred(at, &d.state.have)})
	}
	if r := routeOf(six); r.Source.IsValid() || len(d.state.missing) != 0 {
		t.Errorf("no loopback of the family: %+v, %v", r, d.state.missing)
	}
	want := rtnl.Route{Prefix: four.prefix, Table: offlineTable, Protocol: 179, Metric: 20, Nexthop: 7}
	if r := routeOf(four); r != want || !d.state.missing[loopback] {
		t.Errorf("%+v, want %+v; %v", r, want, d.state.missing)
	}
	delete(d.state.missing, loopback)
	d.state.have.addresses[loopback] = true
	want.Source = loopback
	if r := routeOf(four); r != want || len(d.state.missing) != 0 {
		t.Errorf("%+v, want %+v; %v", r, want, d.state.missing)
	}
}
