package superppeer

import (
	"encoding/binary"
	"time"
)

// target is the state of the remote end's transactions.
type target struct {
	next       uint16 // lowest XID that is not retired
	state      map[uint16]*incoming
	replies    []reply
	remoteLast bool
}

// incoming is a transaction of the remote end.
type incoming struct {
	opcode  byte
	seqnos  map[uint16]bool
	total   int
	retired bool
	pending int    // replies that have not been sent
	seqno   uint16 // of the next reply
	parts   map[uint32][]byte
	refused bool
}

// reply is a packet of a reply.
type reply struct {
	xid    uint16
	packet packet
}

// transaction handles a packet that the packet delivery layer has delivered.
func (p *Peer) transaction(x *packet) {
	if x.opcode == transError || x.opcode == readResponse {
		p.initiator.answer(p, x)
		return
	}
	t := &p.target
	if int(x.xid-t.next) >= p.cfg.Transactions {
		p.violation(x, "the XID is not in the window, which starts at %d", t.next)
		return
	}
	s := t.state[x.xid]
	if s == nil {
		s = &incoming{opcode: x.opcode, seqnos: map[uint16]bool{}, parts: map[uint32][]byte{}}
		t.state[x.xid] = s
	}
	switch {
	case s.retired:
		p.violation(x, "the transaction is complete")
		return
	case s.opcode != x.opcode:
		p.violation(x, "the transaction has opcode %d", s.opcode)
		return
	case s.seqnos[x.seqno]:
		p.violation(x, "the seqno is repeated")
		return
	case x.eom && s.total > 0:
		p.violation(x, "a second eom")
		return
	}
	s.seqnos[x.seqno] = true
	if x.eom {
		s.total = int(x.seqno) + 1
	}
	if ops, blocks, ok := x.operations(); ok {
		for i := range ops {
			p.execute(s, x, i, ops[i], blocks[i])
		}
	} else {
		if _, known := headerLen[x.opcode]; known {
			p.violation(x, "malformed")
		}
		for i := range max(1, x.ops) {
			p.refuse(s, x, i, 2)
		}
	}
	if s.total > 0 && len(s.seqnos) == s.total {
		if s.opcode == send && !s.refused {
			var m []byte
			for len(s.parts) > 0 {
				part, ok := s.parts[uint32(len(m))]
				if !ok {
					p.violation(x, "the message has a gap at %d", len(m))
					break
				}
				delete(s.parts, uint32(len(m)))
				m = append(m, part...)
			}
			p.messages = append(p.messages, m)
		}
		if s.opcode == lastNull {
			p.remoteLast = true
		}
	}
	p.retire(s)
}

func (p *Peer) execute(s *incoming, x *packet, i int, op, block []byte) {
	le := binary.LittleEndian
	switch x.opcode {
	case write:
		if to := p.find(le.Uint64(op), len(block), true); to != nil {
			copy(to, block)
		} else {
			p.refuse(s, x, i, 1)
		}
	case read:
		address, n := le.Uint64(op), int(le.Uint32(op[8:]))
		if p.find(address, n, false) == nil {
			p.refuse(s, x, i, 1)
			return
		}
		at := 0
		for _, size := range p.pieces(n) {
			body := append(le.AppendUint16(nil, x.seqno), byte(i), 0)
			body = le.AppendUint32(body, uint32(at))
			body = append(body, p.find(address+uint64(at), size, false)...)
			for p.cfg.lite() && len(body) < 8+leastBlock {
				body = append(body, 0)
			}
			p.queueReply(s, x.xid, packet{opcode: readResponse, ops: 1, body: body})
			at += size
		}
	case send:
		if le.Uint32(op) != p.cfg.Key {
			p.violation(x, "key %#x", le.Uint32(op))
			s.refused = true
			p.refuse(s, x, i, 2)
			return
		}
		s.parts[le.Uint32(op[4:])] = append([]byte(nil), block...)
	case sendQP:
		if qp := uint32(op[0]) | uint32(op[1])<<8 | uint32(op[2])<<16; qp != uint32(p.cfg.CID) {
			p.violation(x, "queue pair %d", qp)
			p.refuse(s, x, i, 2)
			return
		}
		p.messages = append(p.messages, append([]byte(nil), block...))
	}
}

// find returns n bytes of a region that grants the right, or nil.
func (p *Peer) find(address uint64, n int, writes bool) []byte {
	for _, r := range p.regions {
		offset := address - r.Address
		if offset <= uint64(len(r.Bytes)) && uint64(n) <= uint64(len(r.Bytes))-offset && (writes && r.Write || !writes && r.Read) {
			return r.Bytes[offset : offset+uint64(n) : offset+uint64(n)]
		}
	}
	return nil
}

func (p *Peer) refuse(s *incoming, x *packet, i int, major uint16) {
	le := binary.LittleEndian
	body := append(le.AppendUint16(nil, x.seqno), byte(i), 0)
	p.queueReply(s, x.xid, packet{opcode: transError, ops: 1, body: le.AppendUint16(le.AppendUint16(body, major), 0)})
}

func (p *Peer) queueReply(s *incoming, xid uint16, x packet) {
	x.xid, x.seqno = xid, s.seqno
	s.seqno++
	s.pending++
	p.replies = append(p.replies, reply{xid, x})
}

// reply sends the next packet of replies. It reports whether there was one.
func (p *Peer) reply() bool {
	if len(p.replies) == 0 {
		return false
	}
	r := p.replies[0]
	p.replies = p.replies[1:]
	s := p.target.state[r.xid]
	s.pending--
	r.packet.eom = s.pending == 0 && s.total > 0 && len(s.seqnos) == s.total
	// A transaction with an error is retired when the error has arrived: an ack_xid that overtakes it would mean
	// success.
	if r.packet.opcode == transError {
		s.pending++
		p.transmitNew(r.packet, func() {
			s.pending--
			p.retire(s)
		})
		return true
	}
	p.transmitNew(r.packet, nil)
	p.retire(s)
	return true
}

// retire retires a transaction that is complete and answered, and moves the window.
func (p *Peer) retire(s *incoming) {
	if s.total == 0 || len(s.seqnos) < s.total || s.pending > 0 {
		return
	}
	s.retired = true
	for t := &p.target; t.state[t.next] != nil && t.state[t.next].retired; t.next++ {
		delete(t.state, t.next)
		if p.cfg.lite() && s.opcode != noOp && p.ackAt.IsZero() { // no packet that arrives later causes an acknowledgement
			p.pending, p.ackAt = p.pending+1, time.Now().Add(ackDelay)
		}
	}
}
