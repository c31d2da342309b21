package contract

import (
	"net/netip"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// Forwarder applies the state of the contract to packets. The server calls its methods one at a time.
type Forwarder interface {
	// Capabilities returns the limits for commits. They may change in SetForwarding, and apply from that Hello on.
	Capabilities() *farev1.Capabilities
	// SetForwarding replaces the forwarding by the one of a Hello, which is already validated. An error, a gRPC status,
	// refuses the Hello and leaves the previous state unchanged.
	SetForwarding(forwarding *farev1.Forwarding) error
	// Commit applies changes in order, and returns when packets follow all of them. On an error, a gRPC status, all
	// changes count as not done: the Forwarder returns to the state before the first one, and the caller retries the
	// changes one by one.
	Commit(changes []Change) error
}

// Recoverer is a Forwarder that can report the forwarding left by an earlier run of the process whose journal is lost.
type Recoverer interface {
	// Recover is called after the first SetForwarding, while nothing is programmed. It returns nil if it found nothing.
	Recover() *farev1.SnapshotResponse
}

// Approximator is a Forwarder whose layer below cannot realize every weight.
type Approximator interface {
	// Approximate describes the member of a group whose share of the traffic deviates by more than 1 % of the share,
	// with the deviation, as text for operators. It returns "" if there is no such member or no such group. The
	// set_vector of the group is otherwise acknowledged APPROXIMATE instead of IN_EFFECT. It is called after a
	// successful Commit, for each group that was set.
	Approximate(group uint32) string
}

// Explainer is a Forwarder that can explain a lack of IPv6.
type Explainer interface {
	// WithoutIPv6 returns the reason why Capabilities.ipv6 is false, with the remedy, for the refusal of IPv6
	// destinations; "" if it is unknown.
	WithoutIPv6() string
}

// Guardian is a Forwarder that detects changes of its objects in the layer below by other programs.
type Guardian interface {
	// Guard is called once, before all other methods. The Forwarder calls report whenever a difference is detected (not
	// intact) or repaired (intact), from any goroutine, also with its locks held: report never blocks and never calls
	// the Forwarder.
	Guard(report func(*farev1.Integrity))
}

// Retrier is a Forwarder that detects when a change that it refused may succeed.
type Retrier interface {
	// Retry is called once, before all other methods. The Forwarder calls again, from any goroutine, also with its
	// locks held, whenever a change that Commit has refused may succeed: again never blocks and never calls the
	// Forwarder.
	Retry(again func())
}

// Lander is a Forwarder that implements DataplaneService.Landing; errors are gRPC statuses.
type Lander interface {
	Landing(request *farev1.LandingRequest) (*farev1.LandingResponse, error)
}

// Counter is a Forwarder that implements DataplaneService.Counters, in chunks well below 4 MiB; errors are gRPC
// statuses.
type Counter interface {
	Counters(request *farev1.CountersRequest, send func(*farev1.CountersResponse) error) error
}

// Policy decides what a control plane may program, in addition to the rules of the contract. Errors are gRPC statuses
// with code PERMISSION_DENIED.
type Policy interface {
	// Forwarding is called with each valid forwarding, that of a journal included, before the Forwarder receives it.
	Forwarding(forwarding *farev1.Forwarding) error
	// Destination is called with the host prefix of each destination that is set, those of a journal included. It must
	// be fast.
	Destination(prefix netip.Prefix) error
}

// Journal keeps the acknowledged state of a data plane beyond the end of the process. The journal itself counts and
// logs its errors, because forwarding must continue without it.
type Journal interface {
	// Forwarding is called after a Hello has been accepted.
	Forwarding(forwarding *farev1.Forwarding)
	// Operations is called with committed operations before they are acknowledged, in the order of the commits. For
	// refused operations it is called with operations that undo them, because those of Restore are in the journal.
	Operations(operations []*farev1.Operation)
}
