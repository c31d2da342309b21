package linux

import (
	"net/netip"
	"slices"
	"time"

	"github.com/fared/fared/internal/rtnl"
)

type opKind uint8

const (
	makeNexthop opKind = iota
	changeNexthop
	setGroup
	setRoute
	deleteRoute
	deleteGroup
	deleteNexthop
)

// op is one message to the kernel, together with the state that holds once the kernel has acknowledged it.
type op struct {
	kind  opKind
	pool  *pool
	id    uint32
	key   groupKey // of the group, in which wanted is 0 if the op concerns no group of the desired state
	at    routeKey
	route *rtnl.Route // for deleteRoute: a route that differs from those of the Driver
	// source is the address in the message of setRoute.
	source netip.Addr

	old       uint32 // of setGroup: the group that the new one replaces, 0 if none
	members   []rtnl.Member
	witnesses []uint32
	segments  []segment
	weights   []uint32
	flags     uint16
}

// plan holds the ops that turn the mirror into the desired state, in order.
type plan struct {
	nexthopOps, groupOps, routeOps, anchorOps, lastOps []op
	// closeOps set routes that drop packets of other source groups; they run before the ops for routes that these
	// packets would take. openOps remove such routes, after those ops.
	closeOps, openOps []op
	// groups holds the groups that change without a message: they claim an id, or are already as desired. unused holds
	// those that have no destinations and do not exist in the kernel.
	groups map[groupKey]*group
	unused []groupKey
	// incomplete holds groups that do not exist in the kernel yet or have been claimed.
	incomplete map[groupKey]bool
	ready      []*group // all ready groups
	next       uint32   // id to try next
}

func (pl *plan) empty() bool {
	return len(pl.nexthopOps)+len(pl.groupOps)+len(pl.closeOps)+len(pl.routeOps)+len(pl.anchorOps)+len(pl.lastOps)+len(pl.openOps) == 0
}

// scope limits planning to the groups and routes that may differ, and holds the time.
type scope struct {
	groups      map[groupKey]bool
	routes      map[routeKey]bool
	now         time.Time
	witnessTime time.Duration
	inPlace     bool // see Config.inPlace
}

// planner computes a plan. It changes neither its inputs nor anything that they refer to.
type planner struct {
	plan
	want  *desired
	have  *mirror
	scope scope
	made  map[*pool][]uint32 // ids of the nexthop objects that the plan makes
	// claimed holds the ids of strays that the plan claims.
	claimed map[uint32]bool
	// unrejected holds groups whose routes may reject packets although the group carries packets.
	unrejected map[groupKey]bool
}

func newPlanner(want *desired, have *mirror, s scope) *planner {
	return &planner{
		plan: plan{groups: map[groupKey]*group{}, incomplete: map[groupKey]bool{}, ready: slices.Clip(have.ready), next: have.next},
		want: want, have: have, scope: s, made: map[*pool][]uint32{}, claimed: map[uint32]bool{}, unrejected: map[groupKey]bool{},
	}
}

// newPlan returns the ops that turn the mirror into the desired state within a scope.
func newPlan(want *desired, have *mirror, s scope) *plan {
	pl := newPlanner(want, have, s)
	pl.routeOps = make([]op, 0, len(s.routes))
	for _, q := range have.changed {
		for _, id := range q.ids {
			pl.nexthopOps = append(pl.nexthopOps, op{kind: changeNexthop, pool: q, id: id})
		}
	}
	for at := range s.routes {
		pl.planRoute(at)
	}
	var unused []*group
	planGroup := func(key groupKey) {
		switch g := pl.group(key); {
		case g == nil:
		case want.users[key] == 0 && g.exists:
			unused = append(unused, g)
		case want.users[key] == 0:
			pl.unused = append(pl.unused, key)
		default:
			pl.planGroup(g)
			pl.planAnchor(pl.group(key))
		}
	}
	for key := range s.groups {
		planGroup(key)
	}
	for key := range pl.incomplete {
		if !s.groups[key] {
			planGroup(key)
		}
	}
	pl.planUnrejected()
	for _, g := range unused {
		if pl.parks(g) {
			parked := *g
			pl.unused = append(pl.unused, g.key)
			pl.park(&parked)
		} else {
			pl.planRemoval(g)
		}
	}
	pl.planReady()
	pl.planRetired()
	return &pl.plan
}

// group returns a group as it is after the part of the plan that needs no message, or nil. The caller must not change
// it.
func (pl *planner) group(key groupKey) *group {
	if g := pl.groups[key]; g != nil {
		return g
	}
	return pl.have.groups[key]
}

// edit returns a group that the plan may change.
func (pl *planner) edit(key groupKey) *group {
	if pl.groups[key] == nil {
		g := *pl.have.groups[key]
		pl.groups[key] = &g
	}
	return pl.groups[key]
}

// take returns a nexthop object of a pool that is not in taken, and plans its creation if there is none.
func (pl *planner) take(q *pool, taken map[uint32]bool) uint32 {
	for _, ids := range [][]uint32{q.ids, pl.made[q]} {
		for _, id := range ids {
			if !taken[id] {
				taken[id] = true
				return id
			}
		}
	}
	id := pl.newID()
	pl.made[q] = append(pl.made[q], id)
	taken[id] = true
	pl.nexthopOps = append(pl.nexthopOps, op{kind: makeNexthop, pool: q, id: id})
	return id
}

func (pl *planner) newID() (id uint32) {
	id, pl.next = pl.have.freeID(pl.next)
	return id
}

// planRoute plans one route, and claims a group for it.
func (pl *planner) planRoute(at routeKey) {
	wanted, ok := pl.want.wantedAt(at)
	standing, there := pl.have.routes.get(at)
	id := standing.nexthop
	flags := uint16(rtnl.Create)
	if there {
		flags = rtnl.Change
	}
	f := familyOf(at.prefix.Addr())
	hole := pl.have.hole[f]
	closed := there && pl.have.owners[id] == hole
	switch {
	case !ok && closed:
		pl.openOps = append(pl.openOps, op{kind: deleteRoute, at: at, id: id})
	case !ok && there:
		pl.lastOps = append(pl.lastOps, op{kind: deleteRoute, at: at, id: id})
	case ok && wanted == 0 && !closed:
		pl.closeOps = append(pl.closeOps, op{kind: setRoute, at: at, id: pl.take(hole, map[uint32]bool{}), flags: flags})
	}
	if wanted == 0 {
		return
	}
	g := pl.claim(groupKey{wanted, f}, at)
	if !g.exists {
		pl.incomplete[g.key] = true
	}
	if source := pl.want.preferred(at, pl.have); !there || id != g.id || standing.source != source {
		pl.routeOps = append(pl.routeOps, op{kind: setRoute, at: at, id: g.id, key: g.key, flags: flags, source: source})
	}
}

// claim returns the group for a key. A group without an id adopts the kernel group that an earlier run left for the
// destination or, if there is none, gets a new id.
func (pl *planner) claim(key groupKey, at routeKey) *group {
	if g := pl.group(key); g.id != 0 {
		return g
	}
	g := pl.edit(key)
	standing, _ := pl.have.routes.get(at)
	s, ok := pl.have.strays[standing.nexthop]
	if from := pl.want.sourceOf(g.source); !ok && pl.adoptReady(g, pl.want.live(from, pl.want.vectors[key.wanted], key.family, pl.have)) {
		return g
	}
	if !ok || pl.claimed[s.ID] || int(s.Buckets) != pl.want.size || !s.Resilient || s.IdleTimer != 0 {
		g.id = pl.newID()
		return g
	}
	pl.claimed[s.ID] = true
	g.id, g.exists, g.members, g.segments = s.ID, true, s.Members, s.segments
	g.dropping = len(s.Members) == 1 && pl.have.owners[s.Members[0].ID] == pl.have.hole[key.family]
	if g.dropping {
		g.segments = nil
	} else if !pl.asDealt(g) {
		g.moved, g.segments = true, nil
	}
	g.rejecting = key.family == v6 && (g.dropping || g.moved)
	pl.incomplete[key] = true
	return g
}

// asDealt reports whether the weights of a group's members match the segments.
func (pl *planner) asDealt(g *group) bool {
	size := map[uint32]int{}
	for _, s := range g.segments {
		size[s.id] += s.size
	}
	drops := 0
	for _, m := range g.members {
		switch {
		case size[m.ID] == 0 && m.Weight == 1:
			if pl.have.owners[m.ID] == pl.have.drop[g.key.family] {
				drops++
			}
		case size[m.ID] == 0 || int(m.Weight) != size[m.ID]*pl.want.scaling.scale:
			return false
		}
		delete(size, m.ID)
	}
	return drops == 1 && len(size) == 0
}

// planGroup plans one group that destinations use.
func (pl *planner) planGroup(g *group) {
	s := pl.want.sourceOf(g.source)
	weights := pl.want.live(s, pl.want.vectors[g.key.wanted], g.key.family, pl.have)
	target := s.layout.runs(weights)
	if g.exists && !g.moved && g.generation == pl.want.generation && slices.Equal(weights, g.weights) {
		pl.dismiss(g)
		pl.unreject(g, target != nil)
		return
	}
	next := op{kind: setGroup, id: g.id, key: g.key, weights: weights, flags: rtnl.Change}
	if !g.exists {
		next.flags = rtnl.Create
	}
	if target == nil {
		if g.exists && g.dropping && !g.moved {
			pl.confirm(g, weights)
			return
		}
		next.members = []rtnl.Member{{ID: pl.take(pl.have.hole[g.key.family], map[uint32]bool{}), Weight: 1}}
		pl.groupOps = append(pl.groupOps, next)
		return
	}
	owner := func(id uint32) int { return pl.owner(s, g.key.family, id) }
	if routes, ok := pl.swaps(g); ok && !pl.divided(g, target, owner) {
		pl.swap(g, next, target, routes)
		return
	}
	taken := map[uint32]bool{}
	for _, m := range g.members {
		taken[m.ID] = true
	}
	device := func(id uint32) int {
		if q := pl.have.owners[id]; q != nil && q.subPort != nil {
			return q.device
		}
		return 0
	}
	fresh := func(subPort int) uint32 { return pl.take(s.subPorts[subPort].pool(g.key.family), taken) }
	current := g.segments // nil unless the division in the kernel is known
	d := pl.want.scaling.deal(current, target, owner, device, fresh)
	if d.moved == 0 {
		pl.confirm(g, weights)
		pl.unreject(g, true)
		return
	}
	if current != nil && (len(d.members) > 2*pl.want.scaling.pieces(target)+2*s.layout.subPorts || !s.layout.firm(d.segments, target)) {
		d = pl.want.scaling.dealAll(target, fresh) // too many pieces, or too small ones
	}
	drop := pl.take(pl.have.drop[g.key.family], map[uint32]bool{})
	next.members, next.witnesses, next.segments = append(d.members, rtnl.Member{ID: drop, Weight: 1}), d.witnesses, d.segments
	pl.groupOps = append(pl.groupOps, next)
	pl.unreject(g, true)
}

// owner returns the sub-port of a nexthop object in groups of a source group and a family, or -1 if it has none.
func (pl *planner) owner(s *source, f family, id uint32) int {
	q := pl.have.owners[id]
	if q == nil || q.subPort == nil || q.subPort.pool(f) != q {
		return -1
	}
	return s.index(q.subPort)
}

// confirm records that the buckets of a group already match its weights.
func (pl *planner) confirm(g *group, weights []uint32) {
	e := pl.edit(g.key)
	e.weights, e.generation = weights, pl.want.generation
}

// dismiss plans the removal of witnesses from a group that has not changed for witnessTime. If all other sub-ports
// failed, witnesses would receive their packets.
func (pl *planner) dismiss(g *group) {
	if len(g.witnesses) == 0 || pl.scope.now.Sub(g.dealtAt) < pl.scope.witnessTime {
		return
	}
	members := slices.DeleteFunc(slices.Clone(g.members), func(m rtnl.Member) bool { return slices.Contains(g.witnesses, m.ID) })
	pl.groupOps = append(pl.groupOps, op{
		kind: setGroup, id: g.id, key: g.key, members: members, segments: g.segments, weights: g.weights, flags: rtnl.Change,
	})
}

// unreject notes that routes of a group have to be set again if they may reject packets although the group carries
// packets.
func (pl *planner) unreject(g *group, live bool) {
	if !g.rejecting || !live {
		return
	}
	pl.unrejected[g.key] = true
	pl.edit(g.key).rejecting = false
}

// planUnrejected plans to set the routes of all groups that unreject has noted.
func (pl *planner) planUnrejected() {
	if len(pl.unrejected) == 0 {
		return
	}
	for at, r := range pl.have.routes.all() {
		wanted, _ := pl.want.wantedAt(at)
		if key := (groupKey{wanted, familyOf(at.prefix.Addr())}); pl.unrejected[key] && r.nexthop == pl.group(key).id {
			pl.routeOps = append(pl.routeOps, op{
				kind: setRoute, at: at, id: r.nexthop, key: key, flags: rtnl.Change, source: pl.want.preferred(at, pl.have),
			})
		}
	}
}

// planRetired plans the removal of retired nexthops that no group has.
func (pl *planner) planRetired() {
	if len(pl.have.retired) == 0 {
		return
	}
	inUse := map[uint32]bool{}
	for key := range pl.have.groups {
		for _, m := range pl.group(key).members {
			inUse[m.ID] = true
		}
	}
	for _, r := range pl.ready {
		for _, m := range r.members {
			inUse[m.ID] = true
		}
	}
	for _, id := range pl.have.retired {
		if !inUse[id] {
			pl.lastOps = append(pl.lastOps, op{kind: deleteNexthop, id: id})
		}
	}
}
