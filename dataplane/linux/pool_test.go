package linux

import (
	"math"
	"net/netip"
	"reflect"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/rtnl"
)

// TestNexthopsMean checks the nexthop objects that are sent, and which objects are recognized as equal.
func TestNexthopsMean(t *testing.T) {
	d := offline(t, 1)
	d.state.have.links[loIndex] = rtnl.Link{Index: loIndex, Name: "lo", Loopback: true}
	sp := d.state.want.subPorts[0]
	over := func(hop string, f family) *pool {
		return &pool{subPort: sp, family: f, gateway: netip.MustParseAddr(hop), device: 10}
	}
	for _, c := range []struct {
		what string
		q    *pool
		want rtnl.Nexthop
	}{
		{"IPv4", over("10.1.0.2", v4), rtnl.Nexthop{ID: 7, Protocol: 179, Family: unix.AF_INET, Gateway: netip.MustParseAddr("10.1.0.2"), Device: 10, OnLink: true}},
		{"IPv4, of the link", over("169.254.0.2", v4), rtnl.Nexthop{ID: 7, Protocol: 179, Family: unix.AF_INET, Gateway: netip.MustParseAddr("169.254.0.2"), Device: 10, OnLink: true}},
		{"IPv6", over("fd01::2", v6), rtnl.Nexthop{ID: 7, Protocol: 179, Family: unix.AF_INET6, Gateway: netip.MustParseAddr("fd01::2"), Device: 10, OnLink: true}},
		{"IPv6, of the link", over("fe80::2", v6), rtnl.Nexthop{ID: 7, Protocol: 179, Family: unix.AF_INET6, Gateway: netip.MustParseAddr("fe80::2"), Device: 10}},
		{"drop", d.state.have.drop[v6], rtnl.Nexthop{ID: 7, Protocol: 179, Family: unix.AF_INET6, Device: loIndex}},
		{"hole", d.state.have.hole[v4], rtnl.Nexthop{ID: 7, Protocol: 179, Family: unix.AF_INET, Blackhole: true}},
	} {
		if got := c.q.nexthop(d.state, 7); !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: %+v, want %+v", c.what, got, c.want)
		}
		if !c.q.is(d.state, c.want) {
			t.Errorf("%s: %+v is not recognized", c.what, c.want)
		}
		for what, change := range map[string]func(n *rtnl.Nexthop){
			"family": func(n *rtnl.Nexthop) { n.Family ^= unix.AF_INET ^ unix.AF_INET6 }, "protocol": func(n *rtnl.Nexthop) { n.Protocol = 11 },
			"blackhole": func(n *rtnl.Nexthop) { n.Blackhole = !n.Blackhole }, "gateway": func(n *rtnl.Nexthop) { n.Gateway = netip.MustParseAddr("10.9.9.9") },
			"on link": func(n *rtnl.Nexthop) { n.OnLink = !n.OnLink }, "members": func(n *rtnl.Nexthop) { n.Members = []rtnl.Member{{}} },
			"more": func(n *rtnl.Nexthop) { n.Foreign = true }, "device": func(n *rtnl.Nexthop) { n.Device = 44 },
		} {
			n := c.want
			change(&n)
			if got, want := c.q.is(d.state, n), what == "device" && n.Blackhole; got != want { // the kernel names a device with a blackhole
				t.Errorf("%s with another %s: recognized is %v", c.what, what, got)
			}
		}
	}
	if d.state.have.loopback() != loIndex {
		t.Error("the loopback is", d.state.have.loopback())
	}
	d.state.have.links[33] = rtnl.Link{Index: 33, Loopback: true}
	delete(d.state.have.links, loIndex)
	if d.state.have.loopback() != 33 {
		t.Error("the loopback is", d.state.have.loopback())
	}
	clear(d.state.have.links)
	if d.state.have.loopback() != 1 {
		t.Error("without links the loopback is", d.state.have.loopback())
	}
}

// TestPools checks which nexthop objects belong to a next hop when devices and gateways change, and which are adopted.
func TestPools(t *testing.T) {
	d := offline(t, 2)
	if got := len(d.state.pools()); got != 8 {
		t.Errorf("%d pools, want those of two next hops of two sub-ports, two that drop and two holes", got)
	}
	sp := d.state.want.subPorts[0]
	q := sp.pools[v4]
	// Found, and adopted once a next hop means the same.
	d.state.have.loose = map[uint32]rtnl.Nexthop{70: q.nexthop(d.state, 70), 71: q.nexthop(d.state, 71), 72: d.state.want.subPorts[1].pools[v4].nexthop(d.state, 72)}
	d.state.adopt(q)
	if slices.Sort(q.ids); !slices.Equal(q.ids, []uint32{70, 71}) || d.state.have.owners[70] != q || d.state.have.owners[71] != q || len(d.state.have.loose) != 1 {
		t.Errorf("adopted %v, loose %v", q.ids, d.state.have.loose)
	}
	d.state.have.forget(q, func(id uint32) bool { return id == 71 })
	if !slices.Equal(q.ids, []uint32{70}) || d.state.have.owners[71] != nil || d.state.have.owners[70] != q {
		t.Errorf("forgotten: %v, %v", q.ids, d.state.have.owners)
	}
	// The same, another gateway, another device, none.
	if d.state.setHop(sp, v4) || len(d.state.have.changed) != 0 || len(d.state.have.retired) != 0 {
		t.Error("the same next hop is another one")
	}
	sp.hops[v4] = netip.MustParseAddr("10.1.0.7")
	q.broken = unix.EINVAL
	if d.state.setHop(sp, v4) || !slices.Equal(d.state.have.changed, []*pool{q}) || q.gateway != sp.hops[v4] || q.broken != nil || len(d.state.have.retired) != 0 {
		t.Errorf("another gateway: %v, %+v, %v", d.state.have.changed, q, d.state.have.retired)
	}
	pl := d.state.plan()
	if len(pl.nexthopOps) != 1 || pl.nexthopOps[0].kind != changeNexthop || pl.nexthopOps[0].id != 70 || pl.nexthopOps[0].pool != q || len(d.state.have.changed) != 0 {
		t.Errorf("%+v", pl.nexthopOps)
	}
	d.state.have.names["p0"] = 99
	q.broken = unix.EINVAL
	if !d.state.setHop(sp, v4) || q.device != 99 || q.broken != nil || !slices.Equal(d.state.have.retired, []uint32{70}) || len(q.ids) != 0 || d.state.have.owners[70] != nil {
		t.Errorf("another device: %+v, retired %v", q, d.state.have.retired)
	}
	q.ids = []uint32{75}
	d.state.have.owners[75] = q
	sp.hops[v4] = netip.Addr{}
	if !d.state.setHop(sp, v4) || sp.pools[v4] != nil || !slices.Equal(d.state.have.retired, []uint32{70, 75}) {
		t.Errorf("no next hop: %+v, retired %v", sp.pools[v4], d.state.have.retired)
	}
	if d.state.setHop(sp, v4) {
		t.Error("no next hop is another one than none")
	}
	if len(d.state.pools()) != 7 || sp.pool(v4) != sp.pools[v6] || sp.pool(v6) != sp.pools[v6] {
		t.Error("IPv4 does not leave by the IPv6 next hop")
	}
	sp.hops[v4] = netip.MustParseAddr("10.1.0.2")
	d.state.have.loose[77] = rtnl.Nexthop{ID: 77, Protocol: 179, Family: unix.AF_INET, Gateway: sp.hops[v4], Device: 99, OnLink: true}
	if !d.state.setHop(sp, v4) || !slices.Equal(sp.pools[v4].ids, []uint32{77}) || sp.pool(v4) != sp.pools[v4] {
		t.Errorf("a next hop: %+v", sp.pools[v4])
	}
	// Retired ones go when no group has them.
	d.state.have.groups[groupKey{1, v4}] = &group{key: groupKey{1, v4}, members: []rtnl.Member{{ID: 70}}, exists: true}
	pl = d.state.plan()
	if len(pl.lastOps) != 1 || pl.lastOps[0].kind != deleteNexthop || pl.lastOps[0].id != 75 {
		t.Errorf("%+v", pl.lastOps)
	}
	d.state.done(&pl.lastOps[0])
	if !slices.Equal(d.state.have.retired, []uint32{70}) {
		t.Errorf("retired %v", d.state.have.retired)
	}
	// A plan takes what there is and makes what there is not.
	made := d.planner()
	taken := map[uint32]bool{}
	if id := made.take(sp.pools[v4], taken); id != 77 || !taken[77] || len(made.nexthopOps) != 0 {
		t.Errorf("took %d, %+v", id, made.nexthopOps)
	}
	id := made.take(sp.pools[v4], taken)
	if id == 77 || len(made.nexthopOps) != 1 || made.nexthopOps[0].kind != makeNexthop || made.nexthopOps[0].id != id || !taken[id] ||
		d.state.have.owners[id] != nil || !slices.Equal(sp.pools[v4].ids, []uint32{77}) {
		t.Errorf("made %d: %+v", id, made.nexthopOps)
	}
	if again := made.take(sp.pools[v4], map[uint32]bool{77: true}); again != id || len(made.nexthopOps) != 1 {
		t.Errorf("another group of the plan takes %d, want %d", again, id)
	}
	d.state.adoptPlan(&made.plan)
	if d.state.have.owners[id] != sp.pools[v4] || !d.state.have.used[id] || !slices.Equal(sp.pools[v4].ids, []uint32{77, id}) {
		t.Errorf("adopted %d: %v", id, sp.pools[v4].ids)
	}
}

// TestIDs: ids begin at FirstID, skip ids in use, and wrap around.
func TestIDs(t *testing.T) {
	d := offline(t, 1)
	first := d.state.config.FirstID
	d.state.have.used[first+1] = true
	if a, b := d.state.have.newID(), d.state.have.newID(); a != first || b != first+2 || !d.state.have.used[a] || !d.state.have.used[b] {
		t.Errorf("%d, %d", a, b)
	}
	d.state.have.next = math.MaxUint32
	if a, b := d.state.have.newID(), d.state.have.newID(); a != math.MaxUint32 || b != first+3 {
		t.Errorf("at the end: %d, %d", a, b)
	}
}

// TestWeightsThatLive: a sub-port has its weight only with a carrier, a next hop that the kernel takes, and a place in
// the source group.
func TestWeightsThatLive(t *testing.T) {
	for _, c := range []struct {
		what   string
		change func(d *Driver)
		want   []uint32 // of IPv4
	}{
		{"all", func(*Driver) {}, []uint32{5, 6, 7}},
		{"held down", func(d *Driver) { d.state.want.subPorts[0].down = true }, []uint32{0, 6, 7}},
		{"no carrier", func(d *Driver) { d.state.have.links[11] = rtnl.Link{Index: 11, Name: "p1", Up: true} }, []uint32{5, 0, 7}},
		{"no device", func(d *Driver) { delete(d.state.have.names, "p2") }, []uint32{5, 6, 0}},
		{"broken", func(d *Driver) { d.state.want.subPorts[1].pools[v4].broken = unix.EINVAL }, []uint32{5, 0, 7}},
		{"broken for IPv6", func(d *Driver) { d.state.want.subPorts[1].pools[v6].broken = unix.EINVAL }, []uint32{5, 6, 7}},
		{"by IPv6", func(d *Driver) { d.state.want.subPorts[1].pools[v4] = nil }, []uint32{5, 6, 7}},
		{"no next hop", func(d *Driver) { d.state.want.subPorts[1].pools = [2]*pool{} }, []uint32{5, 0, 7}},
		{"no sub-port", func(d *Driver) { delete(d.state.want.byDevice, "p0") }, []uint32{0, 6, 7}},
		{"of another source group", func(d *Driver) { d.state.want.sources[netip.Prefix{}].setSubPorts(d.state.want.subPorts[1:]) }, []uint32{6, 7}},
	} {
		d := offline(t, 3)
		d.set(1, 5, 6, 7)
		c.change(d)
		if got := d.state.want.live(d.state.want.sources[netip.Prefix{}], d.state.want.vectors[1], v4, &d.state.have); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", c.what, got, c.want)
		}
	}
}

// TestSizes checks the number of buckets, the limit of groups by memory, and what another number of buckets does to a
// group.
func TestSizes(t *testing.T) {
	for _, c := range []struct {
		configured   uint16
		maxWeight, n int
		want         int
	}{{0, 65535, 1, 512}, {0, 65535, 127, 65024}, {0, 65535, 128, 65535}, {0, 65535, 200, 65535}, {0, 256, 63, 32256}, {0, 256, 64, 32767}, {100, 65535, 9, 100}, {65535, 256, 9, 65535}} {
		st := newState(Config{Buckets: c.configured})
		st.maxWeight = c.maxWeight
		if got := st.buckets(c.n); got != c.want {
			t.Errorf("%+v: %d", c, got)
		}
	}
	d := offline(t, 4)
	d.set(1, 1, 1, 1, 1)
	d.leads(target4(0), 0, 1)
	d.obey(t)
	g := d.state.have.groups[groupKey{1, v4}]
	old, members := g.id, g.members
	d.state.config.Memory = 1 << 20
	d.state.resize(64, 4)
	if d.state.maxVectors() != 1<<20/(32*64*2) || g.id != old || len(d.state.have.strays) != 0 || d.state.want.lasting != 2 {
		t.Errorf("%v, %+v, lasting %d", d.capabilities, g, d.state.want.lasting)
	}
	d.state.config.Memory = math.MaxUint64
	d.state.ipv6 = false
	d.state.resize(128, 4)
	if d.state.maxVectors() != math.MaxUint32 || g.id != 0 || d.state.want.users[g.key] != 1 || g.exists || !slices.Equal(d.state.have.strays[old].Members, members) || d.state.want.lasting != 4 ||
		d.state.want.sources[netip.Prefix{}].layout != (layout{128, 4}) || !d.state.staleGroups[g.key] || !d.state.staleRoutes[routeKey{mustPrefix(target4(0)), 254}] {
		t.Errorf("%v, %+v, strays %v, lasting %d", d.capabilities, g, d.state.have.strays, d.state.want.lasting)
	}
	d.state.config.Memory = 1 << 20
	if d.state.resize(256, 4); d.state.maxVectors() != 1<<20/(32*256) {
		t.Errorf("IPv4 alone: %v", d.capabilities)
	}
	clear(d.state.have.strays)
	d.state.renew(g, netip.Prefix{})
	if len(d.state.have.strays) != 0 {
		t.Error("a group that is not there is to be removed")
	}
}

// TestApproximate: the sub-port with the largest deviation is named, whatever its place, and none within 1 %.
func TestApproximate(t *testing.T) {
	d := offline(t, 4)
	for id, c := range []struct {
		weights []uint32
		want    string
	}{
		{[]uint32{1, 1, 1, 1}, ""},
		{[]uint32{1, 255, 0, 0}, "the share of p0 is off by +300.0 % of itself: 64 buckets allow no smaller steps"},
		{[]uint32{0, 0, 255, 1}, "the share of p3 is off by +300.0 % of itself: 64 buckets allow no smaller steps"},
		{[]uint32{1, 3, 0, 0}, ""},
		{nil, ""},
	} {
		d.set(uint32(id+1), c.weights...)
		if got := d.Approximate(uint32(id + 1)); got != c.want {
			t.Errorf("%v: %q, want %q", c.weights, got, c.want)
		}
	}
	if got := d.Approximate(99); got != "" {
		t.Errorf("no group: %q", got)
	}
}

// TestStatsCountObjects compares the object counters with figures by hand.
func TestStatsCountObjects(t *testing.T) {
	d := offline(t, 3)
	d.state.have.routes = statesOf(map[routeKey]routeState{{mustPrefix(target4(0)), 254}: {}, {mustPrefix(target4(1)), 254}: {}})
	d.state.have.strays = map[uint32]stray{1: {}, 2: {}, 3: {}}
	d.state.have.groups = map[groupKey]*group{{1, v4}: {exists: true}, {1, v6}: {exists: true}, {2, v4}: {}}
	d.state.have.owners = map[uint32]*pool{5: nil, 6: nil, 7: nil, 8: nil}
	d.state.have.loose = map[uint32]rtnl.Nexthop{9: {}, 10: {}}
	d.state.want.subPorts[0].pools[v4].broken, d.state.want.subPorts[0].pools[v6].broken = unix.EINVAL, unix.EINVAL
	d.state.want.subPorts[2].pools[v6].broken, d.state.want.subPorts[2].pools[v4] = unix.EINVAL, nil
	s := d.Stats()
	if s.RouteObjects != 2 || s.GroupObjects != 5 || s.NexthopObjects != 6 || s.Broken != 2 {
		t.Errorf("%+v, want 2 routes, 5 groups, 6 nexthops, 2 broken sub-ports", s)
	}
}
