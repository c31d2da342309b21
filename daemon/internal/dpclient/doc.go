// Package dpclient is the client of fare.v1.DataplaneService: it keeps a data plane in the state that the control plane
// wants, across failures of the stream between them.
//
// # Interface
//
// The owner (the daemon's loop) declares objects: SetSubPort, SetVector, DeleteVector, SetDestination,
// DeleteDestination. None of these calls blocks; equal input does nothing. Each returns the number of the change.
// Declared state coalesces: if an object changes faster than the data plane accepts operations, only its latest state
// is sent. Ready and Take report, object by object, up to which change the object is in effect.
//
// # Order
//
// Operations on the stream have five classes, and an earlier class always precedes a later one: sub-port states, vector
// sets, destination sets, destination deletes, vector deletes. So every destination finds its vector, nothing is
// removed before its replacement exists, and the fast path, a failed sub-port, overtakes all queued operations; at most
// Window operations that were already sent precede it.
//
// # Read back, diff, send
//
// After Hello the client opens the stream, which ends that of any other client, then reads back the data plane's state,
// and only then sends the difference (Diff). If an acknowledgement is late or invalid, it starts over.
//
// The owner assigns vector numbers, and they are meaningless after a restart: vector 1 may be another vector then.
// Setting it in place would move the traffic of every destination that still uses the old vector. The client therefore
// uses separate numbers on the wire: a vector that was read back is recognized by its content, any other vector gets an
// unused number, preferably the owner's number (so that without a restart the numbers are equal).
//
// # Bulk changes
//
// The changes of a Transaction are sent as one difference. If nearly all destinations of a vector change to the same
// other vector, that vector takes the number on the wire instead: one operation, however many destinations (take.go).
//
// # Refusals
//
// The client alone retries: the data plane forgets an operation that it refused. A refusal whose reason lies in the
// layer below the data plane may pass while nothing changes here, so such operations are sent again when the data plane
// reports that one may succeed (ProgramResponse.retry), and after a pause that doubles from 1 s to 30 s (retry.go). All
// others are functions of the wanted state, of Forwarding and of the stream.
//
// # Start
//
// Until ReleaseRemovals(true), state that was read back and that this client did not program stays unchanged: the
// client sends additions but deletes nothing, so that nothing in effect is degraded before the control plane has
// received all routes. Sub-port states are always sent.
//
// An owner that knows which part of the state that was read back has to stay (Event.State) declares this part with the
// rest, and releases changes first (ReleaseChanges): then declared destinations and vectors may change, and
// destinations without a declaration stay.
//
// # Structure
//
// The state is pure (no I/O, no goroutine, no clock), in four types with an invariant each: wanted has the declared
// objects, places the vectors on the wire, queues the order of sending, flights the operations without an answer. book
// coordinates them. It is the only basis of operations; the owner shows its readers the state that Take has reported.
//
// Client wraps book in a mutex and transfers messages. Run's goroutine sends, or with Flush the caller while nothing is
// in flight, one receives, one watches for a stall; Run returns after all have ended.
package dpclient
