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
// It is the proposal's tcp_bth with twelve bytes of its "other extensions" instead of four of immediate data, which operations
// here have not. TCP has 40 bytes for options: with the kernel's timestamps on, which take 12, those stay the kernel's and the
// option is 28 bytes; with net.ipv4.tcp_timestamps=0 it carries them itself.
const (
	optionKind  = 253
	optionExID  = 0xfb54
	optionShort = 28
	optionLong  = 36
	optionBits  = 0x3c // that are known
)

// Option says where in which message a segment's data is. A segment carries it only if all of its data is of one message.
type Option struct {
	// Opcode is InfiniBand's for reliable connections (IBTA 1.4, Table 38), with its FIRST, MIDDLE, LAST and ONLY variants; messages
	// of this package's own (OPEN and so on) have one opcode each, from 0xc0.
	Opcode uint8
	// MSN is the low half of the message's number among its channel's requests; an answer has its request's.
	MSN uint16
	// Offset of the segment's first byte in the message, bytes. A message begins with its frame's header: WriteHeader bytes of a
	// WRITE are not its data.
	Offset uint32
	// Segment counts the message's segments, modulo 256. A segment that is cut again keeps its number.
	Segment uint8
	// More: it is not the message's last.
	More bool
	// RTR and RTRAck are the proposal's; nobody sets them here.
	RTR, RTRAck bool
	// ICRC is the CRC-32 (as of Ethernet and RoCE) of the segment's data when that is a whole message whose data cannot change; 0:
	// absent. The kernel shows a BPF program no data, so of longer messages' segments none is known.
	ICRC uint32
	// Timestamped: Timestamp and Echo are there, which mean what those of RFC 7323 do; milliseconds.
	Timestamped     bool
	Timestamp, Echo uint32
	// Address and Key of the peer's memory where the message's data begins; of messages without: the length of the data, and the
	// number of the receiver's channel.
	Address uint64
	Key     uint32
}

// Bare returns an opcode without its FIRST, MIDDLE and LAST: the ONLY variant.
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

// variants are an opcode's of a first, middle, last and only segment.
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

// Append appends the option.
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

// ParseOption reads an option that begins at p and ends before or with it.
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

// FindOption looks for the option among those of a TCP header, which begin 20 bytes into it (RFC 9293, Section 3.1).
func FindOption(options []byte) (Option, bool) {
	for len(options) > 0 {
		switch options[0] {
		case 0: // the end
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

// Segment is a segment that has come in with the option. TCP has its data in order; the option says where it belongs at once.
type Segment struct {
	// Remote and Port are the flow's: the peer's end, and the local port.
	Remote netip.AddrPort
	Port   uint16
	// Offset of its first byte in the stream, modulo 2^32, and how many there are. A segment may come again.
	Offset uint32
	Length int
	Option Option
}
