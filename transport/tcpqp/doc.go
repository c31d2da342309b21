// Package tcpqp implements "TCP flows driven by queue pairs": the queue pair slots of this transport are TCP connections. A TCP option may
// state the place of each segment in its message (Ahern and Romanovsky, "AI Networking - RoCE v2 and netdev", netdev 2025). Linux provides
// congestion control, acknowledgement, SACK and retransmission; a slot determines the source port of its flow, and so its plane.
//
// # Flows and channels
//
//	channel (A's requests) ---- attaches to ----> flow (A, slot's port) -> (B, 4793) ---- B executes, answers on the same connection
//	channel (B's requests) ---- attaches to ----> flow (B, slot's port) -> (A, 4793)
//
// A channel has two independent halves. The initiator sends requests on a flow that it dials from the port of its path; the responder
// executes the requests that arrive on the peer's flow. Each side therefore moves by its own weights, without coordination. Waiting
// requests never delay responses, so the two directions cannot deadlock. Acknowledgements and READ answers return on the connection of
// their request: their destination port is the slot's port, and the responder's kernel routes them.
//
// Two channels cannot have connections with the same addresses and ports. However, sets between the same loopbacks share the ports of the
// pair's slots, and a parked channel borrows the port of a live slot. A flow therefore carries any number of channels, and each frame names
// its channel. The fixed destination port, 4793, preserves the hash for which fared chose the source port.
//
// # Exactly once
//
// Requests are numbered (msn), sent in order and executed in order. To attach, a channel sends OPEN with a larger epoch and the first
// unanswered request. The responder drops the old attachment and sends ACCEPT with the first request that it has not executed. It then
// repeats its answers from the first unanswered one: for READs it reads memory again, the results of atomics and errors are kept. The
// initiator continues from the request in ACCEPT. A move to another port, a reset and a stalled plane are handled alike. Before a later
// request of the channel overwrites memory of an unconfirmed READ, the responder copies the bytes that the READ returned.
//
// The responder answers a SEND without a receive with HOLD. The initiator then stops, the responder skips the requests in flight, and
// RESUME contains the request from which to continue. The responder keeps reading the connection, since frames of other channels follow.
//
// # The option
//
// The stream contains frames whether or not segments carry the option (Option), because segments may lack it: a middlebox may strip it,
// SACK blocks may leave no room for it, and the segments of an offloaded batch have none. With the option each segment can be placed
// without the segments before it; hardware that uses it handles a segment without it in stream order. A channel requests it in OPEN, and a
// BPF program on the cgroup (framing.bpf.c) writes it. If that is impossible, one log message states the reason.
//
// TCP segmentation offload copies one header into all segments of a batch. With the option, user space therefore ends a segment (MSG_EOR)
// at the end of each message and of each full segment, and the program writes no option into segments that still leave as a batch. This
// forgoes offload: over a veth pair goodput falls to about a thirteenth, or a tenth with WRITEs of 4 KiB. The option is therefore off
// unless Config.Option enables it.
package tcpqp
