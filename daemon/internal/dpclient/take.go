package dpclient

import (
	"slices"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// A destination that changes its vector costs an operation. If nearly all destinations of a place on the wire change to
// the same vector, the vector takes the place instead: one operation replaces the content, and the destinations stay.
// The invariants are those of places.

// changed returns the cohorts with a change since the last call, or all of them, the largest first. The next call
// reuses the result.
func (p *places) changed(all bool) []*cohort {
	if all {
		for _, c := range p.cohorts.byKey {
			p.cohorts.note(c)
		}
	}
	p.candidates = p.cohorts.drain(p.candidates[:0])
	return p.candidates
}

// take moves a cohort's vector to the cohort's place if that saves operations. It returns the vector, nil if it stays;
// the place that the vector leaves, nil if the data plane has none; and the vector that had the place, nil if there is
// none, which then has no place.
func (p *places) take(c *cohort, bulk bool) (o *object, left *wire, prev *object) {
	w, o := p.wires[c.wire], p.objects.vectors[c.vector]
	if w == nil || o == nil || !o.wanted || o.wire == nil || o.wire == w || w.content == nil || c.drains || !p.saves(w, o) {
		return nil, nil, nil
	}
	same := sameVector(w.content, o.wantVector)
	if !same && (p.held && !p.adopted && w.foreign || slices.ContainsFunc(o.wantVector.Slots, (*farev1.VectorSlot).GetDrainBeforeMove)) {
		return nil, nil, nil
	}
	if !same && !p.clear(w, o) && !p.mayWait(w, o) {
		return nil, nil, nil
	}
	if prev = w.owner; prev != nil {
		prev.wire, w.owner = nil, nil
	}
	left = p.orphan(o)
	p.own(o, w, bulk)
	return o, left, prev
}

// saves reports whether fewer operations result if a vector's place is w: destinations may have to leave w or join it,
// the owner of w may need another place, and the vector's present one is removed. A destination that has to leave
// delays all others, so it takes more than one that stays.
func (p *places) saves(w *wire, o *object) bool {
	stay := p.cohorts.size(w.id, o.Vector)
	cost := 2 * (w.users - stay)
	if own := o.wire; own != w {
		cost += 2 * p.cohorts.size(own.id, o.Vector)
		if own.content != nil {
			cost++
		}
		if w.owner != nil {
			cost++
		}
	}
	return stay > cost
}

// clear reports whether every destination that is on w, or may be if operations in flight are refused, wants the vector
// o.
func (p *places) clear(w *wire, o *object) bool {
	return p.cohorts.size(w.id, o.Vector) == w.users && !p.flights.leaves(w, o.Vector)
}

// mayWait reports whether the vector o may wait until the other destinations have left w. They must be able to:
// removals are not held, the data plane has refused none of them, and they wait for no vector that waits for them. So
// only one vector of a source waits at a time.
func (p *places) mayWait(w *wire, o *object) bool {
	return !p.held && !w.clings && !slices.ContainsFunc(p.taken, func(other *wire) bool {
		return other != w && other.waits() && other.owner.wantVector.Source == o.wantVector.Source && !p.clear(other, other.owner)
	})
}

// takeChanged takes places for the vectors of the cohorts that have changed, or of all, and advances the taken places.
func (b *book) takeChanged(all bool) {
	changed := b.places.changed(all)
	for _, c := range changed {
		o, left, prev := b.places.take(c, b.queues.bulk)
		if o == nil {
			continue
		}
		b.markWire(left)
		repin := b.pinning && !samePlaces(o.wire.content, o.wantVector)
		b.mark(o)
		for _, d := range o.wanters {
			d.repin = d.repin || repin && d.sent.to == o.wire.id
			b.mark(d)
		}
		if prev != nil {
			b.place(prev)
			b.mark(prev)
		}
	}
	clear(changed)
	b.review()
}

// review advances the taken places: the owner's content is sent once the place is clear. A vector that can no longer
// expect to save operations gets a separate place.
func (b *book) review() {
	p := &b.places
	if len(p.taken) == 0 {
		return
	}
	defer func(bulk bool) { b.queues.bulk = bulk }(b.queues.bulk)
	for i := 0; i < len(p.taken); i++ { // place may append
		w := p.taken[i]
		if !w.taken {
			continue
		}
		b.queues.bulk = w.bulk
		o, isClear, open := w.owner, p.clear(w, w.owner), w.open()
		if open && w.closed {
			p.setFormer(w, nil)
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
		case !p.saves(w, o) || !p.mayWait(w, o):
			b.markWire(p.orphan(o))
			b.place(o)
			b.mark(o)
		}
	}
	p.taken = slices.DeleteFunc(p.taken, func(w *wire) bool { return !w.taken })
}
