// Package dataplane is the client of fare.v1.DataplaneService: it makes a data plane obey what the control plane wants,
// whatever happens to the stream between them.
//
// # Seam
//
// The owner (the daemon's loop) declares objects: SetSubPort, SetGroup, DeleteGroup, SetDestination,
// DeleteDestination. None of them blocks; equal input does nothing. Each returns the number of the change. Declared
// state coalesces: what changes faster than the data plane takes it is sent once, as it is by then. Knock and Take bring
// back what is in effect, object by object, up to which change.
//
// # Order
//
// One stream, operations in five classes, an earlier class always before a later one: sub-port states, group sets,
// destination sets, destination deletes, group deletes. So every destination finds its group, nothing is taken away
// before its replacement is there, and the fast path, a sub-port that was lost, overtakes everything that is queued; at
// most Window operations that were already sent are before it.
//
// # Read back, diff, send
//
// After Hello the client opens the stream, which ends that of any other client, then reads back, and only then sends: the
// difference (Diff). On an acknowledgement that does not come in time, or that makes no sense, it starts over.
//
// Group numbers belong to the owner, and mean nothing after a restart: group 1 may be another vector then. Setting it in
// place would move the traffic of every destination that still uses the old one. The client therefore keeps numbers of
// its own on the wire: a group that was read back is recognised by its content, any other gets a number that nothing
// uses, the owner's own number if that is free (so that without a restart the numbers are the same).
//
// # Start
//
// Until ReleaseRemovals(true), what was read back and not programmed by this client stays as it is: additions are sent,
// nothing is deleted, nothing in effect gets worse because the control plane has not learned everything yet. Sub-port
// states are always sent.
//
// # Structure
//
// book is pure bookkeeping (no I/O, no goroutine, no clock): what is wanted, sent and in effect, and what to send next.
// Client wraps it in a mutex and moves messages. Run's goroutine sends, one receives, one watches for a stall; Run
// returns after all have ended.
package dataplane
