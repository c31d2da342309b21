package superp

import (
	"net/netip"
	"time"

	"github.com/fared/fared/dataplane/rdma"
)

// kind is what a packet of the send window carries.
type kind uint8

const (
	noOp kind = iota
	last
	request
	reply
)

// content is what a packet carries, by reference: each transmission builds it anew.
type content struct {
	kind    kind
	tx      *transaction // request
	seqno   int          // of it
	answer  *answer      // reply
	probe   bool         // No-op: to be acknowledged
	carried uint16       // ack_xid of the first transmission
}

// answer is a packet of replies to operations of one transaction of the peer's.
type answer struct {
	slot   *incoming
	opcode Opcode
	xid    uint16
	seqno  uint16
	eom    bool
	n      int
	ops    [MaxOps]answerOp
}

// answerOp is one reply.
type answerOp struct {
	seqno     uint16
	op        uint8
	major     uint16 // Transaction error
	was       uint64 // atomic response
	key       uint32 // read response: where the data is, looked up whenever it is sent: the region may be gone by then
	address   uint64
	offset, n int
}

// answer queues a reply.
func (c *Connection) answer(s *incoming, o Opcode, op answerOp) {
	if c.answers.n > 0 {
		if a := *c.answers.at(c.answers.n - 1); a.slot == s && a.opcode == o && a.n < c.opsPerPacket {
			a.ops[a.n] = op
			a.n++
			return
		}
	}
	c.answers.push(c.newAnswer(s, o, op))
	if o == OpcodeError {
		s.errors++
	} else {
		s.jobs++ // the transaction is not complete before the answer is under way
	}
}

func (c *Connection) newAnswer(s *incoming, o Opcode, op answerOp) *answer {
	var a *answer
	if n := len(c.core.answers); n > 0 {
		a = c.core.answers[n-1]
		c.core.answers = c.core.answers[:n-1]
	} else {
		a = new(answer)
	}
	a.slot, a.opcode, a.xid, a.seqno, a.eom, a.n = s, o, s.xid, s.seqno, false, 1
	a.ops[0] = op
	s.seqno++
	return a
}

// nextAnswer is the next packet of replies; nil when there is none.
func (c *Connection) nextAnswer() *answer {
	if c.answers.n > 0 {
		a := c.answers.pop()
		if a.opcode != OpcodeError {
			a.slot.jobs--
		}
		c.sending(a)
		return a
	}
	if c.reads.n == 0 {
		return nil
	}
	r := c.reads.at(0)
	s := &c.in[int(r.xid)&(len(c.in)-1)]
	n := min(c.payload, r.n-r.offset)
	a := c.newAnswer(s, OpcodeReadResponse, answerOp{seqno: r.seqno, op: r.op, key: r.key, address: r.address, offset: r.offset, n: n})
	if r.offset += n; r.offset < r.n {
		c.reading++
		return a
	}
	first := c.reads.pop()
	s.jobs--
	// Small reads of one packet share a response, if their blocks are equal.
	for first.n == n && c.reads.n > 0 && a.n < c.opsPerPacket && (a.n+1)*(n+8) <= c.payload {
		r := c.reads.at(0)
		if r.xid != first.xid || r.seqno != first.seqno || r.n != n {
			break
		}
		a.ops[a.n] = answerOp{seqno: r.seqno, op: r.op, key: r.key, address: r.address, n: n}
		a.n++
		s.jobs--
		c.reading--
		c.reads.pop()
	}
	c.sending(a)
	return a
}

// sending marks the last reply to a transaction, and ends the transaction if nothing else is to be done for it: the reply carries
// the ack_xid that covers it.
func (c *Connection) sending(a *answer) {
	s := a.slot
	a.eom = s.total > 0 && s.got == s.total && s.jobs == 0
	c.settle(s)
}

// acked takes back what a packet carried that has arrived.
func (c *Connection) acked(x *content) {
	if int16(x.carried-c.confirmed) > 0 {
		c.confirmed = x.carried
	}
	switch x.kind {
	case request:
		if x.tx != nil {
			x.tx.flying--
		}
	case reply:
		a := x.answer
		switch a.opcode {
		case OpcodeError:
			if a.slot.errors--; a.slot.errors == 0 {
				c.settle(a.slot)
			}
		case OpcodeReadResponse:
			c.reading--
		}
		a.slot = nil
		c.core.answers = append(c.core.answers, a)
	case last:
		c.lastAcked = true
		c.noticed()
	}
}

// newAck says whether the next packet acknowledges something that no packet has.
func (c *Connection) newAck() bool { return c.rx.moved || c.inNext-1 != c.told }

// transmitNew sends what waits, as far as the windows allow. Replies and requests take turns, run by run, so that neither end
// starves the other.
func (c *Connection) transmitNew(now time.Duration) {
	for c.tx.room(c.newAck()) {
		replies := c.answers.n > 0 || c.reads.n > 0
		if replies && c.turn < run {
			c.turn++
			c.send(content{kind: reply, answer: c.nextAnswer()}, now)
			continue
		}
		t := c.current
		if t == nil {
			t = c.begin()
		}
		switch {
		case t != nil:
			if c.turn++; c.turn >= 2*run {
				c.turn = 0
			}
			n := t.next
			t.next++
			t.flying++
			if c.current = t; t.next == t.packets {
				c.current = nil
			}
			c.send(content{kind: request, tx: t, seqno: n}, now)
		case replies:
			c.turn = 0
		default:
			return
		}
	}
	if c.answers.n > 0 || c.reads.n > 0 || c.current != nil || c.queue.n > 0 {
		c.ask(now)
	}
}

// ask makes room where nothing but unacknowledged acknowledgements takes it.
func (c *Connection) ask(now time.Duration) {
	if c.tx.ask(now) {
		c.repeat(now)
	}
}

// repeat sends the oldest packet that is not acknowledged once more.
func (c *Connection) repeat(now time.Duration) {
	c.core.count.retransmitted++
	c.transmit(c.tx.una, c.tx.at(c.tx.una), true, now)
}

// send sends a new packet.
func (c *Connection) send(x content, now time.Duration) {
	x.carried = c.inNext - 1
	psn, r := c.tx.push(x, x.kind != noOp || x.probe || x.carried != c.confirmed, now)
	c.told = x.carried
	c.transmit(psn, r, false, now)
}

// again sends what is lost, oldest first.
func (c *Connection) again(now time.Duration) {
	for psn := c.tx.una; c.tx.lost > 0 && psn != c.tx.nxt; psn++ {
		r := c.tx.at(psn)
		if !r.lost {
			continue
		}
		if limit := c.cfg.Parameters.MaxRetransmits; limit > 0 && r.times > limit {
			c.broken = rdma.ErrRetryExceeded
			return
		}
		c.core.count.retransmitted++
		c.transmit(psn, r, true, now)
	}
}

// transmit builds a packet and sends it by the path whose turn it is.
func (c *Connection) transmit(psn uint32, r *sent, again bool, now time.Duration) {
	x := &r.content
	h := PDL{DCID: c.remoteCID, RWin: uint16(c.rx.window - 1), PSN: psn}
	h.AckPSN, h.SACK = c.rx.acks()
	t := TAL{AckXID: c.inNext - 1, XID: c.outNext, EOM: true}
	b := h.append(c.core.scratch[:0])
	var payload []byte
	data := 0
	switch x.kind {
	case noOp:
		t.Opcode = OpcodeNoOp
		b = t.append(b)
	case last:
		t.Opcode = OpcodeLast
		b = t.append(b)
	case request:
		t.Opcode, t.XID, t.Seqno, t.NumOps, t.EOM = x.tx.opcode, x.tx.xid, uint16(x.seqno), uint8(x.tx.n), x.seqno == x.tx.packets-1
		b, payload = c.buildRequest(t.append(b), x.tx, x.seqno)
		data = c.dataBytes(x.tx, x.seqno)
	case reply:
		b, payload, data = c.buildAnswer(b, t, x.answer)
	}
	var p *path
	switch {
	case x.kind == noOp:
		p = c.paths.rotate()
	case r.expired:
		p = c.paths.next(len(b)+len(payload), r.path)
	default:
		p = c.paths.next(len(b)+len(payload), nil)
	}
	p.count(data, again)
	c.tx.went(r, p, now)
	c.rx.moved, c.rx.pending = false, 0
	if c.told == c.inNext-1 {
		c.ackAt, c.ackNow = 0, false // a retransmission may be lost when the first transmission was not: it does not count for ack_xid
	}
	c.core.count.sent++
	if p.Tunnel != nil {
		p.Tunnel.Carry(p.Port, b, payload)
	} else {
		c.core.out.Send(netip.AddrPortFrom(c.remote, c.core.cfg.Port), p.Port, b, payload, nil)
	}
	c.core.scratch = b[:0]
}

// buildAnswer appends a reply's TAL header and operations to b, and returns the data that follows and how much it is in all. What
// may not be read any more becomes a Transaction error.
func (c *Connection) buildAnswer(b []byte, t TAL, a *answer) (head, payload []byte, data int) {
	t.Opcode, t.XID, t.Seqno, t.NumOps, t.EOM = a.opcode, a.xid, a.seqno, uint8(a.n), a.eom
	start := len(b)
	b = t.append(b)
	for i := range a.n {
		switch o := &a.ops[i]; a.opcode {
		case OpcodeError:
			e := ErrorOp{Seqno: o.seqno, Op: o.op, Major: o.major}
			b = e.append(b)
		case OpcodeAtomicResponse:
			w := AtomicResponseOp{Seqno: o.seqno, Op: o.op, Was: o.was}
			b = w.append(b)
		case OpcodeReadResponse:
			w := ReadResponseOp{Seqno: o.seqno, Op: o.op, Offset: uint32(o.offset)}
			b = w.append(b)
		}
	}
	if a.opcode != OpcodeReadResponse {
		return b, nil, 0
	}
	for i := range a.n {
		o := &a.ops[i]
		block, err := []byte(nil), error(rdma.ErrFlushed)
		if !c.closed {
			block, err = c.core.host.Memory(c, o.key, o.address+uint64(o.offset), o.n, rdma.RemoteRead)
		}
		if err != nil {
			t.Opcode = OpcodeError
			b = t.append(b[:start])
			for i := range a.n {
				e := ErrorOp{Seqno: a.ops[i].seqno, Op: a.ops[i].op, Major: majorOf(err)}
				b = e.append(b)
			}
			return b, nil, 0
		}
		if a.n == 1 {
			return b, block, len(block)
		}
		b = append(b, block...)
		data += len(block)
	}
	return b, nil, data
}

// acknowledge sends a No-op if an acknowledgement is due that nothing else carried. It takes a psn, as every packet does, but asks
// for an acknowledgement of its own only if it brings an ack_xid that no other packet is known to have brought: two ends would
// never fall silent otherwise. With the window full it is the oldest packet that carries the acknowledgement, once more.
func (c *Connection) acknowledge(now time.Duration) {
	if c.told != c.inNext-1 && !c.ackNow {
		// Transactions are complete: the peer hears it at once if no other is under way, else in company.
		c.ackNow = c.open == 0
		if c.ackAt == 0 {
			c.ackAt = now + c.cfg.Timing.AckDelay
		}
	}
	room := c.tx.room(true)
	if c.probe {
		c.probe, c.heard = false, now
		if room {
			c.send(content{kind: noOp, probe: true}, now)
			return
		}
		c.ask(now)
	}
	if !c.ackNow && (c.ackAt == 0 || now < c.ackAt) {
		return
	}
	if room {
		c.core.count.pureAcks++
		c.send(content{kind: noOp}, now)
		return
	}
	c.ackNow, c.ackAt = false, now+c.cfg.Timing.Retransmit
	c.repeat(now)
}
