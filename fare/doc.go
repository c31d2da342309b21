// Package fare computes each destination's path bandwidth from the bandwidths
// that routes advertise. It holds the communities' codecs, the path-bandwidth
// table, and the readvertisement of a leaf. It is pure: it has no goroutine,
// clock, logger or I/O, and equal events yield equal bytes.
//
// # Words
//
// A plane is one of several independent parallel networks. A sub-port is one
// physical lane of a plane on this machine, one network device. A session is one
// BGP session over one sub-port. A node is the BGP speaker at its other end,
// identified by its BGP identifier. A destination is a remote loopback.
//
// # The computation
//
// For every plane p and destination d
//
//	B(p, d) = sum over the nodes n that advertise d of b(n)
//	b(n)    = min(sum of the usable local sub-ports toward n, value n advertised)
//
// A sub-port is usable toward n when it has carrier and a known speed, is not
// drained, and a session over it to n is up and carries the route. Several
// sessions to one node count each sub-port once and the value once, the lowest
// if they differ. At a leaf, over a sub-port toward servers ([SubPort].Uplink is
// false), a route that the neighbor itself originated (its AS_PATH holds only
// the neighbor's AS) describes the sub-port it came over, not the node: then
// b(n) = sum over those sub-ports of min(sub-port, value). In this way a leaf
// sums the two halves of a server's Y-cable. A server never concludes that from
// an AS path, because as-override and remove-private-AS at a leaf hide the
// origin. A node is a pair of AS number and BGP identifier (RFC 6286). If a node
// advertises a value on some of its sessions, the sub-ports of the other
// sessions count with local link speed; a node without any value is missing a
// value.
//
// A leaf uses only the routes with the shortest AS path; a server uses all
// routes.
//
// The sum is split over the sub-ports toward each node in proportion to their
// speed (or to the lower of speed and value, where values describe sub-ports),
// in lowest terms. Numbers within half a millionth of a simple ratio are
// replaced by that ratio, because a value may have been rounded to float32
// several times on its way. A leaf that advertises to several neighbors, whose
// values are summed further on, divides its bandwidth among them by
// [Bandwidth.Part]. [MissingPolicy] and [ZeroPolicy] decide about destinations
// with some values missing or all values zero; [Rule] names the rule that
// applied.
//
// # Signals
//
// A route with one of [Config].LeastPreferred ([Signals]: GRACEFUL_SHUTDOWN, LLGR_STALE, a prepended path)
// counts only for a destination that the other routes do not reach, or reach with zero bandwidth alone. So
// a plane whose leaf is about to end carries nothing while another plane is left, and the ratio of the
// others is as if the plane had failed.
//
// # Avoidances
//
// A plane that loses packets toward one destination may be avoided there ([Avoid], [UnprovedPolicy]): it has no
// bandwidth toward that destination while another plane has. A route with signals comes before an avoided plane, an
// origin that [ConflictPolicy] refuses does not. Avoided planes are part of the entries, so such a destination has
// another group, and no event of a table without avoidances has a cost.
//
// # Origins
//
// An origin is the last AS number of a path, where the path shows it
// ([OriginOf]). Several origins of one destination are a conflict
// ([GroupView].Origins, [Stats].Conflicts): a mistake, a theft, or anycast.
// [ConflictPolicy] decides which routes count then. Paths reveal neither a
// forged origin nor different servers that share an AS.
//
// # Groups
//
// Destinations with equal values on the same sessions share a group. The table
// computes per group, so the loss of a sub-port, a session or a whole leaf costs
// one [GroupSet] per group and touches no destination. Two devices make this
// possible:
//
//   - A route belongs to a generation, one incarnation of its session. When the
//     session ends, its routes end with it, and the table does not walk them. Their
//     remains are removed when the destination is next touched, at the session's
//     next [EndOfRIB], or when they outnumber the live routes.
//   - Sessions are ranked by plane and sub-port, and a group's entries are sorted
//     by rank, so that all entries behind one link or plane form one range.
//
// Events allocate nothing in the steady state: unused groups, destinations and
// attribute sets are recycled.
//
// # Implemented
//
//   - RFC 10005 (BGP Link Bandwidth): reading of both transitivities, zero,
//     invalid values, several communities, missing values; writing of the
//     transitive form.
//   - RFC 4360, Sections 2 and 3.1; RFC 6793 (AS_TRANS); RFC 4724, Section 2
//     (end-of-RIB); RFC 7606 (treat as withdraw).
//   - RFC 4271, Section 9.1.2.2 a (shortest AS path), by a leaf.
//   - RFC 8326 (receiver of GRACEFUL_SHUTDOWN); RFC 9494, Section 4.3 (LLGR_STALE is least preferred).
//   - draft-xu-rtgwg-fare-in-sun-02, Sections 1 and 3: path bandwidth per plane
//     and pair, at server and leaf.
package fare
