package bfd

import "sync/atomic"

// Drop is the reason for which a received packet was discarded.
type Drop uint8

// The reasons. The zero value means that the packet was accepted.
const (
	Accepted           Drop = iota
	HopLimit                // TTL or hop limit below 255: it has crossed a router (RFC 5881, Section 5)
	Malformed               // refused by ParsePacket
	UnknownSource           // Your Discriminator 0 from an address without a session
	UnknownSession          // Your Discriminator is none of ours at this address
	Disabled                // the session is AdminDown
	OtherAddress            // not the source address with which the session came up
	OtherPort               // not the source port with which the session came up (RFC 5881, Section 4)
	OtherDiscriminator      // not the My Discriminator with which the session came up
	AuthMissing             // the session has authentication, the packet has none
	AuthUnexpected          // the packet has authentication, the session has none
	AuthOtherType           // authentication of another type than the session's
	AuthLength              // the length of the authentication section is not that of its type
	AuthUnknownKey          // the key ID is none of the session's
	AuthSequence            // the sequence number is outside of the window, such as that of a repeated packet
	AuthDigest              // the digest is not that of the key: the other end has another key, or the packet is forged
	numDrops
)

// String returns the metric label.
func (d Drop) String() string {
	return [...]string{"accepted", "hop_limit", "malformed", "unknown_source", "unknown_session", "disabled", "other_address", "other_port", "other_discriminator",
		"auth_missing", "auth_unexpected", "auth_type", "auth_length", "auth_key", "auth_sequence", "auth_digest"}[d]
}

// Drops lists every reason except Accepted, in order.
func Drops() []Drop {
	all := make([]Drop, 0, numDrops-1)
	for d := Accepted + 1; d < numDrops; d++ {
		all = append(all, d)
	}
	return all
}

// Counters counts the discarded packets of a neighbor, over successive sessions. A packet belongs to the session of its
// source address. One from an address without a session belongs to the session of its discriminator, or else counts for
// every session of the local address. The zero value is ready for use; any goroutine may read it.
type Counters struct{ dropped [numDrops]atomic.Uint64 }

// Dropped returns the number of packets that were discarded because of d.
func (c *Counters) Dropped(d Drop) uint64 { return c.dropped[d].Load() }
