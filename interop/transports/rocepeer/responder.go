package rocepeer

import (
	"encoding/binary"
	"fmt"
)

// Syndromes of the AETH (table 45): an ACK without end-to-end credits, RNR NAK with timer code 1 (10 µs), and the NAK
// codes.
const (
	syndromeACK = 0x1f
	syndromeRNR = 0x21
	nakSequence = 0x60
	nakInvalid  = 0x61
	nakAccess   = 0x62
)

// responder is the state of the receiving half. Peer.mu guards it.
type responder struct {
	expected uint32
	msn      uint32
	silent   bool // a NAK has been sent for expected: later requests are dropped without another one
	broken   bool

	data    []byte // of the SEND in progress
	room    int    // of its receive; -1 without one
	inSend  bool
	write   Packet // first packet of the WRITE in progress
	written int
	inWrite bool

	atomics map[uint32]uint64 // results by PSN
	reads   []Packet          // executed READs
}

func (p *Peer) respond(packet Packet) {
	packet.MSN = p.msn
	p.transmit(packet)
}

func (p *Peer) ack(syndrome byte, psn uint32) {
	p.respond(Packet{Op: Acknowledge, PSN: psn, Syndrome: syndrome})
}

// before reports whether PSN a precedes b, by less than half of the numbers.
func before(a, b uint32) bool { return a != b && (b-a)&0xffffff < 1<<23 }

// execute executes a request (Section 9.7.4). The caller holds mu.
func (p *Peer) execute(packet Packet) {
	switch {
	case p.broken:
		return
	case before(packet.PSN, p.expected):
		p.repeat(packet)
		return
	case packet.PSN != p.expected:
		if !p.silent {
			p.silent = true
			p.ack(nakSequence, p.expected)
		}
		return
	}
	p.silent = false
	switch packet.Op {
	case SendFirst, SendMiddle, SendLast, SendLastImm, SendOnly, SendOnlyImm:
		p.send(packet)
	case WriteFirst, WriteMiddle, WriteLast, WriteLastImm, WriteOnly, WriteOnlyImm:
		p.writes(packet)
	case ReadRequest:
		p.read(packet)
	default:
		p.atomic(packet)
	}
}

func (p *Peer) refuse(syndrome byte) {
	p.ack(syndrome, p.expected)
	p.broken = true
}

// done advances past an executed packet.
func (p *Peer) done(packet Packet, psns uint32, last bool) {
	p.expected = (p.expected + psns) & 0xffffff
	if last {
		p.msn++
	}
	if packet.AckReq {
		p.ack(syndromeACK, (p.expected-1)&0xffffff)
	}
}

// take consumes a receive; it answers RNR without one.
func (p *Peer) take() (room int, ok bool) {
	if len(p.receives) == 0 {
		p.notReady++
		p.silent = true
		p.ack(syndromeRNR, p.expected)
		return 0, false
	}
	room, p.receives = p.receives[0], p.receives[1:]
	return room, true
}

func (p *Peer) send(packet Packet) {
	first := packet.Op == SendFirst || packet.Op == SendOnly || packet.Op == SendOnlyImm
	last := packet.Op != SendFirst && packet.Op != SendMiddle
	if first == p.inSend || p.inWrite || !last && len(packet.Payload) != p.cfg.MTU {
		p.violations = append(p.violations, fmt.Errorf("SEND packet %d of %d bytes at PSN %#x out of place", packet.Op, len(packet.Payload), packet.PSN))
		p.refuse(nakInvalid)
		return
	}
	if first {
		room, ok := p.take()
		if !ok {
			return
		}
		p.room, p.data = room, []byte{}
	}
	p.data = append(p.data, packet.Payload...)
	if len(p.data) > p.room {
		p.refuse(nakInvalid)
		return
	}
	p.inSend = !last
	if last {
		p.messages = append(p.messages, Message{Data: p.data, Bytes: len(p.data), Imm: packet.Imm, HasImm: packet.Op == SendLastImm || packet.Op == SendOnlyImm})
	}
	p.done(packet, 1, last)
}

// memory returns the bytes of a region, or nil.
func (p *Peer) memory(key uint32, address uint64, n uint32, allowed func(*Region) bool) []byte {
	r := p.regions[key]
	if r == nil || !allowed(r) || address < r.Address || address+uint64(n) > r.Address+uint64(len(r.Bytes)) || address+uint64(n) < address {
		return nil
	}
	return r.Bytes[address-r.Address:][:n]
}

func (p *Peer) writes(packet Packet) {
	first := packet.Op == WriteFirst || packet.Op == WriteOnly || packet.Op == WriteOnlyImm
	last := packet.Op != WriteFirst && packet.Op != WriteMiddle
	imm := packet.Op == WriteLastImm || packet.Op == WriteOnlyImm
	if first == p.inWrite || p.inSend || !last && len(packet.Payload) != p.cfg.MTU {
		p.violations = append(p.violations, fmt.Errorf("WRITE packet %d of %d bytes at PSN %#x out of place", packet.Op, len(packet.Payload), packet.PSN))
		p.refuse(nakInvalid)
		return
	}
	start := packet
	written := 0
	if !first {
		start, written = p.write, p.written
	}
	var to []byte
	if start.Length > 0 { // C9-88: the key of a message without bytes is not checked
		to = p.memory(start.Key, start.Address, start.Length, func(r *Region) bool { return r.Write })
		if to == nil {
			p.refuse(nakAccess)
			return
		}
	}
	if end := written + len(packet.Payload); end > len(to) || last != (end == len(to)) {
		p.violations = append(p.violations, fmt.Errorf("WRITE of %d bytes has %d", len(to), end))
		p.refuse(nakInvalid)
		return
	}
	if imm {
		if _, ok := p.take(); !ok {
			return
		}
	}
	p.written = written + copy(to[written:], packet.Payload)
	p.write, p.inWrite = start, !last
	if imm {
		p.messages = append(p.messages, Message{Bytes: len(to), Write: true, Imm: packet.Imm, HasImm: true})
	}
	p.done(packet, 1, last)
}

// original returns the executed READ whose PSNs contain a PSN, or nil.
func (p *Peer) original(psn uint32) *Packet {
	for i := len(p.reads) - 1; i >= 0; i-- {
		if r := &p.reads[i]; psn == r.PSN || before(r.PSN, psn) && int((psn-r.PSN)&0xffffff)*p.cfg.MTU < int(r.Length) {
			return r
		}
	}
	return nil
}

// repeats checks a duplicate of a READ: it must be a subset of one READ, whose response packets would be those of that
// READ (Section 9.4.4).
func (p *Peer) repeats(packet Packet) error {
	r := p.original(packet.PSN)
	if r == nil {
		return fmt.Errorf("READ at PSN %#x, which is that of another request", packet.PSN)
	}
	offset := uint32(int((packet.PSN-r.PSN)&0xffffff) * p.cfg.MTU)
	end := offset + packet.Length
	if packet.Key != r.Key || packet.Address != r.Address+uint64(offset) || end > r.Length || end < r.Length && packet.Length%uint32(p.cfg.MTU) != 0 {
		return fmt.Errorf("READ of %d bytes at PSN %#x and address %#x repeats one of %d bytes at PSN %#x and address %#x", packet.Length, packet.PSN, packet.Address,
			r.Length, r.PSN, r.Address)
	}
	return nil
}

// read answers a READ: also a duplicate, whose PSNs have been used.
func (p *Peer) read(packet Packet) {
	if packet.PSN == p.expected {
		p.reads = append(p.reads, packet)
	} else if err := p.repeats(packet); err != nil {
		p.violations = append(p.violations, err)
		return
	}
	var from []byte
	if packet.Length > 0 {
		if from = p.memory(packet.Key, packet.Address, packet.Length, func(r *Region) bool { return r.Read }); from == nil {
			p.refuse(nakAccess)
			return
		}
	}
	count := max(1, (len(from)+p.cfg.MTU-1)/p.cfg.MTU)
	if packet.PSN == p.expected {
		p.expected = (p.expected + uint32(count)) & 0xffffff
		p.msn++
	}
	for i := range count {
		n := min(len(from), p.cfg.MTU)
		op := byte(ReadMiddle)
		switch {
		case count == 1:
			op = ReadOnly
		case i == 0:
			op = ReadFirst
		case i == count-1:
			op = ReadLast
		}
		p.respond(Packet{Op: op, PSN: (packet.PSN + uint32(i)) & 0xffffff, Syndrome: syndromeACK, Payload: from[:n]})
		from = from[n:]
	}
}

func (p *Peer) atomic(packet Packet) {
	word := p.memory(packet.Key, packet.Address, 8, func(r *Region) bool { return r.Atomically })
	if word == nil {
		p.refuse(nakAccess)
		return
	}
	was := binary.NativeEndian.Uint64(word)
	switch {
	case packet.Op == FetchAdd:
		binary.NativeEndian.PutUint64(word, was+packet.Swap)
	case was == packet.Compare:
		binary.NativeEndian.PutUint64(word, packet.Swap)
	}
	if p.atomics == nil {
		p.atomics = map[uint32]uint64{}
	}
	p.atomics[packet.PSN] = was
	p.expected = (p.expected + 1) & 0xffffff
	p.msn++
	p.respond(Packet{Op: AtomicAcknowledge, PSN: packet.PSN, Syndrome: syndromeACK, Original: was})
}

// repeat answers a duplicate.
func (p *Peer) repeat(packet Packet) {
	switch packet.Op {
	case ReadRequest:
		p.read(packet)
	case CompareSwap, FetchAdd:
		if was, ok := p.atomics[packet.PSN]; ok {
			p.respond(Packet{Op: AtomicAcknowledge, PSN: packet.PSN, Syndrome: syndromeACK, Original: was})
		}
	default:
		p.ack(syndromeACK, (p.expected-1)&0xffffff)
	}
}
