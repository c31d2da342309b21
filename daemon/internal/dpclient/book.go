package dpclient

import (
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// book records the wanted, sent and effective state. It is pure: no I/O, no goroutine, no clock. Not safe for concurrent use.
type book struct {
	order   order
	window  int  // limit of operations in flight, not counting sub-port states
	pinning bool // the data plane supports flow pins, and Config.Ports computes them

	connected bool // a stream is open and was read back
	held      bool // removals are held
	adopted   bool // while they are held: declared state counts in place of state that was read back

	subPorts     map[string]*object
	vectors      map[uint32]*object // by the owner's number
	destinations destinations
	wires        map[uint32]*wire
	cohorts      cohorts
	recognized   map[string]uint32 // content of vectors that were read back without an owner
	lowest       uint32            // every smaller number on the wire is in use
	blocked      int               // destinations refused because their vector is missing
	retries      retries

	change  uint64
	bulk    bool                           // changes declared now join the bulk queues
	turn    bool                           // the bulk queues are next
	queues  [2][VectorDelete]fifo[*object] // prompt and bulk; one queue per class that objects have
	deletes fifo[*wire]
	paces   [classes]pace // of paced classes; all deletions of vectors are bulk
	now     time.Time     // the client's time, for paces

	flights fifo[flight] // the first one is operation base
	base    uint64
	next    uint64 // ID of the next operation
	effect  uint64 // highest ID acknowledged as in effect; it must grow

	connection []Event   // pending Connected/Disconnected events; only the last two are kept
	integrity  *Event    // the last report of this stream that Take has not returned; nil if there is none
	events     []*object // objects with news
	moved      []*object // destinations that the open transaction has declared
	taken      []*wire   // places on the wire with taken set, and some that no longer have it
	candidates []*cohort // scratch space of takeChanged

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
	return &book{
		order: order, window: window, held: true,
		subPorts: map[string]*object{}, vectors: map[uint32]*object{},
		wires: map[uint32]*wire{}, cohorts: newCohorts(), recognized: map[string]uint32{}, lowest: 1,
		base: 1, next: 1,
	}
}

// touch records another change of o and returns its number.
func (b *book) touch(o *object) uint64 {
	b.change++
	o.change, o.refusal, o.again = b.change, nil, nil
	b.block(o, false)
	return o.change
}

func (b *book) setSubPort(device string, up bool) uint64 {
	o := b.subPorts[device]
	if o == nil {
		o = &object{Object: Object{Kind: KindSubPort, SubPort: device}}
		b.subPorts[device] = o
	}
	if o.wanted && o.wantUp == up {
		return o.change
	}
	o.wanted, o.wantUp = true, up
	change := b.touch(o)
	b.mark(o)
	return change
}

func (b *book) setVector(vector *farev1.Vector) uint64 {
	o := b.vectors[vector.Id]
	if o == nil {
		o = &object{Object: Object{Kind: KindVector, Vector: vector.Id}}
		b.vectors[vector.Id] = o
	}
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
	change := b.touch(o)
	if b.connected {
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
	o := b.vectors[id]
	if o == nil {
		return 0
	}
	if !o.wanted {
		return o.change
	}
	o.wanted, o.wantVector = false, nil
	change := b.touch(o)
	b.orphan(o)
	b.settle(o)
	b.drop(o)
	return change
}

// orphan releases a vector's place on the wire.
func (b *book) orphan(o *object) {
	w := o.wire
	if w == nil {
		return
	}
	o.wire, w.owner, w.taken = nil, nil, false
	if w.content == nil { // never sent, or refused
		b.forget(w)
		return
	}
	if !o.wanted {
		b.setFormer(w, o)
	}
	b.markWire(w)
}

func (b *book) setDestination(key Destination, vector uint32, drain ...uint16) uint64 {
	if vector == 0 {
		return b.deleteDestination(key)
	}
	o := b.destination(key)
	if o.wanted && o.wantTo == vector {
		if b.pinning { // the owner reports that the ports may have changed
			o.repin = true
			b.move(o)
		}
		return o.change
	}
	b.want(o, vector)
	for _, slot := range drain { // in addition to the slots that an unsent operation would have drained
		o.drains([]uint32{uint32(slot)})
	}
	o.cohort.drains = o.cohort.drains || len(o.drain) > 0
	b.move(o)
	return b.touch(o)
}

func (b *book) deleteDestination(key Destination) uint64 {
	o := b.destinations.get(key)
	if o == nil {
		return 0
	}
	if !o.wanted && o.change > 0 {
		return o.change
	}
	b.want(o, 0)
	b.move(o)
	return b.touch(o)
}

func (b *book) destination(key Destination) *object {
	o := b.destinations.get(key)
	if o == nil {
		o = &object{Object: Object{Kind: KindDestination, Destination: key}}
		b.destinations.add(o)
	}
	return o
}

// drains adds slots to those that the object's next operation drains.
func (o *object) drains(slots []uint32) {
	for _, slot := range slots {
		if !slices.Contains(o.drain, slot) {
			o.drain = append(o.drain, slot)
		}
	}
	if o.cohort != nil && len(slots) > 0 {
		o.cohort.drains = true
	}
}

// want assigns a destination to a vector and updates the vectors' lists of destinations.
func (b *book) want(o *object, vector uint32) {
	if g := b.vectors[o.wantTo]; g != nil {
		last := len(g.wanters) - 1
		g.wanters[o.place] = g.wanters[last]
		g.wanters[o.place].place = o.place
		g.wanters[last] = nil
		g.wanters = g.wanters[:last]
		b.drop(g)
	}
	o.wantTo, o.wanted = vector, vector != 0
	b.cohorts.place(o)
	if vector == 0 {
		return
	}
	g := b.vectors[vector]
	if g == nil { // the owner has not declared it yet; count from the beginning
		g = &object{Object: Object{Kind: KindVector, Vector: vector}}
		b.vectors[vector] = g
	}
	o.place = len(g.wanters)
	g.wanters = append(g.wanters, o)
}

func byDestination(x, y *object) int { return x.Destination.Compare(y.Destination) }

// place assigns a number on the wire to a wanted vector; it keeps the current one if its content may be changed in place.
func (b *book) place(o *object) {
	w := o.wire
	if w != nil && b.replaceable(w, o) {
		return
	}
	b.orphan(o)
	w = b.recognize(o)
	if w == nil {
		w = b.allocate(o.Vector)
	}
	b.own(o, w)
	for _, d := range o.wanters {
		b.mark(d)
	}
}

// replaceable reports whether the content of a place on the wire may become o's wanted content. It may if it is equal already; otherwise, while
// removals are held, only if this client programmed it or changes are released, and never from one source to another.
func (b *book) replaceable(w *wire, o *object) bool {
	return sameVector(w.content, o.wantVector) ||
		(!b.held || !w.foreign || b.adopted) && (w.content == nil || w.content.Source == o.wantVector.Source)
}

// own makes o the owner of a place on the wire. A place that exists is taken, unless its confirmed content is o's, and all destinations want o.
func (b *book) own(o *object, w *wire) {
	w.owner, o.wire = o, w
	if w.content == nil {
		b.setFormer(w, nil)
		return
	}
	w.taken, w.bulk = true, b.bulk
	if w.closed = !w.open(); !w.closed {
		b.setFormer(w, nil)
		w.taken = !b.clear(w, o)
	}
	if w.taken && !slices.Contains(b.taken, w) {
		b.taken = append(b.taken, w)
	}
}

// setFormer replaces the object whose deletion is reported when a place on the wire is cleared; nil means none. The previous one no longer waits
// for this place.
func (b *book) setFormer(w *wire, o *object) {
	prev := w.former
	if prev == o {
		return
	}
	if w.former = o; o != nil {
		o.formers++
	}
	if prev != nil {
		prev.formers--
		b.settle(prev)
		b.drop(prev)
	}
}

// recognize finds a vector on the wire that has no owner and o's wanted content; nil if there is none.
func (b *book) recognize(o *object) *wire {
	if w := b.wires[o.Vector]; w != nil && w.owner == nil && w.content != nil && sameVector(w.content, o.wantVector) {
		return w
	}
	if len(b.recognized) == 0 {
		return nil
	}
	key := contentKey(o.wantVector)
	w := b.wires[b.recognized[key]]
	delete(b.recognized, key)
	if w != nil && w.owner == nil && w.content != nil && sameVector(w.content, o.wantVector) {
		return w
	}
	return nil
}

// allocate returns an unused place on the wire: the owner's own number if it is free, else the lowest free one.
func (b *book) allocate(wish uint32) *wire {
	id := wish
	if !b.free(id) {
		for !b.free(b.lowest) {
			b.lowest++
		}
		id = b.lowest
	}
	w := b.wires[id]
	if w == nil {
		w = &wire{id: id}
		b.wires[id] = w
	}
	w.foreign, w.refused = false, false
	return w
}

// free reports whether a number on the wire may be assigned to another vector: its deletion, if there was one, is confirmed.
func (b *book) free(id uint32) bool {
	w := b.wires[id]
	return w == nil || w.owner == nil && w.content == nil && w.effect == nil
}

// vacate records that a place on the wire may have become free.
func (b *book) vacate(w *wire) {
	if b.free(w.id) {
		b.lowest = min(b.lowest, w.id)
	}
}

// target returns the place on the wire that a wanted destination is to use; nil if its vector does not exist (yet).
func (b *book) target(o *object) *wire {
	if g := b.vectors[o.wantTo]; g != nil && g.wanted {
		return g.wire
	}
	return nil
}

// class returns the class of the operation that o needs now, or classes if it needs none.
func (b *book) class(o *object) Class {
	if !b.connected || o.refusal != nil {
		return classes
	}
	switch o.Kind {
	case KindSubPort:
		if o.wanted && (!o.sent.known || o.sent.up != o.wantUp) {
			return SubPortSet
		}
	case KindVector:
		if o.wanted && !sameVector(o.wire.content, o.wantVector) && (!o.wire.taken || b.clear(o.wire, o)) {
			return VectorSet
		}
	case KindDestination:
		if !o.wanted {
			if o.sent.to != 0 && !b.held {
				return DestinationDelete
			}
			return classes
		}
		w := b.target(o)
		switch {
		case w == nil:
			return DestinationSet // blocks when its turn comes
		case b.held && !b.adopted && !o.touched && o.sent.to != 0 && o.sent.to != w.id:
			return classes
		case o.sent.to != w.id && !w.open():
			return classes
		case o.sent.to != w.id || o.repin:
			return DestinationSet
		}
	}
	return classes
}

// mark queues o if it needs an operation, and settles it if it does not.
func (b *book) mark(o *object) {
	c := b.class(o)
	if c == classes {
		b.settle(o)
		return
	}
	lane := 0
	if b.bulk {
		lane = 1
	}
	if bit := queuedBit(lane, c); o.queued&bit == 0 {
		o.queued |= bit
		b.queues[lane][c].push(o)
	}
}

// queued returns the number of objects in the queues.
func (b *book) queued() int {
	n := b.deletes.len()
	for lane := range b.queues {
		for class := range b.queues[lane] {
			n += b.queues[lane][class].len()
		}
	}
	return n
}

// queuedBit returns the bit of object.queued for a queue. An object may be in both queues of a class: the second one finds nothing to do.
func queuedBit(lane int, c Class) uint8 { return 1 << (lane*int(VectorDelete) + int(c)) }

// markWire queues a vector's deletion if no destination needs it.
func (b *book) markWire(w *wire) {
	if b.connected && !b.held && !w.queued && b.removable(w) {
		w.queued = true
		b.deletes.push(w)
	}
}

func (b *book) removable(w *wire) bool {
	return w.owner == nil && w.content != nil && w.users == 0 && !w.refused
}

// settle reports o if its wanted state has come into effect since the last report.
func (b *book) settle(o *object) {
	if o.drain != nil && b.connected && b.obeyed(o) {
		o.drain = nil // in effect already: no slot moves
	}
	if !b.connected || o.change == 0 || o.done == o.change || o.refusal != nil || !b.obeyed(o) {
		return
	}
	o.done, o.again = o.change, nil
	b.report(o)
}

// obeyed reports whether the effective state equals the wanted state.
func (b *book) obeyed(o *object) bool {
	switch o.Kind {
	case KindSubPort:
		return o.effect.known && o.effect.up == o.wantUp && o.effect == o.sent
	case KindVector:
		if o.wanted {
			return o.wire != nil && sameVector(o.wire.effect, o.wantVector) && sameVector(o.wire.content, o.wantVector)
		}
		return o.formers == 0
	}
	if !o.wanted {
		return o.effect.to == 0 && o.sent.to == 0
	}
	w := b.target(o)
	return w != nil && o.effect.to == w.id && o.effect == o.sent
}

// report queues an event of o's current state.
func (b *book) report(o *object) {
	if !o.reported && o.change > 0 {
		o.reported = true
		b.events = append(b.events, o)
	}
}

// refuse records that the current change of o was refused.
func (b *book) refuse(o *object, code codes.Code, message string) {
	o.refusal = &refusal{code: code, message: message}
	known := o.again != nil && *o.again == *o.refusal // the owner has it
	if o.again = nil; passing(code) {
		b.retryLater(o)
	}
	if o.done == o.change { // only new source ports were refused: once they are in effect, they are reported
		o.done--
	}
	if w := b.wires[o.sent.to]; o.Kind == KindDestination && w != nil {
		b.cling(w, o)
	}
	if o.Kind == KindDestination && o.wanted && code == codes.FailedPrecondition {
		b.block(o, true)
	}
	if !known {
		b.report(o)
	}
}

// block records whether a destination waits for its vector.
func (b *book) block(o *object, on bool) {
	if o.blocked != on {
		o.blocked = on
		if on {
			b.blocked++
		} else {
			b.blocked--
		}
	}
}

// unblock retries the destinations that waited for a vector.
func (b *book) unblock(g *object) {
	if b.blocked == 0 {
		return
	}
	for _, o := range g.wanters {
		if o.blocked {
			b.block(o, false)
			b.retry(o)
		}
	}
}

// adopt releases the changes of declared state that was read back. Removals stay held.
func (b *book) adopt() {
	if b.adopted {
		return
	}
	b.adopted = true
	if !b.held || !b.connected {
		return
	}
	b.takeAll()
	for _, o := range b.sorted() {
		b.mark(o)
	}
}

// release releases removals (on), or holds them.
func (b *book) release(on bool) {
	if b.held != on {
		return
	}
	b.held = !on
	if !on || !b.connected {
		return
	}
	b.takeAll()
	for _, o := range b.sorted() {
		b.mark(o)
	}
	for _, w := range b.sortedWires() {
		b.markWire(w)
	}
}

// take appends the news to buf.
func (b *book) take(buf []Event) []Event {
	buf = append(buf, b.connection...)
	clear(b.connection)
	b.connection = b.connection[:0]
	if b.integrity != nil {
		buf = append(buf, *b.integrity)
		b.integrity = nil
	}
	for i, o := range b.events {
		event := Event{Kind: InEffect, Object: o.Object, Change: o.done, Op: o.op}
		switch {
		case o.refused() != nil:
			event.Kind, event.Change = Refused, o.change
			event.Code, event.Message = o.refused().code, o.refused().message
		case o.done == 0:
			event.Kind, event.Change = Pending, o.change
		case o.done == o.change && o.wire != nil:
			if o.approximate = o.wire.approximate; o.approximate != "" {
				event.Kind, event.Message = Approximate, o.approximate
			}
		}
		buf = append(buf, event)
		o.reported = false
		b.events[i] = nil
	}
	b.events = b.events[:0]
	return buf
}

// announce queues a Connected or Disconnected event.
func (b *book) announce(event Event) {
	if len(b.connection) == 2 {
		b.connection = slices.Delete(b.connection, 0, 1)
	}
	b.connection = append(b.connection, event)
}
