package dataplane

import (
	"fmt"
	"net/netip"

	"google.golang.org/grpc/codes"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// Kind says what an Object is.
type Kind uint8

// The kinds of objects.
const (
	KindSubPort Kind = iota + 1
	KindGroup
	KindDestination
)

// Object names what the owner declared; only the field of its kind is set.
type Object struct {
	Kind        Kind
	SubPort     string
	Group       uint32 // the owner's number
	Destination netip.Prefix
}

func (o Object) String() string {
	switch o.Kind {
	case KindSubPort:
		return "sub-port " + o.SubPort
	case KindGroup:
		return fmt.Sprintf("group %d", o.Group)
	case KindDestination:
		return "destination " + o.Destination.String()
	}
	return "nothing"
}

// EventKind says what happened.
type EventKind uint8

const (
	// Connected: the data plane was read back, the difference is on its way. Name, Version and Capabilities are set.
	Connected EventKind = iota + 1
	// Disconnected: the stream ended; Err says why. The data plane keeps what is in effect.
	Disconnected
	// InEffect: the data plane obeys every change of Object up to Change.
	InEffect
	// Refused: the data plane refused Change of Object, or it cannot be sent; Code and Message say why. It is tried
	// again when the object changes, when what it waits for arrives, and after a reconnect.
	Refused
	// Pending: a change of Object that was in effect is not any more (the data plane lost it); it is being sent again.
	Pending
)

var eventNames = [...]string{"none", "connected", "disconnected", "in effect", "refused", "pending"}

func (k EventKind) String() string {
	if int(k) < len(eventNames) {
		return eventNames[k]
	}
	return "unknown"
}

// Event is what Take returns.
type Event struct {
	Kind   EventKind
	Object Object
	// Change is the number that the owner's call returned.
	Change uint64
	// Op is the id of the last operation for Object on the present stream; 0: none was needed.
	Op      uint64
	Code    codes.Code
	Message string

	Err           error
	Name, Version string
	Capabilities  *farev1.Capabilities
}
