package linux

import (
	"net/netip"
	"slices"

	"github.com/fared/fared/internal/rtnl"
)

// A change of a group with few destinations does not replace the group in place, for which the kernel waits until no
// packet uses the previous buckets: its routes move to another group with the same bucket layout. The group that they
// leave stays ready, because its weights often return: a plane that was halved is whole again.

const (
	// mostSwapped is the number of destinations up to which routes move in place of a replacement of their group.
	mostSwapped = 16
	// mostReady is the number of kernel groups without destinations that are kept.
	mostReady = 16
)

// anchorAt returns the place of the anchor of an IPv4 group: a route to an address of 0.0.0.0/8 (RFC 1122, section
// 3.2.1.3), which no packet has as its destination. A sender that has found a route just before the route moves to
// another group fails with ENETUNREACH if the route was the last one with the previous group and source address
// (fib_dead). The anchor is never the first to go. IPv6 routes do not share what an anchor keeps.
func anchorAt(id, table uint32) routeKey {
	return routeKey{netip.PrefixFrom(netip.AddrFrom4([4]byte{0, byte(id >> 16), byte(id >> 8), byte(id)}), 32), table}
}

// anchorOf returns the place of the anchor of a group.
func (w *desired) anchorOf(g *group) routeKey { return anchorAt(g.id, w.sourceOf(g.source).table) }

// isAnchor reports whether a route in this place is an anchor.
func isAnchor(at routeKey) bool { return at.prefix.Addr().Is4() && at.prefix.Addr().As4()[0] == 0 }

// trail holds the routes that lead to a nexthop id, unless they are many.
type trail struct {
	routes int
	few    []routeKey // all of them, or nil since they were more than mostSwapped
}

// setRoute records a route of the kernel.
func (m *mirror) setRoute(at routeKey, to routeState) {
	if isAnchor(at) {
		m.anchors[at] = to
		return
	}
	before, there := m.routes.get(at)
	if m.routes.set(at, to); there && before.nexthop == to.nexthop {
		return
	}
	if there {
		m.leaves(at, before.nexthop)
	}
	m.leads(at, to.nexthop)
}

// removeRoute records that the kernel does not have a route.
func (m *mirror) removeRoute(at routeKey) {
	if isAnchor(at) {
		delete(m.anchors, at)
		return
	}
	if before, there := m.routes.get(at); there {
		m.routes.remove(at)
		m.leaves(at, before.nexthop)
	}
}

// replaceRoutes records all routes of the kernel.
func (m *mirror) replaceRoutes(routes *routeStates, anchors map[routeKey]routeState) {
	m.routes, m.anchors, m.trails = routes, anchors, map[uint32]*trail{}
	for at, r := range routes.all() {
		m.leads(at, r.nexthop)
	}
}

func (m *mirror) leads(at routeKey, id uint32) {
	t := m.trails[id]
	if t == nil {
		t = &trail{}
		m.trails[id] = t
	}
	if t.routes++; t.routes == len(t.few)+1 && t.routes <= mostSwapped {
		t.few = append(t.few, at)
	} else {
		t.few = nil
	}
}

func (m *mirror) leaves(at routeKey, id uint32) {
	t := m.trails[id]
	if t.routes--; t.routes == 0 {
		delete(m.trails, id)
	} else if t.few != nil {
		t.few = slices.DeleteFunc(t.few, func(r routeKey) bool { return r == at })
	}
}

// few returns the routes that lead to a group, or false if they are many.
func (m *mirror) few(id uint32) ([]routeKey, bool) {
	t := m.trails[id]
	if t == nil {
		return nil, true
	}
	return t.few, t.few != nil
}

// equivalent reports whether two vectors of weights have the same ratios.
func equivalent(a, b []uint32) bool {
	if len(a) != len(b) {
		return false
	}
	some := func(w uint32) bool { return w > 0 }
	if slices.ContainsFunc(a, some) != slices.ContainsFunc(b, some) {
		return false
	}
	var sumA, sumB uint64
	for i := range a {
		sumA, sumB = sumA+uint64(a[i]), sumB+uint64(b[i])
	}
	for i := range a {
		if uint64(a[i])*sumB != uint64(b[i])*sumA {
			return false
		}
	}
	return true
}

// planAnchor plans the anchor of a group.
func (pl *planner) planAnchor(g *group) {
	if g.key.family != v4 || g.id == 0 || pl.scope.inPlace {
		return
	}
	at, to := pl.want.anchorOf(g), routeState{g.id, pl.want.loopbackOf(pl.want.sourceOf(g.source), v4, pl.have)}
	standing, there := pl.have.anchors[at]
	switch {
	case there && standing == to:
	case there:
		pl.anchorOps = append(pl.anchorOps, op{kind: setRoute, at: at, id: to.nexthop, source: to.source, flags: rtnl.Change})
	default:
		pl.anchorOps = append(pl.anchorOps, op{kind: setRoute, at: at, id: to.nexthop, source: to.source, flags: rtnl.Create})
	}
}

// staleAnchors marks the groups whose anchors are not as wanted.
func (st *state) staleAnchors() {
	for key, g := range st.have.groups {
		if key.family == v4 && g.exists && !st.config.inPlace && st.have.anchors[st.want.anchorOf(g)] != (routeState{g.id, st.want.loopbackOf(st.want.sourceOf(g.source), v4, &st.have)}) {
			st.staleGroups[key] = true
		}
	}
}

// wantedAnchors returns the places of the anchors of all groups.
func (st *state) wantedAnchors() map[routeKey]bool {
	all := map[routeKey]bool{}
	for key, g := range st.have.groups {
		all[st.want.anchorOf(g)] = key.family == v4
	}
	for _, r := range st.have.ready {
		all[st.want.anchorOf(r)] = true
	}
	return all
}

// planRemoval plans the removal of a group to which no route leads but its anchor.
func (pl *planner) planRemoval(g *group) {
	if at := pl.want.anchorOf(g); g.key.family == v4 && pl.have.anchors[at].nexthop == g.id {
		pl.lastOps = append(pl.lastOps, op{kind: deleteRoute, at: at, id: g.id})
	}
	pl.lastOps = append(pl.lastOps, op{kind: deleteGroup, id: g.id, key: g.key, at: pl.want.anchorOf(g), members: g.members})
}

// swaps returns the routes that would move if a group were swapped for another one with target, or false if the group
// has to be replaced in place: a sender would notice the move, many routes would move, or the buckets in the kernel are
// unknown.
func (pl *planner) swaps(g *group) ([]routeKey, bool) {
	if g.key.family != v4 || !g.exists || g.moved || g.dropping || g.segments == nil || g.unswapped || g.generation != pl.want.generation || pl.want.users[g.key] > mostSwapped {
		return nil, false
	}
	routes, few := pl.have.few(g.id)
	anchor, there := pl.have.anchors[pl.want.anchorOf(g)]
	if !few || !there && len(routes) > 0 {
		return nil, false
	}
	for _, at := range routes {
		if r, _ := pl.have.routes.get(at); r.source != anchor.source {
			return nil, false
		}
	}
	return routes, true
}

// divided reports whether the buckets of a group are divided as in target.
func (pl *planner) divided(g *group, target []run, owner func(id uint32) int) bool {
	same := true
	overlaps(g.segments, target, func(c segment, subPort, _ int) { same = same && owner(c.id) == subPort })
	return same
}

// swap plans a ready group, or a new one, in place of a group, and the move of its routes.
func (pl *planner) swap(g *group, next op, target []run, routes []routeKey) {
	e, s := pl.edit(g.key), pl.want.sourceOf(g.source)
	parked := *g
	if !pl.adoptReady(e, next.weights) {
		taken := map[uint32]bool{}
		d := pl.want.scaling.dealAll(target, func(subPort int) uint32 { return pl.take(s.subPorts[subPort].pool(g.key.family), taken) })
		drop := pl.take(pl.have.drop[g.key.family], map[uint32]bool{})
		next.members, next.segments = append(d.members, rtnl.Member{ID: drop, Weight: 1}), d.segments
		next.id, next.flags, next.old = pl.newID(), rtnl.Create, parked.id
		pl.groupOps = append(pl.groupOps, next)
		e.id = next.id
	}
	pl.park(&parked)
	planned := map[routeKey]bool{}
	for i := range pl.routeOps {
		if o := &pl.routeOps[i]; o.key == g.key && o.kind == setRoute {
			o.id = e.id
		}
		planned[pl.routeOps[i].at] = true
	}
	for _, ops := range [][]op{pl.closeOps, pl.openOps, pl.lastOps} {
		for i := range ops {
			planned[ops[i].at] = true
		}
	}
	for _, at := range routes {
		if !planned[at] {
			pl.routeOps = append(pl.routeOps, op{kind: setRoute, at: at, id: e.id, key: g.key, flags: rtnl.Change, source: pl.want.preferred(at, pl.have)})
		}
	}
}

// park keeps a group without destinations ready.
func (pl *planner) park(g *group) {
	g.key.wanted, g.unswapped = 0, false
	pl.ready = append(pl.ready, g)
}

// parks reports whether a group without destinations is kept.
func (pl *planner) parks(g *group) bool {
	_, anchored := pl.have.anchors[pl.want.anchorOf(g)]
	return g.key.family == v4 && anchored && !g.moved && !g.dropping && g.segments != nil && g.generation == pl.want.generation && pl.want.destinations.Len() > 0
}

// adoptReady gives a group the kernel group that is ready with its weights, and reports whether there is one.
func (pl *planner) adoptReady(g *group, weights []uint32) bool {
	i := slices.IndexFunc(pl.ready, func(r *group) bool {
		return r.source == g.source && r.key.family == g.key.family && !r.moved && r.generation == pl.want.generation && equivalent(r.weights, weights)
	})
	if i < 0 {
		return false
	}
	key := g.key
	*g = *pl.ready[i]
	g.key, g.weights = key, weights
	pl.ready = slices.Delete(slices.Clone(pl.ready), i, i+1)
	return true
}

// planReady plans the removal of ready groups that are of no use, and of the oldest ones above mostReady. A group to
// which a route leads, because the kernel has refused its move, stays.
func (pl *planner) planReady() {
	excess := len(pl.ready) - mostReady
	pl.ready = slices.DeleteFunc(slices.Clone(pl.ready), func(r *group) bool {
		useless := r.moved || r.generation != pl.want.generation || pl.want.destinations.Len() == 0 || pl.want.sources[r.source] == nil
		excess--
		if !useless && excess < 0 || pl.have.trails[r.id] != nil && !pl.leaving(r.id) {
			return false
		}
		pl.planRemoval(r)
		return true
	})
}

// leaving reports whether all routes that lead to a group are planned to leave it.
func (pl *planner) leaving(id uint32) bool {
	routes, few := pl.have.few(id)
	return few && !slices.ContainsFunc(routes, func(at routeKey) bool {
		return !slices.ContainsFunc(pl.routeOps, func(o op) bool { return o.at == at && o.id != id }) &&
			!slices.ContainsFunc(pl.lastOps, func(o op) bool { return o.at == at && o.kind == deleteRoute })
	})
}
