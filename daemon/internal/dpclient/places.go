package dpclient

import (
	"cmp"
	"maps"
	"slices"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// places holds the vectors of the data plane, by their numbers on the wire, and assigns the owner's vectors to them.
// Invariants:
//
//   - A place has at most one owner, a vector has at most one place, and both refer to each other: w.owner.wire == w.
//     Owners are wanted.
//   - Every number below lowest is in use: it has an owner, or the data plane may have a vector there (free).
//   - w.users is the number of destinations that were last sent with w, and cohorts counts them by the vector that they
//     want.
//   - object.formers is the number of places whose former is the object.
//   - The content of a taken place is replaced only once no destination that wants another vector is on it, or would be
//     if operations in flight were refused (clear). So no destination gets weights that it does not want. Destinations
//     join a taken place only once the data plane has confirmed the owner's content (open). So none gets the previous
//     weights.
//   - While removals are held, a place with content that was read back keeps it, unless changes are released
//     (replaceable), and none is deleted.
type places struct {
	objects    *wanted
	flights    *flights
	held       bool // removals are held
	adopted    bool // while they are held: declared state counts in place of state that was read back
	wires      map[uint32]*wire
	cohorts    cohorts
	recognized map[string]uint32 // content of vectors that were read back without an owner
	lowest     uint32
	taken      []*wire   // places with taken set, and some that no longer have it
	candidates []*cohort // scratch space of changed
}

// wire is a vector in the data plane.
type wire struct {
	id      uint32
	content *farev1.Vector // once all sent operations are applied; nil if it does not exist
	effect  *farev1.Vector // confirmed
	owner   *object        // nil if it is to be deleted once no destination uses it
	former  *object        // object whose deletion is reported when the vector is deleted
	users   int            // number of destinations sent with this vector
	op      uint64         // last operation sent
	// unanswered is the number of operations on the vector in flight.
	unanswered int
	foreign    bool // was read back, and never set by this client
	refused    bool // its deletion was refused
	// clings means that the data plane refused to move a destination to another place; false once all have left.
	clings bool
	// taken means that the owner has the place from another vector, whose content or destinations may still be there:
	// see take.
	taken  bool
	closed bool // while taken: destinations may have waited for the owner's content
	bulk   bool // while taken: the operations that wait for the place are bulk
	queued bool // is in queues.deletes
	// approximate describes how effect deviates from the weights, "" if it does not.
	approximate string
}

// waits reports whether a taken place still has the content of another vector.
func (w *wire) waits() bool { return w.taken && !sameVector(w.content, w.owner.wantVector) }

// open reports whether destinations of the owner may join a place.
func (w *wire) open() bool { return !w.taken || w.unanswered == 0 && !w.waits() }

// assign gives a wanted vector a place, and reports whether it is another one; it keeps the current one if its content
// may be changed in place. left is the previous place. bulk is the lane of the change.
func (p *places) assign(o *object, bulk bool) (left *wire, other bool) {
	if w := o.wire; w != nil && p.replaceable(w, o) {
		return nil, false
	}
	left = p.orphan(o)
	w := p.recognize(o)
	if w == nil {
		w = p.allocate(o.Vector)
	}
	p.own(o, w, bulk)
	return left, true
}

// replaceable reports whether the content of a place may become o's wanted content. It may if it is equal already;
// otherwise, while removals are held, only if this client programmed it or changes are released, and never from one
// source to another.
func (p *places) replaceable(w *wire, o *object) bool {
	return sameVector(w.content, o.wantVector) ||
		(!p.held || !w.foreign || p.adopted) && (w.content == nil || w.content.Source == o.wantVector.Source)
}

// own makes o the owner of a place. A place that exists is taken, unless its confirmed content is o's, and all
// destinations want o.
func (p *places) own(o *object, w *wire, bulk bool) {
	w.owner, o.wire = o, w
	if w.content == nil {
		p.setFormer(w, nil)
		return
	}
	w.taken, w.bulk = true, bulk
	if w.closed = !w.open(); !w.closed {
		p.setFormer(w, nil)
		w.taken = !p.clear(w, o)
	}
	if w.taken && !slices.Contains(p.taken, w) {
		p.taken = append(p.taken, w)
	}
}

// orphan releases a vector's place and returns it, nil if the data plane has none.
func (p *places) orphan(o *object) *wire {
	w := o.wire
	if w == nil {
		return nil
	}
	o.wire, w.owner, w.taken = nil, nil, false
	if w.content == nil { // never sent, or refused
		p.forget(w)
		return nil
	}
	if !o.wanted {
		p.setFormer(w, o)
	}
	return w
}

// setFormer replaces the object whose deletion is reported when a place is cleared; nil means none. The previous one no
// longer waits for this place.
func (p *places) setFormer(w *wire, o *object) {
	prev := w.former
	if prev == o {
		return
	}
	if w.former = o; o != nil {
		o.formers++
	}
	if prev != nil {
		prev.formers--
		p.objects.settle(prev)
		p.objects.drop(prev)
	}
}

// recognize finds a vector on the wire that has no owner and o's wanted content; nil if there is none.
func (p *places) recognize(o *object) *wire {
	matches := func(w *wire) bool {
		return w != nil && w.owner == nil && w.content != nil && sameVector(w.content, o.wantVector)
	}
	if w := p.wires[o.Vector]; matches(w) {
		return w
	}
	if len(p.recognized) == 0 {
		return nil
	}
	key := contentKey(o.wantVector)
	w := p.wires[p.recognized[key]]
	delete(p.recognized, key)
	if matches(w) {
		return w
	}
	return nil
}

// allocate returns an unused place: the owner's own number if it is free, else the lowest free one.
func (p *places) allocate(wish uint32) *wire {
	id := wish
	if !p.free(id) {
		for !p.free(p.lowest) {
			p.lowest++
		}
		id = p.lowest
	}
	w := p.wires[id]
	if w == nil {
		w = &wire{id: id}
		p.wires[id] = w
	}
	w.foreign, w.refused = false, false
	return w
}

// free reports whether a number may be assigned to another vector: its deletion, if there was one, is confirmed.
func (p *places) free(id uint32) bool {
	w := p.wires[id]
	return w == nil || w.owner == nil && w.content == nil && w.effect == nil
}

// vacate records that a place may have become free.
func (p *places) vacate(w *wire) {
	if p.free(w.id) {
		p.lowest = min(p.lowest, w.id)
	}
}

// forget drops a place that is no longer used.
func (p *places) forget(w *wire) {
	p.vacate(w)
	if w.owner == nil && w.content == nil && w.effect == nil && w.users == 0 && p.wires[w.id] == w {
		delete(p.wires, w.id)
		p.setFormer(w, nil)
	}
}

// removable reports whether a vector is to be deleted now.
func (p *places) removable(w *wire) bool {
	return p.objects.connected && !p.held && w.owner == nil && w.content != nil && w.users == 0 && !w.refused
}

// setSent moves a destination between places, and returns the one that it leaves, nil if there is none.
func (p *places) setSent(o *object, v value) *wire {
	before := o.sent.to
	o.sent = v
	if v.to == before {
		return nil
	}
	p.cohorts.place(o)
	if w := p.wires[v.to]; w != nil {
		w.users++
	}
	w := p.wires[before]
	if w != nil {
		w.users--
		if w.users == 0 {
			w.refused, w.clings = false, false
		}
	}
	return w
}

// class returns the class of the operation that o needs now, or classes if it needs none.
func (p *places) class(o *object) Class {
	if !p.objects.connected || o.refusal != nil {
		return classes
	}
	switch o.Kind {
	case KindSubPort:
		if o.wanted && (!o.sent.known || o.sent.up != o.wantUp) {
			return SubPortSet
		}
	case KindVector:
		if o.wanted && !sameVector(o.wire.content, o.wantVector) && (!o.wire.taken || p.clear(o.wire, o)) {
			return VectorSet
		}
	case KindDestination:
		if !o.wanted {
			if o.sent.to != 0 && !p.held {
				return DestinationDelete
			}
			return classes
		}
		w := p.objects.target(o)
		switch {
		case w == nil:
			return DestinationSet // blocks when its turn comes
		case p.held && !p.adopted && !o.touched && o.sent.to != 0 && o.sent.to != w.id:
			return classes
		case o.sent.to != w.id && !w.open():
			return classes
		case o.sent.to != w.id || o.repin:
			return DestinationSet
		}
	}
	return classes
}

// adopt replaces the places by those that were read back. Each vector keeps its place if the content there is its own
// or may become it; all others have none.
func (p *places) adopt(have State, vectors []*object, bulk bool) {
	before := p.wires
	p.wires, p.lowest, p.cohorts = make(map[uint32]*wire, len(have.Vectors)), 1, newCohorts()
	for id, content := range have.Vectors {
		old := before[id]
		p.wires[id] = &wire{id: id, content: content, effect: content, foreign: old == nil || old.foreign, approximate: have.Approximate[id]}
		if old != nil && old.owner == nil {
			p.setFormer(p.wires[id], old.former)
		}
	}
	for _, w := range before {
		p.setFormer(w, nil)
	}
	for o := range p.objects.destinations.all() {
		if w := p.wires[o.sent.to]; w != nil {
			w.users++
		}
		o.cohort = nil
		if p.cohorts.place(o); o.cohort != nil && len(o.drain) > 0 {
			o.cohort.drains = true
		}
	}
	for _, o := range vectors {
		prev := o.wire
		if o.wire = nil; prev == nil || !o.wanted {
			continue
		}
		if w := p.wires[prev.id]; w != nil && p.replaceable(w, o) {
			p.own(o, w, bulk)
		}
	}
	clear(p.recognized)
	for _, w := range p.sorted() {
		if key := contentKey(w.content); w.owner == nil && key != "" {
			if _, known := p.recognized[key]; !known {
				p.recognized[key] = w.id
			}
		}
	}
}

func (p *places) sorted() []*wire {
	return slices.SortedFunc(maps.Values(p.wires), func(x, y *wire) int { return cmp.Compare(x.id, y.id) })
}
