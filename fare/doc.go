// Package fare knows what routes say about bandwidth and what follows for each
// destination: the communities' codecs, the path-bandwidth table, and what a
// leaf readvertises. It is pure: no goroutine, clock, logger or I/O, and the
// same events give the same bytes.
//
// # Words
//
// A plane is one of several independent parallel networks; a sub-port is one
// physical lane of a plane on this machine, one network device; a session is
// one BGP session over one sub-port; a node is the BGP speaker at its other
// end, known by its BGP identifier; a destination is a remote loopback.
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
// if they differ. A route that the neighbour itself originated (its AS_PATH
// holds only the neighbour's AS) describes the sub-port it came over, not the
// node: then b(n) = sum over those sub-ports of min(sub-port, value). That is
// how a leaf sums the two halves of a server's Y-cable. Of a node that says
// something, what it leaves unsaid counts with local link speed; a node that
// says nothing is missing a value.
//
// A leaf uses the routes with the shortest AS path alone, a server all.
//
// The sum is split over the sub-ports toward each node in proportion to their
// speed (or to the lower of speed and value, where values describe sub-ports),
// in lowest terms. Numbers within half a millionth of a simple ratio are brought
// to it, for a value may have been rounded to float32 several times on its way.
// What a leaf tells several others that pass it on to where it is added up is
// shared by [Bandwidth.Part]. [MissingPolicy] and [ZeroPolicy] say what happens
// when some values are missing or all are zero; [Rule] tells which applied.
//
// # Groups
//
// Destinations whose routes say the same on the same sessions share a group.
// The table computes per group, so the loss of a sub-port, a session or a whole
// leaf costs one [GroupSet] per group and touches no destination. Two devices
// make that hold:
//
//   - A route belongs to a generation, one incarnation of its session. When the
//     session is gone, so are its routes, without anybody walking them; what
//     they leave behind is forgotten when the destination is next touched, at
//     the session's next [EndOfRIB], or when it outweighs what is alive.
//   - Sessions are ranked by plane and sub-port, and a group's entries sorted
//     by rank, so that everything behind one link or plane is one range.
//
// Nothing is allocated per event in the steady state: groups, destinations and
// attribute sets that are no longer needed are used again.
//
// # Implemented
//
//   - RFC 10005 (BGP Link Bandwidth): reading of both transitivities, zero,
//     invalid values, several communities, missing values; writing of the
//     transitive form.
//   - RFC 4360, Sections 2 and 3.1; RFC 6793 (AS_TRANS); RFC 4724, Section 2
//     (end-of-RIB); RFC 7606 (treat as withdraw).
//   - RFC 4271, Section 9.1.2.2 a (shortest AS path), by a leaf.
//   - draft-xu-rtgwg-fare-in-sun-02, Sections 1 and 3: path bandwidth per plane
//     and pair, at server and leaf.
package fare
