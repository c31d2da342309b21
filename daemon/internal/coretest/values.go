package coretest

import (
	"encoding/json"
	"net/netip"

	"github.com/fared/fared/fare"
)

// Destination returns the n-th remote loopback: 10.255.1.0 and the next ones, from 65,280 on 10.254.0.0, and so on.
func Destination(n int) netip.Prefix {
	n += 256
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(255 - n>>16), byte(n >> 8), byte(n)}), 32)
}

// Destinations returns the first n destinations.
func Destinations(n int) []netip.Prefix {
	out := make([]netip.Prefix, n)
	for i := range out {
		out[i] = Destination(i)
	}
	return out
}

// GPU returns the loopback of the n-th GPU of the server.
func GPU(n int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 255, 0, byte(n + 1)}), 32)
}

// OwnPorts returns a server whose n GPUs have one sub-port each in every plane: sub-port n*plane + GPU.
func OwnPorts(planes, n int) Shape {
	s := Shape{Planes: planes, SubPorts: n, Serves: func(i int) string { return GPU(i % n).String() }}
	for g := range n {
		s.Loopbacks = append(s.Loopbacks, GPU(g).String())
	}
	return s
}

// LeafNode returns the BGP identifier of a plane's leaf.
func LeafNode(plane int) netip.Addr { return netip.AddrFrom4([4]byte{10, 1, 0, byte(plane + 1)}) }

// Attributes returns those that a leaf announces for a loopback behind it: a Link Bandwidth community and the AS path.
func Attributes(b fare.Bandwidth, path ...uint32) *fare.Attributes {
	return &fare.Attributes{Communities: []fare.Community{fare.Codec{}.Encode(b, netip.Addr{})}, ASPath: path}
}

// Quoted returns a text as a JSON string.
func Quoted(s string) string {
	b, err := json.Marshal(s)
	if err != nil {
		panic(err) // unreachable: every string has an encoding
	}
	return string(b)
}
