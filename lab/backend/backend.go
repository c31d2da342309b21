package backend

import (
	"context"
	"errors"
	"net/netip"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/topo"
)

// Lifecycle starts and ends the nodes of a fabric.
type Lifecycle interface {
	// Build creates every node, with all cables up. fail is called with the error of a node that exits by itself later.
	Build(ctx context.Context, fail func(error)) error
	// Start starts the software of every node.
	Start(ctx context.Context) error
	// Logs returns the folder with the nodes' logs, or "" if there is none.
	Logs() string
	// Close stops everything and waits for it. failed keeps the logs for reading.
	Close(failed bool) error
	// Leave closes a fabric that continues without this process. It returns lines that explain how to inspect and how
	// to end it.
	Leave() ([]string, error)
}

// Faults applies failures to nodes and cables, and repairs them.
type Faults interface {
	// SetCables brings cables up or down, at both ends.
	SetCables(ctx context.Context, set []Cable) error
	// Power stops a node like a power cut, or starts it again; its cables are set by separate calls of SetCables.
	Power(ctx context.Context, n *topo.Node, on bool) error
	// Freeze stops every process of a node, or continues them; its kernel keeps forwarding.
	Freeze(n *topo.Node, on bool) error
	// Lose makes a cable drop every packet in both directions while its carrier stays up, or ends the loss.
	Lose(ctx context.Context, c *topo.Cable, on bool) error
	// Crash kills processes of a server; Revive restarts them.
	Crash(server int, p Programs) error
	Revive(server int, p Programs) error
}

// Observer reads the state of nodes and cables.
type Observer interface {
	// API returns the API of a node's daemon, or nil if the node's software has none.
	API(n *topo.Node) API
	// Light returns the number of a leaf's devices that are up and have a carrier, and the number of its cables.
	Light(leaf *topo.Node) (up, all int)
	// Forwarding reads the forwarding state of a server's data plane.
	Forwarding(ctx context.Context, server int) (Forwarding, error)
	// SlotsMoved returns the number of slots that have left their place since the start, over all servers, or 0 if
	// only subscribers to weights can count them.
	SlotsMoved() uint64
}

// Backend is the implementation of a fabric.
type Backend interface {
	Lifecycle
	Faults
	Observer
}

// Cable is a cable with the state that it is to have.
type Cable struct {
	*topo.Cable
	Connected bool
}

// Programs selects processes of a server: its control plane and its data plane's agent.
type Programs struct{ Fared, Dataplane bool }

var allPrograms = Programs{true, true}

func (p Programs) String() string {
	switch p {
	case Programs{Fared: true}:
		return "fared"
	case Programs{Dataplane: true}:
		return "dataplane"
	}
	return "fared and dataplane"
}

// Hosts gives access to the nodes of a fabric with separate processes and kernels.
type Hosts interface {
	// Namespace returns the network namespace of a node.
	Namespace(node string) Namespace
	// Routes returns the destinations in a node's main routing table.
	Routes(ctx context.Context, n *topo.Node) (map[string]bool, error)
	// StartTraffic starts a server's traffic node, which listens at TrafficSocket.
	StartTraffic(n *topo.Node) error
	TrafficSocket(n *topo.Node) string
}

// Separate is a backend whose nodes have separate processes and kernels.
type Separate interface {
	Backend
	Hosts
}

// API is the part of a daemon's gRPC services that the lab uses.
type API interface {
	GetWeights(context.Context, *farev1.GetWeightsRequest) (*farev1.GetWeightsResponse, error)
	ListWeights(context.Context, *farev1.ListWeightsRequest) (*farev1.ListWeightsResponse, error)
	Drain(context.Context, *farev1.DrainRequest) (*farev1.DrainResponse, error)
	Undrain(context.Context, *farev1.UndrainRequest) (*farev1.UndrainResponse, error)
	ListPlanes(context.Context, *farev1.ListPlanesRequest) (*farev1.ListPlanesResponse, error)
	ListSessions(context.Context, *farev1.ListSessionsRequest) (*farev1.ListSessionsResponse, error)
	GetStatus(context.Context, *farev1.GetStatusRequest) (*farev1.GetStatusResponse, error)
	// Follow calls take with every message of WatchWeights until ctx or the daemon ends, also across crashes by faults.
	Follow(ctx context.Context, r *farev1.WatchWeightsRequest, take func(*farev1.WatchWeightsResponse) error) error
	// FollowEvents calls take with every message of WatchEvents until ctx or the daemon ends.
	FollowEvents(ctx context.Context, r *farev1.WatchEventsRequest, take func(*farev1.FabricEvent) error) error
}

// Forwarding is the forwarding state of a data plane at one moment.
type Forwarding interface {
	// Toward returns the state for packets from one loopback to another.
	Toward(src, dst netip.Addr) Route
}

// Route is the forwarding state toward a destination.
type Route struct {
	// Err is the reason why the data plane does not forward; nil if it forwards.
	Err error
	// Nexthop is the number of the kernel's nexthop object; 0 for a data plane in memory.
	Nexthop int
	// Planes holds the weights of planes by name; nil for a kernel.
	Planes map[string]uint64
	// Devices holds, by device, the weights of a data plane in memory or the numbers of buckets of a kernel's group.
	Devices map[string]uint64
}

// errNoRoute is the state of a destination without a route that forwards.
var errNoRoute = errors.New("no route")
