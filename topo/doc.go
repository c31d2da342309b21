// Package topo is the model of a multi-plane fabric. It generates the configurations of every node, wiring,
// containerlab files and drawings, and simulates failures.
//
// A [Spec] is a person's description, a dozen numbers at most. [New] numbers it into a [Fabric], in which every node,
// cable and address follows from the Spec alone. Equal Specs yield equal bytes, also in later versions and on other
// machines.
//
// # Shape
//
// A fabric has planes, which share nothing. A plane has leaves, and spines if it has more leaves than its servers could
// be wired to. A server has sub-ports in each plane, one cable each; two sub-ports of one port are the halves of a
// Y-cable. Cables go to leaves in one of two ways:
//
//	block  all sub-ports of a server go to one leaf, the first servers to the first leaf, about as many to each; spines join the leaves
//	split  the sub-ports of a server go to all leaves in turn, so that half a Y-cable stays up if the other half's leaf fails
//
// Each leaf has one uplink to each spine of its plane. Servers, leaves and spines are numbered over the whole fabric:
// leaf l is in plane l / Spec.Leaves.
//
// # Addresses
//
// Cables are /31 networks in [Spec.Underlay] and /127 networks in [Spec.Underlay6], depending on [Spec.Addresses], with
// the even address at the server's or leaf's end, in one block per plane. Loopbacks are in [Spec.Loopbacks] and
// [Spec.Loopbacks6], numbered from 1. Router IDs of leaves and spines are in 10.254.0.0/16. Every server and leaf has a
// separate AS, and the spines of a plane share one (RFC 7938, Section 5.2.1), so that a path never passes two of them.
package topo
