package wecmp

import (
	"encoding/binary"
	"math/bits"
	"net/netip"
)

// LinuxL4 is the multipath hash of Linux for locally sent packets with net.ipv4.fib_multipath_hash_policy=1 (for IPv6:
// net.ipv6.fib_multipath_hash_policy=1): SipHash-2-4, keyed by net.ipv4.fib_multipath_hash_seed (Linux 6.11 and later,
// for both families), over struct flow_keys from its member "basic" on. linuxhash_kernel_test.go compares it with the
// kernel.
//
// Layout of the hashed bytes, integers in network byte order, all other bytes zero:
//
//	 2  IP protocol         28  lower port     30  higher port
//	36  lower address       40  higher address (IPv4, 48 bytes in all)
//	36  lower address       52  higher address (IPv6, 72 bytes in all)
//
// "lower" follows the kernel's comparison: ports and IPv4 addresses as native integers of their network bytes, IPv6
// addresses byte by byte. Addresses and ports are ordered independently.
type LinuxL4 struct {
	Seed uint32 // net.ipv4.fib_multipath_hash_seed
	// Buckets is the size of a resilient nexthop group: members own equal runs of hash mod Buckets, the last member the
	// first run, as the kernel assigns them when it creates a group. 0 means a plain group or multipath route, by
	// hash-threshold.
	Buckets int
	// Lasting, if not 0, means that a data plane assigns the buckets as described for fare.v1.FlowHash: the home of
	// member i of n is the run up to round(Buckets·(i+1)/n), of which only the last Lasting buckets belong to the
	// member whatever the weights are. A flow in any other bucket has no lasting place. The members are the sub-ports
	// of all planes. Lasting requires Buckets.
	Lasting int
}

// Hash returns the 31 bits by which the kernel chooses.
func (l LinuxL4) Hash(src, dst netip.Addr, protocol uint8, sport, dport uint16) (uint32, bool) {
	f, ok := l.flows(src, dst, protocol, dport)
	return f.hash(sport), ok
}

// linuxFlows are the flows of a pair to one port: LinuxL4 up to the ports, and what follows them.
type linuxFlows struct {
	before sipState
	after  [6]uint64 // words behind the ports
	words  int       // number of them
	dport  uint16
}

// flows returns the flows of a pair, or false if the addresses are of two families.
func (l LinuxL4) flows(src, dst netip.Addr, protocol uint8, dport uint16) (f linuxFlows, ok bool) {
	var k [72]byte
	src, dst = src.Unmap(), dst.Unmap()
	size := 48
	switch {
	case src.Is4() && dst.Is4():
		s, d := src.As4(), dst.As4()
		if binary.NativeEndian.Uint32(d[:]) < binary.NativeEndian.Uint32(s[:]) {
			s, d = d, s
		}
		copy(k[36:], s[:])
		copy(k[40:], d[:])
	case src.Is6() && dst.Is6():
		s, d := src.As16(), dst.As16()
		if dst.WithZone("").Less(src.WithZone("")) {
			s, d = d, s
		}
		copy(k[36:], s[:])
		copy(k[52:], d[:])
		size = 72
	default:
		return f, false
	}
	seed := uint64(l.Seed)<<32 | uint64(l.Seed)
	f.before, f.dport = newSipState(seed, seed), dport
	f.before = f.before.add(uint64(protocol) << 16).add(0).add(0)
	for at := 32; at < size; at += 8 {
		f.after[f.words] = binary.LittleEndian.Uint64(k[at:])
		f.words++
	}
	f.after[f.words] = uint64(size) << 56
	f.words++
	return f, true
}

// hash returns the hash of the flow from a port.
func (f *linuxFlows) hash(sport uint16) uint32 {
	lower, higher := sport, f.dport
	if native(higher) < native(lower) {
		lower, higher = higher, lower
	}
	v := f.before.add(uint64(bits.ReverseBytes16(lower))<<32 | uint64(bits.ReverseBytes16(higher))<<48)
	for _, word := range f.after[:f.words] {
		v = v.add(word)
	}
	return max(uint32(v.sum()), 1) >> 1 // the kernel replaces a hash of 0 by 1
}

// native returns the network bytes of an integer as a native integer.
func native(x uint16) uint16 {
	b := [2]byte{byte(x >> 8), byte(x)}
	return binary.NativeEndian.Uint16(b[:])
}

// Member implements Hasher.
func (l LinuxL4) Member(hash uint32, n int) int {
	if l.overAll() {
		size := uint64(l.Buckets)
		bucket := uint64(hash) % size
		i := thresholds(bucket, size, n)
		if end := roundDiv(uint64(i+1)*size, uint64(n)); bucket+uint64(l.Lasting) < end {
			return -1
		}
		return i
	}
	if l.Buckets > 0 {
		// From the end, a new resilient group gives member i the buckets from round(i·buckets/n) on.
		return thresholds(uint64(l.Buckets-1)-uint64(hash)%uint64(l.Buckets), uint64(l.Buckets), n)
	}
	return thresholds(uint64(hash), 1<<31, n)
}

func (l LinuxL4) overAll() bool { return l.Buckets > 0 && l.Lasting > 0 }

// thresholds returns the index of the range that holds x, among n equal ranges of 0..size-1: range i ends before
// round(size·(i+1)/n).
func thresholds(x, size uint64, n int) int {
	i := min(int(x*uint64(n)/size), n-1)
	if i+1 < n && x >= roundDiv(uint64(i+1)*size, uint64(n)) {
		i++ // the end was rounded down: x lies between the rounded and the exact end
	}
	return i
}

// roundDiv is the kernel's DIV_ROUND_CLOSEST_ULL.
func roundDiv(a, b uint64) uint64 { return (a + b/2) / b }

// String returns "linux-l4".
func (LinuxL4) String() string { return "linux-l4" }

// sipState is the state of SipHash-2-4 (Aumasson and Bernstein, 2012).
type sipState struct{ v0, v1, v2, v3 uint64 }

func newSipState(k0, k1 uint64) sipState {
	return sipState{k0 ^ 0x736f6d6570736575, k1 ^ 0x646f72616e646f6d, k0 ^ 0x6c7967656e657261, k1 ^ 0x7465646279746573}
}

// add adds a word. The last one has the length in its highest byte.
func (s sipState) add(word uint64) sipState {
	v0, v1, v2, v3 := s.v0, s.v1, s.v2, s.v3^word
	for range 2 {
		v0, v1, v2, v3 = halfRound(v0, v1, v2, v3, 13, 16)
		v2, v1, v0, v3 = halfRound(v2, v1, v0, v3, 17, 21)
	}
	return sipState{v0 ^ word, v1, v2, v3}
}

// sum returns the hash.
func (s sipState) sum() uint64 {
	v0, v1, v2, v3 := s.v0, s.v1, s.v2^0xff, s.v3
	for range 4 {
		v0, v1, v2, v3 = halfRound(v0, v1, v2, v3, 13, 16)
		v2, v1, v0, v3 = halfRound(v2, v1, v0, v3, 17, 21)
	}
	return v0 ^ v1 ^ v2 ^ v3
}

// halfRound is half of SipHash's round; the other half exchanges v0 and v2.
func halfRound(a, b, c, d uint64, s, t int) (uint64, uint64, uint64, uint64) {
	a, c = a+b, c+d
	b, d = bits.RotateLeft64(b, s)^a, bits.RotateLeft64(d, t)^c
	return bits.RotateLeft64(a, 32), b, c, d
}
