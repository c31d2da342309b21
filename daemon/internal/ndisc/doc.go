// Package ndisc finds the neighbor of an unnumbered BGP session, the link-local address
// of the leaf at the other end of a device, and advertises this host to the leaf.
//
// Leaves that offer interface peering (FRR's "neighbor eth0 interface", SONiC, Cumulus)
// learn a neighbor from its router advertisements and send their own. So for each
// requested device, a goroutine
//
//   - solicits routers until one answers (RFC 4861, Section 6.3.7),
//   - advertises itself when it starts, three times in quick succession and then
//     periodically (Section 6.2.4), soon after a session began to connect, and in
//     answer to solicitations (Section 6.2.6), always
//     with a router lifetime of zero, because this host is not a default router
//     (Section 4.2),
//   - uses the source address of received advertisements as the neighbor's
//     (Section 6.1.2: a link-local source and a hop limit of 255, so from this link).
//
// The lifetime in the leaf's advertisements is ignored. If a link has several routers,
// the last advertisement counts and a warning is logged, because an unnumbered session
// needs a link with two ends.
//
// The intervals are fixed. Section 6.2.4 requires random ones against synchronization
// among many routers; this link has two speakers.
//
// Raw ICMPv6 needs CAP_NET_RAW. Without it, configure the leaf's link-local address as
// the session's peer; this package is then unused.
package ndisc
