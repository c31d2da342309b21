package contract

import farev1 "github.com/fared/fared/api/fare/v1"

// Forwarder makes packets obey. The server calls its methods one at a time.
type Forwarder interface {
	// Capabilities bound what is committed. They may change with SetForwarding, and then count from that Hello on.
	Capabilities() *farev1.Capabilities
	// SetForwarding takes what a Hello brought, valid in itself, in place of what the one before did. An error, a gRPC
	// status, refuses the Hello and leaves everything as it was.
	SetForwarding(forwarding *farev1.Forwarding) error
	// Commit carries changes out, in order, and returns when packets obey them all. On an error, a gRPC status, all of them
	// count as not done: the Forwarder goes back to wanting the state before the first, and the caller tries them one by one.
	Commit(changes []Change) error
}

// Recoverer is a Forwarder that can tell what it still forwards by from an earlier run of the process whose journal is lost.
type Recoverer interface {
	// Recover is asked after the first SetForwarding, when nothing is programmed. nil: nothing was found.
	Recover() *farev1.SnapshotResponse
}

// Lander is a Forwarder that answers DataplaneService.Landing; errors are gRPC statuses.
type Lander interface {
	Landing(request *farev1.LandingRequest) (*farev1.LandingResponse, error)
}

// Counter is a Forwarder that answers DataplaneService.Counters, in chunks well below 4 MiB; errors are gRPC statuses.
type Counter interface {
	Counters(request *farev1.CountersRequest, send func(*farev1.CountersResponse) error) error
}

// Journal keeps what a data plane has promised beyond the end of the process. An error is counted and logged by the
// journal: forwarding matters more.
type Journal interface {
	// Forwarding is called when a Hello was taken.
	Forwarding(forwarding *farev1.Forwarding)
	// Operations are about to be committed; those that are then refused are followed by others that undo them.
	Operations(operations []*farev1.Operation)
}
