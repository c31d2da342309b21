package fare

import (
	"net/netip"
	"slices"
)

// readvertised is what a leaf passes on about one destination.
type readvertised struct {
	ok        bool
	bandwidth Bandwidth
	path      []uint32
}

// Readvertise is what a leaf advertises for prefix: the sum of b(n) over the
// nodes it uses (draft-ietf-bess-ebgp-dmz: a node that changes the next hop
// recomputes the value) and the AS path of its best route, as received: of the
// shortest, which are all it uses, the lowest node's, then the lowest
// session's. False means to advertise nothing: the prefix is unknown or unreachable, or the
// role is not leaf. The path must not be changed.
func (t *Table) Readvertise(prefix netip.Prefix) (Bandwidth, []uint32, bool) {
	d := t.byPrefix[prefix]
	if d == nil || !d.told.ok {
		return 0, nil, false
	}
	return d.told.bandwidth, d.told.path, true
}

// tell works out what is readvertised for d and reports a change.
func (t *Table) tell(d *destination) {
	var now readvertised
	g := d.group
	if g.view.Reachable {
		now.ok = true
		for i := range g.view.Planes {
			now.bandwidth = now.bandwidth.Add(g.view.Planes[i].Bandwidth)
		}
		var best *session
		for i := range g.entries {
			if g.reasons[i] != ReasonUsed {
				continue
			}
			s, path := &t.sessions[t.order[g.entries[i].rank]], d.sets[i].attrs.ASPath
			if best == nil || s.node.Less(best.node) {
				best, now.path = s, path
			}
		}
	}
	if now.ok != d.told.ok || now.bandwidth != d.told.bandwidth || !slices.Equal(now.path, d.told.path) {
		d.told = now
		t.changes = append(t.changes, Change{Kind: Readvertise, Destination: d.prefix})
	}
}

// tellTouched does every destination with an entry in r, in order of prefix.
// A leaf has something to send for each, so this is O(destinations).
func (t *Table) tellTouched(r rankRange) {
	from := len(t.changes)
	for _, g := range t.groups.byID {
		if g == nil || !g.touches(r) {
			continue
		}
		for d := g.members; d != nil; d = d.next {
			t.tell(d)
		}
	}
	slices.SortFunc(t.changes[from:], func(a, b Change) int { return a.Destination.Compare(b.Destination) })
}
