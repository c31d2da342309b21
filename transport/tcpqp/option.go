package tcpqp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
)

// The option, in network byte order; bits from the most significant down:
//
//	kind 253 (RFC 4727) | length 16, 20, 24 or 28 | ExID 0xfb54 (RFC 6994)
//	ver:2 timestamp_present:1 more_segments:1 rtr:1 rtr_ack:1 reserved:2 | opcode | msn
//	message byte offset:24 | segment number:8
//	icrc
//	timestamp | timestamp_echo                  only with timestamp_present
//	imm_data                                    only with an opcode with immediate data
//
// It is the proposal's tcp_bth. TCP has 40 bytes for options. Without the kernel's timestamps the option has at most 28
// and carries the timestamps itself; with them, which take 12 bytes, it has at most 20. Either leaves room for a SACK
// block in a segment without immediate data. With two blocks and without the kernel's timestamps, the option omits its
// timestamps.
const (
	optionKind    = 253
	optionExID    = 0xfb54
	optionVersion = 1 // 0 was an earlier layout with addresses
	optionLeast   = 16
	optionMost    = 28
	optionSpace   = 40 // for all options of a segment

	flagTimestamp = 0x20
	flagMore      = 0x10
	flagRTR       = 0x08
	flagRTRAck    = 0x04
)

// Option gives the place of a segment's data in its message. A segment carries it only if it has a whole piece of one
// message, so that the CRC is always present.
type Option struct {
	// Opcode is InfiniBand's opcode for reliable connections (IBTA 1.4, Table 38), with its FIRST, MIDDLE, LAST and
	// ONLY variants; messages specific to this package (OPEN and so on) have one opcode each, from 0xc0.
	Opcode uint8
	// MSN is the number of the message in the stream of its direction, from 0, modulo 2^16: the first OPEN of a
	// connection has number 0.
	MSN uint16
	// Offset is the position of the segment's first byte in the message, in bytes. A message starts with its frame's
	// header: the first WriteHeader bytes of a WRITE are not data.
	Offset uint32
	// Segment is the number of the segment in the message, modulo 256.
	Segment uint8
	// More is true except in the message's last segment.
	More bool
	// RTR (ready to receive) reports that the sender can place segments by the option, until an option with RTRAck has
	// arrived. RTRAck answers it, as long as the peer repeats it.
	RTR, RTRAck bool
	// ICRC is the CRC-32 (as in Ethernet and RoCE) of the segment's data.
	ICRC uint32
	// Timestamped: Timestamp and Echo are present, with the meaning of RFC 7323; milliseconds.
	Timestamped     bool
	Timestamp, Echo uint32
	// Immediate is the immediate data of the message, in its last segment: present exactly with an opcode with
	// immediate data.
	Immediate uint32
}

// HasImmediate reports whether the segment carries the immediate data of its message.
func (o Option) HasImmediate() bool { return hasImmediate(o.Opcode) }

func hasImmediate(opcode uint8) bool {
	switch opcode {
	case 0x03, 0x05, 0x09, 0x0b: // LAST and ONLY of SEND and WRITE with immediate data
		return true
	}
	return false
}

// length returns the length of the option in bytes.
func (o Option) length() int {
	n := optionLeast
	if o.Timestamped {
		n += 8
	}
	if o.HasImmediate() {
		n += 4
	}
	return n
}

// variants returns an opcode's variants for a first, middle, last and only segment.
func (o opcode) variants() [4]uint8 {
	switch o {
	case opSend:
		return [4]uint8{0x00, 0x01, 0x02, 0x04}
	case opSendImmediate:
		return [4]uint8{0x00, 0x01, 0x03, 0x05}
	case opWrite:
		return [4]uint8{0x06, 0x07, 0x08, 0x0a}
	case opReadAnswer:
		return [4]uint8{0x0d, 0x0e, 0x0f, 0x10}
	}
	return [4]uint8{uint8(o), uint8(o), uint8(o), uint8(o)}
}

var errOption = errors.New("tcpqp: not a framing option")

// Append appends the option in wire format.
func (o Option) Append(p []byte) []byte {
	flags := byte(optionVersion << 6)
	for bit, on := range [8]bool{2: o.RTRAck, 3: o.RTR, 4: o.More, 5: o.Timestamped} {
		if on {
			flags |= 1 << bit
		}
	}
	be := binary.BigEndian
	p = be.AppendUint16(append(p, optionKind, byte(o.length())), optionExID)
	p = be.AppendUint16(append(p, flags, o.Opcode), o.MSN)
	p = be.AppendUint32(p, o.Offset<<8|uint32(o.Segment))
	p = be.AppendUint32(p, o.ICRC)
	if o.Timestamped {
		p = be.AppendUint32(be.AppendUint32(p, o.Timestamp), o.Echo)
	}
	if o.HasImmediate() {
		p = be.AppendUint32(p, o.Immediate)
	}
	return p
}

// ParseOption parses an option at the start of p. It refuses an option of another version.
func ParseOption(p []byte) (Option, error) {
	if len(p) < 4 || p[0] != optionKind || binary.BigEndian.Uint16(p[2:]) != optionExID {
		return Option{}, errOption
	}
	if len(p) < optionLeast {
		return Option{}, fmt.Errorf("%w: cut off after %d bytes", errOption, len(p))
	}
	flags := p[4]
	if v := flags >> 6; v != optionVersion {
		return Option{}, fmt.Errorf("%w of version %d: it has version %d", errOption, optionVersion, v)
	}
	if flags&3 != 0 {
		return Option{}, fmt.Errorf("%w: reserved bits in %#x", errOption, flags)
	}
	be := binary.BigEndian
	place := be.Uint32(p[8:])
	o := Option{
		More: flags&flagMore != 0, RTR: flags&flagRTR != 0, RTRAck: flags&flagRTRAck != 0, Timestamped: flags&flagTimestamp != 0,
		Opcode: p[5], MSN: be.Uint16(p[6:]), Offset: place >> 8, Segment: uint8(place), ICRC: be.Uint32(p[12:]),
	}
	if n := o.length(); int(p[1]) != n || len(p) < n {
		return Option{}, fmt.Errorf("%w: %d bytes long", errOption, p[1])
	}
	p = p[optionLeast:]
	if o.Timestamped {
		o.Timestamp, o.Echo = be.Uint32(p), be.Uint32(p[4:])
		p = p[8:]
	}
	if o.HasImmediate() {
		o.Immediate = be.Uint32(p)
	}
	return o, nil
}

// Segment is a received segment with the option. TCP delivers its data in order; the option gives its place at once.
type Segment struct {
	// Remote and Port identify the flow: the peer's address and port, and the local port.
	Remote netip.AddrPort
	Port   uint16
	// Offset is the position of its first byte in the stream, modulo 2^32; Length is its number of bytes. A segment may
	// arrive repeatedly.
	Offset uint32
	Length int
	Option Option
}
