package dpclient

import (
	"fmt"
	"net/netip"

	"google.golang.org/grpc/codes"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/prefixmap"
)

// Kind is the kind of an Object.
type Kind uint8

// The kinds of objects.
const (
	KindSubPort Kind = iota + 1
	KindVector
	KindDestination
)

// Object identifies a declared object; only the field of its kind is set.
type Object struct {
	Kind        Kind
	SubPort     string
	Vector      uint32 // the owner's number
	Destination Destination
}

// Destination identifies a destination of a source group. Source is the first loopback of the source group, a host
// prefix, or the zero value if the loopbacks share all sub-ports.
type Destination struct{ Prefix, Source netip.Prefix }

// Compare orders destinations by prefix, then by source.
func (d Destination) Compare(e Destination) int {
	if c := prefixmap.Compare(d.Prefix, e.Prefix); c != 0 {
		return c
	}
	return prefixmap.Compare(d.Source, e.Source)
}

// String returns "10.255.1.1/32", or "10.255.1.1/32 from 10.255.0.1/32".
func (d Destination) String() string {
	if d.Source.IsValid() {
		return d.Prefix.String() + " from " + d.Source.String()
	}
	return d.Prefix.String()
}

// wireSource formats a source for the data plane.
func wireSource(source netip.Prefix) string {
	if !source.IsValid() {
		return ""
	}
	return source.String()
}

func (o Object) String() string {
	switch o.Kind {
	case KindSubPort:
		return "sub-port " + o.SubPort
	case KindVector:
		return fmt.Sprintf("vector %d", o.Vector)
	case KindDestination:
		return "destination " + o.Destination.String()
	}
	return "nothing"
}

// EventKind is the kind of an Event.
type EventKind uint8

const (
	// Connected means that the data plane was read back, and the difference is being sent. Name, Version and
	// Capabilities are set.
	Connected EventKind = iota + 1
	// Disconnected means that the stream ended; Err is the reason. The data plane keeps forwarding unchanged.
	Disconnected
	// InEffect means that every change of Object up to Change is in effect.
	InEffect
	// Refused means that the data plane refused Change of Object, or it cannot be sent; Code and Message give the
	// reason. It is retried when the object changes, when the missing vector arrives, and after a reconnect;
	// UNAVAILABLE, INTERNAL and RESOURCE_EXHAUSTED also when the data plane reports that a retry may succeed, and after
	// 1 s to 30 s. A retry that is refused for the same reason has no event.
	Refused
	// Pending means that a change of Object that was in effect no longer is (the data plane disconnected it); it is
	// being sent again.
	Pending
	// Approximate is InEffect for a vector with a member whose share deviates by more than 1 % of itself. Message names
	// the member.
	Approximate
	// Damaged means that the layer below lacks acknowledged state; nothing is in effect until Intact. Message describes
	// it.
	Damaged
	// Intact means that the damage is repaired. A stream begins intact, without limitations. It also reports a change
	// of the limitations.
	Intact
)

var eventNames = [...]string{"none", "connected", "disconnected", "in effect", "refused", "pending", "approximate", "damaged", "intact"}

func (k EventKind) String() string {
	if int(k) < len(eventNames) {
		return eventNames[k]
	}
	return "unknown"
}

// Event is an event that Take returns.
type Event struct {
	Kind   EventKind
	Object Object
	// Change is the number that the owner's call returned.
	Change uint64
	// Op is the ID of the last operation for Object on the current stream; 0 if none was needed.
	Op      uint64
	Code    codes.Code
	Message string

	Err           error
	Name, Version string
	Capabilities  *farev1.Capabilities
	// State is the state that was read back, of Connected. It must not be modified.
	State *State
	// Limitations are those of the data plane's host, of Damaged and Intact. They must not be modified.
	Limitations []*farev1.Limitation
}
