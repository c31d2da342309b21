package nupa

import (
	"encoding/binary"
	"sync/atomic"

	"github.com/fared/fared/dataplane/rdma"
)

// A ring carries the operations of one channel in one direction, in order. It has no shared indexes: the word of each slot says
// which operation is in it, by sequence number, and how far that is, so that each side counts for itself and a peer cannot lie
// about how much there is. Who may change a slot's word from which state:
//
//	             sender               receiver
//	done      -> posted
//	posted    -> revoked              taken
//	taken     -> cancelled            posted (not ready), committed, done
//	committed                         done
//	cancelled                         done
//	revoked                           done
//
// A change from a state that both may change is a compare-and-swap. Sequence numbers of a ring are never used again, not even
// by its next channel, so that a receiver that is late finds nothing that it could take for its own.
const (
	done = iota
	posted
	taken
	committed
	cancelled
	revoked

	stateBits = 8
)

func word(seq uint64, state uint64) uint64 { return seq<<stateBits | state }

// Where a descriptor's data is.
const (
	inPlace = iota // in the slot
	inFile         // at an offset of the file
)

const (
	headAt      = 128
	dataAt      = headAt + rdma.MaxHead
	inPlaceSize = slotSize - dataAt // bytes
)

// status is how an operation ended.
type status uint32

const (
	executed status = iota
	remoteAccess
	remoteInvalid
	remoteOperation
	skipped // revoked before the receiver came to it
)

// descriptor is an operation as it is in a slot; the receiver's is a copy, which nobody changes under its hands.
type descriptor struct {
	kind          rdma.OpKind
	headLength    uint8
	where         uint8
	key           uint32
	remote        uint64
	length        uint32
	offset        uint64
	compare, swap uint64
	head          [rdma.MaxHead]byte
}

// ring is the part of the file that is one; sender and receiver are what its two ends know of it.
type ring struct {
	*area
	index, at int
}

func (a *area) ring(i int) ring { return ring{a, i, ringsAt + i*ringSize} }

func (r ring) sender() *atomic.Uint32             { return r.u32(r.at) }
func (r ring) receiver() *atomic.Uint32           { return r.u32(r.at + 4) }
func (r ring) senderGeneration() *atomic.Uint64   { return r.u64(r.at + 8) }
func (r ring) receiverGeneration() *atomic.Uint64 { return r.u64(r.at + 16) }
func (r ring) first() *atomic.Uint64              { return r.u64(r.at + 24) }
func (r ring) left() *atomic.Uint64               { return r.u64(r.at + 64) }
func (r ring) held() *atomic.Uint64               { return r.u64(r.at + 72) }

func (r ring) slot(seq uint64) int             { return r.at + ringHeader + int(seq%slotCount)*slotSize }
func (r ring) state(seq uint64) *atomic.Uint64 { return r.u64(r.slot(seq)) }
func (r ring) staging() int                    { return r.at + ringHeader + slotCount*slotSize }
func (r ring) change(seq, from, to uint64) bool {
	return r.state(seq).CompareAndSwap(word(seq, from), word(seq, to))
}
func (r ring) inStaging(at uint64, n uint64) bool { // not beyond it, in uint64 that cannot wrap
	first, end := uint64(r.staging()), uint64(r.staging()+stagingSize)
	return at >= first && at <= end && n <= end-at
}

// acquire takes a free ring for a sender. Under the file's lock.
func (a *area) acquire(owner endpoint) (sender, bool) {
	for i := range a.rings {
		r := a.ring(i)
		if r.sender().Load() != 0 {
			continue
		}
		last, lost := uint64(0), false
		for s := range uint64(slotCount) {
			last = max(last, r.state(s).Load()>>stateBits)
		}
		last = max(last, r.left().Load())
		if lost = last >= 1<<55; lost {
			continue // no sender has ever counted so far: somebody else wrote here, and sequence numbers must grow
		}
		first := last + 2*slotCount
		first -= first % slotCount
		for s := range uint64(slotCount) {
			r.state(s).Store(word(last, done))
		}
		r.receiver().Store(0)
		r.held().Store(0)
		r.senderGeneration().Store(owner.generation().Load())
		r.first().Store(first)
		r.sender().Store(uint32(owner.index + 1))
		return sender{ring: r, start: first, next: first, oldest: first}, true
	}
	return sender{}, false
}

// release gives a ring back that its sender needs no more; false while its receiver, if that lives, works on an operation: it
// may write to the staging. Until it succeeds the ring stays taken, and is closed already.
func (r ring) release(m machine) bool {
	r.first().Store(0)
	// A sender that has died has revoked nothing: its receiver may have looked at first before, and be about to take the next.
	for s := range uint64(slotCount) {
		if w := r.state(s).Load(); w&(1<<stateBits-1) == posted {
			r.state(s).CompareAndSwap(w, w-posted+revoked)
		}
	}
	at := r.receiver().Load()
	if at > 0 && at <= endpointCount {
		e := r.endpoint(int(at - 1))
		if e.generation().Load() == r.receiverGeneration().Load() && m.alive(int(at-1)) && r.busy() {
			return false
		}
	}
	r.sender().Store(0)
	return true
}

// busy says whether the receiver works on an operation.
func (r ring) busy() bool {
	for s := range uint64(slotCount) {
		switch r.state(s).Load() & (1<<stateBits - 1) {
		case taken, committed, cancelled:
			return true
		}
	}
	return false
}

// sender is a ring's sending end. It counts for itself: sequence numbers from oldest to next are in the ring.
type sender struct {
	ring
	start, oldest, next uint64
	staged, freed       uint64 // bytes of staging ever taken and given back, skipped ends included
	over                bool   // cancelled: the receiver may skip what has not been given back
	sent                [slotCount]sentOp
}

// sentOp is what the sender keeps of an operation in the ring.
type sentOp struct {
	op     *rdma.Op       // nil: given back already
	staged uint64         // sender.staged after it
	offset int            // where what is read comes, in the file
	sent   *atomic.Uint64 // rdma.Path.Sent of the path it was posted for
}

func (s *sender) entry(seq uint64) *sentOp { return &s.sent[seq%slotCount] }

// reserve takes n bytes of staging in one piece, at a cache line.
func (s *sender) reserve(n int) (at int, ok bool) {
	from := s.staged
	if rest := stagingSize - int(from%stagingSize); rest < n {
		from += uint64(rest)
	}
	to := (from + uint64(n) + 63) &^ 63
	if to-s.freed > stagingSize {
		return 0, false
	}
	s.staged = to
	return s.staging() + int(from%stagingSize), true
}

// post puts an operation into the ring; false when there is no slot or no staging free. sent counts its bytes once it is executed.
func (s *sender) post(op *rdma.Op, sent *atomic.Uint64) bool {
	if s.next-s.oldest >= slotCount {
		return false
	}
	d := descriptor{
		kind: op.Kind, headLength: uint8(len(op.Head)), key: op.Key, remote: op.Remote, length: uint32(len(op.Local)),
		compare: op.Compare, swap: op.Swap,
	}
	slot, out := s.slot(s.next), s.entry(s.next)
	offset, ours := s.offset(op.Local)
	switch {
	case op.Kind == rdma.OpCompareSwap || op.Kind == rdma.OpFetchAdd || len(op.Local) == 0:
	case op.Kind != rdma.OpRead && len(op.Local) <= inPlaceSize:
		copy(s.mem[slot+dataAt:slot+slotSize], op.Local)
	case op.Kind != rdma.OpRead && ours:
		d.where, d.offset = inFile, uint64(offset)
	default:
		at, ok := s.reserve(len(op.Local))
		if !ok {
			return false
		}
		d.where, d.offset = inFile, uint64(at)
		if op.Kind != rdma.OpRead {
			copy(s.mem[at:], op.Local)
		}
		out.offset = at
	}
	d.put(s.mem[slot:slot+slotSize], op.Head)
	out.op, out.staged, out.sent = op, s.staged, sent
	s.state(s.next).Store(word(s.next, posted))
	s.next++
	return true
}

// idle says whether everything that was posted has been executed and reaped.
func (s *sender) idle() bool { return s.oldest == s.next }

// revoke takes back what the receiver has not taken. It begins with the newest and ends where the receiver is: what the receiver
// executes so comes before everything that is revoked. Returned are the sequence numbers from first on.
func (s *sender) revoke() (first uint64) {
	first = s.next
	for first > s.oldest && (s.state(first-1).Load() == word(first-1, revoked) || s.change(first-1, posted, revoked)) {
		first--
	}
	return first
}

// cancel ends everything: what is not taken is revoked, and what is taken will not be delivered unless it has been committed to.
func (s *sender) cancel() {
	s.over = true
	s.revoke()
	for seq := s.oldest; seq < s.next; seq++ {
		if !s.change(seq, posted, revoked) && !s.change(seq, taken, cancelled) {
			s.change(seq, posted, revoked) // the receiver was not ready, and gave it back in between
		}
	}
}

// reap gives the oldest operation if it has ended. ok is false when there is none; damaged, when the slot holds what cannot be.
func (s *sender) reap() (e sentOp, d status, was uint64, ok, damaged bool) {
	if s.idle() {
		return sentOp{}, 0, 0, false, false
	}
	w := s.state(s.oldest).Load()
	if w>>stateBits != s.oldest || w&(1<<stateBits-1) > revoked {
		return sentOp{}, 0, 0, false, true
	}
	if w != word(s.oldest, done) {
		return sentOp{}, 0, 0, false, false
	}
	slot := s.mem[s.slot(s.oldest):]
	d, was = status(binary.LittleEndian.Uint32(slot[64:])), binary.LittleEndian.Uint64(slot[72:])
	e = *s.entry(s.oldest)
	if d > skipped || !s.over && d == skipped != (e.op == nil) {
		return sentOp{}, 0, 0, false, true
	}
	*s.entry(s.oldest) = sentOp{}
	s.freed = e.staged
	s.oldest++
	return e, d, was, true, false
}

// put writes a descriptor into a slot, but for its word.
func (d *descriptor) put(b, head []byte) {
	le := binary.LittleEndian
	b[8], b[9], b[10] = byte(d.kind), d.headLength, d.where
	le.PutUint32(b[12:], d.key)
	le.PutUint64(b[16:], d.remote)
	le.PutUint32(b[24:], d.length)
	le.PutUint64(b[32:], d.offset)
	le.PutUint64(b[40:], d.compare)
	le.PutUint64(b[48:], d.swap)
	copy(b[headAt:dataAt], head)
}
