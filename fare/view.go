package fare

import (
	"cmp"
	"net/netip"
	"slices"
)

// SessionView is the state of one session.
type SessionView struct {
	Up         bool
	Generation uint64     // generation of the current or last incarnation; 0: never up
	Node       netip.Addr // BGP identifier of the current or last neighbor
	PeerAS     uint32
	Reason     Reason // why its routes cannot count; ReasonUsed if they can
	Routes     Tally  // its current routes, by outcome
	// Communities counts the communities judged since the table was made, by outcome.
	Communities Tally
}

// SubPortView is the state of one sub-port.
type SubPortView struct {
	Up      bool
	Drained bool // the sub-port or its plane is drained
	Speed   Bandwidth
	Reason  Reason // why the sub-port does not count; ReasonUsed if it does
}

// PlaneView is the state of one plane.
type PlaneView struct {
	Up        bool // a sub-port counts and a session over it is up
	Drained   bool
	Bandwidth Bandwidth // sum of the sub-ports that count
}

// Stats holds the table's counters and sizes.
type Stats struct {
	Events      Tally // events passed to Step
	Communities Tally // judged communities of all sessions
	// Numbers of known destinations, their groups, live routes, and routes of earlier generations that
	// are not yet removed.
	Destinations, Groups, Routes, Leftovers int
	// Conflicts is the number of destinations that several origins announce.
	Conflicts int
}

// Group returns the view of a group, or the zero value if there is no such group.
func (t *Table) Group(id GroupID) GroupView {
	if g := t.groups.get(id); g != nil {
		return g.view
	}
	return GroupView{}
}

// Groups yields every group in order of its number.
func (t *Table) Groups(yield func(GroupID, GroupView) bool) {
	for _, g := range t.groups.byID {
		if g != nil && !yield(g.id, g.view) {
			return
		}
	}
}

// Ignored counts the routes in [GroupView.Ignored] of all groups, sorted by session and reason. Example
// is a destination of one of them. It walks every group once.
func (t *Table) Ignored() []IgnoredRoutes {
	var out []IgnoredRoutes
	at := map[IgnoredBandwidth]int{}
	for _, g := range t.groups.byID {
		if g == nil {
			continue
		}
		for _, x := range g.view.Ignored {
			i, found := at[x]
			if !found {
				i = len(out)
				at[x] = i
				out = append(out, IgnoredRoutes{IgnoredBandwidth: x, Example: g.members.prefix})
			}
			out[i].Routes += uint64(g.size)
		}
	}
	slices.SortFunc(out, func(a, b IgnoredRoutes) int {
		return cmp.Or(cmp.Compare(a.Session, b.Session), cmp.Compare(a.Reason, b.Reason))
	})
	return out
}

// IgnoredRoutes counts the usable routes of a session whose bandwidth does not count, for one reason.
type IgnoredRoutes struct {
	IgnoredBandwidth
	Routes  uint64 // at least 1
	Example netip.Prefix
}

// Members yields the destinations of a group, in no particular order.
func (t *Table) Members(id GroupID) func(yield func(netip.Prefix) bool) {
	return func(yield func(netip.Prefix) bool) {
		g := t.groups.get(id)
		if g == nil {
			return
		}
		for d := g.members; d != nil; d = d.next {
			if !yield(d.prefix) {
				return
			}
		}
	}
}

// Destination returns the group of a destination, or false if it is unknown.
func (t *Table) Destination(prefix netip.Prefix) (GroupID, bool) {
	d, _ := t.byPrefix.get(prefix)
	if d == nil {
		return 0, false
	}
	return d.group.id, true
}

// Destinations yields every destination with its group, in order of prefix. A destination whose
// sessions are all down remains, unreachable, until one of them comes back and does not repeat it.
func (t *Table) Destinations(yield func(netip.Prefix, GroupID) bool) {
	if t.resort {
		t.sorted = t.sorted[:0]
		t.sorted = slices.AppendSeq(t.sorted, t.byPrefix.keys())
		slices.SortFunc(t.sorted, netip.Prefix.Compare)
		t.resort = false
	}
	for _, prefix := range t.sorted {
		if d, _ := t.byPrefix.get(prefix); !yield(prefix, d.group.id) {
			return
		}
	}
}

// Sessions appends the state of every session to buf[:0], in their order. It walks every group once.
func (t *Table) Sessions(buf []SessionView) []SessionView {
	out := buf[:0]
	for i := range t.sessions {
		s := &t.sessions[i]
		out = append(out, SessionView{
			Up: s.up, Generation: s.generation, Node: s.node, PeerAS: s.peerAS,
			Reason: s.reason, Communities: s.communities,
		})
	}
	for _, g := range t.groups.byID {
		if g == nil {
			continue
		}
		for i := range g.entries {
			if t.alive(&g.entries[i]) {
				out[t.order[g.entries[i].rank]].Routes.count(g.reasons[i], uint64(g.size))
			}
		}
	}
	return out
}

// SubPort returns the state of a sub-port, or the zero value if there is no such sub-port.
func (t *Table) SubPort(index int) SubPortView {
	if index < 0 || index >= len(t.subPorts) {
		return SubPortView{}
	}
	sp := &t.subPorts[index]
	v := SubPortView{Up: sp.up, Drained: sp.drained || t.planes[sp.plane].drained, Speed: sp.speed}
	switch {
	case v.Drained:
		v.Reason = ReasonDrained
	case !sp.up:
		v.Reason = ReasonLinkDown
	case sp.speed == 0:
		v.Reason = ReasonSpeedUnknown
	default:
		v.Reason = ReasonSessionDown
		for _, i := range t.order[sp.ranks.lo:sp.ranks.hi] {
			switch s := &t.sessions[i]; s.reason {
			case ReasonUsed:
				v.Reason = ReasonUsed
				return v
			case ReasonDrained: // every node at its far end that is up is drained
				v.Reason = ReasonDrained
			}
		}
	}
	return v
}

// Plane returns the state of a plane, or the zero value if there is no such plane.
func (t *Table) Plane(index int) PlaneView {
	if index < 0 || index >= len(t.planes) {
		return PlaneView{}
	}
	v := PlaneView{Drained: t.planes[index].drained}
	for i := range t.subPorts {
		if sp := &t.subPorts[i]; sp.plane == index && t.SubPort(i).Reason == ReasonUsed {
			v.Up, v.Bandwidth = true, v.Bandwidth.Add(sp.speed)
		}
	}
	return v
}

// Stats returns the table's current counters and sizes.
func (t *Table) Stats() Stats {
	s := Stats{Events: t.events, Destinations: t.byPrefix.len(), Groups: t.groups.set.n, Routes: t.live, Leftovers: t.leftovers}
	for _, g := range t.groups.byID {
		if g != nil && g.view.Origins > 1 {
			s.Conflicts += g.size
		}
	}
	for i := range t.sessions {
		c := &t.sessions[i].communities
		s.Communities.Received += c.Received
		s.Communities.Used += c.Used
		for r, n := range c.reasons {
			s.Communities.reasons[r] += n
		}
	}
	return s
}
