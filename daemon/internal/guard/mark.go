package guard

import (
	"encoding/binary"
	"net/netip"
)

// MaxMark is the largest number of a mark: the host bits of 0.0.0.0/8.
const MaxMark = 1<<24 - 1

// Mark returns the host route that represents mark n, from 1 to MaxMark, in a family that the session carries. The
// speaker announces it, then withdraws it: FromSpeaker passes neither, and Guard.Marked returns n once FromSpeaker has
// processed the withdrawal. The routes are in ranges in which no route may be: 0.0.0.0/8 (RFC 6890, Section 2.2.2:
// "this network") and 100::/64 (RFC 6666: discard-only).
func Mark(family Family, n uint32) netip.Prefix {
	if family == IPv4Unicast {
		var a [4]byte
		binary.BigEndian.PutUint32(a[:], n)
		return netip.PrefixFrom(netip.AddrFrom4(a), 32)
	}
	a := [16]byte{0: 1}
	binary.BigEndian.PutUint32(a[12:], n)
	return netip.PrefixFrom(netip.AddrFrom16(a), 128)
}

// markOf returns the number of the mark that an encoded prefix represents, or 0.
func markOf(prefix []byte, family Family) uint32 {
	switch {
	case family == IPv4Unicast && prefix[0] == 32 && prefix[1] == 0:
		return binary.BigEndian.Uint32(prefix[1:])
	case family == IPv6Unicast && prefix[0] == 128 && [8]byte(prefix[1:9]) == [8]byte{1} && [5]byte(prefix[9:14]) == [5]byte{}:
		return binary.BigEndian.Uint32(prefix[13:])
	}
	return 0
}

// Marked returns the number of the mark whose withdrawal FromSpeaker processed last, or 0. The octets that FromSpeaker
// has appended so far contain all routes and withdrawals that the speaker sent before the mark. It is for the goroutine
// that calls FromSpeaker.
func (g *Guard) Marked() uint32 { return g.out.marked }
