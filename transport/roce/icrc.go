package roce

import (
	"encoding/binary"
	"hash/crc32"
	"net/netip"
)

// The ICRC (annex A17) is a CRC-32 over eight bytes of ones, the IP and UDP headers, and the packet from the BTH on.
// Fields that change in transit are replaced by ones: IPv4 ToS, TTL and header checksum; IPv6 traffic class, flow label
// and hop limit; UDP checksum; the byte of the BTH with FECN and BECN. It is stored in little endian.

// pseudoSize is the maximum number of bytes before the BTH: ones, an IPv6 header, a UDP header.
const pseudoSize = 8 + 40 + 8

// endpoints are the addresses and ports that a packet's ICRC covers.
type endpoints struct {
	source, destination         netip.Addr
	sourcePort, destinationPort uint16
}

// pseudo writes the bytes before the BTH to b and returns their number. n is the length of the UDP payload; the IPv4
// identification is 0. Packets have DF set and no options, like those of sockets and NICs.
func (e *endpoints) pseudo(b *[pseudoSize]byte, n int) int {
	for i := range b {
		b[i] = 0xff
	}
	udp := 8 + 20
	if e.source.Is4() {
		b[8] = 0x45
		binary.BigEndian.PutUint16(b[10:], uint16(20+8+n))
		b[12], b[13], b[14], b[15], b[17] = 0, 0, 0x40, 0, protocolUDP
		source, destination := e.source.As4(), e.destination.As4()
		copy(b[20:], source[:])
		copy(b[24:], destination[:])
	} else {
		udp = 8 + 40
		b[8] = 0x6f
		binary.BigEndian.PutUint16(b[12:], uint16(8+n))
		b[14] = protocolUDP
		source, destination := e.source.As16(), e.destination.As16()
		copy(b[16:], source[:])
		copy(b[32:], destination[:])
	}
	binary.BigEndian.PutUint16(b[udp:], e.sourcePort)
	binary.BigEndian.PutUint16(b[udp+2:], e.destinationPort)
	binary.BigEndian.PutUint16(b[udp+4:], uint16(8+n))
	return udp + 8
}

const protocolUDP = 17

// behind returns, for each value of a byte that is followed by n bytes, its contribution to the CRC. Contributions
// combine by exclusive or, since a CRC is linear.
func behind(n int) (adds [256]uint32) {
	b := make([]byte, 1+n)
	zero := crc32.ChecksumIEEE(b)
	for v := range adds {
		b[0] = byte(v)
		adds[v] = crc32.ChecksumIEEE(b) ^ zero
	}
	return adds
}

var (
	// behindID is for the two bytes of an IPv4 identification in the pseudo header.
	behindID = [2][256]uint32{behind(afterID + 1), behind(afterID)}
	// behindBTH is for the bytes of a BTH at the end of the data: crc32 would process so few bytes one at a time.
	behindBTH = func() (t [bthSize][256]uint32) {
		for i := range t {
			t[i] = behind(bthSize - 1 - i)
		}
		return t
	}()
)

// seed caches the CRC of the latest pseudo header: consecutive packets of one flow and length differ only in their
// identifications.
type seed struct {
	port  uint16
	n     int    // 0: empty
	state uint32 // for identification 0
}

// checker calculates ICRCs. It owns the buffers for this, since slices passed to crc32 would otherwise be
// heap-allocated.
type checker struct {
	pseudo  [pseudoSize]byte
	solvers solvers
}

// begin returns the CRC over the bytes before the BTH. s must belong to e's addresses and destination port.
func (c *checker) begin(s *seed, e *endpoints, n int, id uint16) uint32 {
	if s.n != n || s.port != e.sourcePort {
		k := e.pseudo(&c.pseudo, n)
		*s = seed{port: e.sourcePort, n: n, state: crc32.ChecksumIEEE(c.pseudo[:k])}
	}
	if id == 0 || !e.source.Is4() {
		return s.state
	}
	return s.state ^ behindID[0][id>>8] ^ behindID[1][id&0xff]
}

// cover adds a packet's headers, which start with a BTH, to a CRC.
func (c *checker) cover(crc uint32, headers []byte) uint32 {
	b, t := headers[:bthSize], &behindBTH
	crc = ^crc ^ binary.LittleEndian.Uint32(b)
	crc = ^(t[0][crc&0xff] ^ t[1][crc>>8&0xff] ^ t[2][crc>>16&0xff] ^ t[3][crc>>24] ^
		t[4][0xff] ^ t[5][b[5]] ^ t[6][b[6]] ^ t[7][b[7]] ^ t[8][b[8]] ^ t[9][b[9]] ^ t[10][b[10]] ^ t[11][b[11]])
	return crc32.Update(crc, crc32.IEEETable, headers[bthSize:])
}

// check reports whether the ICRC at the end of p is correct, and for which IPv4 identification. p has at least a BTH
// and an ICRC, and a length divisible by 4 of at most maxDatagram. A receiving socket does not report the
// identification: if the ICRC does not match identification 0, check solves for it, up to most. Of 2^32 corrupted
// packets, most+1 pass: 1 in 2^16 if most is anyID, 1 in 2^25 if it is maxBatch-1.
func (c *checker) check(s *seed, e *endpoints, p []byte, most uint16) (id uint16, ok bool) {
	n := len(p)
	crc := c.cover(c.begin(s, e, n, 0), p[:n-icrcSize])
	difference := crc ^ binary.LittleEndian.Uint32(p[n-icrcSize:])
	if difference == 0 {
		return 0, true
	}
	if !e.source.Is4() {
		return 0, false
	}
	id, ok = c.solvers.solve(n, difference)
	return id, ok && id <= most
}
