package dpclient

import (
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// placesTest compares places with a model of the data plane: a map of its vectors.
type placesTest struct {
	*testing.T
	seed   uint64
	random *rand.Rand
	w      *wanted
	p      *places
	have   map[uint32]*farev1.Vector
}

// TestPlacesAgainstAModel assigns random vectors to places, moves destinations between them, has a data plane apply and
// delete vectors, and reads them back.
func TestPlacesAgainstAModel(t *testing.T) {
	for seed := range uint64(100) {
		x := placesTest{T: t, seed: seed, random: rand.New(rand.NewPCG(seed, 24)), w: newWanted(), have: map[uint32]*farev1.Vector{}}
		f := &flights{}
		f.reset()
		x.p = &places{objects: x.w, flights: f, wires: map[uint32]*wire{}, cohorts: newCohorts(), recognized: map[string]uint32{}, lowest: 1}
		for range 200 {
			switch x.random.IntN(20) {
			case 0, 1, 2, 3:
				x.declare()
			case 4, 5:
				x.withdraw()
			case 6:
				x.readBack()
			case 7, 8, 9, 10, 11:
				x.carryOut()
			default:
				x.move()
			}
			checkPlaces(t, x.p)
			for _, c := range x.p.changed(x.random.IntN(2) == 0) {
				x.take(c)
			}
			for id, content := range x.have {
				if at := x.p.wires[id]; at == nil || at.effect != content || x.p.free(id) {
					t.Fatalf("seed %d: vector %d of the data plane is not on record: %+v", seed, id, at)
				}
			}
		}
	}
}

func (t *placesTest) declare() {
	t.Helper()
	id := 1 + t.random.Uint32N(6)
	g := t.w.vector(id)
	g.wanted, g.wantVector = true, vector(id, 1+t.random.Uint32N(4))
	prev, free := g.wire, t.p.free(id)
	left, other := t.p.assign(g, false)
	if other == (prev == g.wire) || left != nil && left != prev {
		t.Fatalf("seed %d: vector %d has place %+v, before %+v; left %+v, another one: %v", t.seed, id, g.wire, prev, left, other)
	}
	if other && free && g.wire.content == nil && g.wire.id != id {
		t.Fatalf("seed %d: vector %d has number %d, and its own was free", t.seed, id, g.wire.id)
	}
	if at := g.wire; at.content != nil && !sameVector(at.content, g.wantVector) && prev != at {
		t.Fatalf("seed %d: vector %d has a place in use", t.seed, id)
	}
}

func (t *placesTest) withdraw() {
	if g := t.w.vectors[1+t.random.Uint32N(6)]; g != nil && g.wanted {
		g.wanted, g.wantVector = false, nil
		t.p.orphan(g)
		t.w.drop(g)
	}
}

// readBack begins a stream to the data plane, which has no destinations.
func (t *placesTest) readBack() {
	for o := range t.w.destinations.all() {
		o.sent = value{}
	}
	vectors := t.w.sortedVectors()
	t.p.taken = t.p.taken[:0]
	t.p.adopt(State{Vectors: maps.Clone(t.have)}, vectors, false)
	for _, g := range vectors {
		if g.wanted {
			t.p.assign(g, false)
		}
	}
}

// carryOut has the data plane set a vector, or delete one.
func (t *placesTest) carryOut() {
	if g := t.w.vectors[1+t.random.Uint32N(6)]; g != nil && t.p.class(g) == VectorSet {
		g.wire.content, g.wire.effect = g.wantVector, g.wantVector
		t.have[g.wire.id] = g.wantVector
		return
	}
	for _, at := range t.p.sorted() {
		if t.p.removable(at) {
			at.content, at.effect = nil, nil
			t.p.setFormer(at, nil)
			t.p.forget(at)
			delete(t.have, at.id)
			return
		}
	}
}

// move has a destination, or all but one, want a vector, or none; half of those that may be sent are.
func (t *placesTest) move() {
	t.Helper()
	id, first, n := t.random.Uint32N(7), t.random.IntN(8), 1
	if t.random.IntN(4) == 0 {
		n = 7
	}
	for i := range n {
		o := t.w.destination(dst((first + i) % 8))
		t.w.want(o, id)
		t.p.cohorts.place(o)
		at, left, next := t.w.target(o), t.p.wires[o.sent.to], value{}
		if t.random.IntN(2) == 0 || id != 0 && (at == nil || at.content == nil) {
			continue
		}
		if at != nil {
			next.to = at.id
		}
		if got := t.p.setSent(o, next); got != left && at != left {
			t.Fatalf("seed %d: %s leaves %+v, want %+v", t.seed, o.name(), got, left)
		}
	}
}

// take takes a place for a cohort's vector and checks that the vector has it then, without a previous owner, and that
// the vector's content is not sent while a destination of another vector is there.
func (t *placesTest) take(c *cohort) {
	t.Helper()
	o, left, prev := t.p.take(c, false)
	if o == nil {
		return
	}
	at := t.p.wires[c.wire]
	if o.Vector != c.vector || o.wire != at || at.owner != o || left == at || prev == o || prev != nil && prev.wire != nil {
		t.Fatalf("seed %d: cohort %+v: vector %d has taken %+v, left %+v, from %+v", t.seed, c.cohortKey, o.Vector, at, left, prev)
	}
	if at.waits() && at.users > c.n && t.p.class(o) != classes {
		t.Fatalf("seed %d: content is replaced under %d destinations of another vector", t.seed, at.users-c.n)
	}
	if prev != nil {
		t.p.assign(prev, false)
	}
	checkPlaces(t.T, t.p)
}

// checkPlaces checks the invariant of places for owners, numbers and counts.
func checkPlaces(t *testing.T, p *places) {
	t.Helper()
	users, members := map[uint32]int{}, map[cohortKey]int{}
	for o := range p.objects.destinations.all() {
		if key := (cohortKey{o.sent.to, o.wantTo}); key != (cohortKey{}) {
			users[o.sent.to]++
			members[key]++
		}
	}
	for key, c := range p.cohorts.byKey {
		if c.n != members[key] {
			t.Fatalf("cohort %+v has %d destinations, want %d", key, c.n, members[key])
		}
		delete(members, key)
	}
	if len(members) > 0 {
		t.Fatalf("no cohorts %v", members)
	}
	formers := map[*object]int{}
	for id, w := range p.wires {
		formers[w.former]++
		switch {
		case w.id != id || w.users != users[id]:
			t.Fatalf("vector %d, at %d, has %d users, want %d", w.id, id, w.users, users[id])
		case w.owner != nil && (w.owner.wire != w || !w.owner.wanted || p.objects.vectors[w.owner.Vector] != w.owner):
			t.Fatalf("vector %d has owner %s, whose place is %+v", id, w.owner.name(), w.owner.wire)
		case w.taken && (w.owner == nil || !slices.Contains(p.taken, w)):
			t.Fatalf("vector %d is taken, and has no owner or is not listed", id)
		}
	}
	for _, o := range p.objects.vectors {
		if o.wire != nil && (p.wires[o.wire.id] != o.wire || o.wire.owner != o) || o.formers != formers[o] {
			t.Fatalf("%s has place %+v, and waits for %d places, want %d", o.name(), o.wire, o.formers, formers[o])
		}
	}
	for id := uint32(1); id < p.lowest; id++ {
		if p.free(id) {
			t.Fatalf("number %d is free, and the lowest one is to be %d", id, p.lowest)
		}
	}
}
