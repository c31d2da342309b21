// Package roce is RoCEv2's reliable connection (RC) over UDP, in user space: rdma.Transport whose channels are queue pairs. What goes
// over the wire is what an RDMA NIC sends (InfiniBand Architecture Specification, volume 1: chapter 9 for the transport, annex A17 for
// RoCEv2): BTH and its extended headers, payload, ICRC, to UDP port 4791.
//
// # Where to look
//
//	header.go opcode.go     packets: BTH, RETH, AETH, AtomicETH, AtomicAckETH, ImmDt
//	icrc.go identify.go     the invariant CRC, and how it copes with an IPv4 identification that sockets do not show
//	psn.go aeth.go          24-bit sequence numbers; syndromes and RNR timers
//	core.go                 Core: queue pairs by number, counters, time; rdma.Transport without sockets
//	qp.go                   QueuePair: rdma.Channel; states, parameters, paths, failure
//	requester.go            our operations: cut into packets, sent inside a window, sent again
//	completer.go            what the peer answers to them: ACK, NAK, READ responses
//	responder.go            the peer's operations: executed once, in order, and answered
//	grave.go                what is answered for queue pairs that are gone
//	transport.go            Transport: a Core on sockets
//
// # Paths
//
// A queue pair has one path: the UDP source port of its slot, for requests as for answers. SetPaths with another port does what
// mlx5dv_modify_qp_udp_sport does to a queue pair in RTS: sequence numbers stay, everything not acknowledged is sent again at once by
// the new port, and the responder knows by the PSN what it has executed.
//
// # Order
//
// A responder executes requests in the order of posting, and each once, but for READs: one whose responses are lost is executed again
// (Section 9.4.4), and would then see what later requests wrote. So a requester holds a SEND, WRITE or atomic back
// until READs before it have completed, as if it were posted with the fence indicator. READs behind READs are not held.
//
// # Loss
//
// Recovery is go-back-N, as in RC: from the PSN of a NAK, from a READ whose responses have a gap, or from the oldest PSN that is not
// acknowledged when Timing.Retransmit runs out. Packets in flight are bounded by a window that shrinks to the half with each loss and
// grows by growth packets with each window that is acknowledged: sockets' buffers are small, and there is no lossless fabric below.
//
// # Differences from a NIC
//
// A queue pair that is closed or broken goes on to answer for a while: it acknowledges what it has executed, and refuses the rest with
// the NAK that it failed with, or with "remote operational error". So a peer learns what happened, where a NIC's would retry until it
// gives up. RNR retries are not counted: a peer that says "not ready" lives.
package roce
