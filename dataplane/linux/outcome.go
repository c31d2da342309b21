package linux

import (
	"errors"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/rtnl"
)

// plan computes and adopts a plan for the stale groups and routes.
func (st *state) plan() *plan {
	pl := newPlan(&st.want, &st.have, st.scope())
	st.adoptPlan(pl)
	return pl
}

// scope returns the scope of a plan at this time.
func (st *state) scope() scope {
	return scope{groups: st.staleGroups, routes: st.staleRoutes, now: time.Now(), witnessTime: st.config.witnessTime, inPlace: st.config.inPlace}
}

// await marks as stale the groups and routes of refused ops, in addition to groups that have to change later, and
// clears all other marks. It returns when the next sync is due, or the zero time if nothing is stale.
func (st *state) await(failures []failure) (due time.Time) {
	clear(st.staleRoutes)
	for key := range st.staleGroups {
		g := st.have.groups[key]
		if g.settled() {
			delete(st.staleGroups, key)
		} else if at := g.dealtAt.Add(st.config.witnessTime); due.IsZero() || at.Before(due) {
			due = at
		}
	}
	for _, f := range failures {
		if f.op.key.wanted != 0 {
			st.staleGroups[f.op.key] = true
		}
		if f.op.at.prefix.IsValid() {
			st.staleRoutes[f.op.at] = true
		}
		due = time.Now().Add(retryDelay)
	}
	return due
}

// settled reports whether a group needs no change while the desired state and links stay the same.
func (g *group) settled() bool { return g == nil || !g.moved && len(g.witnesses) == 0 }

// adoptPlan records the part of a plan that needs no message: claimed groups, and the ids of new objects. An op that is
// refused later releases its id.
func (st *state) adoptPlan(pl *plan) {
	st.have.changed, st.have.next = nil, pl.next
	for _, o := range pl.nexthopOps {
		if o.kind == makeNexthop {
			o.pool.ids = append(o.pool.ids, o.id)
			st.have.owners[o.id], st.have.used[o.id] = o.pool, true
		}
	}
	for _, o := range pl.groupOps {
		st.have.used[o.id] = true
	}
	for key, g := range pl.groups {
		*st.have.groups[key] = *g
		delete(st.have.strays, g.id)
		st.have.used[g.id] = true
	}
	for _, key := range pl.unused {
		delete(st.have.groups, key)
	}
	st.have.ready = pl.ready
	for _, r := range pl.ready {
		st.have.used[r.id] = true
	}
	for _, o := range pl.routeOps {
		st.staleRoutes[o.at] = true // until the kernel has acknowledged all
	}
	for key := range pl.incomplete {
		st.staleGroups[key] = true
	}
}

// done records the state after an acknowledged op.
func (st *state) done(o *op) {
	switch g := st.have.groups[o.key]; o.kind {
	case setGroup:
		g.exists, g.moved, g.dropping, g.unswapped = true, false, o.segments == nil, false
		g.members, g.segments, g.weights, g.generation = o.members, o.segments, o.weights, st.want.generation
		g.witnesses, g.dealtAt = o.witnesses, time.Now()
		g.rejecting = g.rejecting || g.dropping && g.key.family == v6
	case setRoute:
		st.have.setRoute(o.at, routeState{o.id, o.source})
	case deleteRoute:
		st.have.removeRoute(o.at)
	case deleteGroup:
		delete(st.have.strays, o.id)
		delete(st.have.anchors, o.at) // the kernel removes it with its group
		if o.key.wanted != 0 {
			delete(st.have.groups, o.key)
		}
	case deleteNexthop:
		delete(st.have.loose, o.id)
		st.have.retired = slices.DeleteFunc(st.have.retired, func(id uint32) bool { return id == o.id })
	}
}

// undone records the state after a refused op.
func (st *state) undone(o *op, err error, again bool) {
	switch o.kind {
	case setRoute:
		g := st.have.groups[o.key]
		if g == nil {
			return
		}
		if o.source.IsValid() && errors.Is(err, unix.EINVAL) && g.exists && g.id == o.id { // without a group the kernel refuses any route to it
			// The address is no longer an address of the host, or belongs to another VRF.
			st.have.unfit[o.source] = true
		}
		g.rejecting = g.rejecting || o.flags == rtnl.Change && o.key.family == v6
		return
	case setGroup:
		st.unswap(o)
		return
	case deleteGroup:
		if _, stands := st.have.strays[o.id]; !stands && o.key.wanted == 0 {
			st.have.strays[o.id] = stray{Nexthop: rtnl.Nexthop{ID: o.id, Members: o.members}} // it was ready
		}
		return
	case makeNexthop, changeNexthop:
	default:
		return
	}
	q := o.pool
	if o.kind == makeNexthop {
		st.have.forget(q, func(id uint32) bool { return id == o.id })
		if errors.Is(err, unix.EEXIST) {
			return // the id belongs to another program; newID counts it as used
		}
	}
	if !again || exhausted(err) || q.subPort == nil || q.broken != nil {
		return
	}
	// The link is as the Driver assumes, so the kernel refuses this next hop itself. The other sub-ports take over its
	// traffic.
	q.broken = err
	st.log.Error("linux data plane: the kernel refuses a next hop; its traffic goes over the other sub-ports until the kernel accepts it",
		"device", q.subPort.device, "next_hop", q.gateway, "error", err)
	st.have.retire(q)
	st.stale(q.subPort)
}

// lose applies the effect in the kernel of a device that is set down, loses its carrier or disappears: its nexthop
// objects are deleted and removed from their groups, and the other members have their buckets. It returns these
// objects.
func (st *state) lose(device int) map[uint32]*pool {
	lost := map[uint32]*pool{}
	for _, q := range st.pools() {
		if q.device == device || q.loopback && st.have.loopback() == device {
			for _, id := range q.ids {
				lost[id] = q
			}
			st.have.forget(q, func(uint32) bool { return true })
		}
	}
	for id, n := range st.have.loose {
		if n.Device == device {
			lost[id] = nil
			delete(st.have.loose, id)
		}
	}
	has := func(members []rtnl.Member) bool {
		return slices.ContainsFunc(members, func(m rtnl.Member) bool { _, is := lost[m.ID]; return is })
	}
	for id, s := range st.have.strays {
		if has(s.Members) {
			s.segments = nil
			st.have.strays[id] = s
		}
	}
	for _, r := range st.have.ready {
		r.moved = r.moved || has(r.members)
	}
	for key, g := range st.have.groups {
		if !g.exists || !has(g.members) {
			continue
		}
		// Members without a bucket leave, and no flow moves.
		idle := func(id uint32) bool {
			q, is := lost[id]
			return is && !(q != nil && q.loopback) && g.segments != nil &&
				!slices.ContainsFunc(g.segments, func(s segment) bool { return s.id == id })
		}
		g.members = slices.DeleteFunc(slices.Clone(g.members), func(m rtnl.Member) bool { return idle(m.ID) })
		g.witnesses = slices.DeleteFunc(slices.Clone(g.witnesses), idle)
		if !has(g.members) {
			continue
		}
		if !g.moved {
			g.moved, g.segments = true, nil
			st.stats.MovedByKernel++
		}
		for _, m := range g.members {
			if q := lost[m.ID]; q != nil && q.subPort != nil {
				if i := st.want.sourceOf(g.source).index(q.subPort); i >= 0 && i < len(g.weights) {
					g.weights[i] = 0
				}
			}
		}
		if key.family == v6 && !slices.ContainsFunc(g.weights, func(w uint32) bool { return w > 0 }) {
			g.rejecting = true
		}
		st.staleGroups[key] = true
	}
	return lost
}

// unswap returns a group's previous kernel group, if the kernel has refused the one that was to replace it.
func (st *state) unswap(o *op) {
	g := st.have.groups[o.key]
	i := slices.IndexFunc(st.have.ready, func(r *group) bool { return r.id == o.old })
	if o.old == 0 || g == nil || i < 0 {
		return
	}
	*g = *st.have.ready[i]
	g.key, g.unswapped = o.key, true
	st.have.ready = slices.Delete(st.have.ready, i, i+1)
	delete(st.have.used, o.id)
}
