package superp

import (
	"encoding/binary"
	"fmt"
	"net/netip"
)

// NextHeader is SUPERp's number in SUNH's next header field; SUNHEtherType is the EtherType under which XDP2 sends SUNH.
const (
	NextHeader    = 253
	SUNHEtherType = 0x885b
)

// SUNH is the Scale Up Network Header, 8 bytes, big endian. It replaces UDP/IP inside one SUPERp subnet. This package sends UDP/IP, because
// fared steers IP; it decodes and encodes SUNH, and converts it to UDP/IP (Expand) at the boundary.
type SUNH struct {
	TrafficClass uint8
	NextHeader   uint8
	HopLimit     uint8  // 4 bits
	FlowLabel    uint16 // 12 bits
	Source       uint16 // the host part of an address
	Destination  uint16
}

// DecodeSUNH decodes a frame's payload. It returns the header and the bytes that follow it.
func DecodeSUNH(b []byte) (SUNH, []byte, error) {
	if len(b) < sunhLen {
		return SUNH{}, nil, fmt.Errorf("%w: SUNH of %d bytes", ErrMalformed, len(b))
	}
	be := binary.BigEndian
	x := be.Uint16(b[2:])
	return SUNH{TrafficClass: b[0], NextHeader: b[1], HopLimit: uint8(x >> 12), FlowLabel: x & 0xfff, Source: be.Uint16(b[4:]),
		Destination: be.Uint16(b[6:])}, b[sunhLen:], nil
}

// Append appends the header in wire format.
func (h SUNH) Append(b []byte) []byte {
	be := binary.BigEndian
	b = append(b, h.TrafficClass, h.NextHeader)
	b = be.AppendUint16(b, uint16(h.HopLimit&0xf)<<12|h.FlowLabel&0xfff)
	return be.AppendUint16(be.AppendUint16(b, h.Source), h.Destination)
}

// minFrame is the minimum payload of an Ethernet frame, in bytes; shorter ones are padded.
const minFrame = 46

// DecodeFrame decodes a frame's payload: SUNH with a packet. It ignores the padding behind a packet without operations (No-op, Last NULL).
func DecodeFrame(b []byte) (SUNH, Packet, error) {
	h, rest, err := DecodeSUNH(b)
	if err != nil {
		return SUNH{}, Packet{}, err
	}
	if h.NextHeader != NextHeader {
		return SUNH{}, Packet{}, fmt.Errorf("%w: SUNH with next header %d", ErrMalformed, h.NextHeader)
	}
	if len(rest) > pdlLen+talLen && len(b) <= minFrame {
		if form, known := Opcode(rest[pdlLen+1]).form(); known && form.none {
			rest = rest[:pdlLen+talLen]
		}
	}
	p, err := Decode(rest)
	return h, p, err
}

// AppendFrame appends a frame's payload: the header and the packet, with the padding of a packet without operations. The length of other
// packets is the length of their data, so it refuses those that Ethernet would pad.
func (h SUNH) AppendFrame(b []byte, p *Packet) ([]byte, error) {
	start := len(b)
	b = p.Append(h.Append(b))
	if missing := minFrame - (len(b) - start); missing > 0 {
		if p.TAL.NumOps > 0 {
			return nil, fmt.Errorf("%v of %d bytes: a frame of less than %d would be padded, and the padding taken for data", p.TAL.Opcode, len(b)-start, minFrame)
		}
		b = append(b, make([]byte, missing)...)
	}
	return b, nil
}

// firstPort is the first UDP source port of the entropy range.
const firstPort = 0xC000

// Expanded is a SUNH header in terms of UDP/IP.
type Expanded struct {
	Source, Destination netip.AddrPort
	FlowLabel           uint32 // IPv6's, 20 bits; 0 for IPv4
	TrafficClass        uint8
	HopLimit            uint8
}

// Expand converts the header to UDP/IP in a SUPERp subnet. The host part of subnet has at least 16 bits; port is the UDP destination port.
// The flow label becomes the UDP source port, from 49152 upwards, and IPv6's flow label.
func (h SUNH) Expand(subnet netip.Prefix, port uint16) (Expanded, error) {
	if h.NextHeader != NextHeader {
		return Expanded{}, fmt.Errorf("%w: SUNH with next header %d", ErrMalformed, h.NextHeader)
	}
	if !subnet.IsValid() || subnet.Addr().BitLen()-subnet.Bits() < 16 {
		return Expanded{}, fmt.Errorf("subnet %v: the host part has fewer than 16 bits", subnet)
	}
	host := func(n uint16) netip.Addr {
		b := subnet.Masked().Addr().AsSlice()
		b[len(b)-2], b[len(b)-1] = byte(n>>8), byte(n)
		a, _ := netip.AddrFromSlice(b)
		return a
	}
	e := Expanded{Source: netip.AddrPortFrom(host(h.Source), firstPort+h.FlowLabel&0xfff),
		Destination: netip.AddrPortFrom(host(h.Destination), port), TrafficClass: h.TrafficClass, HopLimit: h.HopLimit}
	if subnet.Addr().Is6() {
		e.FlowLabel = uint32(h.FlowLabel & 0xfff)
	}
	return e, nil
}

// Compress is the inverse of Expand. Both addresses must be in the subnet and differ from its prefix in the last 16 bits only, the source
// port must be in the range of Expand, and the hop limit must have 4 bits.
func Compress(e Expanded, subnet netip.Prefix) (SUNH, error) {
	label := e.Source.Port() - firstPort
	if e.Source.Port() < firstPort || label > 0xfff {
		return SUNH{}, fmt.Errorf("source port %d is not a flow label", e.Source.Port())
	}
	if e.HopLimit > 0xf {
		return SUNH{}, fmt.Errorf("hop limit %d: SUNH's has 4 bits", e.HopLimit)
	}
	h := SUNH{TrafficClass: e.TrafficClass, NextHeader: NextHeader, HopLimit: e.HopLimit, FlowLabel: label}
	for _, x := range []struct {
		to *uint16
		a  netip.Addr
	}{{&h.Source, e.Source.Addr()}, {&h.Destination, e.Destination.Addr()}} {
		b := x.a.AsSlice()
		if len(b) < 4 {
			return SUNH{}, fmt.Errorf("no address")
		}
		*x.to = binary.BigEndian.Uint16(b[len(b)-2:])
	}
	back, err := h.Expand(subnet, e.Destination.Port())
	if err != nil {
		return SUNH{}, err
	}
	if back.Source != e.Source || back.Destination != e.Destination {
		return SUNH{}, fmt.Errorf("%v or %v is not of subnet %v", e.Source.Addr(), e.Destination.Addr(), subnet)
	}
	return h, nil
}
