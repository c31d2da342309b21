package dpclient

import (
	"math/rand/v2"
	"testing"
)

func newWanted() *wanted {
	return &wanted{news: &news{}, connected: true, subPorts: map[string]*object{}, vectors: map[uint32]*object{}}
}

// wantedTest compares wanted with a model: maps of the declarations.
type wantedTest struct {
	*testing.T
	seed         uint64
	random       *rand.Rand
	w            *wanted
	vectors      map[uint32]bool
	destinations map[Destination]uint32
	changes      uint64
}

// TestWantedAgainstAModel declares and withdraws random vectors and destinations, which a data plane has in effect at
// random times.
func TestWantedAgainstAModel(t *testing.T) {
	for seed := range uint64(100) {
		x := wantedTest{
			T: t, seed: seed, random: rand.New(rand.NewPCG(seed, 23)), w: newWanted(),
			vectors: map[uint32]bool{}, destinations: map[Destination]uint32{},
		}
		for range 200 {
			switch x.random.IntN(7) {
			case 0, 1:
				x.declareVector()
			case 2, 3, 4:
				x.declareDestination()
			case 5:
				x.carryOut()
			default:
				x.mark()
			}
			x.settle()
			checkWanted(t, x.w)
			x.compare()
		}
		for _, e := range x.w.news.take(nil) {
			if e.Change > x.changes || e.Kind == Refused {
				t.Fatalf("seed %d: event %+v after %d changes", seed, e, x.changes)
			}
		}
	}
}

// declareVector declares or withdraws a vector. Its place has the number of the vector.
func (t *wantedTest) declareVector() {
	o := t.w.vector(1 + t.random.Uint32N(4))
	if t.random.IntN(2) == 0 {
		o.wanted, o.wantVector, o.wire = false, nil, nil
		delete(t.vectors, o.Vector)
		return
	}
	o.wanted, o.wantVector = true, vector(o.Vector, 1+t.random.Uint32N(3))
	if o.wire == nil {
		o.wire = &wire{id: o.Vector}
	}
	t.vectors[o.Vector] = true
	t.touch(o)
}

// declareDestination declares or withdraws a destination.
func (t *wantedTest) declareDestination() {
	o, id := t.w.destination(dst(t.random.IntN(8))), t.random.Uint32N(5)
	if id == 0 {
		delete(t.destinations, o.key())
	} else {
		t.destinations[o.key()] = id
	}
	t.w.want(o, id)
	t.touch(o)
}

func (t *wantedTest) touch(o *object) {
	t.Helper()
	if t.changes++; t.w.touch(o) != t.changes || o.change != t.changes {
		t.Fatalf("seed %d: change %d, want %d", t.seed, o.change, t.changes)
	}
}

// carryOut has the data plane apply everything.
func (t *wantedTest) carryOut() {
	for _, o := range t.w.sorted() {
		o.sent = value{}
		if at := t.w.target(o); at != nil && o.Kind == KindDestination {
			o.sent.to = at.id
		}
		if o.effect = o.sent; o.wire != nil {
			o.wire.content, o.wire.effect = o.wantVector, o.wantVector
		}
	}
}

// mark blocks or unblocks a destination, and lists it in a transaction, twice.
func (t *wantedTest) mark() {
	t.Helper()
	o := t.w.destinations.get(dst(t.random.IntN(8)))
	if o == nil {
		return
	}
	t.w.block(o, o.wanted && t.random.IntN(2) == 0)
	t.w.move(o)
	t.w.move(o)
	checkWanted(t.T, t.w)
	if t.w.moved.pop() != o {
		t.Fatalf("seed %d: another destination has moved", t.seed)
	}
	o.moved = false
}

// settle settles and drops every object.
func (t *wantedTest) settle() {
	t.Helper()
	for _, o := range t.w.sorted() {
		done := t.w.obeyed(o) && o.change > 0
		t.w.settle(o)
		t.w.drop(o)
		if done && (o.done != o.change || !o.reported) {
			t.Fatalf("seed %d: %s is in effect and not reported", t.seed, o.name())
		}
	}
}

// compare compares objects and the wanted state with the declarations.
func (t *wantedTest) compare() {
	t.Helper()
	state := t.w.state(nil)
	if len(state.Vectors) != len(t.vectors) || len(state.Destinations) != len(t.destinations) {
		t.Fatalf("seed %d: %d vectors and %d destinations are wanted, want %d and %d",
			t.seed, len(state.Vectors), len(state.Destinations), len(t.vectors), len(t.destinations))
	}
	for key, id := range t.destinations {
		o := t.w.destinations.get(key)
		if o == nil || o.wantTo != id || !o.wanted {
			t.Fatalf("seed %d: %s wants vector %d, the object is %s", t.seed, key, id, stateOf(o))
		}
		if !t.vectors[id] {
			id = 0
		}
		if at := t.w.target(o); (at != nil) != t.vectors[o.wantTo] || state.Destinations[key] != id {
			t.Fatalf("seed %d: %s is to be on vector %d, want %d", t.seed, key, state.Destinations[key], id)
		}
	}
	for _, o := range t.w.sorted() {
		if !o.wanted && len(o.wanters) == 0 && t.w.obeyed(o) {
			t.Fatalf("seed %d: %s is left", t.seed, o.name())
		}
	}
}

// checkWanted checks the invariant of wanted for the destinations of vectors, changes and counts.
func checkWanted(t *testing.T, w *wanted) {
	t.Helper()
	wanters, blocked, moved := 0, 0, 0
	numbers := map[uint64]Object{}
	for _, o := range w.sorted() {
		if other, twice := numbers[o.change]; twice && o.change > 0 || o.change > w.change || o.done > o.change {
			t.Fatalf("change %d of %s, in effect up to %d; %d changes, this one also of %s", o.change, o.name(), o.done, w.change, other)
		}
		numbers[o.change] = o.name()
		for i, d := range o.wanters {
			if o.Kind != KindVector || d.wantTo != o.Vector || d.place != uint32(i) || w.destinations.get(d.key()) != d {
				t.Fatalf("%s has %s as destination %d: %s", o.name(), d.name(), i, stateOf(d))
			}
		}
		wanters -= len(o.wanters)
		if o.wantTo != 0 {
			wanters++
		}
		if o.blocked {
			blocked++
		}
		if o.moved {
			moved++
		}
	}
	if wanters != 0 || blocked != w.blocked || moved != w.moved.len() {
		t.Fatalf("%d destinations are not with their vector; %d blocked, counted %d; %d moved, listed %d", wanters, blocked, w.blocked, moved, w.moved.len())
	}
}
