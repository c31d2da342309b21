package superp

import (
	"fmt"
	"slices"

	"github.com/fared/fared/transport/rdma"
)

// target is the state of the peer's transactions and of the replies to them.
type target struct {
	*common
	channel rdma.Channel // the connection, for calls of the host

	in      []incoming
	inNext  uint16 // oldest incomplete one
	due     uint16 // the latest XID, of those before inNext, that is not a No-op's: its acknowledgement must not wait for other packets
	nulls   int    // No-ops completed since the latest packet was sent
	open    int
	waiters int    // messages that wait for Ready
	waiter  uint16 // xid of the latest one
	ready   bool   // Ready was called
	reading int    // unacknowledged read responses plus unanswered reads
	reads   fifo[read]
	answers fifo[*answer]
	blocked fifo[[]byte] // ordered: packets that wait for an earlier message or read
}

// incoming is a transaction of the peer.
type incoming struct {
	xid    uint16
	open   bool
	done   bool
	opcode Opcode
	total  int         // number of packets; 0 until the packet with eom has arrived
	got    int         // received packets
	top    int         // highest received seqno
	seen   []uint64    // bitmap of received seqnos
	jobs   int         // reads and answers that have not been completely sent
	errors int         // errors that the peer has not acknowledged: ack_xid must not pass them
	seqno  uint16      // of the next reply
	unsent int         // queued packets of replies other than read responses
	late   []lateReply // replies that wait until the request is complete
	reads  []read      // the same
	msg    message
	more   []whole // messages to the queue pair behind msg
}

// whole is a message of one block that waits for earlier ones of its transaction.
type whole struct {
	seqno uint16
	op    int
	data  []byte // in a buffer of the core
}

// message is the message in the Sends of a transaction.
type message struct {
	seqno     uint16 // with op, the first operation, for errors: 0 for Sends, which form one message
	op        int
	head      [rdma.MaxHead]byte
	begun     bool // the head has arrived
	admitted  bool
	waiting   bool // for Ready
	refused   bool // or failed: the remaining parts are dropped
	delivered bool
	length    int // total length, -1 until the last packet has arrived
	have      int // bytes in body
	body      []byte
	held      []held // pieces received before the message was admitted
}

// held is a piece of a message that waits for its admission.
type held struct {
	offset int
	data   []byte // in a buffer of the core
}

// read is an RMA read that has not been completely answered.
type read struct {
	xid, seqno uint16
	op         uint8
	address    uint64
	offset, n  int // bytes sent so far, of n
}

// ackXID returns the local ack_xid.
func (tgt *target) ackXID() uint16 { return tgt.inNext - 1 }

// null handles a No-op or Last NULL: a transaction without operations, which is complete when it arrives. The XID of a
// No-op may be one from before the window, if the peer has no other (see send). It reports whether the packet is one.
func (tgt *target) null(p *Packet) (accepted bool) {
	s := &tgt.in[int(p.TAL.XID)&(len(tgt.in)-1)]
	switch {
	case int(p.TAL.XID-tgt.inNext) >= tgt.cfg.Parameters.Transactions:
		if p.TAL.Opcode != OpcodeNoOp || int16(p.TAL.XID-tgt.inNext) >= 0 {
			tgt.violation(ViolationXID, p)
		}
		return false
	case !s.open && p.TAL.Seqno == 0 && p.TAL.EOM:
		tgt.begin(s, p)
		s.total, s.got = 1, 1
		if p.TAL.Opcode == OpcodeNoOp {
			tgt.nulls++
		}
		tgt.settle(s)
		return true
	}
	return false
}

// begin opens a transaction of the peer.
func (tgt *target) begin(s *incoming, p *Packet) {
	seen, pieces := s.seen, s.msg.held[:0]
	clear(seen)
	*s = incoming{xid: p.TAL.XID, open: true, opcode: p.TAL.Opcode, seen: seen, more: s.more[:0], late: s.late[:0], reads: s.reads[:0]}
	s.msg.held, s.msg.length = pieces, -1
	tgt.open++
}

// receive handles a packet of a transaction of the peer. On an ordered connection packets arrive here in the order of
// psns, and those that may not be executed yet are kept.
func (tgt *target) receive(p *Packet, raw []byte) {
	if tgt.orderedIn && (tgt.blocked.n > 0 || tgt.mustWait(p)) {
		tgt.block(p, raw)
		return
	}
	tgt.request(p)
}

// request executes a packet of a transaction of the peer.
func (tgt *target) request(p *Packet) {
	s := &tgt.in[int(p.TAL.XID)&(len(tgt.in)-1)]
	if v := tgt.judge(s, p); v != 0 {
		tgt.violation(v, p)
		return
	}
	if !s.open {
		tgt.begin(s, p)
	}
	n := int(p.TAL.Seqno)
	s.seen[n/64] |= 1 << (n % 64)
	s.got++
	s.top = max(s.top, n)
	if p.TAL.EOM {
		s.total = n + 1
	}
	short := p.short(tgt.lite)
	if short {
		tgt.violation(ViolationBlock, p)
	}
	if tgt.closed || short || !tgt.executes(p.TAL.Opcode) {
		err := rdma.ErrRemoteInvalid
		if tgt.closed {
			err = rdma.ErrFlushed
		}
		s.msg.refused = true
		for i := range max(1, int(p.TAL.NumOps)) {
			tgt.refuse(s, p.TAL.Seqno, i, err)
		}
	} else {
		tgt.execute(s, p)
	}
	tgt.settle(s)
}

// judge returns the protocol error of a packet of a transaction of the peer, or 0. s is the slot of its XID.
func (tgt *target) judge(s *incoming, p *Packet) Violation {
	n := int(p.TAL.Seqno)
	switch {
	case int(p.TAL.XID-tgt.inNext) >= tgt.cfg.Parameters.Transactions || s.open && s.done:
		return ViolationXID
	case n >= tgt.cfg.Parameters.PacketsPerTransaction:
		return ViolationSeqno
	case !s.open:
	case s.opcode != p.TAL.Opcode:
		return ViolationOpcode
	case s.seen[n/64]>>(n%64)&1 != 0:
		return ViolationSeqno
	case s.total > 0 && p.TAL.EOM:
		return ViolationEOM
	case s.total > 0 && n >= s.total || p.TAL.EOM && n < s.top:
		return ViolationSeqno
	}
	return 0
}

func (tgt *target) executes(o Opcode) bool {
	switch o {
	case OpcodeRead, OpcodeWrite, OpcodeSend, OpcodeSendQP, OpcodeCompareSwap, OpcodeFetchAdd:
		return true
	}
	return false
}

// execute executes the operations of a packet, and checks each separately.
func (tgt *target) execute(s *incoming, p *Packet) {
	host := tgt.core.host
	for i := range int(p.TAL.NumOps) {
		var err error
		switch p.TAL.Opcode {
		case OpcodeWrite:
			o, block := p.Write(i), p.Block(i)
			var to []byte
			if to, err = host.FlatMemory(tgt.channel, o.Address, len(block), rdma.RemoteWrite); err == nil {
				copy(to, block)
			}
		case OpcodeRead:
			o := p.Read(i)
			if _, err = host.FlatMemory(tgt.channel, o.Address, int(o.Length), rdma.RemoteRead); err == nil {
				s.jobs++
				tgt.reading++
				r := read{xid: s.xid, seqno: p.TAL.Seqno, op: uint8(i), address: o.Address, n: int(o.Length)}
				if s.got == s.total && len(s.reads) == 0 {
					tgt.reads.push(r)
				} else {
					s.reads = append(s.reads, r)
				}
			}
		case OpcodeCompareSwap, OpcodeFetchAdd:
			o, kind := p.Atomic(i), rdma.OpFetchAdd
			if p.TAL.Opcode == OpcodeCompareSwap {
				kind = rdma.OpCompareSwap
			}
			var was uint64
			if was, err = host.Atomic(tgt.channel, kind, o.Key, o.Address, o.Compare, o.Swap); err == nil {
				tgt.answer(s, OpcodeAtomicResponse, answerOp{seqno: p.TAL.Seqno, op: uint8(i), was: was})
			}
		case OpcodeSendQP:
			switch {
			case p.SendQP(i).QP != uint32(tgt.cid):
				err = rdma.ErrRemoteInvalid
			case s.msg.waiting: // the messages behind it wait too
				s.more = append(s.more, whole{p.TAL.Seqno, i, tgt.keep(p.Block(i))})
			default:
				tgt.whole(s, p.TAL.Seqno, i, p.Block(i))
			}
		case OpcodeSend:
			if o := p.Send(i); o.Key == tgt.sendKey {
				tgt.piece(s, int(o.Offset), p.Block(i), p.TAL.EOM && i == int(p.TAL.NumOps)-1)
			} else {
				tgt.core.count.refused++
				tgt.wrongKey(s)
			}
		}
		if err != nil {
			tgt.core.count.refused++
			tgt.refuse(s, p.TAL.Seqno, i, err)
		}
		if tgt.broken != nil || tgt.closed {
			return
		}
	}
}

// refuse answers an operation with a Transaction error.
func (tgt *target) refuse(s *incoming, seqno uint16, op int, err error) {
	tgt.answer(s, OpcodeError, answerOp{seqno: seqno, op: uint8(op), major: majorOf(err)})
}

// whole handles a message of one block.
func (tgt *target) whole(s *incoming, seqno uint16, op int, data []byte) {
	s.msg = message{seqno: seqno, op: op, held: s.msg.held, length: -1}
	tgt.piece(s, 0, data, true)
	tgt.deliver(s)
}

// deliver delivers the message to the host once it is complete.
func (tgt *target) deliver(s *incoming) {
	m := &s.msg
	switch {
	case !m.admitted || m.delivered || tgt.broken != nil || tgt.closed:
	case m.have != len(m.body):
		tgt.malformed(s)
	default:
		m.delivered, m.body = true, nil
		tgt.core.host.Deliver(tgt.channel, m.head[:tgt.cfg.HeadSize])
	}
}

// piece handles a part of a message, in any order; last is true for the final one.
func (tgt *target) piece(s *incoming, offset int, data []byte, last bool) {
	m := &s.msg
	if last {
		m.length = offset + len(data)
		if m.waiting && tgt.cfg.HeadSize == 0 {
			tgt.admit(s) // without a head, the host has waited for the length
		}
	}
	switch {
	case m.refused:
		return
	case offset == 0 && !m.begun:
		if len(data) < tgt.cfg.HeadSize {
			m.refused = true
			tgt.refuse(s, m.seqno, m.op, fmt.Errorf("%w: message without head", rdma.ErrRemoteInvalid))
			tgt.dropHeld(m)
			return
		}
		m.begun = true
		copy(m.head[:], data[:tgt.cfg.HeadSize])
		tgt.admit(s)
		data, offset = data[tgt.cfg.HeadSize:], tgt.cfg.HeadSize
	}
	switch {
	case tgt.broken != nil || tgt.closed || m.refused:
	case m.admitted:
		tgt.place(s, offset, data)
	default:
		m.held = append(m.held, held{offset: offset, data: tgt.keep(data)})
	}
}

// wrongKey refuses a message of which a Send has another key than the connection's. It is one message: no part of it is
// delivered.
func (tgt *target) wrongKey(s *incoming) {
	switch m := &s.msg; {
	case m.refused:
	case m.admitted:
		tgt.malformed(s)
	default:
		if m.waiting {
			m.waiting = false
			tgt.waiters--
		}
		m.refused = true
		tgt.refuse(s, m.seqno, m.op, rdma.ErrRemoteInvalid)
		tgt.dropHeld(m)
	}
}

// admit requests the destination of the message from the host.
func (tgt *target) admit(s *incoming) {
	m, n := &s.msg, -1
	if m.length >= 0 {
		n = m.length - tgt.cfg.HeadSize
	}
	body, verdict := tgt.core.host.Admit(tgt.channel, m.head[:tgt.cfg.HeadSize], n)
	waited := m.waiting
	m.waiting = verdict == rdma.NotReady && !tgt.closed
	switch {
	case m.waiting && !waited:
		tgt.waiters++
		tgt.waiter = s.xid
	case !m.waiting && waited:
		tgt.waiters--
	}
	if m.waiting || tgt.closed {
		return
	}
	if verdict != rdma.Accepted {
		m.refused = true
		tgt.refuse(s, m.seqno, m.op, rdma.ErrRemoteInvalid)
		tgt.dropHeld(m)
		return
	}
	m.admitted, m.body = true, body
	for _, h := range m.held {
		if tgt.broken == nil {
			tgt.place(s, h.offset, h.data)
		}
	}
	tgt.dropHeld(m)
}

// place copies a piece of a message to its place.
func (tgt *target) place(s *incoming, offset int, data []byte) {
	m := &s.msg
	at := offset - tgt.cfg.HeadSize
	if at < 0 || at+len(data) > len(m.body) {
		tgt.malformed(s)
		return
	}
	copy(m.body[at:], data)
	m.have += len(data)
}

// malformed ends the connection: a message that the host has admitted cannot be delivered, and its receive stays
// occupied.
func (tgt *target) malformed(s *incoming) {
	tgt.refuse(s, s.msg.seqno, s.msg.op, rdma.ErrRemoteInvalid)
	tgt.queueReplies(s) // the next flush ends the connection, after the first reply
	tgt.broken = fmt.Errorf("%w: the length of a message differs from its header", rdma.ErrRemoteInvalid)
}

// dropHeld releases the buffers of held pieces.
func (tgt *target) dropHeld(m *message) {
	for i, h := range m.held {
		tgt.free(h.data)
		m.held[i] = held{}
	}
	m.held = m.held[:0]
}

// refuseMore refuses the messages that wait behind a refused one.
func (tgt *target) refuseMore(s *incoming, err error) {
	for i, w := range s.more {
		tgt.refuse(s, w.seqno, w.op, err)
		tgt.free(w.data)
		s.more[i] = whole{}
	}
	s.more = s.more[:0]
}

// settle ends a transaction that is complete, delivers its message, and advances ack_xid.
func (tgt *target) settle(s *incoming) {
	if !s.open || s.done || s.total == 0 || s.got < s.total || tgt.broken != nil {
		return
	}
	if s.opcode == OpcodeSendQP && (s.msg.waiting || len(s.more) > 0) {
		return
	}
	if s.opcode == OpcodeSend && !s.msg.refused && !s.msg.delivered {
		m := &s.msg
		if !m.begun {
			tgt.core.count.malformed++
			m.refused = true
			tgt.refuse(s, 0, 0, rdma.ErrRemoteInvalid)
			tgt.dropHeld(m)
		} else if tgt.deliver(s); !m.delivered {
			return
		}
	}
	tgt.queueReplies(s)
	if s.jobs > 0 || s.errors > 0 {
		return
	}
	s.done = true
	tgt.open--
	for x := &tgt.in[int(tgt.inNext)&(len(tgt.in)-1)]; x.open && x.done; x = &tgt.in[int(tgt.inNext)&(len(tgt.in)-1)] {
		x.open = false
		if x.opcode != OpcodeNoOp {
			tgt.due = tgt.inNext
		}
		tgt.inNext++
	}
}

// retry retries the admission of waiting messages, oldest first, until one has to keep waiting.
func (tgt *target) retry() {
	if tgt.waiters == 0 {
		return
	}
	first := int(tgt.inNext) // settle moves inNext
	for i := range len(tgt.in) {
		s := &tgt.in[(first+i)&(len(tgt.in)-1)]
		if !s.open || !s.msg.waiting {
			continue
		}
		tgt.admit(s)
		if s.opcode == OpcodeSendQP {
			tgt.deliver(s)
		}
		for len(s.more) > 0 && !s.msg.waiting && tgt.broken == nil && !tgt.closed {
			next := s.more[0]
			s.more = slices.Delete(s.more, 0, 1)
			tgt.whole(s, next.seqno, next.op, next.data)
			tgt.free(next.data)
		}
		if s.msg.waiting || tgt.broken != nil || tgt.closed {
			return
		}
		tgt.settle(s)
	}
}

// mustWait reports whether an ordered connection may not execute a request yet: an earlier message waits for the host;
// or the response to an earlier read is unacknowledged, and the request might change the bytes to be read.
func (tgt *target) mustWait(p *Packet) bool {
	if o := p.TAL.Opcode; tgt.reading > 0 && o != OpcodeRead {
		return true
	}
	return tgt.waiters > 0 && tgt.waiter != p.TAL.XID
}

// block keeps a packet of an ordered connection until it may be executed. The peer's tal_trans_window limits the number
// of such packets: those of transactions outside the window are dropped.
func (tgt *target) block(p *Packet, raw []byte) {
	par := &tgt.cfg.Parameters
	switch {
	case int(p.TAL.XID-tgt.inNext) >= par.Transactions:
		tgt.violation(ViolationXID, p)
		return
	case tgt.blocked.n >= par.Transactions*par.PacketsPerTransaction:
		tgt.violation(ViolationSeqno, p)
		return
	}
	tgt.blocked.push(tgt.keep(raw))
}

// unblock executes blocked packets that no longer have to wait.
func (tgt *target) unblock() {
	for tgt.blocked.n > 0 && tgt.broken == nil {
		raw := *tgt.blocked.at(0)
		p, _ := decode(raw, tgt.lite) // cannot fail: decoded on arrival
		if tgt.mustWait(&p) {
			return
		}
		tgt.blocked.pop()
		tgt.request(&p)
		tgt.free(raw)
	}
}

// refuseIncomplete refuses the messages that are incomplete or wait for Ready, after Close.
func (tgt *target) refuseIncomplete() {
	for i := range tgt.in {
		s := &tgt.in[i]
		begun := s.opcode == OpcodeSend && !s.msg.refused && !s.msg.delivered || s.opcode == OpcodeSendQP && s.msg.waiting
		if s.open && !s.done && begun {
			s.msg.refused, s.msg.waiting, s.msg.body = true, false, nil
			tgt.refuse(s, s.msg.seqno, s.msg.op, rdma.ErrFlushed)
			tgt.dropHeld(&s.msg)
			tgt.refuseMore(s, rdma.ErrFlushed)
			tgt.settle(s)
		}
	}
	tgt.waiters, tgt.reading = 0, 0
	tgt.unblock()
}

// releaseBuffers returns the buffers of all packets to the core.
func (tgt *target) releaseBuffers() {
	for i := range tgt.in {
		s := &tgt.in[i]
		tgt.dropHeld(&s.msg)
		for _, w := range s.more {
			tgt.free(w.data)
		}
		s.more = nil
	}
	for tgt.blocked.n > 0 {
		tgt.free(tgt.blocked.pop())
	}
}
