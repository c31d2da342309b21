package wecmp

import (
	"cmp"
	"net/netip"
	"slices"
)

// legacy is the first update of an object that a previous engine had.
type legacy struct {
	moved int
	drain []uint16
}

// Expect reserves the memory of n destinations in an engine that has none.
func (e *Engine) Expect(n int) {
	e.index, e.destinations, e.dirtyDests = make(map[netip.Prefix]int32, n), make([]destination, 0, n), make([]int32, 0, n)
}

// Inherit makes a new engine, which has reported nothing, continue another one with other planes or sub-ports: a vector
// gets the number of the vector that the first of its destinations had, and numbers that the other engine uses for
// other vectors are not used. The first updates count moved slots, and list slots to drain, relative to the other
// engine, and omit the destinations whose last report there has the same number. place translates its places; the
// result has Plane -1 for a place that does not exist any more.
func (e *Engine) Inherit(was *Engine, place func(Place) Place) {
	number := make([]uint32, len(e.vectors)) // by present number
	taken := map[uint32]bool{}
	for _, i := range e.sortedDestinations() {
		d := &e.destinations[i]
		old, ok := was.Destination(d.prefix)
		if ok && number[d.vector] == 0 && !taken[old] {
			number[d.vector], taken[old] = old, true
		}
		if ok && number[d.vector] != old {
			if e.inherited == nil {
				e.inherited = map[int32]legacy{}
			}
			e.inherited[i] = e.legacyOf(e.vectors[d.vector], was.vectors[old], place)
		}
	}
	free := uint32(1)
	for id := range e.vectors {
		v := e.vector(uint32(id))
		if v == nil {
			continue
		}
		if old := was.vector(number[id]); old != nil {
			l := e.legacyOf(v, old, place)
			v.legacy = &l
			continue
		}
		for taken[free] || was.vector(free) != nil {
			free++
		}
		number[id], taken[free] = free, true
	}
	e.renumber(number)
	for i := range e.destinations {
		d := &e.destinations[i]
		if at, ok := was.index[d.prefix]; ok && d.vector != 0 && was.destinations[at].reported == d.vector {
			d.reported, d.dirty = d.vector, false
		}
	}
	e.dirtyDests = slices.DeleteFunc(e.dirtyDests, func(i int32) bool { return !e.destinations[i].dirty })
}

// sortedDestinations returns the indexes of the destinations in the order of their prefixes.
func (e *Engine) sortedDestinations() []int32 {
	var out []int32
	for i := range e.destinations {
		if e.destinations[i].vector != 0 {
			out = append(out, int32(i))
		}
	}
	slices.SortFunc(out, func(a, b int32) int { return comparePrefixes(e.destinations[a].prefix, e.destinations[b].prefix) })
	return out
}

func comparePrefixes(a, b netip.Prefix) int {
	return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()))
}

// legacyOf compares a vector with that of a previous engine. Shares and places of slots depend on each other, so any
// difference drains every slot that carried addresses.
func (e *Engine) legacyOf(v, old *vector, place func(Place) Place) (l legacy) {
	differs := len(v.slots) != len(old.slots)
	var live []uint16
	for s := range min(len(v.slots), len(old.slots)) {
		a, b := &old.slots[s], &v.slots[s]
		if place(Place{a.Plane, a.SubPort}) != (Place{b.Plane, b.SubPort}) {
			l.moved++
			differs = true
		}
		differs = differs || a.SharePPB != b.SharePPB
		if !a.Parked {
			live = append(live, uint16(s))
		}
	}
	if differs && e.cfg.Ordering != Weak {
		l.drain = live
	}
	return l
}

// renumber gives every vector the number that is listed by its present one.
func (e *Engine) renumber(number []uint32) {
	before := e.vectors
	e.vectors, e.freeVectors, e.dropped = []*vector{{}}, nil, 0
	at := func(id uint32) uint32 {
		if id == 0 {
			return 0
		}
		return number[id]
	}
	for id, v := range before {
		if id == 0 || v == nil || v.group == 0 {
			continue
		}
		for len(e.vectors) <= int(number[id]) {
			e.vectors = append(e.vectors, nil)
		}
		e.vectors[number[id]] = v
		v.id, v.prev, v.next, v.chain = number[id], at(v.prev), at(v.next), at(v.chain)
	}
	for id := len(e.vectors) - 1; id > 0; id-- {
		if e.vectors[id] == nil {
			e.freeVectors = append(e.freeVectors, uint32(id))
		}
	}
	for _, g := range e.groups {
		if g != nil && g.known {
			g.first = at(g.first)
		}
	}
	for i := range e.buckets {
		e.buckets[i] = at(e.buckets[i])
	}
	for i := range e.destinations {
		e.destinations[i].vector = at(e.destinations[i].vector)
	}
	dirty := e.dirtyVectors[:0]
	for _, id := range e.dirtyVectors {
		if before[id].dirty {
			dirty = append(dirty, number[id])
		}
	}
	e.dirtyVectors = dirty
}

// Vectors yields the numbers of the vectors in ascending order.
func (e *Engine) Vectors(yield func(id uint32) bool) {
	for id := range e.vectors {
		if e.vector(uint32(id)) != nil && !yield(uint32(id)) {
			return
		}
	}
}

// Destinations yields the destinations with their vectors, in the order of their prefixes.
func (e *Engine) Destinations(yield func(prefix netip.Prefix, vector uint32) bool) {
	for _, i := range e.sortedDestinations() {
		if !yield(e.destinations[i].prefix, e.destinations[i].vector) {
			return
		}
	}
}
