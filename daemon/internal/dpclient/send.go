package dpclient

import (
	"fmt"

	"google.golang.org/grpc/codes"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// pop returns the object or vector whose operation is next, without sending it: only the queues change. ok is false
// when nothing may be sent now.
func (b *book) pop() (op operation, ok bool) { return b.queues.pop(b.full(), b.prepare) }

// full reports whether only sub-port states may be sent.
func (b *book) full() bool { return b.flights.len() >= b.window }

// prepare completes an operation from the queues. ok is false if it is not needed: then the wanted state has changed in
// the meantime, and was queued in the right queue, or the operation cannot be sent.
func (b *book) prepare(op operation) (_ operation, ok bool) {
	if op.class == VectorDelete {
		op.object = op.wire.former
		return op, b.places.removable(op.wire)
	}
	o := op.object
	if b.places.class(o) != op.class {
		return op, false
	}
	if op.class != DestinationSet {
		op.wire = o.wire
		return op, true
	}
	g := b.wanted.vectors[o.wantTo]
	if g != nil && g.wanted && b.places.class(g) == VectorSet { // it waits in the other lane
		b.queues.push(o, op.class, op.bulk)
		op.class, op.object, op.wire = VectorSet, g, g.wire
		return op, true
	}
	if op.wire = b.wanted.target(o); op.wire == nil || op.wire.content == nil {
		b.refuse(o, codes.FailedPrecondition, fmt.Sprintf("vector %d is not programmed; set it first", o.wantTo))
		return op, false
	}
	return op, true
}

// send records that op is being sent, with pins as the fingerprint of the source ports, and numbers it.
func (b *book) send(op *operation, pins uint64) {
	op.id = b.flights.next
	b.counters.Sent[op.class]++
	f := flight{class: op.class, object: op.object, wire: op.wire, bulk: op.bulk && paced(op.class)}
	if f.bulk {
		b.queues.paces[op.class].send(op.id, b.now)
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
		f.from = b.places.setSent(o, f.value)
	case DestinationDelete:
		f.from = b.places.setSent(o, value{})
	case VectorDelete:
		op.wire.content, op.wire.op = nil, op.id
		b.places.vacate(op.wire)
	}
	b.markWire(f.from)
	if op.class == VectorSet || op.class == VectorDelete {
		op.wire.unanswered++
	}
	b.flights.add(f)
}

// acknowledge processes one acknowledgement. An error means that the data plane violates the protocol.
func (b *book) acknowledge(ack *farev1.Ack) error {
	f, err := b.flights.answer(ack)
	if err != nil {
		return err
	}
	if !f.done {
		b.counters.Accepted++
		return nil
	}
	if f.bulk {
		b.queues.paces[f.class].answer(ack.Id, b.now, b.window)
	}
	if f.class == VectorSet || f.class == VectorDelete {
		f.wire.unanswered--
	}
	if ack.Level == farev1.AckLevel_ACK_LEVEL_REFUSED {
		b.counters.Refused[f.class]++
		b.revert(f, ack)
	} else {
		b.counters.InEffect[f.class]++
		b.confirm(f)
	}
	b.flights.trim()
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
		// Another owner has the place, and wants the content, of an operation of o.
		if owner := f.wire.owner; owner != nil && owner != o {
			b.wanted.settle(owner)
		}
	case VectorDelete:
		f.wire.effect = nil
		if f.wire.former == o && f.wire.content == nil {
			b.places.setFormer(f.wire, nil)
		}
		b.places.forget(f.wire)
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
	b.wanted.settle(o)
	b.wanted.drop(o)
}

// revert records that an operation was refused: the data plane keeps its previous state.
func (b *book) revert(f *flight, ack *farev1.Ack) {
	o, vectors := f.object, f.class == VectorSet || f.class == VectorDelete
	code := codes.Code(ack.Code)
	if vectors {
		b.revertVector(f, ack.Id, passing(code))
	} else {
		if o.op == ack.Id {
			b.markWire(b.places.setSent(o, b.flights.value(o, o.effect))) // an earlier operation may still be in flight
		}
		b.flights.inherit(f, ack.Id)
	}
	if o == nil {
		return
	}
	o.drains(f.drain)
	// A wanted state that went and came back while both operations were in flight is in effect if both are refused.
	nothing := b.wanted.obeyed(o) && (vectors || f.value == o.effect)
	if f.change != o.change || o.refusal != nil || nothing {
		b.mark(o)
		return
	}
	b.refuse(o, code, ack.Message)
	g := b.wanted.vectors[o.wantTo]
	if o.Kind == KindDestination && g != nil && g.wire != nil && g.wire.content != nil && g.wire.op > ack.Id {
		b.unblock(g) // its vector was set after this operation was sent
	}
}

// revertVector records that operation id, f, on a vector was refused. again has a deletion retried.
func (b *book) revertVector(f *flight, id uint64, again bool) {
	w := f.wire
	if w.op != id {
		return
	}
	w.content = b.flights.content(w, w.effect)
	if f.class == VectorDelete {
		w.refused = true
		if again {
			b.retries.addDelete(w, b.now)
		}
	}
	if w.owner != nil && w.owner != f.object { // it expected the content of the refused operation
		b.mark(w.owner)
	}
	if w.content == nil && w.owner == nil { // deleted before it ever existed
		b.places.setFormer(w, nil)
		b.places.forget(w)
	}
}
