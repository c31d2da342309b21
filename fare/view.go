package fare

import (
	"net/netip"
	"slices"
)

// SessionView is the state of one session.
type SessionView struct {
	Up         bool
	Generation uint64     // of the current or last incarnation; 0: never up
	Node       netip.Addr // BGP identifier of the current or last neighbour
	PeerAS     uint32
	Reason     Reason // why its routes cannot count; ReasonUsed when they can
	Routes     Tally  // routes it carries now, by what became of them
	// Communities judged since the table was made, by what became of them.
	Communities Tally
}

// SubPortView is the state of one sub-port.
type SubPortView struct {
	Up      bool
	Drained bool // itself, or its plane
	Speed   Bandwidth
	Reason  Reason // why it does not count; ReasonUsed when it does
}

// PlaneView is the state of one plane.
type PlaneView struct {
	Up        bool // a sub-port counts and a session over it is up
	Drained   bool
	Bandwidth Bandwidth // sum of the sub-ports that count
}

// Stats are the table's counters and sizes.
type Stats struct {
	Events      Tally // handed to Step
	Communities Tally // judged, over all sessions
	// Destinations known, the groups they share, routes alive, and routes of
	// earlier generations that are not yet forgotten.
	Destinations, Groups, Routes, Leftovers int
}

// Group is what a group gets, zero if there is no such group.
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

// Destination is the group of a destination; false if it is unknown.
func (t *Table) Destination(prefix netip.Prefix) (GroupID, bool) {
	d := t.byPrefix[prefix]
	if d == nil {
		return 0, false
	}
	return d.group.id, true
}

// Destinations yields every destination with its group, in order of prefix. A
// destination all of whose sessions are down stays, unreachable, until one of
// them is back and does not repeat it.
func (t *Table) Destinations(yield func(netip.Prefix, GroupID) bool) {
	if t.resort {
		t.sorted = t.sorted[:0]
		for prefix := range t.byPrefix {
			t.sorted = append(t.sorted, prefix)
		}
		slices.SortFunc(t.sorted, netip.Prefix.Compare)
		t.resort = false
	}
	for _, prefix := range t.sorted {
		if !yield(prefix, t.byPrefix[prefix].group.id) {
			return
		}
	}
}

// Sessions appends the state of every session to buf[:0], in their order. It
// walks every group once.
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

// SubPort is the state of a sub-port, zero if there is no such sub-port.
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
			case ReasonDrained: // every node at its end that is up
				v.Reason = ReasonDrained
			}
		}
	}
	return v
}

// Plane is the state of a plane, zero if there is no such plane.
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

// Node is the BGP identifier of the session's current or last neighbour;
// invalid if it was never up or there is no such session.
func (t *Table) Node(index int) netip.Addr {
	if index < 0 || index >= len(t.sessions) {
		return netip.Addr{}
	}
	return t.sessions[index].node
}

// Stats are the table's counters and sizes now.
func (t *Table) Stats() Stats {
	s := Stats{Events: t.events, Destinations: len(t.byPrefix), Groups: t.groups.set.n, Routes: t.live, Leftovers: t.leftovers}
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
