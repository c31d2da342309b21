package memory

import (
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
)

// Config configures a data plane. The zero value has no limits and all default features.
type Config struct {
	// Name is returned by Hello; "" selects "memory".
	Name string
	// Version is returned by Hello.
	Version string
	// Capabilities are the limits of the data plane; nil selects DefaultCapabilities.
	Capabilities *farev1.Capabilities
	// Observe, if set, is called with every operation in the order of arrival, before validation. It must not keep the
	// message.
	Observe func(*farev1.Operation)
	// Approximate, if set, returns the deviation of a group that was set, which is then acknowledged APPROXIMATE; ""
	// acknowledges it IN_EFFECT. For tests, like ReportIntegrity.
	Approximate func(group uint32) string
}

// DefaultCapabilities returns capabilities without limits and with every feature except flow pins, which cost memory
// per pair.
func DefaultCapabilities() *farev1.Capabilities {
	return &farev1.Capabilities{PerPacket: true, Ipv6: true, ConfirmsInEffect: true}
}

// Dataplane is an in-memory data plane. It is safe for concurrent use. Use New.
type Dataplane struct {
	*contract.Server
}

// New returns an empty data plane that waits for a Hello.
func New(config Config) *Dataplane {
	if config.Name == "" {
		config.Name = "memory"
	}
	if config.Capabilities == nil {
		config.Capabilities = DefaultCapabilities()
	}
	return &Dataplane{contract.New(contract.Config{
		Name: config.Name, Version: config.Version, Observe: config.Observe, Forwarder: forwarder{proto.CloneOf(config.Capabilities), config.Approximate},
	})}
}

// forwarder forwards nothing, so every change is in effect immediately: Forward and SlotPath use the programmed state.
type forwarder struct {
	capabilities *farev1.Capabilities
	approximate  func(group uint32) string
}

func (f forwarder) Capabilities() *farev1.Capabilities     { return f.capabilities }
func (f forwarder) SetForwarding(*farev1.Forwarding) error { return nil }
func (f forwarder) Commit([]contract.Change) error         { return nil }

// Approximate implements contract.Approximator.
func (f forwarder) Approximate(group uint32) string {
	if f.approximate == nil {
		return ""
	}
	return f.approximate(group)
}

// Register adds the data plane to a gRPC server.
func (d *Dataplane) Register(server grpc.ServiceRegistrar) {
	farev1.RegisterDataplaneServiceServer(server, d)
}

// State returns a copy of the programmed state, in the order of Snapshot, in one message.
func (d *Dataplane) State() (all *farev1.SnapshotResponse) {
	d.View(func(s *contract.State) { all = proto.CloneOf(s.Snapshot()) })
	return all
}

// Size returns the numbers of programmed groups and destinations, without the cost of State.
func (d *Dataplane) Size() (groups, destinations int) {
	d.View(func(s *contract.State) { groups, destinations = len(s.Groups), s.Destinations.Len() })
	return groups, destinations
}

// BreakStream ends the current Program stream, if any, with UNAVAILABLE. The programmed state stays.
func (d *Dataplane) BreakStream() {
	d.Server.BreakStream("the stream was broken deliberately; reconnect")
}
