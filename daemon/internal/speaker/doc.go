// Package speaker keeps the BGP sessions of one server, or of a leaf, and is
// the only user of GoBGP.
//
// # What stands where
//
// For every session there is one BgpServer, so a route of one leaf has no way
// to another (FARE-in-SUN: a server is a stub) and each session announces its
// own bandwidth. GoBGP never sees an octet from the network: the speaker owns
// the TCP connection to the leaf, and what comes over it goes through package
// guard and over a connection on the loopback to the session's BgpServer, which
// listens there and has one passive neighbour.
//
//	leaf <--TCP--> incarnation <--guard--> 127.0.0.1 <--> BgpServer --watch--> queue --Take--> owner
//
//	speaker.go      the seam: New, Run, Take, Advertise, SetAdminState, Status
//	session.go      one session through its incarnations: when to connect
//	incarnation.go  one connection, from the OPENs to its end
//	socket.go       what a socket needs: namespace, device, TTL, MD5, timeouts
//	listen.go       connections of passive sessions
//	bfd.go          BFD beside a session
//	gobgp.go        the calls of GoBGP; world.go: starting its servers
//	convert.go      GoBGP's paths and ours
//	advertise.go    what is wanted against what is originated
//	queue.go        what the owner has not yet taken
//	reread.go       what GoBGP holds against what was delivered
//
// # Incarnations and generations
//
// Every TCP connection is an incarnation with the next generation number. It
// has a guard, a neighbour in GoBGP that was added for it and is deleted after
// it, so that GoBGP's idle time of 5 s never delays a new one, and a watch whose
// callback knows the generation. Loss is reported by whoever notices it first,
// before anything is torn down; from then on the queue takes nothing of that
// generation.
//
// An incarnation exchanges OPEN and the first KEEPALIVE itself. GoBGP gets the
// peer, its AS known by then, only when both ends have confirmed; its own OPEN
// is swallowed, its KEEPALIVEs, UPDATEs and NOTIFICATIONs go out through the
// guard. Its hold timer is the session's. A peer without one (hold time 0) is
// refused, for its silence would never be noticed.
//
// After a loss the session connects at once, then after 50 ms, doubling up to
// Config.ConnectRetry. SetAdminState needs no timer in either direction.
//
// # Bounds
//
// All queues of GoBGP are unbounded. After a long UPDATE, and after every 4 KiB
// of short ones, an End-of-RIB of our own follows them in, and the watch brings
// it out again. The next long UPDATE waits for that, short ones go on until a
// second is inside: beyond that the leaf is not read, and TCP tells it. The
// queue toward the owner holds one event a prefix.
//
// # Several servers in a process
//
// StartBgp writes two package variables of GoBGP that every server reads; New
// makes all others of the process stand still meanwhile, see world.go. GoBGP's
// server goroutine cannot be ended: each session leaves one behind, idle, when
// Run has returned. That matters to processes that make many Speakers, like
// tests, not to a daemon.
//
// The local hop has TCP MD5 signatures with a key of the process if the kernel
// and Go's multipath TCP setting allow it (GODEBUG multipathtcp=0); that the
// connection GoBGP accepted is ours is checked by its port in any case.
//
// # Graceful restart
//
// With Config.RestartTime the OPENs announce RFC 4724 with the F bit, since the
// data plane forwards without us, and Run ends connections without
// NOTIFICATION: the peers keep our routes while fared restarts. In the other
// role nothing is kept: a session that is lost is lost at once, because what the
// weights follow is what the leaf can carry now, and the next session's
// End-of-RIB says when all is there again. End-of-RIB is sent to every peer
// after the full set, graceful restart or not (RFC 4724, Section 2 allows it).
//
// # Sources
//
// RFC 4271 (BGP-4), RFC 2385 (TCP MD5), RFC 2918 (route refresh), RFC 4486
// (Cease subcodes), RFC 4724 (graceful restart), RFC 4760 (multiprotocol), RFC
// 5082 (GTSM), RFC 5482 (TCP user timeout), RFC 5882 (BFD and its clients), RFC
// 6793 (four-octet AS), RFC 8950 (IPv4 with IPv6 next hops), RFC 9384 (Cease, BFD
// Down), RFC 10005 (Link Bandwidth).
package speaker
