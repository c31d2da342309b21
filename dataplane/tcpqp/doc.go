// Package tcpqp is "TCP flows driven by queue pairs": a transport whose queue pair slots are TCP connections, and whose segments
// may say by a TCP option where in which message they are (Ahern and Romanovsky, "AI Networking - RoCE v2 and netdev", netdev 2025).
// Linux keeps congestion control, acknowledgement, SACK and repetition; a slot gives the flow its source port, so its plane.
//
// # Flows and channels
//
//	channel (A's requests) ---- attaches to ----> flow (A, slot's port) -> (B, 4793) ---- B executes, answers on the same connection
//	channel (B's requests) ---- attaches to ----> flow (B, slot's port) -> (A, 4793)
//
// A channel has two halves that know nothing of each other: the initiator sends requests by a flow that it dials from the port of
// its own path, the responder executes what the peer's flow brings. So each side moves by its own weights and asks nobody; and
// requests that wait never hold answers up, so the two directions cannot lock each other. Acknowledgements and READ answers return
// on the connection of their request: their port is the slot's as the destination, and the responder's kernel routes them.
//
// Two channels cannot have connections of the same two addresses and ports, yet sets between the same loopbacks share the ports
// of a pair's slots, and a parked channel is lent the port of one that lives. So a flow carries any number of channels: frames name
// theirs. Answering port 4793 alone keeps the hash that fared chose the source port by.
//
// # Exactly once
//
// Requests are numbered (msn), sent in order, executed in order. A channel that attaches says OPEN with a larger epoch and the first
// request it has no answer to; the responder drops the old attachment, says ACCEPT with the first request it has not executed, and
// answers again from the first that is unanswered: memory is read again for READs, the results of atomics and errors are kept. The
// initiator goes on from where ACCEPT says. Moving to another port, a reset and a stalled plane are one case. A READ that has not
// been confirmed keeps what it saw: before a later request of its channel overwrites that, it is copied.
//
// A SEND that has no receive is answered HOLD: the initiator stops, the responder skips what is under way, and RESUME says from
// where to go on. The connection is not left unread: other channels are behind in it.
//
// # The option
//
// Frames stay in the stream whether or not segments carry the option (Option): a middlebox may strip it, SACK blocks may leave it
// no room, a batch that leaves the host as one says nothing of its parts. It adds that each segment can be placed without those
// before it; hardware that does so falls back to the stream's order for a segment without it. It is asked for in OPEN, and written
// by a BPF program on the cgroup (framing.bpf.c). Where that cannot be had, one log message says what is missing.
//
// TCP segmentation offload copies one header into all segments of a batch. So with the option user space ends a segment (MSG_EOR)
// where a message does and where a segment is full, and the program writes no option into what leaves as a batch all the same.
// That forgoes offload: over a veth pair goodput falls to about a thirteenth, a tenth with WRITEs of 4 KiB. So it is off unless
// Config.Option asks for it.
package tcpqp
