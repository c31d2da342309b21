// Package interop holds the tests of fared against other BGP daemons: FRR, BIRD and
// GoBGP, as distributions package them, on leaves that are network namespaces.
//
// The fabric of a test (fabric_test.go) has two planes and two servers with two sub-ports
// in each plane. A plane is one leaf, or two leaves with a link between them and a server
// at each:
//
//	          plane 0                      plane 1
//	          leaf 0                       leaf 1
//	     p0l0/ / \ \p0l1              p1l0/ / \ \p1l1
//	server 0 ==   == server 1        server 0 ==   == server 1
//
// Each sub-port has a /31 and a /64 with an IPv4 and an IPv6 session, or one unnumbered
// session for both families. The fared binary is built once and runs in the servers'
// namespaces with the in-memory data plane. The tests read its weights with `fared weights`,
// and its advertisements from the tables and kernels of the leaves.
//
// The speed of a sub-port is 4 Gbit/s and not 400, because FRR through 10.7.0 sums in 32 bits of
// bytes a second; ignored_test.go has 400G and 1.6T.
//
// faredleaf_test.go has the same fabric with fared leaves, which forward by
// `fared dataplane`: packets cross them.
//
// packets_test.go has servers with `fared dataplane` behind unnumbered sessions to FRR: packets of slots from server 0
// to server 1 are counted at the far end of every cable, and their distribution must follow from the cables that are
// up.
//
// The tests need root and the packages frr, bird2 and gobgpd; without them they are
// skipped, or fail if FARED_REQUIRE_ALL=1.
package interop
