// Package superp carries rdma operations over SUPERp, the Scale UP EtheRnet Protocol (description v0.4, packet formats
// as in XDP2), on UDP/IP or SUNH. An unordered connection has many paths and spreads its packets over them: fared
// provides the source ports and shares.
//
//	rdma.Op        one transaction each; small ones that are queued together share one (initiator.go)
//	transaction    packets, numbered by seqno; replies and ack_xid come back (target.go, reply.go)
//	packet         psn, window, acknowledgement, retransmission (pdl_send.go, pdl_receive.go, acks.go)
//	path           UDP source port or SUNH flow label, chosen by share (path.go)
//
// A psn that is needed within two seconds of its latest use waits (reuse.go). Protocol errors of the peer are dropped,
// counted and reported (violation.go). A traffic class has separate buffers and congestion windows (class.go).
//
// # Operations
//
//	OpWrite    RMA writes, one per packet; complete when ack_xid covers the transaction
//	OpRead     one RMA read; complete when the read responses have carried all its bytes
//	OpSend     Sends, one per packet, whose message is Head and Local; complete when ack_xid covers the transaction. A receiver
//	           without a receive (rdma.NotReady) keeps the message and withholds ack_xid: tal_trans_window is the backpressure
//	atomics    private opcodes (operation.go lists them)
//
// RMA operations carry an address and no key. A target executes them only inside regions that the application has
// registered for the connection (the protection domain of its set), at their rdma.FlatAddress, which contains the key.
// It refuses and counts all others.
//
// An operation that the target refuses completes with the error of its Transaction error; the connection continues.
//
// # Exactly once
//
// The target executes the packets of a transaction as they arrive, each psn once. A retransmission is rebuilt from the
// operation, so no packet is kept, and a retransmitted read response reads memory again. A reply proves to the packet
// delivery layer that the packets of its request have arrived. ack_xid does not pass a transaction with an error that
// the initiator may not have received.
//
// Order is a property of each direction. An ordered direction executes transactions in order: the packet delivery layer
// delivers packets in the order of psns. No request overtakes a message that waits for its receive. Only another read
// overtakes a read whose response the peer has not acknowledged, since a retransmission of the response reads again.
//
// # Acknowledgements
//
// Every packet carries acknowledgements. A No-op carries nothing else. Like every packet it consumes a psn, and as an
// initiator's transaction it has an XID, which the peer acknowledges; so has Last NULL. The receiver sends a No-op at
// the end of a turn in which all open transactions have completed; after Parameters.Stretch packets;
// rdma.Timing.AckDelay after an unacknowledged packet; and when a hole appears.
//
// Two ends that acknowledged each other's acknowledgements would never fall silent. So a No-op requests an
// acknowledgement only if it acknowledges a request for the first time, or nothing at all while nothing is outstanding,
// which makes it a probe; its XID is acknowledged by the next packet, or when No-ops occupy half of the window. If a
// sender waits for room in a window full of No-ops, they do request acknowledgements. A sender whose tal_trans_window
// is full has no XID for a No-op: it repeats the latest acknowledged one, which the peer's transaction layer drops.
//
// A soft shutdown ends when the peer's ack_xid covers Last NULL and the peer's own Last NULL has arrived.
//
// # Losses
//
// A hole is no proof of a loss, since planes reorder relative to each other. But a single plane keeps order, apart from
// moments (reordering). A packet is lost if packets sent later on the same path have arrived, or if an acknowledgement
// still shows it missing after the time that acknowledgements take. A timeout retransmits the oldest packets on other
// paths. When a path is removed or loses its share, its packets in flight are retransmitted at once, with the same
// psns.
//
// Only the UDP checksum protects packets: SUPERp has no checksum.
//
// # Congestion
//
// The connections to one peer share a window (transport/internal/congestion), which limits the packets with data in
// flight in addition to the send window. A loss reduces it once a later packet on the same path has arrived: a path
// that delivers nothing is not congested but dead. All packets are ECN-capable, and an end reports marked ones by a
// reserved bit of the TAL header (echo), if both ends do.
//
// # Encapsulation
//
// Packets travel in UDP/IP, or with Config.SUNH in frames with SUNH, each through the device of its path. SUNH has no
// length field, and Ethernet pads short frames. Padding behind operations without data is ignored (sunh.go), and so is
// that of a short read response. Other packets with data are never short: the last packet of a transaction has sunhTail
// bytes or more, and the packet of a short WRITE contains it twice.
//
// With SUNHConfig.Lite there is no packet delivery layer (SUPERp-lite). No retransmission can carry an acknowledgement
// there, and No-ops use up more XIDs; so one waits for a free XID, for a quarter of Parameters.TransactionTimeout,
// before it repeats one. The sender's window is kept with packets that count as acknowledged when they are sent, so
// that requests and replies take the same way through this package; only the timer of transactions notices a loss.
//
// # Connection management
//
// [Agent] makes connections on request of a connection manager such as [Manager], which also restarts those that fail
// (supervise.go); package endpoint is a process with an agent. Connections of rdma.Device are set up by
// fare.v1.ConnectionService instead.
package superp
