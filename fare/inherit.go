package fare

import (
	"cmp"
	"net/netip"
	"slices"
)

// Heir is a session that is up and continues a session of another table: same codec, neighbor and generation.
type Heir struct {
	Session int
	Was     *Table
	At      int // index of the session there
}

// InheritedRoute is a route of a session that is up, for [Table.Inherit].
type InheritedRoute struct {
	Session int
	Attrs   *Attributes
	origin  uint16 // position of its origin among those of the destination in the other table; 0: not visible
}

// Inherit adds destinations, in ascending order, that a table does not have yet, with the routes that the heirs have in
// other tables: with other planes, sub-ports or sessions. more has routes that no table has, in the order of sessions.
// Inherit neither judges routes nor counts them as received (see [Table.Continue]), and keeps their attributes.
func (t *Table) Inherit(prefixes []netip.Prefix, heirs []Heir, more map[netip.Prefix][]InheritedRoute) {
	x := inheritance{t: t, heirs: heirs, known: map[ancestry]descent{}}
	x.begin()
	empty := t.byPrefix.len() == 0
	if empty {
		t.byPrefix = newPrefixes[*destination](len(prefixes))
	}
	for _, prefix := range prefixes {
		x.destination(prefix, more[prefix])
	}
	if empty && t.byPrefix.len() == len(prefixes) {
		t.sorted, t.resort = slices.Clone(prefixes), false
	}
	for _, set := range x.sets {
		set.heir = nil
	}
	t.changes = t.changes[:0]
}

// inheritance is one call of Inherit. Destinations that have shared a group in every other table share one here too, so
// their entries are computed once.
type inheritance struct {
	t      *Table
	heirs  []Heir
	tables []*Table // of the heirs
	of     []int    // by heir: index of tables
	shared bool     // equal entries there give equal entries here
	known  map[ancestry]descent
	found  []*destination // by table: the present destination there, or nil
	routes []InheritedRoute
	sets   []*attributeSet // of the other tables, with an heir
}

// ancestry has the groups of a destination, by table.
type ancestry [4]*group

// descent has the group of the destinations with an ancestry, nil if they have no routes, and the origin of each of its
// entries.
type descent struct {
	group   *group
	entries []ancestor
}

// ancestor is an entry of another table that a session here continues.
type ancestor struct{ table, entry, session int }

func (x *inheritance) begin() {
	x.shared = true
	for _, h := range x.heirs {
		at := slices.Index(x.tables, h.Was)
		if at < 0 {
			at = len(x.tables)
			x.tables = append(x.tables, h.Was)
		}
		x.of = append(x.of, at)
		s, was := &x.t.sessions[h.Session], &h.Was.sessions[h.At]
		x.shared = x.shared && s.codec == was.codec && s.peerAS == was.peerAS && x.t.config.Role == h.Was.config.Role &&
			x.t.config.SubPorts[s.subPort].Uplink == h.Was.config.SubPorts[was.subPort].Uplink
	}
	x.shared = x.shared && len(x.tables) <= len(ancestry{})
	x.found = make([]*destination, len(x.tables))
}

func (x *inheritance) destination(prefix netip.Prefix, more []InheritedRoute) {
	var groups ancestry
	for k, was := range x.tables {
		if x.found[k], _ = was.byPrefix.get(prefix); x.found[k] != nil && x.shared {
			groups[k] = x.found[k].group
		}
	}
	shared := x.shared && len(more) == 0 && (len(x.tables) < 2 || x.oneOrigin())
	if shared {
		if d, ok := x.known[groups]; ok {
			x.follow(prefix, d)
			return
		}
	}
	x.routes = x.routes[:0]
	for i, h := range x.heirs {
		if d := x.found[x.of[i]]; d != nil {
			if at, ok := h.Was.routeOf(d, h.At); ok {
				x.routes = append(x.routes, InheritedRoute{h.Session, d.sets[at].attrs, d.group.entries[at].origin})
			}
		}
	}
	x.routes = append(x.routes, more...)
	if len(x.routes) == 0 {
		return
	}
	slices.SortStableFunc(x.routes, func(a, b InheritedRoute) int { return cmp.Compare(a.origin, b.origin) })
	group := x.t.inherit(prefix, x.routes)
	if shared {
		x.known[groups] = x.descentOf(group)
	}
}

// oneOrigin reports whether the visible origins of the present destination are one AS in all tables. Positions of
// origins tell those of one table apart only.
func (x *inheritance) oneOrigin() bool {
	one := uint32(0)
	for k, was := range x.tables {
		if x.found[k] == nil {
			continue
		}
		for i := range x.found[k].group.entries {
			e := &x.found[k].group.entries[i]
			origin := was.originOf(&was.sessions[was.order[e.rank]], x.found[k].sets[i].attrs.ASPath)
			if origin != 0 && one != 0 && origin != one {
				return false
			}
			one = max(one, origin)
		}
	}
	return true
}

// inherit adds a destination, and returns its group. It reorders nothing: the origins get positions in the order of
// routes.
func (t *Table) inherit(prefix netip.Prefix, routes []InheritedRoute) *group {
	d := t.newDestination(prefix)
	t.entries, t.sets = t.entries[:0], t.sets[:0]
	for i := range routes {
		r := &routes[i]
		s := &t.sessions[r.Session]
		e, set := t.entryOf(s, prefix, r.Attrs)
		e.origin = t.originAmong(t.entries, t.sets, s, r.Attrs.ASPath)
		s.routes++
		t.live++
		at, _ := find(t.entries, s.rank)
		t.entries, t.sets = slices.Insert(t.entries, at, e), slices.Insert(t.sets, at, set)
	}
	t.place(d)
	return d.group
}

// descentOf returns the descent of the present destination, whose group here is g.
func (x *inheritance) descentOf(g *group) descent {
	d := descent{group: g, entries: make([]ancestor, len(g.entries))}
	for i, h := range x.heirs {
		was := x.found[x.of[i]]
		if was == nil {
			continue
		}
		if from, ok := h.Was.routeOf(was, h.At); ok {
			at, _ := find(g.entries, x.t.sessions[h.Session].rank)
			d.entries[at] = ancestor{x.of[i], from, h.Session}
		}
	}
	return d
}

// follow adds a destination with a known descent.
func (x *inheritance) follow(prefix netip.Prefix, d descent) {
	t := x.t
	to := t.newDestination(prefix)
	to.sets = slices.Grow(to.sets[:0], len(d.entries))
	for _, a := range d.entries {
		set := x.found[a.table].sets[a.entry]
		if set.heir == nil {
			set.heir, x.sets = t.pool.intern(t.seed, set.attrs), append(x.sets, set)
		} else {
			set.heir.refs++
		}
		to.sets = append(to.sets, set.heir)
		t.sessions[a.session].routes++
	}
	t.live += len(d.entries)
	t.move(to, d.group)
	if t.config.Role == RoleLeaf {
		t.updateReadvertisement(to)
	}
}

// routeOf returns the index of a session's live route among those of a destination, or false if it has none.
func (t *Table) routeOf(d *destination, session int) (int, bool) {
	i, found := find(d.group.entries, t.sessions[session].rank)
	return i, found && t.alive(&d.group.entries[i])
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
