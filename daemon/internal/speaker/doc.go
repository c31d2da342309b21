// Package speaker runs the BGP sessions of a server or a leaf. It is the only user of GoBGP.
//
// # Structure
//
// Every session has its own BgpServer, so that a route of one leaf cannot reach another leaf (FARE-in-SUN: a server is
// a stub) and each session announces its own bandwidth. GoBGP never parses an octet from the network: the speaker owns
// the TCP connection to the leaf. Package guard reads the received octets. Changes of routes go from it to the owner;
// GoBGP receives the leaf's OPEN, ROUTE-REFRESHes and KEEPALIVEs, by a loopback connection to the session's BgpServer,
// which listens there and has one passive neighbor. So GoBGP holds no route of a leaf, and its part is the session's
// timers and the announcements to the leaf.
//
//	leaf --TCP--> incarnation --guard--> queue --Take--> owner
//	leaf <--TCP-- incarnation <--guard--> 127.0.0.1 <--> BgpServer
//
//	speaker.go      the API: New, Run, Take, Advertise, SetAdminState, Status
//	session.go      one session across its incarnations: when to connect
//	open.go         our OPEN
//	incarnation.go  one connection, from the OPENs to its end
//	socket.go       socket setup: namespace, device, TTL, MD5, timeouts
//	ao.go           TCP-AO
//	subnet.go       next hops of the subnet
//	listen.go       connections of passive sessions
//	admit.go        which connections of a peer reach a passive session
//	bfd.go          the BFD session that precedes and protects a BGP session
//	gobgp.go        the calls of GoBGP; world.go: starting its servers
//	budget.go       limits of a peer's cost in time and memory
//	liveness.go     replacing a GoBGP that failed
//	convert.go      conversion of our routes to GoBGP's paths
//	advertise.go    the wanted set and the originated set
//	pace.go         how often a bandwidth may rise
//	queue.go        events that the owner has not drained yet
//
// # Incarnations and generations
//
// Every TCP connection is an incarnation with the next generation number. It has a guard, a neighbor in GoBGP that is
// added for it and deleted after it (so that GoBGP's idle time of 5 s never delays the next incarnation), and a watch
// whose callback knows the generation. The component that detects a failure first reports it, before any teardown. From
// then on the queue accepts no event of that generation.
//
// An incarnation exchanges OPEN and the first KEEPALIVE itself. When both ends have confirmed, the session is
// established: the owner receives SessionUp and the peer's routes. GoBGP receives the peer, whose AS is known by then,
// meanwhile. The guard drops GoBGP's own OPEN and forwards its KEEPALIVEs, UPDATEs and NOTIFICATIONs. GoBGP's hold
// timer is the session's hold timer: a KEEPALIVE tells GoBGP of the peer's messages, a thirtieth of the hold time after
// the first of them. A peer that offers hold time 0 is refused, because its silence would never be detected.
//
// After a failure the session reconnects immediately, then after 1 ms, doubling up to Config.ConnectRetry.
// SetAdminState takes effect without a timer in both directions.
//
// # Bounds
//
// The queue toward the owner holds one change per prefix, and Take returns at most quota changed routes of a session
// per call. Each session has a budget (budget.go): a peer that exceeds its budget is read slowly, then receives Cease,
// and the pause before its next session grows. All queues of GoBGP are unbounded: a peer that does not read receives no
// further routes until it reads again.
//
// # Confirmation of advertisements
//
// GoBGP does not report which messages it has sent. When AdvertiseMarked asks for a report, a mark follows the steps of
// the set into GoBGP: a prefix that no route may have (guard.Mark), announced and withdrawn. GoBGP sends in order, and
// only a change of its table causes a withdrawal, so everything before the mark is on the connection when the guard
// removes the withdrawal from the stream. The report waits until the peer's TCP has acknowledged these octets. A table
// of sent routes cannot replace the mark: it cannot distinguish a withdrawal that was sent from an announcement that is
// still queued.
//
// # When GoBGP fails
//
// GoBGP's goroutines can end or hang: one EMFILE in accept ends its listener permanently. The speaker detects such a
// failure by GoBGP's log, by calls that do not return (an established session occasionally makes one), by a hold timer
// that ignores messages and by a silent local hop. The speaker then replaces the BgpServer of this session alone and
// reports this host, not the peer, as the cause. See liveness.go.
//
// # Several servers in a process
//
// StartBgp writes two package variables of GoBGP that every server reads; New pauses all other servers of the process
// meanwhile, see world.go. GoBGP's server goroutine cannot be ended: each session leaves one idle goroutine behind when
// Run has returned. That matters to processes that create many Speakers, like tests, not to a daemon.
//
// The local hop has TCP MD5 signatures with a key of the process; without them New fails, because any local user could
// end the sessions. They need a kernel with CONFIG_TCP_MD5SIG, and GODEBUG multipathtcp=0, which go.mod sets. In
// addition the source port proves that the connection accepted by GoBGP is ours.
//
// # Graceful restart
//
// Every OPEN announces RFC 4724, because FRR sends End-of-RIB only to peers that announce it. Without
// Config.RestartTime the capability lists no family, which means End-of-RIB only (Section 3). With it the capability
// lists the families with the F bit, since the data plane forwards independently of this process, R is set until the
// session has been established once, and Run closes connections without NOTIFICATION: the peers keep our routes while
// fared restarts. As the receiving speaker, fared keeps nothing: the routes of a session end with it, because weights
// follow the leaf's current capacity, and the next session's End-of-RIB completes the new set. End-of-RIB is sent to
// every peer after the full set, with or without graceful restart (RFC 4724, Section 2 allows it).
//
// # Sources
//
// RFC 4271 (BGP-4), RFC 2385 (TCP MD5), RFC 5925 (TCP-AO), RFC 2918 (route refresh), RFC 4486 (Cease subcodes), RFC
// 4724 (graceful restart), RFC 4760 (multiprotocol), RFC 5082 (GTSM), RFC 5482 (TCP user timeout), RFC 5882 (BFD and
// its clients), RFC 6793 (four-octet AS), RFC 8950 (IPv4 with IPv6 next hops), RFC 9384 (Cease, BFD Down), RFC 10005
// (Link Bandwidth).
package speaker
