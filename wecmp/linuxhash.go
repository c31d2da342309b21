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
		return 0, false
	}
	k[2] = protocol
	binary.BigEndian.PutUint16(k[28:], sport)
	binary.BigEndian.PutUint16(k[30:], dport)
	if binary.NativeEndian.Uint16(k[30:]) < binary.NativeEndian.Uint16(k[28:]) {
		k[28], k[29], k[30], k[31] = k[30], k[31], k[28], k[29]
	}
	seed := uint64(l.Seed)<<32 | uint64(l.Seed)
	h := uint32(sipHash24(seed, seed, k[:size]))
	return max(h, 1) >> 1, true // the kernel replaces a hash of 0 by 1
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

// sipHash24 returns SipHash-2-4 (Aumasson and Bernstein, 2012), 64 bits, of p, whose length must be a multiple of 8.
func sipHash24(k0, k1 uint64, p []byte) uint64 {
	v0, v1, v2, v3 := k0^0x736f6d6570736575, k1^0x646f72616e646f6d, k0^0x6c7967656e657261, k1^0x7465646279746573
	tail := uint64(len(p)) << 56
	rounds := 2
	for {
		m := tail
		last := len(p) == 0
		if !last {
			m, p = binary.LittleEndian.Uint64(p), p[8:]
		}
		v3 ^= m
		for range rounds {
			v0 += v1
			v1 = bits.RotateLeft64(v1, 13) ^ v0
			v0 = bits.RotateLeft64(v0, 32)
			v2 += v3
			v3 = bits.RotateLeft64(v3, 16) ^ v2
			v0 += v3
			v3 = bits.RotateLeft64(v3, 21) ^ v0
			v2 += v1
			v1 = bits.RotateLeft64(v1, 17) ^ v2
			v2 = bits.RotateLeft64(v2, 32)
		}
		v0 ^= m
		if rounds == 4 {
			return v0 ^ v1 ^ v2 ^ v3
		}
		if last {
			// Finalization: four rounds without input.
			v2 ^= 0xff
			rounds, tail = 4, 0
		}
	}
}
