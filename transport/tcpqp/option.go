package tcpqp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
)

// The option, in network byte order; bits from the most significant down:
//
//	kind 253 (RFC 4727) | length 28 or 36 | ExID 0xfb54 (RFC 6994)
//	ver:2 timestamp_present:1 more_segments:1 rtr:1 rtr_ack:1 reserved:2 | opcode | msn
//	message byte offset:24 | segment number:8
//	icrc
//	timestamp | timestamp_echo                  only with timestamp_present
//	address (8) | key (4)
//
// It is the proposal's tcp_bth with twelve bytes of its "other extensions" instead of four of immediate data, which operations of this
// package do not have. TCP has 40 bytes for options. With the kernel's timestamps, which take 12 bytes, the option has 28 bytes; with
// net.ipv4.tcp_timestamps=0 it carries timestamps itself.
const (
	optionKind  = 253
	optionExID  = 0xfb54
	optionShort = 28
	optionLong  = 36
	optionBits  = 0x3c // the known flag bits
)

// Option gives the place of a segment's data in its message. A segment carries it only if all its data belongs to one message.
type Option struct {
	// Opcode is InfiniBand's opcode for reliable connections (IBTA 1.4, Table 38), with its FIRST, MIDDLE, LAST and ONLY variants; messages
	// specific to this package (OPEN and so on) have one opcode each, from 0xc0.
	Opcode uint8
	// MSN is the low half of the message's number among its channel's requests; an answer has the number of its request.
	MSN uint16
	// Offset is the position of the segment's first byte in the message, in bytes. A message starts with its frame's header: the first
	// WriteHeader bytes of a WRITE are not data.
	Offset uint32
	// Segment is the number of the segment in the message, modulo 256. Parts of a segment that is cut again keep its number.
	Segment uint8
	// More is true except in the message's last segment.
	More bool
	// RTR and RTRAck are flags of the proposal; this package does not set them.
	RTR, RTRAck bool
	// ICRC is the CRC-32 (as in Ethernet and RoCE) of the segment's data if that is a whole message whose data cannot change; 0: absent. A
	// BPF program cannot read the data, so segments of longer messages have no CRC.
	ICRC uint32
	// Timestamped: Timestamp and Echo are present, with the meaning of RFC 7323; milliseconds.
	Timestamped     bool
	Timestamp, Echo uint32
	// Address and Key locate the message's data in the peer's memory. Messages without an address have the length of the data and the
	// number of the receiving channel instead.
	Address uint64
	Key     uint32
}

// Bare returns the ONLY variant of the opcode.
func (o Option) Bare() uint8 {
	for _, v := range [...]opcode{opSend, opWrite, opReadAnswer} {
		for _, x := range v.variants() {
			if x == o.Opcode {
				return uint8(v)
			}
		}
	}
	return o.Opcode
}

// variants returns an opcode's variants for a first, middle, last and only segment.
func (o opcode) variants() [4]uint8 {
	switch o {
	case opSend:
		return [4]uint8{0x00, 0x01, 0x02, 0x04}
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
	length, flags := byte(optionShort), byte(0)
	for bit, on := range [8]bool{2: o.RTRAck, 3: o.RTR, 4: o.More, 5: o.Timestamped} {
		if on {
			flags |= 1 << bit
		}
	}
	if o.Timestamped {
		length = optionLong
	}
	be := binary.BigEndian
	p = be.AppendUint16(append(p, optionKind, length), optionExID)
	p = be.AppendUint16(append(p, flags, o.Opcode), o.MSN)
	p = be.AppendUint32(p, o.Offset<<8|uint32(o.Segment))
	p = be.AppendUint32(p, o.ICRC)
	if o.Timestamped {
		p = be.AppendUint32(be.AppendUint32(p, o.Timestamp), o.Echo)
	}
	return be.AppendUint32(be.AppendUint64(p, o.Address), o.Key)
}

// ParseOption parses an option at the start of p.
func ParseOption(p []byte) (Option, error) {
	if len(p) < 4 || p[0] != optionKind || binary.BigEndian.Uint16(p[2:]) != optionExID {
		return Option{}, errOption
	}
	n, flags := optionShort, byte(0)
	if len(p) > 4 {
		flags = p[4]
	}
	if flags&0x20 != 0 {
		n = optionLong
	}
	if int(p[1]) != n || len(p) < n {
		return Option{}, fmt.Errorf("%w: %d bytes long", errOption, p[1])
	}
	if flags&^optionBits != 0 {
		return Option{}, fmt.Errorf("%w: version or flags %#x", errOption, flags)
	}
	be := binary.BigEndian
	place := be.Uint32(p[8:])
	o := Option{
		More: flags&0x10 != 0, RTR: flags&0x08 != 0, RTRAck: flags&0x04 != 0, Timestamped: flags&0x20 != 0,
		Opcode: p[5], MSN: be.Uint16(p[6:]), Offset: place >> 8, Segment: uint8(place), ICRC: be.Uint32(p[12:]),
	}
	p = p[16:n]
	if o.Timestamped {
		o.Timestamp, o.Echo = be.Uint32(p), be.Uint32(p[4:])
		p = p[8:]
	}
	o.Address, o.Key = be.Uint64(p), be.Uint32(p[8:])
	return o, nil
}

// FindOption searches the options of a TCP header, which start at its byte 20 (RFC 9293, Section 3.1), for the framing option.
func FindOption(options []byte) (Option, bool) {
	for len(options) > 0 {
		switch options[0] {
		case 0: // end of options
			return Option{}, false
		case 1: // no operation
			options = options[1:]
			continue
		}
		if len(options) < 2 || options[1] < 2 || int(options[1]) > len(options) {
			return Option{}, false
		}
		if o, err := ParseOption(options[:options[1]]); err == nil {
			return o, true
		}
		options = options[options[1]:]
	}
	return Option{}, false
}

// Segment is a received segment with the option. TCP delivers its data in order; the option gives its place at once.
type Segment struct {
	// Remote and Port identify the flow: the peer's address and port, and the local port.
	Remote netip.AddrPort
	Port   uint16
	// Offset is the position of its first byte in the stream, modulo 2^32; Length is its number of bytes. A segment may arrive repeatedly.
	Offset uint32
	Length int
	Option Option
}
