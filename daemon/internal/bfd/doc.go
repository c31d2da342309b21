// Package bfd detects within a fraction of a second that packets from a neighbor on the same link no longer arrive:
// single-hop BFD in asynchronous mode (RFC 5880, RFC 5881), without using demand mode and without sending echo packets.
//
//	packet.go    the octets of a control packet
//	auth.go      keys, digests and sequence numbers of packets with authentication: pure, as the machine
//	counter.go   the reasons for which packets are discarded, and their counts
//	machine.go   the state machine: pure, takes the time as an argument, sends nothing itself
//	session.go   a machine with its socket, its timer and its owner
//	responder.go reception on port 3784, by local address
//	socket.go    socket setup: namespace, device, TTL, source port
//
// # Late timers
//
// A process that was not scheduled has not read its neighbors' packets, and must not mistake that for their silence. So
// when a detection time has expired, the session first reads all packets that wait in the socket, and decides only
// then. Reading a packet and passing it to its session happen under one lock, so that no packet is in between. One
// limitation remains: while this process is suspended it sends nothing, and the neighbor may declare the session down.
//
// # Other senders
//
// A user of the neighbor's host can send packets from the neighbor's address with TTL 255, but not from its port.
// Machine.Receive has the rules. RFC 5881 limits source ports to 49152 to 65535; that is not verified, because BIRD 2
// on Linux sends from any port of the kernel's local range.
//
// # Authentication
//
// Types 2 to 5 are supported: MD5 or SHA1, keyed or meticulous. Sequence numbers are remembered for twice the detection
// time, also over the end of the state Up. In contrast to the text of RFC 5880, Section 6.7.3, the sequence number of a
// packet is stored only after its digest was verified: a forged packet would otherwise shut out the neighbor while no
// number is known. Octets between the section and the end of the packet are refused.
//
// # Implemented sections
//
// RFC 5880: 4.1 (packet), 4.3, 4.4, 6.7.3 and 6.7.4 (authentication), 6.2 and 6.8.6 (states, reception), 6.5 (poll
// sequences, both roles), 6.8.1 to 6.8.4 (variables, timers, detection), 6.8.7 (transmission, jitter; periodic packets
// stop for a neighbor in demand mode), 6.8.16 (AdminDown for a detection time after the end of a session, shorter only
// at the end of the process). RFC 5881: 4 (ports), 5 (TTL 255), 6 (addresses). RFC 5882: 3.2 (AdminDown is not a
// failure).
package bfd
