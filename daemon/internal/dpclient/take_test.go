package dpclient

import (
	"cmp"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"google.golang.org/grpc/codes"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// expander is a data plane that applies operations in the order sent, and expands every one to the weights of each destination. It judges each
// change of a destination's weights by the owner's declarations alone.
type expander struct {
	t       *testing.T
	seed    uint64
	b       *book
	want    map[Destination]uint32    // the owner's declarations
	content map[uint32]*farev1.Vector // of the owner's vectors
	wanted  map[Destination]map[string]int
	clock   int // counts declarations

	vectors      map[uint32]*farev1.Vector
	destinations map[Destination]uint32

	// The data plane's state once all operations sent are applied, and the owner's vectors (bits) that each destination wanted while it had
	// their weights there: these may change in place.
	sentVectors      map[uint32]*farev1.Vector
	sentDestinations map[Destination]uint32
	has              map[Destination]uint64
	waiting          []expected

	foreign map[Destination]string // weights that must not change while removals are held

	operations, replaced int
	refused              bool                       // an operation was refused
	ever                 map[uint32]map[string]bool // the weights that each of the owner's vectors has had
}

// expected is an operation in flight.
type expected struct {
	operation
	content *farev1.Vector
	to      uint32
	vector  uint32                 // the owner's number
	had     map[Destination]uint64 // expander.has before it
	sentAt  int
}

func newExpander(t *testing.T, seed uint64) *expander {
	return &expander{
		t: t, seed: seed, b: newBook(newOrder(testForwarding()), 6),
		want: map[Destination]uint32{}, content: map[uint32]*farev1.Vector{}, wanted: map[Destination]map[string]int{},
		vectors: map[uint32]*farev1.Vector{}, destinations: map[Destination]uint32{},
		sentVectors: map[uint32]*farev1.Vector{}, sentDestinations: map[Destination]uint32{}, has: map[Destination]uint64{},
		ever: map[uint32]map[string]bool{},
	}
}

// note records the weights that each destination wants now.
func (e *expander) note() {
	e.clock++
	for id, g := range e.content {
		if e.ever[id] == nil {
			e.ever[id] = map[string]bool{}
		}
		e.ever[id][describe(g)] = true
	}
	for d, id := range e.want {
		if e.wanted[d] == nil {
			e.wanted[d] = map[string]int{}
		}
		weights := describe(e.content[id])
		e.wanted[d][weights] = e.clock
		for _, g := range []*farev1.Vector{e.sentVectors[e.sentDestinations[d]], e.vectors[e.destinations[d]]} {
			if g != nil && describe(g) == weights {
				e.has[d] |= 1 << id
			}
		}
	}
}

func (e *expander) send() bool {
	op, ok := e.b.pop()
	if !ok {
		return false
	}
	e.b.send(&op, 0)
	x := expected{operation: op, sentAt: e.clock, had: maps.Clone(e.has)}
	switch op.class {
	case VectorSet:
		x.content, x.vector = op.wire.content, op.object.Vector
		e.sentVectors[op.wire.id] = x.content
		for d, to := range e.sentDestinations {
			if to == op.wire.id && e.want[d] == x.vector {
				e.has[d] = 1 << x.vector
			}
		}
	case DestinationSet:
		x.to, x.vector = op.wire.id, op.object.wantTo
		op.object.drain = nil
		e.sentDestinations[op.object.Destination], e.has[op.object.Destination] = x.to, 1<<x.vector
	case DestinationDelete:
		delete(e.sentDestinations, op.object.Destination)
	}
	e.waiting = append(e.waiting, x)
	e.operations++
	return true
}

func (e *expander) weights() map[Destination]string {
	out := map[Destination]string{}
	for d, id := range e.destinations {
		out[d] = describe(e.vectors[id])
	}
	return out
}

// answer applies or refuses the oldest operation. It fails the test if a destination gets weights that it has not wanted since the operation was
// sent, unless its vector changed in place.
func (e *expander) answer(refuse bool) {
	e.t.Helper()
	op := e.waiting[0]
	e.waiting = e.waiting[1:]
	ack := &farev1.Ack{Id: op.id, Level: farev1.AckLevel_ACK_LEVEL_IN_EFFECT}
	code := codes.ResourceExhausted
	if e.impossible(op) {
		refuse, code = true, codes.FailedPrecondition
	}
	if refuse {
		e.refused = true
		ack.Level, ack.Code, ack.Message = farev1.AckLevel_ACK_LEVEL_REFUSED, uint32(code), "table full"
		e.lose(op)
	} else {
		e.apply(op)
	}
	if err := e.b.acknowledge(ack); err != nil {
		e.t.Fatal(err)
	}
}

// impossible reports whether every data plane refuses an operation because an earlier one was refused.
func (e *expander) impossible(op expected) bool {
	return e.refused && (op.class == DestinationSet && e.vectors[op.to] == nil ||
		op.class == VectorDelete && slices.Contains(slices.Collect(maps.Values(e.destinations)), op.wire.id))
}

// lose restores what a lost operation would have changed.
func (e *expander) lose(op expected) {
	e.sentVectors, e.sentDestinations = maps.Clone(e.vectors), maps.Clone(e.destinations)
	for _, later := range e.waiting {
		switch later.class {
		case VectorSet:
			e.sentVectors[later.wire.id] = later.content
		case DestinationSet:
			e.sentDestinations[later.object.Destination] = later.to
		case DestinationDelete:
			delete(e.sentDestinations, later.object.Destination)
		}
	}
	for d, id := range op.had {
		if (op.class == VectorSet && e.sentDestinations[d] == op.wire.id || op.class == DestinationSet && d == op.object.Destination) && e.has[d]&(1<<op.vector) != 0 {
			e.has[d] |= id
		}
	}
}

func (e *expander) apply(op expected) {
	e.t.Helper()
	var affected []Destination
	switch op.class {
	case VectorSet:
		for d, id := range e.destinations {
			if id == op.wire.id {
				affected = append(affected, d)
			}
		}
	case DestinationSet:
		affected = append(affected, op.object.Destination)
	}
	before := map[Destination]string{}
	for _, d := range affected {
		if id, ok := e.destinations[d]; ok {
			before[d] = describe(e.vectors[id])
		}
	}
	switch op.class {
	case VectorSet:
		e.vectors[op.wire.id] = op.content
	case DestinationSet:
		if e.vectors[op.to] == nil {
			e.t.Fatalf("seed %d: %v is set to vector %d, which does not exist", e.seed, op.object, op.to)
		}
		e.destinations[op.object.Destination] = op.to
	case DestinationDelete:
		delete(e.destinations, op.object.Destination)
	case VectorDelete:
		if slices.Contains(slices.Collect(maps.Values(e.destinations)), op.wire.id) {
			e.t.Fatalf("seed %d: vector %d is deleted while a destination uses it", e.seed, op.wire.id)
		}
		delete(e.vectors, op.wire.id)
	}
	for _, d := range affected {
		got := describe(e.vectors[e.destinations[d]])
		if was, ok := e.foreign[d]; ok && got != was {
			e.t.Fatalf("seed %d: %v gives %s the weights%s while removals are held, before%s", e.seed, op.class, d, got, was)
		}
		inPlace := op.class == VectorSet && (op.had[d]|e.has[d])&(1<<op.vector) != 0
		if op.class == VectorSet && !inPlace {
			e.replaced++
		}
		// After a refusal a destination may join its vector before the vector's last change.
		stale := e.refused && op.class == DestinationSet && e.ever[op.vector][got]
		if got == before[d] || inPlace || stale {
			continue
		}
		if at, ok := e.wanted[d][got]; !ok || at < op.sentAt {
			e.t.Fatalf("seed %d: %v of %v gives %s the weights%s, before%s; it wants%s", e.seed, op.class, op.object.Object, d, got, before[d], describe(cmp.Or(e.content[e.want[d]], &farev1.Vector{})))
		}
	}
}

// reconnect ends the stream after some of the operations in flight have arrived, and reads the state back.
func (e *expander) reconnect(random *rand.Rand) {
	e.t.Helper()
	for arrived := random.IntN(len(e.waiting) + 1); len(e.waiting) > 0; arrived-- {
		op := e.waiting[0]
		e.waiting = e.waiting[1:]
		if arrived > 0 && !e.impossible(op) {
			e.apply(op)
		} else {
			e.lose(op)
		}
	}
	e.b.disconnect()
	e.b.resync(State{Vectors: maps.Clone(e.vectors), Destinations: maps.Clone(e.destinations)})
}

// finish sends and answers everything.
func (e *expander) finish() {
	e.t.Helper()
	for {
		for e.send() {
		}
		if len(e.waiting) == 0 {
			return
		}
		e.answer(false)
	}
}

// declare makes one random transaction: single destinations, or most of those of a vector, change to another vector; vectors change; vectors
// without a destination are deleted.
func (e *expander) declare(random *rand.Rand, sources []string) {
	source := func(id uint32) string { return sources[int(id)%len(sources)] }
	set := func(id uint32) {
		g := vector(id, 1+random.Uint32N(2), random.Uint32N(2), 1)
		g.Source = source(id)
		if random.IntN(40) == 0 {
			g.Slots = []*farev1.VectorSlot{{DrainBeforeMove: true}}
		}
		e.content[id] = g
		e.b.setVector(g)
	}
	assign := func(d Destination, id uint32) {
		if e.content[id] == nil {
			set(id)
		}
		e.want[d] = id
		if random.IntN(30) == 0 {
			e.b.setDestination(d, id, 1)
		} else {
			e.b.setDestination(d, id)
		}
	}
	for range 1 + random.IntN(3) {
		id := 1 + random.Uint32N(6)
		key := dst(random.IntN(24))
		if s := source(id); s != "" {
			key.Source = twoSources[slices.Index(sources, s)]
		}
		switch random.IntN(12) {
		case 0:
			if e.content[id] != nil {
				set(id)
			}
		case 1:
			delete(e.want, key)
			e.b.deleteDestination(key)
		case 2, 3:
			assign(key, id)
		default: // all destinations of a vector, or all but a few
			to := 1 + random.Uint32N(6)
			if random.IntN(2) == 0 && source(to) == source(id) {
				set(to)
			}
			stay := []float64{0, 0, 0.1, 0.5}[random.IntN(4)]
			all := random.IntN(3) == 0 // of all vectors
			for _, d := range slices.SortedFunc(maps.Keys(e.want), Destination.Compare) {
				if (all || e.want[d] == id) && d.Source == key.Source && source(to) == source(id) && random.Float64() >= stay {
					assign(d, to)
				}
			}
		}
	}
	used := slices.Collect(maps.Values(e.want))
	for id := range uint32(7) {
		if e.content[id] != nil && !slices.Contains(used, id) && random.IntN(4) > 0 {
			delete(e.content, id)
			e.b.deleteVector(id)
		}
	}
	e.note()
	e.b.commit()
}

// checkCohorts compares the counts with those of the destinations themselves.
func (e *expander) checkCohorts() {
	e.t.Helper()
	users, members := map[uint32]int{}, map[cohortKey]int{}
	for _, o := range e.b.destinations {
		if key := (cohortKey{o.sent.to, o.wantTo}); key != (cohortKey{}) {
			users[o.sent.to]++
			members[key]++
		}
	}
	for key, c := range e.b.cohorts.byKey {
		if c.n != members[key] {
			e.t.Fatalf("seed %d: cohort %+v has %d destinations, want %d", e.seed, key, c.n, members[key])
		}
		delete(members, key)
	}
	if len(members) > 0 {
		e.t.Fatalf("seed %d: no cohorts %v", e.seed, members)
	}
	for id, w := range e.b.wires {
		if w.users != users[id] {
			e.t.Fatalf("seed %d: vector %d has %d users, want %d", e.seed, id, w.users, users[id])
		}
	}
}

// TestNoDestinationGetsForeignWeights runs random transactions against a data plane that answers late, refuses, and disconnects: no operation may
// give a destination weights that it does not want, and in the end every one has what it wants.
func TestNoDestinationGetsForeignWeights(t *testing.T) {
	replaced := 0
	for _, refusals := range []bool{false, true} {
		for seed := range uint64(200) {
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
				if o, g := e.b.destinations[d], e.b.vectors[id]; o.refusal == nil && g.refusal == nil && (!e.b.obeyed(o) || !e.b.obeyed(g)) {
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
				if o := e.b.destinations[d]; got[d] != describe(e.content[id]) || !e.b.obeyed(o) || o.done != o.change {
					t.Fatalf("seed %d: %s has%s, wants%s: %s", seed, d, got[d], describe(e.content[id]), stateOf(o))
				}
			}
			if len(e.b.taken) != 0 || len(e.vectors) != len(e.content) || len(e.b.vectors) != len(e.content) || len(e.b.wires) != len(e.content) {
				t.Fatalf("seed %d: %d taken places, %d vectors in the data plane, %d objects, %d places, want %d", seed, len(e.b.taken), len(e.vectors), len(e.b.vectors), len(e.b.wires), len(e.content))
			}
			replaced += e.replaced
		}
	}
	if replaced < 300 {
		t.Errorf("%d destinations changed their vector without an operation of their own: the test does not try what it is for", replaced)
	}
}

// TestOneDestinationStays checks the other ways in which a destination keeps a place from another vector: the refusal of two moves in a row, and slots that it has to
// drain.
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
			t.Fatalf("%v of %v is sent while a destination of another vector may be there", op.class, op.object.Object)
		}
		answer(b, second, farev1.AckLevel_ACK_LEVEL_REFUSED)
		if op := next(b); op.class != VectorSet || op.wire == b.wires[b.destinations[dst(0)].sent.to] {
			t.Errorf("%v on the place of the destination that was refused", op.class)
		}
		carryOut(t, b)
		for n := 1; n < size; n++ {
			if o := b.destinations[dst(n)]; !b.obeyed(o) {
				t.Fatalf("%s: %s", o.Object, stateOf(o))
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
			if op.class == DestinationSet && op.object.Destination == dst(3) && slices.Equal(op.object.drain, []uint32{7}) {
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
		for _, o := range b.destinations {
			if !b.obeyed(o) {
				t.Errorf("%s: %s", o.Object, stateOf(o))
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

// TestBulkChangeIsOneOperation checks the number of operations with which all destinations of a vector, or nearly all, change to another one.
func TestBulkChangeIsOneOperation(t *testing.T) {
	for _, c := range []bulkCase{
		{"all", 10000, 0, 0, 1},
		{"all but ten", 10000, 10, 0, 12}, // a place for the ten, their ten operations, and the replacement
		{"all, the first 800 in a burst of its own", 10000, 0, 800, 1 + 6 + 1 + 6 + 1}, // a vector, a window of 6 moves, the replacement, 6 moves back, a removal
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

// TestPlaceTakenBeforeItsContentIsInEffect checks that a vector is reported in effect if it takes a place whose content, equal to its own, another
// vector has sent and the data plane has not acknowledged.
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
	if w := e.b.vectors[2].wire; w == nil || w.id != 1 {
		t.Fatalf("vector 2 has not taken the place of vector 1: %+v", w)
	}
	e.finish()
	for _, o := range e.b.sorted() {
		if o.change > 0 && o.done != o.change {
			t.Errorf("%s: change %d is not in effect, the last one that is: %d", o.Object, o.change, o.done)
		}
	}
}

// TestSupersededChangesCostNothing checks that the changes that a slow data plane has not been sent yet are replaced by the last one.
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

// TestFlowPinsAfterATakenPlace checks that source ports are recomputed if the slots' places changed, and not sent if they are equal.
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
