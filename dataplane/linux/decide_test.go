package linux

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/internal/rtnl"
	"github.com/fared/fared/wecmp"
)

// The table of routes and the loopback's interface index of the planes that thought makes.
const (
	thoughtTable = 254
	loIndex      = 1
)

// thought returns a Plane without a kernel: sub-ports p0, p1, ... on the devices 10, 11, ..., each with a next hop of both families.
// The test calls done for the ops of its plans.
func thought(t *testing.T, subPorts int) *Plane {
	t.Helper()
	config, err := Config{Buckets: 64, Logger: slog.New(slog.DiscardHandler), RepairDelay: time.Hour}.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	p := &Plane{
		config: config, log: config.Logger, ipv6: true, maxWeight: 65535, next: config.FirstID, capabilities: &farev1.Capabilities{},
		byDevice: map[string]*subPort{}, wanted: map[uint32]*farev1.Vector{}, destinations: map[contract.DestinationKey]uint32{},
		links: map[int]rtnl.Link{loIndex: {Index: loIndex, Name: "lo", Up: true, Carrier: true, Loopback: true}}, names: map[string]int{"lo": loIndex},
		used: map[uint32]bool{}, owners: map[uint32]*pool{}, groups: map[groupKey]*group{}, routes: map[routeKey]routeState{},
		unfit: map[netip.Addr]bool{}, missing: map[netip.Addr]bool{}, addresses: map[netip.Addr]bool{},
		strays: map[uint32]stray{}, loose: map[uint32]rtnl.Nexthop{}, staleGroups: map[groupKey]bool{}, staleRoutes: map[routeKey]bool{},
		sources: map[netip.Prefix]*source{}, tables: map[uint32]*source{}, named: map[netip.Prefix]int{}, made: map[rtnl.Rule]bool{},
		ruled: map[netip.Prefix]uint32{}, dark: map[int]bool{},
	}
	for f := range p.drop {
		p.drop[f], p.hole[f] = &pool{family: family(f), loopback: true}, &pool{family: family(f), blackhole: true}
	}
	f := &farev1.Forwarding{}
	for i := range subPorts {
		l := rtnl.Link{Index: 10 + i, Name: fmt.Sprintf("p%d", i), Up: true, Carrier: true}
		p.links[l.Index], p.names[l.Name] = l, l.Index
		sp := &subPort{device: l.Name, hops: [2]netip.Addr{netip.AddrFrom4([4]byte{10, 1, byte(i), 2}), netip.MustParseAddr(fmt.Sprintf("fd01:%d::2", i))}}
		p.subPorts, p.byDevice[l.Name] = append(p.subPorts, sp), sp
		p.setHop(sp, v4)
		p.setHop(sp, v6)
		f.Planes = append(f.Planes, &farev1.ForwardingPlane{Plane: l.Name, SubPorts: []*farev1.ForwardingSubPort{{Device: l.Name}}})
	}
	p.forwarding = f
	p.setSources(f)
	return p
}

// set makes a group wanted, with weights by sub-port.
func (p *Plane) set(id uint32, weights ...uint32) {
	g := &farev1.Vector{Id: id}
	for i, w := range weights {
		if w > 0 {
			g.Members = append(g.Members, &farev1.VectorMember{Plane: p.subPorts[i].device, Device: p.subPorts[i].device, Weight: w})
		}
	}
	p.want(contract.Change{Kind: contract.GroupChange, Group: id, After: g}, map[groupKey]bool{}, map[routeKey]bool{})
}

// leads moves a destination from one group to another; 0 is no group.
func (p *Plane) leads(prefix string, from, to uint32) {
	c := contract.Change{Kind: contract.DestinationChange, Prefix: mustPrefix(prefix)}
	c.From.Group, c.To.Group = from, to
	p.want(c, map[groupKey]bool{}, map[routeKey]bool{})
}

// obey plans and calls done for all ops until a plan is empty, and returns the ops in order.
func (p *Plane) obey(t *testing.T) (all []op) {
	t.Helper()
	for range 5 {
		pl := p.plan()
		if pl.empty() {
			p.await(nil)
			return all
		}
		ops := slices.Concat(pl.nexthopOps, pl.groupOps, pl.closeOps, pl.routeOps, pl.lastOps, pl.openOps)
		for i := range ops {
			if ops[i].kind == setRoute {
				ops[i].source = p.preferred(ops[i].at)
			}
			p.done(&ops[i])
		}
		all = append(all, ops...)
	}
	t.Fatalf("plans without end: %+v", all)
	return nil
}

// countOps counts ops of a kind.
func countOps(ops []op, kind opKind) (n int) {
	for _, o := range ops {
		if o.kind == kind {
			n++
		}
	}
	return n
}

// devices returns the device of each bucket of a group, "" for a bucket without one.
func (p *Plane) devices(g *group) (table []string) {
	for _, s := range g.segments {
		name := ""
		if q := p.owners[s.id]; q != nil && q.subPort != nil {
			name = q.subPort.device
		}
		table = append(table, slices.Repeat([]string{name}, s.size)...)
	}
	return table
}

// sharesOf counts the buckets of each device.
func (p *Plane) sharesOf(g *group) map[string]int {
	n := map[string]int{}
	for _, d := range p.devices(g) {
		n[d]++
	}
	return n
}

// TestConfigJudged checks the documented defaults, and that contradictory values are refused by name.
func TestConfigJudged(t *testing.T) {
	got, err := Config{}.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	logger := got.Logger
	got.Logger = nil
	want := Config{
		Protocol: 179, Table: 254, RulePriority: 10000, SourceTable: 0x66617300, Metric: 20, Memory: 1 << 30, Seed: 0x66617265, FirstID: 0x66617265,
		ProbeTable: 0x66617265, ProbeMark: 0x66617265, RepairDelay: 50 * time.Millisecond, AuditInterval: time.Minute,
	}
	if !reflect.DeepEqual(got, want) || logger == nil {
		t.Errorf("%+v, want %+v", got, want)
	}
	set := Config{
		Protocol: 5, Table: 7, RulePriority: 3, SourceTable: 1000, Metric: 1, Memory: 2, Seed: 3, FirstID: 4, ProbeTable: 8, ProbeMark: 9, RepairDelay: 1,
		AuditInterval: 1, Buckets: 1, Logger: slog.New(slog.DiscardHandler),
	}
	if got, err := set.withDefaults(); err != nil || !reflect.DeepEqual(got, set) {
		t.Errorf("%+v, %v; want it as it was", got, err)
	}
	for _, c := range []struct {
		change func(*Config)
		says   string // "": valid
	}{
		{func(c *Config) { c.Protocol = 4 }, "protocol 4"}, {func(c *Config) { c.Protocol = 1 }, "protocol 1"},
		{func(c *Config) { c.RepairDelay = -1 }, "repair delay"}, {func(c *Config) { c.AuditInterval = -1 }, "audit interval"},
		{func(c *Config) { c.Table, c.ProbeTable = 9, 9 }, "probe table"},
		{func(c *Config) { c.Table = 1000 }, "source groups"}, {func(c *Config) { c.Table = 1255 }, "source groups"},
		{func(c *Config) { c.Table = 999 }, ""}, {func(c *Config) { c.Table = 1256 }, ""},
		{func(c *Config) { c.ProbeTable = 1000 }, "source groups"}, {func(c *Config) { c.ProbeTable = 1255 }, "source groups"},
		{func(c *Config) { c.ProbeTable = 1256 }, ""},
		{func(c *Config) { c.SourceTable = math.MaxUint32 - 255 }, "source groups"}, {func(c *Config) { c.SourceTable = math.MaxUint32 - 256 }, ""},
		{func(c *Config) { c.RulePriority = 2 }, "rule priority 2"}, {func(c *Config) { c.RulePriority = 3 }, ""},
	} {
		config := set
		c.change(&config)
		if _, err := config.withDefaults(); (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("%+v: %v, want %q", config, err, c.says)
		}
	}
}

// TestStatsCountObjects compares the object counters with figures by hand.
func TestStatsCountObjects(t *testing.T) {
	p := thought(t, 3)
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

// TestKernelStatus: the code of a refusal says whether another attempt needs more room.
func TestKernelStatus(t *testing.T) {
	for errno, want := range map[unix.Errno]codes.Code{
		unix.ENOMEM: codes.ResourceExhausted, unix.ENOSPC: codes.ResourceExhausted, unix.E2BIG: codes.ResourceExhausted,
		unix.ENOBUFS: codes.ResourceExhausted, unix.EMSGSIZE: codes.ResourceExhausted, unix.EINVAL: codes.Unavailable, unix.EEXIST: codes.Unavailable,
	} {
		if got := status.Code(kernelStatus(fmt.Errorf("x: %w", errno))); got != want {
			t.Errorf("%v: %v, want %v", errno, got, want)
		}
	}
	for errno, want := range map[unix.Errno]bool{
		unix.EMFILE: true, unix.ENFILE: true, unix.ENOMEM: true, unix.ENOBUFS: true, unix.EAGAIN: true, unix.EINTR: true, unix.EBUSY: true, unix.EINVAL: false, unix.EPERM: false,
	} {
		if transient(fmt.Errorf("x: %w", errno)) != want {
			t.Errorf("transient(%v) is not %v", errno, want)
		}
	}
	at := routeKey{mustPrefix(target4(0)), 254}
	for _, c := range []struct {
		kind  opKind
		errno unix.Errno
		names bool
	}{{setRoute, unix.EEXIST, true}, {setRoute, unix.EINVAL, false}, {setGroup, unix.EEXIST, false}} {
		err := failure{op{kind: c.kind, at: at}, c.errno}.refusal()
		if got := strings.Contains(err.Error(), "another program's route to 10.255.1.1/32"); got != c.names || status.Code(err) != codes.Unavailable {
			t.Errorf("kind %d, %v: %v", c.kind, c.errno, err)
		}
	}
}

// TestPlanIsEmpty: only a plan without ops is empty.
func TestPlanIsEmpty(t *testing.T) {
	for set := range 1 << 6 {
		var lists [6][]op
		for i := range lists {
			if set&(1<<i) != 0 {
				lists[i] = []op{{}}
			}
		}
		pl := &plan{nexthopOps: lists[0], groupOps: lists[1], closeOps: lists[2], routeOps: lists[3], lastOps: lists[4], openOps: lists[5]}
		if pl.empty() != (set == 0) {
			t.Errorf("lists %06b: empty is %v", set, pl.empty())
		}
	}
}

// TestWhenAgain: the next sync is due when the first waiting group is, and after a refusal in the retry delay.
func TestWhenAgain(t *testing.T) {
	p := thought(t, 2)
	p.config.RepairDelay = 10 * time.Second
	base := time.Now()
	at := routeKey{mustPrefix(target4(0)), 254}
	key := func(i uint32) groupKey { return groupKey{i, v4} }
	p.groups[key(1)] = &group{key: key(1), moved: true, movedAt: base.Add(3 * time.Second), dealtAt: base}
	p.groups[key(2)] = &group{key: key(2), witnesses: []uint32{7}, dealtAt: base.Add(2 * time.Second)}
	p.groups[key(3)] = &group{key: key(3), dealtAt: base}
	for _, order := range []struct {
		stale, keeps []uint32
		due          time.Time
	}{
		{[]uint32{1, 2, 3, 4}, []uint32{1, 2}, base.Add(12 * time.Second)}, {[]uint32{1, 3}, []uint32{1}, base.Add(13 * time.Second)},
		{[]uint32{3, 4}, nil, time.Time{}}, {nil, nil, time.Time{}},
	} {
		for range 8 { // the order of a map
			clear(p.staleGroups)
			for _, i := range order.stale {
				p.staleGroups[key(i)] = true
			}
			p.staleRoutes[at] = true
			due := p.await(nil)
			var keeps []uint32
			for k := range p.staleGroups {
				keeps = append(keeps, k.wanted)
			}
			slices.Sort(keeps)
			if !due.Equal(order.due) || !slices.Equal(keeps, order.keeps) || len(p.staleRoutes) != 0 {
				t.Fatalf("stale %v: due %v, want %v; keeps %v, want %v; routes %v", order.stale, due.Sub(base), order.due.Sub(base), keeps, order.keeps, p.staleRoutes)
			}
		}
	}
	clear(p.staleGroups)
	p.staleGroups[key(2)] = true
	before := time.Now()
	due := p.await([]failure{{op{kind: setGroup, group: p.groups[key(3)]}, unix.EINVAL}, {op{kind: setRoute, at: at}, unix.EINVAL}, {op{kind: deleteNexthop}, unix.EINVAL}})
	if wait := due.Sub(before); wait < retryDelay || wait > retryDelay+time.Minute {
		t.Errorf("after refusals the next attempt is in %v", wait)
	}
	if want := map[groupKey]bool{key(2): true, key(3): true}; !maps.Equal(p.staleGroups, want) || !maps.Equal(p.staleRoutes, map[routeKey]bool{at: true}) {
		t.Errorf("stale %v, %v; want what was refused, and what waits", p.staleGroups, p.staleRoutes)
	}
}

// TestWhatConcernsAnOperation: an operation is refused if an op on its groups and routes is, or if the kernel has no room for a nexthop.
func TestWhatConcernsAnOperation(t *testing.T) {
	p := thought(t, 2)
	g, other := &group{key: groupKey{1, v4}}, &group{key: groupKey{2, v4}}
	at, otherAt := routeKey{mustPrefix(target4(0)), 254}, routeKey{mustPrefix(target4(1)), 254}
	for _, c := range []struct {
		what  string
		op    op
		errno unix.Errno
		want  bool
	}{
		{"its group", op{kind: setGroup, group: g}, unix.EINVAL, true},
		{"another group", op{kind: setGroup, group: other}, unix.EINVAL, false},
		{"its route", op{kind: setRoute, group: g, at: at}, unix.EINVAL, true},
		{"its route to another group", op{kind: setRoute, group: other, at: at}, unix.EINVAL, true},
		{"its route, without a group", op{kind: deleteRoute, at: at}, unix.EINVAL, true},
		{"another route of its group", op{kind: setRoute, group: g, at: otherAt}, unix.EINVAL, false},
		{"another route", op{kind: deleteRoute, at: otherAt}, unix.EINVAL, false},
		{"a next hop", op{kind: makeNexthop}, unix.EINVAL, false},
		{"room for a next hop", op{kind: makeNexthop}, unix.ENOMEM, true},
		{"room for another group", op{kind: setGroup, group: other}, unix.ENOMEM, false},
	} {
		err := p.relevant([]failure{{c.op, c.errno}}, map[groupKey]bool{g.key: true}, map[routeKey]bool{at: true})
		if (err != nil) != c.want {
			t.Errorf("%s: %v", c.what, err)
		}
	}
}

// TestWhatAChangeTouches checks which groups and routes each kind of change touches and marks as stale.
func TestWhatAChangeTouches(t *testing.T) {
	p := thought(t, 3)
	p.set(1, 1, 1, 0)
	p.set(2, 0, 1, 1)
	p.set(3, 0, 0, 1)
	p.leads(target4(0), 0, 1)
	p.leads(target6(0), 0, 1)
	p.leads(target4(1), 0, 2)
	p.leads(target4(2), 0, 3)
	p.obey(t)
	check := func(what string, c contract.Change, keys []groupKey, routes, staleRoutes []string) {
		t.Helper()
		clear(p.staleGroups)
		clear(p.staleRoutes)
		touched, places := map[groupKey]bool{}, map[routeKey]bool{}
		p.want(c, touched, places)
		want := map[groupKey]bool{}
		for _, k := range keys {
			want[k] = true
		}
		at := func(list []string) map[routeKey]bool {
			all := map[routeKey]bool{}
			for _, prefix := range list {
				all[routeKey{mustPrefix(prefix), 254}] = true
			}
			return all
		}
		if !maps.Equal(touched, want) || !maps.Equal(p.staleGroups, want) || !maps.Equal(places, at(routes)) || !maps.Equal(p.staleRoutes, at(staleRoutes)) {
			t.Errorf("%s: groups %v, looked at %v, want %v; routes %v, looked at %v, want %v and %v", what, touched, p.staleGroups, want, places, p.staleRoutes, routes, staleRoutes)
		}
	}
	v := func(id uint32, f family) groupKey { return groupKey{id, f} }
	check("a sub-port", contract.Change{Kind: contract.SubPortChange, Device: "p0", Up: true}, []groupKey{v(1, v4), v(1, v6)}, nil, nil)
	check("another sub-port", contract.Change{Kind: contract.SubPortChange, Device: "p2", Up: true}, []groupKey{v(2, v4), v(3, v4)}, nil, nil)
	check("an unknown sub-port", contract.Change{Kind: contract.SubPortChange, Device: "p9", Up: true}, nil, nil, nil)
	check("a group", contract.Change{Kind: contract.GroupChange, Group: 1, After: p.wanted[1]}, []groupKey{v(1, v4), v(1, v6)}, nil, nil)
	check("a group that nothing uses", contract.Change{Kind: contract.GroupChange, Group: 8, After: p.wanted[1]}, nil, nil, nil)
	if p.wanted[8] == nil {
		t.Error("a group is not wanted")
	}
	check("its removal", contract.Change{Kind: contract.GroupChange, Group: 8}, nil, nil, nil)
	if p.wanted[8] != nil {
		t.Error("a removed group is wanted")
	}
	p.subPorts[1].down = true
	check("held down no more", contract.Change{Kind: contract.SubPortChange, Device: "p1", Up: true}, []groupKey{v(1, v4), v(1, v6), v(2, v4)}, nil, nil)
	if p.subPorts[1].down {
		t.Error("a sub-port is held down")
	}
	// Answered is what the kernel had moved.
	p.groups[v(1, v4)].moved = true
	check("an answer", contract.Change{Kind: contract.GroupChange, Group: 1, After: p.wanted[1]}, []groupKey{v(1, v4), v(1, v6)}, nil, nil)
	if !p.groups[v(1, v4)].answered || p.groups[v(1, v6)].answered {
		t.Error("answered is not what had moved")
	}

	destination := func(prefix string, from, to uint32) contract.Change {
		c := contract.Change{Kind: contract.DestinationChange, Prefix: mustPrefix(prefix)}
		c.From.Group, c.To.Group = from, to
		return c
	}
	clear(p.staleGroups)
	p.want(destination(target4(3), 0, 2), map[groupKey]bool{}, map[routeKey]bool{})
	if g := p.groups[v(2, v4)]; g.users != 2 || len(p.staleGroups) != 0 || p.destinations[contract.DestinationKey{Prefix: mustPrefix(target4(3))}] != 2 {
		t.Errorf("another user: %+v, %v", g, p.staleGroups)
	}
	p.want(destination(target4(3), 2, 3), map[groupKey]bool{}, map[routeKey]bool{})
	if p.groups[v(2, v4)].users != 1 || p.groups[v(3, v4)].users != 2 || len(p.staleGroups) != 0 {
		t.Errorf("a user less: %v", p.staleGroups)
	}
	touched, places := map[groupKey]bool{}, map[routeKey]bool{}
	p.want(destination(target4(1), 2, 0), touched, places)
	if p.groups[v(2, v4)].users != 0 || !maps.Equal(p.staleGroups, map[groupKey]bool{v(2, v4): true}) || len(touched) != 0 ||
		!maps.Equal(places, map[routeKey]bool{{mustPrefix(target4(1)), 254}: true}) {
		t.Errorf("the last user: %v, %v, %v", p.staleGroups, touched, places)
	}
	if _, ok := p.destinations[contract.DestinationKey{Prefix: mustPrefix(target4(1))}]; ok {
		t.Error("a removed destination is wanted")
	}
	clear(touched)
	p.want(destination(target6(5), 0, 3), touched, places)
	if g := p.groups[v(3, v6)]; g == nil || g.users != 1 || !touched[v(3, v6)] || !p.staleRoutes[routeKey{mustPrefix(target6(5)), 254}] {
		t.Errorf("a first user: %+v, %v, %v", g, touched, p.staleRoutes)
	}
}

// TestUndone checks the state of next hops, source addresses and groups after each kind of refusal.
func TestUndone(t *testing.T) {
	source := netip.MustParseAddr("10.255.0.1")
	for _, c := range []struct {
		what      string
		source    netip.Addr
		errno     unix.Errno
		flags     uint16
		key       groupKey
		unfit     bool
		rejecting bool
	}{
		{"an address that does not fit", source, unix.EINVAL, rtnl.Create, groupKey{1, v4}, true, false},
		{"a route of others", source, unix.EEXIST, rtnl.Create, groupKey{1, v4}, false, false},
		{"no address", netip.Addr{}, unix.EINVAL, rtnl.Create, groupKey{1, v4}, false, false},
		{"an IPv6 route that stays", netip.Addr{}, unix.EINVAL, rtnl.Change, groupKey{1, v6}, false, true},
		{"an IPv6 route that is not there", netip.Addr{}, unix.EINVAL, rtnl.Create, groupKey{1, v6}, false, false},
		{"an IPv4 route that stays", netip.Addr{}, unix.EINVAL, rtnl.Change, groupKey{1, v4}, false, false},
	} {
		p := thought(t, 1)
		g := &group{key: c.key}
		p.undone(&op{kind: setRoute, group: g, source: c.source, flags: c.flags}, c.errno, true)
		if p.unfit[c.source] != c.unfit || len(p.unfit) > 1 || len(p.unfit) == 1 != c.unfit || g.rejecting != c.rejecting {
			t.Errorf("%s: unfit %v, rejecting %v", c.what, p.unfit, g.rejecting)
		}
		g.rejecting = true
		if p.undone(&op{kind: setRoute, group: g, flags: rtnl.Create}, c.errno, true); !g.rejecting {
			t.Errorf("%s: a refusal ends that routes reject", c.what)
		}
		p.undone(&op{kind: setRoute, flags: rtnl.Create}, c.errno, true) // of a route that drops: it has no group
	}
	for _, c := range []struct {
		what   string
		kind   opKind
		errno  unix.Errno
		again  bool
		hole   bool
		broken error // before
		want   error // after
		ids    []uint32
	}{
		{"refused", makeNexthop, unix.EINVAL, true, false, nil, unix.EINVAL, nil},
		{"refused the first time", makeNexthop, unix.EINVAL, false, false, nil, nil, []uint32{7}},
		{"the id is somebody's", makeNexthop, unix.EEXIST, true, false, nil, nil, []uint32{7}},
		{"no room", makeNexthop, unix.ENOMEM, true, false, nil, nil, []uint32{7}},
		{"of no sub-port", makeNexthop, unix.EINVAL, true, true, nil, nil, []uint32{7}},
		{"broken before", makeNexthop, unix.EINVAL, true, false, unix.ENODEV, unix.ENODEV, []uint32{7}},
		{"a change", changeNexthop, unix.EINVAL, true, false, nil, unix.EINVAL, nil},
		{"a change, the first time", changeNexthop, unix.EINVAL, false, false, nil, nil, []uint32{7, 8}},
		{"another kind", setGroup, unix.EINVAL, true, false, nil, nil, []uint32{7, 8}},
	} {
		p := thought(t, 2)
		p.set(1, 1, 1)
		p.set(2, 0, 1)
		p.groups[groupKey{1, v4}], p.groups[groupKey{2, v4}] = &group{}, &group{}
		clear(p.staleGroups)
		q := p.subPorts[0].pools[v4]
		if c.hole {
			q = p.hole[v4]
		}
		q.ids, q.broken = []uint32{7, 8}, c.broken
		p.owners[7], p.owners[8] = q, q
		p.undone(&op{kind: c.kind, pool: q, id: 8}, c.errno, c.again)
		owned := slices.Sorted(maps.Keys(p.owners))
		if !errors.Is(q.broken, c.want) || (q.broken == nil) != (c.want == nil) || !slices.Equal(q.ids, c.ids) || !slices.Equal(owned, c.ids) {
			t.Errorf("%s: broken %v, want %v; ids %v, owned %v, want %v", c.what, q.broken, c.want, q.ids, owned, c.ids)
		}
		breaks := c.want != nil && c.broken == nil
		if stale := p.staleGroups[groupKey{1, v4}]; stale != breaks || len(p.staleGroups) > 1 || breaks != (len(p.retired) > 0) {
			t.Errorf("%s: stale groups %v, retired %v", c.what, p.staleGroups, p.retired)
		}
	}
}

// TestUnrejectSetsTheGroupsRoutes: when a group carries packets again, its routes and no others are set once more.
func TestUnrejectSetsTheGroupsRoutes(t *testing.T) {
	p := thought(t, 2)
	p.set(1, 1, 1)
	p.set(2, 1, 2)
	for i := range 2 {
		p.leads(target6(i), 0, 1)
		p.leads(target6(2+i), 0, 2)
		p.leads(target4(i), 0, 1)
	}
	p.obey(t)
	g := p.groups[groupKey{1, v6}]
	// A route that leads to it by mistake is another's.
	p.routes[routeKey{mustPrefix(target4(1)), 254}] = routeState{nexthop: g.id}
	p.routes[routeKey{mustPrefix(target6(3)), 254}] = routeState{nexthop: g.id}
	for _, c := range []struct {
		rejecting, live bool
		want            []string
	}{
		{false, true, nil}, {true, false, nil}, {true, true, []string{target6(0), target6(1)}}, {false, true, nil},
	} {
		g.rejecting = c.rejecting
		pl := &plan{Plane: p}
		pl.unreject(g, c.live)
		var got []string
		for _, o := range pl.routeOps {
			got = append(got, o.at.prefix.String())
			if o.kind != setRoute || o.id != g.id || o.group != g || o.flags != rtnl.Change || o.at.table != 254 {
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
	p := thought(t, 4)
	p.set(1, 1, 1, 1, 1)
	p.leads(target4(0), 0, 1)
	ops := p.obey(t)
	if countOps(ops, makeNexthop) != 5 || countOps(ops, setGroup) != 1 || countOps(ops, setRoute) != 1 || len(ops) != 7 {
		t.Errorf("the first destination: %+v", ops)
	}
	g := p.groups[groupKey{1, v4}]
	quarters := map[string]int{"p0": 16, "p1": 16, "p2": 16, "p3": 16}
	if got := p.sharesOf(g); !maps.Equal(got, quarters) || !g.exists || g.dropping || g.rejecting {
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
	p.set(1, 1, 1, 0, 1)
	ops = p.obey(t)
	if countOps(ops, setGroup) != 1 || countOps(ops, setRoute) != 0 || kept(before) != 48 || len(g.witnesses) != 1 || g.moved {
		t.Errorf("a weight of 0 moves its 16 buckets in one message, with a witness: %d kept, %+v", kept(before), g)
	}
	p.set(1, 2, 2, 0, 2)
	if ops = p.obey(t); len(ops) != 0 {
		t.Errorf("weights in the same ratio: %+v", ops)
	}
	// The witness goes when the control plane had its time.
	p.config.RepairDelay = 1
	p.staleGroups[g.key] = true
	members := len(g.members)
	if ops = p.obey(t); len(ops) != 1 || ops[0].kind != setGroup || len(g.witnesses) != 0 || len(g.members) != members-1 || g.segments == nil || g.dropping {
		t.Errorf("the witness: %+v, %+v", ops, g)
	}
	p.staleGroups[g.key] = true
	if ops = p.obey(t); len(ops) != 0 {
		t.Errorf("at rest: %+v", ops)
	}
	p.config.RepairDelay = time.Hour
	// Nothing left.
	p.set(1)
	if ops = p.obey(t); countOps(ops, setGroup) != 1 || !g.dropping || g.segments != nil || len(g.members) != 1 || p.owners[g.members[0].ID] != p.hole[v4] {
		t.Errorf("no members: %+v, %+v", ops, g)
	}
	p.generation++
	p.staleGroups[g.key] = true
	if ops = p.obey(t); len(ops) != 0 || g.generation != p.generation {
		t.Errorf("no members still: %+v, %+v", ops, g)
	}
	// It drops, and somebody has changed it.
	g.moved = true
	p.staleGroups[g.key] = true
	if ops = p.obey(t); countOps(ops, setGroup) != 1 || g.moved || !g.dropping {
		t.Errorf("a group that drops was changed: %+v", ops)
	}
	p.set(1, 0, 0, 0, 5)
	if p.obey(t); !maps.Equal(p.sharesOf(g), map[string]int{"p3": 64}) || g.dropping {
		t.Errorf("%v", p.sharesOf(g))
	}
	p.set(1, 1, 1, 1, 1)
	p.obey(t)

	// A lost carrier: the control plane has its time, unless it answers.
	p.takeLinks([]rtnl.LinkEvent{{Link: rtnl.Link{Index: 12, Name: "p2", Up: true}}})
	if ops = p.obey(t); len(ops) != 0 || !g.moved || !slices.Equal(g.weights, []uint32{1, 1, 0, 1}) {
		t.Errorf("a lost carrier: %+v, %+v", ops, g)
	}
	repairs := p.stats.Repairs
	p.set(1, 1, 1, 1, 1)
	if ops = p.obey(t); countOps(ops, setGroup) != 1 || p.stats.Repairs != repairs {
		t.Errorf("the answer: %+v, %d repairs", ops, p.stats.Repairs-repairs)
	}
	p.takeLinks([]rtnl.LinkEvent{{Link: rtnl.Link{Index: 11, Name: "p1", Up: true}}})
	p.config.RepairDelay = 1
	if ops = p.obey(t); countOps(ops, setGroup) != 1 || p.stats.Repairs != repairs+1 || !maps.Equal(p.sharesOf(g), map[string]int{"p0": 32, "p3": 32}) {
		t.Errorf("no answer: %+v, %d repairs, %v", ops, p.stats.Repairs-repairs, p.sharesOf(g))
	}
	p.config.RepairDelay = time.Hour
	// Another change in that time is no repair.
	p.takeLinks([]rtnl.LinkEvent{{Link: rtnl.Link{Index: 10, Name: "p0", Up: true}}})
	p.takeLinks([]rtnl.LinkEvent{{Link: rtnl.Link{Index: 11, Name: "p1", Up: true, Carrier: true}}})
	if ops = p.obey(t); countOps(ops, setGroup) != 1 || p.stats.Repairs != repairs+1 || !maps.Equal(p.sharesOf(g), map[string]int{"p1": 32, "p3": 32}) {
		t.Errorf("a carrier returns meanwhile: %+v, %d repairs, %v", ops, p.stats.Repairs-repairs, p.sharesOf(g))
	}
	for i := range 4 {
		p.takeLinks([]rtnl.LinkEvent{{Link: rtnl.Link{Index: 10 + i, Name: fmt.Sprintf("p%d", i), Up: true, Carrier: true}}})
	}
	p.obey(t)
	if got := p.sharesOf(g); !maps.Equal(got, quarters) {
		t.Errorf("all carriers: %v", got)
	}

	// A sub-port that gets another next hop for the family leaves the nexthops of the first.
	for i := range 4 {
		p.subPorts[i].hops[v4] = netip.Addr{}
		p.setHop(p.subPorts[i], v4)
	}
	p.generation++
	p.staleGroups[g.key] = true
	p.obey(t)
	for _, s := range g.segments {
		if q := p.owners[s.id]; q == nil || q.family != v6 {
			t.Errorf("without IPv4 next hops: %+v", s)
		}
	}
	for i := range 4 {
		p.subPorts[i].hops[v4] = netip.AddrFrom4([4]byte{10, 1, byte(i), 2})
		p.setHop(p.subPorts[i], v4)
	}
	p.generation++
	p.staleGroups[g.key] = true
	p.obey(t)
	for _, s := range g.segments {
		if q := p.owners[s.id]; q == nil || q.family != v4 {
			t.Errorf("with IPv4 next hops again: %+v", s)
		}
	}
	if len(p.retired) != 0 {
		t.Errorf("nexthops of no next hop are left: %v", p.retired)
	}
	// One whose device is not known any more is dealt anew.
	p.owners[g.segments[0].id] = &pool{}
	p.set(1, 1, 1, 1, 2)
	p.obey(t)
	if got := p.sharesOf(g); got["p3"] != 25 || got[""] != 0 {
		t.Errorf("%v", got)
	}
	p.leads(target4(0), 1, 0)
	if ops = p.obey(t); countOps(ops, deleteRoute) != 1 || countOps(ops, deleteGroup) != 1 || len(ops) != 2 || len(p.groups) != 0 || len(p.routes) != 0 {
		t.Errorf("the end: %+v", ops)
	}
}

// TestPiecesStayFew: a group has few members after hundreds of changes, and a change of a group with few members moves only the buckets that
// change their owner.
func TestPiecesStayFew(t *testing.T) {
	p := thought(t, 8)
	p.resize(1024, 8)
	p.set(1, 1, 1, 1, 1, 1, 1, 1, 1)
	p.leads(target4(0), 0, 1)
	p.obey(t)
	g := p.groups[groupKey{1, v4}]
	for round := range 200 {
		weights := make([]uint32, 8)
		for i := range weights {
			weights[i] = uint32(1 + (round*7+i*i*5)%9)
		}
		p.set(1, weights...)
		p.obey(t)
		target := p.sources[netip.Prefix{}].layout.runs(weights)
		if most := 2*p.scaling.pieces(target) + 2*8 + 1; len(g.members) > most {
			t.Fatalf("round %d: %d members, above %d", round, len(g.members), most)
		}
		at := 0
		table := p.devices(g)
		for _, r := range target {
			for range r.size {
				if table[at] != fmt.Sprintf("p%d", r.subPort) {
					t.Fatalf("round %d: bucket %d is %s's, want p%d's", round, at, table[at], r.subPort)
				}
				at++
			}
		}
	}
	p.set(1, 1, 1, 1, 1, 1, 1, 1, 1)
	p.obey(t)
	g.segments = nil // dealt anew
	g.weights = nil
	p.staleGroups[g.key] = true
	p.obey(t)
	before := map[uint32]bool{}
	for _, s := range g.segments {
		before[s.id] = true
	}
	if len(before) != 8 {
		t.Fatalf("%d nexthops, want one for each sub-port", len(before))
	}
	p.set(1, 1, 1, 1, 0, 1, 1, 1, 1)
	p.obey(t)
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

// TestSpareMembers: by the model of the kernel (TestTwinIsTheKernel), the spare members and the one that drops get no bucket, and one more
// member of weight 1 gets one.
func TestSpareMembers(t *testing.T) {
	for _, c := range []struct{ buckets, maxWeight int }{{1024, 65535}, {8192, 65535}, {65535, 65535}} {
		s := newScaling(c.buckets, c.maxWeight)
		lost := func(extra int) (n int) {
			var members []rtnl.Member
			for id, left := uint32(1), c.buckets; left > 0; id++ {
				size := min(left, s.longest)
				members = append(members, rtnl.Member{ID: id, Weight: uint32(size * s.scale)})
				left -= size
				if size*s.scale > c.maxWeight {
					t.Fatalf("%+v: a weight of %d", c, size*s.scale)
				}
			}
			bearing := len(members)
			for i := range extra {
				members = append(members, rtnl.Member{ID: uint32(1000 + i), Weight: 1})
			}
			tb := table{buckets: make([]uint32, c.buckets)}
			tb.replace(members)
			for _, id := range tb.buckets {
				if int(id) > bearing {
					n++
				}
			}
			return n
		}
		if n := lost(s.spare + 1); n != 0 {
			t.Errorf("%+v: %d buckets go to %d members that are to have none", c, n, s.spare+1)
		}
		if n := lost(s.spare + 2); n == 0 {
			t.Errorf("%+v: %d members of weight 1 take nothing; the scaling has room for more", c, s.spare+2)
		}
	}
}

// TestWitnessesHaveRoom: all buckets of a group move when more sub-ports leave it than there are spare members, and not otherwise.
func TestWitnessesHaveRoom(t *testing.T) {
	const n = 64
	l, s := layout{65535, n}, newScaling(65535, 65535)
	for gone := 1; gone < n; gone++ {
		next, owner := uint32(0), map[uint32]int{}
		fresh := func(subPort int) uint32 {
			next++
			owner[next] = subPort
			return next
		}
		first := s.dealAll(l.runs(slices.Repeat([]uint32{1}, n)), fresh)
		weights := slices.Concat(slices.Repeat([]uint32{1}, n-gone), make([]uint32, gone))
		d := s.deal(first.segments, l.runs(weights), func(id uint32) int { return owner[id] }, func(id uint32) int { return owner[id] + 1 }, fresh)
		if anew := d.moved == 65535; anew != (gone > s.scale/2-1) || !anew && len(d.witnesses) != gone {
			t.Errorf("%d of %d leave: %d buckets move, %d witnesses; scale %d", gone, n, d.moved, len(d.witnesses), s.scale)
		}
		unknown := s.deal(first.segments, l.runs(weights), func(id uint32) int { return owner[id] }, func(id uint32) int { return owner[id] }, fresh)
		if unknown.moved != 65535 {
			t.Errorf("a nexthop leads to a device that is not known: %d buckets move, want all", unknown.moved)
		}
	}
}

// TestAsDealt checks which groups are recognized as dealt by an earlier run.
func TestAsDealt(t *testing.T) {
	p := thought(t, 3)
	scale := uint32(p.scaling.scale)
	p.owners[90] = p.drop[v4]
	p.owners[91] = p.drop[v4]
	p.owners[92] = p.drop[v6]
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
		if got := p.asDealt(&group{key: groupKey{1, v4}, members: c.members, segments: segments}); got != c.want {
			t.Errorf("%s: %v", c.what, got)
		}
	}
}

// TestClaim checks which groups of an earlier run are claimed, and the state of a claimed group.
func TestClaim(t *testing.T) {
	scale := func(p *Plane) uint32 { return uint32(p.scaling.scale) }
	for _, c := range []struct {
		what                                     string
		key                                      groupKey
		change                                   func(p *Plane, s *stray)
		claimed, dropping, moved, rejecting, all bool
	}{
		{"as it was dealt", groupKey{1, v4}, nil, true, false, false, false, true},
		{"as it was dealt, IPv6", groupKey{1, v6}, func(p *Plane, s *stray) { s.Members[1].ID = 92 }, true, false, false, false, true},
		{"of another size", groupKey{1, v4}, func(_ *Plane, s *stray) { s.Buckets = 63 }, false, false, false, false, false},
		{"not resilient", groupKey{1, v4}, func(_ *Plane, s *stray) { s.Resilient = false }, false, false, false, false, false},
		{"with an idle timer", groupKey{1, v4}, func(_ *Plane, s *stray) { s.IdleTimer = 1 }, false, false, false, false, false},
		{"not there", groupKey{1, v4}, func(p *Plane, _ *stray) { clear(p.strays) }, false, false, false, false, false},
		{"dropping", groupKey{1, v4}, func(_ *Plane, s *stray) {
			s.Members, s.segments = []rtnl.Member{{ID: 80, Weight: 1}}, []segment{{80, 64}}
		}, true, true, false, false, false},
		{"dropping, IPv6", groupKey{1, v6}, func(_ *Plane, s *stray) {
			s.Members, s.segments = []rtnl.Member{{ID: 82, Weight: 1}}, []segment{{82, 64}}
		}, true, true, false, true, false},
		{"emptied by the kernel", groupKey{1, v6}, func(_ *Plane, s *stray) {
			s.Members, s.segments = []rtnl.Member{{ID: 92, Weight: 1}}, []segment{{92, 64}}
		}, true, false, true, true, false},
		{"moved by the kernel", groupKey{1, v4}, func(_ *Plane, s *stray) { s.segments = []segment{{1, 63}, {90, 1}} }, true, false, true, false, false},
		{"two members, the first a blackhole", groupKey{1, v4}, func(_ *Plane, s *stray) { s.Members[0].ID = 80 }, true, false, true, false, false},
	} {
		p := thought(t, 2)
		p.owners[80], p.owners[82], p.owners[90], p.owners[92] = p.hole[v4], p.hole[v6], p.drop[v4], p.drop[v6]
		at := routeKey{mustPrefix(target4(0)), 254}
		s := stray{rtnl.Nexthop{ID: 500, Members: []rtnl.Member{{ID: 1, Weight: 64 * scale(p)}, {ID: 90, Weight: 1}}, Resilient: true, Buckets: 64}, []segment{{1, 64}}}
		p.strays[500] = stray{}
		p.routes[at] = routeState{nexthop: 500}
		if c.change != nil {
			c.change(p, &s)
		}
		if _, ok := p.strays[500]; ok {
			p.strays[500] = s
		}
		p.groups[c.key] = &group{key: c.key}
		g := p.claim(c.key, at)
		if claimed := g.id == 500; claimed != c.claimed || g.exists != claimed || g.dropping != c.dropping || g.moved != c.moved || g.rejecting != c.rejecting ||
			p.staleGroups[c.key] != claimed || (g.segments != nil) != c.all || claimed && !slices.Equal(g.members, s.Members) {
			t.Errorf("%s: %+v", c.what, g)
		}
		if _, ok := p.strays[500]; ok == c.claimed && c.what != "not there" {
			t.Errorf("%s: among what nothing has claimed: %v", c.what, ok)
		}
		if g.id == 0 {
			t.Errorf("%s: no id", c.what)
		}
		clear(p.staleGroups)
		if again := p.claim(c.key, at); again != g || len(p.staleGroups) != 0 {
			t.Errorf("%s: claimed twice", c.what)
		}
	}
}

// TestLinksByHand checks names, indexes and nexthops after sequences of link events.
func TestLinksByHand(t *testing.T) {
	p := thought(t, 2)
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
	take("a device of somebody's", 1, false, rtnl.LinkEvent{Link: link(30, "eth0")})
	take("a device of somebody's goes", 1, false, rtnl.LinkEvent{Link: link(30, "eth0"), Gone: true})
	if _, ok := p.links[30]; ok || p.names["eth0"] != 0 {
		t.Error("a device that is gone is known")
	}
	if want := map[int]bool{30: true}; !maps.Equal(p.dark, want) {
		t.Errorf("dark %v, want %v", p.dark, want)
	}
	clear(p.dark)
	// Another device has the name by the time that the first one's end is heard of.
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
	// What is read back says the same as events.
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
		p = thought(t, 3)
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

// TestEventsThatConcern checks which changes by other programs make the Plane read the kernel back.
func TestEventsThatConcern(t *testing.T) {
	p := thought(t, 2)
	p.config.Table = 7000
	p.sources[netip.Prefix{}].table = 7000
	p.claimants = map[uint32][]netip.Prefix{7000: {netip.Prefix{}}}
	p.sources[netip.Prefix{}].loopbacks = []netip.Prefix{mustPrefix("10.255.0.1/32"), mustPrefix("10.255.0.9/32")}
	p.addresses[netip.MustParseAddr("10.255.0.1")] = true
	p.set(1, 1, 1)
	p.leads(target4(0), 0, 1)
	p.obey(t)
	g := p.groups[groupKey{1, v4}]
	address := func(a string, usable, gone bool) rtnl.ObjectEvent {
		return rtnl.ObjectEvent{Gone: gone, Address: &rtnl.Address{Addr: netip.MustParseAddr(a), Usable: usable}}
	}
	route := func(prefix string, table uint32, protocol uint8, metric uint32) rtnl.ObjectEvent {
		return rtnl.ObjectEvent{Route: &rtnl.Route{Prefix: mustPrefix(prefix), Table: table, Protocol: protocol, Metric: metric}}
	}
	rule := func(table uint32) rtnl.ObjectEvent { return rtnl.ObjectEvent{Rule: &rtnl.Rule{Table: table}} }
	nexthop := func(id uint32, protocol uint8) rtnl.ObjectEvent {
		return rtnl.ObjectEvent{Nexthop: &rtnl.Nexthop{ID: id, Protocol: protocol}}
	}
	for _, c := range []struct {
		what  string
		event rtnl.ObjectEvent
		want  bool
	}{
		{"a nexthop of others", nexthop(5, 11), false}, {"a nexthop with the mark", nexthop(5, 179), true},
		{"a nexthop in our place", nexthop(p.subPorts[0].pools[v4].ids[0], 11), true},
		{"a rule of others", rule(90), false}, {"a rule to the table", rule(7000), true}, {"a rule to a source group's", rule(DefaultSourceTable + 3), true},
		{"a route elsewhere", route(target4(0), 254, 179, 20), false}, {"a route with the mark", route("10.9.9.9/32", 7000, 179, 1), true},
		{"a route with the mark of a source group", route("10.9.9.9/32", DefaultSourceTable, 179, 1), true},
		{"a route in our place", route(target4(0), 7000, 11, 20), true}, {"a route of another metric", route(target4(0), 7000, 11, 30), false},
		{"a route of nobody's", route("10.9.9.9/32", 7000, 11, 20), false},
		{"an address of others", address("10.1.0.1", true, false), false}, {"a loopback, as it was", address("10.255.0.1", true, false), false},
		{"a loopback that cannot be used", address("10.255.0.1", false, false), true}, {"a loopback that goes", address("10.255.0.1", true, true), true},
		{"a loopback that comes", address("10.255.0.9", true, false), true},
	} {
		if got := p.concerns(c.event); got != c.want {
			t.Errorf("%s: %v", c.what, got)
		}
	}
	if g.moved || p.stats.Differences != 0 {
		t.Errorf("%+v, %+v", g, p.stats)
	}
	unfit := netip.MustParseAddr("10.255.0.1")
	p.unfit[unfit] = true
	if !p.concerns(address("10.255.0.1", true, false)) || p.unfit[unfit] {
		t.Errorf("a loopback that the kernel had refused: %v", p.unfit)
	}
	// A group that somebody changed, with or without the mark.
	for _, protocol := range []uint8{11, 179} {
		g.moved, p.torn, p.stats.Differences = false, "", 0
		p.staleGroups[g.key] = true
		p.obey(t)
		g.segments, g.weights, g.movedAt = []segment{{1, 64}}, []uint32{1, 1}, time.Now()
		clear(p.staleGroups)
		if !p.concerns(nexthop(g.id, protocol)) || !g.moved || !g.movedAt.IsZero() || g.weights != nil || g.segments != nil || !p.staleGroups[g.key] || p.stats.Differences != 1 {
			t.Errorf("protocol %d: %+v, %+v", protocol, g, p.stats)
		}
	}
	// One that does not exist yet has no changes; its id is somebody else's.
	p.groups[groupKey{2, v4}] = &group{key: groupKey{2, v4}, id: 555}
	if p.concerns(nexthop(555, 11)) || p.groups[groupKey{2, v4}].moved {
		t.Error("a group that is not there was changed")
	}
}

// TestIntegrityReports: the first difference is reported, and its repair once nothing is refused or unread.
func TestIntegrityReports(t *testing.T) {
	p := thought(t, 1)
	var heard reports
	p.mended(nil)
	p.differs("before %s", "anybody listens")
	p.mended(nil)
	p.Guard(heard.report)
	want := func(what string, list ...string) {
		t.Helper()
		var got []string
		for _, i := range heard.take() {
			got = append(got, fmt.Sprint(i.Intact, " ", i.Repairs, " ", i.Message))
		}
		if !slices.Equal(got, list) {
			t.Errorf("%s: %q, want %q", what, got, list)
		}
	}
	p.mended(nil)
	want("nothing differs")
	p.differs("group %d", 7)
	p.differs("group %d", 8)
	want("two differ", "false 2 group 7")
	p.mended([]failure{{}})
	p.unread = true
	p.mended(nil)
	p.unread = false
	want("not repaired")
	p.mended(nil)
	p.mended(nil)
	want("repaired", "true 3 group 7")
	p.report([]failure{{op{kind: setGroup}, unix.EINVAL}, {op{kind: setGroup}, unix.ENOMEM}})
	want("refused", "false 3 the kernel refused: invalid argument")
	p.report(nil)
	want("not refused")
}

// TestNexthopsMean checks the nexthop objects that are sent, and which objects are recognized as equal.
func TestNexthopsMean(t *testing.T) {
	p := thought(t, 1)
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
	p := thought(t, 2)
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
	p := thought(t, 1)
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
		p := thought(t, 3)
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
	p := thought(t, 4)
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
	p := thought(t, 4)
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

// TestForwardingJudged checks next hops and the limits of sub-ports and source groups.
func TestForwardingJudged(t *testing.T) {
	p := thought(t, 1)
	hops := func(four, six string) *farev1.Forwarding {
		return &farev1.Forwarding{Planes: []*farev1.ForwardingPlane{
			{Plane: "A", SubPorts: []*farev1.ForwardingSubPort{{Device: "p0", NextHopV4: "10.1.0.2"}}},
			{Plane: "B", SubPorts: []*farev1.ForwardingSubPort{{Device: "p1"}, {Device: "p2", NextHopV4: four, NextHopV6: six}}},
		}}
	}
	for _, c := range []struct {
		four, six string
		ok        bool
	}{
		{"", "", true}, {"10.1.0.2", "fd01::2", true}, {"::ffff:10.1.0.2", "fe80::1%eth0", true}, {"169.254.1.1", "", true},
		{"fd01::2", "", false}, {"", "10.1.0.2", false}, {"leaf", "", false}, {"", "leaf", false}, {"0.0.0.0", "", false}, {"", "::", false},
		{"224.0.0.1", "", false}, {"", "ff02::1", false}, {"127.0.0.1", "", false}, {"", "::1", false},
	} {
		err := p.judge(hops(c.four, c.six))
		if (err == nil) != c.ok || !c.ok && (status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "planes[1].sub_ports[1]: ")) {
			t.Errorf("%q, %q: %v", c.four, c.six, err)
		}
	}
	for text, want := range map[string]string{"::ffff:10.1.0.2": "10.1.0.2", "fe80::1%eth0": "fe80::1", "": "invalid IP"} {
		if got, err := parseHop(text); err != nil || got.String() != want {
			t.Errorf("%q: %v, %v", text, got, err)
		}
	}
	for _, f := range []*farev1.Forwarding{nil, {}, {Planes: []*farev1.ForwardingPlane{{Plane: "A"}}}} {
		if err := p.judge(f); status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "no sub-ports") {
			t.Errorf("%v: %v", f, err)
		}
	}
	p.config.Buckets = 2
	if err := p.judge(hops("", "")); status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "3 sub-ports exceed 2 buckets") {
		t.Errorf("more sub-ports than buckets: %v", err)
	}
	p.config.Buckets = 3
	if err := p.judge(hops("", "")); err != nil {
		t.Errorf("as many sub-ports as buckets: %v", err)
	}
	f := hops("", "")
	for i := range 128 {
		loopback := fmt.Sprintf("10.255.%d.%d/32", i/250, 1+i%250)
		f.Loopbacks = append(f.Loopbacks, loopback)
		f.SourceGroups = append(f.SourceGroups, &farev1.SourceGroup{Loopbacks: []string{loopback}, Devices: []string{"p0"}})
	}
	if err := p.judge(f); err != nil {
		t.Errorf("128 source groups: %v", err)
	}
	f.SourceGroups = append(f.SourceGroups, &farev1.SourceGroup{Loopbacks: []string{"10.255.9.9/32"}, Devices: []string{"p0"}})
	if err := p.judge(f); status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "129 source groups") {
		t.Errorf("129 source groups: %v", err)
	}
	if !transit(hops("", "")) || transit(f) {
		t.Error("a node without loopbacks is not the one that forwards for others")
	}
	p.ipv6 = true
	if p.hopsV6(hops("10.1.0.2", "")) || !p.hopsV6(hops("", "fd01::2")) {
		t.Error("IPv6 is not where the next hops are")
	}
	p.ipv6 = false
	if p.hopsV6(hops("", "fd01::2")) {
		t.Error("IPv6 next hops without IPv6")
	}
}

// TestLandingJudged checks the request of Landing, and how owners are encoded in gateways and bytes.
func TestLandingJudged(t *testing.T) {
	ask := func(source string, protocol uint32) codes.Code {
		_, err := (&Plane{}).Landing(&farev1.LandingRequest{Source: source, Destination: "10.255.1.1", DestinationPort: 65535, Protocol: protocol})
		return status.Code(err)
	}
	for _, protocol := range []uint32{0, 6, 17} {
		if got := ask("::ffff:10.255.0.1", protocol); got != codes.FailedPrecondition {
			t.Errorf("protocol %d, before Hello: %v", protocol, got)
		}
	}
	if got := ask("fd00::1", 0); got != codes.InvalidArgument {
		t.Errorf("two families: %v", got)
	}
	for owner, want := range map[int]byte{-1: 0, 0: 0, 1: 1, 254: 254, 255: 255, 256: 0, 257: 0, 65535: 0} {
		if got := inByte(owner); got != want {
			t.Errorf("owner %d is %d in a byte, want %d", owner, got, want)
		}
	}
	for f := range family(2) {
		for _, i := range []int{0, 1, 255, 256, 1000, 65535} {
			if got := probeOwner(probeGateway(f, i)); got != i {
				t.Errorf("family %d: owner %d is recognized as %d", f, i, got)
			}
		}
	}
	if probeOwner(netip.Addr{}) != -1 {
		t.Error("no gateway is somebody's")
	}
	runs := []run{{2, 3}, {0, 1}, {1, 2}}
	var got []int
	for i := range 7 {
		got = append(got, at(runs, i))
	}
	if want := []int{2, 2, 2, 0, 1, 1, -1}; !slices.Equal(got, want) {
		t.Errorf("owners %v, want %v", got, want)
	}
}

// TestCheckQueries: a check asks for flows of both protocols with source ports below and above the destination's, each once.
func TestCheckQueries(t *testing.T) {
	source, destination := netip.MustParseAddr("10.255.0.1"), netip.MustParseAddr("192.0.0.8")
	kinds, ports := map[string]int{}, map[uint16]bool{}
	for _, q := range checkQueries(source, destination) {
		kinds[fmt.Sprint(q.IPProto, q.Sport < q.Dport)]++
		ports[q.Sport] = true
		if q.Source != source || q.Destination != destination || q.Dport != wecmp.PortRoCE || q.Sport == 0 {
			t.Errorf("%+v", q)
		}
	}
	if want := map[string]int{"17 true": 128, "17 false": 128, "6 true": 128, "6 false": 128}; !maps.Equal(kinds, want) || len(ports) != checkPorts {
		t.Errorf("%v of %d source ports, want %v", kinds, len(ports), want)
	}
	for _, q := range checkQueries(netip.IPv6Unspecified(), destination) {
		if q.Source.IsValid() {
			t.Fatalf("%+v", q)
		}
	}
}

// TestProbeDevice: probes use a device with a carrier, and IPv4 probes the loopback otherwise.
func TestProbeDevice(t *testing.T) {
	p := thought(t, 2)
	if p.probeDevice(v4) != 10 || p.probeDevice(v6) != 10 {
		t.Error("not the first sub-port")
	}
	p.links[10] = rtnl.Link{Index: 10, Name: "p0"}
	if p.probeDevice(v4) != 11 || p.probeDevice(v6) != 11 {
		t.Error("not the one with a carrier")
	}
	p.links[11] = rtnl.Link{Index: 11, Name: "p1"}
	if p.probeDevice(v4) != loIndex || p.probeDevice(v6) != 0 {
		t.Error("without carriers:", p.probeDevice(v4), p.probeDevice(v6))
	}
	for bucket, hash := range map[int]uint32{0: 64, 1: 65, 63: 127} {
		if got := p.bucket(hash); got != bucket {
			t.Errorf("hash %d is in bucket %d of 64", hash, got)
		}
	}
	for table, want := range map[uint32]bool{254: true, 255: true, 253: false, 7000: false} {
		if isMain(table) != want {
			t.Errorf("table %d: asked anyway is %v", table, !want)
		}
	}
	for _, errno := range []unix.Errno{unix.EACCES, unix.EAFNOSUPPORT, unix.EOPNOTSUPP} {
		if !disabled(fmt.Errorf("x: %w", errno)) {
			t.Errorf("%v", errno)
		}
	}
	if disabled(nil) || disabled(unix.EINVAL) {
		t.Error("IPv6 is disabled for no reason")
	}
}

// TestPiecesAsLongAsWeightsAllow: buckets that pass from two nexthops to a sub-port share a new one as long as its weight fits.
func TestPiecesAsLongAsWeightsAllow(t *testing.T) {
	s := newScaling(65535, 65535)
	for second, pieces := range map[int]int{s.longest - 500: 1, s.longest - 499: 2} {
		made := 0
		fresh := func(int) uint32 {
			made++
			return uint32(100 + made)
		}
		current := []segment{{1, 500}, {2, second}, {3, 65535 - 500 - second}}
		id := func(id uint32) int { return int(id) }
		d := s.deal(current, []run{{9, 500 + second}, {3, 65535 - 500 - second}}, id, id, fresh)
		if made != pieces || d.moved != 500+second {
			t.Errorf("%d buckets: %d nexthops, want %d; %d buckets move", 500+second, made, pieces, d.moved)
		}
		for _, m := range d.members {
			if m.ID > 100 && m.Weight > 65535 {
				t.Errorf("%d buckets: %+v", 500+second, m)
			}
		}
	}
}
