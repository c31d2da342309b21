package linux

import (
	"maps"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/rtnl"
)

// TestLinksByHand checks names, indexes and nexthops after sequences of link events.
func TestLinksByHand(t *testing.T) {
	p := offline(t, 2)
	p.set(1, 1, 1)
	p.leads(target4(0), 0, 1)
	p.obey(t)
	link := func(index int, name string) rtnl.Link {
		return rtnl.Link{Index: index, Name: name, Up: true, Carrier: true}
	}
	take := func(what string, news uint64, stale bool, events ...rtnl.LinkEvent) {
		t.Helper()
		before := p.linkNews
		clear(p.staleGroups)
		p.takeLinks(events)
		if got := p.linkNews - before; got != news || p.staleGroups[groupKey{1, v4}] != stale {
			t.Errorf("%s: %d news of links, want %d; stale groups %v", what, got, news, p.staleGroups)
		}
	}
	mtu := link(10, "p0")
	mtu.MTU = 9000
	take("an MTU", 0, false, rtnl.LinkEvent{Link: mtu})
	if p.links[10].MTU != 9000 {
		t.Error("the MTU is not known")
	}
	take("a device of another program", 1, false, rtnl.LinkEvent{Link: link(30, "eth0")})
	take("the device of another program is removed", 1, false, rtnl.LinkEvent{Link: link(30, "eth0"), Gone: true})
	if _, ok := p.links[30]; ok || p.names["eth0"] != 0 {
		t.Error("a device that is gone is known")
	}
	if want := map[int]bool{30: true}; !maps.Equal(p.dark, want) {
		t.Errorf("dark %v, want %v", p.dark, want)
	}
	clear(p.dark)
	// Another device has the name by the time that the end of the first one is reported.
	take("the name goes on", 2, true, rtnl.LinkEvent{Link: link(40, "p0")}, rtnl.LinkEvent{Link: link(10, "p0"), Gone: true})
	if p.names["p0"] != 40 || p.subPorts[0].pools[v4].device != 40 || !maps.Equal(p.dark, map[int]bool{10: true}) {
		t.Errorf("p0 is #%d, its nexthops are on #%d, dark %v", p.names["p0"], p.subPorts[0].pools[v4].device, p.dark)
	}
	clear(p.dark)
	generation := p.generation
	take("renamed", 1, true, rtnl.LinkEvent{Link: link(40, "other")})
	if _, ok := p.names["p0"]; ok || p.names["other"] != 40 || p.subPorts[0].pools[v4].device != 0 || p.generation == generation || len(p.dark) != 0 {
		t.Errorf("%v, %+v", p.names, p.subPorts[0].pools[v4])
	}
	take("renamed again", 1, true, rtnl.LinkEvent{Link: link(40, "p0")})
	p.subPorts[0].pools[v4].broken, p.subPorts[1].pools[v4].broken = unix.EINVAL, unix.EINVAL
	down := link(40, "p0")
	down.Carrier = false
	take("no carrier", 1, true, rtnl.LinkEvent{Link: down})
	if p.usable(p.subPorts[0]) || !p.dark[40] || p.subPorts[0].pools[v4].broken != nil || p.subPorts[1].pools[v4].broken == nil {
		t.Errorf("dark %v, %+v, %+v", p.dark, p.subPorts[0].pools[v4], p.subPorts[1].pools[v4])
	}
	clear(p.dark)
	take("no carrier still", 0, false, rtnl.LinkEvent{Link: down})
	if len(p.dark) != 0 {
		t.Errorf("dark again: %v", p.dark)
	}
	take("a carrier", 1, true, rtnl.LinkEvent{Link: link(40, "p0")})
	if got := slices.Sorted(slices.Values(p.carriers())); !slices.Equal(got, []int{11, 40}) {
		t.Errorf("asks for %v", got)
	}
	take("gone", 1, true, rtnl.LinkEvent{Link: link(11, "p1"), Gone: true})
	if got := p.carriers(); !slices.Equal(got, []int{40}) {
		t.Errorf("asks for %v", got)
	}
	// A read-back equals events.
	p.rereadLinks([]rtnl.Link{p.links[loIndex], link(40, "p0"), link(50, "p1")})
	if p.names["p1"] != 50 || len(p.links) != 3 {
		t.Errorf("%v", p.links)
	}
	news := p.linkNews
	p.rereadLinks([]rtnl.Link{p.links[loIndex], link(40, "p0")})
	if _, ok := p.links[50]; ok || p.linkNews != news+1 {
		t.Errorf("%v", p.links)
	}
	if p.rereadLinks([]rtnl.Link{p.links[loIndex], link(40, "p0")}); p.linkNews != news+1 {
		t.Error("the same links are news")
	}
}

// TestLoseByHand checks the state of groups and pools after a device has lost its carrier.
func TestLoseByHand(t *testing.T) {
	setUp := func() (p *Plane, a, b, c *group) {
		p = offline(t, 3)
		p.set(1, 1, 1, 1)
		p.set(2, 1, 0, 1)
		p.set(3, 0, 1, 0)
		p.leads(target4(0), 0, 1)
		p.leads(target4(1), 0, 2)
		p.leads(target6(2), 0, 3)
		p.obey(t)
		return p, p.groups[groupKey{1, v4}], p.groups[groupKey{2, v4}], p.groups[groupKey{3, v6}]
	}
	p, a, b, c := setUp()
	of := func(q *pool) uint32 { return q.ids[0] }
	one, two := of(p.subPorts[1].pools[v4]), of(p.subPorts[0].pools[v4])
	p.loose = map[uint32]rtnl.Nexthop{70: {ID: 70, Device: 11}, 71: {ID: 71, Device: 10}}
	p.strays = map[uint32]stray{
		80: {rtnl.Nexthop{ID: 80, Members: []rtnl.Member{{ID: 5}, {ID: 70}}}, []segment{{5, 1}}}, 81: {rtnl.Nexthop{ID: 81, Members: []rtnl.Member{{ID: 71}}}, []segment{{71, 1}}},
		82: {rtnl.Nexthop{ID: 82, Members: []rtnl.Member{{ID: one}}}, []segment{{one, 1}}},
	}
	lost := p.lose(11)
	for _, id := range []uint32{one, of6(c), 70} {
		if _, ok := lost[id]; !ok {
			t.Errorf("%d is not lost: %v", id, lost)
		}
	}
	if _, ok := lost[two]; ok || len(lost) != 3 || p.owners[one] != nil || len(p.subPorts[1].pools[v4].ids) != 0 || len(p.subPorts[0].pools[v4].ids) == 0 {
		t.Errorf("lost %v", lost)
	}
	if _, ok := p.loose[70]; ok || len(p.loose) != 1 {
		t.Errorf("loose %v", p.loose)
	}
	if p.strays[80].segments != nil || p.strays[81].segments == nil || p.strays[82].segments != nil {
		t.Errorf("strays %v", p.strays)
	}
	if !a.moved || a.movedAt.IsZero() || a.segments != nil || !slices.Equal(a.weights, []uint32{1, 0, 1}) || !p.staleGroups[a.key] || a.rejecting {
		t.Errorf("a group that lost a member: %+v", a)
	}
	if b.moved || b.segments == nil || p.staleGroups[b.key] || !slices.Equal(b.weights, []uint32{1, 0, 1}) {
		t.Errorf("another group: %+v", b)
	}
	if !c.moved || !c.rejecting || !p.staleGroups[c.key] || p.stats.MovedByKernel != 2 {
		t.Errorf("an IPv6 group that lost all: %+v, %+v", c, p.stats)
	}
	// Another device soon afterwards: the time is that of the first.
	since := a.movedAt
	p.lose(10)
	if !a.movedAt.Equal(since) || p.stats.MovedByKernel != 3 || !slices.Equal(a.weights, []uint32{0, 0, 1}) || a.rejecting || !b.moved {
		t.Errorf("two devices: %+v, %+v", a, p.stats)
	}

	// Members without a bucket go without a move.
	p, a, _, _ = setUp()
	p.set(1, 1, 0, 1)
	p.obey(t)
	if len(a.witnesses) != 1 {
		t.Fatalf("%+v", a)
	}
	clear(p.staleGroups)
	members := len(a.members)
	if p.lose(11); a.moved || len(a.witnesses) != 0 || len(a.members) != members-1 || a.segments == nil || p.staleGroups[a.key] {
		t.Errorf("the carrier of a witness: %+v", a)
	}

	// The loopback: every group has a member on it, which has no bucket.
	p, a, b, c = setUp()
	p.obey(t)
	drop := of(p.drop[v4])
	if lost := p.lose(loIndex); lost[drop] != p.drop[v4] || len(p.drop[v4].ids) != 0 || len(lost) != 2 || !a.moved || !b.moved || !c.moved ||
		!slices.Equal(a.weights, []uint32{1, 1, 1}) || a.rejecting || c.rejecting {
		t.Errorf("the loopback: lost %v, %+v", lost, a)
	}
}

// of6 returns the first member of a group.
func of6(g *group) uint32 { return g.members[0].ID }
