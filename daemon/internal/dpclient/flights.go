package dpclient

import (
	"cmp"
	"fmt"
	"iter"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// flights are the operations of the present stream that were sent and not answered, with answered ones between them.
// Invariants:
//
//   - The i-th one from the front has ID base+i, and the last one next-1: IDs are consecutive, in the order of sending,
//     from 1.
//   - The first one is not answered.
//   - Each operation is answered once, and those in effect in the order of their IDs: effect is the largest of these,
//     and less than next.
type flights struct {
	fifo[flight]
	base   uint64
	next   uint64 // ID of the next operation
	effect uint64
}

// flight is an operation that was sent.
type flight struct {
	class   Class
	object  *object // nil for the deletion of a vector that was never declared
	wire    *wire
	from    *wire // the place that a destination leaves with it, nil if it is the same
	value   value
	content *farev1.Vector
	drain   []uint32 // slots to drain that were sent with it
	change  uint64
	bulk    bool // counts in the pace of its class
	done    bool // answered: in effect or refused
	// approximate is the message of an approximate acknowledgement.
	approximate string
}

// add appends the operation with ID next.
func (f *flights) add(x flight) {
	f.push(x)
	f.next++
}

// answer records an acknowledgement and returns its operation, valid until the next add or trim. The operation is done
// unless it was merely accepted. An error means that the data plane violates the protocol.
func (f *flights) answer(ack *farev1.Ack) (*flight, error) {
	id := ack.Id
	if id >= f.next || id == 0 {
		return nil, fmt.Errorf("operation %d was acknowledged but never sent", id)
	}
	if id < f.base || f.at(int(id-f.base)).done {
		return nil, fmt.Errorf("operation %d was acknowledged again (%v) after its last acknowledgement", id, ack.Level)
	}
	x := f.at(int(id - f.base))
	switch ack.Level {
	case farev1.AckLevel_ACK_LEVEL_ACCEPTED:
		return x, nil
	case farev1.AckLevel_ACK_LEVEL_APPROXIMATE, farev1.AckLevel_ACK_LEVEL_IN_EFFECT:
		deviates := ack.Level == farev1.AckLevel_ACK_LEVEL_APPROXIMATE
		if deviates && x.class != VectorSet {
			return nil, fmt.Errorf("operation %d, a %v, was acknowledged as approximate", id, x.class)
		}
		if id < f.effect {
			return nil, fmt.Errorf("operation %d was acknowledged in effect after operation %d", id, f.effect)
		}
		if f.effect = id; deviates {
			x.approximate = cmp.Or(ack.Message, "a share is off by more than 1 %")
		}
	case farev1.AckLevel_ACK_LEVEL_REFUSED:
	default:
		return nil, fmt.Errorf("operation %d was acknowledged with the unknown level %d", id, ack.Level)
	}
	x.done = true
	return x, nil
}

// trim removes answered operations from the front.
func (f *flights) trim() {
	for f.len() > 0 && f.at(0).done {
		f.pop()
		f.base++
	}
}

// unanswered yields the operations without an answer, in the order of sending.
func (f *flights) unanswered() iter.Seq[*flight] {
	return func(yield func(*flight) bool) {
		for i := range f.len() {
			if x := f.at(i); !x.done && !yield(x) {
				return
			}
		}
	}
}

// has reports whether an operation on o has no answer.
func (f *flights) has(o *object) bool {
	for x := range f.unanswered() {
		if x.object == o {
			return true
		}
	}
	return false
}

// value returns the state of a sub-port or destination once all operations are in effect, before if there is none.
func (f *flights) value(o *object, before value) value {
	for x := range f.unanswered() {
		if x.object == o {
			before = x.value
		}
	}
	return before
}

// content returns the content of a place on the wire once all operations are in effect, before if there is none.
func (f *flights) content(w *wire, before *farev1.Vector) *farev1.Vector {
	for x := range f.unanswered() {
		if x.wire == w && (x.class == VectorSet || x.class == VectorDelete) {
			before = x.content
		}
	}
	return before
}

// leaves reports whether an operation moves a destination away from w that wants another vector: it is on w if the
// operation is refused.
func (f *flights) leaves(w *wire, vector uint32) bool {
	for i := range f.len() {
		if x := f.at(i); x.from == w && !x.done && x.object.wantTo != vector {
			return true
		}
	}
	return false
}

// inherit records the refusal of operation id, x, which was to move a destination: a later operation on it leaves the
// place instead.
func (f *flights) inherit(x *flight, id uint64) {
	if x.from == nil {
		return
	}
	for i := int(id - f.base + 1); i < f.len(); i++ {
		if later := f.at(i); later.object == x.object {
			later.from = x.from
			return
		}
	}
}

// reset begins a stream without operations. It also initializes the zero value.
func (f *flights) reset() {
	f.fifo.reset()
	f.base, f.next, f.effect = 1, 1, 0
}
