package dpclient

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"google.golang.org/grpc/codes"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/testkit/gate"
)

// TestNoDestinationGetsForeignWeights runs random transactions against a data plane that answers late, refuses, and
// disconnects: no operation may give a destination weights that it does not want, and in the end every one has what it
// wants.
func TestNoDestinationGetsForeignWeights(t *testing.T) {
	gate.WithoutRaceDetector(t, "has one goroutine")
	seeds := uint64(gate.Count(t, gate.Models, 200, 1000))
	replaced := 0
	for _, refusals := range []bool{false, true} {
		for seed := range seeds {
			random := rand.New(rand.NewPCG(seed, 11))
			sources := []string{""}
			if seed%3 == 1 {
				sources = []string{wireSource(twoSources[0]), wireSource(twoSources[1])}
			}
			e := newExpander(t, seed)
			if sources[0] == "" && seed%2 == 0 { // of an earlier run
				for n := range 24 {
					id := 1 + random.Uint32N(3)
					e.vectors[id], e.destinations[dst(n)] = vector(id, id, 1, 1), id
				}
				e.lose(expected{})
				e.foreign = e.weights()
			}
			e.b.resync(State{Vectors: maps.Clone(e.vectors), Destinations: maps.Clone(e.destinations)})
			release := random.IntN(100)
			if e.foreign != nil && release > 20 { // the vectors have changed meanwhile
				for d, id := range e.destinations {
					e.content[id+3] = vector(id+3, 1, 1)
					e.b.setVector(e.content[id+3])
					e.b.setDestination(d, id+3)
					e.want[d] = id + 3
				}
				e.note()
				e.b.commit()
			}
			for step := range 300 {
				if step == release {
					e.b.release(true)
					e.foreign = nil
				}
				switch random.IntN(5) {
				case 0:
					e.declare(random, sources)
				case 1, 2:
					e.send()
				default:
					if len(e.waiting) > 0 {
						e.answer(refusals && random.IntN(12) == 0)
					}
				}
				e.checkCohorts()
				if random.IntN(100) == 0 {
					e.reconnect(random)
				}
			}
			e.finish()
			for d, id := range e.want { // none waits for those that were refused
				if o, g := e.b.wanted.destinations.get(d), e.b.wanted.vectors[id]; o.refusal == nil && g.refusal == nil && (!e.b.wanted.obeyed(o) || !e.b.wanted.obeyed(g)) {
					t.Fatalf("seed %d: %s has%s and wants%s: %s", seed, d, describe(e.vectors[e.destinations[d]]), describe(e.content[id]), stateOf(o))
				}
			}
			if refusals { // refused operations are retried
				e.reconnect(random)
				e.finish()
			}
			e.checkCohorts()
			got := e.weights()
			if len(got) != len(e.want) {
				t.Fatalf("seed %d: %d destinations, want %d", seed, len(got), len(e.want))
			}
			for d, id := range e.want {
				if o := e.b.wanted.destinations.get(d); got[d] != describe(e.content[id]) || !e.b.wanted.obeyed(o) || o.done != o.change {
					t.Fatalf("seed %d: %s has%s, wants%s: %s", seed, d, got[d], describe(e.content[id]), stateOf(o))
				}
			}
			if len(e.b.places.taken) != 0 || len(e.vectors) != len(e.content) || len(e.b.wanted.vectors) != len(e.content) || len(e.b.places.wires) != len(e.content) || e.b.wanted.destinations.Len() != len(e.want) {
				t.Fatalf("seed %d: %d taken places, %d vectors in the data plane, %d objects, %d places, want %d; %d destinations, want %d", seed, len(e.b.places.taken), len(e.vectors), len(e.b.wanted.vectors), len(e.b.places.wires), len(e.content), e.b.wanted.destinations.Len(), len(e.want))
			}
			replaced += e.replaced
		}
	}
	if replaced < 300 {
		t.Errorf("%d destinations changed their vector without an operation of their own: the test does not try what it is for", replaced)
	}
}

// TestOneDestinationStays checks the other ways in which a destination keeps a place from another vector: the refusal
// of two moves in a row, and slots that it has to drain.
func TestOneDestinationStays(t *testing.T) {
	const size = 20
	begin := func() *book {
		b := connectedBook()
		for id := range uint32(3) {
			b.setVector(vector(id+1, id+1, 1))
		}
		for n := range size {
			b.setDestination(dst(n), 1)
		}
		carryOut(t, b)
		return b
	}
	answer := func(b *book, op operation, level farev1.AckLevel) {
		t.Helper()
		if err := b.acknowledge(&farev1.Ack{Id: op.id, Level: level, Code: uint32(codes.Internal)}); err != nil {
			t.Fatal(err)
		}
	}
	next := func(b *book) operation {
		t.Helper()
		op, ok := popCommitted(b)
		if !ok {
			t.Fatal("nothing to send")
		}
		b.send(&op, 0)
		return op
	}
	t.Run("refused twice", func(t *testing.T) {
		b := begin()
		b.setDestination(dst(0), 2)
		first := next(b)
		b.setDestination(dst(0), 3)
		second := next(b)
		answer(b, first, farev1.AckLevel_ACK_LEVEL_REFUSED) // it is still on the place of vector 1
		b.setVector(vector(4, 4, 1))
		for n := 1; n < size; n++ {
			b.setDestination(dst(n), 4)
		}
		b.deleteVector(1)
		if op, ok := popCommitted(b); ok {
			t.Fatalf("%v of %v is sent while a destination of another vector may be there", op.class, op.object.name())
		}
		answer(b, second, farev1.AckLevel_ACK_LEVEL_REFUSED)
		if op := next(b); op.class != VectorSet || op.wire == b.places.wires[b.wanted.destinations.get(dst(0)).sent.to] {
			t.Errorf("%v on the place of the destination that was refused", op.class)
		}
		carryOut(t, b)
		for n := 1; n < size; n++ {
			if o := b.wanted.destinations.get(dst(n)); !b.wanted.obeyed(o) {
				t.Fatalf("%s: %s", o.name(), stateOf(o))
			}
		}
	})
	t.Run("drains", func(t *testing.T) {
		b := begin()
		b.setVector(vector(4, 4, 1))
		for n := range size {
			if n == 3 {
				b.setDestination(dst(n), 4, 7)
			} else {
				b.setDestination(dst(n), 4)
			}
		}
		b.deleteVector(1)
		moved := 0
		for op, ok := popCommitted(b); ok; op, ok = popCommitted(b) {
			if op.class == DestinationSet && op.object.key() == dst(3) && slices.Equal(op.object.drain, []uint32{7}) {
				moved++
			}
			b.send(&op, 0)
			answer(b, op, farev1.AckLevel_ACK_LEVEL_IN_EFFECT)
		}
		if moved != 1 {
			t.Error("the slots to drain are not sent")
		}
	})
	t.Run("two vectors that wait for each other", func(t *testing.T) {
		b := begin()
		for n := range size {
			b.setDestination(dst(size+n), 2)
		}
		carryOut(t, b)
		b.setVector(vector(4, 4, 1))
		b.setVector(vector(5, 5, 1))
		for n := range size {
			b.setDestination(dst(n), 4)
			b.setDestination(dst(size+n), 5)
		}
		b.commit() // 4 and 5 take the places of 1 and 2
		b.setDestination(dst(0), 5)
		b.setDestination(dst(size), 4)
		carryOut(t, b)
		for o := range b.wanted.destinations.all() {
			if !b.wanted.obeyed(o) {
				t.Errorf("%s: %s", o.name(), stateOf(o))
			}
		}
	})
}

// bulkCase is a change of many destinations of one vector.
type bulkCase struct {
	name      string
	size, few int // few destinations of size do not change
	first     int // destinations that change in an earlier transaction, whose operations are sent
	most      int // operations of the change
}

// TestBulkChangeIsOneOperation checks the number of operations with which all destinations of a vector, or nearly all,
// change to another one.
func TestBulkChangeIsOneOperation(t *testing.T) {
	gate.WithoutRaceDetector(t, "has one goroutine, and a tenth of the cases with it")
	for _, c := range []bulkCase{
		{"all", 2000, 0, 0, 1},
		{"all but ten", 2000, 10, 0, 12}, // a place for the ten, their ten operations, and the replacement
		{"all, the first 800 in a burst of its own", 2000, 0, 800, 1 + 6 + 1 + 6 + 1}, // a vector, a window of 6 moves, the replacement, 6 moves back, a removal
		{"half", 100, 50, 0, 51},
		{"one of two", 2, 1, 0, 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := newExpander(t, 0)
			e.b.resync(State{})
			e.b.release(true)
			assign := func(from, to int, id uint32) {
				for n := from; n < to; n++ {
					e.want[dst(n)] = id
					e.b.setDestination(dst(n), id)
				}
			}
			e.content[1] = vector(1, 1, 1)
			e.b.setVector(e.content[1])
			assign(0, c.size, 1)
			e.note()
			e.b.commit()
			e.finish()
			e.operations = 0
			e.content[2] = vector(2, 2, 1)
			e.b.setVector(e.content[2])
			assign(0, c.first, 2)
			e.note()
			e.b.commit()
			if c.first > 0 {
				for e.send() {
				}
			}
			assign(c.first, c.size-c.few, 2)
			if c.few == 0 {
				e.b.deleteVector(1)
				delete(e.content, 1)
			}
			e.note()
			e.b.commit()
			e.finish()
			if e.operations > c.most {
				t.Errorf("%d operations, want at most %d", e.operations, c.most)
			}
			for n := range c.size {
				id := uint32(2)
				if n >= c.size-c.few {
					id = 1
				}
				if got := describe(e.vectors[e.destinations[dst(n)]]); got != describe(e.content[id]) {
					t.Fatalf("%s has%s, want%s", dst(n), got, describe(e.content[id]))
				}
			}
		})
	}
}

// TestPlaceTakenBeforeItsContentIsInEffect checks that a vector is reported in effect if it takes a place whose
// content, equal to its own, another vector has sent and the data plane has not acknowledged.
func TestPlaceTakenBeforeItsContentIsInEffect(t *testing.T) {
	e := newExpander(t, 0)
	e.b.resync(State{})
	e.b.release(true)
	declare := func(id uint32) {
		e.content[id] = vector(id, 2, 1)
		e.b.setVector(e.content[id])
		for n := range 3 {
			e.want[dst(n)] = id
			e.b.setDestination(dst(n), id)
		}
	}
	declare(1)
	e.note()
	e.b.commit()
	for e.send() {
	}
	declare(2)
	e.b.deleteVector(1)
	delete(e.content, 1)
	e.note()
	e.b.commit()
	if w := e.b.wanted.vectors[2].wire; w == nil || w.id != 1 {
		t.Fatalf("vector 2 has not taken the place of vector 1: %+v", w)
	}
	e.finish()
	for _, o := range e.b.wanted.sorted() {
		if o.change > 0 && o.done != o.change {
			t.Errorf("%s: change %d is not in effect, the last one that is: %d", o.name(), o.change, o.done)
		}
	}
}

// TestSupersededChangesCostNothing checks that the changes that a slow data plane has not been sent yet are replaced by
// the last one.
func TestSupersededChangesCostNothing(t *testing.T) {
	const size, changes = 1000, 50
	e := newExpander(t, 0)
	e.b.resync(State{})
	e.b.release(true)
	for id := range uint32(changes + 1) {
		e.content[id+1] = vector(id+1, id+1, 7)
		e.b.setVector(e.content[id+1])
		for n := range size {
			e.want[dst(n)] = id + 1
			e.b.setDestination(dst(n), id+1)
		}
		if id > 0 {
			e.b.deleteVector(id)
			delete(e.content, id)
		}
		e.note()
		e.b.commit()
		if id == 0 {
			e.finish()
			e.operations = 0
		}
	}
	e.finish()
	if e.operations != 1 {
		t.Errorf("%d operations for %d changes of %d destinations, want 1", e.operations, changes, size)
	}
	for d, got := range e.weights() {
		if got != describe(e.content[changes+1]) {
			t.Fatalf("%s has%s", d, got)
		}
	}
}

// TestFlowPinsAfterATakenPlace checks that source ports are recomputed if the slots' places changed, and not sent if
// they are equal.
func TestFlowPinsAfterATakenPlace(t *testing.T) {
	slots := func(g *farev1.Vector, device int, share uint32) *farev1.Vector {
		g.Slots = []*farev1.VectorSlot{{Slot: 0, Plane: planes[0], Device: fmt.Sprintf("p0s%d", device), SharePpb: share}}
		return g
	}
	for _, tc := range []struct {
		name  string
		next  *farev1.Vector
		repin bool
	}{
		{"other shares", slots(vector(2, 2, 1), 0, 700), false},
		{"other places", slots(vector(2, 2, 1), 1, 500), true},
	} {
		b := connectedBook()
		b.pinning = true
		b.setVector(slots(vector(1, 1, 1), 0, 500))
		for n := range 10 {
			b.setDestination(dst(n), 1)
		}
		carryOut(t, b)
		b.setVector(tc.next)
		for n := range 10 {
			b.setDestination(dst(n), 2)
		}
		b.deleteVector(1)
		var classes []Class
		for op, ok := popCommitted(b); ok; op, ok = popCommitted(b) {
			classes = append(classes, op.class)
			b.send(&op, 0)
			if err := b.acknowledge(&farev1.Ack{Id: op.id, Level: farev1.AckLevel_ACK_LEVEL_IN_EFFECT}); err != nil {
				t.Fatal(err)
			}
		}
		want := []Class{VectorSet}
		if tc.repin {
			for range 10 {
				want = append(want, DestinationSet)
			}
		}
		if !slices.Equal(classes, want) {
			t.Errorf("%s: operations %v, want %v", tc.name, classes, want)
		}
	}
}
