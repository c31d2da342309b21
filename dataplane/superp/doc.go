// Package superp carries rdma operations by SUPERp, the Scale UP EtheRnet Protocol (description v0.4, packets as XDP2 has them),
// over UDP/IP. An unordered connection has many paths and spreads its packets over them: fared gives the source ports and shares.
//
//	rdma.Op        a transaction each; small ones that are queued together share one (initiator.go)
//	transaction    packets, counted by seqno; replies and ack_xid come back (target.go)
//	packet         psn, window, acknowledgement, retransmission (pdl_send.go, pdl_receive.go)
//	path           UDP source port, dealt by share (path.go)
//
// # Operations
//
//	OpWrite    RMA writes, one for each packet; complete when ack_xid covers the transaction
//	OpRead     one RMA read; complete when the read responses have brought all of it
//	OpSend     Sends, one for each packet, whose message is Head and Local; complete when ack_xid covers it. A receiver without
//	           a receive (rdma.NotReady) keeps the message and withholds ack_xid: tal_trans_window is the backpressure
//	atomics    private opcodes (operation.go says which, and what else is ours), as are those of operations with a key
//
// An operation that the target refuses completes with the error of its Transaction error; the connection goes on.
//
// # Exactly once
//
// A transaction is executed as its packets come, each psn once. What is retransmitted is built anew from the operation, so no
// packet is kept; a read response is read anew. When the transaction layer knows that the target has a packet, the packet delivery
// layer takes its word. ack_xid does not pass a transaction whose error the initiator may not have.
//
// Ordered connections execute transactions in order: packets go to the transaction layer by psn; nothing passes a message that
// waits for its receive, and nothing but another read passes a read that the peer has not got, for a retransmission reads again.
//
// # Acknowledgements
//
// Every packet carries them. A No-op carries them alone, and takes a psn as all packets do; but it is not acknowledged for its own
// sake, unless it brings news of transactions. One goes out at the end of a turn in which all that was under way has completed;
// after Parameters.Stretch packets; rdma.Timing.AckDelay after a packet that nothing has acknowledged; and when a hole shows. Where
// something waits for room in a window full of those, they ask for acknowledgement after all.
//
// # Losses
//
// A hole is no loss where planes reorder against each other. But a plane keeps order: a packet is lost when others that were sent
// later by the same path have arrived; or when an acknowledgement still shows it missing after more time than acknowledgements
// take. A timeout has the oldest packets sent again, by other paths. When a path goes, or loses its share, what is in flight by it
// is sent again at once, with the psns it had.
//
// UDP's checksum is all that protects packets: SUPERp has none.
package superp
