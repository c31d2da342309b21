package superp

import "time"

// acks decides when an acknowledgement must be sent that no other packet carries.
type acks struct {
	lastXID   uint16        // ack_xid of the latest new packet; it may be ahead of target.due
	confirmed uint16        // latest ack_xid that the peer is known to have
	at        time.Duration // time at which a delayed acknowledgement is due; 0: none
	now       bool          // an acknowledgement is due at once
	answers   int           // SUPERp-lite: No-ops acknowledged at once since the latest packet with operations
	until     time.Duration // SUPERp-lite: time until which an acknowledgement waits for an XID; 0: none waits
}

// maxAnswers is the maximum of acks.answers.
const maxAnswers = 128

// isNew reports whether no new packet has acknowledged an XID.
func (a *acks) isNew(xid uint16) bool { return int16(xid-a.lastXID) > 0 }

// unconfirmed reports whether the peer may not know that an XID is acknowledged.
func (a *acks) unconfirmed(xid uint16) bool { return int16(xid-a.confirmed) > 0 }

// confirm records an ack_xid that the peer has received.
func (a *acks) confirm(xid uint16) {
	if int16(xid-a.confirmed) > 0 {
		a.confirmed = xid
	}
}

// schedule delays the acknowledgement until at, unless one is due earlier.
func (a *acks) schedule(at time.Duration) {
	if a.at == 0 {
		a.at = at
	}
}

// due reports whether to acknowledge.
func (a *acks) due(now time.Duration) bool { return a.now || a.at != 0 && now >= a.at }

// patient reports whether an acknowledgement that is due may wait for an XID, and keeps it due: it waits for limit at
// most, since the peer may be waiting, too.
func (a *acks) patient(now, limit time.Duration) bool {
	if a.until == 0 {
		a.until = now + limit
	}
	if now >= a.until {
		return false
	}
	a.now, a.at = true, a.until
	return true
}

// carried records that a packet is sent that acknowledges all, where xid is target.due. lastXID is that of new packets
// only: if the first transmission has arrived, the loss of a retransmission goes unnoticed.
func (a *acks) carried(xid uint16) {
	if !a.isNew(xid) {
		a.at, a.now, a.until = 0, false, 0
	}
}
