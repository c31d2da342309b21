package superp

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// Lengths of headers, in bytes.
const (
	pdlLen  = 16
	talLen  = 8
	sunhLen = 8
)

// echo is the bit in TAL.Reserved by which an end reports that a packet has arrived with "congestion experienced" since
// its previous packet. The description has no field for it. Ends send it if the connection data of both says so.
const echo = 1

// MaxOps is the maximum number of operations in a packet: num_ops has 4 bits.
const MaxOps = 15

// ErrMalformed is wrapped by Decode's errors: no conforming SUPERp peer sends the packet.
var ErrMalformed = errors.New("malformed SUPERp packet")

// PDL is the packet delivery layer's header. All its fields are little endian.
type PDL struct {
	DCID   uint16 // the receiver's connection identifier
	RWin   uint16 // receive window minus one, in packets, starting at the sender's next expected psn
	PSN    uint32
	AckPSN uint32 // next expected psn minus one; with bit 0 of SACK: a received psn before which none was received
	SACK   uint32 // bit i: next expected psn (NACK: AckPSN) plus i was received; bit 0: NACK
}

// NACK reports whether the header is a NACK: all psns between the previous cumulative acknowledgement and AckPSN are
// missing.
func (h *PDL) NACK() bool { return h.SACK&1 != 0 }

func (h *PDL) append(b []byte) []byte {
	le := binary.LittleEndian
	b = le.AppendUint16(b, h.DCID)
	b = le.AppendUint16(b, h.RWin)
	b = le.AppendUint32(b, h.PSN)
	b = le.AppendUint32(b, h.AckPSN)
	return le.AppendUint32(b, h.SACK)
}

func decodePDL(b []byte) PDL {
	le := binary.LittleEndian
	return PDL{DCID: le.Uint16(b), RWin: le.Uint16(b[2:]), PSN: le.Uint32(b[4:]), AckPSN: le.Uint32(b[8:]), SACK: le.Uint32(b[12:])}
}

// TAL is the transaction layer's header, in the field order of XDP2's structure (seqno before xid). Little endian.
type TAL struct {
	NumOps   uint8 // 0-15
	Reserved uint8 // bits 4-6 of the first byte: echo, else 0; ignored on receipt without agreement on echo
	EOM      bool  // last packet of the transaction in this direction
	Opcode   Opcode
	Seqno    uint16 // of the packet in the transaction, from 0
	XID      uint16 // number of the transaction, assigned by its initiator
	AckXID   uint16 // this transaction of the receiver, and all before, are complete
}

func (h *TAL) append(b []byte) []byte {
	le := binary.LittleEndian
	first := h.NumOps&0xf | h.Reserved&7<<4
	if h.EOM {
		first |= 0x80
	}
	b = append(b, first, byte(h.Opcode))
	b = le.AppendUint16(b, h.Seqno)
	b = le.AppendUint16(b, h.XID)
	return le.AppendUint16(b, h.AckXID)
}

func decodeTAL(b []byte) TAL {
	le := binary.LittleEndian
	return TAL{NumOps: b[0] & 0xf, Reserved: b[0] >> 4 & 7, EOM: b[0]&0x80 != 0, Opcode: Opcode(b[1]),
		Seqno: le.Uint16(b[2:]), XID: le.Uint16(b[4:]), AckXID: le.Uint16(b[6:])}
}

// Packet is a decoded packet: its headers, and views of its operations and data. The views are valid as long as the
// decoded buffer.
type Packet struct {
	PDL  PDL
	TAL  TAL
	ops  []byte // NumOps operation headers of equal length; empty if the opcode is unknown
	data []byte // NumOps blocks of equal length; for an unknown opcode, everything after the TAL header
	// padded: data may end with the padding of an Ethernet frame.
	padded bool
}

// Decode decodes a UDP payload. Packets of unknown opcodes decode without error (Opcode.Known), since only the
// connection can answer them.
func Decode(b []byte) (Packet, error) { return decode(b, false) }

// decode is Decode. Packets of SUPERp-lite have no PDL.
func decode(b []byte, lite bool) (Packet, error) {
	from := pdlLen
	if lite {
		from = 0
	}
	if len(b) < from+talLen {
		return Packet{}, fmt.Errorf("%w: %d bytes", ErrMalformed, len(b))
	}
	p := Packet{TAL: decodeTAL(b[from:])}
	if !lite {
		p.PDL = decodePDL(b)
	}
	rest := b[from+talLen:]
	form, known := p.TAL.Opcode.form()
	if !known {
		p.data = rest
		return p, nil
	}
	n := int(p.TAL.NumOps)
	if form.none != (n == 0) {
		return Packet{}, fmt.Errorf("%w: %v with %d operations", ErrMalformed, p.TAL.Opcode, n)
	}
	if len(rest) < n*form.header {
		return Packet{}, fmt.Errorf("%w: %v: %d bytes for %d operations of %d", ErrMalformed, p.TAL.Opcode, len(rest), n, form.header)
	}
	ops, data := rest[:n*form.header], rest[n*form.header:]
	switch {
	case len(data) == 0:
	case !form.data:
		return Packet{}, fmt.Errorf("%w: %v with %d bytes of data", ErrMalformed, p.TAL.Opcode, len(data))
	case len(data)%n != 0:
		return Packet{}, fmt.Errorf("%w: %v: %d bytes of data for %d operations", ErrMalformed, p.TAL.Opcode, len(data), n)
	}
	p.ops, p.data = ops, data
	return p, nil
}

// Block returns the data of operation i.
func (p *Packet) Block(i int) []byte {
	size := len(p.data) / int(p.TAL.NumOps)
	return p.data[i*size : (i+1)*size]
}

func (p *Packet) header(i int) []byte {
	size := len(p.ops) / int(p.TAL.NumOps)
	return p.ops[i*size : (i+1)*size]
}

// Append appends the packet in wire format, encoded from its decoded fields.
func (p *Packet) Append(b []byte) []byte {
	b = p.PDL.append(b)
	b = p.TAL.append(b)
	if _, known := p.TAL.Opcode.form(); known {
		for i := range int(p.TAL.NumOps) {
			switch p.TAL.Opcode {
			case OpcodeError:
				o := p.Error(i)
				b = o.append(b)
			case OpcodeRead:
				o := p.Read(i)
				b = o.append(b)
			case OpcodeWrite:
				o := p.Write(i)
				b = o.append(b)
			case OpcodeReadResponse:
				o := p.ReadResponse(i)
				b = o.append(b)
			case OpcodeSend:
				o := p.Send(i)
				b = o.append(b)
			case OpcodeSendQP:
				o := p.SendQP(i)
				b = o.append(b)
			case OpcodeCompareSwap, OpcodeFetchAdd:
				o := p.Atomic(i)
				b = o.append(b, p.TAL.Opcode == OpcodeCompareSwap)
			case OpcodeAtomicResponse:
				o := p.AtomicResponse(i)
				b = o.append(b)
			}
		}
	}
	return append(b, p.data...)
}

// short reports whether the blocks of a packet of SUPERp-lite are shorter than a sender may make them.
func (p *Packet) short(lite bool) bool {
	form, known := p.TAL.Opcode.form()
	return lite && known && form.data && len(p.Block(0)) < minBlock
}
