package rocepeer

import (
	"bytes"
	"errors"
	"fmt"
	"time"
)

// requester is the state of the sending half.
type requester struct {
	next uint32
	// Sequences counts the sequence NAKs that the remote end has sent.
	Sequences int
	// Skip, if not nil, drops packet number i of a transmission by returning true.
	Skip func(i int) bool
}

// NAK is a negative acknowledgement that ends the connection.
type NAK struct{ Syndrome byte }

func (n NAK) Error() string { return fmt.Sprintf("NAK, syndrome %#x", n.Syndrome) }

// ErrNoAnswer reports that the remote end does not answer.
var ErrNoAnswer = errors.New("no answer")

const (
	patience = 100 * time.Millisecond // until a retransmission
	attempts = 50
)

// Send sends a message; imm may be nil.
func (p *Peer) Send(data []byte, imm *uint32) error {
	return p.acknowledged(p.cut(data, imm, [6]byte{SendFirst, SendMiddle, SendLast, SendLastImm, SendOnly, SendOnlyImm}, 0, 0))
}

// SendRest sends a message without its first packet, as if it did not exist: an invalid request.
func (p *Peer) SendRest(data []byte) error {
	packets := p.cut(data, nil, [6]byte{SendFirst, SendMiddle, SendLast, SendLastImm, SendOnly, SendOnlyImm}, 0, 0)[1:]
	for i := range packets {
		packets[i].PSN = (packets[i].PSN - 1) & 0xffffff
	}
	return p.acknowledged(packets)
}

// Write writes to the remote end's memory; imm may be nil.
func (p *Peer) Write(data []byte, address uint64, key uint32, imm *uint32) error {
	return p.acknowledged(p.cut(data, imm, [6]byte{WriteFirst, WriteMiddle, WriteLast, WriteLastImm, WriteOnly, WriteOnlyImm}, address, key))
}

// cut returns the packets of a message, the opcodes in the order first, middle, last, last with immediate, only, only
// with immediate.
func (p *Peer) cut(data []byte, imm *uint32, ops [6]byte, address uint64, key uint32) (packets []Packet) {
	total := uint32(len(data))
	for i := 0; i == 0 || len(data) > 0; i++ {
		n := min(len(data), p.cfg.MTU)
		packet := Packet{PSN: (p.next + uint32(i)) & 0xffffff, Payload: data[:n]}
		data = data[n:]
		switch last := len(data) == 0; {
		case i == 0 && last:
			packet.Op = ops[4]
		case i == 0:
			packet.Op = ops[0]
		case last:
			packet.Op = ops[2]
		default:
			packet.Op = ops[1]
		}
		if i == 0 {
			packet.Address, packet.Key, packet.Length = address, key, total
		}
		if len(data) == 0 {
			packet.AckReq = true
			if imm != nil {
				packet.Op, packet.Imm = packet.Op+1, *imm
			}
		}
		packets = append(packets, packet)
	}
	return packets
}

// acknowledged sends packets until all are acknowledged.
func (p *Peer) acknowledged(packets []Packet) error {
	last := packets[len(packets)-1].PSN
	p.next = (last + 1) & 0xffffff
	for range attempts {
		for i, packet := range packets {
			if p.Skip != nil && p.Skip(i) {
				continue
			}
			p.SendRaw(packet)
		}
		deadline := time.Now().Add(patience)
	wait:
		for {
			a, ok := p.answer(time.Until(deadline))
			switch {
			case !ok:
				break wait
			case a.Op != Acknowledge || before(a.PSN, packets[0].PSN) || before(last, a.PSN):
				continue // of an earlier request
			}
			switch a.Syndrome >> 5 {
			case 0: // ACK
				if a.PSN == last {
					return nil
				}
				continue
			case 1: // RNR
				time.Sleep(2 * time.Millisecond)
			default:
				if a.Syndrome != nakSequence {
					return NAK{a.Syndrome}
				}
				p.Sequences++
			}
			for len(packets) > 0 && packets[0].PSN != a.PSN { // both NAKs acknowledge the packets before
				packets = packets[1:]
			}
			break wait
		}
	}
	return ErrNoAnswer
}

// Read reads n bytes of the remote end's memory.
func (p *Peer) Read(n int, address uint64, key uint32) ([]byte, error) {
	count := max(1, (n+p.cfg.MTU-1)/p.cfg.MTU)
	request := Packet{Op: ReadRequest, PSN: p.next, AckReq: true, Address: address, Key: key, Length: uint32(n)}
	p.next = (p.next + uint32(count)) & 0xffffff
	for range attempts {
		p.SendRaw(request)
		var out bytes.Buffer
		for i := 0; ; {
			a, ok := p.answer(patience)
			if !ok {
				break
			}
			if a.Op == Acknowledge && a.Syndrome>>5 == 3 && a.PSN == request.PSN {
				return nil, NAK{a.Syndrome}
			}
			if a.PSN != (request.PSN+uint32(i))&0xffffff || a.Op < ReadFirst || a.Op > ReadOnly {
				continue
			}
			want := byte(ReadMiddle)
			switch {
			case count == 1:
				want = ReadOnly
			case i == 0:
				want = ReadFirst
			case i == count-1:
				want = ReadLast
			}
			if a.Op != want {
				return nil, fmt.Errorf("response %d of %d has opcode %d, want %d", i, count, a.Op, want)
			}
			out.Write(a.Payload)
			if i++; i == count {
				if out.Len() != n {
					return nil, fmt.Errorf("%d bytes instead of %d", out.Len(), n)
				}
				return out.Bytes(), nil
			}
		}
	}
	return nil, ErrNoAnswer
}

// Add executes FetchAdd, and returns the previous value.
func (p *Peer) Add(address uint64, key uint32, add uint64) (uint64, error) {
	return p.atomically(Packet{Op: FetchAdd, Address: address, Key: key, Swap: add})
}

// Swap executes CmpSwap, and returns the previous value.
func (p *Peer) Swap(address uint64, key uint32, compare, swap uint64) (uint64, error) {
	return p.atomically(Packet{Op: CompareSwap, Address: address, Key: key, Compare: compare, Swap: swap})
}

func (p *Peer) atomically(request Packet) (uint64, error) {
	request.PSN, request.AckReq = p.next, true
	p.next = (p.next + 1) & 0xffffff
	for range attempts {
		p.SendRaw(request)
		for {
			a, ok := p.answer(patience)
			if !ok {
				break
			}
			switch {
			case a.PSN != request.PSN:
			case a.Op == AtomicAcknowledge:
				return a.Original, nil
			case a.Op == Acknowledge && a.Syndrome>>5 == 3:
				return 0, NAK{a.Syndrome}
			}
		}
	}
	return 0, ErrNoAnswer
}
