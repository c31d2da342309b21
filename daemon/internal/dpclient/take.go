package dpclient

import (
	"slices"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// A destination that changes its vector costs an operation. If nearly all destinations of a place on the wire change to the same vector, the
// vector takes the place instead: one operation replaces the content, and the destinations stay. Invariants:
//
//   - The content of a taken place is replaced only once no destination that wants another vector is on it, or would be if operations in flight
//     were refused (clear). So no destination gets weights that it does not want.
//   - Destinations join a taken place only once the data plane has confirmed the owner's content (open). So none gets the previous weights.

// commit ends a transaction: it determines the places on the wire, and queues the operations that are still needed.
func (b *book) commit() {
	if b.connected {
		b.takeChanged()
		b.review()
	}
	for i, o := range b.moved {
		b.moved[i], o.moved = nil, false
		b.mark(o)
	}
	b.moved = b.moved[:0]
	if cap(b.moved) > keep {
		b.moved = nil
	}
}

// move records that the open transaction has declared a destination.
func (b *book) move(o *object) {
	if !o.moved {
		o.moved = true
		b.moved = append(b.moved, o)
	}
}

// takeChanged takes places for the vectors of the cohorts that have changed.
func (b *book) takeChanged() {
	changed := b.cohorts.drain(b.candidates[:0])
	slices.SortFunc(changed, compareCohorts)
	for _, c := range changed {
		b.takePlace(c)
	}
	clear(changed)
	b.candidates = changed[:0]
}

// takeAll takes places for the vectors of all cohorts.
func (b *book) takeAll() {
	for _, c := range b.cohorts.byKey {
		b.cohorts.note(c)
	}
	b.takeChanged()
	b.review()
}

// takePlace moves a cohort's vector to the cohort's place on the wire, if that saves operations.
func (b *book) takePlace(c *cohort) {
	w, o := b.wires[c.wire], b.vectors[c.vector]
	if w == nil || o == nil || !o.wanted || o.wire == nil || o.wire == w || w.content == nil || c.drains || !b.saves(w, o) {
		return
	}
	same := sameVector(w.content, o.wantVector)
	if !same && (b.held && !b.adopted && w.foreign || slices.ContainsFunc(o.wantVector.Slots, (*farev1.VectorSlot).GetDrainBeforeMove)) {
		return
	}
	if !same && !b.clear(w, o) && !b.mayWait(w, o) {
		return
	}
	prev := w.owner
	if prev != nil {
		prev.wire, w.owner = nil, nil
	}
	b.orphan(o)
	b.own(o, w)
	if b.pinning && !samePlaces(w.content, o.wantVector) {
		for _, d := range o.wanters {
			d.repin = d.repin || d.sent.to == w.id
		}
	}
	b.mark(o)
	for _, d := range o.wanters {
		b.mark(d)
	}
	if prev != nil && prev.wanted {
		b.place(prev)
		b.mark(prev)
	}
}

// saves reports whether fewer operations result if a vector's place is w: destinations may have to leave w or join it, the owner of w may need
// another place, and the vector's present one is removed. A destination that has to leave delays all others, so it takes more than one that stays.
func (b *book) saves(w *wire, o *object) bool {
	stay := b.cohorts.size(w.id, o.Vector)
	cost := 2 * (w.users - stay)
	if own := o.wire; own != w {
		cost += 2 * b.cohorts.size(own.id, o.Vector)
		if own.content != nil {
			cost++
		}
		if w.owner != nil && w.owner.wanted {
			cost++
		}
	}
	return stay > cost
}

// clear reports whether every destination that is on w, or may be if operations in flight are refused, wants the vector o.
func (b *book) clear(w *wire, o *object) bool {
	if b.cohorts.size(w.id, o.Vector) != w.users {
		return false
	}
	for i := range b.flights.len() {
		if f := b.flights.at(i); f.from == w && !f.done && f.object.wantTo != o.Vector {
			return false
		}
	}
	return true
}

// mayWait reports whether the vector o may wait until the other destinations have left w. They must be able to: removals are not held, the data
// plane has refused none of them, and they wait for no vector that waits for them. So only one vector of a source waits at a time.
func (b *book) mayWait(w *wire, o *object) bool {
	return !b.held && !w.clings && !slices.ContainsFunc(b.taken, func(other *wire) bool {
		return other != w && other.waits() && other.owner.wantVector.Source == o.wantVector.Source && !b.clear(other, other.owner)
	})
}

// waits reports whether a taken place still has the content of another vector.
func (w *wire) waits() bool { return w.taken && !sameVector(w.content, w.owner.wantVector) }

// open reports whether destinations of the owner may join a place.
func (w *wire) open() bool { return !w.taken || w.unanswered == 0 && !w.waits() }

// review advances the taken places: the owner's content is sent once the place is clear. A vector that can no longer expect to save operations
// gets a separate place.
func (b *book) review() {
	if len(b.taken) == 0 {
		return
	}
	defer func(bulk bool) { b.bulk = bulk }(b.bulk)
	for i := 0; i < len(b.taken); i++ { // leave may append
		w := b.taken[i]
		if !w.taken {
			continue
		}
		b.bulk = w.bulk
		o, isClear, open := w.owner, b.clear(w, w.owner), w.open()
		if open && w.closed {
			b.setFormer(w, nil)
			for _, d := range o.wanters {
				if d.sent.to != w.id {
					b.mark(d)
				}
			}
		}
		w.closed = !open
		switch {
		case open:
			w.taken = !isClear
		case !w.waits():
		case isClear:
			b.mark(o)
		case !b.saves(w, o) || !b.mayWait(w, o):
			b.leave(w)
		}
	}
	b.taken = slices.DeleteFunc(b.taken, func(w *wire) bool { return !w.taken })
}

// leave gives the owner of a taken place another place.
func (b *book) leave(w *wire) {
	o := w.owner
	b.orphan(o)
	b.place(o)
	b.mark(o)
}

// stays records the refusal of operation id, f, which was to move a destination: a later operation in flight leaves the place instead.
func (b *book) stays(f *flight, id uint64) {
	if f.from == nil {
		return
	}
	for i := int(id - b.base + 1); i < b.flights.len(); i++ {
		if later := b.flights.at(i); later.object == f.object {
			later.from = f.from
			return
		}
	}
}

// cling records that a destination could not leave a place on the wire.
func (b *book) cling(w *wire, o *object) {
	if b.target(o) != w {
		w.clings = true
	}
}

// countCohorts assigns every destination to its cohort.
func (b *book) countCohorts() {
	b.cohorts = newCohorts()
	for o := range b.destinations.all() {
		o.cohort = nil
		b.cohorts.place(o)
		if o.cohort != nil && len(o.drain) > 0 {
			o.cohort.drains = true
		}
	}
}
