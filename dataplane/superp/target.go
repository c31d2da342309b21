package superp

import (
	"fmt"
	"slices"

	"github.com/fared/fared/dataplane/rdma"
)

// incoming is a transaction of the peer's.
type incoming struct {
	xid    uint16
	open   bool
	done   bool
	opcode Opcode
	total  int      // packets; 0 until the one with eom has come
	got    int      // packets that have come
	top    int      // highest seqno that has come
	seen   []uint64 // which ones
	jobs   int      // reads whose responses have not all been sent
	errors int      // errors that the peer has not acknowledged: ack_xid must not pass them
	seqno  uint16   // of the next reply
	msg    message
	more   []whole // messages behind msg that were sent to the queue pair
}

// whole is a message of one block that waits for those before it in its transaction.
type whole struct {
	seqno uint16
	op    int
	data  []byte // of a buffer of the core's
}

// message is what the Sends of a transaction carry.
type message struct {
	seqno     uint16 // with op, the operation that began it, for errors: 0 for Sends, which are one message
	op        int
	head      [rdma.MaxHead]byte
	begun     bool // the head has come
	admitted  bool
	waiting   bool // for Ready
	refused   bool // or failed: what still comes of it is dropped
	delivered bool
	length    int // of all, -1 until the last packet has come
	have      int // bytes in body
	body      []byte
	held      []held // came before the message was admitted
}

// held is a piece of a message that waits.
type held struct {
	offset int
	data   []byte // of a buffer of the core's
}

// read is a part of an RMA read that has not been answered.
type read struct {
	xid, seqno uint16
	op         uint8
	key        uint32
	address    uint64
	offset, n  int // sent so far, of how many
}

// request takes a packet of a transaction of the peer's. On an ordered connection it comes in the order of psns.
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

// execute does the operations of a packet, each checked on its own.
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
			case s.msg.waiting: // so do those behind it
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

// whole takes a message of one block.
func (c *Connection) whole(s *incoming, seqno uint16, op int, data []byte) {
	s.msg = message{seqno: seqno, op: op, held: s.msg.held, length: -1}
	c.piece(s, 0, data, true)
	c.deliver(s)
}

// deliver gives the host its message, once all of it is in place.
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

// piece takes a part of a message, in any order; last is the one that ends it.
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

// admit asks the host where the message goes.
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

// place puts a piece of a message where it belongs.
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

// malformed ends the connection: a message that the host has admitted cannot be delivered, and a receive waits for it.
func (c *Connection) malformed(s *incoming) {
	c.refuse(s, s.msg.seqno, s.msg.op, rdma.ErrRemoteInvalid)
	c.broken = fmt.Errorf("%w: a message is not as long as it says", rdma.ErrRemoteInvalid)
}

// dropHeld gives the buffers of pieces back.
func (c *Connection) dropHeld(m *message) {
	for i, h := range m.held {
		c.core.release(h.data)
		m.held[i] = held{}
	}
	m.held = m.held[:0]
}

// refuseMore answers the messages that waited behind one that will not be taken.
func (c *Connection) refuseMore(s *incoming, err error) {
	for i, w := range s.more {
		c.refuse(s, w.seqno, w.op, err)
		c.core.release(w.data)
		s.more[i] = whole{}
	}
	s.more = s.more[:0]
}

// settle ends a transaction that is complete, delivers its message, and moves ack_xid.
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

// retry asks again for messages that wait for the host, oldest first, until one must wait on.
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

// mustWait says whether an ordered connection may not execute a request yet: a message before it waits for the host; or a read
// before it has not been answered, and the request would change what it reads.
func (c *Connection) mustWait(p *Packet) bool {
	if o := p.TAL.Opcode; c.reading > 0 && o != OpcodeRead && o != OpcodeKeyedRead {
		return true
	}
	return c.waiters > 0 && c.waiter != p.TAL.XID
}

// block keeps a packet of an ordered connection until it may be executed. The peer's tal_trans_window bounds how many there are:
// packets of transactions outside of it are dropped.
func (c *Connection) block(p *Packet, raw []byte) {
	par := &c.cfg.Parameters
	if int(p.TAL.XID-c.inNext) >= par.Transactions || c.blocked.n >= par.Transactions*par.PacketsPerTransaction {
		c.core.count.stale++
		return
	}
	c.blocked.push(c.core.copyOf(raw))
}

// unblock executes what may be by now.
func (c *Connection) unblock() {
	for c.blocked.n > 0 && c.broken == nil {
		raw := *c.blocked.at(0)
		p, _ := Decode(raw) // it was decoded before
		if c.mustWait(&p) {
			return
		}
		c.blocked.pop()
		c.request(&p)
		c.core.release(raw)
	}
}
