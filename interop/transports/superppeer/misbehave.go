package superppeer

import (
	"encoding/binary"
	"fmt"
)

// Misbehaviors are the protocol errors of Misbehave, by the name of what is wrong.
var Misbehaviors = []string{"psn", "ack_psn", "ack_xid", "xid", "seqno", "eom", "opcode", "reply_xid"}

// Misbehave sends packets of which one is a protocol error by the description, and completes the transaction that it
// uses. A WRITE has its bytes, 8 zeros, at address. The packet in error would write ones.
func (p *Peer) Misbehave(kind string, address uint64) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	request := func(opcode byte, xid, seqno uint16, eom bool, wrong bool) packet {
		body := binary.LittleEndian.AppendUint64(nil, address)
		for range 8 {
			b := byte(0)
			if wrong {
				b = 1
			}
			body = append(body, b)
		}
		return packet{opcode: opcode, xid: xid, seqno: seqno, eom: eom, ops: 1, body: body}
	}
	// direct sends a packet that is not kept for retransmission.
	direct := func(x packet) {
		x.dcid, x.rwin, x.ackID = p.cfg.RemoteCID, uint16(p.cfg.Window-1), p.target.next-1
		p.link.send(x.bytes())
	}
	var packets []packet
	xid := p.initiator.next
	switch kind {
	case "psn":
		x := request(write, xid, 0, true, true)
		x.psn, x.ack = p.delivery.next+2000, p.expected-1
		direct(x)
		return nil
	case "ack_psn":
		x := request(write, xid, 0, true, true)
		x.psn, x.ack = p.delivery.next, p.expected+2000
		direct(x)
		return nil
	case "ack_xid":
		x := packet{opcode: noOp, eom: true, psn: p.delivery.next - 1, ack: p.expected - 1, xid: xid - 1, dcid: p.cfg.RemoteCID, rwin: uint16(p.cfg.Window - 1), ackID: p.target.next + 100}
		p.link.send(x.bytes()) // a duplicate, whose acknowledgements count
		return nil
	case "xid":
		p.transmitNew(request(write, xid+3000, 0, true, true), nil)
		return nil
	case "reply_xid":
		p.transmitNew(packet{opcode: transError, xid: p.target.next + 500, eom: true, ops: 1, body: make([]byte, 8)}, nil)
		return nil
	case "seqno":
		packets = []packet{request(write, xid, 0, false, false), request(write, xid, 0, false, true), request(write, xid, 1, true, false)}
	case "eom":
		packets = []packet{request(write, xid, 1, true, false), request(write, xid, 0, true, true), request(write, xid, 0, false, false)}
	case "opcode":
		packets = []packet{request(write, xid, 0, false, false), request(send, xid, 1, true, true), request(write, xid, 1, true, false)}
	default:
		return fmt.Errorf("no misbehavior %q", kind)
	}
	if _, ok := p.newXID(); !ok {
		return fmt.Errorf("the window of transactions is full")
	}
	t := &transaction{opcode: write, xid: xid, packets: packets, sent: len(packets)}
	p.initiator.open[xid] = t
	for _, x := range packets {
		p.transmitNew(x, nil)
	}
	for !t.acked {
		if p.closed {
			return fmt.Errorf("closed")
		}
		p.changed.Wait()
	}
	return nil
}
