package rdma

import (
	"fmt"
	"slices"
	"sync/atomic"
)

// receiver has the posted receives, and announces them to the peer as credit: queue[i] is for message number first+i.
type receiver struct {
	*common
	lanes   *lanes
	tunnels *tunnels
	posted  atomic.Int32 // receives without a polled completion

	first uint32
	queue []receive

	lastSent uint32 // value of the latest credit: the first message without a receive, as far as the peer knows
	credit   *Op    // the credit operation in flight, or nil
	sentAny  bool   // at least one credit has been sent; cleared to repeat it; set from the beginning on a plain channel
}

type receive struct {
	RecvWR
	local    []byte
	header   header // of an arrived piece: kind, immediate and total are the same in all pieces
	begun    bool
	received uint32 // bytes
	complete bool
}

// grant sends a credit, which announces the posted receives to the peer. It does so when the peer has used up half of
// its credit, and once at the beginning, which informs the peer that this end is connected.
func (rcv *receiver) grant() {
	posted := rcv.first + uint32(len(rcv.queue))
	left, all := rcv.lastSent-rcv.first, uint32(len(rcv.queue))
	if rcv.credit != nil || rcv.sentAny && (rcv.plain || posted == rcv.lastSent || left > all/2) {
		return
	}
	lane := slices.IndexFunc(rcv.lanes.all, func(l *lane) bool { return l.share > 0 })
	if lane < 0 {
		return
	}
	op := rcv.tunnels.op()
	op.Set, op.lane = rcv.set, lane
	if op.Kind = OpWrite; !rcv.plain { // a plain channel has no credit: a WRITE of no bytes is the liveness check of ask
		h := header{kind: kindCredit, message: posted}
		h.marshal(&op.head)
		op.Kind, op.Head = OpSend, op.head[:]
	}
	rcv.credit, rcv.lastSent, rcv.sentAny = op, posted, true
	// At the head of the backlog: operations that wait there may depend on the peer, which may be waiting for this
	// credit.
	l := rcv.lanes.all[lane]
	l.backlog = slices.Insert(l.backlog, 0, op)
}

// oldest returns the buffer of the oldest receive (see PlainHost.Receive).
func (rcv *receiver) oldest() ([]byte, Verdict) {
	if rcv.state >= failing || len(rcv.queue) == 0 {
		return nil, NotReady
	}
	return rcv.queue[0].local, Accepted
}

// received completes the oldest receive (see PlainHost.Received).
func (rcv *receiver) received(m Arrival) {
	if rcv.state >= failing {
		return
	}
	r := &rcv.queue[0]
	r.header = header{kind: kindSend, immediate: m.Immediate, total: uint32(m.Bytes)}
	switch {
	case m.Written:
		r.header.kind = kindWrite
	case m.HasImmediate:
		r.header.kind = kindSendImmediate
	}
	rcv.report(r, nil)
	rcv.queue = slices.Delete(rcv.queue, 0, 1)
}

// ask repeats the credit as a liveness check: the channel fails if the peer does not acknowledge it.
func (rcv *receiver) ask() {
	rcv.sentAny = false
	rcv.stir()
}

// creditArrived handles the end of an internal operation: the next credit may be sent.
func (rcv *receiver) creditArrived(op *Op) {
	if op == rcv.credit {
		rcv.credit = nil
	}
}

// creditLost sends the credit again if op, which will not be executed, carried it.
func (rcv *receiver) creditLost(op *Op) {
	if op == rcv.credit {
		rcv.credit, rcv.sentAny = nil, false
	}
}

// moveCredit sends a credit that waits on a stalled lane by another lane too.
func (rcv *receiver) moveCredit() {
	if rcv.credit == nil {
		return
	}
	if l := rcv.lanes.all[rcv.credit.lane]; l.share == 0 && !rcv.lanes.parked(l) {
		rcv.creditLost(rcv.credit)
	}
}

func (rcv *receiver) post(wr *RecvWR) error {
	if rcv.state >= failing {
		return fmt.Errorf("the set has ended: %w", rcv.err)
	}
	if int(rcv.posted.Load()) >= rcv.cfg.RecvDepth {
		return ErrQueueFull
	}
	local, err := wr.Local.bytes(rcv.cfg.PD, LocalWrite)
	if err != nil {
		return err
	}
	rcv.queue = append(rcv.queue, receive{RecvWR: *wr, local: local})
	rcv.posted.Add(1)
	return nil
}

// admit returns the destination of a piece of a message (see Host.Admit).
func (rcv *receiver) admit(h *header, n int) ([]byte, Verdict) {
	i := h.message - rcv.first
	if i >= uint32(len(rcv.queue)) {
		rcv.device.count.malformed.Add(1) // the message exceeds the credit
		return nil, Refused
	}
	r := &rcv.queue[i]
	same := r.header.kind == h.kind && r.header.immediate == h.immediate && r.header.total == h.total
	switch {
	case n >= 0 && uint32(n) != h.length, r.begun && !same, h.kind == kindWrite && r.begun:
		rcv.device.count.malformed.Add(1)
		return nil, Refused
	case h.kind != kindWrite && uint64(h.total) > uint64(len(r.local)):
		rcv.set.fail(fmt.Errorf("%w: a message of %d bytes for a receive of %d", ErrRemoteInvalid, h.total, len(r.local)))
		return nil, Refused
	}
	r.header, r.begun = *h, true
	if h.kind == kindWrite {
		return nil, Accepted
	}
	return r.local[h.offset : h.offset+h.length : h.offset+h.length], Accepted
}

// delivered accounts for a piece that is in place (see Host.Deliver).
func (rcv *receiver) delivered(h *header) {
	if h.message-rcv.first >= uint32(len(rcv.queue)) {
		return
	}
	r := &rcv.queue[h.message-rcv.first]
	r.received += h.length
	r.complete = h.kind == kindWrite || r.received >= h.total
	n := 0
	for n < len(rcv.queue) && rcv.queue[n].complete {
		rcv.report(&rcv.queue[n], nil)
		n++
	}
	rcv.queue = slices.Delete(rcv.queue, 0, n)
	rcv.first += uint32(n)
	if n > 0 {
		rcv.stir() // a credit may be due
	}
}

func (rcv *receiver) report(r *receive, err error) {
	c := Completion{Set: rcv.set, ID: r.ID, Opcode: Recv, Err: err}
	if err == nil {
		c.Bytes = int(r.header.total)
		c.HasImmediate, c.Immediate = r.header.kind != kindSend, r.header.immediate
		if r.header.kind == kindWrite {
			c.Opcode = RecvWrite
		}
	}
	rcv.cfg.RecvCQ.push(queued{c, false})
}

// flush completes every posted receive with ErrFlushed.
func (rcv *receiver) flush() {
	for i := range rcv.queue {
		rcv.report(&rcv.queue[i], fmt.Errorf("%w: %w", ErrFlushed, rcv.err))
	}
	rcv.queue = nil
}
