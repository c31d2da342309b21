package linux

import (
	"errors"
	"maps"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/internal/rtnl"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// TestLinksByHand checks names, indexes and nexthops after sequences of link events.
func TestLinksByHand(t *testing.T) {
	d := offline(t, 2)
	d.set(1, 1, 1)
	d.leads(target4(0), 0, 1)
	d.obey(t)
	link := func(index int, name string) rtnl.Link {
		return rtnl.Link{Index: index, Name: name, Up: true, Carrier: true}
	}
	take := func(what string, news uint64, stale bool, events ...rtnl.LinkEvent) {
		t.Helper()
		before := d.links.changes
		clear(d.state.staleGroups)
		d.links.takeLinks(events)
		if got := d.links.changes - before; got != news || d.state.staleGroups[groupKey{1, v4}] != stale {
			t.Errorf("%s: %d news of links, want %d; stale groups %v", what, got, news, d.state.staleGroups)
		}
	}
	mtu := link(10, "p0")
	mtu.MTU = 9000
	take("an MTU", 0, false, rtnl.LinkEvent{Link: mtu})
	if d.state.have.links[10].MTU != 9000 {
		t.Error("the MTU is not known")
	}
	take("a device of another program", 1, false, rtnl.LinkEvent{Link: link(30, "eth0")})
	take("the device of another program is removed", 1, false, rtnl.LinkEvent{Link: link(30, "eth0"), Gone: true})
	if _, ok := d.state.have.links[30]; ok || d.state.have.names["eth0"] != 0 {
		t.Error("a device that is gone is known")
	}
	if want := map[int]bool{30: true}; !maps.Equal(d.links.dark, want) {
		t.Errorf("dark %v, want %v", d.links.dark, want)
	}
	clear(d.links.dark)
	// Another device has the name by the time that the end of the first one is reported.
	take("the name goes on", 2, true, rtnl.LinkEvent{Link: link(40, "p0")}, rtnl.LinkEvent{Link: link(10, "p0"), Gone: true})
	if d.state.have.names["p0"] != 40 || d.state.want.subPorts[0].pools[v4].device != 40 || !maps.Equal(d.links.dark, map[int]bool{10: true}) {
		t.Errorf("p0 is #%d, its nexthops are on #%d, dark %v", d.state.have.names["p0"], d.state.want.subPorts[0].pools[v4].device, d.links.dark)
	}
	clear(d.links.dark)
	generation := d.state.want.generation
	take("renamed", 1, true, rtnl.LinkEvent{Link: link(40, "other")})
	if _, ok := d.state.have.names["p0"]; ok || d.state.have.names["other"] != 40 || d.state.want.subPorts[0].pools[v4].device != 0 || d.state.want.generation == generation || len(d.links.dark) != 0 {
		t.Errorf("%v, %+v", d.state.have.names, d.state.want.subPorts[0].pools[v4])
	}
	other := link(40, "other")
	other.AltNames = "p9 p0"
	take("an alternative name", 1, true, rtnl.LinkEvent{Link: other})
	other.Name = "another"
	take("renamed with an alternative name", 1, true, rtnl.LinkEvent{Link: other})
	if want := map[string]int{"lo": 1, "another": 40, "p9": 40, "p0": 40, "p1": 11}; !maps.Equal(d.state.have.names, want) || d.state.want.subPorts[0].pools[v4].device != 40 {
		t.Errorf("names %v, want %v; nexthops on #%d", d.state.have.names, want, d.state.want.subPorts[0].pools[v4].device)
	}
	take("renamed again", 1, true, rtnl.LinkEvent{Link: link(40, "p0")})
	d.state.want.subPorts[0].pools[v4].broken, d.state.want.subPorts[1].pools[v4].broken = unix.EINVAL, unix.EINVAL
	down := link(40, "p0")
	down.Carrier = false
	take("no carrier", 1, true, rtnl.LinkEvent{Link: down})
	if d.state.have.usable(d.state.want.subPorts[0]) || !d.links.dark[40] || d.state.want.subPorts[0].pools[v4].broken != nil || d.state.want.subPorts[1].pools[v4].broken == nil {
		t.Errorf("dark %v, %+v, %+v", d.links.dark, d.state.want.subPorts[0].pools[v4], d.state.want.subPorts[1].pools[v4])
	}
	clear(d.links.dark)
	take("no carrier still", 0, false, rtnl.LinkEvent{Link: down})
	if len(d.links.dark) != 0 {
		t.Errorf("dark again: %v", d.links.dark)
	}
	take("a carrier", 1, true, rtnl.LinkEvent{Link: link(40, "p0")})
	if got := d.links.carriers(); !slices.Equal(got, []rtnl.Link{link(40, "p0"), link(11, "p1")}) {
		t.Errorf("asks for %v", got)
	}
	take("gone", 1, true, rtnl.LinkEvent{Link: link(11, "p1"), Gone: true})
	if got := d.links.carriers(); !slices.Equal(got, []rtnl.Link{link(40, "p0")}) {
		t.Errorf("asks for %v", got)
	}
	// A read-back equals events.
	d.reader.rereadLinks([]rtnl.Link{d.state.have.links[loIndex], link(40, "p0"), link(50, "p1")})
	if d.state.have.names["p1"] != 50 || len(d.state.have.links) != 3 {
		t.Errorf("%v", d.state.have.links)
	}
	news := d.links.changes
	d.reader.rereadLinks([]rtnl.Link{d.state.have.links[loIndex], link(40, "p0")})
	if _, ok := d.state.have.links[50]; ok || d.links.changes != news+1 {
		t.Errorf("%v", d.state.have.links)
	}
	if d.reader.rereadLinks([]rtnl.Link{d.state.have.links[loIndex], link(40, "p0")}); d.links.changes != news+1 {
		t.Error("the same links are news")
	}
}

// TestLoseByHand checks the state of groups and pools after a device has lost its carrier.
func TestLoseByHand(t *testing.T) {
	setUp := func() (d *Driver, a, b, c *group) {
		d = offline(t, 3)
		d.set(1, 1, 1, 1)
		d.set(2, 1, 0, 1)
		d.set(3, 0, 1, 0)
		d.leads(target4(0), 0, 1)
		d.leads(target4(1), 0, 2)
		d.leads(target6(2), 0, 3)
		d.obey(t)
		return d, d.state.have.groups[groupKey{1, v4}], d.state.have.groups[groupKey{2, v4}], d.state.have.groups[groupKey{3, v6}]
	}
	d, a, b, c := setUp()
	of := func(q *pool) uint32 { return q.ids[0] }
	one, two := of(d.state.want.subPorts[1].pools[v4]), of(d.state.want.subPorts[0].pools[v4])
	d.state.have.loose = map[uint32]rtnl.Nexthop{70: {ID: 70, Device: 11}, 71: {ID: 71, Device: 10}}
	d.state.have.strays = map[uint32]stray{
		80: {rtnl.Nexthop{ID: 80, Members: []rtnl.Member{{ID: 5}, {ID: 70}}}, []segment{{5, 1}}}, 81: {rtnl.Nexthop{ID: 81, Members: []rtnl.Member{{ID: 71}}}, []segment{{71, 1}}},
		82: {rtnl.Nexthop{ID: 82, Members: []rtnl.Member{{ID: one}}}, []segment{{one, 1}}},
	}
	lost := d.state.lose(11)
	for _, id := range []uint32{one, of6(c), 70} {
		if _, ok := lost[id]; !ok {
			t.Errorf("%d is not lost: %v", id, lost)
		}
	}
	if _, ok := lost[two]; ok || len(lost) != 3 || d.state.have.owners[one] != nil || len(d.state.want.subPorts[1].pools[v4].ids) != 0 || len(d.state.want.subPorts[0].pools[v4].ids) == 0 {
		t.Errorf("lost %v", lost)
	}
	if _, ok := d.state.have.loose[70]; ok || len(d.state.have.loose) != 1 {
		t.Errorf("loose %v", d.state.have.loose)
	}
	if d.state.have.strays[80].segments != nil || d.state.have.strays[81].segments == nil || d.state.have.strays[82].segments != nil {
		t.Errorf("strays %v", d.state.have.strays)
	}
	if !a.moved || a.segments != nil || !slices.Equal(a.weights, []uint32{1, 0, 1}) || !d.state.staleGroups[a.key] || a.rejecting {
		t.Errorf("a group that lost a member: %+v", a)
	}
	if b.moved || b.segments == nil || d.state.staleGroups[b.key] || !slices.Equal(b.weights, []uint32{1, 0, 1}) {
		t.Errorf("another group: %+v", b)
	}
	if !c.moved || !c.rejecting || !d.state.staleGroups[c.key] || d.state.stats.MovedByKernel != 2 {
		t.Errorf("an IPv6 group that lost all: %+v, %+v", c, d.state.stats)
	}
	// Another device soon afterwards.
	d.state.lose(10)
	if d.state.stats.MovedByKernel != 3 || !slices.Equal(a.weights, []uint32{0, 0, 1}) || a.rejecting || !b.moved {
		t.Errorf("two devices: %+v, %+v", a, d.state.stats)
	}

	// Members without a bucket go without a move.
	d, a, _, _ = setUp()
	d.set(1, 1, 0, 1)
	d.obey(t)
	if len(a.witnesses) != 1 {
		t.Fatalf("%+v", a)
	}
	clear(d.state.staleGroups)
	members := len(a.members)
	if d.state.lose(11); a.moved || len(a.witnesses) != 0 || len(a.members) != members-1 || a.segments == nil || d.state.staleGroups[a.key] {
		t.Errorf("the carrier of a witness: %+v", a)
	}

	// The loopback: every group has a member on it, which has no bucket.
	d, a, b, c = setUp()
	d.obey(t)
	drop := of(d.state.have.drop[v4])
	if lost := d.state.lose(loIndex); lost[drop] != d.state.have.drop[v4] || len(d.state.have.drop[v4].ids) != 0 || len(lost) != 2 || !a.moved || !b.moved || !c.moved ||
		!slices.Equal(a.weights, []uint32{1, 1, 1}) || a.rejecting || c.rejecting {
		t.Errorf("the loopback: lost %v, %+v", lost, a)
	}
}

// of6 returns the first member of a group.
func of6(g *group) uint32 { return g.members[0].ID }

// TestRiseReadsCarriers checks that a sub-port that the control plane sets up has its carrier before the change is
// committed, although the goroutine that handles events has not run since the carrier returned.
func TestRiseReadsCarriers(t *testing.T) {
	h := newHost(t, 2)
	d, _ := h.start()
	usable := func() bool { // under mu
		return slices.ContainsFunc(d.links.carriers(), func(l rtnl.Link) bool { return l.Name == "p0" && l.Usable() })
	}
	h.leaf.IP("link", "set", "p0", "down")
	netnstest.Eventually(t, time.Minute, func() error {
		d.mu.Lock()
		defer d.mu.Unlock()
		if usable() {
			return errors.New("p0 has its carrier")
		}
		return nil
	})
	d.mu.Lock() // no event is handled from here on
	defer d.mu.Unlock()
	h.leaf.IP("link", "set", "p0", "up")
	h.carriers(2)
	d.beforeRise([]contract.Change{{Kind: contract.SubPortChange, Device: "p1", Up: false}})
	if usable() {
		t.Fatal("the event was handled before: this test has lost its subject")
	}
	d.beforeRise([]contract.Change{{Kind: contract.SubPortChange, Device: "p0", Up: true}})
	if !usable() {
		t.Error("p0 is set up, and its carrier is not known")
	}
}
