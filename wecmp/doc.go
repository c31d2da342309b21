// Package wecmp turns path bandwidths into what a data plane can forward by: exact shares, integer weights, queue pair
// slots, source ports and an order-keeping map from addresses to slots. It knows no BGP, does no I/O, starts no
// goroutine and reads no clock: the same calls give the same bytes.
//
// # The way of a change
//
//	SetGroup(id, capacities) --> weights (lowest terms, fitted to the table) --+
//	SetDestination(dst, id) ---> vector = group + slot assignment ------------+--> Updates()
//
// A group is what many destinations have in common: a capacity per plane and a weight per sub-port. A vector is what
// the data plane programs once and many destinations point at: the group's weights plus an assignment of slots. Under
// [Reweight] the assignment is always the same, so there is exactly one vector a group; under [Remap] it depends on
// what happened before, so a group has a vector for every assignment its destinations arrived with.
//
// A change of a group costs O(planes + sub-ports + slots) for each of its vectors and nothing per destination: that is
// how a local failure stays independent of the number of destinations (the idea of BGP PIC). The steady state
// allocates nothing; every slice handed out belongs to the engine and is valid until its next input.
//
// The caller's loop is
//
//	engine.SetGroup(...)                  // any number of inputs
//	for _, u := range engine.Updates() {  // what to program, in order: add before remove
//		switch u.Kind {
//		case wecmp.VectorSet:         // program engine.Vector(u.Vector)
//		case wecmp.DestinationSet:    // point u.Destination at u.Vector
//		case wecmp.DestinationDelete: // forget u.Destination
//		case wecmp.VectorDelete:      // forget u.Vector: nothing points at it any more
//		}
//	}
//
// # Rules, and where they come from
//
// The requirements are those of draft-xu-rtgwg-fare-in-sun-02:
//   - Section 3, "weights": share(plane) = capacity / sum of capacities, exactly, by largest remainder (share.go).
//   - Section 3, "existing QPs traversing unaffected planes maintain their established forwarding paths": a slot has a
//     home and leaves it only under [Remap], with the least number of moves (slots.go).
//   - Section 3.1, per-flow: at least one queue pair a sub-port; source ports unique as far as the addressing demands;
//     a plane's traffic shared evenly by its queue pairs (slots.go, ports.go).
//   - Section 3.2, per-packet: one queue pair a plane is enough, sprayed over the plane's sub-ports.
//   - Section 4, memory semantics: all transactions on one address use one queue pair (order.go).
//
// Weight reduction follows Zhou et al., "WCMP: Weighted Cost Multipathing for Improved Fairness in Data Centers",
// EuroSys 2014 (reduce.go).
package wecmp
