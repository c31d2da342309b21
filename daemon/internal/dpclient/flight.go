package dpclient

import (
	"cmp"
	"fmt"

	"google.golang.org/grpc/codes"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// operation is the next operation to send.
type operation struct {
	id     uint64
	class  Class
	object *object
	wire   *wire
	bulk   bool
}

// pop returns the object or vector whose operation is next, without sending it: only the queues change. ok is false when nothing may be sent now.
// Sub-port states go first; then the prompt and the bulk queues alternate, bulk operations on vectors only while their pace allows, because a
// prompt operation waits for those in flight.
func (b *book) pop() (operation, bool) {
	for lane := range b.queues {
		if op, ok := b.popClass(lane, SubPortSet); ok {
			return op, true
		}
	}
	if b.flights.len() >= b.window {
		return operation{}, false
	}
	b.turn = !b.turn
	for i := range b.queues {
		lane := i
		if b.turn {
			lane = 1 - i
		}
		for class := VectorSet; class < VectorDelete; class++ {
			if lane == 1 && paced(class) && b.queues[lane][class].len() > 0 && !b.paces[class].allows() {
				break // a later class must not overtake this one
			}
			if op, ok := b.popClass(lane, class); ok {
				op.bulk = lane == 1
				return op, true
			}
		}
	}
	for b.deletes.len() > 0 && b.paces[VectorDelete].allows() {
		w := b.deletes.pop()
		w.queued = false
		if !b.held && b.removable(w) {
			return operation{class: VectorDelete, object: w.former, wire: w, bulk: true}, true
		}
	}
	return operation{}, false
}

// popClass returns the next operation of a queue, or false if there is none.
func (b *book) popClass(lane int, class Class) (operation, bool) {
	queue := &b.queues[lane][class]
	for queue.len() > 0 {
		o := queue.pop()
		o.queued &^= queuedBit(lane, class)
		if b.class(o) != class {
			continue // the wanted state changed in the meantime, and was queued again in the right queue
		}
		if class != DestinationSet {
			return operation{class: class, object: o, wire: o.wire}, true
		}
		if g := b.vectors[o.wantTo]; g != nil && g.wanted && b.class(g) == VectorSet { // it waits in the other lane
			o.queued |= queuedBit(lane, class)
			queue.push(o)
			return operation{class: VectorSet, object: g, wire: g.wire}, true
		}
		w := b.target(o)
		if w == nil || w.content == nil {
			b.refuse(o, codes.FailedPrecondition, fmt.Sprintf("vector %d is not programmed; set it first", o.wantTo))
			continue
		}
		return operation{class: class, object: o, wire: w}, true
	}
	return operation{}, false
}

// send records that op is being sent, with pins as the fingerprint of the source ports, and numbers it.
func (b *book) send(op *operation, pins uint64) {
	op.id = b.next
	b.next++
	b.counters.Sent[op.class]++
	f := flight{class: op.class, object: op.object, wire: op.wire, bulk: op.bulk && paced(op.class)}
	if f.bulk {
		b.paces[op.class].send(op.id, b.now)
	}
	o := op.object
	if o != nil && (op.class != VectorDelete || !o.wanted) { // a vector that is declared again has another place
		o.op, o.refusal, f.change = op.id, nil, o.change
	}
	switch op.class {
	case SubPortSet:
		f.value = value{known: true, up: o.wantUp}
		o.sent = f.value
	case VectorSet:
		f.content = o.wantVector
		op.wire.content, op.wire.op, op.wire.foreign = f.content, op.id, false
		b.unblock(o)
	case DestinationSet:
		f.value, f.drain = value{to: op.wire.id, pins: pins}, o.drain
		o.touched, o.repin = true, false
		f.from = b.setSent(o, f.value)
	case DestinationDelete:
		f.from = b.setSent(o, value{})
	case VectorDelete:
		op.wire.content, op.wire.op = nil, op.id
		b.vacate(op.wire)
	}
	if op.class == VectorSet || op.class == VectorDelete {
		op.wire.unanswered++
	}
	b.flights.push(f)
}

// setSent moves a destination between vectors on the wire, and returns the place that it leaves, nil if there is none.
func (b *book) setSent(o *object, v value) *wire {
	before := o.sent.to
	o.sent = v
	if v.to == before {
		return nil
	}
	b.cohorts.place(o)
	if w := b.wires[v.to]; w != nil {
		w.users++
	}
	w := b.wires[before]
	if w != nil {
		w.users--
		if w.users == 0 {
			w.refused, w.clings = false, false
			b.markWire(w)
		}
	}
	return w
}

// acknowledge processes one acknowledgement. An error means that the data plane violates the protocol.
func (b *book) acknowledge(ack *farev1.Ack) error {
	id := ack.Id
	if id >= b.next || id == 0 {
		return fmt.Errorf("operation %d was acknowledged but never sent", id)
	}
	if id < b.base || b.flights.at(int(id-b.base)).done {
		return fmt.Errorf("operation %d was acknowledged again (%v) after its last acknowledgement", id, ack.Level)
	}
	f := b.flights.at(int(id - b.base))
	if f.bulk && ack.Level != farev1.AckLevel_ACK_LEVEL_ACCEPTED {
		b.paces[f.class].answer(id, b.now, b.window)
	}
	if ack.Level != farev1.AckLevel_ACK_LEVEL_ACCEPTED && (f.class == VectorSet || f.class == VectorDelete) {
		f.wire.unanswered--
	}
	switch ack.Level {
	case farev1.AckLevel_ACK_LEVEL_ACCEPTED:
		b.counters.Accepted++
		return nil
	case farev1.AckLevel_ACK_LEVEL_APPROXIMATE, farev1.AckLevel_ACK_LEVEL_IN_EFFECT:
		if ack.Level == farev1.AckLevel_ACK_LEVEL_APPROXIMATE {
			if f.class != VectorSet {
				return fmt.Errorf("operation %d, a %v, was acknowledged as approximate", id, f.class)
			}
			f.approximate = cmp.Or(ack.Message, "a share is off by more than 1 %")
		}
		if id < b.effect {
			return fmt.Errorf("operation %d was acknowledged in effect after operation %d", id, b.effect)
		}
		b.effect = id
		b.counters.InEffect[f.class]++
		f.done = true
		b.confirm(f)
	case farev1.AckLevel_ACK_LEVEL_REFUSED:
		b.counters.Refused[f.class]++
		f.done, f.refused = true, true
		b.revert(f, id, ack)
	default:
		return fmt.Errorf("operation %d was acknowledged with the unknown level %d", id, ack.Level)
	}
	for b.flights.len() > 0 && b.flights.at(0).done {
		b.flights.pop()
		b.base++
	}
	b.review()
	return nil
}

// confirm records that an operation is in effect.
func (b *book) confirm(f *flight) {
	o := f.object
	switch f.class {
	case SubPortSet, DestinationSet, DestinationDelete:
		o.effect = f.value
	case VectorSet:
		f.wire.effect, f.wire.approximate = f.content, f.approximate
		if owner := f.wire.owner; owner != nil && owner != o { // it has the place, and wants the content, of an operation of o
			b.settle(owner)
		}
	case VectorDelete:
		f.wire.effect = nil
		if f.wire.former == o && f.wire.content == nil {
			b.setFormer(f.wire, nil)
		}
		b.forget(f.wire)
	}
	if o == nil {
		return
	}
	if f.class != VectorDelete && f.change > o.done {
		if o.done = f.change; o.done == o.change {
			o.again = nil
		}
		b.report(o)
	}
	b.settle(o)
	b.drop(o)
}

// forget drops a place on the wire that is no longer used.
func (b *book) forget(w *wire) {
	b.vacate(w)
	if w.owner == nil && w.content == nil && w.effect == nil && w.users == 0 && b.wires[w.id] == w {
		delete(b.wires, w.id)
		b.setFormer(w, nil)
	}
}

// drop removes a deleted object that no longer exists in the data plane.
func (b *book) drop(o *object) {
	if o.wanted || !b.obeyed(o) || len(o.wanters) > 0 {
		return
	}
	// An operation of an object that was dropped before may be acknowledged after its number was declared again: remove only the object itself,
	// not its successor.
	switch o.Kind {
	case KindVector:
		if b.vectors[o.Vector] == o {
			delete(b.vectors, o.Vector)
		}
	case KindDestination:
		if b.destinations.get(o.Destination) == o {
			b.destinations.Delete(o.Destination.Source, o.Destination.Prefix)
		}
	}
}

// revert records that an operation was refused: the data plane keeps its previous state.
func (b *book) revert(f *flight, id uint64, ack *farev1.Ack) {
	o, w := f.object, f.wire
	code, message := codes.Code(ack.Code), ack.Message
	switch f.class {
	case SubPortSet, DestinationSet, DestinationDelete:
		if o.op == id {
			before := o.effect
			for i := range b.flights.len() { // an earlier operation may still be in flight
				if e := b.flights.at(i); e.object == o && !e.refused && !e.done {
					before = e.value
				}
			}
			b.setSent(o, before)
		}
		b.stays(f, id)
	case VectorSet, VectorDelete:
		if w.op == id {
			w.content = w.effect
			for i := range b.flights.len() {
				if e := b.flights.at(i); e.wire == w && (e.class == VectorSet || e.class == VectorDelete) && !e.refused && !e.done {
					w.content = e.content
				}
			}
			if f.class == VectorDelete {
				w.refused = true
				if passing(code) {
					b.retryDelete(w)
				}
			}
			if w.owner != nil && w.owner != o { // it expected the content of o
				b.mark(w.owner)
			}
			if w.content == nil && w.owner == nil { // deleted before it ever existed
				b.setFormer(w, nil)
				b.forget(w)
			}
		}
	}
	if o == nil {
		return
	}
	o.drains(f.drain)
	// A wanted state that went and came back while both operations were in flight is in effect if both are refused.
	nothing := b.obeyed(o) && (f.class == VectorSet || f.class == VectorDelete || f.value == o.effect)
	if f.change == o.change && o.refusal == nil && !nothing {
		b.refuse(o, code, message)
		if g := b.vectors[o.wantTo]; o.Kind == KindDestination && g != nil && g.wire != nil && g.wire.content != nil && g.wire.op > id {
			b.unblock(g) // its vector was set after this operation was sent
		}
		return
	}
	b.mark(o)
}
