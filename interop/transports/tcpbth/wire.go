package tcpbth

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
)

// Segment is a TCP segment with data.
type Segment struct {
	From, To netip.AddrPort
	Seq      uint32
	Options  []byte // of the TCP header
	Data     []byte
}

// Parse parses an Ethernet frame. It returns false for anything but a TCP segment with data over IPv4 or IPv6.
func Parse(frame []byte) (s Segment, ok bool) {
	if len(frame) < 14 {
		return s, false
	}
	var source, destination netip.Addr
	var tcp []byte
	packet := frame[14:]
	switch binary.BigEndian.Uint16(frame[12:]) {
	case 0x0800:
		if len(packet) < 20 || packet[9] != 6 {
			return s, false
		}
		header, total := int(packet[0]&15)*4, int(binary.BigEndian.Uint16(packet[2:]))
		if header < 20 || total < header || len(packet) < total {
			return s, false
		}
		source, destination = netip.AddrFrom4([4]byte(packet[12:])), netip.AddrFrom4([4]byte(packet[16:]))
		tcp = packet[header:total]
	case 0x86dd:
		if len(packet) < 40 || packet[6] != 6 {
			return s, false
		}
		total := 40 + int(binary.BigEndian.Uint16(packet[4:]))
		if len(packet) < total {
			return s, false
		}
		source, destination = netip.AddrFrom16([16]byte(packet[8:])), netip.AddrFrom16([16]byte(packet[24:]))
		tcp = packet[40:total]
	default:
		return s, false
	}
	if len(tcp) < 20 {
		return s, false
	}
	header := int(tcp[12]>>4) * 4
	if header < 20 || header >= len(tcp) {
		return s, false
	}
	return Segment{
		From: netip.AddrPortFrom(source, binary.BigEndian.Uint16(tcp)), To: netip.AddrPortFrom(destination, binary.BigEndian.Uint16(tcp[2:])),
		Seq: binary.BigEndian.Uint32(tcp[4:]), Options: bytes.Clone(tcp[20:header]), Data: bytes.Clone(tcp[header:]),
	}, true
}

// Kinds of TCP options, and the experiment.
const (
	kindEnd        = 0
	kindNop        = 1
	kindSACK       = 5
	kindTimestamps = 8
	kindExperiment = 253
	experiment     = 0xfb54
	version        = 1
)

// BTH is struct tcp_bth.
type BTH struct {
	Version                                  uint8
	TimestampPresent, MoreSegments, RTR, Ack bool // Ack is rtr_ack
	Reserved                                 uint8
	Opcode                                   uint8
	MSN                                      uint16
	Offset                                   uint32 // message byte offset
	Segment                                  uint8
	ICRC                                     uint32
	Timestamp, Echo                          uint32
	Immediate                                uint32
	HasImmediate                             bool
}

// Options is what the decoder found in a TCP header.
type Options struct {
	BTH        *BTH // nil: the segment has no framing option
	SACKBlocks int
	Timestamps bool // TCP's own timestamps (RFC 7323)
}

// Decode decodes the options of a TCP header.
func Decode(p []byte) (o Options, err error) {
	for len(p) > 0 {
		if p[0] == kindEnd {
			break
		}
		if p[0] == kindNop {
			p = p[1:]
			continue
		}
		if len(p) < 2 || p[1] < 2 || int(p[1]) > len(p) {
			return o, fmt.Errorf("option %d has a wrong length", p[0])
		}
		option := p[:p[1]]
		p = p[p[1]:]
		switch option[0] {
		case kindSACK:
			o.SACKBlocks = (len(option) - 2) / 8
		case kindTimestamps:
			o.Timestamps = true
		case kindExperiment:
			if len(option) < 4 || binary.BigEndian.Uint16(option[2:]) != experiment {
				continue
			}
			if o.BTH != nil {
				return o, fmt.Errorf("two framing options")
			}
			if o.BTH, err = decode(option[4:]); err != nil {
				return o, err
			}
		}
	}
	return o, nil
}

func decode(p []byte) (*BTH, error) {
	const fixed, stamps, immediate = 12, 8, 4
	if len(p) < fixed {
		return nil, fmt.Errorf("a tcp_bth of %d bytes", len(p))
	}
	b := &BTH{
		Version: p[0] >> 6, TimestampPresent: p[0]>>5&1 == 1, MoreSegments: p[0]>>4&1 == 1, RTR: p[0]>>3&1 == 1, Ack: p[0]>>2&1 == 1, Reserved: p[0] & 3,
		Opcode: p[1], MSN: binary.BigEndian.Uint16(p[2:]), Offset: binary.BigEndian.Uint32(p[4:]) >> 8, Segment: p[7], ICRC: binary.BigEndian.Uint32(p[8:]),
	}
	if b.Version != version {
		return nil, fmt.Errorf("version %d instead of %d", b.Version, version)
	}
	p = p[fixed:]
	if b.TimestampPresent {
		if len(p) < stamps {
			return nil, fmt.Errorf("no timestamps, but timestamp_present")
		}
		b.Timestamp, b.Echo = binary.BigEndian.Uint32(p), binary.BigEndian.Uint32(p[4:])
		p = p[stamps:]
	}
	if len(p) == immediate {
		b.HasImmediate, b.Immediate = true, binary.BigEndian.Uint32(p)
		p = nil
	}
	if len(p) != 0 {
		return nil, fmt.Errorf("%d bytes behind the tcp_bth", len(p))
	}
	return b, nil
}
