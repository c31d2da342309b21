package status

import (
	"cmp"
	"iter"
	"maps"
	"net/netip"
	"slices"
	"sync/atomic"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// vectorPageSize is the number of vectors that a build copies for one change.
const vectorPageSize = 64

// vector is a weight vector in a view. Immutable, except for a cache of its protobuf messages.
type vector struct {
	Vector
	revision uint64
	// pictures caches fare.v1.PlaneWeight lists: [1] for destinations whose own change is in effect, [0] for others.
	// Messages share them; they must not be modified.
	pictures [2]atomic.Pointer[[]*farev1.PlaneWeight]
}

type vectorPage [vectorPageSize]*vector

// tombstone records a removed destination.
type tombstone struct {
	key      Key
	revision uint64
}

// View is the weights at one revision. Immutable: any goroutine may read it at any time.
type View struct {
	revision uint64
	layout   *Layout
	pages    pages
	count    int
	vectors  []*vectorPage
	// vectorCount is the number of vectors; vectorRevision is their latest revision.
	vectorCount    int
	vectorRevision uint64
	// tombstones are in order of revision; those up to and including revision forgotten are incomplete.
	tombstones []tombstone
	forgotten  uint64
	// regrouped is the revision at which the source groups received their current loopbacks.
	regrouped uint64
}

// Revision returns the view's revision; the first is 1.
func (v *View) Revision() uint64 { return v.revision }

// Tally counts known destinations, and those with weights.
type Tally struct{ Destinations, Reachable int }

// Tally counts destinations by source group, and over all source groups, where each prefix counts once. It iterates
// over all destinations.
func (v *View) Tally() (all Tally, groups []Tally) {
	groups = make([]Tally, len(v.layout.Groups))
	var last netip.Prefix
	reached := false // last is known to be reachable
	for _, p := range v.pages {
		for _, d := range p.items {
			if d.key.Prefix != last {
				last, reached = d.key.Prefix, false
				all.Destinations++
			}
			g := &groups[d.key.Source]
			g.Destinations++
			if w := v.vector(d.Vector); w != nil && w.Reachable {
				g.Reachable++
				if !reached {
					reached = true
					all.Reachable++
				}
			}
		}
	}
	return all, groups
}

// planeWeights returns the share of each plane in the weights, from 0 to 1, by the plane's name: the mean over all
// reachable destinations of all source groups. It iterates over all destinations.
func (v *View) planeWeights() map[string]float64 {
	type use struct {
		vector uint32
		source int
	}
	users := map[use]int{}
	for _, p := range v.pages {
		for _, d := range p.items {
			users[use{d.Vector, d.key.Source}]++
		}
	}
	out, all := map[string]float64{}, 0.0
	// In a fixed order, so that the same weights have the same sums.
	for _, u := range slices.SortedFunc(maps.Keys(users), func(a, b use) int { return cmp.Or(cmp.Compare(a.vector, b.vector), cmp.Compare(a.source, b.source)) }) {
		w, n := v.vector(u.vector), users[u]
		if w == nil || !w.Reachable {
			continue
		}
		var sum uint64
		for _, p := range w.Planes {
			sum += uint64(p.Weight)
		}
		if sum == 0 {
			continue
		}
		all += float64(n)
		for i, p := range w.Planes {
			out[v.layout.Groups[u.source].Planes[i].Name] += float64(n) * float64(p.Weight) / float64(sum)
		}
	}
	for name := range out {
		out[name] /= all
	}
	return out
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

// selected yields the destinations that the filter selects, in address order, after the given key; an invalid key means
// from the beginning.
func (v *View) selected(f *filter, after Key) iter.Seq[*destination] {
	return f.selected(v.pages, after, 0)
}

// changed yields the selected destinations that changed after the revision, in address order.
func (v *View) changed(f *filter, since uint64) iter.Seq[*destination] {
	skip := since
	if v.vectorRevision > since {
		skip = 0 // a page does not contain its vectors' revisions
	}
	return func(yield func(*destination) bool) {
		for d := range f.selected(v.pages, Key{}, skip) {
			if v.revisionOf(d) > since && !yield(d) {
				return
			}
		}
	}
}

// removed returns the selected destinations that were removed after the revision, in address order, or false if that
// information is incomplete.
func (v *View) removed(f *filter, since uint64) ([]Key, bool) {
	if since < v.forgotten {
		return nil, false
	}
	i, _ := slices.BinarySearchFunc(v.tombstones, since+1, func(t tombstone, revision uint64) int {
		if t.revision < revision {
			return -1
		}
		return 1
	})
	var out []Key
	for _, t := range v.tombstones[i:] {
		if f.matches(t.key) && v.pages.get(t.key) == nil {
			out = append(out, t.key)
		}
	}
	slices.SortFunc(out, compareKeys)
	return slices.Compact(out), true
}
