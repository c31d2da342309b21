package dpclient

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"google.golang.org/grpc/codes"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// TestReusedNumbersUnderSlowAcknowledgements runs random declarations, which reuse few vector numbers and few contents,
// against a data plane that answers late. The final wanted state must be in effect.
func TestReusedNumbersUnderSlowAcknowledgements(t *testing.T) {
	const seeds, steps = 1000, 300
	for seed := range uint64(seeds) {
		random := rand.New(rand.NewPCG(seed, 1))
		b := newBook(order{"a": 0, "b": 1}, 8)
		b.resync(State{})
		b.release(true)
		var unanswered []uint64
		vectors, destinations := map[uint32]uint32{}, map[Destination]uint32{}
		answer := func() {
			if err := b.acknowledge(&farev1.Ack{Id: unanswered[0], Level: farev1.AckLevel_ACK_LEVEL_IN_EFFECT}); err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			unanswered = unanswered[1:]
		}
		send := func() bool {
			op, ok := popCommitted(b)
			if ok {
				b.send(&op, 0)
				unanswered = append(unanswered, op.id)
			}
			return ok
		}
		vector := func(id, weight uint32) *farev1.Vector {
			return &farev1.Vector{Id: id, Members: []*farev1.VectorMember{{Plane: "p", Device: "a", Weight: weight}, {Plane: "p", Device: "b", Weight: 1}}}
		}
		for range steps {
			id := 1 + random.Uint32N(5)
			key := dst(random.IntN(5))
			switch random.IntN(7) {
			case 0, 1:
				weight := 1 + random.Uint32N(3)
				b.setVector(vector(id, weight))
				vectors[id] = weight
			case 2, 3:
				if vectors[id] != 0 {
					b.setDestination(key, id)
					destinations[key] = id
				}
			case 4: // like an owner: destinations leave before their vector is deleted
				for p, to := range destinations {
					if to == id {
						b.deleteDestination(p)
						delete(destinations, p)
					}
				}
				b.deleteVector(id)
				delete(vectors, id)
			case 5:
				send()
			case 6:
				if len(unanswered) > 0 {
					answer()
				}
			}
		}
		for send() || len(unanswered) > 0 {
			if len(unanswered) > 0 {
				answer()
			}
		}
		for prefix, id := range destinations {
			o := b.wanted.destinations.get(prefix)
			if o == nil || o.refusal != nil || !b.wanted.obeyed(o) {
				t.Fatalf("seed %d: %s is not in effect: %s", seed, prefix, stateOf(o))
			}
			if got := b.places.wires[o.effect.to]; got == nil || !sameVector(got.effect, vector(id, vectors[id])) {
				t.Fatalf("seed %d: %s does not have what vector %d is", seed, prefix, id)
			}
		}
		for o := range b.wanted.destinations.all() {
			prefix := o.key()
			if _, wanted := destinations[prefix]; !wanted && o.effect.to != 0 {
				t.Fatalf("seed %d: %s is still there", seed, prefix)
			}
		}
	}
}

// TestSuccessorOfADroppedVector covers the only sequence in which a vector's number is declared again while an
// operation of its dropped predecessor is still unanswered.
func TestSuccessorOfADroppedVector(t *testing.T) {
	b := newBook(order{"a": 0}, 8)
	b.resync(State{})
	b.release(true)
	vector := func(id, weight uint32) *farev1.Vector {
		return &farev1.Vector{Id: id, Members: []*farev1.VectorMember{{Plane: "p", Device: "a", Weight: weight}}}
	}
	var sent, answered uint64
	send := func(n int) {
		t.Helper()
		for range n {
			op, ok := popCommitted(b)
			if !ok {
				t.Fatal("nothing to send")
			}
			b.send(&op, 0)
			sent = op.id
		}
	}
	answer := func(n int) {
		t.Helper()
		for range n {
			answered++
			if err := b.acknowledge(&farev1.Ack{Id: answered, Level: farev1.AckLevel_ACK_LEVEL_IN_EFFECT}); err != nil {
				t.Fatal(err)
			}
		}
	}
	d1, d2 := dst(1), dst(2)
	b.setVector(vector(1, 1))
	b.setDestination(d1, 1)
	send(2)
	answer(2)
	b.setVector(vector(2, 2))
	send(1)
	b.deleteVector(2)
	send(1) // vector 2's set and delete are both unanswered
	b.deleteDestination(d1)
	b.deleteVector(1)
	b.setVector(vector(1, 3)) // number 1 is still used on the wire: vector 1 takes the place of vector 2
	answer(1)                 // vector 2 is dropped
	b.setVector(vector(2, 4))
	answer(1) // its predecessor's delete
	b.setDestination(d2, 2)
	for sent > answered || b.queues.lanes[0][VectorSet].len()+b.queues.lanes[0][DestinationSet].len()+b.queues.lanes[0][DestinationDelete].len() > 0 {
		if op, ok := popCommitted(b); ok {
			b.send(&op, 0)
			sent = op.id
		}
		if sent > answered {
			answer(1)
		}
	}
	if o := b.wanted.destinations.get(d2); o == nil || o.refusal != nil || !b.wanted.obeyed(o) {
		t.Fatalf("%s is not in effect: %s", d2, stateOf(o))
	}
}

func stateOf(o *object) string {
	if o == nil {
		return "forgotten"
	}
	return fmt.Sprintf("wanted %v of vector %d, sent %+v, in effect %+v, refusal %+v", o.wanted, o.wantTo, o.sent, o.effect, o.refusal)
}

// TestDrainGoesWithTheChange checks that slots to drain are sent with the operation that makes them lose addresses,
// merged over unsent changes, and with no other operation.
func TestDrainGoesWithTheChange(t *testing.T) {
	b := newBook(order{"a": 0}, 8)
	b.resync(State{})
	b.release(true)
	for id := range uint32(3) {
		b.setVector(&farev1.Vector{Id: id + 1, Members: []*farev1.VectorMember{{Plane: "p", Device: "a", Weight: id + 1}}})
	}
	d := dst(1)
	sent := newPart()
	next := func() *farev1.Operation {
		t.Helper()
		op, ok := popCommitted(b)
		if !ok {
			t.Fatal("nothing to send")
		}
		b.send(&op, 0)
		sent.fill(&op, nil)
		return &sent.operation
	}
	b.setDestination(d, 1, 3)
	b.setDestination(d, 2, 1, 3)
	for range 3 {
		next() // the vectors
	}
	if got := fmt.Sprint(next().GetSetDestination().GetDrainBeforeMove()); got != "[3 1]" {
		t.Errorf("slots to drain: %s, want those of both changes", got)
	}
	// The stream breaks before the answer: on the next one the slots are drained again, unless the change had arrived.
	b.disconnect()
	b.resync(State{})
	for range 3 { // the vectors again, then the destination
		next()
	}
	if got := fmt.Sprint(next().GetSetDestination().GetDrainBeforeMove()); got != "[3 1]" {
		t.Errorf("slots to drain after a broken stream: %s, want the same", got)
	}
	b.disconnect()
	b.resync(State{
		Vectors:      map[uint32]*farev1.Vector{1: b.wanted.vectors[1].wantVector, 2: b.wanted.vectors[2].wantVector, 3: b.wanted.vectors[3].wantVector},
		Destinations: map[Destination]uint32{d: 2},
	})
	if op, ok := popCommitted(b); ok {
		t.Fatalf("%v is sent although everything is there", op.class)
	}
	b.setDestination(d, 3)
	if got := next().GetSetDestination().GetDrainBeforeMove(); len(got) != 0 {
		t.Errorf("slots to drain: %v, want none: this change drains nothing", got)
	}
}

// TestDestinationsThatNeverWereAreDropped checks that destinations that are declared and withdrawn before they are
// sent, or after they were refused, are reported and take no memory.
func TestDestinationsThatNeverWereAreDropped(t *testing.T) {
	b := connectedBook()
	b.setVector(vector(1, 1))
	carryOut(t, b)
	for n := range 100 {
		b.setDestination(dst(n), 1)
		change := uint64(0)
		if n%2 == 0 {
			op, _ := popCommitted(b)
			b.send(&op, 0)
			if n%4 == 0 {
				change = b.deleteDestination(dst(n)) // before the refusal
				b.commit()
			}
			if err := b.acknowledge(&farev1.Ack{Id: op.id, Level: farev1.AckLevel_ACK_LEVEL_REFUSED, Code: uint32(codes.OutOfRange)}); err != nil {
				t.Fatal(err)
			}
		}
		if n%4 != 0 {
			change = b.deleteDestination(dst(n))
			b.commit()
		}
		if events := b.take(nil); len(events) != 1 || events[0].Kind != InEffect || events[0].Change != change {
			t.Fatalf("events %+v, want that change %d is in effect", events, change)
		}
	}
	if n := b.wanted.destinations.Len(); n != 0 {
		t.Errorf("%d destinations are left", n)
	}
}
