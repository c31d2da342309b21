package linux

import (
	"log/slog"
	"math"
	"net/netip"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/internal/rtnl"
)

// state is the desired forwarding, the kernel as it is known, and the marks of the parts in which the two may differ.
// Its methods change memory alone: kernel, links, reader and others bring the changes of the kernel.
type state struct {
	config    Config
	log       *slog.Logger
	ipv6      bool // the kernel can forward IPv6
	maxWeight int  // largest member weight that the kernel accepts
	stats     Stats

	want    desired
	have    mirror
	settled bool                // Settle was called
	missing map[netip.Addr]bool // loopbacks for which a warning was logged
	// Parts of the desired state that may differ from the mirror.
	staleGroups map[groupKey]bool
	staleRoutes map[routeKey]bool
}

func newState(config Config) *state {
	return &state{
		config: config, log: config.Logger, want: newDesired(), have: newMirror(config.FirstID), missing: map[netip.Addr]bool{},
		staleGroups: map[groupKey]bool{}, staleRoutes: map[routeKey]bool{},
	}
}

// applyChange adds a change to the desired state, and records the affected groups and routes.
func (st *state) applyChange(c contract.Change, groups map[groupKey]bool, routes map[routeKey]bool) {
	touch := func(wanted uint32) {
		for f := range st.have.drop {
			key := groupKey{wanted, family(f)}
			if st.have.groups[key] != nil {
				groups[key] = true
				st.staleGroups[key] = true
			}
		}
	}
	switch c.Kind {
	case contract.SubPortChange:
		if sp := st.want.byDevice[c.Device]; sp != nil {
			sp.down = !c.Up
			for _, key := range st.stale(sp) {
				groups[key] = true
			}
		}
	case contract.GroupChange:
		if c.After == nil {
			delete(st.want.vectors, c.Group)
		} else {
			st.want.vectors[c.Group] = c.After
		}
		touch(c.Group)
	case contract.DestinationChange:
		f := familyOf(c.Prefix.Addr())
		if c.From.Group != 0 {
			key := groupKey{c.From.Group, f}
			if st.want.remove(key, c.Key()) {
				st.staleGroups[key] = true
			}
			st.count(c.Key(), -1)
		}
		if c.To.Group != 0 {
			key := groupKey{c.To.Group, f}
			g := st.have.groups[key]
			if g == nil {
				g = &group{key: key, source: c.Source}
				st.have.groups[key] = g
			}
			if g.source != c.Source { // the id was reused by another source group before the kernel group of the first one was removed
				st.renew(g, c.Source)
			}
			st.want.add(key, c.Key())
			st.count(c.Key(), 1)
			groups[key] = true
		}
		if at, ok := st.want.place(c.Key()); ok {
			routes[at] = true
			st.staleRoutes[at] = true
		}
	}
}

// stale marks the groups that have a sub-port as a member, and returns their keys.
func (st *state) stale(sp *subPort) (keys []groupKey) {
	for key := range st.have.groups {
		for _, m := range st.want.vectors[key.wanted].GetMembers() {
			if m.Device == sp.device {
				st.staleGroups[key] = true
				keys = append(keys, key)
			}
		}
	}
	return keys
}

// staleEverywhere marks all existing and all wanted routes.
func (st *state) staleEverywhere() {
	if st.settled {
		for at := range st.have.routes.all() {
			st.staleRoutes[at] = true
		}
	}
	for key := range st.want.destinations.All() {
		if at, ok := st.want.place(contract.DestinationKey{Source: key.Group, Prefix: key.Prefix}); ok {
			st.staleRoutes[at] = true
		}
	}
	for _, at := range st.want.closedRoutes() {
		st.staleRoutes[at] = true
	}
}

// maxVectors returns how many vectors Config.Memory allows, or 0 before the number of buckets is known.
func (st *state) maxVectors() uint32 {
	if st.want.size == 0 {
		return 0
	}
	return uint32(min(st.config.Memory/uint64(bucketSize*st.want.size*len(families(st.ipv6))), math.MaxUint32))
}

// setSubPorts applies the sub-ports of a valid Forwarding, and reports whether a next hop was added, removed or moved
// to another device.
func (st *state) setSubPorts(forwarding *farev1.Forwarding) (structure bool) {
	byDevice := map[string]*subPort{}
	var subPorts []*subPort
	for _, plane := range forwarding.Planes {
		for _, wire := range plane.SubPorts {
			sp := st.want.byDevice[wire.Device]
			if sp == nil {
				sp = &subPort{device: wire.Device}
			}
			subPorts = append(subPorts, sp)
			byDevice[sp.device] = sp
			for f, text := range []string{wire.NextHopV4, wire.NextHopV6} {
				sp.hops[f], _ = parseHop(text) // judge has validated it
				if st.setHop(sp, family(f)) {
					structure = true
				}
			}
		}
	}
	for device, sp := range st.want.byDevice {
		if byDevice[device] == nil {
			for _, q := range sp.pools {
				if q != nil {
					st.have.retire(q)
				}
			}
		}
	}
	st.want.subPorts, st.want.byDevice = subPorts, byDevice
	return structure
}

// setHop updates the pool of a sub-port from its next hop and link, and reports whether the pool was added, removed or
// moved to another device.
func (st *state) setHop(sp *subPort, f family) (other bool) {
	q, hop := sp.pools[f], sp.hops[f]
	device := st.have.names[sp.device] // 0 without a device
	if !hop.IsValid() {
		if q != nil {
			st.have.retire(q)
			sp.pools[f] = nil
		}
		return q != nil
	}
	if q == nil {
		q = &pool{subPort: sp, family: f, gateway: hop, device: device}
		sp.pools[f] = q
		st.adopt(q)
		return true
	}
	if q.device != device {
		st.have.retire(q)
		q.device, q.gateway, q.broken = device, hop, nil
		return true
	}
	if q.gateway != hop {
		q.gateway, q.broken = hop, nil
		st.have.changed = append(st.have.changed, q)
	}
	return false
}

// relink updates a sub-port after a change of its device.
func (st *state) relink(sp *subPort) {
	for f := range sp.pools {
		if st.setHop(sp, family(f)) {
			st.want.generation++
		}
		if q := sp.pools[f]; q != nil {
			q.broken = nil
		}
	}
	st.stale(sp)
}

// resize sets the number of buckets, for source groups of up to subPorts. The kernel cannot change the number of
// buckets of a group: existing groups are replaced by new ones, to which their routes are moved one by one.
func (st *state) resize(buckets, subPorts int) {
	other := st.want.size != buckets
	st.want.size, st.want.lasting, st.want.scaling = buckets, layout{buckets, subPorts}.lasting(), newScaling(buckets, st.maxWeight)
	for _, s := range st.want.sources {
		s.layout = layout{buckets, len(s.subPorts)}
	}
	if !other {
		return
	}
	for _, g := range st.have.groups {
		st.renew(g, g.source)
	}
	for _, r := range st.have.ready {
		r.moved = true
	}
	st.staleEverywhere()
}

// renew schedules a new kernel group for a source group; the old one is removed once no route uses it.
func (st *state) renew(g *group, source netip.Prefix) {
	if g.exists {
		st.have.strays[g.id] = stray{Nexthop: rtnl.Nexthop{ID: g.id, Members: g.members}}
	}
	*g = group{key: g.key, source: source}
	st.staleGroups[g.key] = true
}

// buckets returns the number of buckets of a group if the largest source group has subPorts.
func (st *state) buckets(subPorts int) int {
	if st.config.Buckets != 0 {
		return int(st.config.Buckets)
	}
	most := MaxBuckets
	if st.maxWeight < most {
		most = mostNarrow
	}
	return min(DefaultBuckets*subPorts, most)
}

// pools returns all pools.
func (st *state) pools() (all []*pool) {
	for f := range st.have.drop {
		all = append(all, st.have.drop[f], st.have.hole[f])
	}
	for _, sp := range st.want.subPorts {
		for _, q := range sp.pools {
			if q != nil {
				all = append(all, q)
			}
		}
	}
	return all
}

// adopt adds loose objects that equal the pool's objects to the pool.
func (st *state) adopt(q *pool) {
	for id, n := range st.have.loose {
		if q.is(st, n) {
			delete(st.have.loose, id)
			st.have.owners[id] = q
			q.ids = append(q.ids, id)
		}
	}
}

// count adds by (1 or -1) to the number of source groups that have a destination, and marks the routes in the tables
// where the destination may have become reachable or unreachable.
func (st *state) count(key contract.DestinationKey, by int) {
	named, _ := st.want.named.Add(struct{}{}, key.Prefix)
	before := *named
	if *named += by; *named == 0 {
		st.want.named.Delete(struct{}{}, key.Prefix)
	}
	crossed := before == 0 || before+by == 0
	at, _ := st.want.place(key)
	for own, s := range st.want.tables {
		if crossed || s.table == at.table {
			st.staleRoutes[routeKey{key.Prefix, own}] = true
		}
	}
}
