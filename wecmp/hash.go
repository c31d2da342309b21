package wecmp

import (
	"encoding/binary"
	"hash/crc32"
	"net/netip"
)

// ProtocolUDP and PortRoCE complete the 5-tuple of RoCEv2 packets: UDP to the port that IANA assigned to RoCEv2. ProtocolTCP is
// that of queue pairs which are TCP connections.
const (
	ProtocolTCP = 6
	ProtocolUDP = 17
	PortRoCE    = 4791
)

// Hasher is how a network device maps a flow to one of its equal members. Implementations are pure: the same flow always
// gives the same member.
type Hasher interface {
	// Hash returns the device's hash of a flow; false when it has no answer (addresses of two families).
	Hash(src, dst netip.Addr, protocol uint8, sport, dport uint16) (uint32, bool)
	// Member returns which of n > 0 equal members a hash selects, 0..n-1; -1 when that would not last: the flow may move when
	// weights change. Members are in the order of Config: plane by plane.
	Member(hash uint32, n int) int
	// String names the hash for people.
	String() string
}

// Uniform stands for a hash that is not known: as Config.Hash it is the same as nil.
type Uniform struct{}

// Hash has no answer.
func (Uniform) Hash(netip.Addr, netip.Addr, uint8, uint16, uint16) (uint32, bool) { return 0, false }

// Member is never asked.
func (Uniform) Member(uint32, int) int { return 0 }

// String returns "uniform".
func (Uniform) String() string { return "uniform" }

// Asked stands for a hash that cannot be computed but asked for: it returns where the flows of a pair land, a byte for each
// source port from MinPort to MaxPort: the sub-port, counted from 1 in the order of Config over all planes, or 0 for no
// lasting place. nil: not known, or not yet. It must not change what it has returned, and be safe for any number of
// goroutines; the same pair may get another answer later.
type Asked func(src, dst netip.Addr) []byte

// Hash looks the source port up; false when the pair is not known. Protocol and destination port are those that were asked for.
func (a Asked) Hash(src, dst netip.Addr, _ uint8, sport, _ uint16) (uint32, bool) {
	table := a(src, dst)
	if len(table) != portCount || sport < MinPort {
		return 0, false
	}
	return uint32(table[sport-MinPort]), true
}

// Member implements Hasher.
func (Asked) Member(hash uint32, n int) int {
	if hash > uint32(n) {
		return -1
	}
	return int(hash) - 1
}

// String returns "asked".
func (Asked) String() string { return "asked" }

func (Asked) overAll() bool { return true }

// overAll says whether a hash selects from the sub-ports of all planes, whatever the addressing: that of this host's own
// data plane. A network's selects in the plane that the addresses are of.
func overAll(h Hasher) bool {
	own, ok := h.(interface{ overAll() bool })
	return ok && own.overAll()
}

// flow lays a 5-tuple out as switch ASICs feed it to their hash: source, destination, protocol, source port, destination
// port, each in network byte order; 13 bytes (IPv4) or 37 (IPv6).
func flow(buf *[37]byte, src, dst netip.Addr, protocol uint8, sport, dport uint16) ([]byte, bool) {
	b, ok := addresses(buf, src, dst)
	if !ok {
		return nil, false
	}
	b = append(b, protocol)
	b = binary.BigEndian.AppendUint16(b, sport)
	return binary.BigEndian.AppendUint16(b, dport), true
}

// addresses appends source and destination to buf[:0]; false when they are of two families or not valid.
func addresses(buf *[37]byte, src, dst netip.Addr) ([]byte, bool) {
	src, dst = src.Unmap(), dst.Unmap()
	switch {
	case src.Is4() && dst.Is4():
		s, d := src.As4(), dst.As4()
		return append(append(buf[:0], s[:]...), d[:]...), true
	case src.Is6() && dst.Is6():
		s, d := src.As16(), dst.As16()
		return append(append(buf[:0], s[:]...), d[:]...), true
	}
	return nil, false
}

// CRC16 is a 16-bit cyclic redundancy check over the 5-tuple; the member is hash mod n.
type CRC16 struct {
	Bisync bool   // polynomial 0x8005 reflected, initial value 0 (BISYNC, ARC); else CCITT: 0x1021, initial value 0xffff
	Seed   uint16 // exclusive-or-ed into the initial value
}

// Hash implements Hasher.
func (c CRC16) Hash(src, dst netip.Addr, protocol uint8, sport, dport uint16) (uint32, bool) {
	var buf [37]byte
	b, ok := flow(&buf, src, dst, protocol, sport, dport)
	return uint32(c.sum(b)), ok
}

func (c CRC16) sum(data []byte) uint16 {
	if c.Bisync {
		crc := c.Seed
		for _, b := range data {
			crc = crc>>8 ^ bisyncTable[byte(crc)^b]
		}
		return crc
	}
	crc := 0xffff ^ c.Seed
	for _, b := range data {
		crc = crc<<8 ^ ccittTable[byte(crc>>8)^b]
	}
	return crc
}

var ccittTable, bisyncTable = crc16Tables()

func crc16Tables() (ccitt, bisync [256]uint16) {
	for i := range 256 {
		c, b := uint16(i)<<8, uint16(i)
		for range 8 {
			c = c<<1 ^ 0x1021*(c>>15)
			b = b>>1 ^ 0xa001*(b&1)
		}
		ccitt[i], bisync[i] = c, b
	}
	return ccitt, bisync
}

// Member implements Hasher.
func (CRC16) Member(hash uint32, n int) int { return int(hash % uint32(n)) }

// String names the polynomial.
func (c CRC16) String() string {
	if c.Bisync {
		return "crc16-bisync"
	}
	return "crc16-ccitt"
}

// CRC32 is the IEEE 802.3 cyclic redundancy check over the 5-tuple; the member is hash mod n.
type CRC32 struct {
	Seed uint32 // continues a check of this value, as crc32.Update does
}

// Hash implements Hasher.
func (c CRC32) Hash(src, dst netip.Addr, protocol uint8, sport, dport uint16) (uint32, bool) {
	var buf [37]byte
	b, ok := flow(&buf, src, dst, protocol, sport, dport)
	return c.sum(b), ok
}

// sum is crc32.Update with the IEEE polynomial, in a form that keeps data on the stack.
func (c CRC32) sum(data []byte) uint32 {
	crc := ^c.Seed
	for _, b := range data {
		crc = crc>>8 ^ crc32.IEEETable[byte(crc)^b]
	}
	return ^crc
}

// Member implements Hasher.
func (CRC32) Member(hash uint32, n int) int { return int(hash % uint32(n)) }

// String returns "crc32".
func (CRC32) String() string { return "crc32" }

// XOR folds the 5-tuple, as 16-bit words in network byte order with the protocol as the low byte of its own word, by
// exclusive or; the member is hash mod n.
type XOR struct{}

// Hash implements Hasher.
func (XOR) Hash(src, dst netip.Addr, protocol uint8, sport, dport uint16) (uint32, bool) {
	var buf [37]byte
	b, ok := addresses(&buf, src, dst)
	x := uint16(protocol) ^ sport ^ dport
	for ; len(b) >= 2; b = b[2:] {
		x ^= binary.BigEndian.Uint16(b)
	}
	return uint32(x), ok
}

// Member implements Hasher.
func (XOR) Member(hash uint32, n int) int { return int(hash % uint32(n)) }

// String returns "xor".
func (XOR) String() string { return "xor" }

// Toeplitz is the hash of receive side scaling over source, destination, source port and destination port (Microsoft,
// "RSS hashing types", TCP and UDP over IPv4 and IPv6). The member is hash mod n.
type Toeplitz struct {
	// Key is the secret; IPv4 flows use its first 16 bytes, IPv6 flows 40. What is missing counts as zero. nil: the key of
	// Microsoft's verification suite, which many devices have as their default.
	Key []byte
}

var defaultToeplitzKey = []byte{
	0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3, 0x8f, 0xb0, 0xd0, 0xca, 0x2b, 0xcb,
	0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3, 0x80, 0x30, 0xf2, 0x0c, 0x6a, 0x42, 0xb7, 0x3b, 0xbe, 0xac, 0x01, 0xfa,
}

// Hash implements Hasher. The protocol is no part of it.
func (t Toeplitz) Hash(src, dst netip.Addr, _ uint8, sport, dport uint16) (uint32, bool) {
	var buf [37]byte
	b, ok := addresses(&buf, src, dst)
	if !ok {
		return 0, false
	}
	b = binary.BigEndian.AppendUint16(b, sport)
	return t.sum(binary.BigEndian.AppendUint16(b, dport)), true
}

func (t Toeplitz) sum(data []byte) (hash uint32) {
	key := t.Key
	if key == nil {
		key = defaultToeplitzKey
	}
	at := func(i int) uint64 {
		if i < len(key) {
			return uint64(key[i])
		}
		return 0
	}
	// window holds the 40 key bits that the bits of one data byte see, in its low bits.
	window := at(0)<<24 | at(1)<<16 | at(2)<<8 | at(3)
	for i, b := range data {
		window = window<<8 | at(i+4)
		for bit := range 8 {
			if b&(0x80>>bit) != 0 {
				hash ^= uint32(window >> (8 - bit))
			}
		}
	}
	return hash
}

// Member implements Hasher.
func (Toeplitz) Member(hash uint32, n int) int { return int(hash % uint32(n)) }

// String returns "toeplitz".
func (Toeplitz) String() string { return "toeplitz" }
