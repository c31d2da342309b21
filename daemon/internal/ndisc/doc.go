// Package ndisc finds the neighbour of an unnumbered BGP session: the link-local address
// of the leaf at the other end of a device, and lets the leaf find ours.
//
// Leaves that offer interface peering (FRR's "neighbor eth0 interface", SONiC, Cumulus)
// learn a neighbour from its router advertisements and send their own. So for each
// device asked for, a goroutine
//
//   - solicits routers until one is heard (RFC 4861, Section 6.3.7),
//   - advertises itself when it starts, three times in quick succession and then
//     periodically (Section 6.2.4), soon after a session began to connect, and in
//     answer to solicitations (Section 6.2.6), always
//     with a router lifetime of zero: we are not a default router and no host on the
//     link may take us for one (Section 4.2),
//   - takes the source address of the advertisements it hears for the neighbour's
//     (Section 6.1.2: a link-local source and a hop limit of 255, so from this link).
//
// The lifetime that the leaf advertises is ignored: that it speaks is what counts. Of
// several routers on one link the last heard counts; that is logged, because an
// unnumbered session needs a link with two ends.
//
// The intervals are fixed instead of random as Section 6.2.4 wants it: with two
// speakers on a link there is nobody to fall into step with.
//
// Raw ICMPv6 needs CAP_NET_RAW. Without it the session can name the leaf's link-local
// address in the configuration, and nothing of this package is used.
package ndisc
