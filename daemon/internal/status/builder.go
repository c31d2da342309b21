package status

import (
	"cmp"
	"net/netip"
	"slices"
	"sync/atomic"
)

const (
	// maxTombstones bounds how many removed destinations a watcher can be told of one by one.
	maxTombstones = 4096
	// maxMarked bounds what is kept for a view that nobody asks for: beyond it, Commit builds one.
	maxMarked = 1 << 15
)

// mark is what the builder knows of a destination: whether, and since which revision, the last view is out of date.
type mark struct {
	prefix   netip.Prefix
	revision uint64
	marked   bool
}

// vectorMark is the same of a vector.
type vectorMark struct {
	revision uint64
	marked   bool
}

// Builder is the loop's side of the status. All methods but Reader's belong to the loop's goroutine.
type Builder struct {
	source   Source
	instance string
	layout   *Layout

	revision uint64 // committed
	changed  bool   // something is marked in this step
	weights  bool   // ... that WeightService shows

	destinations  map[netip.Prefix]*mark
	marked        []*mark
	vectors       []vectorMark // by id
	markedVectors []uint32
	// tombstones is appended to and cut at its front: views keep slices of it, which nothing overwrites.
	tombstones []tombstone
	forgotten  uint64
	builds     uint64

	// What readers share with the loop.
	view    atomic.Pointer[View]
	latest  atomic.Uint64 // revision of the last commit
	wake    broadcast     // weights changed
	started chan struct{} // closed when the start is over
	journal journal
}

// NewBuilder returns a builder at revision 1 with no destinations. The instance names this run of the process.
func NewBuilder(source Source, layout Layout, instance string) *Builder {
	b := &Builder{
		source: source, instance: instance, layout: &layout,
		revision: 1, destinations: make(map[netip.Prefix]*mark), started: make(chan struct{}),
	}
	b.view.Store(&View{revision: 1, layout: b.layout})
	b.latest.Store(1)
	return b
}

// MarkDestination says that a destination was added, changed or removed; the source tells which when a view is built.
func (b *Builder) MarkDestination(prefix netip.Prefix) {
	m := b.destinations[prefix]
	if m == nil {
		m = &mark{prefix: prefix}
		b.destinations[prefix] = m
	}
	m.revision = b.revision + 1
	if !m.marked {
		m.marked = true
		b.marked = append(b.marked, m)
	}
	b.changed, b.weights = true, true
}

// MarkVector says that a vector was added, changed or removed, and with it every destination that uses it. Ids are small.
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

// MarkFabric says that a plane, sub-port, session or the data plane changed. They are read from the source whenever
// somebody asks, so that there is nothing to mark but the revision.
func (b *Builder) MarkFabric() { b.changed = true }

// Started says that the start is over: what is known is all there is, and watches of weights begin. More calls do nothing.
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
	b.layout = &layout
	for _, p := range b.view.Load().pages {
		for _, d := range p.items {
			b.MarkDestination(d.prefix)
		}
	}
	for id := range b.vectors {
		b.MarkVector(uint32(id))
	}
	b.changed, b.weights = true, true
}

// Event records an event for WatchEvents and the counters. Its revision is that of the next commit.
func (b *Builder) Event(e Event) {
	b.journal.add(e, b.revision+1)
	b.changed = true
}

// Commit ends a step of the loop: when the step marked something, the revision grows by one and watchers wake up. It
// returns the revision.
func (b *Builder) Commit() uint64 {
	if !b.changed {
		return b.revision
	}
	weights := b.weights
	b.changed, b.weights = false, false
	b.revision++
	if len(b.marked) > maxMarked {
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

// build makes the view of what is marked, or returns the last one when nothing is.
func (b *Builder) build() *View {
	b.Commit()
	last := b.view.Load()
	if last.revision == b.revision {
		return last
	}
	b.builds++
	next := *last
	next.revision, next.layout = b.revision, b.layout
	b.buildVectors(&next, last)
	b.buildDestinations(&next)
	b.view.Store(&next)
	return &next
}

func (b *Builder) buildVectors(next, last *View) {
	if len(b.markedVectors) == 0 {
		return
	}
	slices.Sort(b.markedVectors) // by page, so that each is copied once
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
			*slot = &vector{Vector: data, id: id, revision: m.revision}
			next.vectorCount++
		}
		next.vectorRevision = max(next.vectorRevision, m.revision)
	}
	b.markedVectors = b.markedVectors[:0]
}

func (b *Builder) buildDestinations(next *View) {
	e := edit{pages: next.pages, count: next.count, build: b.builds, shared: true}
	gone := len(b.tombstones)
	for i, m := range b.marked {
		b.marked[i] = nil
		m.marked = false
		if data, ok := b.source.Destination(m.prefix); ok {
			e.set(&destination{Destination: data, prefix: m.prefix, revision: m.revision})
			continue
		}
		delete(b.destinations, m.prefix)
		if e.remove(m.prefix) { // else nobody ever saw it
			b.tombstones = append(b.tombstones, tombstone{m.prefix, m.revision})
		}
	}
	b.marked = b.marked[:0]
	next.pages, next.count = e.pages, e.count

	// Marks were made by rising first revision, but a later step may have raised one: sort what was added.
	slices.SortFunc(b.tombstones[gone:], func(a, c tombstone) int {
		if a.revision != c.revision {
			return cmp.Compare(a.revision, c.revision)
		}
		return comparePrefix(a.prefix, c.prefix)
	})
	if over := len(b.tombstones) - maxTombstones; over > 0 {
		b.forgotten = b.tombstones[over-1].revision
		b.tombstones = b.tombstones[over:]
	}
	next.tombstones = b.tombstones[:len(b.tombstones):len(b.tombstones)]
	next.forgotten = b.forgotten
}
