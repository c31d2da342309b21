package status

import (
	"context"
	"net/netip"
	"time"
)

// Source provides the loop's state as plain data. Its methods are called only on the loop's goroutine: by
// Builder.Commit, and by functions that the Reader passes to Do. Slices in the results must not change afterwards.
type Source interface {
	// Vector returns a weight vector, or false if there is none with that ID.
	Vector(id uint32) (Vector, bool)
	// Destination returns a destination of a source group, or false if it was removed.
	Destination(key Key) (Destination, bool)
	// Planes returns every configured plane, in the configured order.
	Planes() []Plane
	// Sessions returns every configured session, in the configured order.
	Sessions() []Session
	// Process returns the state of the daemon as a whole.
	Process() Process
}

// Key identifies a destination of a source group, which is an index of Layout.Groups.
type Key struct {
	netip.Prefix
	Source int
}

// Layout is the part of the status that the configuration determines: the names behind indexes. A reload that changes
// it calls Builder.SetLayout; the number of source groups does not change.
type Layout struct {
	// Planes are the names of all planes, and SubPorts all sub-ports, in the configured order.
	Planes   []string
	SubPorts []LayoutSubPort
	// Groups are the source groups, at least one.
	Groups []LayoutGroup
	// Ports returns the source port of each slot of v between a local loopback and a destination, for the flows to one
	// of Services, or to the configured one if to is zero, appended to buf; and how they were chosen: "hash", "asked",
	// "uniform" or "none". It is called from any goroutine, at any time, also for views that are no longer the latest:
	// it must not wait, and must not access the engine. When its result changes, destinations are marked. nil hides
	// pairs.
	Ports func(to FlowService, src, dst netip.Addr, v *Vector, buf []uint16) ([]uint16, string)
	// AskedPorts means that the result of Ports for a pair and the places of its slots may change without another
	// Layout: the data plane is asked for it.
	AskedPorts bool
	// Await waits until the result of Ports for a pair is final; nil means that it always is.
	Await func(ctx context.Context, to FlowService, src, dst netip.Addr)
	// Services are those that the data plane steers, in the configured order; none at a leaf.
	Services []ServiceRange
	// SamePorts means that all Services have the source ports of the configured one: the data plane steers by these,
	// whatever the service.
	SamePorts bool
}

// LayoutSubPort is a sub-port of the server.
type LayoutSubPort struct {
	Device string
	Plane  int // index of Layout.Planes
	// Netns is the network namespace of the device; empty means that of this process.
	Netns string
}

// LayoutGroup is a source group: the local loopbacks that the same sub-ports serve, and the planes of these sub-ports.
// Vectors have indexes of planes and sub-ports within their source group.
type LayoutGroup struct {
	// Sources are loopbacks as host prefixes; empty for a leaf.
	Sources []netip.Prefix
	Planes  []LayoutPlane
}

// FlowService is the destination of flows: the number of an IP protocol, and a port.
type FlowService struct {
	Protocol uint8
	Port     uint16
}

// ServiceRange is a range of services of one protocol.
type ServiceRange struct {
	Protocol    uint8
	First, Last uint16
}

// sources lists the local loopbacks of all source groups.
func (l *Layout) sources() []netip.Prefix {
	var out []netip.Prefix
	for i := range l.Groups {
		out = append(out, l.Groups[i].Sources...)
	}
	return out
}

// LayoutPlane names a plane and its sub-ports' devices.
type LayoutPlane struct {
	Name     string
	SubPorts []string
}

// Vector is a weight vector: the state that all destinations that refer to it share.
type Vector struct {
	Reachable bool
	// Reason explains why it is not reachable; empty if it is.
	Reason string
	// Planes has an element for every plane of its source group, in the layout's order.
	Planes []VectorPlane
	// Slots are the queue pair slots of every pair that uses the vector, in slot order.
	Slots []Slot
	// BandwidthIgnored describes the usable routes whose bandwidth the weights ignore; empty if there are none.
	BandwidthIgnored string
	// NotInEffect is the data plane's reason for not forwarding exactly by the vector; empty if it does, or has not
	// answered yet.
	NotInEffect string
}

// VectorPlane is a plane's part of a vector.
type VectorPlane struct {
	// Weight is in lowest terms over all planes; a plane with weight 0 carries nothing.
	Weight uint32
	// Bandwidth is the path bandwidth, bit/s.
	Bandwidth uint64
	// InEffect reports that the data plane confirmed this weight.
	InEffect bool
	// Reason explains why the weight is 0.
	Reason string
	// SubPorts are weights in lowest terms within the plane, in the layout's order.
	SubPorts []uint32
}

// Slot is a queue pair slot. Plane and SubPort are indexes into the layout; SubPort is -1 if packets are sprayed over
// the plane.
type Slot struct {
	Plane, SubPort int
	// Share is in parts per billion; the shares of a reachable vector sum to exactly 1,000,000,000. A slot with share 0
	// is parked.
	Share uint32
	// Drain reports that the slot lost addresses, which start elsewhere only when it has nothing outstanding (draft
	// Section 4).
	Drain bool
}

// Destination is the state that belongs to one destination alone.
type Destination struct {
	// Vector is the ID of its weight vector, from 1; 0 means none.
	Vector uint32
	// InEffect reports that the data plane confirmed that the destination uses this vector.
	InEffect bool
	// NotInEffect is the data plane's reason why the assignment is not in effect; empty without one.
	NotInEffect string
	// Drain lists the slots that lost addresses when the destination was assigned its vector; like Slot.Drain, but for
	// this destination alone.
	Drain []uint16
	// SlotsMoved counts the slots that changed plane or sub-port in the last change.
	SlotsMoved uint32
	// Reason explains why there is no vector; empty if there is one.
	Reason string
}

// Plane is the state of a plane at this node.
type Plane struct {
	Name string
	Up   bool
	// Drained reports that a drain of the plane is complete. Draining reports that a drain or undrain is under way.
	Drained, Draining bool
	SubPorts          []SubPort
}

// Bandwidth returns the sum of the speeds of the sub-ports that count, in bit/s.
func (p Plane) Bandwidth() uint64 {
	var sum uint64
	for _, s := range p.SubPorts {
		if s.Counts() {
			sum += s.Speed
		}
	}
	return sum
}

// SubPort is the state of a sub-port at this node.
type SubPort struct {
	Device string
	// Netdev is the present name of the device in the kernel, empty if it is absent or not watched.
	Netdev  string
	Carrier bool
	// Drained and Draining are like Plane's, for a drain of the sub-port, its plane or its leaf.
	Drained, Draining bool
	// Speed is in bit/s; SpeedSource is its source: "config", "tbf", "ethtool", "pcie".
	Speed       uint64
	SpeedSource string
	// Reason explains why the sub-port does not count; empty if it does. Persistent is that of fare.v1.SubPort.
	Reason     string
	Persistent bool
	// Sessions are the names of the sessions over it.
	Sessions []string
	// Loopbacks are those that it serves; nil if all sub-ports serve all.
	Loopbacks []netip.Prefix
	// DampedUntil is when a link that flaps counts again if it stays up; zero if it is not damped. HeldRises counts the
	// rises that damping has held.
	DampedUntil time.Time
	HeldRises   uint64
}

// Counts reports whether the sub-port's speed is part of its plane's bandwidth.
func (s SubPort) Counts() bool { return s.Carrier && !s.Drained && !s.Draining && s.Reason == "" }

// Count is a named number.
type Count struct {
	Name  string
	Value uint64
}

// Session states, as in fare.v1.Session.state.
const (
	StateIdle        = "idle"
	StateConnecting  = "connecting"
	StateOpening     = "opening"
	StateEstablished = "established"
	StateDraining    = "draining"
	StateDrained     = "drained"
	StateHeld        = "held"
	StateWaiting     = "waiting"
)

// Session is the state of a BGP session at this node.
type Session struct {
	Name   string
	Plane  string
	Device string
	// Peer is the neighbor's address; empty while an unnumbered neighbor is unknown.
	Peer   string
	PeerAS uint32
	// PeerID is the neighbor's BGP identifier; invalid before the first OPEN.
	PeerID netip.Addr
	// State is one of the State constants, entered at Since.
	State string
	Since time.Time
	// Generation counts establishments; Flaps counts failures of the established session.
	Generation, Flaps uint64
	// Received is the number of routes held now. It always equals Used plus the sum of Ignored.
	Received, Used uint64
	// Ignored counts the unused routes among those held now, by reason.
	Ignored []Count
	// Advertised counts the routes that the neighbor was sent and still holds.
	Advertised uint64
	// Dropped counts the messages and attributes that the guard has dropped since start, by reason.
	Dropped  []Count
	EndOfRIB bool
	// Reason explains why the session is not established; it keeps the reason of the last failure. Fault is the last
	// fault since the session came up, "" if it is not established; Reason has it too.
	Reason, Fault string
	// BFD is the state of the session's BFD, "" without BFD; BFDDetection is the duration of silence after which the
	// session fails, 0 while no packets of the neighbor arrive.
	BFD          string
	BFDDetection time.Duration
}

// Up reports whether the BGP session is established, which includes draining and drained ones.
func (s *Session) Up() bool {
	return s.State == StateEstablished || s.State == StateDraining || s.State == StateDrained
}

// Process is the state of the daemon as a whole.
type Process struct {
	// Role is "server" or "leaf".
	Role      string
	RouterID  netip.Addr
	AS        uint32
	Converged bool
	Dataplane Dataplane
	// Ignored counts the inputs that the path-bandwidth table has rejected since start, by reason.
	Ignored []Count
	// WithoutLanding counts slots that were shown or programmed with a source port that does not land on their place.
	WithoutLanding uint64
	// Unrecorded counts the events missing in record.file because they could not be written.
	Unrecorded uint64
	// TracesDropped counts the traces that did not reach the collector.
	TracesDropped uint64
	// Unlogged counts the lines that the log has left out because its reader is too slow.
	Unlogged  uint64
	SlotTable SlotTable
	// Conflicts is the number of destinations that several origins announce now; ClaimedLoopbacks is the number of our
	// loopbacks that another AS announces now.
	Conflicts, ClaimedLoopbacks uint64
	// Avoided is by plane the number of destinations toward which it carries nothing because probes by it are lost; nil
	// unless proof.unproved is avoid.
	Avoided []Count
	// Drains are the targets that are drained, or are being drained or undrained; sorted, dormant ones last.
	// DrainsFailure is the reason why some may not survive a restart, or were lost by one.
	Drains        []Drain
	DrainsFailure string
	// WithdrawnByRestart: leaves withdraw the loopbacks while the daemon restarts.
	WithdrawnByRestart bool
	// Faults are the current faults, by kind, session and reason.
	Faults []Fault
	// Queues are the current depths of queues toward and from the loop.
	Queues []Count
}

// FaultBandwidthIgnored is the Fault.Kind of usable routes whose bandwidth the weights ignore.
const FaultBandwidthIgnored = "bandwidth-ignored"

// FaultRoutesDropped is the Fault.Kind of routes that the peer announces and the guard drops, and of own routes whose
// family the peer did not agree to.
const FaultRoutesDropped = "routes-dropped"

// Fault is a current fault of the fabric.
type Fault struct {
	Kind           string
	Plane, Session string
	Reason         string // as in metrics
	// Routes is the number of the session's routes with the fault, at least 1; Example is the prefix of one.
	Routes  uint64
	Example netip.Prefix
	Remedy  string
}

// SlotTable is the result of the publications of the slot table; the zero value is that of a table without failures, or
// of a disabled one.
type SlotTable struct {
	// Failures counts failed publications since start. Failure is the present failure, "" if the last publication
	// succeeded.
	Failures uint64
	Failure  string
}

// Drain is a target that is drained, or is being drained or undrained.
type Drain struct {
	Target DrainTarget
	// Stage is one of fare.v1.DrainStatus.stage.
	Stage string
	// Waiting is the number of destinations whose traffic may still leave over the target; WaitsFor lists some of them,
	// each with the reason.
	Waiting  int
	WaitsFor []string
	// Since is the time of the request, By its caller, Reason the caller's reason; zero during an undrain.
	Since      time.Time
	By, Reason string
}

// Dataplane is the connection to the data plane with its counters since start.
type Dataplane struct {
	Connected bool
	// Name and Version are reported by the data plane; Address is its address, "" for a daemon without a data plane.
	Name, Version, Address string
	// Operations are counted by level: "sub-port", "group", "destination".
	Operations []Operations
	// Pending counts objects whose last change has not been answered yet, Approximate those in effect with deviating
	// shares, Refused those whose last change was refused.
	Pending, Approximate, Refused uint64
	// Damage describes the damage of the layer below the data plane, "" if it is intact; nothing is in effect until its
	// repair. Repairs is the data plane's own count of repairs.
	Damage  string
	Repairs uint64
	// LastError is why the data plane is not connected, or the last refusal while there are refused objects; ""
	// otherwise.
	LastError string
	// Limitations are settings and programs of the host with which packets are dropped or take other ways.
	Limitations []Limitation
}

// Limitation is one of fare.v1.Limitation.
type Limitation struct{ Reason, Text, Remedy string }

// Operations counts data-plane operations of a level since start.
type Operations struct {
	Level                   string
	Sent, InEffect, Refused uint64
}

// Explanation lists each input and rule that led to a destination's weights (see fare.v1.Explanation).
type Explanation struct {
	Routes []ExplainedRoute
	Planes []ExplainedPlane
	Rules  []string
}

// ExplainedRoute is a route to the destination, used or not.
type ExplainedRoute struct {
	Session, Plane, Device, Node string
	Communities                  []ExplainedCommunity
	// Advertised is in bit/s and valid only if Known.
	Advertised uint64
	Known      bool
	ASPath     []uint32
	// Reason explains why the route does not count; empty if it does.
	Reason string
}

// ExplainedCommunity is an extended community as received, in hex, with its interpretation.
type ExplainedCommunity struct{ Raw, Meaning, Reason string }

// ExplainedPlane is the derivation of a plane's path bandwidth.
type ExplainedPlane struct {
	Plane     string
	Nodes     []ExplainedNode
	Bandwidth uint64
	Rule      string
}

// ExplainedNode is an advertising node's part: the lower of the local links' sum and its advertised bandwidth, in
// bit/s.
type ExplainedNode struct {
	Node              string
	Devices           []string
	Local, Advertised uint64
	Known             bool
	Bandwidth         uint64
}
