package superppeer

import "time"

// delivery is the state of the packet delivery layer.
type delivery struct {
	// Sending.
	next, unacked uint32
	flying        map[uint32]*flight
	remoteWindow  int
	sentAck       uint32 // next expected psn in the latest packet sent
	// Receiving.
	expected uint32
	got      map[uint32]bool   // received above expected
	early    map[uint32]packet // ordered: received above expected
	pending  int               // new psns since the latest packet was sent
	ackAt    time.Time         // zero: no acknowledgement is due
}

// flight is an unacknowledged packet.
type flight struct {
	packet
	at     time.Time
	tries  int
	acked  bool
	onAck  func()
	resent bool // by a hole of the bitmap
}

// mayReserve reports whether a new packet may be sent. The last one of the window must bring a new ack_psn.
func (p *Peer) mayReserve() bool {
	if p.cfg.lite() {
		return true
	}
	used, limit := int(p.delivery.next-p.delivery.unacked), min(p.cfg.Window, p.remoteWindow)
	return used < limit-1 || used == limit-1 && (limit == 1 || p.expected != p.sentAck)
}

// transmitNew sends a packet under the next psn.
func (p *Peer) transmitNew(x packet, onAck func()) {
	if p.cfg.lite() {
		x.ackID, p.pending, p.ackAt = p.target.next-1, 0, time.Time{}
		p.writeOut(x.bytes()[16:])
		if onAck != nil {
			onAck()
		}
		return
	}
	x.psn, x.dcid = p.delivery.next, p.cfg.RemoteCID
	f := &flight{packet: x, onAck: onAck}
	p.flying[p.delivery.next] = f
	p.delivery.next++
	p.transmit(f)
}

func (p *Peer) transmit(f *flight) {
	f.at = time.Now()
	f.tries++
	x := f.packet
	x.rwin, x.ack, x.ackID = uint16(p.cfg.Window-1), p.expected-1, p.target.next-1
	for i := uint32(1); i < 32; i++ {
		if p.got[p.expected+i] {
			x.bitmap |= 1 << i
		}
	}
	p.sentAck, p.pending, p.ackAt = p.expected, 0, time.Time{}
	p.writeOut(x.bytes())
}

// arrived handles a datagram.
func (p *Peer) arrived(b []byte) {
	if p.cfg.lite() {
		p.arrivedLite(b)
		return
	}
	x, ok := parse(b)
	if !ok {
		p.violation(&x, "%d bytes", len(b))
		return
	}
	if x.dcid != p.cfg.CID {
		p.violation(&x, "dcid %d", x.dcid)
		return
	}
	if !p.acknowledge(&x) {
		return
	}
	p.initiator.acknowledge(p, &x)
	switch d := int32(x.psn - p.expected); {
	case d >= int32(p.cfg.Window):
		p.violation(&x, "the receive window is %d to %d", p.expected, p.expected+uint32(p.cfg.Window)-1)
		return
	case d < 0 || p.got[x.psn]:
		p.pending++
		p.ackAt = time.Now() // the remote end lacks the acknowledgement
		return
	}
	p.got[x.psn] = true
	p.pending++
	if p.ackAt.IsZero() {
		p.ackAt = time.Now().Add(ackDelay)
	}
	if !p.cfg.Ordered {
		p.transaction(&x)
	} else {
		p.early[x.psn] = x
	}
	for p.got[p.expected] {
		if y, ok := p.early[p.expected]; ok {
			delete(p.early, p.expected)
			p.transaction(&y)
		}
		delete(p.got, p.expected)
		p.expected++
	}
}

// arrivedLite handles a packet of SUPERp-lite.
func (p *Peer) arrivedLite(b []byte) {
	x, ok := parse(append(make([]byte, 16), b...))
	if !ok {
		p.violation(&x, "%d bytes", len(b))
		return
	}
	p.initiator.acknowledge(p, &x)
	if x.opcode != noOp {
		p.pending++
		if p.ackAt.IsZero() {
			p.ackAt = time.Now().Add(ackDelay)
		}
	}
	if _, blocks, ok := x.operations(); ok && carriesData(x.opcode) && len(blocks[0]) < leastBlock {
		p.violation(&x, "blocks of %d bytes", len(blocks[0]))
		return
	}
	p.transaction(&x)
}

// acknowledge handles the acknowledgements of a packet. It returns false if the packet must be dropped.
func (p *Peer) acknowledge(x *packet) bool {
	nack := x.bitmap&1 != 0
	if int32(x.ack-p.delivery.next) >= 0 {
		p.violation(x, "ack_psn %d was never sent", x.ack)
		return false
	}
	if int32(x.ack+1-p.delivery.unacked) < 0 {
		return true // old
	}
	p.remoteWindow = int(x.rwin) + 1
	first := x.ack + 1
	if nack {
		first = x.ack
	} else {
		for ; int32(p.delivery.unacked-first) < 0; p.delivery.unacked++ {
			p.ackedOne(p.delivery.unacked)
			delete(p.flying, p.delivery.unacked)
		}
	}
	highest := p.delivery.unacked
	for i := range uint32(32) {
		if x.bitmap>>i&1 == 0 {
			continue
		}
		psn := first + i
		if int32(psn-p.delivery.next) >= 0 {
			p.violation(x, "bit %d acknowledges psn %d, which was never sent", i, psn)
			return false
		}
		p.ackedOne(psn)
		highest = psn
	}
	for f := p.flying[p.delivery.unacked]; f != nil && f.acked; f = p.flying[p.delivery.unacked] {
		delete(p.flying, p.delivery.unacked)
		p.delivery.unacked++
	}
	for psn := p.delivery.unacked; int32(psn-highest) < 0; psn++ { // fast retransmission of holes, once
		if f := p.flying[psn]; f != nil && !f.acked && !f.resent && time.Since(f.at) > ackDelay {
			f.resent = true
			p.transmit(f)
		}
	}
	return true
}

func (p *Peer) ackedOne(psn uint32) {
	f := p.flying[psn]
	if f == nil || f.acked {
		return
	}
	f.acked = true
	if f.onAck != nil {
		f.onAck()
	}
}

// timers retransmits the oldest packet, and sends delayed acknowledgements.
func (p *Peer) timers(now time.Time) {
	if f := p.flying[p.delivery.unacked]; f != nil && now.Sub(f.at) >= timeout {
		for psn := p.delivery.unacked; psn != p.delivery.next && psn != p.delivery.unacked+8; psn++ {
			if f := p.flying[psn]; !f.acked {
				f.resent = false
				p.transmit(f)
			}
		}
	}
}

// pump sends what the windows allow: replies, requests, and acknowledgements that no other packet has carried.
func (p *Peer) pump() {
	for p.mayReserve() {
		if !p.reply() && !p.initiator.advance(p) {
			break
		}
	}
	if due := !p.ackAt.IsZero() && !time.Now().Before(p.ackAt); (due || p.pending >= 8) && p.pending > 0 && p.mayReserve() {
		// A pure acknowledgement is a No-op, which is a transaction. Without an XID it has to wait.
		if xid, ok := p.newXID(); ok {
			p.initiator.open[xid] = &transaction{opcode: noOp, sent: 1, packets: make([]packet, 1)}
			p.transmitNew(packet{opcode: noOp, xid: xid, eom: true}, nil)
		}
	}
}
