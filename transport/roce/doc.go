// Package roce implements RoCEv2's reliable connection (RC) over UDP in user space. It is an rdma.Transport whose
// channels are queue pairs. Its packets are those of an RDMA NIC (InfiniBand Architecture Specification, volume 1:
// chapter 9 for the transport, annex A17 for RoCEv2): BTH and its extended headers, payload and ICRC, to UDP port 4791.
//
// # Files
//
//	header.go opcode.go     packets: BTH, RETH, AETH, AtomicETH, AtomicAckETH, ImmDt
//	icrc.go identify.go     the invariant CRC, and its check without the IPv4 identification, which sockets do not report
//	mtu.go                  the path MTU, from the route
//	psn.go aeth.go          24-bit sequence numbers; syndromes and RNR timers
//	core.go                 Core: queue pairs by number, counters, time; rdma.Transport without sockets
//	parameters.go           Parameters: the parameters that two ends exchange before the first packet
//	qp.go                   queuePair: rdma.Channel; states, parameters, paths, failure
//	requester.go            requester: local operations, cut into packets, sent inside a window, retransmitted
//	completer.go            the requester's part for responses: ACK, NAK, READ responses
//	responder.go            responder: the peer's operations, executed once, in order, and answered
//	congestion.go           ECN marks and CNPs
//	grave.go                answers for closed and broken queue pairs
//	transport.go            Transport: a Core on sockets
//
// # Paths
//
// A queue pair has one path: the UDP source port of its slot, for requests and responses alike. SetPaths with another
// port has the effect of mlx5dv_modify_qp_udp_sport on a queue pair in RTS: sequence numbers stay, the requester
// retransmits everything unacknowledged at once from the new port, and the responder recognizes by the PSN the requests
// that it has executed.
//
// # Order
//
// A responder executes requests in the order of posting, and each once, except READs: a READ with lost responses is
// executed a second time (Section 9.4.4), and would then return the data of later requests. A requester therefore holds
// a SEND, WRITE or atomic back until all earlier READs have completed, as if it were posted with the fence indicator. A
// READ does not wait for earlier READs.
//
// # Loss
//
// Recovery is go-back-N, as in RC. It starts from the PSN of a NAK, from a READ whose responses have a gap, or from the
// oldest unacknowledged PSN when the retransmission timer expires, whose time follows from measured round trips. A
// timer retransmits the oldest packet alone; the answer shows which others have arrived.
//
// # Congestion
//
// The queue pairs to one peer share a window (transport/internal/congestion), which limits the requests in flight, and
// the READ responses that are requested and have not arrived. A READ is therefore requested in parts of the size for
// which the window has room, as if the application had posted several; it completes with the last of them. Any
// responder answers such requests. A reported loss reduces the window, as do a marked READ response and a CNP, which a
// packet that arrives marked causes: all packets are ECN-capable. A timeout reduces it only if the answer to the
// retransmission proves a loss, and not if the path had stalled: a dead plane is no congestion.
//
// A responder sends its responses at once. READs of another implementation are in no window here: a CNP for their
// responses reduces that of this end's requests.
//
// # Plain channels
//
// The SENDs of a channel start with rdma.Op.Head, by which a set puts the pieces of a message together. A plain channel
// (rdma.ChannelConfig.Plain) has no such head: its SENDs are the application's, immediate data is in ImmDt, and a
// message without a receive is answered by an RNR NAK. Its peer may be any implementation of RoCEv2, except that READs
// of more than 1 MiB are refused.
//
// # Differences from a NIC
//
// A closed or broken queue pair continues to answer for a while. It acknowledges the requests that it has executed, and
// refuses all others with the NAK of its failure or with "remote operational error". The peer thus learns the reason,
// whereas the peer of a NIC would retry until it gives up. RNR retries are not limited: a peer that answers "not ready"
// is alive.
package roce
