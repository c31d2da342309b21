package rdma

import (
	"fmt"
	"slices"
)

// receives are the posted receives of a set: queue[i] is for message number first+i.
type receives struct {
	first uint32
	queue []receive
}

type receive struct {
	RecvWR
	local    []byte
	header   header // of an arrived piece: kind, immediate and total are the same in all pieces
	begun    bool
	received uint32 // bytes
	complete bool
}

// credits is the state of the credit that this end sends.
type credits struct {
	lastSent uint32 // value of the latest credit: the first message without a receive, as far as the peer knows
	op       *Op    // the credit operation in flight, or nil
	sentAny  bool   // at least one credit has been sent; cleared to repeat it
}

// grant sends a credit, which announces the posted receives to the peer. It does so when the peer has used up half of its credit, and once
// at the beginning, which informs the peer that this end is connected.
func (s *Set) grant() {
	c, r := &s.credits, &s.receives
	posted := r.first + uint32(len(r.queue))
	left, all := c.lastSent-r.first, uint32(len(r.queue))
	if c.op != nil || c.sentAny && (posted == c.lastSent || left > all/2) {
		return
	}
	lane := slices.IndexFunc(s.lanes, func(l *lane) bool { return l.share > 0 })
	if lane < 0 {
		return
	}
	op := s.tunnels.op()
	h := header{kind: kindCredit, message: posted}
	h.marshal(&op.head)
	op.Set, op.Kind, op.Head, op.lane = s, OpSend, op.head[:], lane
	c.op, c.lastSent, c.sentAny = op, posted, true
	// At the head of the backlog: operations that wait there may depend on the peer, which may be waiting for this credit.
	s.lanes[lane].backlog = slices.Insert(s.lanes[lane].backlog, 0, op)
}

// ask repeats the credit as a liveness check: the channel fails if the peer does not acknowledge it.
func (s *Set) ask() {
	s.credits.sentAny = false
	s.device.stir(s)
}

// granted handles a credit from the peer.
func (s *Set) granted(until uint32) {
	if int32(until-s.allowed) > 0 && until-s.allowed <= maxDepth { // otherwise a later credit has overtaken it, or it is invalid
		s.allowed = until
		s.device.stir(s)
	}
}

// useCredit places the operations that have waited for credit.
func (s *Set) useCredit() {
	if s.credit == s.allowed {
		return
	}
	was := s.credit
	s.credit = s.allowed
	for m := was; m != s.credit; m++ {
		for _, op := range s.gated[m] {
			s.place(op)
		}
		delete(s.gated, m)
	}
	waiting := s.uncredited
	s.uncredited = nil
	for _, key := range waiting {
		if st := s.streams[key]; st != nil {
			st.uncredited = false
			s.let(key, st)
		}
	}
}

// credited reports whether the credit allows posting an operation on a channel.
func (s *Set) credited(op *Op) bool {
	return op.Kind != OpSend || int32(op.work.message-s.credit) < 0
}

func (s *Set) postRecv(wr *RecvWR) error {
	if s.state >= failing {
		return fmt.Errorf("the set has ended: %w", s.err)
	}
	if int(s.recvOut.Load()) >= s.cfg.RecvDepth {
		return ErrQueueFull
	}
	local, err := wr.Local.bytes(s.cfg.PD, LocalWrite)
	if err != nil {
		return err
	}
	s.receives.queue = append(s.receives.queue, receive{RecvWR: *wr, local: local})
	s.recvOut.Add(1)
	return nil
}

// admit returns the destination of a piece of a message (see Host.Admit).
func (s *Set) admit(ch Channel, head []byte, n int) ([]byte, Verdict) {
	if s.state >= failing {
		return nil, NotReady
	}
	if !s.peerReady {
		s.peerReady = true
		s.device.stir(s)
	}
	var h header
	if err := h.unmarshal(head); err != nil {
		s.device.count.malformed.Add(1)
		return nil, Refused
	}
	if h.kind == kindTunnel {
		return s.tunnels.admit(s, ch, &h)
	}
	if h.kind == kindCredit {
		return nil, Accepted
	}
	i := h.message - s.receives.first
	if i >= uint32(len(s.receives.queue)) {
		s.device.count.malformed.Add(1) // the message exceeds the credit
		return nil, Refused
	}
	r := &s.receives.queue[i]
	same := r.header.kind == h.kind && r.header.immediate == h.immediate && r.header.total == h.total
	switch {
	case n >= 0 && uint32(n) != h.length, r.begun && !same, h.kind == kindWrite && r.begun:
		s.device.count.malformed.Add(1)
		return nil, Refused
	case h.kind != kindWrite && uint64(h.total) > uint64(len(r.local)):
		s.fail(fmt.Errorf("%w: a message of %d bytes for a receive of %d", ErrRemoteInvalid, h.total, len(r.local)))
		return nil, Refused
	}
	r.header, r.begun = h, true
	if h.kind == kindWrite {
		return nil, Accepted
	}
	return r.local[h.offset : h.offset+h.length : h.offset+h.length], Accepted
}

// delivered accounts for a piece that is in place (see Host.Deliver).
func (s *Set) delivered(head []byte) {
	if s.state >= failing {
		return
	}
	var h header
	if h.unmarshal(head) != nil {
		return // unreachable: admit has parsed the same header
	}
	switch h.kind {
	case kindTunnel:
		s.tunnels.delivered(s, &h)
		return
	case kindCredit:
		s.granted(h.message)
		return
	}
	if h.message-s.receives.first >= uint32(len(s.receives.queue)) {
		return
	}
	r := &s.receives.queue[h.message-s.receives.first]
	r.received += h.length
	r.complete = h.kind == kindWrite || r.received >= h.total
	n := 0
	for n < len(s.receives.queue) && s.receives.queue[n].complete {
		s.receives.report(s, &s.receives.queue[n], nil)
		n++
	}
	s.receives.queue = slices.Delete(s.receives.queue, 0, n)
	s.receives.first += uint32(n)
	if n > 0 {
		s.device.stir(s) // a credit may be due
	}
}

func (*receives) report(s *Set, r *receive, err error) {
	c := Completion{Set: s, ID: r.ID, Opcode: Recv, Err: err}
	if err == nil {
		c.Bytes = int(r.header.total)
		c.HasImmediate, c.Immediate = r.header.kind != kindSend, r.header.immediate
		if r.header.kind == kindWrite {
			c.Opcode = RecvWrite
		}
	}
	s.cfg.RecvCQ.push(queued{c, false})
}

// flush completes every posted receive with ErrFlushed.
func (r *receives) flush(s *Set) {
	for i := range r.queue {
		r.report(s, &r.queue[i], fmt.Errorf("%w: %w", ErrFlushed, s.err))
	}
	r.queue = nil
}
