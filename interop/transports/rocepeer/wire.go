package rocepeer

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"net/netip"
)

// BTH opcodes of RC (table 38), and the congestion notification packet (annex A17.9.1).
const (
	SendFirst              = 0
	SendMiddle             = 1
	SendLast               = 2
	SendLastImm            = 3
	SendOnly               = 4
	SendOnlyImm            = 5
	WriteFirst             = 6
	WriteMiddle            = 7
	WriteLast              = 8
	WriteLastImm           = 9
	WriteOnly              = 10
	WriteOnlyImm           = 11
	ReadRequest            = 12
	ReadFirst              = 13
	ReadMiddle             = 14
	ReadLast               = 15
	ReadOnly               = 16
	Acknowledge            = 17
	AtomicAcknowledge      = 18
	CompareSwap            = 19
	FetchAdd               = 20
	CongestionNotification = 0x81
)

// The extended headers of each opcode, in the order of the packet: RETH, AETH, AtomicETH, AtomicAckETH, ImmDt.
var extended = map[byte]string{
	SendFirst: "", SendMiddle: "", SendLast: "", SendLastImm: "I", SendOnly: "", SendOnlyImm: "I",
	WriteFirst: "R", WriteMiddle: "", WriteLast: "", WriteLastImm: "I", WriteOnly: "R", WriteOnlyImm: "RI",
	ReadRequest: "R", ReadFirst: "A", ReadMiddle: "", ReadLast: "A", ReadOnly: "A",
	Acknowledge: "A", AtomicAcknowledge: "AO", CompareSwap: "T", FetchAdd: "T", CongestionNotification: "",
}

// Packet is a RoCEv2 packet.
type Packet struct {
	Op     byte
	AckReq bool
	BECN   bool
	QPN    uint32 // destination
	PSN    uint32

	Address       uint64 // RETH, AtomicETH
	Key           uint32
	Length        uint32 // RETH
	Swap, Compare uint64 // AtomicETH; Swap is the addend of FetchAdd
	Syndrome      byte   // AETH
	MSN           uint32
	Original      uint64 // AtomicAckETH
	Imm           uint32
	Payload       []byte

	SourcePort uint16
	ID         uint16 // IPv4 identification
	ECN        byte   // of the IP header: 0 not ECN-capable, 1 and 2 capable, 3 congestion experienced
}

const udpPort = 4791

// marshal returns the IPv4 packet, with its ICRC.
func (p *Packet) marshal(from, to netip.Addr) []byte {
	pad := (4 - len(p.Payload)%4) % 4
	b := []byte{p.Op, 0x40 | byte(pad)<<4, 0xff, 0xff} // MigReq, the default partition
	first := p.QPN
	if p.BECN {
		first |= 1 << 30
	}
	b = binary.BigEndian.AppendUint32(b, first)
	psn := p.PSN & 0xffffff
	if p.AckReq {
		psn |= 1 << 31
	}
	b = binary.BigEndian.AppendUint32(b, psn)
	for _, h := range extended[p.Op] {
		switch h {
		case 'R':
			b = binary.BigEndian.AppendUint64(b, p.Address)
			b = binary.BigEndian.AppendUint32(b, p.Key)
			b = binary.BigEndian.AppendUint32(b, p.Length)
		case 'A':
			b = binary.BigEndian.AppendUint32(b, uint32(p.Syndrome)<<24|p.MSN&0xffffff)
		case 'T':
			b = binary.BigEndian.AppendUint64(b, p.Address)
			b = binary.BigEndian.AppendUint32(b, p.Key)
			b = binary.BigEndian.AppendUint64(b, p.Swap)
			b = binary.BigEndian.AppendUint64(b, p.Compare)
		case 'O':
			b = binary.BigEndian.AppendUint64(b, p.Original)
		case 'I':
			b = binary.BigEndian.AppendUint32(b, p.Imm)
		}
	}
	b = append(append(b, p.Payload...), make([]byte, pad)...)
	udp := binary.BigEndian.AppendUint16(nil, p.SourcePort)
	udp = binary.BigEndian.AppendUint16(udp, udpPort)
	udp = binary.BigEndian.AppendUint16(udp, uint16(8+len(b)+4))
	udp = append(udp, 0, 0) // no checksum, as A17 recommends
	ip := []byte{0x45, p.ECN & 3}
	ip = binary.BigEndian.AppendUint16(ip, uint16(20+len(udp)+len(b)+4))
	ip = binary.BigEndian.AppendUint16(ip, p.ID)
	ip = append(ip, 0x40, 0, 64, 17, 0, 0)
	ip = append(append(ip, from.AsSlice()...), to.AsSlice()...)
	packet := bytes.Join([][]byte{ip, udp, b}, nil)
	return binary.LittleEndian.AppendUint32(packet, icrc(packet))
}

// icrc returns the invariant CRC of an IPv4 packet without its ICRC (A17.3.3): over eight bytes of ones and the packet,
// in which the fields that routers change are ones.
func icrc(packet []byte) uint32 {
	b := append(bytes.Repeat([]byte{0xff}, 8), packet...)
	ones := func(at ...int) {
		for _, i := range at {
			b[8+i] = 0xff
		}
	}
	ones(1, 8, 10, 11) // type of service, time to live, header checksum
	ones(20+6, 20+7)   // UDP checksum
	ones(20 + 8 + 4)   // FECN, BECN, reserved bits
	return crc32.ChecksumIEEE(b)
}

// Errors of unmarshal.
var (
	errForeign = errors.New("not a packet to UDP port 4791")
	errICRC    = errors.New("wrong ICRC")
)

// unmarshal parses an IPv4 packet. Errors other than errForeign are violations by the sender.
func unmarshal(b []byte) (p Packet, from netip.Addr, err error) {
	if len(b) < 28 || b[0] != 0x45 || b[9] != 17 || binary.BigEndian.Uint16(b[22:]) != udpPort {
		return p, from, errForeign
	}
	from, _ = netip.AddrFromSlice(b[12:16])
	if n := int(binary.BigEndian.Uint16(b[2:])); n != len(b) || int(binary.BigEndian.Uint16(b[24:])) != n-20 || n < 28+12+4 {
		return p, from, fmt.Errorf("lengths %d, %d of %d bytes", n, binary.BigEndian.Uint16(b[24:]), len(b))
	}
	end := len(b) - 4
	if icrc(b[:end]) != binary.LittleEndian.Uint32(b[end:]) {
		return p, from, errICRC
	}
	bth := b[28:end]
	headers, known := extended[bth[0]]
	pad := int(bth[1] >> 4 & 3)
	switch {
	case !known:
		return p, from, fmt.Errorf("opcode %#x", bth[0])
	case bth[1]&0x0f != 0 || binary.BigEndian.Uint16(bth[2:]) != 0xffff || bth[8]&0x7f != 0 || len(bth)%4 != 0:
		return p, from, fmt.Errorf("BTH %x", bth[:12])
	case b[6] != 0x40 || binary.BigEndian.Uint16(b[20:]) < 0xc000:
		return p, from, fmt.Errorf("IP and UDP headers %x: want DF and a source port of the dynamic range", b[:28])
	}
	p = Packet{Op: bth[0], AckReq: bth[8]&0x80 != 0, BECN: bth[4]&0x40 != 0, QPN: binary.BigEndian.Uint32(bth[4:]) & 0xffffff,
		PSN: binary.BigEndian.Uint32(bth[8:]) & 0xffffff, SourcePort: binary.BigEndian.Uint16(b[20:]), ID: binary.BigEndian.Uint16(b[4:]), ECN: b[1] & 3}
	rest := bth[12:]
	take := func(n int) (v uint64) {
		if n > len(rest) {
			err = errors.New("shorter than its headers")
			return 0
		}
		for _, x := range rest[:n] {
			v = v<<8 | uint64(x)
		}
		rest = rest[n:]
		return v
	}
	for _, h := range headers {
		switch h {
		case 'R':
			p.Address, p.Key, p.Length = take(8), uint32(take(4)), uint32(take(4))
		case 'A':
			v := take(4)
			p.Syndrome, p.MSN = byte(v>>24), uint32(v)&0xffffff
		case 'T':
			p.Address, p.Key, p.Swap, p.Compare = take(8), uint32(take(4)), take(8), take(8)
		case 'O':
			p.Original = take(8)
		case 'I':
			p.Imm = uint32(take(4))
		}
	}
	if err == nil && pad > len(rest) {
		err = errors.New("more padding than payload")
	}
	if err == nil {
		p.Payload = bytes.Clone(rest[:len(rest)-pad])
	}
	return p, from, err
}
