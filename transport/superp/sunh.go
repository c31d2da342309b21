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

// firstPort is the first UDP source port of the entropy range; a flow label is the distance to it.
const firstPort = 0xC000

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
