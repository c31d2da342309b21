package linux

import (
	"iter"
	"net/netip"
	"slices"
	"time"

	"github.com/fared/fared/internal/prefixmap"
	"github.com/fared/fared/internal/rtnl"
)

// mirror is the state of the kernel as known to the Driver. Acknowledged ops, events and read-backs change it.
type mirror struct {
	links  map[int]rtnl.Link
	names  map[string]int
	used   map[uint32]bool // ids of nexthop objects in use, by any program
	first  uint32          // first id to use
	next   uint32          // id to try next
	owners map[uint32]*pool
	drop   [2]*pool                // drops packets while the kernel has removed every other member
	hole   [2]*pool                // drops packets of a group without usable members
	ruled  map[netip.Prefix]uint32 // table per loopback, from the rules of an earlier run
	groups map[groupKey]*group
	ready  []*group // kernel groups without destinations, the oldest first
	routes *routeStates
	// anchors holds the anchors of groups, see anchorAt; trails the routes by the nexthop id to which they lead.
	anchors map[routeKey]routeState
	trails  map[uint32]*trail
	// addresses holds the addresses of the host; the value is true if packets can be sent from the address. unfit holds
	// those that the kernel refused as the source of a route.
	addresses, unfit map[netip.Addr]bool
	// Marked objects that no desired state has claimed; Settle removes them.
	strays  map[uint32]stray
	loose   map[uint32]rtnl.Nexthop
	retired []uint32 // nexthops to delete once no group has them
	changed []*pool  // pools whose objects need a new next hop
}

func newMirror(firstID uint32) mirror {
	m := mirror{
		links: map[int]rtnl.Link{}, names: map[string]int{}, used: map[uint32]bool{}, first: firstID, next: firstID, owners: map[uint32]*pool{},
		groups: map[groupKey]*group{}, routes: &routeStates{}, anchors: map[routeKey]routeState{}, trails: map[uint32]*trail{},
		addresses: map[netip.Addr]bool{}, unfit: map[netip.Addr]bool{}, ruled: map[netip.Prefix]uint32{},
		strays: map[uint32]stray{}, loose: map[uint32]rtnl.Nexthop{},
	}
	for f := range m.drop {
		m.drop[f], m.hole[f] = &pool{family: family(f), loopback: true}, &pool{family: family(f), blackhole: true}
	}
	return m
}

// groupKey identifies a kernel group: the part of a group of the contract for one family.
type groupKey struct {
	wanted uint32
	family family
}

// group is a resilient kernel group, shared by all destinations of one family that have the same wanted group.
type group struct {
	key    groupKey
	source netip.Prefix
	id     uint32
	exists bool
	// members is the last member list sent to the kernel, segments the resulting bucket layout, or nil if it is unknown
	// or no member carries packets.
	members  []rtnl.Member
	segments []segment
	// weights and generation are the inputs that the members were computed from; nil weights are unknown.
	weights    []uint32
	generation uint64
	// witnesses are members without a bucket that the last change (at dealtAt) needed, see deal.
	witnesses []uint32
	dealtAt   time.Time
	// dropping is true if the only member is a blackhole.
	dropping bool
	// moved is true if the kernel has removed members and given their buckets to other members, or if another program
	// has changed the group.
	moved bool
	// rejecting is true if routes of the group may reject packets: an IPv6 route that was set while the first member
	// was on the loopback device rejects packets permanently, whatever the group becomes (fib6_is_reject). Such routes
	// are set again when the group carries packets.
	rejecting bool
	// unswapped is true after the kernel has refused a group in place of this one: the next change is in place.
	unswapped bool
}

// routeState is the state of a route in the kernel: the id of its nexthop group and the source address of packets from
// unbound sockets (RTA_PREFSRC), not valid if the route has none.
type routeState struct {
	nexthop uint32
	source  netip.Addr
}

// routeStates holds the states of routes.
type routeStates struct {
	byTable prefixmap.Map[uint32, routeState]
}

// get returns the state of a route, or the zero value and false.
func (r *routeStates) get(at routeKey) (state routeState, there bool) {
	if state := r.byTable.Get(at.table, at.prefix); state != nil {
		return *state, true
	}
	return routeState{}, false
}

func (r *routeStates) set(at routeKey, state routeState) {
	entry, _ := r.byTable.Add(at.table, at.prefix)
	*entry = state
}

func (r *routeStates) remove(at routeKey) { r.byTable.Delete(at.table, at.prefix) }

func (r *routeStates) len() int { return r.byTable.Len() }

// all yields all routes in no order.
func (r *routeStates) all() iter.Seq2[routeKey, routeState] {
	return func(yield func(routeKey, routeState) bool) {
		for key, state := range r.byTable.All() {
			if !yield(routeKey{key.Prefix, key.Group}, *state) {
				return
			}
		}
	}
}

// stray is a marked group that no desired state has claimed.
type stray struct {
	rtnl.Nexthop
	segments []segment
}

func (m *mirror) loopback() int {
	for index, l := range m.links {
		if l.Loopback {
			return index
		}
	}
	return 1
}

// usable reports whether packets can leave through a sub-port.
func (m *mirror) usable(sp *subPort) bool {
	index, ok := m.names[sp.device]
	return ok && m.links[index].Usable()
}

// forget removes ids from a pool whose objects no longer exist in the kernel.
func (m *mirror) forget(q *pool, gone func(id uint32) bool) {
	q.ids = slices.DeleteFunc(q.ids, func(id uint32) bool {
		if !gone(id) {
			return false
		}
		delete(m.owners, id)
		return true
	})
}

// retire empties a pool; its objects are deleted once no group uses them.
func (m *mirror) retire(q *pool) {
	for _, id := range q.ids {
		delete(m.owners, id)
		m.retired = append(m.retired, id)
	}
	q.ids = nil
}

// freeID returns the first unused id from next on, and the id to try after it.
func (m *mirror) freeID(next uint32) (id, after uint32) {
	for {
		id = next
		if next++; next == 0 {
			next = m.first
		}
		if id != 0 && !m.used[id] {
			return id, next
		}
	}
}

// newID returns an unused id and marks it as used.
func (m *mirror) newID() (id uint32) {
	id, m.next = m.freeID(m.next)
	m.used[id] = true
	return id
}
