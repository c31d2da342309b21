package dpclient

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// queuesTest compares queues with a model: one list of all entries in the order of queuing.
type queuesTest struct {
	*testing.T
	seed    uint64
	random  *rand.Rand
	q       queues
	model   []entryModel
	turn    int // the lane that was last in turn
	objects []*object
	wires   []*wire
}

type entryModel struct {
	lane  int
	class Class
	of    any // *object or *wire
}

// TestQueuesAgainstAModel pushes and pops random entries, some of which are not needed when their turn comes.
func TestQueuesAgainstAModel(t *testing.T) {
	for seed := range uint64(100) {
		x := queuesTest{T: t, seed: seed, random: rand.New(rand.NewPCG(seed, 22))}
		for range 12 {
			x.objects, x.wires = append(x.objects, &object{few: &few{}}), append(x.wires, &wire{})
		}
		for range 300 {
			if x.random.IntN(8) < 5 {
				x.push()
			} else {
				x.pop()
			}
			x.compare()
		}
		x.q.reset()
		x.model = nil
		x.compare()
		for i := range x.objects {
			if x.objects[i].queued != 0 || x.wires[i].queued {
				t.Fatalf("seed %d: marked as queued after reset", seed)
			}
		}
	}
}

func (t *queuesTest) push() {
	o, w := t.objects[t.random.IntN(12)], t.wires[t.random.IntN(12)]
	x := entryModel{t.random.IntN(2), Class(t.random.IntN(int(classes))), o}
	if x.class == VectorDelete {
		x.lane, x.of = 1, w
		t.q.pushDelete(w)
	} else {
		t.q.push(o, x.class, x.lane == 1)
	}
	if !slices.Contains(t.model, x) {
		t.model = append(t.model, x)
	}
}

func (t *queuesTest) pop() {
	full, needed := t.random.IntN(4) == 0, map[any]bool{}
	for _, x := range t.model {
		needed[x.of] = t.random.IntN(2) == 0
	}
	var allowed [classes]bool
	for _, class := range []Class{VectorSet, VectorDelete} {
		if t.q.paces[class] = (pace{}); t.random.IntN(3) == 0 {
			for id := uint64(1); t.q.paces[class].allows(); id++ {
				t.q.paces[class].send(id, time.Time{})
			}
		}
		allowed[class] = t.q.paces[class].allows()
	}
	next, gone := t.next(full, needed, allowed)
	op, ok := t.q.pop(full, func(op operation) (operation, bool) {
		return op, needed[op.object] || needed[op.wire]
	})
	if ok != (next >= 0) {
		t.Fatalf("seed %d: pop %v, want %v", t.seed, ok, next >= 0)
	}
	if ok {
		x := t.model[next]
		if op.class != x.class || laneOf(op.bulk) != x.lane || any(op.object) != x.of && any(op.wire) != x.of {
			t.Fatalf("seed %d: popped %+v, want %+v", t.seed, op, x)
		}
	}
	t.model = gone(t.model)
}

// next returns the index of the entry whose operation is next, -1 if there is none, and a function that removes this
// entry and the entries before it. needed has the entries that need an operation, allowed the classes whose pace allows
// one.
func (t *queuesTest) next(full bool, needed map[any]bool, allowed [classes]bool) (int, func([]entryModel) []entryModel) {
	next, gone := -1, map[entryModel]bool{}
	scan := func(lane int, class Class) bool {
		for i, x := range t.model {
			if x.lane == lane && x.class == class {
				if gone[x] = true; needed[x.of] {
					next = i
					return true
				}
			}
		}
		return false
	}
	remove := func(model []entryModel) []entryModel {
		return slices.DeleteFunc(model, func(x entryModel) bool { return gone[x] })
	}
	if scan(0, SubPortSet) || scan(1, SubPortSet) || full {
		return next, remove
	}
	t.turn = 1 - t.turn
	for _, lane := range []int{t.turn, 1 - t.turn} {
		for class := VectorSet; class < VectorDelete; class++ {
			waits := slices.ContainsFunc(t.model, func(x entryModel) bool { return x.lane == 1 && x.class == VectorSet })
			if lane == 1 && waits && !allowed[VectorSet] {
				break
			}
			if scan(lane, class) {
				return next, remove
			}
		}
	}
	if allowed[VectorDelete] {
		scan(1, VectorDelete)
	}
	return next, remove
}

func (t *queuesTest) compare() {
	t.Helper()
	checkQueues(t.T, &t.q)
	if t.q.len() != len(t.model) {
		t.Fatalf("seed %d: %d entries, want %d", t.seed, t.q.len(), len(t.model))
	}
	for _, full := range []bool{false, true} {
		want := slices.ContainsFunc(t.model, func(x entryModel) bool {
			return x.class == SubPortSet || x.class != VectorDelete && !full
		})
		if t.q.sendable(full) != want {
			t.Fatalf("seed %d: sendable(%v) %v, want %v", t.seed, full, !want, want)
		}
	}
}

// checkQueues checks the invariant of queues for the entries.
func checkQueues(t *testing.T, q *queues) {
	t.Helper()
	bits := map[*object]uint8{}
	for lane := range q.lanes {
		for class := range q.lanes[lane] {
			for i := range q.lanes[lane][class].len() {
				o, bit := *q.lanes[lane][class].at(i), queuedBit(lane, Class(class))
				if bits[o]&bit != 0 {
					t.Fatalf("%s is twice in lane %d, class %v", o.name(), lane, Class(class))
				}
				bits[o] |= bit
			}
		}
	}
	for o, bit := range bits {
		if o.queued != bit {
			t.Fatalf("%s has the marks %b, and is in the queues %b", o.name(), o.queued, bit)
		}
	}
	seen := map[*wire]bool{}
	for i := range q.deletes.len() {
		w := *q.deletes.at(i)
		if seen[w] || !w.queued {
			t.Fatalf("vector %d is to be deleted twice, or not marked", w.id)
		}
		seen[w] = true
	}
}
