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
	p := offline(t, 1)
	p.links[loIndex] = rtnl.Link{Index: loIndex, Name: "lo", Loopback: true}
	sp := p.subPorts[0]
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
		{"drop", p.drop[v6], rtnl.Nexthop{ID: 7, Protocol: 179, Family: unix.AF_INET6, Device: loIndex}},
		{"hole", p.hole[v4], rtnl.Nexthop{ID: 7, Protocol: 179, Family: unix.AF_INET, Blackhole: true}},
	} {
		if got := c.q.nexthop(p, 7); !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: %+v, want %+v", c.what, got, c.want)
		}
		if !c.q.is(p, c.want) {
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
			if got, want := c.q.is(p, n), what == "device" && n.Blackhole; got != want { // the kernel names a device with a blackhole
				t.Errorf("%s with another %s: recognized is %v", c.what, what, got)
			}
		}
	}
	if p.loopback() != loIndex {
		t.Error("the loopback is", p.loopback())
	}
	p.links[33] = rtnl.Link{Index: 33, Loopback: true}
	delete(p.links, loIndex)
	if p.loopback() != 33 {
		t.Error("the loopback is", p.loopback())
	}
	clear(p.links)
	if p.loopback() != 1 {
		t.Error("without links the loopback is", p.loopback())
	}
}

// TestPools checks which nexthop objects belong to a next hop when devices and gateways change, and which are adopted.
func TestPools(t *testing.T) {
	p := offline(t, 2)
	if got := len(p.pools()); got != 8 {
		t.Errorf("%d pools, want those of two next hops of two sub-ports, two that drop and two holes", got)
	}
	sp := p.subPorts[0]
	q := sp.pools[v4]
	// Found, and adopted once a next hop means the same.
	p.loose = map[uint32]rtnl.Nexthop{70: q.nexthop(p, 70), 71: q.nexthop(p, 71), 72: p.subPorts[1].pools[v4].nexthop(p, 72)}
	p.adopt(q)
	if slices.Sort(q.ids); !slices.Equal(q.ids, []uint32{70, 71}) || p.owners[70] != q || p.owners[71] != q || len(p.loose) != 1 {
		t.Errorf("adopted %v, loose %v", q.ids, p.loose)
	}
	p.forget(q, func(id uint32) bool { return id == 71 })
	if !slices.Equal(q.ids, []uint32{70}) || p.owners[71] != nil || p.owners[70] != q {
		t.Errorf("forgotten: %v, %v", q.ids, p.owners)
	}
	// The same, another gateway, another device, none.
	if p.setHop(sp, v4) || len(p.changed) != 0 || len(p.retired) != 0 {
		t.Error("the same next hop is another one")
	}
	sp.hops[v4] = netip.MustParseAddr("10.1.0.7")
	q.broken = unix.EINVAL
	if p.setHop(sp, v4) || !slices.Equal(p.changed, []*pool{q}) || q.gateway != sp.hops[v4] || q.broken != nil || len(p.retired) != 0 {
		t.Errorf("another gateway: %v, %+v, %v", p.changed, q, p.retired)
	}
	pl := p.plan()
	if len(pl.nexthopOps) != 1 || pl.nexthopOps[0].kind != changeNexthop || pl.nexthopOps[0].id != 70 || pl.nexthopOps[0].pool != q || len(p.changed) != 0 {
		t.Errorf("%+v", pl.nexthopOps)
	}
	p.names["p0"] = 99
	q.broken = unix.EINVAL
	if !p.setHop(sp, v4) || q.device != 99 || q.broken != nil || !slices.Equal(p.retired, []uint32{70}) || len(q.ids) != 0 || p.owners[70] != nil {
		t.Errorf("another device: %+v, retired %v", q, p.retired)
	}
	q.ids = []uint32{75}
	p.owners[75] = q
	sp.hops[v4] = netip.Addr{}
	if !p.setHop(sp, v4) || sp.pools[v4] != nil || !slices.Equal(p.retired, []uint32{70, 75}) {
		t.Errorf("no next hop: %+v, retired %v", sp.pools[v4], p.retired)
	}
	if p.setHop(sp, v4) {
		t.Error("no next hop is another one than none")
	}
	if len(p.pools()) != 7 || sp.pool(v4) != sp.pools[v6] || sp.pool(v6) != sp.pools[v6] {
		t.Error("IPv4 does not leave by the IPv6 next hop")
	}
	sp.hops[v4] = netip.MustParseAddr("10.1.0.2")
	p.loose[77] = rtnl.Nexthop{ID: 77, Protocol: 179, Family: unix.AF_INET, Gateway: sp.hops[v4], Device: 99, OnLink: true}
	if !p.setHop(sp, v4) || !slices.Equal(sp.pools[v4].ids, []uint32{77}) || sp.pool(v4) != sp.pools[v4] {
		t.Errorf("a next hop: %+v", sp.pools[v4])
	}
	// Retired ones go when no group has them.
	p.groups[groupKey{1, v4}] = &group{key: groupKey{1, v4}, users: 1, members: []rtnl.Member{{ID: 70}}, exists: true}
	pl = p.plan()
	if len(pl.lastOps) != 1 || pl.lastOps[0].kind != deleteNexthop || pl.lastOps[0].id != 75 {
		t.Errorf("%+v", pl.lastOps)
	}
	p.done(&pl.lastOps[0])
	if !slices.Equal(p.retired, []uint32{70}) {
		t.Errorf("retired %v", p.retired)
	}
	// A plan takes what there is and makes what there is not.
	pl = &plan{Plane: p}
	taken := map[uint32]bool{}
	if id := pl.take(sp.pools[v4], taken); id != 77 || !taken[77] || len(pl.nexthopOps) != 0 {
		t.Errorf("took %d, %+v", id, pl.nexthopOps)
	}
	id := pl.take(sp.pools[v4], taken)
	if id == 77 || len(pl.nexthopOps) != 1 || pl.nexthopOps[0].kind != makeNexthop || pl.nexthopOps[0].id != id || p.owners[id] != sp.pools[v4] || !taken[id] ||
		!slices.Equal(sp.pools[v4].ids, []uint32{77, id}) {
		t.Errorf("made %d: %+v", id, pl.nexthopOps)
	}
}

// TestIDs: ids begin at FirstID, skip ids in use, and wrap around.
func TestIDs(t *testing.T) {
	p := offline(t, 1)
	first := p.config.FirstID
	p.used[first+1] = true
	if a, b := p.newID(), p.newID(); a != first || b != first+2 || !p.used[a] || !p.used[b] {
		t.Errorf("%d, %d", a, b)
	}
	p.next = math.MaxUint32
	if a, b := p.newID(), p.newID(); a != math.MaxUint32 || b != first+3 {
		t.Errorf("at the end: %d, %d", a, b)
	}
}

// TestWeightsThatLive: a sub-port has its weight only with a carrier, a next hop that the kernel takes, and a place in the source group.
func TestWeightsThatLive(t *testing.T) {
	for _, c := range []struct {
		what   string
		change func(p *Plane)
		want   []uint32 // of IPv4
	}{
		{"all", func(*Plane) {}, []uint32{5, 6, 7}},
		{"held down", func(p *Plane) { p.subPorts[0].down = true }, []uint32{0, 6, 7}},
		{"no carrier", func(p *Plane) { p.links[11] = rtnl.Link{Index: 11, Name: "p1", Up: true} }, []uint32{5, 0, 7}},
		{"no device", func(p *Plane) { delete(p.names, "p2") }, []uint32{5, 6, 0}},
		{"broken", func(p *Plane) { p.subPorts[1].pools[v4].broken = unix.EINVAL }, []uint32{5, 0, 7}},
		{"broken for IPv6", func(p *Plane) { p.subPorts[1].pools[v6].broken = unix.EINVAL }, []uint32{5, 6, 7}},
		{"by IPv6", func(p *Plane) { p.subPorts[1].pools[v4] = nil }, []uint32{5, 6, 7}},
		{"no next hop", func(p *Plane) { p.subPorts[1].pools = [2]*pool{} }, []uint32{5, 0, 7}},
		{"no sub-port", func(p *Plane) { delete(p.byDevice, "p0") }, []uint32{0, 6, 7}},
		{"of another source group", func(p *Plane) { p.sources[netip.Prefix{}].setSubPorts(p.subPorts[1:]) }, []uint32{6, 7}},
	} {
		p := offline(t, 3)
		p.set(1, 5, 6, 7)
		c.change(p)
		if got := p.live(p.sources[netip.Prefix{}], p.wanted[1], v4); !slices.Equal(got, c.want) {
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
	}{{0, 65535, 1, 2048}, {0, 65535, 31, 63488}, {0, 65535, 32, 65535}, {0, 65535, 64, 65535}, {0, 256, 15, 30720}, {0, 256, 16, 32767}, {100, 65535, 9, 100}, {65535, 256, 9, 65535}} {
		p := &Plane{config: Config{Buckets: c.configured}, maxWeight: c.maxWeight}
		if got := p.buckets(c.n); got != c.want {
			t.Errorf("%+v: %d", c, got)
		}
	}
	p := offline(t, 4)
	p.set(1, 1, 1, 1, 1)
	p.leads(target4(0), 0, 1)
	p.obey(t)
	g := p.groups[groupKey{1, v4}]
	old, members := g.id, g.members
	p.config.Memory = 1 << 20
	p.resize(64, 4)
	if p.capabilities.MaxVectors != 1<<20/(32*64*2) || g.id != old || len(p.strays) != 0 || p.lasting != 2 {
		t.Errorf("%v, %+v, lasting %d", p.capabilities, g, p.lasting)
	}
	p.config.Memory = math.MaxUint64
	p.ipv6 = false
	p.resize(128, 4)
	if p.capabilities.MaxVectors != math.MaxUint32 || g.id != 0 || g.users != 1 || g.exists || !slices.Equal(p.strays[old].Members, members) || p.lasting != 4 ||
		p.sources[netip.Prefix{}].layout != (layout{128, 4}) || !p.staleGroups[g.key] || !p.staleRoutes[routeKey{mustPrefix(target4(0)), 254}] {
		t.Errorf("%v, %+v, strays %v, lasting %d", p.capabilities, g, p.strays, p.lasting)
	}
	p.config.Memory = 1 << 20
	if p.resize(256, 4); p.capabilities.MaxVectors != 1<<20/(32*256) {
		t.Errorf("IPv4 alone: %v", p.capabilities)
	}
	clear(p.strays)
	p.renew(g, netip.Prefix{})
	if len(p.strays) != 0 {
		t.Error("a group that is not there is to be removed")
	}
}

// TestApproximate: the sub-port with the largest deviation is named, whatever its place, and none within 1 %.
func TestApproximate(t *testing.T) {
	p := offline(t, 4)
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
		p.set(uint32(id+1), c.weights...)
		if got := p.Approximate(uint32(id + 1)); got != c.want {
			t.Errorf("%v: %q, want %q", c.weights, got, c.want)
		}
	}
	if got := p.Approximate(99); got != "" {
		t.Errorf("no group: %q", got)
	}
}

// TestStatsCountObjects compares the object counters with figures by hand.
func TestStatsCountObjects(t *testing.T) {
	p := offline(t, 3)
	p.routes = map[routeKey]routeState{{mustPrefix(target4(0)), 254}: {}, {mustPrefix(target4(1)), 254}: {}}
	p.strays = map[uint32]stray{1: {}, 2: {}, 3: {}}
	p.groups = map[groupKey]*group{{1, v4}: {exists: true}, {1, v6}: {exists: true}, {2, v4}: {}}
	p.owners = map[uint32]*pool{5: nil, 6: nil, 7: nil, 8: nil}
	p.loose = map[uint32]rtnl.Nexthop{9: {}, 10: {}}
	p.subPorts[0].pools[v4].broken, p.subPorts[0].pools[v6].broken = unix.EINVAL, unix.EINVAL
	p.subPorts[2].pools[v6].broken, p.subPorts[2].pools[v4] = unix.EINVAL, nil
	s := p.Stats()
	if s.RouteObjects != 2 || s.GroupObjects != 5 || s.NexthopObjects != 6 || s.Broken != 2 {
		t.Errorf("%+v, want 2 routes, 5 groups, 6 nexthops, 2 broken sub-ports", s)
	}
}
