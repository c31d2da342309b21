package status

import (
	"cmp"
	"slices"
	"sync/atomic"

	"github.com/fared/fared/internal/prefixmap"
)

const (
	// maxTombstones is the number of removed destinations that a watcher can receive individually.
	maxTombstones = 4096
	// maxMarked bounds the marks that accumulate without a request for a view: beyond it, Commit builds a view.
	maxMarked = 1 << 15
	// keptMarks is the number of marks whose memory is kept for the next ones; that of a burst is released.
	keptMarks = 1 << 8
)

// vectorMark is the builder's state of a vector: whether the last view is outdated, and since which revision.
type vectorMark struct {
	revision uint64
	marked   bool
}

// Builder is the loop's side of the status. Only the loop's goroutine may call its methods, except Reader.
type Builder struct {
	source   Source
	instance string
	layout   *Layout

	revision uint64 // committed
	changed  bool   // the current step has marked an object
	weights  bool   // the current step has marked an object that WeightService shows

	// destinations has the destinations that the last view is outdated for, and the revisions of their last changes.
	destinations  prefixmap.Map[int, uint64]
	marked        []Key        // keys of destinations, in the order of their first marks
	vectors       []vectorMark // by id
	markedVectors []uint32
	// tombstones is appended to and cut at its front: views keep slices of it, which are never overwritten.
	tombstones []tombstone
	forgotten  uint64
	// restructured means that the last view has another structure than layout.
	restructured bool
	regrouped    uint64 // revision at which the source groups received their current loopbacks
	builds       uint64

	// Shared between readers and the loop.
	view    atomic.Pointer[View]
	latest  atomic.Uint64 // revision of the last commit
	wake    broadcast     // weights changed
	eager   atomic.Bool   // a follower waits for the view of the next change of weights
	started chan struct{} // closed when the start is complete
	journal journal
}

// NewBuilder returns a builder at revision 1 with no destinations. The instance names this run of the process.
func NewBuilder(source Source, layout Layout, instance string) *Builder {
	b := &Builder{
		source: source, instance: instance, layout: &layout,
		revision: 1, started: make(chan struct{}),
	}
	b.view.Store(&View{revision: 1, layout: b.layout})
	b.latest.Store(1)
	return b
}

// MarkDestination reports that a destination was added, changed or removed; the source distinguishes the cases when a
// view is built.
func (b *Builder) MarkDestination(key Key) {
	revision, added := b.destinations.Add(key.Source, key.Prefix)
	if added {
		b.marked = append(b.marked, key)
	}
	*revision = b.revision + 1
	b.changed, b.weights = true, true
}

// MarkVector reports that a vector was added, changed or removed, which also changes every destination that uses it.
// IDs are small.
func (b *Builder) MarkVector(id uint32) {
	if int(id) >= len(b.vectors) {
		b.vectors = append(b.vectors, make([]vectorMark, int(id)+1-len(b.vectors))...)
	}
	m := &b.vectors[id]
	m.revision = b.revision + 1
	if !m.marked {
		m.marked = true
		b.markedVectors = append(b.markedVectors, id)
	}
	b.changed, b.weights = true, true
}

// MarkFabric reports that a plane, sub-port, session or the data plane has changed. Each request reads them from the
// source, so only the revision needs a mark.
func (b *Builder) MarkFabric() { b.changed = true }

// Started reports that the start is complete: the known state is complete, and watches of weights begin. Further calls
// do nothing.
func (b *Builder) Started() {
	select {
	case <-b.started:
	default:
		close(b.started)
		b.changed = true
	}
}

// SetLayout replaces the names behind indexes, and so changes every destination.
func (b *Builder) SetLayout(layout Layout) {
	if !slices.Equal(b.layout.sources(), layout.sources()) {
		b.regrouped = b.revision + 1
	}
	b.layout = &layout
	for _, p := range b.view.Load().pages {
		for _, d := range p.items {
			b.MarkDestination(d.key)
		}
	}
	for id := range b.vectors {
		b.MarkVector(uint32(id))
	}
	b.changed, b.weights = true, true
}

// Restructure is SetLayout for other source groups, or other planes or sub-ports of them: keys of destinations and
// indexes in vectors get another meaning. The caller then marks all destinations.
func (b *Builder) Restructure(layout Layout) {
	b.layout, b.regrouped, b.restructured = &layout, b.revision+1, true
	b.clearMarks()
	for id := range b.vectors {
		b.MarkVector(uint32(id))
	}
	b.changed, b.weights = true, true
}

// Outdate reports that the last view is outdated, before the marks that say why: views that are requested from now on
// are built after the next commit.
func (b *Builder) Outdate() {
	b.revision++
	b.latest.Store(b.revision)
}

// Event records an event for WatchEvents and the counters. Its revision is that of the next commit.
func (b *Builder) Event(e Event) {
	b.journal.add(e, b.revision+1)
	b.changed = true
}

// Commit ends a step of the loop: if the step marked an object, the revision grows by one and watchers wake up. It
// returns the revision.
func (b *Builder) Commit() uint64 {
	if !b.changed {
		return b.revision
	}
	weights := b.weights
	b.changed, b.weights = false, false
	b.revision++
	if len(b.marked) > maxMarked || weights && b.eager.Swap(false) {
		b.build()
	}
	b.latest.Store(b.revision)
	b.journal.publish()
	if weights {
		b.wake.all()
	}
	return b.revision
}

// Revision returns the revision of the last commit.
func (b *Builder) Revision() uint64 { return b.revision }

// build creates a view from the marks, or returns the last one if there are none.
func (b *Builder) build() *View {
	b.Commit()
	last := b.view.Load()
	if last.revision == b.revision {
		return last
	}
	b.builds++
	next := *last
	next.revision, next.layout, next.regrouped = b.revision, b.layout, b.regrouped
	if b.restructured {
		b.restructured = false
		next.pages, next.count, b.tombstones, b.forgotten = nil, 0, nil, b.regrouped
	}
	b.buildVectors(&next, last)
	b.buildDestinations(&next)
	b.view.Store(&next)
	return &next
}

func (b *Builder) buildVectors(next, last *View) {
	if len(b.markedVectors) == 0 {
		return
	}
	slices.Sort(b.markedVectors) // by page, so that each page is copied once
	next.vectors = slices.Clone(last.vectors)
	if n := (len(b.vectors) + vectorPageSize - 1) / vectorPageSize; n > len(next.vectors) {
		next.vectors = append(next.vectors, make([]*vectorPage, n-len(next.vectors))...)
	}
	copied := -1
	for _, id := range b.markedVectors {
		m := &b.vectors[id]
		m.marked = false
		i, j := int(id/vectorPageSize), id%vectorPageSize
		if copied != i {
			copied = i
			fresh := new(vectorPage)
			if old := next.vectors[i]; old != nil {
				*fresh = *old
			}
			next.vectors[i] = fresh
		}
		slot := &next.vectors[i][j]
		if *slot != nil {
			next.vectorCount--
		}
		*slot = nil
		if data, ok := b.source.Vector(id); ok {
			*slot = &vector{Vector: data, revision: m.revision}
			next.vectorCount++
		}
		next.vectorRevision = max(next.vectorRevision, m.revision)
	}
	b.markedVectors = b.markedVectors[:0]
}

func (b *Builder) buildDestinations(next *View) {
	e := edit{pages: next.pages, count: next.count, build: b.builds, shared: true}
	gone := len(b.tombstones)
	for _, key := range b.marked {
		revision := *b.destinations.Get(key.Source, key.Prefix)
		if data, ok := b.source.Destination(key); ok {
			e.set(&destination{Destination: data, key: key, revision: revision})
		} else if e.remove(key) { // otherwise no view ever contained it
			b.tombstones = append(b.tombstones, tombstone{key, revision})
		}
	}
	b.clearMarks()
	next.pages, next.count = e.pages, e.count

	// Marks are in order of their first revision, but a later step may have raised a mark's revision, so sort the new
	// tombstones.
	slices.SortFunc(b.tombstones[gone:], func(a, c tombstone) int {
		if a.revision != c.revision {
			return cmp.Compare(a.revision, c.revision)
		}
		return compareKeys(a.key, c.key)
	})
	if over := len(b.tombstones) - maxTombstones; over > 0 {
		b.forgotten = b.tombstones[over-1].revision
		b.tombstones = b.tombstones[over:]
	}
	next.tombstones = b.tombstones[:len(b.tombstones):len(b.tombstones)]
	next.forgotten = b.forgotten
}

func (b *Builder) clearMarks() {
	if len(b.marked) > keptMarks {
		b.marked, b.destinations = nil, prefixmap.Map[int, uint64]{}
		return
	}
	b.marked = b.marked[:0]
	b.destinations.Clear()
}
