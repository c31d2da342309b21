package fare

import "slices"

// OriginOf returns the AS number that announces the destination of a route, as far
// as the route shows it: the last one of the path. 0 means not visible. If the
// path holds only the neighbor's own AS, it shows the origin only if the neighbor
// may be the origin (direct: at a leaf, over a sub-port toward servers); elsewhere
// as-override or remove-private-AS may have replaced the origin's AS by the
// neighbor's. Paths do not distinguish servers that share an AS.
func OriginOf(path []uint32, peerAS uint32, direct bool) uint32 {
	if len(path) == 0 || !direct && !slices.ContainsFunc(path, func(as uint32) bool { return as != peerAS }) {
		return 0
	}
	return path[len(path)-1]
}

func (t *Table) originOf(s *session, path []uint32) uint32 {
	return OriginOf(path, s.peerAS, t.config.Role == RoleLeaf && !t.config.SubPorts[s.subPort].Uplink)
}

// originOrder returns the position of a new route's origin among the origins of
// the destination's routes: the position of a route with the same origin (possibly
// the route that it replaces), otherwise the one behind the last; 0 if the origin
// is not visible. So an origin keeps its position as long as it has a route
// without a gap.
func (t *Table) originOrder(d *destination, s *session, path []uint32) uint16 {
	if d.group == nil {
		return t.originAmong(nil, nil, s, path)
	}
	return t.originAmong(d.group.entries, d.sets, s, path)
}

// originAmong is originOrder among routes, which need not be live.
func (t *Table) originAmong(entries []entry, sets []*attributeSet, s *session, path []uint32) uint16 {
	own := t.originOf(s, path)
	if own == 0 {
		return 0
	}
	last := uint16(0)
	for i := range entries {
		e := &entries[i]
		if e.origin == 0 || !t.alive(e) {
			continue
		}
		if own == t.originOf(&t.sessions[t.order[e.rank]], sets[i].attrs.ASPath) {
			return e.origin
		}
		last = max(last, e.origin)
	}
	return last + 1
}

// closeOrigins renumbers the origins of t.entries from 1 without gaps, in order,
// so that destinations with equally many origins on the same sessions share a
// group.
func (t *Table) closeOrigins() {
	last := uint16(0)
	for i := range t.entries {
		last = max(last, t.entries[i].origin)
	}
	if last == 0 {
		return
	}
	t.places = slices.Grow(t.places[:0], int(last)+1)[:int(last)+1]
	clear(t.places)
	for i := range t.entries {
		t.places[t.entries[i].origin] = 1
	}
	next := uint16(0)
	for i := 1; i < len(t.places); i++ {
		if t.places[i] != 0 {
			next++
			t.places[i] = next
		}
	}
	t.places[0] = 0
	for i := range t.entries {
		t.entries[i].origin = t.places[t.entries[i].origin]
	}
}

// origins describes the origins of a group and which of them the policy accepts.
type origins struct {
	seen      int // number of different origins of live routes
	preferred uint16
	policy    ConflictPolicy
}

func (t *Table) allowedOrigins(g *group) origins {
	o := origins{policy: t.config.Conflict}
	t.places = t.places[:0]
	for i := range g.entries {
		e := &g.entries[i]
		if e.origin == 0 || !t.alive(e) {
			continue
		}
		for len(t.places) <= int(e.origin) {
			t.places = append(t.places, 0)
		}
		if t.places[e.origin] == 0 {
			t.places[e.origin] = 1
			o.seen++
		}
		if t.sessions[t.order[e.rank]].usable(e) && (o.preferred == 0 || e.origin < o.preferred) {
			o.preferred = e.origin
		}
	}
	return o
}

// refuses returns the reason why the policy rejects the route behind e, as a value
// of computation.of, or 0 if the policy accepts it.
func (o origins) refuses(e *entry) int32 {
	switch {
	case o.seen < 2:
	case o.policy == ConflictDrop:
		return conflicted
	case o.policy == ConflictPreferFirst && e.origin != 0 && e.origin != o.preferred:
		return otherOrigin
	}
	return 0
}
