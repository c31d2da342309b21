// Package status publishes the daemon's state: immutable views, the gRPC services fare.v1.WeightService and
// fare.v1.FabricService on top of them, and Prometheus metrics.
//
// # Two sides
//
// The daemon's loop owns all state and never waits for a reader. Its side is a [Builder]: the loop marks changed
// objects (O(1), without allocation for known objects) and ends each step with [Builder.Commit]. Nothing is copied.
//
// The other side is a [Reader]. On a request, it makes the loop build the next [View] from the marks since the last
// one; concurrent requests share one build, and without marks the last view answers without involving the loop.
//
// # A view is copy-on-write
//
// Destinations are stored in address order in pages of at most 128; a build copies only pages that contain a marked
// destination, and the slice of pages. Weight vectors are shared by many destinations and have separate revisions, so a
// failed sub-port costs one mark per vector, however many destinations use it: a destination's revision is the later of
// its own and its vector's, computed at each read. Address order turns list pages, covering-prefix filters and stable
// page tokens into plain seeks.
//
// # A watch compares revisions
//
// A watch sends the changes after revision N. They are the same for a current watcher, a slow one and one that
// reconnects: destinations whose revision is later, and removed ones from a bounded list of tombstones. So slow
// watchers receive merged revisions without any per-watcher queue, and a watcher whose revision precedes the tombstones
// receives a snapshot. Wake-ups are level-triggered (a channel that is closed and replaced).
//
// State that changes independently of the loop (counters of sessions, queues, the data plane) is not part of a view:
// each request reads it from the [Source], on the loop's goroutine ([Reader.Report]).
package status
