package dpclient

import (
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// book coordinates the parts of a client's state: it applies declarations, operations and acknowledgements to them, and
// queues the operations that follow. It is pure: no I/O, no goroutine, no clock. Not safe for concurrent use.
// Invariant: after each call, an object or vector that needs an operation (places.class, places.removable) is in its
// queue, or listed in wanted.moved until the transaction ends.
type book struct {
	news
	wanted  wanted
	places  places
	queues  queues
	flights flights
	retries retries

	order    order
	window   int       // limit of operations in flight, not counting sub-port states
	pinning  bool      // the data plane supports flow pins, and Config.Ports computes them
	now      time.Time // the client's time
	counters Counters
}

// Counters are counts since New, by Class. Sent = in flight, or abandoned with a stream, + InEffect + Refused.
type Counters struct {
	Sent, InEffect, Refused [classes]uint64
	Accepted                uint64 // of all classes
	// Connects and Disconnects count streams; Stalls counts disconnects because of a missing acknowledgement.
	Connects, Disconnects, Stalls uint64
}

func newBook(order order, window int) *book {
	b := &book{order: order, window: window}
	b.flights.reset()
	b.wanted = wanted{news: &b.news, subPorts: map[string]*object{}, vectors: map[uint32]*object{}}
	b.places = places{
		objects: &b.wanted, flights: &b.flights, held: true,
		wires: map[uint32]*wire{}, cohorts: newCohorts(), recognized: map[string]uint32{}, lowest: 1,
	}
	return b
}

func (b *book) setSubPort(device string, up bool) uint64 {
	o := b.wanted.subPort(device)
	if o.wanted && o.wantUp == up {
		return o.change
	}
	o.wanted, o.wantUp = true, up
	change := b.wanted.touch(o)
	b.mark(o)
	return change
}

// forgetSubPort drops a sub-port. An operation of it may still be answered.
func (b *book) forgetSubPort(device string) {
	if o := b.wanted.subPorts[device]; o != nil {
		o.wanted = false
		b.wanted.touch(o)
		delete(b.wanted.subPorts, device)
	}
}

func (b *book) setVector(vector *farev1.Vector) uint64 {
	o := b.wanted.vector(vector.Id)
	if o.wanted && sameVector(o.wantVector, vector) {
		return o.change
	}
	vector = proto.CloneOf(vector)
	b.order.sort(vector)
	if o.wanted && sameVector(o.wantVector, vector) {
		return o.change
	}
	moved := b.pinning && !samePlaces(o.wantVector, vector)
	o.wanted, o.wantVector = true, vector
	change := b.wanted.touch(o)
	if b.wanted.connected {
		b.place(o)
		b.mark(o)
		b.unblock(o)
		if moved {
			for _, d := range o.wanters {
				d.repin = true
				b.mark(d)
			}
		}
	}
	return change
}

func (b *book) deleteVector(id uint32) uint64 {
	o := b.wanted.vectors[id]
	if o == nil {
		return 0
	}
	if !o.wanted {
		return o.change
	}
	o.wanted, o.wantVector = false, nil
	change := b.wanted.touch(o)
	b.markWire(b.places.orphan(o))
	b.wanted.settle(o)
	b.wanted.drop(o)
	return change
}

func (b *book) setDestination(key Destination, vector uint32, drain ...uint16) uint64 {
	if vector == 0 {
		return b.deleteDestination(key)
	}
	o := b.wanted.destination(key)
	if o.wanted && o.wantTo == vector {
		if b.pinning { // the owner reports that the ports may have changed
			o.repin = true
			b.wanted.move(o)
		}
		return o.change
	}
	b.wanted.want(o, vector)
	b.places.cohorts.place(o)
	for _, slot := range drain { // in addition to the slots that an unsent operation would have drained
		o.drains([]uint32{uint32(slot)})
	}
	o.cohort.drains = o.cohort.drains || len(o.drain) > 0
	b.wanted.move(o)
	return b.wanted.touch(o)
}

func (b *book) deleteDestination(key Destination) uint64 {
	o := b.wanted.destinations.get(key)
	if o == nil {
		return 0
	}
	if !o.wanted && o.change > 0 {
		return o.change
	}
	b.wanted.want(o, 0)
	b.places.cohorts.place(o)
	b.wanted.move(o)
	return b.wanted.touch(o)
}

// place gives a wanted vector a place on the wire: the present one if its content may be changed there, else another
// one, to which the destinations move.
func (b *book) place(o *object) {
	left, other := b.places.assign(o, b.queues.bulk)
	b.markWire(left)
	if other {
		for _, d := range o.wanters {
			b.mark(d)
		}
	}
}

// mark queues o if it needs an operation. Otherwise it settles o, and drops it once no operation can bring it back.
func (b *book) mark(o *object) {
	if c := b.places.class(o); c != classes {
		b.queues.push(o, c, b.queues.bulk)
		return
	}
	b.wanted.settle(o)
	if b.wanted.connected && !o.wanted && !b.flights.has(o) {
		b.wanted.drop(o)
	}
}

// markWire queues a vector's deletion if no destination needs it; nil is ignored.
func (b *book) markWire(w *wire) {
	if w != nil && b.places.removable(w) {
		b.queues.pushDelete(w)
	}
}

// refuse records that the current change of o was refused.
func (b *book) refuse(o *object, code codes.Code, message string) {
	o.refusal = &refusal{code: code, message: message}
	known := o.again != nil && *o.again == *o.refusal // the owner has it
	if o.again = nil; passing(code) {
		b.retries.add(o, b.now)
	}
	if o.done > 0 && o.done == o.change { // only new source ports were refused: once they are in effect, they are reported
		o.done--
	}
	if w := b.places.wires[o.sent.to]; o.Kind == KindDestination && w != nil && b.wanted.target(o) != w {
		w.clings = true
	}
	if o.Kind == KindDestination && o.wanted && code == codes.FailedPrecondition {
		b.wanted.block(o, true)
	}
	if !known {
		b.report(o)
	}
}

// unblock retries the destinations that waited for a vector.
func (b *book) unblock(g *object) {
	if b.wanted.blocked == 0 {
		return
	}
	for _, o := range g.wanters {
		if o.blocked {
			b.wanted.block(o, false)
			b.retry(o)
		}
	}
}

// adopt releases the changes of declared state that was read back. Removals stay held.
func (b *book) adopt() {
	if !b.places.adopted {
		if b.places.adopted = true; b.places.held {
			b.markAll()
		}
	}
}

// release releases removals (on), or holds them.
func (b *book) release(on bool) {
	if b.places.held == on {
		if b.places.held = !on; on {
			b.markAll()
		}
	}
}

// markAll queues everything that needs an operation.
func (b *book) markAll() {
	if !b.wanted.connected {
		return
	}
	b.takeChanged(true)
	for _, o := range b.wanted.sorted() {
		b.mark(o)
	}
	for _, w := range b.places.sorted() {
		b.markWire(w)
	}
}

// commit ends a transaction: it determines the places on the wire, and queues the operations that are still needed.
func (b *book) commit() {
	if b.wanted.connected {
		b.takeChanged(false)
	}
	for moved := &b.wanted.moved; moved.len() > 0; {
		o := moved.pop()
		o.moved = false
		b.mark(o)
	}
}
