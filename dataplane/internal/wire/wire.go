// Package wire is the seam between protocol cores that speak UDP and what carries their datagrams: sockets
// (dataplane/internal/udp) or a simulated network (dataplane/rdma/rdmatest).
package wire

import (
	"net/netip"
	"time"
)

// Core is a protocol without sockets and clock. Its methods are called with the device's lock held.
type Core interface {
	// Receive takes a datagram that came to the core's UDP port. p is valid during the call only.
	Receive(from netip.AddrPort, p []byte)
	// Tick is called at or after the time last given to Out.WakeAt.
	Tick()
}

// Out is where a core sends. Its methods are called with the device's lock held.
type Out interface {
	// Send queues a datagram from a UDP source port: head, payload and tail, one after the other. head and tail are copied before
	// it returns; payload is read until the next flush and must not change before. Datagrams of one destination, source port and
	// total length that follow each other go out as one batch (UDP_SEGMENT); the last of them may be shorter.
	Send(to netip.AddrPort, port uint16, head, payload, tail []byte)
	// Next is the IPv4 identification that a datagram of this destination, source port and total length gets when it is the next to
	// be sent: Linux gives unconnected sockets' packets 0 and counts up where it cuts a batch into packets. RoCEv2's ICRC covers it.
	Next(to netip.AddrPort, port uint16, length int) uint16
	// WakeAt asks for Core.Tick at a time of Host.Now, instead of any time asked for before; 0: never.
	WakeAt(time.Duration)
}
