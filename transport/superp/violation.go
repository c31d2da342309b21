package superp

import (
	"fmt"
	"net/netip"
	"time"
)

// Violation is a kind of protocol error, as the description names them: the packet is dropped, and the connection
// manager is notified.
type Violation uint8

// The kinds of protocol errors. The comments have the sections of the description.
const (
	_                   Violation = iota
	ViolationPSN                  // the psn is beyond the receive window (Receiver flow control, 1.a)
	ViolationAckPSN               // the packet acknowledges a psn that was never sent (Sending flow control, 3.a.iii)
	ViolationPSNReuse             // this end needs a psn within two seconds of its latest transmission, and waits (Protection against wrap-around PSNs)
	ViolationAckXID               // the packet acknowledges a transaction that was not completely sent
	ViolationXID                  // a request outside of the target's window, or of a complete transaction (Receive target processing, 1)
	ViolationSeqno                // a request's seqno has arrived before, or is beyond the last one (Receive target processing, 2.b)
	ViolationEOM                  // a request has a second end (Receive target processing, 3.a)
	ViolationOpcode               // the operations of a transaction have different opcodes (Transactions)
	ViolationReplyXID             // a reply to no transaction (Receive initiator processing, 1)
	ViolationEarly                // a reply to a request that was not completely sent (Receive initiator processing, 2.a)
	ViolationReplySeqno           // a reply's seqno has arrived before, or is beyond the last one (Receive initiator processing, 2.b)
	ViolationReplyEOM             // a reply has a second end (Receive initiator processing, 3.a)
	ViolationReply                // a reply to an operation that the request does not have
	ViolationTimeout              // a transaction was not complete within tal_transaction_timeout; it ends the connection
	ViolationBlock                // SUPERp-lite: a block of data has less than 16 bytes (Small packets)
	violations
)

// The counter of each kind, and what it means for people.
var violationNames = [violations]struct{ counter, text string }{
	ViolationPSN:        {"outside_window", "psn beyond the receive window"},
	ViolationAckPSN:     {"bad_acks", "acknowledgement of a psn that was never sent"},
	ViolationPSNReuse:   {"psn_reuses", "a psn would be used again within two seconds"},
	ViolationAckXID:     {"bad_xid_acks", "acknowledgement of a transaction that was not completely sent"},
	ViolationXID:        {"bad_xids", "request outside of the window of transactions"},
	ViolationSeqno:      {"bad_seqnos", "repeated or impossible seqno of a request"},
	ViolationEOM:        {"bad_ends", "request with a second end"},
	ViolationOpcode:     {"bad_opcodes", "transaction with two opcodes"},
	ViolationReplyXID:   {"bad_reply_xids", "reply to no transaction"},
	ViolationEarly:      {"early_replies", "reply before the end of its request"},
	ViolationReplySeqno: {"bad_reply_seqnos", "repeated or impossible seqno of a reply"},
	ViolationReplyEOM:   {"bad_reply_ends", "reply with a second end"},
	ViolationReply:      {"bad_replies", "reply to no operation of its request"},
	ViolationTimeout:    {"transaction_timeouts", "transaction timeout"},
	ViolationBlock:      {"short_blocks", "block of less than 16 bytes in SUPERp-lite"},
}

func (v Violation) String() string {
	if v == 0 || v >= violations {
		return fmt.Sprintf("violation %d", uint8(v))
	}
	return violationNames[v].text
}

// ProtocolError is a protocol error on a connection, for the connection manager.
type ProtocolError struct {
	Kind   Violation
	CID    uint16 // the local one
	Remote netip.Addr
	At     time.Duration // of rdma.Host.Now
	// Of the packet. ViolationPSNReuse has PSN alone, ViolationTimeout Opcode and XID.
	PSN    uint32
	Opcode Opcode
	XID    uint16
	Seqno  uint16
}

func (e *ProtocolError) Error() string {
	return fmt.Sprintf("%v: psn %d, %v, xid %d, seqno %d", e.Kind, e.PSN, e.Opcode, e.XID, e.Seqno)
}

// violation counts and reports a protocol error.
func (c *common) violation(v Violation, p *Packet) {
	c.reportError(ProtocolError{Kind: v, PSN: p.PDL.PSN, Opcode: p.TAL.Opcode, XID: p.TAL.XID, Seqno: p.TAL.Seqno})
}

// reportError counts and reports a protocol error.
func (c *common) reportError(e ProtocolError) {
	c.core.count.violations[e.Kind]++
	c.violations++
	if f := c.core.violated; f != nil {
		e.CID, e.Remote, e.At = c.cid, c.remote, c.core.host.Now()
		f(e)
	}
}
