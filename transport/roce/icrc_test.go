package roce

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
)

// bitwise returns the CRC-32 of Ethernet (IEEE 802.3, Section 3.2.9), computed bit by bit.
func bitwise(b []byte) uint32 {
	crc := ^uint32(0)
	for _, v := range b {
		for bit := range 8 {
			low := (crc ^ uint32(v)>>bit) & 1
			crc >>= 1
			if low != 0 {
				crc ^= 0xedb88320
			}
		}
	}
	return ^crc
}

// dumbICRC returns the ICRC of an IP packet with UDP (without its ICRC at the end), following the text of annex A17: it
// masks the fields that change in transit and prepends eight bytes to the packet.
func dumbICRC(packet []byte) [4]byte {
	p := slices.Clone(packet)
	bth := 48
	if p[0]>>4 == 4 {
		bth = 28
		p[1], p[8], p[10], p[11] = 0xff, 0xff, 0xff, 0xff // ToS, TTL, checksum
	} else {
		p[0], p[1], p[2], p[3] = p[0]|0xf, 0xff, 0xff, 0xff // traffic class, flow label
		p[7] = 0xff                                         // hop limit
	}
	p[bth-2], p[bth-1] = 0xff, 0xff // UDP checksum
	p[bth+4] = 0xff                 // FECN, BECN
	var b [4]byte
	binary.LittleEndian.PutUint32(b[:], bitwise(append(bytes.Repeat([]byte{0xff}, 8), p...)))
	return b
}

// ipPacket prepends IP and UDP headers to a UDP payload, with varied values in fields that must not affect the ICRC.
func ipPacket(from, to netip.AddrPort, id uint16, payload []byte) []byte {
	var b []byte
	if from.Addr().Is4() {
		b = append(b, 0x45, 0x12)
		b = binary.BigEndian.AppendUint16(b, uint16(28+len(payload)))
		b = binary.BigEndian.AppendUint16(b, id)
		b = append(b, 0x40, 0, 63, 17, 0xab, 0xcd)
	} else {
		b = append(b, 0x61, 0x23, 0x45, 0x67)
		b = binary.BigEndian.AppendUint16(b, uint16(8+len(payload)))
		b = append(b, 17, 62)
	}
	b = append(append(b, from.Addr().AsSlice()...), to.Addr().AsSlice()...)
	b = binary.BigEndian.AppendUint16(b, from.Port())
	b = binary.BigEndian.AppendUint16(b, to.Port())
	b = binary.BigEndian.AppendUint16(b, uint16(8+len(payload)))
	return append(append(b, 0x77, 0x66), payload...)
}

func unhex(s string) []byte {
	b, err := hex.DecodeString(string(bytes.ReplaceAll([]byte(s), []byte(" "), nil)))
	if err != nil {
		panic(err)
	}
	return b
}

// published are packets from other implementations, from the IP header to the ICRC.
var published = []struct{ name, packet string }{
	{"CNP of a ConnectX-4 Lx", "45c2003c 718c4000 40119161 0a001101 0a001201 000012b7 00280000 " +
		"8100ffff 40000118 00000000 00000000 00000000 00000000 00000000 82fd002a"},
	{"UC SEND only of scapy's tests", "45010040 04784000 4011b4d5 c0a80007 c0a80007 c00012b7 002caca2 " +
		"2460ffff 000000d3 00cf1710 4630818b e28935d9 0e9a9550 5401be88 5e500000 78f353f3"},
}

func TestICRCOfOthers(t *testing.T) {
	for _, test := range published {
		p := unhex(test.packet)
		end := len(p) - icrcSize
		if got := dumbICRC(p[:end]); !bytes.Equal(got[:], p[end:]) {
			t.Errorf("%s: bit by bit: ICRC %x, want %x", test.name, got, p[end:])
		}
		e := endpoints{netip.AddrFrom4([4]byte(p[12:])), netip.AddrFrom4([4]byte(p[16:])), binary.BigEndian.Uint16(p[20:]), binary.BigEndian.Uint16(p[22:])}
		want := binary.BigEndian.Uint16(p[4:])
		var c checker
		if id, ok := c.check(&seed{}, &e, p[28:], 0xffff); !ok || id != want {
			t.Errorf("%s: identification %#x, %v; want %#x", test.name, id, ok, want)
		}
		if _, ok := c.check(&seed{}, &e, p[28:], maxBatch-1); ok {
			t.Errorf("%s: passes although sockets do not send identification %#x", test.name, want)
		}
		p[end] ^= 1
		if _, ok := c.check(&seed{}, &e, p[28:], maxBatch-1); ok {
			t.Errorf("%s: passes with another ICRC", test.name)
		}
	}
}

// TestICRC compares with the reference model dumbICRC, for both families, many lengths, and cached and fresh seeds.
func TestICRC(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	var c checker
	var s seed
	hosts := [][2]netip.Addr{
		{netip.MustParseAddr("10.255.0.1"), netip.MustParseAddr("10.255.1.17")},
		{netip.MustParseAddr("fd00:255::1"), netip.MustParseAddr("fd00:255::1:17")},
	}
	for i := range 2000 {
		h := hosts[i/1000]
		if i == 1000 {
			s = seed{} // a seed belongs to one pair of addresses
		}
		e := endpoints{h[0], h[1], uint16(49152 + rng.IntN(2)), DefaultPort}
		p := make([]byte, 16+4*rng.IntN(3)*rng.IntN(350))
		for j := range p {
			p[j] = byte(rng.Uint32())
		}
		id := uint16(0)
		if e.source.Is4() {
			id = uint16(rng.IntN(3) * rng.IntN(1<<15))
		}
		n := len(p) - icrcSize
		icrc := dumbICRC(ipPacket(netip.AddrPortFrom(e.source, e.sourcePort), netip.AddrPortFrom(e.destination, e.destinationPort), id, p)[:ipHeader(e)+len(p)-icrcSize])
		copy(p[n:], icrc[:])
		if got := c.cover(c.begin(&s, &e, len(p), id), p[:n]); got != binary.LittleEndian.Uint32(icrc[:]) {
			t.Fatalf("%d bytes, identification %d, %v: %08x, want %x", len(p), id, e.source, got, icrc)
		}
		if got, ok := c.check(&s, &e, p, 0xffff); !ok || got != id {
			t.Fatalf("%d bytes: identification %d, %v; want %d", len(p), got, ok, id)
		}
		if _, ok := c.check(&s, &e, p, maxBatch-1); ok != (id < maxBatch) {
			t.Fatalf("%d bytes, identification %d: passes: %v", len(p), id, ok)
		}
		if p[4] ^= 0x80; c.cover(c.begin(&s, &e, len(p), id), p[:n]) != binary.LittleEndian.Uint32(icrc[:]) {
			t.Fatal("the ICRC depends on FECN")
		}
		if at := rng.IntN(len(p)); at != 4 {
			p[at] ^= 1 << rng.IntN(8)
			if _, ok := c.check(&s, &e, p, maxBatch-1); ok {
				t.Fatalf("passes with byte %d changed", at)
			}
		}
	}
}

func ipHeader(e endpoints) int {
	if e.source.Is4() {
		return 28
	}
	return 48
}

// TestSolver compares every identification with the CRCs.
func TestSolver(t *testing.T) {
	for _, n := range []int{16, 36, 1068, maxDatagram} {
		var s solvers
		covered := make([]byte, 2+afterID+n-icrcSize)
		zero := bitwise(covered)
		for id := 0; id < 1<<16; id += 1 + n/8 {
			binary.BigEndian.PutUint16(covered, uint16(id))
			difference := bitwise(covered) ^ zero
			if got, ok := s.solve(n, difference); !ok || int(got) != id {
				t.Fatalf("%d bytes: %d, %v; want %d", n, got, ok, id)
			}
		}
	}
}

func BenchmarkICRC(b *testing.B) {
	e := endpoints{netip.MustParseAddr("10.255.0.1"), netip.MustParseAddr("10.255.1.17"), 49152, DefaultPort}
	for _, id := range []uint16{0, 63} {
		for _, n := range []int{60, 1044, 4112} {
			b.Run(fmt.Sprintf("id=%d/bytes=%d", id, n), func(b *testing.B) {
				var c checker
				var s seed
				p := make([]byte, n)
				binary.LittleEndian.PutUint32(p[n-icrcSize:], c.cover(c.begin(&s, &e, n, id), p[:n-icrcSize]))
				b.SetBytes(int64(n))
				b.ReportAllocs()
				for b.Loop() {
					if _, ok := c.check(&s, &e, p, maxBatch-1); !ok {
						b.Fatal("wrong")
					}
				}
			})
		}
	}
}
