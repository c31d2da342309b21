// Package daemon is fared: it joins the pure cores (fare, wecmp) to the world.
//
// # Shape
//
// One goroutine, the loop, owns every decision. Everything that happens reaches it as an Event; everything it decides
// leaves it as a desired state that somebody else carries out:
//
//	leaf UPDATE -> guard -> speaker (GoBGP) --knock--+
//	netlink -> link ------------------------knock----+--> loop: Core.Step(Event) --> data-plane client (operations)
//	acks <- data-plane client --------------knock----+         |                 --> speaker (what to advertise)
//	gRPC drain, reload, SIGHUP, timers ----calls-----+         +--> status.Builder (immutable views)
//
// Source ports are chosen on whatever goroutine shows or pins them. Where the data plane has to be asked how it hashes, one
// goroutine asks, and knocks when an answer has come.
//
// The Core has no goroutine, socket or clock: the same events give the same state and the same bytes. That is what
// recording and `fared replay` rest on.
//
// # Roles
//
// A server is a stub speaker (draft-xu-rtgwg-fare-in-sun-02, Section 3): it advertises its own loopbacks on every
// session with the bandwidth of that session's sub-port and weighs what it learns. A leaf is a transit node for labs: it
// learns, recomputes path bandwidth at node granularity and readvertises. When it is given a data plane it has that forward to the
// next nodes by their weights, with groups and destinations as a server's, but without loopbacks, slots and source ports.
package daemon
