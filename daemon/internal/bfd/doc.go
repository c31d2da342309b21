// Package bfd notices within a fraction of a second that nothing comes any more from a neighbour on the same link: single-hop
// BFD in asynchronous mode (RFC 5880, RFC 5881), without authentication, demand mode or echo of its own.
//
//	packet.go    the 24 octets of a control packet
//	machine.go   the state machine: pure, told the time, sends nothing itself
//	session.go   a machine with its socket, its timer and its owner
//	responder.go what arrives on port 3784, by address of ours
//	socket.go    what the sockets need: namespace, device, TTL, source port
//
// # Late timers
//
// A process that was not scheduled has not heard its neighbours, and must not take that for their silence. So when a detection
// time is over, everything that waits in the socket is taken in first; only then is it decided. Reading a packet and telling
// its session happen under one lock, so that none is in between. What cannot be helped: while this process stands still it
// sends nothing, and the neighbour may find it silent.
//
// # What is implemented
//
// RFC 5880: 4.1 (packet), 6.2 and 6.8.6 (states, reception), 6.5 (poll sequences, both roles), 6.8.1 to 6.8.4 (variables, timers,
// detection), 6.8.7 (transmission, jitter; periodic packets stop for a neighbour in demand mode), 6.8.16 (AdminDown at the end).
// RFC 5881: 4 (ports), 5 (TTL 255), 6 (addresses). RFC 5882: 3.2 (AdminDown is no failure).
package bfd
