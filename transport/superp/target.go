package superp

import (
	"fmt"
	"slices"

	"github.com/fared/fared/transport/rdma"
)

// incoming is a transaction of the peer.
type incoming struct {
	xid    uint16
	open   bool
	done   bool
	opcode Opcode
	total  int      // number of packets; 0 until the packet with eom has arrived
	got    int      // received packets
	top    int      // highest received seqno
	seen   []uint64 // bitmap of received seqnos
	jobs   int      // reads and answers that have not been completely sent
	errors int      // errors that the peer has not acknowledged: ack_xid must not pass them
	seqno  uint16   // of the next reply
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
	key        uint32
	address    uint64
	offset, n  int // bytes sent so far, of n
}

// request handles a packet of a transaction of the peer. On an ordered connection packets arrive here in the order of psns.
func (c *Connection) request(p *Packet) {
	if int(p.TAL.XID-c.inNext) >= c.cfg.Parameters.Transactions {
		c.core.count.stale++
		return
	}
	s := &c.in[int(p.TAL.XID)&(len(c.in)-1)]
	if !s.open {
		seen, pieces, more := s.seen, s.msg.held[:0], s.more[:0]
		clear(seen)
		*s = incoming{xid: p.TAL.XID, open: true, opcode: p.TAL.Opcode, seen: seen, more: more}
		s.msg.held, s.msg.length = pieces, -1
		c.open++
	}
	n := int(p.TAL.Seqno)
	if s.opcode != p.TAL.Opcode || n >= c.cfg.Parameters.PacketsPerTransaction || s.seen[n/64]>>(n%64)&1 != 0 ||
		s.total > 0 && (p.TAL.EOM || n >= s.total) || p.TAL.EOM && n < s.top {
		c.core.count.malformed++
		return
	}
	s.seen[n/64] |= 1 << (n % 64)
	s.got++
	s.top = max(s.top, n)
	if p.TAL.EOM {
		s.total = n + 1
	}
	if c.closed || !c.executes(p.TAL.Opcode) {
		err := rdma.ErrRemoteInvalid
		if c.closed {
			err = rdma.ErrFlushed
		}
		s.msg.refused = true
		for i := range max(1, int(p.TAL.NumOps)) {
			c.refuse(s, p.TAL.Seqno, i, err)
		}
	} else {
		c.execute(s, p)
	}
	c.settle(s)
}

func (c *Connection) executes(o Opcode) bool {
	switch o {
	case OpcodeRead, OpcodeKeyedRead, OpcodeWrite, OpcodeKeyedWrite, OpcodeSend, OpcodeSendQP, OpcodeCompareSwap, OpcodeFetchAdd:
		return true
	}
	return false
}

// execute executes the operations of a packet, and checks each separately.
func (c *Connection) execute(s *incoming, p *Packet) {
	host := c.core.host
	for i := range int(p.TAL.NumOps) {
		var err error
		switch p.TAL.Opcode {
		case OpcodeWrite, OpcodeKeyedWrite:
			o, block := p.Write(i), p.Block(i)
			var to []byte
			if to, err = host.Memory(c, o.Key, o.Address, len(block), rdma.RemoteWrite); err == nil {
				copy(to, block)
			}
		case OpcodeRead, OpcodeKeyedRead:
			o := p.Read(i)
			if _, err = host.Memory(c, o.Key, o.Address, int(o.Length), rdma.RemoteRead); err == nil {
				s.jobs++
				c.reading++
				c.reads.push(read{xid: s.xid, seqno: p.TAL.Seqno, op: uint8(i), key: o.Key, address: o.Address, n: int(o.Length)})
			}
		case OpcodeCompareSwap, OpcodeFetchAdd:
			o, kind := p.Atomic(i), rdma.OpFetchAdd
			if p.TAL.Opcode == OpcodeCompareSwap {
				kind = rdma.OpCompareSwap
			}
			var was uint64
			if was, err = host.Atomic(c, kind, o.Key, o.Address, o.Compare, o.Swap); err == nil {
				c.answer(s, OpcodeAtomicResponse, answerOp{seqno: p.TAL.Seqno, op: uint8(i), was: was})
			}
		case OpcodeSendQP:
			switch {
			case p.SendQP(i).QP != uint32(c.cid):
				err = rdma.ErrRemoteInvalid
			case s.msg.waiting: // the messages behind it wait too
				s.more = append(s.more, whole{p.TAL.Seqno, i, c.core.copyOf(p.Block(i))})
			default:
				c.whole(s, p.TAL.Seqno, i, p.Block(i))
			}
		case OpcodeSend:
			c.piece(s, int(p.Send(i).Offset), p.Block(i), p.TAL.EOM && i == int(p.TAL.NumOps)-1)
		}
		if err != nil {
			c.refuse(s, p.TAL.Seqno, i, err)
		}
		if c.broken != nil || c.closed {
			return
		}
	}
}

// refuse answers an operation with a Transaction error.
func (c *Connection) refuse(s *incoming, seqno uint16, op int, err error) {
	c.answer(s, OpcodeError, answerOp{seqno: seqno, op: uint8(op), major: majorOf(err)})
}

// whole handles a message of one block.
func (c *Connection) whole(s *incoming, seqno uint16, op int, data []byte) {
	s.msg = message{seqno: seqno, op: op, held: s.msg.held, length: -1}
	c.piece(s, 0, data, true)
	c.deliver(s)
}

// deliver delivers the message to the host once it is complete.
func (c *Connection) deliver(s *incoming) {
	m := &s.msg
	switch {
	case !m.admitted || m.delivered || c.broken != nil || c.closed:
	case m.have != len(m.body):
		c.malformed(s)
	default:
		m.delivered, m.body = true, nil
		c.core.host.Deliver(c, m.head[:c.cfg.HeadSize])
	}
}

// piece handles a part of a message, in any order; last is true for the final one.
func (c *Connection) piece(s *incoming, offset int, data []byte, last bool) {
	m := &s.msg
	if last {
		m.length = offset + len(data)
	}
	switch {
	case m.refused:
		return
	case offset == 0 && !m.begun:
		if len(data) < c.cfg.HeadSize {
			m.refused = true
			c.refuse(s, m.seqno, m.op, fmt.Errorf("%w: message without head", rdma.ErrRemoteInvalid))
			c.dropHeld(m)
			return
		}
		m.begun = true
		copy(m.head[:], data[:c.cfg.HeadSize])
		c.admit(s)
		data, offset = data[c.cfg.HeadSize:], c.cfg.HeadSize
	}
	switch {
	case c.broken != nil || c.closed || m.refused:
	case m.admitted:
		c.place(s, offset, data)
	default:
		m.held = append(m.held, held{offset: offset, data: c.core.copyOf(data)})
	}
}

// admit requests the destination of the message from the host.
func (c *Connection) admit(s *incoming) {
	m, n := &s.msg, -1
	if m.length >= 0 {
		n = m.length - c.cfg.HeadSize
	}
	body, verdict := c.core.host.Admit(c, m.head[:c.cfg.HeadSize], n)
	waited := m.waiting
	m.waiting = verdict == rdma.NotReady && !c.closed
	switch {
	case m.waiting && !waited:
		c.waiters++
		c.waiter = s.xid
	case !m.waiting && waited:
		c.waiters--
	}
	if m.waiting || c.closed {
		return
	}
	if verdict != rdma.Accepted {
		m.refused = true
		c.refuse(s, m.seqno, m.op, rdma.ErrRemoteInvalid)
		c.dropHeld(m)
		return
	}
	m.admitted, m.body = true, body
	for _, h := range m.held {
		if c.broken == nil {
			c.place(s, h.offset, h.data)
		}
	}
	c.dropHeld(m)
}

// place copies a piece of a message to its place.
func (c *Connection) place(s *incoming, offset int, data []byte) {
	m := &s.msg
	at := offset - c.cfg.HeadSize
	if at < 0 || at+len(data) > len(m.body) {
		c.malformed(s)
		return
	}
	copy(m.body[at:], data)
	m.have += len(data)
}

// malformed ends the connection: a message that the host has admitted cannot be delivered, and its receive stays occupied.
func (c *Connection) malformed(s *incoming) {
	c.refuse(s, s.msg.seqno, s.msg.op, rdma.ErrRemoteInvalid)
	c.broken = fmt.Errorf("%w: the length of a message differs from its header", rdma.ErrRemoteInvalid)
}

// dropHeld releases the buffers of held pieces.
func (c *Connection) dropHeld(m *message) {
	for i, h := range m.held {
		c.core.release(h.data)
		m.held[i] = held{}
	}
	m.held = m.held[:0]
}

// refuseMore refuses the messages that wait behind a refused one.
func (c *Connection) refuseMore(s *incoming, err error) {
	for i, w := range s.more {
		c.refuse(s, w.seqno, w.op, err)
		c.core.release(w.data)
		s.more[i] = whole{}
	}
	s.more = s.more[:0]
}

// settle ends a transaction that is complete, delivers its message, and advances ack_xid.
func (c *Connection) settle(s *incoming) {
	if !s.open || s.done || s.total == 0 || s.got < s.total || c.broken != nil {
		return
	}
	if s.opcode == OpcodeSendQP && (s.msg.waiting || len(s.more) > 0) {
		return
	}
	if s.opcode == OpcodeSend && !s.msg.refused && !s.msg.delivered {
		m := &s.msg
		if !m.begun {
			c.core.count.malformed++
			m.refused = true
			c.refuse(s, 0, 0, rdma.ErrRemoteInvalid)
			c.dropHeld(m)
		} else if c.deliver(s); !m.delivered {
			return
		}
	}
	if s.jobs > 0 || s.errors > 0 {
		return
	}
	s.done = true
	c.open--
	for x := &c.in[int(c.inNext)&(len(c.in)-1)]; x.open && x.done; x = &c.in[int(c.inNext)&(len(c.in)-1)] {
		x.open = false
		c.inNext++
	}
}

// retry retries the admission of waiting messages, oldest first, until one has to keep waiting.
func (c *Connection) retry() {
	if c.waiters == 0 {
		return
	}
	for i := range len(c.in) {
		s := &c.in[(int(c.inNext)+i)&(len(c.in)-1)]
		if !s.open || !s.msg.waiting {
			continue
		}
		c.admit(s)
		if s.opcode == OpcodeSendQP {
			c.deliver(s)
		}
		for len(s.more) > 0 && !s.msg.waiting && c.broken == nil && !c.closed {
			next := s.more[0]
			s.more = slices.Delete(s.more, 0, 1)
			c.whole(s, next.seqno, next.op, next.data)
			c.core.release(next.data)
		}
		if s.msg.waiting || c.broken != nil || c.closed {
			return
		}
		c.settle(s)
	}
}

// mustWait reports whether an ordered connection may not execute a request yet: an earlier message waits for the host; or the response to
// an earlier read is unacknowledged, and the request might change the bytes to be read.
func (c *Connection) mustWait(p *Packet) bool {
	if o := p.TAL.Opcode; c.reading > 0 && o != OpcodeRead && o != OpcodeKeyedRead {
		return true
	}
	return c.waiters > 0 && c.waiter != p.TAL.XID
}

// block keeps a packet of an ordered connection until it may be executed. The peer's tal_trans_window limits the number of such packets:
// those of transactions outside the window are dropped.
func (c *Connection) block(p *Packet, raw []byte) {
	par := &c.cfg.Parameters
	if int(p.TAL.XID-c.inNext) >= par.Transactions || c.blocked.n >= par.Transactions*par.PacketsPerTransaction {
		c.core.count.stale++
		return
	}
	c.blocked.push(c.core.copyOf(raw))
}

// unblock executes blocked packets that no longer have to wait.
func (c *Connection) unblock() {
	for c.blocked.n > 0 && c.broken == nil {
		raw := *c.blocked.at(0)
		p, _ := Decode(raw) // cannot fail: decoded on arrival
		if c.mustWait(&p) {
			return
		}
		c.blocked.pop()
		c.request(&p)
		c.core.release(raw)
	}
}
