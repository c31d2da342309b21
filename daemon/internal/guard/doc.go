// Package guard filters the messages between a leaf, which is not trusted, and the embedded BGP speaker, which a single malformed packet could
// crash. The speaker never parses an octet from the network: it receives only messages that the guard has composed from the parsed input.
//
//	leaf  --FromPeer-->  frame, judge, compose  -->  speaker
//	leaf  <--FromSpeaker--  next hops, communities, capabilities  --  speaker
//
// The guard processes octets only: it has no sockets, no goroutines, no clock, no BGP library. One Guard serves one connection; the Counters
// outlive it. Passing a message allocates nothing.
//
// # From the peer
//
// A message is framed (RFC 4271, Section 6.1), checked against the session state (Section 6.6, RFC 6608), and then parsed:
//
//   - OPEN (RFC 4271, Section 6.2; RFC 9072): the capabilities in use are
//     multiprotocol (RFC 4760), route refresh (RFC 2918), extended next hop
//     (RFC 8950), graceful restart (RFC 4724) and 4-octet AS (RFC 6793); all
//     others are dropped. Every session is eBGP: a peer with our AS is
//     refused. The speaker's copy always announces a 4-octet AS and never the
//     extended next hop.
//   - UPDATE (RFC 7606): attributes on an allow-list, each with its flags, length
//     and value checked. A route that RFC 7606 treats as withdrawn becomes a
//     withdrawal, an attribute that it discards is dropped, and an error for
//     which it resets the session ends the session. Prefixes are host routes
//     inside the accepted ranges; the next hop must be the peer's and is replaced
//     by a placeholder, because the speaker's user knows the peer anyway. AS_PATH
//     has sequences only (RFC 9774), starts with the peer's AS, has no AS 0
//     (RFC 7607), contains ours at most as often as permitted (never by default),
//     and is always written with four octets. Prefixes of IPv4 are written in the
//     classic field, those of IPv6 in MP_REACH, in as many messages as necessary.
//   - An UPDATE without any remaining part becomes a KEEPALIVE, because the
//     speaker's hold timer must restart nevertheless. End-of-RIB passes.
//   - ROUTE-REFRESH passes for a family in use, one at a time (see Refresh), as
//     does the first End-of-RIB of a family. A NOTIFICATION is reported as
//     PeerClosed; the speaker gets its code without the data.
//
// The guard keeps the set of prefixes that it passed. It drops withdrawals of other prefixes, because the speaker would remember each of them
// forever; growth beyond Config.MaxPrefixes ends the session with Cease (RFC 4486, Section 4). So the memory of neither grows with the peer's
// messages. Only attributes with a reader pass: communities (RFC 1997, RFC 8092) are checked and dropped, and an AS_PATH of more than MaxASPath
// numbers withdraws the route, so a route takes at most about a kilobyte.
//
// Whenever a session ends here, the speaker gets a NOTIFICATION: after a connection that closes without one it would keep the session's routes
// for a graceful restart.
//
// # Extended communities
//
// Link Bandwidth (RFC 10005) in both forms and the configured FARE code point pass, at most MaxCommunities per route, including the one that
// decides the bandwidth. The speaker would decode Link Bandwidth without preserving transitivity, so all these communities pass through it as a
// type that is unknown to it; see Carrier.
//
// # From the speaker
//
// The speaker is trusted, but its messages are parsed by the same code. The OPEN is composed from the configuration, with the speaker's hold
// time and restart state. Next hops become ours; IPv4 prefixes are sent by MP_REACH with an IPv6 next hop if there is no IPv4 one and both sides
// announced it (RFC 8950). Communities are unwrapped, and the non-transitive Link Bandwidth is sent only if configured. A peer with 2-octet AS
// numbers gets AS_TRANS and AS4_PATH (RFC 6793, Section 4.2.2). A route that cannot be announced is withdrawn, so that no older version remains
// at the peer.
//
// # Counting
//
// In each Direction and Unit, received = passed + dropped by each Reason of the unit. A route that is treated as withdrawn counts under the
// reason for it; each of its attributes counts separately.
package guard
