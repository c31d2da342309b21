// Package guard stands between a leaf, which is not trusted, and the embedded
// BGP speaker, which a single malformed packet could end. The speaker never
// sees an octet from the network: it sees messages that the guard composed
// itself from what it understood.
//
//	leaf  --FromPeer-->  frame, judge, compose  -->  speaker
//	leaf  <--FromSpeaker--  next hops, communities, capabilities  --  speaker
//
// It knows octets only: no sockets, no goroutines, no clock, no BGP library.
// One Guard serves one connection; the Counters outlive it. Passing a message
// allocates nothing.
//
// # From the peer
//
// A message is framed (RFC 4271, Section 6.1), has to be in order (Section
// 6.6, RFC 6608), and is then taken apart:
//
//   - OPEN (RFC 4271, Section 6.2; RFC 9072): the capabilities in use are
//     multiprotocol (RFC 4760), route refresh (RFC 2918), extended next hop
//     (RFC 8950), graceful restart (RFC 4724) and 4-octet AS (RFC 6793); all
//     others are dropped. Every session is eBGP: a peer with our AS is
//     refused. The speaker is always told of a 4-octet AS and never of the
//     extended next hop.
//   - UPDATE (RFC 7606): attributes on an allow-list, each one's flags, length
//     and value checked. What RFC 7606 treats as withdrawn becomes a
//     withdrawal, what it discards is gone, what it resets ends the session.
//     Prefixes are host routes inside the accepted ranges; the next hop is the
//     peer's and replaced by a placeholder, as the speaker's user knows the
//     peer anyhow. AS_PATH has sequences only (RFC 9774), starts with the
//     peer's AS, has no AS 0 (RFC 7607) nor ours, and always leaves in four
//     octets. Prefixes of IPv4 leave the classic way, those of IPv6 by
//     MP_REACH, in as many messages as it takes.
//   - An UPDATE of which nothing is left becomes a KEEPALIVE, since the
//     speaker's hold timer has to restart all the same. End-of-RIB passes.
//   - ROUTE-REFRESH passes for a family in use. A NOTIFICATION is reported as
//     PeerClosed; the speaker gets its code without the data.
//
// The guard keeps the set of prefixes it passed. Withdrawals of others are
// forgotten, because the speaker would remember each for ever; growth beyond
// Config.MaxPrefixes ends the session with Cease (RFC 4486, Section 4). So
// neither memory grows with what a peer sends.
//
// Whenever a session ends here, the speaker gets a NOTIFICATION: a lost
// connection without one would leave the session's routes in place for a
// graceful restart.
//
// # Extended communities
//
// Link Bandwidth (RFC 10005) in both forms and the configured FARE code point
// pass, at most MaxCommunities a route. The speaker would decode Link
// Bandwidth and forget whether it was transitive, so all travel through it as
// a type that it does not know; see Carrier.
//
// # From the speaker
//
// Trusted, yet parsed by the same code. The OPEN is composed anew from the
// configuration, with the speaker's hold time and restart state. Next hops
// become ours; IPv4 prefixes go by MP_REACH with an IPv6 next hop if there is
// no IPv4 one and both sides announced it (RFC 8950). Communities are
// unwrapped, and the non-transitive Link Bandwidth never goes out. A peer of
// 2-octet AS numbers gets AS_TRANS and AS4_PATH (RFC 6793, Section 4.2.2).
// What cannot be announced is withdrawn, so that nothing older stays.
//
// # Counting
//
// In each Direction and Unit, received = passed + dropped by each Reason of
// the unit. A route that is treated as withdrawn counts under the reason that
// made it so; its attributes count each for itself.
package guard
