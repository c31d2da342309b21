// Package interop holds the tests of fared against BGP daemons that were not written
// here: FRR, BIRD and GoBGP, as their distributions package them, on leaves that are
// network namespaces.
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
// namespaces with the in-memory data plane: what it wants is read with `fared weights`,
// what it told the leaves is read from the leaves' own tables and from their kernels.
//
// Speeds are 4 Gbit/s a sub-port and not 400: FRR before July 2026 (Debian's 8.4.4 among
// them) corrupts values above 34 Gbit/s.
//
// faredleaf_test.go has the same fabric with leaves of our own, which forward by way of
// `fared dataplane`: packets cross them.
//
// The tests need root and the packages frr, bird2 and gobgpd; without them they are
// skipped, or fail if FARED_REQUIRE_ALL=1.
package interop
