// Package status shows the daemon's state to others: immutable views, the gRPC services fare.v1.WeightService and
// fare.v1.FabricService over them, and Prometheus metrics.
//
// # Two sides
//
// The daemon's loop owns all state and never waits for a reader. On its side stands a [Builder]: the loop marks what
// changed (O(1), no allocation for what is already known) and ends each step with [Builder.Commit]. Nothing is copied.
//
// On the other side stands a [Reader]. When somebody asks, it has the loop build the next [View] from what was marked
// since the last one; many askers share one build, and when nothing is marked the last view answers without the loop.
//
// # A view is copy-on-write
//
// Destinations lie in address order in pages of at most 128; a build copies only pages that hold a marked destination,
// and the slice of pages. Weight vectors are shared by many destinations and have revisions of their own, so a lost
// sub-port costs one mark per vector however many destinations use it: a destination's revision is the later of its own
// and its vector's, taken when it is read. Address order makes pages of a list, covering-prefix filters and stable
// page tokens plain seeks.
//
// # A watch is a question about revisions
//
// "What changed after revision N?" has the same answer for a live watcher, a slow one and one that comes back:
// destinations whose revision is later, and removed ones from a bounded list of tombstones. So slow watchers see
// revisions merged without anybody keeping queues for them, and who asks for more than the tombstones remember gets a
// snapshot. Wake-ups are level-triggered (a channel that is closed and replaced).
//
// What moves without the loop's knowledge (counters of sessions, queues, the data plane) is not part of a view: it is
// read from the [Source], on the loop's goroutine, each time it is asked for ([Reader.Report]).
package status
