package superp

import (
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
	xid     uint16       // No-op and Last NULL
	partial bool         // No-op in place of an abandoned request: not the last packet of its transaction
	answer  *answer      // reply
	probe   bool         // No-op: requests an acknowledgement
	carried uint16       // ack_xid of the first transmission
}

// acked releases the content of a packet that has arrived.
func (c *Connection) acked(x *content) {
	c.acks.confirm(x.carried)
	switch x.kind {
	case request:
		if x.tx != nil {
			x.tx.flying--
		}
	case reply:
		c.target.releaseAnswer(x.answer)
	case last:
		if c.shutdown.abrupt {
			c.shutdown.lastAcked = true
			c.noticed()
		}
	}
}

// works notes that the peer has acknowledged a packet on a path.
func (c *Connection) works(p *path) { c.paths.restored(p, c.core.host.Now()) }

// reportStalls reports stalled and recovered paths to the host.
func (c *Connection) reportStalls() {
	for _, p := range c.paths.changed {
		if p.stalled != p.reported && !c.closed {
			p.reported = p.stalled
			c.core.host.Stalled(c, p.Slot, p.stalled)
		}
	}
	c.paths.changed = c.paths.changed[:0]
}

// newAck reports whether the next packet would carry a new acknowledgement.
func (c *Connection) newAck() bool { return c.rx.moved || c.acks.isNew(c.target.due) }

// transmitNew sends new packets as the windows allow. Replies and requests alternate by run, so that neither direction
// starves the other.
func (c *Connection) transmitNew(now time.Duration) {
	for c.tx.room(c.newAck()) && c.tx.flight.Room() > 0 && c.waits() && c.mayAssign(now) {
		replies := c.target.replies()
		if replies && c.turn < run {
			c.turn++
			c.send(content{kind: reply, answer: c.target.nextAnswer()}, now)
			continue
		}
		x, ok := c.initiator.nextRequest(now)
		switch {
		case ok:
			if c.turn++; c.turn >= 2*run {
				c.turn = 0
			}
			c.send(x, now)
		case replies:
			c.turn = 0
		default:
			return
		}
	}
	if c.waits() {
		c.ask(now)
	}
}

// waits reports whether replies or requests wait to be sent.
func (c *Connection) waits() bool {
	return c.target.replies() || c.initiator.current != nil || c.initiator.queue.n > 0
}

// mayAssign reports whether the next psn may be assigned to a packet. It reports one that is needed too early.
func (c *Connection) mayAssign(now time.Duration) bool {
	if c.tx.reuse.allows(now) {
		return true
	}
	if c.tx.reuse.tooEarly() {
		c.reportError(ProtocolError{Kind: ViolationPSNReuse, PSN: c.tx.nxt})
	}
	return false
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

// send sends a new packet. A No-op is a transaction and needs an XID. Without a free XID it repeats the latest one that
// the peer has acknowledged: the peer's packet delivery layer processes the packet, its transaction layer drops it, and
// no other transaction loses its XID.
func (c *Connection) send(x content, now time.Duration) {
	if x.kind == noOp {
		x.xid, _ = c.initiator.nextNull(OpcodeNoOp)
	}
	x.carried = c.target.ackXID()
	psn, r := c.tx.push(x, x.kind != noOp || x.probe || c.acks.unconfirmed(c.target.due), now)
	c.acks.lastXID = x.carried
	c.transmit(psn, r, false, now)
	if c.lite { // what is sent arrives
		c.tx.arrived(r, c)
		c.tx.advance()
	}
}

// again retransmits lost packets, oldest first, as the congestion window allows. The oldest of all does not wait for
// it, because those behind it may have been dropped unnoticed.
func (c *Connection) again(now time.Duration) {
	for psn := c.tx.una; c.tx.lost > 0 && psn != c.tx.nxt; psn++ {
		r := c.tx.at(psn)
		if !r.lost {
			continue
		}
		if psn != c.tx.una && c.tx.flight.Room() <= 0 {
			return
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
	c.rx.offered = c.receiveWindow()
	h := PDL{DCID: c.remoteCID, RWin: uint16(c.rx.offered - 1), PSN: psn}
	h.AckPSN, h.SACK = c.rx.acks()
	t := TAL{AckXID: c.target.ackXID(), EOM: true}
	if c.marked && c.echoes {
		t.Reserved = echo
	}
	c.marked = false
	b := c.core.scratch[:0]
	if !c.lite {
		b = h.append(b)
	}
	var payload []byte
	data := 0
	switch x.kind {
	case noOp:
		t.Opcode, t.XID, t.Seqno, t.EOM = OpcodeNoOp, x.xid, uint16(x.seqno), !x.partial
		b = t.append(b)
	case last:
		t.Opcode, t.XID = OpcodeLast, x.xid
		b = t.append(b)
	case request:
		t.Opcode, t.XID, t.Seqno, t.NumOps, t.EOM = x.tx.opcode, x.tx.xid, uint16(x.seqno), uint8(c.initiator.numOps(x.tx)), x.seqno == x.tx.packets-1
		b, payload = c.initiator.buildRequest(t.append(b), x.tx, x.seqno)
		data = c.initiator.dataBytes(x.tx, x.seqno)
	case reply:
		b, payload, data = c.target.buildAnswer(b, t, x.answer)
	}
	var p *path
	switch {
	case c.lite:
		p = c.paths.single()
	case x.kind == noOp:
		p = c.paths.rotate()
	case r.expired:
		p = c.paths.next(len(b)+len(payload), r.path, now)
	default:
		p = c.paths.next(len(b)+len(payload), nil, now)
	}
	p.count(data, again)
	c.tx.went(r, p, now)
	c.tx.reuse.sent(psn, now)
	c.rx.moved, c.rx.pending = false, 0
	c.acks.carried(c.target.due)
	c.target.nulls = 0
	c.core.count.sent++
	if p.Tunnel != nil {
		p.Tunnel.Carry(p.Port, b, payload)
	} else {
		c.core.out.send(&p.Path, c.remote, c.class, b, payload)
	}
	c.core.scratch = b[:0]
}

// acknowledge sends a No-op if an acknowledgement is due that no other packet has carried. The No-op consumes a psn
// like every packet, but requests an acknowledgement only if its ack_xid is new; otherwise the two ends would
// acknowledge each other forever. If the window is full, a retransmission of the oldest packet carries the
// acknowledgement.
func (c *Connection) acknowledge(now time.Duration) {
	if c.acks.isNew(c.target.due) && !c.acks.now {
		// Transactions are complete: acknowledge at once if no other is open, else after AckDelay.
		c.acks.now = c.target.open == 0
		c.acks.schedule(now + c.cfg.Timing.AckDelay)
	}
	// No-ops are acknowledged by the next packet, or when they occupy half of the peer's window.
	c.acks.now = c.acks.now || c.target.nulls >= max(8, c.transactions/2)
	// A window that has been reduced to less than half, and has doubled since, is announced at once.
	if w := c.receiveWindow(); !c.lite && 2*c.rx.offered <= min(w, int(c.rx.window)) {
		c.acks.now = true
	}
	room := c.tx.room(true)
	if c.probe {
		c.probe, c.lastActivity = false, now
		if room && c.mayAssign(now) {
			c.send(content{kind: noOp, probe: true}, now)
			return
		}
		c.ask(now)
	}
	if !c.acks.due(now) {
		return
	}
	// Two ends whose No-ops all acknowledge something new cannot fill both windows.
	if c.lite && !c.acks.isNew(c.target.ackXID()) {
		c.acks.now, c.acks.at = false, 0
		return
	}
	if c.lite && !c.initiator.mayNull() && c.acks.patient(now, c.cfg.Parameters.TransactionTimeout/4) {
		return // the next packet of the peer may free an XID
	}
	if room && c.mayAssign(now) {
		c.core.count.pureAcks++
		c.send(content{kind: noOp}, now)
		return
	}
	c.acks.now, c.acks.at = false, now+c.cfg.Timing.Retransmit
	if c.tx.una != c.tx.nxt {
		c.repeat(now)
	}
}
