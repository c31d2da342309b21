package superp

import (
	"net/netip"
	"time"

	"github.com/fared/fared/transport/rdma"
)

// kind is the kind of a packet in the send window.
type kind uint8

const (
	noOp kind = iota
	last
	request
	reply
)

// content is a packet's content, by reference: each transmission rebuilds the packet.
type content struct {
	kind    kind
	tx      *transaction // request
	seqno   int          // of the packet in tx
	answer  *answer      // reply
	probe   bool         // No-op: requests an acknowledgement
	carried uint16       // ack_xid of the first transmission
}

// answer is a packet of replies to operations of one of the peer's transactions.
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
	major     uint16 // of a Transaction error
	was       uint64 // of an atomic response: the previous value
	key       uint32 // of a read response: the source, looked up at each transmission because the region may be deregistered by then
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
		s.jobs++ // the transaction is not complete before the answer is sent
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

// nextAnswer returns the next packet of replies, or nil.
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
	// Small reads of the same packet share a response if their blocks have equal lengths.
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

// sending marks the last reply to a transaction, and ends the transaction if no other work is left: the reply then carries the ack_xid that
// covers it.
func (c *Connection) sending(a *answer) {
	s := a.slot
	a.eom = s.total > 0 && s.got == s.total && s.jobs == 0
	c.settle(s)
}

// acked releases the content of a packet that has arrived.
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

// works notes that the peer has acknowledged a packet on a path.
func (c *Connection) works(p *path) { c.paths.restored(p, c.core.host.Now()) }

// stallAt returns the time at which a path counts as stalled if none of its packets is acknowledged until then; 0 means never. It considers
// only paths that have lost packets or carry the oldest unacknowledged one, since sack_bitmap does not show packets far behind the oldest
// one.
func (c *Connection) stallAt(p *path) time.Duration {
	if p.stalled || !p.living() || p.ackRequested <= p.acked {
		return 0
	}
	from := p.quiet
	if r := c.tx.oldest(); p.losses == 0 {
		if r == nil || r.path != p {
			return 0
		}
		from = max(from, r.at)
	}
	return from + c.cfg.Timing.Stall
}

// probeLostAt returns the time at which the probe packet of a stalled path counts as lost, if the window waits for it; 0 means never.
func (c *Connection) probeLostAt() time.Duration {
	r := c.tx.oldest()
	if r == nil || r.lost || c.paths.usable(r.path) {
		return 0
	}
	return r.at + c.tx.rtt.late(c.cfg.Timing.AckDelay)
}

// stall detects stalled paths. Their packets in flight move to other paths, if any works.
func (c *Connection) stall(now time.Duration) {
	timing := &c.cfg.Timing
	if t := c.probeLostAt(); t != 0 && now >= t {
		r := c.tx.oldest()
		c.tx.lose(r)
		r.expired = true
	}
	for _, p := range c.paths.all {
		t := c.stallAt(p)
		switch {
		case t == 0 || now < t:
		case now-t > timing.Stall/4:
			p.quiet = now - timing.Stall*3/4 // the process did not run: acknowledgements may be waiting in the socket
		default:
			c.core.count.stalls++
			c.paths.stall(p, now, timing)
			c.tx.strand(c.paths.usable)
		}
	}
}

// tellStalls reports stalled and recovered paths to the host.
func (c *Connection) tellStalls() {
	for _, p := range c.paths.changed {
		if p.stalled != p.reported && !c.closed {
			p.reported = p.stalled
			c.core.host.Stalled(c, p.Slot, p.stalled)
		}
	}
	c.paths.changed = c.paths.changed[:0]
}

// newAck reports whether the next packet would carry a new acknowledgement.
func (c *Connection) newAck() bool { return c.rx.moved || c.inNext-1 != c.lastAckXID }

// transmitNew sends new packets as the windows allow. Replies and requests alternate by run, so that neither direction starves the other.
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

// ask makes room if only unacknowledged acknowledgements fill the window.
func (c *Connection) ask(now time.Duration) {
	if c.tx.ask(now) {
		c.repeat(now)
	}
}

// repeat retransmits the oldest unacknowledged packet.
func (c *Connection) repeat(now time.Duration) {
	c.core.count.retransmitted++
	c.transmit(c.tx.una, c.tx.at(c.tx.una), true, now)
}

// send sends a new packet.
func (c *Connection) send(x content, now time.Duration) {
	x.carried = c.inNext - 1
	psn, r := c.tx.push(x, x.kind != noOp || x.probe || x.carried != c.confirmed, now)
	c.lastAckXID = x.carried
	c.transmit(psn, r, false, now)
}

// again retransmits lost packets, oldest first.
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

// transmit builds a packet and sends it on the next path.
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
		p = c.paths.next(len(b)+len(payload), r.path, now)
	default:
		p = c.paths.next(len(b)+len(payload), nil, now)
	}
	p.count(data, again)
	c.tx.went(r, p, now)
	c.rx.moved, c.rx.pending = false, 0
	// lastAckXID is that of new packets only: if the first transmission has arrived, the loss of a retransmission goes unnoticed.
	if c.lastAckXID == c.inNext-1 {
		c.ackAt, c.ackNow = 0, false
	}
	c.core.count.sent++
	if p.Tunnel != nil {
		p.Tunnel.Carry(p.Port, b, payload)
	} else {
		c.core.out.Send(netip.AddrPortFrom(c.remote, c.core.cfg.Port), p.Port, b, payload, nil)
	}
	c.core.scratch = b[:0]
}

// buildAnswer appends a reply's TAL header and operations to b. It returns the data that follows them, and the number of data bytes. A read
// whose memory is no longer accessible becomes a Transaction error.
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

// acknowledge sends a No-op if an acknowledgement is due that no other packet has carried. The No-op consumes a psn like every packet, but
// requests an acknowledgement only if its ack_xid is new; otherwise the two ends would acknowledge each other forever. If the window is
// full, a retransmission of the oldest packet carries the acknowledgement.
func (c *Connection) acknowledge(now time.Duration) {
	if c.lastAckXID != c.inNext-1 && !c.ackNow {
		// Transactions are complete: acknowledge at once if no other is open, else after AckDelay.
		c.ackNow = c.open == 0
		if c.ackAt == 0 {
			c.ackAt = now + c.cfg.Timing.AckDelay
		}
	}
	room := c.tx.room(true)
	if c.probe {
		c.probe, c.lastActivity = false, now
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
