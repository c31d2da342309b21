package memory

import (
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
)

// Config describes a data plane. The zero value is one without limits that can do everything.
type Config struct {
	// Name is what Hello answers; "" is "memory".
	Name string
	// Version is what Hello answers.
	Version string
	// Capabilities bound what is accepted; nil means DefaultCapabilities.
	Capabilities *farev1.Capabilities
	// Observe, if set, sees every operation in the order of arrival, before it is judged. It must not keep the message.
	Observe func(*farev1.Operation)
}

// DefaultCapabilities have no limits and every feature but flow pins, which cost memory per pair.
func DefaultCapabilities() *farev1.Capabilities {
	return &farev1.Capabilities{PerPacket: true, Ipv6: true, ConfirmsInEffect: true}
}

// Dataplane is an in-memory data plane. Its methods may be called from any goroutine. Use New.
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
		Name: config.Name, Version: config.Version, Observe: config.Observe, Forwarder: forwarder{proto.CloneOf(config.Capabilities)},
	})}
}

// forwarder forwards nothing, so every change is in effect at once: Forward and SlotPath answer from the state.
type forwarder struct{ capabilities *farev1.Capabilities }

func (f forwarder) Capabilities() *farev1.Capabilities     { return f.capabilities }
func (f forwarder) SetForwarding(*farev1.Forwarding) error { return nil }
func (f forwarder) Commit([]contract.Change) error         { return nil }

// Register adds the data plane to a gRPC server.
func (d *Dataplane) Register(server grpc.ServiceRegistrar) {
	farev1.RegisterDataplaneServiceServer(server, d)
}

// State returns a copy of what is programmed, sorted as Snapshot sends it, in one message.
func (d *Dataplane) State() (all *farev1.SnapshotResponse) {
	d.View(func(s *contract.State) { all = proto.CloneOf(s.Snapshot()) })
	return all
}

// Size returns how many groups and destinations are programmed, without the cost of State.
func (d *Dataplane) Size() (groups, destinations int) {
	d.View(func(s *contract.State) { groups, destinations = len(s.Groups), len(s.Destinations) })
	return groups, destinations
}

// BreakStream ends the present Program stream, if any, with UNAVAILABLE. What it programmed stays.
func (d *Dataplane) BreakStream() {
	d.Server.BreakStream("the stream was broken on purpose; connect again")
}
