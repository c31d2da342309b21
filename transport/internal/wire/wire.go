// Package wire is the interface between protocol cores that use UDP and the carriers of their datagrams: sockets
// (transport/internal/udp) or a simulated network (transport/rdma/rdmatest).
package wire

import (
	"net/netip"
	"time"
)

// Core is a protocol without sockets and clock. Its methods are called with the device's lock held.
type Core interface {
	// Receive handles a datagram that arrived at the core's UDP port. p is valid only during the call.
	Receive(from netip.AddrPort, p []byte)
	// Tick is called at or after the time last passed to Out.WakeAt.
	Tick()
}

// Out is the sending side for a core. Its methods are called with the device's lock held.
type Out interface {
	// Send queues a datagram from a UDP source port: the concatenation of head, payload and tail. head and tail are
	// copied before it returns; payload is read until the next flush and must not change before. Consecutive datagrams
	// with the same destination, source port and total length are sent as one batch (UDP_SEGMENT); the last of them may
	// be shorter.
	Send(to netip.AddrPort, port uint16, head, payload, tail []byte)
	// Next returns the IPv4 identification of a datagram with this destination, source port and total length if it is
	// the next one sent: Linux uses 0 for packets of unconnected sockets and counts up when it segments a batch. The
	// ICRC of RoCEv2 covers it.
	Next(to netip.AddrPort, port uint16, length int) uint16
	// WakeAt requests a call of Core.Tick at a time of Host.Now, and replaces any earlier request; 0 cancels it.
	WakeAt(time.Duration)
}

// Classes is an Out that sends datagrams of several traffic classes.
type Classes interface {
	// SendClass is Out.Send with an IPv4 ToS or IPv6 traffic class, whose two ECN bits are 0 and which replaces that of
	// the carrier's configuration. Datagrams of different classes do not share a batch.
	SendClass(class uint8, to netip.AddrPort, port uint16, head, payload, tail []byte)
}

// Marked is a Core whose datagrams are ECN-capable (RFC 3168): carriers send them with ECT(0).
type Marked interface {
	Core
	// ReceiveMarked handles a datagram that arrived with "congestion experienced", in place of Receive.
	ReceiveMarked(from netip.AddrPort, p []byte)
}

// Routes is an Out that reports the routes of its destinations.
type Routes interface {
	// PathMTU returns the size in bytes of the largest IP packet that the route to an address carries. The error is the
	// kernel's if there is no route.
	PathMTU(to netip.Addr) (int, error)
}
