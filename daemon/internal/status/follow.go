package status

import (
	"iter"
	"net/netip"
)

// Started returns a channel that is closed when the daemon's start is complete: until then a view may lack
// destinations.
func (r *Reader) Started() <-chan struct{} { return r.b.started }

// Changed returns a channel that is closed by the next change of weights. Call it before View, so that no change is
// missed.
func (r *Reader) Changed() <-chan struct{} { return r.b.wake.wait() }

// Next is Changed for the follower of all views: the loop builds the view of that change before it closes the channel,
// so that View needs no further answer of the loop.
func (r *Reader) Next() <-chan struct{} {
	r.b.eager.Store(true)
	return r.b.wake.wait()
}

// Layout returns the names behind indexes. It must not be modified.
func (v *View) Layout() *Layout { return v.layout }

// PairSources returns the loopbacks that have pairs with a destination: those of its family.
func (g *LayoutGroup) PairSources(dst netip.Addr) []netip.Prefix { return g.pairsOf(dst, nil) }

// Find returns a vector, or nil. It must not be modified.
func (v *View) Find(id uint32) *Vector {
	if w := v.vector(id); w != nil {
		return &w.Vector
	}
	return nil
}

// VectorsSince yields the vectors that differ from those of an earlier view, nil for a removed one; all vectors if prev
// is nil. It skips pages that the views share, so its cost follows the number of changes.
func (v *View) VectorsSince(prev *View) iter.Seq2[uint32, *Vector] {
	return func(yield func(uint32, *Vector) bool) {
		for i, page := range v.vectors {
			var old *vectorPage
			if prev != nil && i < len(prev.vectors) {
				old = prev.vectors[i]
			}
			if page == nil || page == old {
				continue
			}
			for j, w := range page {
				var before *vector
				if old != nil {
					before = old[j]
				}
				var out *Vector
				if w != nil {
					out = &w.Vector
				}
				if w != before && !yield(uint32(i*vectorPageSize+j), out) {
					return
				}
			}
		}
	}
}

// DestinationsSince yields, in address order, the destinations that have changed since an earlier view, apart from
// their vectors, and those whose vector is among the given ones; all destinations if prev is nil. The results must not
// be modified.
func (v *View) DestinationsSince(prev *View, vectors map[uint32]bool) iter.Seq2[Key, *Destination] {
	var since, skip uint64
	if prev != nil {
		since = prev.revision
		if len(vectors) == 0 {
			skip = since
		}
	}
	return func(yield func(Key, *Destination) bool) {
		for d := range (&filter{}).selected(v.pages, Key{}, skip) {
			if (d.revision > since || vectors[d.Vector]) && !yield(d.key, &d.Destination) {
				return
			}
		}
	}
}

// RemovedSince returns the destinations that were removed since an earlier view, or false if that is no longer known.
func (v *View) RemovedSince(prev *View) ([]Key, bool) { return v.removed(&filter{}, prev.revision) }

// VectorOf returns the vector of a destination, or nil. It must not be modified.
func (v *View) VectorOf(key Key) *Vector {
	d := v.pages.get(key)
	if d == nil {
		return nil
	}
	return v.Find(d.Vector)
}
