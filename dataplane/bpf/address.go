package bpf

import (
	"bytes"
	"encoding/binary"
	"hash/fnv"
	"net/netip"
)

// words converts a 16-byte address to the program's words, which hold the bytes in network order.
func words(b [16]byte) (a steerAddress) {
	for i := range a.Word {
		a.Word[i] = binary.NativeEndian.Uint32(b[4*i:])
	}
	return a
}

// prefix returns the host prefix of an address.
func (a steerAddress) prefix() netip.Prefix {
	var b [16]byte
	for i, w := range a.Word {
		binary.NativeEndian.PutUint32(b[4*i:], w)
	}
	addr := netip.AddrFrom16(b).Unmap()
	return netip.PrefixFrom(addr, addr.BitLen())
}

// text returns the string that ends at the first zero byte.
func text(b []byte) string {
	b, _, _ = bytes.Cut(b, []byte{0})
	return string(b)
}

// nameHash identifies a plane by the hash of its name.
func nameHash(name string) uint64 {
	h := fnv.New64a()
	h.Write([]byte(name))
	return h.Sum64()
}

// addressOf returns an address in the form of the program.
func addressOf(a netip.Addr) steerAddress {
	return words(a.As16())
}

// pairKey returns a pair's key. It returns false if the families differ or the source is invalid, so that no packet
// belongs to the pair.
func pairKey(source string, destination netip.Prefix) (steerPair, bool) {
	p, err := netip.ParsePrefix(source)
	if err != nil || p.Addr().Is4() != destination.Addr().Is4() {
		return steerPair{}, false
	}
	return steerPair{Source: addressOf(p.Addr()), Destination: addressOf(destination.Addr())}, true
}
