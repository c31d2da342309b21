// Package topo is the model of a multi-plane fabric, and everything that follows from it: configurations of every node,
// wiring, containerlab files, drawings, and a simulation of failures.
//
// A [Spec] is what a person writes, a dozen numbers at most; [New] numbers it into a [Fabric], in which every node, cable and
// address follows from the Spec alone. The same Spec gives the same bytes, today and elsewhere.
//
// # Shape
//
// A fabric has planes, which share nothing. A plane has leaves, and spines where its leaves are more than its servers could be
// wired to. A server has sub-ports in each plane, one cable each; two sub-ports of one port are the halves of a Y-cable. Cables
// go to leaves in one of two ways:
//
//	block  all sub-ports of a server go to one leaf, the first servers to the first leaf; spines join the leaves
//	split  the sub-ports of a server go to all leaves in turn, so that half a Y-cable outlives the other half's leaf
//
// Each leaf has one uplink to each spine of its plane. Servers, leaves and spines are numbered over the whole fabric: leaf l is
// in plane l / Spec.Leaves.
//
// # Addresses
//
// Cables are /31 networks in [Spec.Underlay], the server's or leaf's end even, in one block a plane; loopbacks are in
// [Spec.Loopbacks], counted from 1; router IDs of leaves and spines in 10.254.0.0/16. Every server and leaf has an AS of its
// own and the spines of a plane share one (RFC 7938, Section 5.2.1), so that a path never passes two of them.
package topo
