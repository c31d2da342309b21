package dpclient

import (
	"testing"

	"google.golang.org/grpc/codes"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// TestRefusalsOfAChangeAndItsReturn lets a wanted state change and change back while the first operation is in flight,
// and refuses both operations: the wanted state is the one in effect, so the last event says so.
func TestRefusalsOfAChangeAndItsReturn(t *testing.T) {
	for _, x := range []struct {
		object   Object
		to, back func(b *book)
	}{
		{Object{Kind: KindSubPort, SubPort: "a"}, func(b *book) { b.setSubPort("a", false) }, func(b *book) { b.setSubPort("a", true) }},
		{Object{Kind: KindVector, Vector: 1}, func(b *book) { b.setVector(vector(1, 0, 7)) }, func(b *book) { b.setVector(vector(1, 0, 1)) }},
		{Object{Kind: KindDestination, Destination: dst(1)}, func(b *book) { b.setDestination(dst(1), 2) }, func(b *book) { b.setDestination(dst(1), 1) }},
	} {
		t.Run(x.object.String(), func(t *testing.T) {
			b := connectedBook()
			var sent []uint64
			send := func() {
				for op, ok := popCommitted(b); ok; op, ok = popCommitted(b) {
					b.send(&op, 0)
					sent = append(sent, op.id)
				}
			}
			answer := func(level farev1.AckLevel) {
				for _, id := range sent {
					if err := b.acknowledge(&farev1.Ack{Id: id, Level: level, Code: uint32(codes.Internal)}); err != nil {
						t.Fatal(err)
					}
				}
				sent = nil
			}
			b.setSubPort("a", true)
			b.setVector(vector(1, 0, 1))
			b.setVector(vector(2, 0, 2))
			b.setDestination(dst(1), 1)
			send()
			answer(farev1.AckLevel_ACK_LEVEL_IN_EFFECT)
			b.take(nil)
			x.to(b)
			send()
			x.back(b)
			change := b.wanted.change
			send()
			if len(sent) != 2 {
				t.Fatalf("%d operations in flight, want 2", len(sent))
			}
			answer(farev1.AckLevel_ACK_LEVEL_REFUSED)
			inEffect := func(when string, events []Event) {
				t.Helper()
				if len(events) != 1 || events[0].Object != x.object || events[0].Kind != InEffect || events[0].Change != change {
					t.Errorf("%s: events %+v, want that change %d of %s is in effect", when, events, change, x.object)
				}
			}
			inEffect("after both refusals", b.take(nil))
			x.to(b)
			send()
			x.back(b)
			change = b.wanted.change
			send()
			answer(farev1.AckLevel_ACK_LEVEL_IN_EFFECT)
			inEffect("after both are in effect", b.take(nil))
		})
	}
}

// TestRefusedSourcePorts checks that a destination whose new source ports are refused is reported as refused, and as in
// effect once they are.
func TestRefusedSourcePorts(t *testing.T) {
	b := connectedBook()
	b.pinning = true
	key := dst(1)
	answer := func(pins uint64, level farev1.AckLevel) {
		t.Helper()
		for op, ok := popCommitted(b); ok; op, ok = popCommitted(b) {
			b.send(&op, pins)
			if err := b.acknowledge(&farev1.Ack{Id: op.id, Level: level, Code: uint32(codes.Internal)}); err != nil {
				t.Fatal(err)
			}
		}
	}
	last := func(want EventKind) {
		t.Helper()
		if events := b.take(nil); len(events) == 0 || events[len(events)-1].Object.Destination != key || events[len(events)-1].Kind != want {
			t.Errorf("events %+v, want that %v is %v", events, key, want)
		}
	}
	b.setVector(vector(1, 1))
	b.setDestination(key, 1)
	answer(5, farev1.AckLevel_ACK_LEVEL_IN_EFFECT)
	last(InEffect)
	o := b.wanted.destinations.get(key)
	o.repin = true
	b.mark(o)
	answer(9, farev1.AckLevel_ACK_LEVEL_REFUSED)
	last(Refused)
	b.disconnect()
	b.resync(State{Vectors: map[uint32]*farev1.Vector{1: vector(1, 1)}, Destinations: map[Destination]uint32{key: 1}, Pins: map[Destination]uint64{key: 5}})
	answer(9, farev1.AckLevel_ACK_LEVEL_IN_EFFECT)
	last(InEffect)
}

// TestRefusalOfAnUndeclaredChange checks that a destination that was read back, and whose deletion is refused, is not
// reported as in effect after its first declaration.
func TestRefusalOfAnUndeclaredChange(t *testing.T) {
	b := newBook(newOrder(testForwarding()), DefaultWindow)
	b.resync(State{Vectors: map[uint32]*farev1.Vector{1: vector(1, 1)}, Destinations: map[Destination]uint32{dst(1): 1}})
	refuse := func(want Class) {
		t.Helper()
		op, _ := popCommitted(b)
		if b.send(&op, 0); op.class != want {
			t.Fatalf("%v is sent, want %v", op.class, want)
		}
		if err := b.acknowledge(&farev1.Ack{Id: op.id, Level: farev1.AckLevel_ACK_LEVEL_REFUSED, Code: uint32(codes.OutOfRange)}); err != nil {
			t.Fatal(err)
		}
	}
	b.release(true)
	refuse(DestinationDelete)
	b.setVector(vector(2, 2))
	carryOut(t, b)
	b.setDestination(dst(1), 2)
	refuse(DestinationSet)
	b.setDestination(dst(1), 3)
	for _, e := range b.take(nil) {
		if e.Object.Kind == KindDestination && e.Kind == InEffect || e.Change > b.wanted.change {
			t.Errorf("event %+v, and no change of the destination is in effect", e)
		}
	}
}
