package bpf

import (
	"bytes"
	"encoding/binary"
	"hash/fnv"
	"net/netip"
)

// words is an address of 16 bytes in the program's words, which hold the bytes in the order of the wire.
func words(b [16]byte) (a steerAddress) {
	for i := range a.Word {
		a.Word[i] = binary.NativeEndian.Uint32(b[4*i:])
	}
	return a
}

// prefix is the host prefix of an address.
func (a steerAddress) prefix() netip.Prefix {
	var b [16]byte
	for i, w := range a.Word {
		binary.NativeEndian.PutUint32(b[4*i:], w)
	}
	addr := netip.AddrFrom16(b).Unmap()
	return netip.PrefixFrom(addr, addr.BitLen())
}

// text is a string that ends at its first zero byte.
func text(b []byte) string {
	b, _, _ = bytes.Cut(b, []byte{0})
	return string(b)
}

// nameHash stands for a plane's name.
func nameHash(name string) uint64 {
	h := fnv.New64a()
	h.Write([]byte(name))
	return h.Sum64()
}
