package fare

import (
	"net/netip"
	"slices"
)

// readvertised is a leaf's readvertisement of one destination.
type readvertised struct {
	bandwidth Bandwidth
	path      []uint32
	// communities are those of the route that provides path, as received.
	communities []Community
	signals     Signals       // of that route
	extended    IPv6Community // of that route
}

func (t *Table) readvertisedOf(prefix netip.Prefix) *readvertised {
	if d, _ := t.byPrefix.get(prefix); d != nil {
		return d.readvertised
	}
	return nil
}

// Readvertise returns a leaf's advertisement for prefix: the sum of b(n) over the used
// nodes (draft-ietf-bess-ebgp-dmz: a node that changes the next hop recomputes the value)
// and the AS path of its best route, as received. A leaf uses only the routes with the
// shortest path; the best of them is the lowest node's, then the lowest session's. It
// returns false if nothing is to be advertised: the prefix is unknown or unreachable, or
// the role is not leaf. The caller must not modify the path.
func (t *Table) Readvertise(prefix netip.Prefix) (Bandwidth, []uint32, bool) {
	if r := t.readvertisedOf(prefix); r != nil {
		return r.bandwidth, r.path, true
	}
	return 0, nil, false
}

// ReadvertisedCommunities returns the extended communities of the route whose AS path
// [Table.Readvertise] returns, as received, for a leaf that keeps them, or none if there is
// no such route. The caller must not modify them.
func (t *Table) ReadvertisedCommunities(prefix netip.Prefix) ([]Community, IPv6Community) {
	if r := t.readvertisedOf(prefix); r != nil {
		return r.communities, r.extended
	}
	return nil, IPv6Community{}
}

// ReadvertisedSignals returns the signals of the route whose AS path [Table.Readvertise] returns. A leaf uses such a
// route where no other is left, and its neighbors may have another.
func (t *Table) ReadvertisedSignals(prefix netip.Prefix) Signals {
	if r := t.readvertisedOf(prefix); r != nil {
		return r.signals
	}
	return 0
}

// updateReadvertisement computes the readvertisement of d and appends a [Change] if it differs from the
// previous one.
func (t *Table) updateReadvertisement(d *destination) {
	now, ok := t.readvertisementOf(d)
	if before := d.readvertised; before == nil && !ok || before != nil && ok && before.equal(&now) {
		return
	}
	if d.readvertised = nil; ok {
		kept := now
		d.readvertised = &kept
	}
	t.changes = append(t.changes, Change{Kind: Readvertise, Destination: d.prefix})
}

// readvertisementOf computes the readvertisement of d, or returns false if there is none.
func (t *Table) readvertisementOf(d *destination) (now readvertised, ok bool) {
	g := d.group
	if !g.view.Reachable {
		return now, false
	}
	for i := range g.view.Planes {
		now.bandwidth = now.bandwidth.Add(g.view.Planes[i].Bandwidth)
	}
	var best *session
	for i := range g.entries {
		if g.reasons[i] != ReasonUsed {
			continue
		}
		s, attrs := &t.sessions[t.order[g.entries[i].rank]], d.sets[i].attrs
		if best == nil || s.node.Less(best.node) {
			best, now.path, now.communities, now.signals, now.extended = s, attrs.ASPath, attrs.Communities, attrs.Signals, attrs.Extended
		}
	}
	return now, true
}

func (r *readvertised) equal(other *readvertised) bool {
	return r.bandwidth == other.bandwidth && slices.Equal(r.path, other.path) && slices.Equal(r.communities, other.communities) &&
		r.signals == other.signals && r.extended == other.extended
}

// tellTouched calls tell for every destination with an entry in r, in order of prefix. A
// leaf readvertises each of them, so the cost is O(destinations).
func (t *Table) tellTouched(r rankRange) {
	from := len(t.changes)
	for _, g := range t.groups.byID {
		if g == nil || !g.touches(r) {
			continue
		}
		for d := g.members; d != nil; d = d.next {
			t.updateReadvertisement(d)
		}
	}
	slices.SortFunc(t.changes[from:], func(a, b Change) int { return a.Destination.Compare(b.Destination) })
}
