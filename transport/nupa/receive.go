package nupa

import (
	"encoding/binary"

	"github.com/fared/fared/transport/rdma"
)

// receiver is a ring's receiving end: next is the next operation to receive.
type receiver struct {
	ring
	start, next uint64
	d           descriptor // of the taken operation
}

// arrival is the result of receiver.take.
type arrival uint8

const (
	nothing   arrival = iota // not posted yet
	operation                // taken: d describes it
	damage                   // contents that no sender writes
	closed                   // the sender has closed the ring
)

// take takes the next operation. It skips revoked operations, and returns their number in skips.
func (r *receiver) take() (what arrival, skips int) {
	for {
		if r.first().Load() != r.start {
			return closed, skips
		}
		switch w := r.state(r.next).Load(); {
		case w == word(r.next, posted):
			if !r.change(r.next, posted, taken) {
				continue // revoked concurrently
			}
			if !r.read() {
				return damage, skips
			}
			return operation, skips
		case w == word(r.next, revoked):
			if r.change(r.next, revoked, passed) {
				r.next++
				skips++
			}
		case w>>stateBits < r.next:
			return nothing, skips
		default:
			if r.first().Load() == r.start {
				return damage, skips
			}
		}
	}
}

// revoked reports whether the next operation has been revoked or the ring closed.
func (r *receiver) revoked() bool {
	return r.state(r.next).Load() != word(r.next, posted) || r.first().Load() != r.start
}

// read copies the descriptor and reports whether it is valid: it refers to nothing outside the ring and the heap.
func (r *receiver) read() bool {
	var b [dataAt]byte
	copy(b[8:], r.mem[r.slot(r.next)+8:]) // without the word, which the sender may be changing
	le, d := binary.LittleEndian, &r.d
	d.kind, d.headLength, d.where = rdma.OpKind(b[8]), b[9], b[10]
	d.key, d.remote, d.length = le.Uint32(b[12:]), le.Uint64(b[16:]), le.Uint32(b[24:])
	d.offset, d.compare, d.swap = le.Uint64(b[32:]), le.Uint64(b[40:]), le.Uint64(b[48:])
	copy(d.head[:], b[headAt:])
	if d.kind > rdma.OpFetchAdd || d.headLength > rdma.MaxHead || d.length > MaxOp || d.headLength > 0 && d.kind != rdma.OpSend {
		return false
	}
	switch {
	case d.kind == rdma.OpCompareSwap || d.kind == rdma.OpFetchAdd:
		return d.length == 8 && d.where == inPlace
	case d.length == 0:
		return d.where == inPlace
	case d.where == inPlace:
		return d.kind != rdma.OpRead && d.length <= inPlaceSize
	case d.where == inFile:
		// The result of a READ goes to the ring's staging only: a peer must not make this endpoint write elsewhere.
		return r.inStaging(d.offset, uint64(d.length)) || d.kind != rdma.OpRead && r.inHeap(d.offset, uint64(d.length))
	}
	return false
}

// data returns the memory of the taken operation's data.
func (r *receiver) data() []byte {
	at := int(r.d.offset)
	if r.d.where == inPlace {
		at = r.slot(r.next) + dataAt
	}
	return r.mem[at:][:r.d.length]
}

func (r *receiver) head() []byte { return r.d.head[:r.d.headLength] }

// putBack postpones the taken operation. It returns false if the operation was canceled.
func (r *receiver) putBack() bool { return r.change(r.next, taken, posted) }

// commit announces the delivery of the taken operation. It returns false if the operation was canceled, and must not be
// delivered.
func (r *receiver) commit() bool { return r.change(r.next, taken, committed) }

// end ends the taken operation.
func (r *receiver) end(s status, was uint64) {
	slot := r.mem[r.slot(r.next):]
	binary.LittleEndian.PutUint32(slot[64:], uint32(s))
	binary.LittleEndian.PutUint64(slot[72:], was)
	for w := r.state(r.next).Load(); w>>stateBits == r.next && !r.state(r.next).CompareAndSwap(w, word(r.next, done)); {
		w = r.state(r.next).Load() // canceled concurrently
	}
	r.next++
}

// leave notifies the sender that the receiver has left. Sequence numbers of a ring only grow, so the word of a later
// use stays.
func (r *receiver) leave() {
	for {
		was := r.left().Load()
		if was >= r.start || r.left().CompareAndSwap(was, r.start) {
			return
		}
	}
}
