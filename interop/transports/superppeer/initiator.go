package superppeer

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// initiator is the state of the own transactions.
type initiator struct {
	next, unacked uint16
	open          map[uint16]*transaction
	queue         []*transaction // not begun
	current       *transaction   // partly sent
	lastSent      bool
}

// transaction is an own transaction.
type transaction struct {
	xid     uint16
	opcode  byte
	packets []packet
	sent    int
	acked   bool // by ack_xid
	into    []byte
	have    int // bytes read
	seqnos  map[uint16]bool
	total   int // packets of the reply; 0: not known
	err     error
}

// Error is a Transaction error.
type Error struct{ Major, Minor uint16 }

func (e *Error) Error() string { return fmt.Sprintf("transaction error %d.%d", e.Major, e.Minor) }

// answered reports whether all packets of the reply have arrived, if the transaction has one.
func (t *transaction) answered() bool {
	return t.opcode != read && len(t.seqnos) == 0 || t.total > 0 && len(t.seqnos) == t.total
}

// newXID assigns the next XID, if the window has room.
func (p *Peer) newXID() (uint16, bool) {
	ini := &p.initiator
	if int(ini.next-ini.unacked) >= p.cfg.Transactions {
		return 0, false
	}
	ini.next++
	return ini.next - 1, true
}

// advance sends the next packet of a request. It reports whether one was sent.
func (ini *initiator) advance(p *Peer) bool {
	if ini.current == nil {
		if len(ini.queue) == 0 {
			return false
		}
		xid, ok := p.newXID()
		if !ok {
			return false
		}
		ini.current = ini.queue[0]
		ini.queue = ini.queue[1:]
		ini.current.xid = xid
		ini.open[xid] = ini.current
	}
	t := ini.current
	x := t.packets[t.sent]
	x.opcode, x.xid, x.seqno, x.eom = t.opcode, t.xid, uint16(t.sent), t.sent == len(t.packets)-1
	if t.sent++; x.eom {
		ini.current = nil
	}
	p.transmitNew(x, nil)
	return true
}

// acknowledge handles ack_xid.
func (ini *initiator) acknowledge(p *Peer, x *packet) {
	n := int16(x.ackID + 1 - ini.unacked)
	if int16(x.ackID-ini.next) >= 0 {
		p.violation(x, "ack_xid %d was never sent", x.ackID)
		return
	}
	for ; n > 0; n-- {
		if t := ini.open[ini.unacked]; t != nil {
			if t.sent < len(t.packets) {
				p.violation(x, "ack_xid %d before all packets were sent", x.ackID)
			}
			t.acked = true
			if t.answered() {
				delete(ini.open, ini.unacked)
			}
		}
		ini.unacked++
	}
}

// answer handles a reply.
func (ini *initiator) answer(p *Peer, x *packet) {
	t := ini.open[x.xid]
	switch {
	case t == nil:
		p.violation(x, "a reply to no transaction")
		return
	case t.sent < len(t.packets):
		p.violation(x, "a reply before the request was sent")
		return
	case t.seqnos[x.seqno]:
		p.violation(x, "the seqno of the reply is repeated")
		return
	case x.eom && t.total > 0:
		p.violation(x, "a second eom")
		return
	}
	if t.seqnos == nil {
		t.seqnos = map[uint16]bool{}
	}
	t.seqnos[x.seqno] = true
	if x.eom {
		t.total = int(x.seqno) + 1
	}
	if t.total > 0 && len(t.seqnos) > t.total {
		p.violation(x, "the reply has more packets than its eom")
	}
	ops, blocks, ok := x.operations()
	if !ok {
		p.violation(x, "malformed")
		return
	}
	le := binary.LittleEndian
	for i, o := range ops {
		if seqno, op := le.Uint16(o), int(o[2]); int(seqno) >= len(t.packets) || op >= t.packets[seqno].ops {
			p.violation(x, "a reply to operation %d:%d", seqno, op)
			continue
		}
		if x.opcode == transError {
			t.err = &Error{le.Uint16(o[4:]), le.Uint16(o[6:])}
			continue
		}
		offset := le.Uint32(o[4:])
		// A read of a few bytes is answered in a frame that Ethernet has padded.
		if short := shortest - ethernet - sunhBytes - p.cfg.tal() - 8; p.cfg.SUNH != nil && len(x.body) == short && len(t.into) < len(blocks[i]) && offset == 0 {
			blocks[i] = blocks[i][:len(t.into)]
		}
		if t.opcode != read || uint64(offset)+uint64(len(blocks[i])) > uint64(len(t.into)) {
			p.violation(x, "%d bytes at offset %d are not part of the read", len(blocks[i]), offset)
			continue
		}
		t.have += copy(t.into[offset:], blocks[i])
	}
	if t.answered() && t.err == nil && t.have != len(t.into) {
		p.violation(x, "%d bytes of %d were read", t.have, len(t.into))
	}
	if t.acked && t.answered() {
		delete(ini.open, x.xid)
	}
}

// do queues a transaction and waits until it is complete: acknowledged by ack_xid, and its reply complete.
func (p *Peer) do(t *transaction) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.lastSent && t.opcode != lastNull {
		return errors.New("shut down")
	}
	p.initiator.queue = append(p.initiator.queue, t)
	p.pump()
	for !t.acked || !t.answered() {
		if p.closed {
			return errors.New("closed")
		}
		p.changed.Wait()
	}
	return t.err
}

// Write writes to the remote end's memory.
func (p *Peer) Write(address uint64, data []byte) error {
	if p.cfg.SUNH != nil && len(data) < p.leastData() {
		// Twice, because a frame with one of them would be padded, and the padding written.
		return p.WriteMany([]uint64{address, address}, [][]byte{data, data})
	}
	t, at := &transaction{opcode: write}, 0
	for _, n := range p.pieces(len(data)) {
		t.packets = append(t.packets, packet{ops: 1, body: append(binary.LittleEndian.AppendUint64(nil, address+uint64(at)), data[at:at+n]...)})
		at += n
	}
	return p.do(t)
}

// WriteMany writes blocks of equal size in one packet.
func (p *Peer) WriteMany(addresses []uint64, blocks [][]byte) error {
	x := packet{ops: len(addresses)}
	for _, a := range addresses {
		x.body = binary.LittleEndian.AppendUint64(x.body, a)
	}
	for _, b := range blocks {
		x.body = append(x.body, b...)
	}
	return p.do(&transaction{opcode: write, packets: []packet{x}})
}

// Read reads n bytes of the remote end's memory.
func (p *Peer) Read(address uint64, n int) ([]byte, error) {
	le := binary.LittleEndian
	body := le.AppendUint32(le.AppendUint64(nil, address), uint32(n))
	t := &transaction{opcode: read, into: make([]byte, n), packets: []packet{{ops: 1, body: body}}}
	err := p.do(t)
	return t.into, err
}

// Send sends a message.
func (p *Peer) Send(data []byte) error {
	t, le, at := &transaction{opcode: send}, binary.LittleEndian, 0
	for _, n := range p.pieces(len(data)) {
		body := le.AppendUint32(le.AppendUint32(nil, p.cfg.RemoteKey), uint32(at))
		t.packets = append(t.packets, packet{ops: 1, body: append(body, data[at:at+n]...)})
		at += n
	}
	return p.do(t)
}

// SendQP sends a message of one packet to a queue pair.
func (p *Peer) SendQP(qp uint32, data []byte) error {
	body := []byte{byte(qp), byte(qp >> 8), byte(qp >> 16), 0}
	return p.do(&transaction{opcode: sendQP, packets: []packet{{ops: 1, body: append(body, data...)}}})
}

// NoOp sends a No-op and waits for its acknowledgement.
func (p *Peer) NoOp() error { return p.do(&transaction{opcode: noOp, packets: make([]packet, 1)}) }

// Shutdown sends Last NULL, and waits for its acknowledgement and for that of the remote end.
func (p *Peer) Shutdown() error {
	p.mu.Lock()
	p.lastSent = true
	p.mu.Unlock()
	if err := p.do(&transaction{opcode: lastNull, packets: make([]packet, 1)}); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for !p.remoteLast {
		if p.closed {
			return errors.New("closed")
		}
		p.changed.Wait()
	}
	return nil
}
