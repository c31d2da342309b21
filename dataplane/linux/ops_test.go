package linux

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/internal/rtnl"
)

// TestKernelStatus: the code of a refusal shows whether a retry needs more room.
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
	d := offline(t, 2)
	d.state.config.witnessTime = 10 * time.Second
	base := time.Now()
	at := routeKey{mustPrefix(target4(0)), 254}
	key := func(i uint32) groupKey { return groupKey{i, v4} }
	d.state.have.groups[key(1)] = &group{key: key(1), moved: true, dealtAt: base.Add(3 * time.Second)}
	d.state.have.groups[key(2)] = &group{key: key(2), witnesses: []uint32{7}, dealtAt: base.Add(2 * time.Second)}
	d.state.have.groups[key(3)] = &group{key: key(3), dealtAt: base}
	for _, order := range []struct {
		stale, keeps []uint32
		due          time.Time
	}{
		{[]uint32{1, 2, 3, 4}, []uint32{1, 2}, base.Add(12 * time.Second)}, {[]uint32{1, 3}, []uint32{1}, base.Add(13 * time.Second)},
		{[]uint32{3, 4}, nil, time.Time{}}, {nil, nil, time.Time{}},
	} {
		for range 8 { // the order of a map
			clear(d.state.staleGroups)
			for _, i := range order.stale {
				d.state.staleGroups[key(i)] = true
			}
			d.state.staleRoutes[at] = true
			due := d.state.await(nil)
			var keeps []uint32
			for k := range d.state.staleGroups {
				keeps = append(keeps, k.wanted)
			}
			slices.Sort(keeps)
			if !due.Equal(order.due) || !slices.Equal(keeps, order.keeps) || len(d.state.staleRoutes) != 0 {
				t.Fatalf("stale %v: due %v, want %v; keeps %v, want %v; routes %v", order.stale, due.Sub(base), order.due.Sub(base), keeps, order.keeps, d.state.staleRoutes)
			}
		}
	}
	clear(d.state.staleGroups)
	d.state.staleGroups[key(2)] = true
	before := time.Now()
	due := d.state.await([]failure{{op{kind: setGroup, key: key(3)}, unix.EINVAL}, {op{kind: setRoute, at: at}, unix.EINVAL}, {op{kind: deleteNexthop}, unix.EINVAL}})
	if wait := due.Sub(before); wait < retryDelay || wait > retryDelay+time.Minute {
		t.Errorf("after refusals the next attempt is in %v", wait)
	}
	if want := map[groupKey]bool{key(2): true, key(3): true}; !maps.Equal(d.state.staleGroups, want) || !maps.Equal(d.state.staleRoutes, map[routeKey]bool{at: true}) {
		t.Errorf("stale %v, %v; want what was refused, and what waits", d.state.staleGroups, d.state.staleRoutes)
	}
}

// TestWhatConcernsAnOperation: an operation is refused if an op on its groups and routes is, or if the kernel has no
// room for a nexthop.
func TestWhatConcernsAnOperation(t *testing.T) {
	d := offline(t, 2)
	g, other := &group{key: groupKey{1, v4}}, &group{key: groupKey{2, v4}}
	at, otherAt := routeKey{mustPrefix(target4(0)), 254}, routeKey{mustPrefix(target4(1)), 254}
	for _, c := range []struct {
		what  string
		op    op
		errno unix.Errno
		want  bool
	}{
		{"its group", op{kind: setGroup, key: g.key}, unix.EINVAL, true},
		{"another group", op{kind: setGroup, key: other.key}, unix.EINVAL, false},
		{"its route", op{kind: setRoute, key: g.key, at: at}, unix.EINVAL, true},
		{"its route to another group", op{kind: setRoute, key: other.key, at: at}, unix.EINVAL, true},
		{"its route, without a group", op{kind: deleteRoute, at: at}, unix.EINVAL, true},
		{"another route of its group", op{kind: setRoute, key: g.key, at: otherAt}, unix.EINVAL, false},
		{"another route", op{kind: deleteRoute, at: otherAt}, unix.EINVAL, false},
		{"a next hop", op{kind: makeNexthop}, unix.EINVAL, false},
		{"room for a next hop", op{kind: makeNexthop}, unix.ENOMEM, true},
		{"room for another group", op{kind: setGroup, key: other.key}, unix.ENOMEM, false},
	} {
		err := d.relevant([]failure{{c.op, c.errno}}, map[groupKey]bool{g.key: true}, map[routeKey]bool{at: true})
		if (err != nil) != c.want {
			t.Errorf("%s: %v", c.what, err)
		}
	}
}

// TestWhatAChangeTouches checks which groups and routes each kind of change touches and marks as stale.
func TestWhatAChangeTouches(t *testing.T) {
	d := offline(t, 3)
	d.set(1, 1, 1, 0)
	d.set(2, 0, 1, 1)
	d.set(3, 0, 0, 1)
	d.leads(target4(0), 0, 1)
	d.leads(target6(0), 0, 1)
	d.leads(target4(1), 0, 2)
	d.leads(target4(2), 0, 3)
	d.obey(t)
	check := func(what string, c contract.Change, keys []groupKey, routes, staleRoutes []string) {
		t.Helper()
		clear(d.state.staleGroups)
		clear(d.state.staleRoutes)
		touched, places := map[groupKey]bool{}, map[routeKey]bool{}
		d.state.applyChange(c, touched, places)
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
		if !maps.Equal(touched, want) || !maps.Equal(d.state.staleGroups, want) || !maps.Equal(places, at(routes)) || !maps.Equal(d.state.staleRoutes, at(staleRoutes)) {
			t.Errorf("%s: groups %v, looked at %v, want %v; routes %v, looked at %v, want %v and %v", what, touched, d.state.staleGroups, want, places, d.state.staleRoutes, routes, staleRoutes)
		}
	}
	v := func(id uint32, f family) groupKey { return groupKey{id, f} }
	check("a sub-port", contract.Change{Kind: contract.SubPortChange, Device: "p0", Up: true}, []groupKey{v(1, v4), v(1, v6)}, nil, nil)
	check("another sub-port", contract.Change{Kind: contract.SubPortChange, Device: "p2", Up: true}, []groupKey{v(2, v4), v(3, v4)}, nil, nil)
	check("an unknown sub-port", contract.Change{Kind: contract.SubPortChange, Device: "p9", Up: true}, nil, nil, nil)
	check("a group", contract.Change{Kind: contract.GroupChange, Group: 1, After: d.state.want.vectors[1]}, []groupKey{v(1, v4), v(1, v6)}, nil, nil)
	check("a group that nothing uses", contract.Change{Kind: contract.GroupChange, Group: 8, After: d.state.want.vectors[1]}, nil, nil, nil)
	if d.state.want.vectors[8] == nil {
		t.Error("a group is not wanted")
	}
	check("its removal", contract.Change{Kind: contract.GroupChange, Group: 8}, nil, nil, nil)
	if d.state.want.vectors[8] != nil {
		t.Error("a removed group is wanted")
	}
	d.state.want.subPorts[1].down = true
	check("held down no more", contract.Change{Kind: contract.SubPortChange, Device: "p1", Up: true}, []groupKey{v(1, v4), v(1, v6), v(2, v4)}, nil, nil)
	if d.state.want.subPorts[1].down {
		t.Error("a sub-port is held down")
	}

	destination := func(prefix string, from, to uint32) contract.Change {
		c := contract.Change{Kind: contract.DestinationChange, Prefix: mustPrefix(prefix)}
		c.From.Group, c.To.Group = from, to
		return c
	}
	clear(d.state.staleGroups)
	d.state.applyChange(destination(target4(3), 0, 2), map[groupKey]bool{}, map[routeKey]bool{})
	if d.state.want.users[v(2, v4)] != 2 || len(d.state.staleGroups) != 0 || *d.state.want.destinations.Get(netip.Prefix{}, mustPrefix(target4(3))) != 2 {
		t.Errorf("another user: %v, %v", d.state.want.users, d.state.staleGroups)
	}
	d.state.applyChange(destination(target4(3), 2, 3), map[groupKey]bool{}, map[routeKey]bool{})
	if d.state.want.users[v(2, v4)] != 1 || d.state.want.users[v(3, v4)] != 2 || len(d.state.staleGroups) != 0 {
		t.Errorf("a user less: %v", d.state.staleGroups)
	}
	touched, places := map[groupKey]bool{}, map[routeKey]bool{}
	d.state.applyChange(destination(target4(1), 2, 0), touched, places)
	if d.state.want.users[v(2, v4)] != 0 || !maps.Equal(d.state.staleGroups, map[groupKey]bool{v(2, v4): true}) || len(touched) != 0 ||
		!maps.Equal(places, map[routeKey]bool{{mustPrefix(target4(1)), 254}: true}) {
		t.Errorf("the last user: %v, %v, %v", d.state.staleGroups, touched, places)
	}
	if d.state.want.destinations.Get(netip.Prefix{}, mustPrefix(target4(1))) != nil {
		t.Error("a removed destination is wanted")
	}
	clear(touched)
	d.state.applyChange(destination(target6(5), 0, 3), touched, places)
	if g := d.state.have.groups[v(3, v6)]; g == nil || d.state.want.users[g.key] != 1 || !touched[v(3, v6)] || !d.state.staleRoutes[routeKey{mustPrefix(target6(5)), 254}] {
		t.Errorf("a first user: %+v, %v, %v", g, touched, d.state.staleRoutes)
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
		d := offline(t, 1)
		g := &group{key: c.key, exists: true}
		d.state.have.groups[c.key] = g
		d.state.undone(&op{kind: setRoute, key: g.key, source: c.source, flags: c.flags}, c.errno, true)
		if d.state.have.unfit[c.source] != c.unfit || len(d.state.have.unfit) > 1 || len(d.state.have.unfit) == 1 != c.unfit || g.rejecting != c.rejecting {
			t.Errorf("%s: unfit %v, rejecting %v", c.what, d.state.have.unfit, g.rejecting)
		}
		g.exists = false
		if d.state.undone(&op{kind: setRoute, key: g.key, source: netip.MustParseAddr("10.255.0.9"), flags: rtnl.Create}, unix.EINVAL, true); d.state.have.unfit[netip.MustParseAddr("10.255.0.9")] {
			t.Errorf("%s: the address of a route to a refused group is unfit", c.what)
		}
		g.rejecting = true
		if d.state.undone(&op{kind: setRoute, key: g.key, flags: rtnl.Create}, c.errno, true); !g.rejecting {
			t.Errorf("%s: a refusal ends that routes reject", c.what)
		}
		d.state.undone(&op{kind: setRoute, flags: rtnl.Create}, c.errno, true) // of a route that drops: it has no group
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
		{"the id of another program", makeNexthop, unix.EEXIST, true, false, nil, nil, []uint32{7}},
		{"no room", makeNexthop, unix.ENOMEM, true, false, nil, nil, []uint32{7}},
		{"of no sub-port", makeNexthop, unix.EINVAL, true, true, nil, nil, []uint32{7}},
		{"broken before", makeNexthop, unix.EINVAL, true, false, unix.ENODEV, unix.ENODEV, []uint32{7}},
		{"a change", changeNexthop, unix.EINVAL, true, false, nil, unix.EINVAL, nil},
		{"a change, the first time", changeNexthop, unix.EINVAL, false, false, nil, nil, []uint32{7, 8}},
		{"another kind", setGroup, unix.EINVAL, true, false, nil, nil, []uint32{7, 8}},
	} {
		d := offline(t, 2)
		d.set(1, 1, 1)
		d.set(2, 0, 1)
		d.state.have.groups[groupKey{1, v4}], d.state.have.groups[groupKey{2, v4}] = &group{}, &group{}
		clear(d.state.staleGroups)
		q := d.state.want.subPorts[0].pools[v4]
		if c.hole {
			q = d.state.have.hole[v4]
		}
		q.ids, q.broken = []uint32{7, 8}, c.broken
		d.state.have.owners[7], d.state.have.owners[8] = q, q
		d.state.undone(&op{kind: c.kind, pool: q, id: 8}, c.errno, c.again)
		owned := slices.Sorted(maps.Keys(d.state.have.owners))
		if !errors.Is(q.broken, c.want) || (q.broken == nil) != (c.want == nil) || !slices.Equal(q.ids, c.ids) || !slices.Equal(owned, c.ids) {
			t.Errorf("%s: broken %v, want %v; ids %v, owned %v, want %v", c.what, q.broken, c.want, q.ids, owned, c.ids)
		}
		breaks := c.want != nil && c.broken == nil
		if stale := d.state.staleGroups[groupKey{1, v4}]; stale != breaks || len(d.state.staleGroups) > 1 || breaks != (len(d.state.have.retired) > 0) {
			t.Errorf("%s: stale groups %v, retired %v", c.what, d.state.staleGroups, d.state.have.retired)
		}
	}
}
