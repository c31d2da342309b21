package status

import (
	"context"
	"net/netip"
	"time"
)

// Source is the loop's state, as plain data. Its methods are called on the loop's goroutine only: by Builder.Commit, and
// by functions that the Reader passes to Do. Slices in what they return must not change afterwards.
type Source interface {
	// Vector returns a weight vector, or false when there is none by that id.
	Vector(id uint32) (Vector, bool)
	// Destination returns a destination, or false when it is gone.
	Destination(prefix netip.Prefix) (Destination, bool)
	// Planes returns every configured plane, in the configured order.
	Planes() []Plane
	// Sessions returns every configured session, in the configured order.
	Sessions() []Session
	// Process returns what concerns the daemon as a whole.
	Process() Process
}

// Layout is what the configuration fixes: the names behind indexes. A reload that changes it calls Builder.SetLayout.
type Layout struct {
	Planes []LayoutPlane
	// Sources are the local loopbacks, as host prefixes; empty for a leaf.
	Sources []netip.Prefix
	// Ports returns the UDP source port of each slot of v between a local loopback and a destination, appended to buf,
	// and how they were chosen: "hash", "asked", "uniform" or "none". It is called from any goroutine, at any time, also
	// for views that are no longer the latest: it must not wait, and must not reach into the engine. When its answer
	// changes, destinations are marked. Nil: pairs are not shown.
	Ports func(src, dst netip.Addr, v *Vector, buf []uint16) ([]uint16, string)
	// Await waits until Ports can say all it ever will of a pair; nil: it can at once.
	Await func(ctx context.Context, src, dst netip.Addr)
}

// LayoutPlane names a plane and its sub-ports' devices.
type LayoutPlane struct {
	Name     string
	SubPorts []string
}

// Vector is a weight vector: what all destinations that name it share.
type Vector struct {
	Reachable bool
	// Reason says why it is not reachable; empty when it is.
	Reason string
	// Planes has an element for every plane of the layout, in its order.
	Planes []VectorPlane
	// Slots are the queue pair slots of every pair that uses the vector, in slot order.
	Slots []Slot
}

// VectorPlane is a plane's part of a vector.
type VectorPlane struct {
	// Weight is in lowest terms over all planes; 0: the plane carries nothing.
	Weight uint32
	// Bandwidth is the path bandwidth, bit/s.
	Bandwidth uint64
	// InEffect: the data plane confirmed this weight.
	InEffect bool
	// Reason says why the weight is 0.
	Reason string
	// SubPorts are weights in lowest terms within the plane, in the layout's order.
	SubPorts []uint32
}

// Slot is a queue pair slot. Plane and SubPort are indexes into the layout; SubPort is -1 when the plane is sprayed over.
type Slot struct {
	Plane, SubPort int
	// Share is in parts per billion; the shares of a reachable vector sum to exactly 1,000,000,000. 0: parked.
	Share uint32
	// Drain: the slot lost addresses, which start elsewhere only when it has nothing outstanding (draft Section 4).
	Drain bool
}

// Destination is what is a destination's own.
type Destination struct {
	// Vector is the id of its weight vector, from 1; 0: none.
	Vector uint32
	// InEffect: the data plane confirmed that the destination uses this vector.
	InEffect bool
	// Drain are the slots that lost addresses when the destination came to its vector; as Slot.Drain, for it alone.
	Drain []uint16
	// SlotsMoved counts slots that changed plane or sub-port in the last change.
	SlotsMoved uint32
	// Reason says why there is no vector; empty when there is one.
	Reason string
}

// Plane is a plane as seen here.
type Plane struct {
	Name     string
	Up       bool
	Drained  bool
	SubPorts []SubPort
}

// Bandwidth returns the sum of the sub-ports that count, bit/s.
func (p Plane) Bandwidth() uint64 {
	var sum uint64
	for _, s := range p.SubPorts {
		if s.Counts() {
			sum += s.Speed
		}
	}
	return sum
}

// SubPort is a sub-port as seen here.
type SubPort struct {
	Device  string
	Carrier bool
	Drained bool
	// Speed is in bit/s; SpeedSource says where it comes from: "config", "tbf", "ethtool", "pcie".
	Speed       uint64
	SpeedSource string
	// Reason says why the sub-port does not count; empty when it does.
	Reason string
	// Sessions are the names of the sessions over it.
	Sessions []string
}

// Counts tells whether the sub-port's speed is part of its plane's bandwidth.
func (s SubPort) Counts() bool { return s.Carrier && !s.Drained && s.Reason == "" }

// Count is a named number.
type Count struct {
	Name  string
	Value uint64
}

// Session states, in the words of fare.v1.Session.state.
const (
	StateIdle        = "idle"
	StateConnecting  = "connecting"
	StateOpening     = "opening"
	StateEstablished = "established"
	StateDrained     = "drained"
	StateHeld        = "held"
)

// Session is a BGP session as seen here.
type Session struct {
	Name   string
	Plane  string
	Device string
	// Peer is the neighbour's address; empty while an unnumbered neighbour is unknown.
	Peer   string
	PeerAS uint32
	// PeerID is the neighbour's BGP identifier; invalid before the first OPEN.
	PeerID netip.Addr
	// State is one of the State constants, entered at Since.
	State string
	Since time.Time
	// Generation counts establishments; Flaps counts losses of an established session.
	Generation, Flaps uint64
	// Received = Used + the sum of Ignored, at any time: routes held now.
	Received, Used uint64
	// Ignored counts routes held now that are not used, by reason.
	Ignored []Count
	// Advertised counts routes that the neighbour was sent and still holds.
	Advertised uint64
	// Dropped counts messages and attributes that the guard kept away from BGP since start, by reason.
	Dropped  []Count
	EndOfRIB bool
	// Reason says why it is not established; it keeps the last loss's reason.
	Reason string
	// BFD is the state of BFD beside the session, "" without; BFDDetection is after how much silence the session is lost, 0 while the
	// neighbour is not heard.
	BFD          string
	BFDDetection time.Duration
}

// Up tells whether the BGP session is established: a drained one is too.
func (s *Session) Up() bool { return s.State == StateEstablished || s.State == StateDrained }

// Process is the daemon as a whole.
type Process struct {
	// Role is "server" or "leaf".
	Role      string
	RouterID  netip.Addr
	AS        uint32
	Converged bool
	Dataplane Dataplane
	// Ignored counts inputs that the path-bandwidth table did not use since start, by reason.
	Ignored []Count
	// WithoutLanding counts slots that were shown or programmed with a source port that does not land on their place.
	WithoutLanding uint64
	// Queues are the depths of queues toward and from the loop, now.
	Queues []Count
}

// Dataplane is the connection to the data plane and what went over it since start.
type Dataplane struct {
	Connected bool
	// Name and Version are what the data plane calls itself; Address is where it is reached.
	Name, Version, Address string
	// Operations are counted by level: "sub-port", "group", "destination".
	Operations []Operations
	// Pending operations are sent and not yet in effect.
	Pending   uint64
	LastError string
}

// Operations counts data-plane operations of a level since start.
type Operations struct {
	Level                   string
	Sent, InEffect, Refused uint64
}

// Explanation shows each input and rule that led to a destination's weights (see fare.v1.Explanation).
type Explanation struct {
	Routes []ExplainedRoute
	Planes []ExplainedPlane
	Rules  []string
}

// ExplainedRoute is a route to the destination, used or not.
type ExplainedRoute struct {
	Session, Plane, Device, Node string
	Communities                  []ExplainedCommunity
	// Advertised is in bit/s and means something only when Known.
	Advertised uint64
	Known      bool
	ASPath     []uint32
	// Reason says why the route does not count; empty when it does.
	Reason string
}

// ExplainedCommunity is an extended community as received, hex, and what it was judged to be.
type ExplainedCommunity struct{ Raw, Meaning, Reason string }

// ExplainedPlane is how a plane's path bandwidth came about.
type ExplainedPlane struct {
	Plane     string
	Nodes     []ExplainedNode
	Bandwidth uint64
	Rule      string
}

// ExplainedNode is an advertising node's part: the lower of the local links' sum and what it advertised, bit/s.
type ExplainedNode struct {
	Node              string
	Devices           []string
	Local, Advertised uint64
	Known             bool
	Bandwidth         uint64
}
