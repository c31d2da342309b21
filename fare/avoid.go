package fare

import (
	"maps"
	"net/netip"
	"slices"
)

// Avoided reports whether a plane is avoided toward a destination, with or without an effect (see [Avoid]).
func (t *Table) Avoided(prefix netip.Prefix, plane int) bool {
	return len(t.avoided) > 0 && t.avoided[prefix]>>plane&1 == 1
}

// Avoidances yields the avoided planes of every destination, in order of prefix and plane.
func (t *Table) Avoidances(yield func(prefix netip.Prefix, plane int) bool) {
	for _, prefix := range slices.SortedFunc(maps.Keys(t.avoided), netip.Prefix.Compare) {
		for plane := range t.planes {
			if t.Avoided(prefix, plane) && !yield(prefix, plane) {
				return
			}
		}
	}
}

// AvoidedBy returns, by plane, the number of destinations toward which it is not used because it is avoided. It walks
// every group once.
func (t *Table) AvoidedBy() []int {
	out := make([]int, len(t.planes))
	for _, g := range t.groups.byID {
		if g == nil {
			continue
		}
		for p := range g.view.Planes {
			if g.view.Planes[p].Reason == ReasonAvoided {
				out[p] += g.size
			}
		}
	}
	return out
}

func (t *Table) avoid(e Avoid) Reason {
	if !canonical(e.Prefix) || e.Plane < 0 || e.Plane >= len(t.planes) {
		return ReasonInvalidEvent
	}
	switch before := t.avoided[e.Prefix]; {
	case t.Avoided(e.Prefix, e.Plane) == e.On:
		return ReasonUsed
	case before == 0 && len(t.avoided) == MaxAvoided:
		return ReasonFull
	case before == 1<<e.Plane:
		delete(t.avoided, e.Prefix)
	default:
		t.avoided[e.Prefix] = before ^ 1<<e.Plane
	}
	d, _ := t.byPrefix.get(e.Prefix)
	if d == nil || !slices.ContainsFunc(d.group.entries, func(x entry) bool { return t.alive(&x) }) {
		return ReasonUsed
	}
	t.keepLive(d, noRank)
	ranks := t.planes[e.Plane].ranks
	for i := range t.entries {
		if x := &t.entries[i]; x.rank >= ranks.lo && x.rank < ranks.hi {
			x.avoided = e.On
		}
	}
	t.place(d)
	return ReasonUsed
}
