package linux

import (
	"net/netip"
	"slices"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/internal/prefixmap"
)

// desired is the forwarding that the control plane has set: sub-ports, source groups, vectors and destinations.
type desired struct {
	subPorts []*subPort
	byDevice map[string]*subPort
	size     int // buckets of each group
	lasting  int // buckets of each sub-port
	scaling  scaling
	sources  map[netip.Prefix]*source
	order    []*source // in the order of Forwarding
	// claimants holds, by table, names of the source groups whose routes are in it, those of Forwarding first.
	claimants    map[uint32][]netip.Prefix
	tables       map[uint32]*source           // by own table; empty if there is only one source group
	named        prefixmap.Map[struct{}, int] // the number of source groups that have a prefix as a destination
	generation   uint64                       // of all inputs of the bucket layout except weights
	vectors      map[uint32]*farev1.Vector
	destinations prefixmap.Map[netip.Prefix, uint32] // ids in vectors, by contract.DestinationKey
	users        map[groupKey]int                    // number of destinations of each group; no entry for none
}

func newDesired() desired {
	return desired{
		byDevice: map[string]*subPort{}, sources: map[netip.Prefix]*source{}, tables: map[uint32]*source{},
		vectors: map[uint32]*farev1.Vector{}, users: map[groupKey]int{},
	}
}

// add adds a destination to those of a group.
func (w *desired) add(key groupKey, destination contract.DestinationKey) {
	w.users[key]++
	wanted, _ := w.destinations.Add(destination.Source, destination.Prefix)
	*wanted = key.wanted
}

// remove removes a destination from those of a group, and reports whether it was the last one.
func (w *desired) remove(key groupKey, destination contract.DestinationKey) (last bool) {
	w.destinations.Delete(destination.Source, destination.Prefix)
	if w.users[key]--; w.users[key] > 0 {
		return false
	}
	delete(w.users, key)
	return true
}

// sourceOf returns the source group with a name, or an empty one without sub-ports.
func (w *desired) sourceOf(name netip.Prefix) *source {
	if s := w.sources[name]; s != nil {
		return s
	}
	return &source{name: name}
}

// place returns the key of the route of a destination, or false if its source group does not exist.
func (w *desired) place(key contract.DestinationKey) (routeKey, bool) {
	s := w.sources[key.Source]
	if s == nil {
		return routeKey{}, false
	}
	return routeKey{key.Prefix, s.table}, true
}

// wantedAt returns the group that a route has to use, or 0 if it has to drop packets. It returns false if no route is
// wanted.
func (w *desired) wantedAt(at routeKey) (uint32, bool) {
	wanted, ok := w.programmedAt(at)
	return wanted, ok || w.closedAt(at)
}

// programmedAt returns the group of the destination of a route, or false if there is none.
func (w *desired) programmedAt(at routeKey) (uint32, bool) {
	_, wanted, ok := w.claimant(at)
	return wanted, ok
}

// claimant returns the source group and the group of the destination of a route.
func (w *desired) claimant(at routeKey) (name netip.Prefix, wanted uint32, ok bool) {
	for _, name := range w.claimants[at.table] {
		if wanted := w.destinations.Get(name, at.prefix); wanted != nil {
			return name, *wanted, true
		}
	}
	return netip.Prefix{}, 0, false
}

// closedAt reports whether a route has to drop packets: its table is a source group's own, and only other source groups
// have the destination. Without such a route, those packets would continue to Config.Table and leave through the
// sub-ports of the first source group, or by a default route. Packets from other addresses or to other destinations
// never match it.
func (w *desired) closedAt(at routeKey) bool {
	s := w.tables[at.table]
	if s == nil || w.named.Get(struct{}{}, at.prefix) == nil {
		return false
	}
	_, has := w.programmedAt(routeKey{at.prefix, s.table})
	return !has
}

// closedRoutes returns the keys of all routes that have to drop packets.
func (w *desired) closedRoutes() (all []routeKey) {
	for own := range w.tables {
		for key := range w.named.All() {
			if at := (routeKey{key.Prefix, own}); w.closedAt(at) {
				all = append(all, at)
			}
		}
	}
	return all
}

// sourceFrom returns the source group of packets from an address.
func (w *desired) sourceFrom(address netip.Addr) *source {
	for _, s := range w.order {
		if slices.ContainsFunc(s.loopbacks, func(l netip.Prefix) bool { return l.Addr() == address }) {
			return s
		}
	}
	return w.order[0]
}

func (w *desired) isLoopback(a netip.Addr) bool {
	for _, s := range w.sources {
		for _, l := range s.loopbacks {
			if l.Addr() == a {
				return true
			}
		}
	}
	return false
}

// preferred returns the source address for a route: the first loopback of its family, in the source group of its
// destination, that the kernel accepts. It is not valid for a route that drops packets, and if the host has no such
// loopback. Without a source address the kernel chooses the address of a sub-port, to which other servers may have no
// route.
func (w *desired) preferred(at routeKey, have *mirror) netip.Addr {
	address, _ := w.loopbackFor(at, have)
	return address
}

// loopbackFor returns the preferred address and the first candidate loopback, whether the kernel accepts that one or
// not.
func (w *desired) loopbackFor(at routeKey, have *mirror) (address, first netip.Addr) {
	name, _, ok := w.claimant(at)
	if !ok {
		return address, first
	}
	return w.loopbacks(w.sourceOf(name), familyOf(at.prefix.Addr()), have)
}

// loopbackOf returns the source address of routes of a source group.
func (w *desired) loopbackOf(s *source, f family, have *mirror) netip.Addr {
	address, _ := w.loopbacks(s, f, have)
	return address
}

// loopbacks returns the first loopback of a source group that the kernel accepts, and the first candidate.
func (w *desired) loopbacks(s *source, f family, have *mirror) (address, first netip.Addr) {
	for _, l := range s.loopbacks {
		a := l.Addr()
		if familyOf(a) != f {
			continue
		}
		if !first.IsValid() {
			first = a
		}
		if have.addresses[a] && !have.unfit[a] {
			return a, first
		}
	}
	return netip.Addr{}, first
}

// live returns the weights of the group members that can carry traffic of a family, indexed by sub-port of the source
// group.
func (w *desired) live(s *source, wanted *farev1.Vector, f family, have *mirror) []uint32 {
	weights := make([]uint32, len(s.subPorts))
	for _, m := range wanted.GetMembers() {
		sp := w.byDevice[m.Device]
		if sp == nil || sp.down || !have.usable(sp) || s.index(sp) < 0 {
			continue
		}
		if pool := sp.pool(f); pool != nil && pool.broken == nil {
			weights[s.index(sp)] = m.Weight
		}
	}
	return weights
}
