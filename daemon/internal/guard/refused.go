package guard

import (
	"net/netip"
	"slices"
)

// Refused counts the routes that the peer announces now and that the guard
// drops for a reason, where they may lead to servers of the fabric.
type Refused struct {
	Reason Reason
	// Routes is the number of routes, at least 1; it stays below the actual one
	// if that exceeds MaxRefused.
	Routes  int
	Example netip.Prefix // one of the routes
}

// Bounds of the memory for refused routes, and of the time for aggregates.
const (
	// MaxRefused is the number of refused routes that are remembered for each
	// reason and family. Further ones are dropped and not counted in Refused.
	MaxRefused = 1024
	// maxAggregates is the number of aggregates that are remembered. maxScans
	// is the number of aggregates of one connection that are compared with the
	// whole table; further ones are not remembered.
	maxAggregates = 16
	maxScans      = 64
)

// refused remembers the refused routes of the peer that are no routine. These
// are host routes within the accepted ranges that have an unacceptable
// attribute, host routes outside of the ranges while the peer announces none
// within, and aggregates of accepted addresses without an accepted host route.
// Routes to our own loopbacks never count: a leaf sends them back.
type refused struct {
	own        func() []netip.Prefix // Config.Own
	sets       map[refusedKey]*refusedSet
	aggregates []aggregate
	scans      int
	touched    bool // the result of list may have changed since the last call of TakeRefused
	last       []Refused
}

type refusedKey struct {
	reason Reason
	family Family
}

type refusedSet struct {
	routes  map[netip.Prefix]struct{}
	example netip.Prefix
}

// aggregate is a refused prefix with the number of held host routes in it.
type aggregate struct {
	prefix netip.Prefix
	inside int
}

// loopbacks returns our loopbacks, which a reload may change.
func (r *refused) loopbacks() []netip.Prefix {
	if r.own == nil {
		return nil
	}
	return r.own()
}

// any reports whether a refused route is remembered.
func (r *refused) any() bool { return len(r.sets) > 0 || len(r.aggregates) > 0 }

// add remembers a host route that was refused for a reason, in place of an
// earlier reason.
func (r *refused) add(prefix netip.Prefix, family Family, reason Reason) {
	if slices.Contains(r.loopbacks(), prefix) {
		return
	}
	key := refusedKey{reason, family}
	set := r.sets[key]
	if set != nil {
		if _, known := set.routes[prefix]; known {
			return
		}
	}
	r.remove(prefix, family)
	set = r.sets[key] // remove deletes empty sets
	if set == nil {
		set = &refusedSet{routes: map[netip.Prefix]struct{}{}, example: prefix}
		if r.sets == nil {
			r.sets = map[refusedKey]*refusedSet{}
		}
		r.sets[key] = set
	}
	if len(set.routes) < MaxRefused {
		set.routes[prefix] = struct{}{}
		r.touched = true
	}
}

// remove forgets a prefix that was accepted or withdrawn.
func (r *refused) remove(prefix netip.Prefix, family Family) {
	if !prefix.IsSingleIP() {
		if i := slices.IndexFunc(r.aggregates, func(a aggregate) bool { return a.prefix == prefix }); i >= 0 {
			r.aggregates = slices.Delete(r.aggregates, i, i+1)
			r.touched = true
		}
		return
	}
	for key, set := range r.sets {
		if _, there := set.routes[prefix]; key.family != family || !there {
			continue
		}
		r.touched = true
		if delete(set.routes, prefix); len(set.routes) == 0 {
			delete(r.sets, key)
		}
		if set.example == prefix {
			for other := range set.routes {
				set.example = other
				break
			}
		}
		return
	}
}

// held records that n host routes to prefix, 1 or -1, have entered the peer's
// table.
func (r *refused) held(prefix netip.Prefix, n int) {
	if !r.any() {
		return
	}
	r.touched = true
	for i := range r.aggregates {
		if r.aggregates[i].prefix.Contains(prefix.Addr()) {
			r.aggregates[i].inside += n
		}
	}
}

// addAggregate remembers a prefix that is no host route.
func (r *refused) addAggregate(prefix netip.Prefix, h *held) {
	if len(r.aggregates) == maxAggregates || r.scans == maxScans ||
		slices.ContainsFunc(r.aggregates, func(a aggregate) bool { return a.prefix == prefix }) {
		return
	}
	r.scans++
	r.touched = true
	a := aggregate{prefix: prefix}
	count := func(addr netip.Addr) {
		if prefix.Contains(addr) {
			a.inside++
		}
	}
	if prefix.Addr().Is4() {
		for k := range h.v4 {
			count(netip.AddrFrom4(k))
		}
	} else {
		for k := range h.v6 {
			count(netip.AddrFrom16(k))
		}
	}
	r.aggregates = append(r.aggregates, a)
}

// list returns the refused routes by reason, in the order of Reasons. h is the
// peer's table.
func (r *refused) list(h *held) (out []Refused) {
	var own []netip.Prefix // our loopbacks in the table: they are no other servers
	usable := map[Family]int{IPv4Unicast: len(h.v4), IPv6Unicast: len(h.v6)}
	for _, l := range r.loopbacks() {
		if h.has(l.Addr()) {
			own = append(own, l)
			usable[familyOfPrefix(l)]--
		}
	}
	for reason := None + 1; reason < numReasons; reason++ {
		x := Refused{Reason: reason}
		note := func(n int, example netip.Prefix) {
			if x.Routes += n; !x.Example.IsValid() {
				x.Example = example
			}
		}
		for _, family := range [...]Family{IPv4Unicast, IPv6Unicast} {
			// A leaf announces loopbacks of switches, too: routes outside of the
			// ranges are suspect only where none is inside.
			if set := r.sets[refusedKey{reason, family}]; set != nil && (reason != RouteOutside || usable[family] == 0) {
				note(len(set.routes), set.example)
			}
		}
		for _, a := range r.aggregates {
			inside := a.inside
			for _, l := range own {
				if a.prefix.Contains(l.Addr()) {
					inside--
				}
			}
			if reason == RouteNotHost && inside == 0 {
				note(1, a.prefix)
			}
		}
		if x.Routes > 0 {
			out = append(out, x)
		}
	}
	return out
}

// TakeRefused returns the refused routes of the peer by reason, and whether
// they differ from those of the last call that returned true. It is for the
// goroutine that calls FromPeer.
func (g *Guard) TakeRefused() ([]Refused, bool) {
	r := &g.in.refused
	if !r.touched {
		return nil, false
	}
	r.touched = false
	now := r.list(&g.in.held)
	if slices.Equal(now, r.last) {
		return nil, false
	}
	r.last = now
	return now, true
}

// refuse remembers an announced prefix that was dropped, unless that is routine.
func (g *Guard) refuse(nlri []byte, family Family, reason Reason) {
	in := &g.in
	switch reason {
	case RouteNotHost:
		if prefix := prefixOf(nlri, family); g.summarizes(prefix) {
			in.refused.addAggregate(prefix, &in.held)
		}
	case RouteOutside:
		if prefix := hostRoute(nlri); len(in.accept.of(family)) > 0 && !prefix.Addr().Is4In6() {
			in.refused.add(prefix, family, reason)
		}
	case RouteFamily, RouteMulticast, RouteLimit:
	default:
		in.refused.add(hostRoute(nlri), family, reason)
	}
}

// summarizes reports whether a prefix that is no host route may stand for
// loopbacks: it is part of an accepted range or contains one, and is neither a
// default route, nor the subnet of a link of two (RFC 3021, RFC 6164), nor our
// own subnet in an accepted range.
func (g *Guard) summarizes(p netip.Prefix) bool {
	if p.Bits() == 0 || p.Addr().BitLen()-p.Bits() <= 2 {
		return false
	}
	ours := false
	for _, own := range [...]netip.Addr{g.config.LocalNextHop4, g.config.LocalNextHop6, g.config.LocalLinkLocal} {
		ours = ours || own.IsValid() && p.Contains(own.WithZone(""))
	}
	return slices.ContainsFunc(g.in.accept.of(familyOfPrefix(p)), func(accepted netip.Prefix) bool {
		return p.Overlaps(accepted) && (p.Bits() <= accepted.Bits() || !ours)
	})
}

func familyOfPrefix(p netip.Prefix) Family {
	if p.Addr().Is4() {
		return IPv4Unicast
	}
	return IPv6Unicast
}
