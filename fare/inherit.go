package fare

import (
	"cmp"
	"net/netip"
	"slices"
)

// InheritedRoute is a route of a session that is up, for [Table.Inherit].
type InheritedRoute struct {
	Session int
	Attrs   *Attributes
	// Origin is the position of its origin among those of the destination, as in [Table.RouteOrigin].
	Origin uint16
}

// RouteOrigin returns the attributes of a session's live route, nil if it has none, and the position of its origin
// among the origins of the destination, in the order in which they began; 0 means not visible.
func (t *Table) RouteOrigin(session int, prefix netip.Prefix) (*Attributes, uint16) {
	d := t.byPrefix[prefix]
	if d == nil {
		return nil, 0
	}
	i, found := find(d.group.entries, t.sessions[session].rank)
	if !found || !t.alive(&d.group.entries[i]) {
		return nil, 0
	}
	return d.sets[i].attrs, d.group.entries[i].origin
}

// Inherit adds a destination with all its routes to a table that does not have it yet: the routes of another table with
// other planes, sub-ports or sessions. It neither judges nor counts them as received: see [Table.Continue]. The changes
// are valid until the next Step or Inherit. It reorders routes, and keeps their attributes.
func (t *Table) Inherit(prefix netip.Prefix, routes []InheritedRoute) []Change {
	t.changes = t.changes[:0]
	if len(routes) == 0 {
		return t.changes
	}
	slices.SortStableFunc(routes, func(a, b InheritedRoute) int { return cmp.Compare(a.Origin, b.Origin) })
	d := t.newDestination(prefix)
	t.entries, t.sets = t.entries[:0], t.sets[:0]
	for i := range routes {
		r := &routes[i]
		s := &t.sessions[r.Session]
		e, set := t.inheritedEntry(prefix, r)
		e.origin = t.originAmong(t.entries, t.sets, s, r.Attrs.ASPath)
		s.routes++
		t.live++
		at, _ := find(t.entries, s.rank)
		t.entries, t.sets = slices.Insert(t.entries, at, e), slices.Insert(t.sets, at, set)
	}
	t.place(d)
	return t.changes
}

// judgedRoute identifies the attributes of a session's routes, which many destinations share.
type judgedRoute struct {
	session int
	attrs   *Attributes
}

// judgment is the result of entryOf.
type judgment struct {
	entry entry
	set   *attributeSet
}

// inheritedEntry is entryOf for an inherited route: attributes that a route of the session has had already are not
// judged again. A table that inherits avoids no plane, so the entry does not depend on the destination.
func (t *Table) inheritedEntry(prefix netip.Prefix, r *InheritedRoute) (entry, *attributeSet) {
	key := judgedRoute{r.Session, r.Attrs}
	j, ok := t.judged[key]
	if ok {
		j.set.refs++
		return j.entry, j.set
	}
	j.entry, j.set = t.entryOf(&t.sessions[r.Session], prefix, r.Attrs)
	if t.judged == nil {
		t.judged = map[judgedRoute]judgment{}
	}
	t.judged[key] = j
	return j.entry, j.set
}

// Continue takes over the counters of another table. sessions has the index there of each session here, or -1.
func (t *Table) Continue(was *Table, sessions []int) {
	t.events = was.events
	for i, at := range sessions {
		if at >= 0 {
			t.sessions[i].communities = was.sessions[at].communities
		}
	}
}
