package status

import (
	"iter"
	"net/netip"
	"slices"
	"sync/atomic"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// vectorPageSize is how many vectors a build copies for one change.
const vectorPageSize = 64

// vector is a weight vector in a view. Immutable, but for a cache of its picture in protobuf.
type vector struct {
	Vector
	id       uint32
	revision uint64
	// pictures are fare.v1.PlaneWeight lists made on first use: [1] for destinations whose own change is in effect, [0]
	// for others. Messages share them; nobody changes them.
	pictures [2]atomic.Pointer[[]*farev1.PlaneWeight]
}

type vectorPage [vectorPageSize]*vector

// tombstone remembers a destination that is gone.
type tombstone struct {
	prefix   netip.Prefix
	revision uint64
}

// View is the weights at one revision. Immutable: any goroutine may read it, for as long as it likes.
type View struct {
	revision uint64
	layout   *Layout
	pages    pages
	count    int
	vectors  []*vectorPage
	// vectorCount counts vectors; vectorRevision is the latest revision of any.
	vectorCount    int
	vectorRevision uint64
	// tombstones by rising revision; those up to and including revision forgotten are no longer complete.
	tombstones []tombstone
	forgotten  uint64
}

// Revision returns the revision that the view shows; the first is 1.
func (v *View) Revision() uint64 { return v.revision }

// Destinations returns the number of destinations.
func (v *View) Destinations() int { return v.count }

// Reachable returns the number of destinations that have weights. It looks at each.
func (v *View) Reachable() int {
	n := 0
	for _, p := range v.pages {
		for _, d := range p.items {
			if w := v.vector(d.Vector); w != nil && w.Reachable {
				n++
			}
		}
	}
	return n
}

// Vectors returns the number of distinct weight vectors.
func (v *View) Vectors() int { return v.vectorCount }

// vector returns a vector, or nil.
func (v *View) vector(id uint32) *vector {
	if i := int(id / vectorPageSize); i < len(v.vectors) && v.vectors[i] != nil {
		return v.vectors[i][id%vectorPageSize]
	}
	return nil
}

// revisionOf returns the revision of the last change of a destination or of its vector.
func (v *View) revisionOf(d *destination) uint64 {
	if w := v.vector(d.Vector); w != nil {
		return max(d.revision, w.revision)
	}
	return d.revision
}

// selected yields what the filter selects, in address order, after the given key; an invalid key: from the beginning.
func (v *View) selected(f *filter, after netip.Prefix) iter.Seq[*destination] {
	return f.selected(v.pages, after, 0)
}

// changed yields what the filter selects and changed after the revision, in address order.
func (v *View) changed(f *filter, since uint64) iter.Seq[*destination] {
	skip := since
	if v.vectorRevision > since {
		skip = 0 // a page does not know its vectors' revisions
	}
	return func(yield func(*destination) bool) {
		for d := range f.selected(v.pages, netip.Prefix{}, skip) {
			if v.revisionOf(d) > since && !yield(d) {
				return
			}
		}
	}
}

// removed returns what the filter selects and was removed after the revision, in address order, or false when that is
// no longer known.
func (v *View) removed(f *filter, since uint64) ([]netip.Prefix, bool) {
	if since < v.forgotten {
		return nil, false
	}
	i, _ := slices.BinarySearchFunc(v.tombstones, since+1, func(t tombstone, revision uint64) int {
		if t.revision < revision {
			return -1
		}
		return 1
	})
	var out []netip.Prefix
	for _, t := range v.tombstones[i:] {
		if f.matches(t.prefix) && v.pages.get(t.prefix) == nil {
			out = append(out, t.prefix)
		}
	}
	slices.SortFunc(out, comparePrefix)
	return slices.Compact(out), true
}
