package dataplane

import (
	"fmt"

	"google.golang.org/grpc/codes"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// operation is what to send next.
type operation struct {
	id     uint64
	class  Class
	object *object
	wire   *wire
}

// pop returns the object or group whose operation is to be sent next, without sending it: nothing changes but the
// queues. ok is false when nothing may be sent now.
func (b *book) pop() (operation, bool) {
	for c := range b.queues {
		class := Class(c)
		if class != SubPortSet && b.flights.len() >= b.window {
			return operation{}, false
		}
		for b.queues[class].len() > 0 {
			o := b.queues[class].pop()
			o.queued &^= 1 << class
			if b.class(o) != class {
				continue // what was wanted changed in the meantime, and was queued again where it belongs
			}
			op := operation{class: class, object: o, wire: o.wire}
			if class == DestinationSet {
				if op.wire = b.target(o); op.wire == nil || op.wire.content == nil {
					b.refuse(o, codes.FailedPrecondition, fmt.Sprintf("group %d is not programmed; set it", o.wantTo))
					continue
				}
			}
			return op, true
		}
	}
	for b.deletes.len() > 0 && b.flights.len() < b.window {
		w := b.deletes.pop()
		w.queued = false
		if !b.held && b.removable(w) {
			return operation{class: GroupDelete, object: w.former, wire: w}, true
		}
	}
	return operation{}, false
}

// send notes that op is on its way, with pins as the fingerprint of the source ports, and numbers it.
func (b *book) send(op *operation, pins uint64) {
	op.id = b.next
	b.next++
	b.counters.Sent[op.class]++
	f := flight{class: op.class, object: op.object, wire: op.wire}
	o := op.object
	if o != nil {
		o.op, o.refusal, f.change = op.id, nil, o.change
	}
	switch op.class {
	case SubPortSet:
		f.value = value{known: true, up: o.wantUp}
		o.sent = f.value
	case GroupSet:
		f.content = o.wantGroup
		op.wire.content, op.wire.op, op.wire.foreign = f.content, op.id, false
		b.unblock(o)
	case DestinationSet:
		f.value, f.drain = value{to: op.wire.id, pins: pins}, o.drain
		o.touched, o.repin = true, false
		b.setSent(o, f.value)
	case DestinationDelete:
		b.setSent(o, value{})
	case GroupDelete:
		op.wire.content, op.wire.op = nil, op.id
	}
	b.flights.push(f)
}

// setSent moves a destination between groups on the wire.
func (b *book) setSent(o *object, v value) {
	before := o.sent.to
	o.sent = v
	if v.to == before {
		return
	}
	if w := b.wires[v.to]; w != nil {
		w.users++
	}
	if w := b.wires[before]; w != nil {
		w.users--
		if w.users == 0 {
			w.refused = false
			b.markWire(w)
		}
	}
}

// acknowledge takes one acknowledgement. An error means that the data plane cannot be understood any more.
func (b *book) acknowledge(ack *farev1.Ack) error {
	id := ack.Id
	if id >= b.next || id == 0 {
		return fmt.Errorf("operation %d was acknowledged but never sent", id)
	}
	if id < b.base || b.flights.at(int(id-b.base)).done {
		return fmt.Errorf("operation %d was acknowledged again (%v) after its last acknowledgement", id, ack.Level)
	}
	f := b.flights.at(int(id - b.base))
	switch ack.Level {
	case farev1.AckLevel_ACK_LEVEL_ACCEPTED:
		b.counters.Accepted++
		return nil
	case farev1.AckLevel_ACK_LEVEL_IN_EFFECT:
		if id < b.effect {
			return fmt.Errorf("operation %d was acknowledged in effect after operation %d", id, b.effect)
		}
		b.effect = id
		b.counters.InEffect++
		f.done = true
		b.confirm(f)
	case farev1.AckLevel_ACK_LEVEL_REFUSED:
		b.counters.Refused++
		f.done, f.refused = true, true
		b.revert(f, id, ack)
	default:
		return fmt.Errorf("operation %d was acknowledged with the unknown level %d", id, ack.Level)
	}
	for b.flights.len() > 0 && b.flights.at(0).done {
		b.flights.pop()
		b.base++
	}
	return nil
}

// confirm notes that an operation is in effect.
func (b *book) confirm(f *flight) {
	o := f.object
	switch f.class {
	case SubPortSet, DestinationSet, DestinationDelete:
		o.effect = f.value
	case GroupSet:
		f.wire.effect = f.content
	case GroupDelete:
		f.wire.effect = nil
		if f.wire.former == o && f.wire.content == nil {
			f.wire.former = nil
		}
		b.forget(f.wire)
	}
	if o == nil {
		return
	}
	if f.class != GroupDelete && f.change > o.done {
		o.done = f.change
		b.report(o)
	}
	b.settle(o)
	b.drop(o)
}

// forget drops a place on the wire that nothing stands on.
func (b *book) forget(w *wire) {
	if w.owner == nil && w.content == nil && w.effect == nil && w.users == 0 && b.wires[w.id] == w {
		delete(b.wires, w.id)
	}
}

// drop forgets a deleted object that the data plane does not have any more.
func (b *book) drop(o *object) {
	if o.wanted || !b.obeyed(o) || o.wanters > 0 {
		return
	}
	// An operation of an object that was dropped before may be acknowledged after its number was declared anew: only the
	// object itself goes, not its successor.
	switch o.Kind {
	case KindGroup:
		if b.groups[o.Group] == o {
			delete(b.groups, o.Group)
		}
	case KindDestination:
		if b.destinations[o.Destination] == o {
			delete(b.destinations, o.Destination)
		}
	}
}

// revert notes that an operation was refused: the data plane still has what it had before.
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
	case GroupSet, GroupDelete:
		if w.op == id {
			w.content = w.effect
			for i := range b.flights.len() {
				if e := b.flights.at(i); e.wire == w && (e.class == GroupSet || e.class == GroupDelete) && !e.refused && !e.done {
					w.content = e.content
				}
			}
			if f.class == GroupDelete {
				w.refused = true
			}
			if former := w.former; w.content == nil && w.owner == nil { // deleted before it ever was
				w.former = nil
				b.forget(w)
				if former != nil {
					b.settle(former)
					b.drop(former)
				}
			}
		}
	}
	if o == nil {
		return
	}
	o.drains(f.drain)
	if f.change == o.change && o.refusal == nil {
		b.refuse(o, code, message)
		if g := b.groups[o.wantTo]; o.Kind == KindDestination && g != nil && g.wire != nil && g.wire.content != nil && g.wire.op > id {
			b.unblock(g) // its group was set after this was sent
		}
		return
	}
	b.mark(o)
}
