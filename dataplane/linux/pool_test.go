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
	d.have.links[loIndex] = rtnl.Link{Index: loIndex, Name: "lo", Loopback: true}
	sp := d.want.subPorts[0]
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
		{"drop", d.have.drop[v6], rtnl.Nexthop{ID: 7, Protocol: 179, Family: unix.AF_INET6, Device: loIndex}},
		{"hole", d.have.hole[v4], rtnl.Nexthop{ID: 7, Protocol: 179, Family: unix.AF_INET, Blackhole: true}},
	} {
		if got := c.q.nexthop(d, 7); !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: %+v, want %+v", c.what, got, c.want)
		}
		if !c.q.is(d, c.want) {
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
			if got, want := c.q.is(d, n), what == "device" && n.Blackhole; got != want { // the kernel names a device with a blackhole
				t.Errorf("%s with another %s: recognized is %v", c.what, what, got)
			}
		}
	}
	if d.have.loopback() != loIndex {
		t.Error("the loopback is", d.have.loopback())
	}
	d.have.links[33] = rtnl.Link{Index: 33, Loopback: true}
	delete(d.have.links, loIndex)
	if d.have.loopback() != 33 {
		t.Error("the loopback is", d.have.loopback())
	}
	clear(d.have.links)
	if d.have.loopback() != 1 {
		t.Error("without links the loopback is", d.have.loopback())
	}
}

// TestPools checks which nexthop objects belong to a next hop when devices and gateways change, and which are adopted.
func TestPools(t *testing.T) {
	d := offline(t, 2)
	if got := len(d.pools()); got != 8 {
		t.Errorf("%d pools, want those of two next hops of two sub-ports, two that drop and two holes", got)
	}
	sp := d.want.subPorts[0]
	q := sp.pools[v4]
	// Found, and adopted once a next hop means the same.
	d.have.loose = map[uint32]rtnl.Nexthop{70: q.nexthop(d, 70), 71: q.nexthop(d, 71), 72: d.want.subPorts[1].pools[v4].nexthop(d, 72)}
	d.adopt(q)
	if slices.Sort(q.ids); !slices.Equal(q.ids, []uint32{70, 71}) || d.have.owners[70] != q || d.have.owners[71] != q || len(d.have.loose) != 1 {
		t.Errorf("adopted %v, loose %v", q.ids, d.have.loose)
	}
	d.have.forget(q, func(id uint32) bool { return id == 71 })
	if !slices.Equal(q.ids, []uint32{70}) || d.have.owners[71] != nil || d.have.owners[70] != q {
		t.Errorf("forgotten: %v, %v", q.ids, d.have.owners)
	}
	// The same, another gateway, another device, none.
	if d.setHop(sp, v4) || len(d.have.changed) != 0 || len(d.have.retired) != 0 {
		t.Error("the same next hop is another one")
	}
	sp.hops[v4] = netip.MustParseAddr("10.1.0.7")
	q.broken = unix.EINVAL
	if d.setHop(sp, v4) || !slices.Equal(d.have.changed, []*pool{q}) || q.gateway != sp.hops[v4] || q.broken != nil || len(d.have.retired) != 0 {
		t.Errorf("another gateway: %v, %+v, %v", d.have.changed, q, d.have.retired)
	}
	pl := d.plan()
	if len(pl.nexthopOps) != 1 || pl.nexthopOps[0].kind != changeNexthop || pl.nexthopOps[0].id != 70 || pl.nexthopOps[0].pool != q || len(d.have.changed) != 0 {
		t.Errorf("%+v", pl.nexthopOps)
	}
	d.have.names["p0"] = 99
	q.broken = unix.EINVAL
	if !d.setHop(sp, v4) || q.device != 99 || q.broken != nil || !slices.Equal(d.have.retired, []uint32{70}) || len(q.ids) != 0 || d.have.owners[70] != nil {
		t.Errorf("another device: %+v, retired %v", q, d.have.retired)
	}
	q.ids = []uint32{75}
	d.have.owners[75] = q
	sp.hops[v4] = netip.Addr{}
	if !d.setHop(sp, v4) || sp.pools[v4] != nil || !slices.Equal(d.have.retired, []uint32{70, 75}) {
		t.Errorf("no next hop: %+v, retired %v", sp.pools[v4], d.have.retired)
	}
	if d.setHop(sp, v4) {
		t.Error("no next hop is another one than none")
	}
	if len(d.pools()) != 7 || sp.pool(v4) != sp.pools[v6] || sp.pool(v6) != sp.pools[v6] {
		t.Error("IPv4 does not leave by the IPv6 next hop")
	}
	sp.hops[v4] = netip.MustParseAddr("10.1.0.2")
	d.have.loose[77] = rtnl.Nexthop{ID: 77, Protocol: 179, Family: unix.AF_INET, Gateway: sp.hops[v4], Device: 99, OnLink: true}
	if !d.setHop(sp, v4) || !slices.Equal(sp.pools[v4].ids, []uint32{77}) || sp.pool(v4) != sp.pools[v4] {
		t.Errorf("a next hop: %+v", sp.pools[v4])
	}
	// Retired ones go when no group has them.
	d.have.groups[groupKey{1, v4}] = &group{key: groupKey{1, v4}, members: []rtnl.Member{{ID: 70}}, exists: true}
	pl = d.plan()
	if len(pl.lastOps) != 1 || pl.lastOps[0].kind != deleteNexthop || pl.lastOps[0].id != 75 {
		t.Errorf("%+v", pl.lastOps)
	}
	d.done(&pl.lastOps[0])
	if !slices.Equal(d.have.retired, []uint32{70}) {
		t.Errorf("retired %v", d.have.retired)
	}
	// A plan takes what there is and makes what there is not.
	made := d.planner()
	taken := map[uint32]bool{}
	if id := made.take(sp.pools[v4], taken); id != 77 || !taken[77] || len(made.nexthopOps) != 0 {
		t.Errorf("took %d, %+v", id, made.nexthopOps)
	}
	id := made.take(sp.pools[v4], taken)
	if id == 77 || len(made.nexthopOps) != 1 || made.nexthopOps[0].kind != makeNexthop || made.nexthopOps[0].id != id || !taken[id] ||
		d.have.owners[id] != nil || !slices.Equal(sp.pools[v4].ids, []uint32{77}) {
		t.Errorf("made %d: %+v", id, made.nexthopOps)
	}
	if again := made.take(sp.pools[v4], map[uint32]bool{77: true}); again != id || len(made.nexthopOps) != 1 {
		t.Errorf("another group of the plan takes %d, want %d", again, id)
	}
	d.adoptPlan(&made.plan)
	if d.have.owners[id] != sp.pools[v4] || !d.have.used[id] || !slices.Equal(sp.pools[v4].ids, []uint32{77, id}) {
		t.Errorf("adopted %d: %v", id, sp.pools[v4].ids)
	}
}

// TestIDs: ids begin at FirstID, skip ids in use, and wrap around.
func TestIDs(t *testing.T) {
	d := offline(t, 1)
	first := d.config.FirstID
	d.have.used[first+1] = true
	if a, b := d.have.newID(), d.have.newID(); a != first || b != first+2 || !d.have.used[a] || !d.have.used[b] {
		t.Errorf("%d, %d", a, b)
	}
	d.have.next = math.MaxUint32
	if a, b := d.have.newID(), d.have.newID(); a != math.MaxUint32 || b != first+3 {
		t.Errorf("at the end: %d, %d", a, b)
	}
}

// TestWeightsThatLive: a sub-port has its weight only with a carrier, a next hop that the kernel takes, and a place in the source group.
func TestWeightsThatLive(t *testing.T) {
	for _, c := range []struct {
		what   string
		change func(d *Driver)
		want   []uint32 // of IPv4
	}{
		{"all", func(*Driver) {}, []uint32{5, 6, 7}},
		{"held down", func(d *Driver) { d.want.subPorts[0].down = true }, []uint32{0, 6, 7}},
		{"no carrier", func(d *Driver) { d.have.links[11] = rtnl.Link{Index: 11, Name: "p1", Up: true} }, []uint32{5, 0, 7}},
		{"no device", func(d *Driver) { delete(d.have.names, "p2") }, []uint32{5, 6, 0}},
		{"broken", func(d *Driver) { d.want.subPorts[1].pools[v4].broken = unix.EINVAL }, []uint32{5, 0, 7}},
		{"broken for IPv6", func(d *Driver) { d.want.subPorts[1].pools[v6].broken = unix.EINVAL }, []uint32{5, 6, 7}},
		{"by IPv6", func(d *Driver) { d.want.subPorts[1].pools[v4] = nil }, []uint32{5, 6, 7}},
		{"no next hop", func(d *Driver) { d.want.subPorts[1].pools = [2]*pool{} }, []uint32{5, 0, 7}},
		{"no sub-port", func(d *Driver) { delete(d.want.byDevice, "p0") }, []uint32{0, 6, 7}},
		{"of another source group", func(d *Driver) { d.want.sources[netip.Prefix{}].setSubPorts(d.want.subPorts[1:]) }, []uint32{6, 7}},
	} {
		d := offline(t, 3)
		d.set(1, 5, 6, 7)
		c.change(d)
		if got := d.want.live(d.want.sources[netip.Prefix{}], d.want.vectors[1], v4, &d.have); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", c.what, got, c.want)
		}
	}
}

// TestSizes checks the number of buckets, the limit of groups by memory, and what another number of buckets does to a group.
func TestSizes(t *testing.T) {
	for _, c := range []struct {
		configured   uint16
		maxWeight, n int
		want         int
	}{{0, 65535, 1, 512}, {0, 65535, 127, 65024}, {0, 65535, 128, 65535}, {0, 65535, 200, 65535}, {0, 256, 63, 32256}, {0, 256, 64, 32767}, {100, 65535, 9, 100}, {65535, 256, 9, 65535}} {
		d := &Driver{config: Config{Buckets: c.configured}, maxWeight: c.maxWeight}
		if got := d.buckets(c.n); got != c.want {
			t.Errorf("%+v: %d", c, got)
		}
	}
	d := offline(t, 4)
	d.set(1, 1, 1, 1, 1)
	d.leads(target4(0), 0, 1)
	d.obey(t)
	g := d.have.groups[groupKey{1, v4}]
	old, members := g.id, g.members
	d.config.Memory = 1 << 20
	d.resize(64, 4)
	if d.capabilities.MaxVectors != 1<<20/(32*64*2) || g.id != old || len(d.have.strays) != 0 || d.want.lasting != 2 {
		t.Errorf("%v, %+v, lasting %d", d.capabilities, g, d.want.lasting)
	}
	d.config.Memory = math.MaxUint64
	d.ipv6 = false
	d.resize(128, 4)
	if d.capabilities.MaxVectors != math.MaxUint32 || g.id != 0 || d.want.users[g.key] != 1 || g.exists || !slices.Equal(d.have.strays[old].Members, members) || d.want.lasting != 4 ||
		d.want.sources[netip.Prefix{}].layout != (layout{128, 4}) || !d.staleGroups[g.key] || !d.staleRoutes[routeKey{mustPrefix(target4(0)), 254}] {
		t.Errorf("%v, %+v, strays %v, lasting %d", d.capabilities, g, d.have.strays, d.want.lasting)
	}
	d.config.Memory = 1 << 20
	if d.resize(256, 4); d.capabilities.MaxVectors != 1<<20/(32*256) {
		t.Errorf("IPv4 alone: %v", d.capabilities)
	}
	clear(d.have.strays)
	d.renew(g, netip.Prefix{})
	if len(d.have.strays) != 0 {
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
	d.have.routes = map[routeKey]routeState{{mustPrefix(target4(0)), 254}: {}, {mustPrefix(target4(1)), 254}: {}}
	d.have.strays = map[uint32]stray{1: {}, 2: {}, 3: {}}
	d.have.groups = map[groupKey]*group{{1, v4}: {exists: true}, {1, v6}: {exists: true}, {2, v4}: {}}
	d.have.owners = map[uint32]*pool{5: nil, 6: nil, 7: nil, 8: nil}
	d.have.loose = map[uint32]rtnl.Nexthop{9: {}, 10: {}}
	d.want.subPorts[0].pools[v4].broken, d.want.subPorts[0].pools[v6].broken = unix.EINVAL, unix.EINVAL
	d.want.subPorts[2].pools[v6].broken, d.want.subPorts[2].pools[v4] = unix.EINVAL, nil
	s := d.Stats()
	if s.RouteObjects != 2 || s.GroupObjects != 5 || s.NexthopObjects != 6 || s.Broken != 2 {
		t.Errorf("%+v, want 2 routes, 5 groups, 6 nexthops, 2 broken sub-ports", s)
	}
}
