package dpclient

import (
	"cmp"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"google.golang.org/grpc/codes"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// expander is a data plane that applies operations in the order sent, and expands every one to the weights of each
// destination. It judges each change of a destination's weights by the owner's declarations alone.
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

	// The data plane's state once all operations sent are applied, and the owner's vectors (bits) that each destination
	// wanted while it had their weights there: these may change in place.
	sentVectors      map[uint32]*farev1.Vector
	sentDestinations map[Destination]uint32
	has              map[Destination]uint64
	waiting          []expected

	foreign map[Destination]string // weights that must not change while removals are held

	operations, replaced, checks int

	refused bool                       // an operation was refused
	ever    map[uint32]map[string]bool // the weights that each of the owner's vectors has had
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
		e.sentDestinations[op.object.key()], e.has[op.object.key()] = x.to, 1<<x.vector
	case DestinationDelete:
		delete(e.sentDestinations, op.object.key())
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

// answer applies or refuses the oldest operation. It fails the test if a destination gets weights that it has not
// wanted since the operation was sent, unless its vector changed in place.
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
			e.sentDestinations[later.object.key()] = later.to
		case DestinationDelete:
			delete(e.sentDestinations, later.object.key())
		}
	}
	for d, id := range op.had {
		if (op.class == VectorSet && e.sentDestinations[d] == op.wire.id || op.class == DestinationSet && d == op.object.key()) && e.has[d]&(1<<op.vector) != 0 {
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
		affected = append(affected, op.object.key())
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
		e.destinations[op.object.key()] = op.to
	case DestinationDelete:
		delete(e.destinations, op.object.key())
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
			e.t.Fatalf("seed %d: %v of %v gives %s the weights%s, before%s; it wants%s", e.seed, op.class, op.object.name(), d, got, before[d], describe(cmp.Or(e.content[e.want[d]], &farev1.Vector{})))
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

// declare makes one random transaction: single destinations, or most of those of a vector, change to another vector;
// vectors change; vectors without a destination are deleted.
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

// checkCohorts checks the invariants of the book and its parts; cohorts are those of places.
func (e *expander) checkCohorts() {
	e.t.Helper()
	checkPlaces(e.t, &e.b.places)
	if e.checks++; e.checks%10 > 0 { // the others take as long as all the rest of a test
		return
	}
	checkWanted(e.t, &e.b.wanted)
	checkQueues(e.t, &e.b.queues)
	for _, o := range e.b.wanted.sorted() {
		if c := e.b.places.class(o); c != classes && !o.moved && o.queued&(queuedBit(0, c)|queuedBit(1, c)) == 0 {
			e.t.Fatalf("seed %d: %s needs a %v, and is not queued: %s", e.seed, o.name(), c, stateOf(o))
		}
	}
	for _, w := range e.b.places.wires {
		if e.b.places.removable(w) && !w.queued {
			e.t.Fatalf("seed %d: the deletion of vector %d is not queued", e.seed, w.id)
		}
	}
}
