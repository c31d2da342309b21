// Package wecmp converts path bandwidths to the input of a data plane: exact shares, integer weights, queue pair
// slots, source ports and an order-keeping map from addresses to slots. It is independent of BGP, does no I/O, starts
// no goroutine and reads no clock: equal calls yield equal bytes.
//
// # The way of a change
//
//	SetGroup(id, capacities) --> weights (lowest terms, fitted to the table) --+
//	SetDestination(dst, id) ---> vector = group + slot assignment ------------+--> Updates()
//
// A group is the common part of many destinations: a capacity per plane and a weight per sub-port. A vector is
// programmed into the data plane once, and many destinations point at it: it holds the group's weights plus an
// assignment of slots. Under [Reweight] the assignment is always the same, so a group has exactly one vector. Under
// [Remap] it depends on history, so a group has one vector for each assignment that its destinations have.
//
// A change of a group costs O(planes + sub-ports + slots) for each of its vectors and nothing per destination, so the
// cost of a local failure does not depend on the number of destinations (the idea of BGP PIC). The steady state
// allocates nothing. Every returned slice belongs to the engine and is valid until the engine's next input.
//
// The caller's loop is
//
//	engine.SetGroup(...)                  // any number of inputs
//	for _, u := range engine.Updates() {  // in the order to program them: add before remove
//		switch u.Kind {
//		case wecmp.VectorSet:         // program engine.Vector(u.Vector)
//		case wecmp.DestinationSet:    // point u.Destination at u.Vector
//		case wecmp.DestinationDelete: // delete u.Destination
//		case wecmp.VectorDelete:      // delete u.Vector, to which no destination points
//		}
//	}
//
// # Rules, and where they come from
//
// The requirements are those of draft-xu-rtgwg-fare-in-sun-02:
//   - Section 3, "weights": share(plane) = capacity / sum of capacities, exactly, by largest remainder (share.go).
//   - Section 3, "existing QPs traversing unaffected planes maintain their established forwarding paths": a slot has a
//     home and leaves it only under [Remap], with the least number of moves (slots.go).
//   - Section 3.1, per-flow: at least one queue pair per sub-port; source ports unique in the scope of the addressing;
//     a plane's traffic divided among its queue pairs by its sub-ports' weights, so evenly where these are equal
//     (slots.go, ports.go).
//   - Section 3.2, per-packet: one queue pair per plane is enough, sprayed over the plane's sub-ports.
//   - Section 4, memory semantics: all transactions on one address use one queue pair (order.go).
//
// Weights that exceed the limits of a data plane's table are fitted to it by largest remainder (fit.go).
package wecmp
