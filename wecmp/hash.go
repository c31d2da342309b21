package wecmp

import (
	"encoding/binary"
	"hash/crc32"
	"net/netip"
)

// ProtocolUDP and PortRoCE complete the 5-tuple of RoCEv2 packets: UDP to the port that IANA assigned to RoCEv2.
// ProtocolTCP is the protocol of queue pairs over TCP connections.
const (
	ProtocolTCP = 6
	ProtocolUDP = 17
	PortRoCE    = 4791
)

// Hasher is the function by which a network device maps a flow to one of its equal members. Implementations are pure:
// equal flows always map to the same member.
type Hasher interface {
	// Hash returns the device's hash of a flow, or false if it is not defined (addresses of two families).
	Hash(src, dst netip.Addr, protocol uint8, sport, dport uint16) (uint32, bool)
	// Member returns the index, 0..n-1, of the member that a hash selects among n > 0 equal members, or -1 if the
	// choice may change when weights change. Members are in the order of Config: plane by plane.
	Member(hash uint32, n int) int
	// String returns the name of the hash.
	String() string
}

// Asked represents a hash that cannot be computed but queried. It returns the landing places of a pair's flows as a
// byte for each source port from MinPort to MaxPort: the sub-port, numbered from 1 in the order of Config over all
// planes, or 0 for no lasting place. It returns nil if the places are not, or not yet, known. It must not modify a
// returned slice, and must be safe for concurrent use; later calls for a pair may return another result.
type Asked func(src, dst netip.Addr) []byte

// Hash looks up the source port and returns false if the pair is unknown. The table is valid for the protocol and
// destination port with which the device was queried, so these arguments are ignored.
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

// overAll reports whether a hash selects from the sub-ports of all planes, whatever the addressing: so does that of
// this host's data plane. A network's hash selects within the plane of the addresses.
func overAll(h Hasher) bool {
	own, ok := h.(interface{ overAll() bool })
	return ok && own.overAll()
}

// flow encodes a 5-tuple as the hash input of switch ASICs: source, destination, protocol, source port, destination
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

// addresses appends source and destination to buf[:0]; it returns false if they are invalid or of two families.
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

// String returns the name of the polynomial.
func (c CRC16) String() string {
	if c.Bisync {
		return "crc16-bisync"
	}
	return "crc16-ccitt"
}

// CRC32 is the IEEE 802.3 cyclic redundancy check over the 5-tuple; the member is hash mod n.
type CRC32 struct {
	Seed uint32 // initial value, as the first argument of crc32.Update
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

// XOR folds the 5-tuple by exclusive or, as 16-bit words in network byte order with the protocol as the low byte of a
// separate word; the member is hash mod n.
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
	// Key is the secret; IPv4 flows use its first 16 bytes, IPv6 flows 40. Missing bytes count as zero. nil means the
	// key of Microsoft's verification suite, the default of many devices.
	Key []byte
}

var defaultToeplitzKey = []byte{
	0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3, 0x8f, 0xb0, 0xd0, 0xca, 0x2b, 0xcb,
	0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3, 0x80, 0x30, 0xf2, 0x0c, 0x6a, 0x42, 0xb7, 0x3b, 0xbe, 0xac, 0x01, 0xfa,
}

// Hash implements Hasher. It does not depend on the protocol.
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
	// window holds, in its low bits, the 40 key bits for the bits of one data byte.
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
