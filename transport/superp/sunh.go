package superp

import (
	"encoding/binary"
	"fmt"
	"net/netip"
)

// NextHeader is SUPERp's number in SUNH's next header field; SUNHEtherType is the EtherType under which XDP2 sends
// SUNH.
const (
	NextHeader    = 253
	SUNHEtherType = 0x885b
)

// SUNH is the Scale Up Network Header, 8 bytes, big endian. It replaces UDP/IP inside one SUPERp subnet (Config.SUNH).
// Expand and Compress convert it to UDP/IP and back, at the boundary of the subnet.
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

// DecodeFrame decodes a frame's payload: SUNH with a packet. It ignores the padding behind a packet whose operations
// have no data.
func DecodeFrame(b []byte) (SUNH, Packet, error) {
	h, rest, err := unframe(b, false)
	if err != nil {
		return SUNH{}, Packet{}, err
	}
	p, err := Decode(rest)
	return h, p, err
}

// unframe returns the header and the packet of a frame's payload. The length of a packet without data is that of its
// headers; what follows is padding.
func unframe(b []byte, lite bool) (SUNH, []byte, error) {
	h, rest, err := DecodeSUNH(b)
	if err != nil {
		return SUNH{}, nil, err
	}
	if h.NextHeader != NextHeader {
		return SUNH{}, nil, fmt.Errorf("%w: SUNH with next header %d", ErrMalformed, h.NextHeader)
	}
	from := pdlLen
	if lite {
		from = 0
	}
	if len(b) <= minFrame && len(rest) > from+talLen {
		if form, known := Opcode(rest[from+1]).form(); known && !form.data {
			rest = rest[:min(len(rest), from+talLen+int(rest[from]&0xf)*form.header)]
		}
	}
	return h, rest, nil
}

// AppendFrame appends a frame's payload: the header and the packet, with the padding of a packet whose operations have
// no data. The length of other packets is the length of their data, so it refuses those that Ethernet would pad.
func (h SUNH) AppendFrame(b []byte, p *Packet) ([]byte, error) {
	start := len(b)
	b = p.Append(h.Append(b))
	if missing := minFrame - (len(b) - start); missing > 0 {
		if form, known := p.TAL.Opcode.form(); !known || form.data {
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

// Expand converts the header to UDP/IP in a SUPERp subnet. SUNH addresses are the host part of the addresses in subnet,
// or its last 16 bits if it has more; port is the UDP destination port. The flow label becomes the UDP source port,
// from 49152 upwards, and IPv6's flow label.
func (h SUNH) Expand(subnet netip.Prefix, port uint16) (Expanded, error) {
	if h.NextHeader != NextHeader {
		return Expanded{}, fmt.Errorf("%w: SUNH with next header %d", ErrMalformed, h.NextHeader)
	}
	if !subnet.IsValid() {
		return Expanded{}, fmt.Errorf("no SUPERp subnet")
	}
	for _, n := range []uint16{h.Source, h.Destination} {
		if n&^hostMask(subnet) != 0 {
			return Expanded{}, fmt.Errorf("%w: address %#x is not in subnet %v", ErrMalformed, n, subnet)
		}
	}
	host := func(n uint16) netip.Addr { return hostAddress(subnet, n) }
	e := Expanded{Source: netip.AddrPortFrom(host(h.Source), firstPort+h.FlowLabel&0xfff),
		Destination: netip.AddrPortFrom(host(h.Destination), port), TrafficClass: h.TrafficClass, HopLimit: h.HopLimit}
	if subnet.Addr().Is6() {
		e.FlowLabel = uint32(h.FlowLabel & 0xfff)
	}
	return e, nil
}

// Compress is the inverse of Expand. Both addresses must be in the subnet and differ from its prefix in the last 16
// bits only, the source port must be in the range of Expand, and the hop limit must have 4 bits.
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
		if !x.a.IsValid() {
			return SUNH{}, fmt.Errorf("no address")
		}
		*x.to = hostPart(subnet, x.a)
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

// hostMask returns the bits of a SUNH address in a subnet.
func hostMask(subnet netip.Prefix) uint16 {
	return uint16(1<<min(16, subnet.Addr().BitLen()-subnet.Bits()) - 1)
}

// hostPart returns the SUNH address of an address in a subnet.
func hostPart(subnet netip.Prefix, a netip.Addr) uint16 {
	b := a.AsSlice()
	return binary.BigEndian.Uint16(b[len(b)-2:]) & hostMask(subnet)
}

// hostAddress is the inverse of hostPart.
func hostAddress(subnet netip.Prefix, n uint16) netip.Addr {
	b := subnet.Masked().Addr().AsSlice()
	last := b[len(b)-2:]
	binary.BigEndian.PutUint16(last, binary.BigEndian.Uint16(last)|n)
	a, _ := netip.AddrFromSlice(b)
	return a
}
