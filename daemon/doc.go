// Package daemon implements fared: it connects the pure cores (fare, wecmp) to BGP, netlink, the data plane and the
// API.
//
// # Structure
//
// The loop makes every decision, one turn at a time, by daemon/internal/core. Every input reaches it as a core.Event;
// every decision leaves it as a desired state that another component applies. While the loop waits, the goroutine of a
// session that has received an UPDATE runs the turn itself, then sends the result:
//
//	leaf UPDATE -> guard -> speaker (GoBGP) --ready--+
//	netlink -> link ------------------------ready----+--> loop: Core.Step(Event) --> data-plane client (operations)
//	acks <- data-plane client --------------ready----+         |                 --> speaker (advertised routes)
//	gRPC drain, reload, SIGHUP, timers ----calls-----+         +--> status.Builder (immutable views)
//
// Source ports are chosen on whichever goroutine displays or pins them. If the data plane must be queried for its flow
// hash, a separate goroutine sends the queries and notifies the loop when an answer has arrived.
//
// The core has no goroutine, socket or clock, and only Step changes it: the same events give the same state and the
// same bytes. Recording and `fared replay` rely on this.
//
// # Roles
//
// A server is a stub speaker (draft-xu-rtgwg-fare-in-sun-02, Section 3): it advertises its own loopbacks on every
// session with the bandwidth of that session's sub-port and weighs the received routes. A leaf is a transit node for
// labs: it receives routes, recomputes path bandwidth at node granularity and readvertises them. A leaf with a data
// plane forwards to the next nodes by their weights, with groups and destinations like a server's, but without
// loopbacks, slots and source ports.
package daemon
