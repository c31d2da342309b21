// Package guard reads the messages of a leaf, which is not trusted, on behalf of the owner of the routes and of the
// embedded BGP speaker, which a single malformed packet could crash. The speaker never parses an octet from the
// network: it receives only messages that the guard has composed from the parsed input, and no UPDATE at all.
//
//	leaf  --FromPeer-->  frame, judge  --OPEN, ROUTE-REFRESH-->  speaker
//	                               \---changes of routes------>  owner
//	leaf  <--FromSpeaker--  next hops, communities, capabilities  --  speaker
//
// The guard processes octets only: it has no sockets, no goroutines, no clock, no BGP library. One Guard serves one
// connection; the Counters outlive it. Passing a message allocates nothing, except the attributes of an announcement
// that differ from the previous ones: one object, which all its prefixes share.
//
// # From the peer
//
// A message is framed (RFC 4271, Section 6.1), checked against the session state (Section 6.6, RFC 6608), and then
// parsed:
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
//     inside the accepted ranges; the next hop must be one that Config.NextHop
//     accepts, by default the peer. AS_PATH
//     has sequences only (RFC 9774), starts with the peer's AS, has no AS 0
//     (RFC 7607), and contains ours at most as often as permitted (never by
//     default).
//   - ROUTE-REFRESH passes for a family in use, one at a time (see Refresh). A
//     NOTIFICATION is reported as PeerClosed.
//
// The guard keeps the peer's table: the prefixes that passed, with their attributes. From an UPDATE it reports the
// changes of this table and the first End-of-RIB of each family (TakeChanges); an announcement that is equal to the
// previous one is no change, and neither is a withdrawal of an unknown prefix. Growth beyond Config.MaxPrefixes ends
// the session with Cease (RFC 4486, Section 4), so its memory does not grow with the peer's messages. Only attributes
// with a reader are kept: communities (RFC 1997, RFC 8092) are checked and dropped, except that signals of maintenance
// are noted (fare.Signals), and an AS_PATH of more than MaxASPath numbers withdraws the route, so a route takes at most
// about a kilobyte.
//
// The guard remembers the refused routes that may hide servers, by reason and with an example (TakeRefused), until the
// peer withdraws them or announces acceptable ones.
//
// # Extended communities
//
// Link Bandwidth (RFC 10005) in both forms and the configured FARE code point pass, at most MaxCommunities per route,
// including the one that decides the bandwidth, and the lowest extended Link Bandwidth (RFC 5701). The speaker would
// encode Link Bandwidth without preserving transitivity, so on the way to the peer all these communities pass through
// it as a type that is unknown to it; see Carrier.
//
// # From the speaker
//
// The speaker is trusted, but its messages are parsed by the same code. The OPEN is composed from the configuration,
// with the speaker's hold time and restart state. Next hops become ours; IPv4 prefixes are sent by MP_REACH with an
// IPv6 next hop if there is no IPv4 one and both sides announced it (RFC 8950). Communities are unwrapped, and the
// non-transitive Link Bandwidth is sent only if configured. A peer with 2-octet AS numbers gets AS_TRANS and AS4_PATH
// (RFC 6793, Section 4.2.2). A route that cannot be announced is withdrawn, so that no older version remains at the
// peer.
//
// # Counting
//
// In each Direction and Unit, received = passed + dropped by each Reason of the unit. A route that is treated as
// withdrawn counts under the reason for it; each of its attributes counts separately.
package guard
