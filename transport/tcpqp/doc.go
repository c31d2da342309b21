// Package tcpqp implements "TCP flows driven by queue pairs": the queue pair slots of this transport are TCP
// connections. A TCP option may state the place of each segment in its message (Ahern and Romanovsky, "AI Networking -
// RoCE v2 and netdev", netdev 2025). Linux provides congestion control, acknowledgement, SACK and retransmission; a
// slot determines the source port of its flow, and so its plane.
//
// # Flows and channels
//
//	channel (A's requests) ---- attaches to ----> flow (A, slot's port) -> (B, 4793) ---- B executes, answers on the same connection
//	channel (B's requests) ---- attaches to ----> flow (B, slot's port) -> (A, 4793)
//
// A channel has two independent halves. The initiator sends requests on a flow that it dials from the port of its path;
// the responder executes the requests that arrive on the peer's flow. Each side therefore moves by its own weights,
// without coordination. Waiting requests never delay responses, so the two directions cannot deadlock. Acknowledgements
// and READ answers return on the connection of their request: their destination port is the slot's port, and the
// responder's kernel routes them.
//
// Two channels cannot have connections with the same addresses and ports. However, sets between the same loopbacks
// share the ports of the pair's slots, and a parked channel borrows the port of a live slot. A flow therefore carries
// any number of channels, and each frame names its channel. The fixed destination port, 4793, preserves the hash for
// which fared chose the source port.
//
// # Exactly once
//
// Requests are numbered (msn), sent in order and executed in order. To attach, a channel sends OPEN with a larger epoch
// and the first unanswered request. The responder drops the old attachment and sends ACCEPT with the first request that
// it has not executed. It then repeats its answers from the first unanswered one: for READs it reads memory again, the
// results of atomics and errors are kept. The initiator continues from the request in ACCEPT. A move to another port, a
// reset and a stalled plane are handled alike. Before a later request of the channel overwrites memory of an
// unconfirmed READ, the responder copies the bytes that the READ returned.
//
// The responder answers a SEND without a receive with HOLD. The initiator then stops, the responder skips the requests
// in flight, and RESUME contains the request from which to continue. The responder keeps reading the connection, since
// frames of other channels follow.
//
// # The option
//
// The stream contains frames whether or not segments carry the option (Option), because segments may lack it: a
// middlebox may strip it, SACK blocks may leave no room for it, and the segments of an offloaded batch have none. With
// the option each segment can be placed without the segments before it; hardware that uses it handles a segment without
// it in stream order. A channel requests it in OPEN, and a BPF program on the cgroup (framing.bpf.c) writes it. If that
// is impossible, one log message states the reason.
//
// Every option has the ICRC of its segment. A BPF program cannot read the data, so user space cuts messages into pieces
// that fit into a segment with 40 bytes of options, computes the CRC of each, and ends a segment at the end of each
// (MSG_EOR); TCP then never joins pieces and cuts none unless the path's MTU or the peer's window shrinks. A part of a
// piece has no option (options_cut).
//
// TCP segmentation offload copies one header into all segments of a batch, so the program writes no option into
// segments that still leave as a batch (options_batched). The option forgoes offload: over a veth pair goodput falls to
// about a thirteenth, or a tenth with WRITEs of 4 KiB. The CRCs are a small part of that. The option is therefore off
// unless Config.Option enables it.
//
// # Ready to receive
//
// The proposal names the flags rtr and rtr_ack without rules for them. Here an end sets rtr (ready to receive) in every
// option until it has received rtr_ack, and rtr_ack in every option as long as the latest received one has rtr. A lost
// segment therefore delays the agreement and cannot prevent it. Until an end has received rtr, its SENDs, WRITEs and
// READ answers have no option (options_early). Normally rtr comes with ACCEPT, rtr and rtr_ack with the first request,
// and rtr_ack with its answer. Data does not wait for the flags: without the option it is placed in stream order.
//
// # Timestamps and SACK
//
// The option has at most 28 of the 40 bytes that TCP has for options, and SACK blocks come first. Without the kernel's
// timestamps (net.ipv4.tcp_timestamps=0) the option carries timestamps itself; next to one SACK block it is complete,
// and next to two it omits its timestamps. With the kernel's timestamps, which take 12 bytes, the option has none; next
// to one SACK block it fits in segments without immediate data. Three blocks, or two with the kernel's timestamps, take
// its room (options_no_room).
//
// # Private parts
//
// These parts are not in the proposal:
//   - the experimental kind 253 and the identifier 0xfb54, and version 1 in the field ver;
//   - imm_data is present only in segments whose opcode has immediate data: LAST and ONLY;
//   - msn counts the messages of each direction of a flow, from 0;
//   - the ICRC covers the segment's data, without the option;
//   - opcodes from 0xc0 are the frames OPEN, ACCEPT, REFUSE, ERROR, HOLD and RESUME;
//   - the data of a message begins with its frame's header, which has what RoCEv2 has in RETH, AETH and AtomicETH: a
//     channel, the number of the request, the length, and a WRITE's address and key. It is in the first segment, so a
//     segment of a WRITE is placed once that has arrived. Message byte offsets count it: 20 bytes, 24 in a SEND with
//     immediate data, 32 in a WRITE.
//
// Sets spread a WRITE with immediate data over their slots, so its immediate data follows in a message that announces
// the WRITE: a SEND with immediate data. The version of the parameters (Channel.Local) covers frames and option; ends
// of different versions refuse to connect.
package tcpqp
