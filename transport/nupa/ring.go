package nupa

import (
	"encoding/binary"
	"sync/atomic"

	"github.com/fared/fared/transport/rdma"
)

// A ring carries the operations of one channel in one direction, in order. It has no shared indexes: the word of each
// slot contains the sequence number and the state of its operation. Each side therefore counts separately, and a peer
// cannot falsify the number of operations. The permitted changes of a slot's state:
//
//	             sender               receiver
//	done      -> posted
//	posted    -> revoked              taken
//	taken     -> canceled            posted (not ready), committed, done
//	committed                         done
//	canceled                         done
//	revoked                           passed
//
// Every change is a compare-and-swap. The sequence numbers of a ring are never reused, not even by its next channel: a
// late receiver cannot mistake another channel's operation for one of its channel, and the changes of a late end fail.
// Only the receiver of a taken, committed or canceled operation writes more than words to the ring of its peer, and
// such a ring is not reused (release).
const (
	done = iota
	posted
	taken
	committed
	canceled
	revoked
	passed // revoked, and skipped by the receiver

	stateBits = 8
)

func word(seq uint64, state uint64) uint64 { return seq<<stateBits | state }

// The places of a descriptor's data.
const (
	inPlace = iota // in the slot
	inFile         // at an offset of the file
)

const (
	headAt      = 128
	dataAt      = headAt + rdma.MaxHead
	inPlaceSize = slotSize - dataAt // in bytes
)

// status is the result of an operation.
type status uint32

const (
	executed status = iota
	remoteAccess
	remoteInvalid
	remoteOperation
	skipped // revoked before the receiver reached it
)

// descriptor is an operation in a slot. The receiver works on a copy, which the sender cannot change.
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

// ring is a ring's part of the file; sender and receiver are the local states of its ends.
type ring struct {
	*area
	index, at int
}

func (a *area) ring(i int) ring { return ring{a, i, ringsAt + i*ringSize} }

func (r ring) sender() *atomic.Uint32           { return r.u32(r.at) }
func (r ring) senderGeneration() *atomic.Uint64 { return r.u64(r.at + 8) }
func (r ring) receiver() *atomic.Uint64         { return r.u64(r.at + 16) }
func (r ring) first() *atomic.Uint64            { return r.u64(r.at + 24) }
func (r ring) left() *atomic.Uint64             { return r.u64(r.at + 64) }
func (r ring) held() *atomic.Uint64             { return r.u64(r.at + 72) }

// receiverWord is the value of ring.receiver for an endpoint, noReceiver for a use of the ring without one yet.
func receiverWord(endpoint int, generation uint64) uint64 {
	return generation<<8 | uint64(endpoint)<<1 | 1
}
func noReceiver(start uint64) uint64 { return start << 1 }

func (r ring) slot(seq uint64) int             { return r.at + ringHeader + int(seq%slotCount)*slotSize }
func (r ring) state(seq uint64) *atomic.Uint64 { return r.u64(r.slot(seq)) }
func (r ring) staging() int                    { return r.at + ringHeader + slotCount*slotSize }
func (r ring) change(seq, from, to uint64) bool {
	return r.state(seq).CompareAndSwap(word(seq, from), word(seq, to))
}
func (r ring) inStaging(at uint64, n uint64) bool { // does not overflow: no sum of n and at
	first, end := uint64(r.staging()), uint64(r.staging()+stagingSize)
	return at >= first && at <= end && n <= end-at
}

// acquire acquires a free ring for a sender.
func (a *area) acquire(owner endpoint) (sender, bool) {
	for i := range a.rings {
		r := a.ring(i)
		if !r.sender().CompareAndSwap(0, uint32(owner.index+1)) {
			continue
		}
		last := uint64(0)
		for s := range uint64(slotCount) {
			last = max(last, r.state(s).Load()>>stateBits)
		}
		last = max(last, r.left().Load())
		if last >= 1<<55 { // no sender counts this far: the ring is damaged, and sequence numbers must not wrap
			r.sender().Store(0)
			continue
		}
		first := last + 2*slotCount
		first -= first % slotCount
		last = first - 1 // so that the next use has other numbers even if this one posts nothing
		for s := range uint64(slotCount) {
			r.state(s).Store(word(last, done))
		}
		r.receiver().Store(noReceiver(first))
		r.held().Store(0)
		r.senderGeneration().Store(owner.generation().Load())
		r.first().Store(first)
		return sender{ring: r, last: last, start: first, next: first, oldest: first}, true
	}
	return sender{}, false
}

// release frees a ring for its sender. It returns false while the receiver works on an operation and has not ended,
// since it may write to the staging. Until release succeeds the ring is closed, but not free.
func (r ring) release(m machine) bool {
	r.first().Store(0)
	// A dead sender has revoked nothing, and the receiver may have checked first before and be about to take the next
	// operation.
	for s := range uint64(slotCount) {
		if w := r.state(s).Load(); w&(1<<stateBits-1) == posted {
			r.state(s).CompareAndSwap(w, w-posted+revoked)
		}
	}
	if w := r.receiver().Load(); w&1 == 1 && w>>1&0x7f < endpointCount {
		i := int(w >> 1 & 0x7f)
		if w == receiverWord(i, r.endpoint(i).generation().Load()) && !m.ended(i) && r.busy() {
			return false
		}
	}
	r.sender().Store(0)
	return true
}

// busy reports whether the receiver works on an operation.
func (r ring) busy() bool {
	for s := range uint64(slotCount) {
		switch r.state(s).Load() & (1<<stateBits - 1) {
		case taken, committed, canceled:
			return true
		}
	}
	return false
}

// sender is a ring's sending end. Its counters are local: sequence numbers from oldest to next are in the ring.
type sender struct {
	ring
	last                uint64 // sequence number in all words before the first use
	start, oldest, next uint64
	staged, freed       uint64 // total bytes of staging taken and freed, including skipped ends
	over                bool   // canceled: the receiver may skip operations that were not returned
	damaged             bool   // a free slot has a word that neither end has written
	sent                [slotCount]sentOp
}

// sentOp is the sender's state of an operation in the ring.
type sentOp struct {
	op     *rdma.Op       // nil: already returned
	staged uint64         // sender.staged after it
	offset int            // offset in the file of a READ's result
	sent   *atomic.Uint64 // rdma.Path.Sent of its path at the time of posting
}

func (s *sender) entry(seq uint64) *sentOp { return &s.sent[seq%slotCount] }

// reserve reserves n contiguous bytes of staging, aligned to a cache line.
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

// post puts an operation into the ring. It returns false if no slot or not enough staging is free. sent counts its
// bytes once it is executed.
func (s *sender) post(op *rdma.Op, sent *atomic.Uint64) bool {
	if s.next-s.oldest >= slotCount {
		return false
	}
	before := s.state(s.next).Load()
	if want := s.next - slotCount; want >= s.start && before>>stateBits != want || want < s.start && before>>stateBits != s.last {
		s.damaged = true
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
	if !s.state(s.next).CompareAndSwap(before, word(s.next, posted)) {
		s.damaged = true
		return false
	}
	out.op, out.staged, out.sent = op, s.staged, sent
	s.next++
	return true
}

// idle reports whether all posted operations have been executed and reaped.
func (s *sender) idle() bool { return s.oldest == s.next }

// revoke revokes the operations that the receiver has not taken. It starts with the newest and ends at the receiver's
// position, so the receiver executes only operations before the revoked ones. It returns the first revoked sequence
// number.
func (s *sender) revoke() (first uint64) {
	first = s.next
	for first > s.oldest && (s.state(first-1).Load() == word(first-1, revoked) || s.change(first-1, posted, revoked)) {
		first--
	}
	return first
}

// cancel ends all operations: those that are not taken are revoked, and those that are taken will not be delivered
// unless committed.
func (s *sender) cancel() {
	s.over = true
	s.revoke()
	for seq := s.oldest; seq < s.next; seq++ {
		if !s.change(seq, posted, revoked) && !s.change(seq, taken, canceled) {
			s.change(seq, posted, revoked) // the receiver was not ready, and has put it back in between
		}
	}
}

// reap returns the oldest operation if it has ended. ok is false if there is none; damaged is true if the contents of
// the slot are invalid.
func (s *sender) reap() (e sentOp, d status, was uint64, ok, damaged bool) {
	if s.damaged || s.idle() {
		return sentOp{}, 0, 0, false, s.damaged
	}
	w := s.state(s.oldest).Load()
	if w>>stateBits != s.oldest || w&(1<<stateBits-1) > passed {
		return sentOp{}, 0, 0, false, true
	}
	switch w {
	case word(s.oldest, done):
		slot := s.mem[s.slot(s.oldest):]
		d, was = status(binary.LittleEndian.Uint32(slot[64:])), binary.LittleEndian.Uint64(slot[72:])
	case word(s.oldest, passed):
		d = skipped
	default:
		return sentOp{}, 0, 0, false, false
	}
	e = *s.entry(s.oldest)
	if d > skipped || !s.over && d == skipped != (e.op == nil) {
		return sentOp{}, 0, 0, false, true
	}
	*s.entry(s.oldest) = sentOp{}
	s.freed = e.staged
	s.oldest++
	return e, d, was, true, false
}

// put writes a descriptor into a slot, except for the word.
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
