package lab

import (
	"context"
	"errors"
	"net/netip"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/topo"
)

// A backend implements a fabric's nodes and cables by three interfaces: lifecycle, faults and observer. Calls on one
// fabric are sequential, except api and light, which may run at any time after build. A backend receives states as
// arguments and reports the states that it reads; it does not judge them.

// lifecycle starts and ends the nodes of a fabric.
type lifecycle interface {
	// build creates every node, with all cables up. fail is called with the error of a node that exits by itself later.
	build(ctx context.Context, fail func(error)) error
	// start starts the software of every node.
	start(ctx context.Context) error
	// logs returns the folder with the nodes' logs, or "" if there is none.
	logs() string
	// close stops everything and waits for it. failed keeps the logs for reading.
	close(failed bool) error
	// leave closes a fabric that continues without this process. It returns lines that explain how to inspect and how
	// to end it.
	leave() ([]string, error)
}

// faults applies failures to nodes and cables, and repairs them.
type faults interface {
	// cables brings cables up or down, at both ends.
	cables(ctx context.Context, set []cable) error
	// power stops a node like a power cut, or starts it again; its cables are set by separate calls of cables.
	power(ctx context.Context, n *topo.Node, on bool) error
	// freeze stops every process of a node, or continues them; its kernel keeps forwarding.
	freeze(n *topo.Node, on bool) error
	// lose makes a cable drop every packet in both directions while its carrier stays up, or ends the loss.
	lose(ctx context.Context, c *topo.Cable, on bool) error
	// crash kills processes of a server; revive restarts them.
	crash(server int, p programs) error
	revive(server int, p programs) error
}

// observer reads the state of nodes and cables.
type observer interface {
	// api returns the API of a node's daemon, or nil if the node's software has none.
	api(n *topo.Node) api
	// light returns the number of a leaf's devices that are up and have a carrier, and the number of its cables.
	light(leaf *topo.Node) (up, all int)
	// forwarding reads the forwarding state of a server's data plane.
	forwarding(ctx context.Context, server int) (forwarding, error)
	// slotsMoved returns the number of slots that have left their place since the start, over all servers, or 0 if
	// only subscribers to weights can count them.
	slotsMoved() uint64
}

// backend is the implementation of a fabric.
type backend interface {
	lifecycle
	faults
	observer
}

// cable is a cable with the state that it is to have.
type cable struct {
	*topo.Cable
	up bool
}

// programs selects processes of a server: its control plane and its data plane's agent.
type programs struct{ fared, dataplane bool }

var allPrograms = programs{true, true}

func (p programs) String() string {
	switch p {
	case programs{fared: true}:
		return "fared"
	case programs{dataplane: true}:
		return "dataplane"
	}
	return "fared and dataplane"
}

// hosts gives access to the nodes of a fabric with separate processes and kernels.
type hosts interface {
	// namespace returns the network namespace of a node.
	namespace(node string) namespace
	// routes returns the destinations in a node's main routing table.
	routes(ctx context.Context, n *topo.Node) (map[string]bool, error)
	// startTraffic starts a server's traffic node, which listens at trafficSocket.
	startTraffic(n *topo.Node) error
	trafficSocket(n *topo.Node) string
}

// api is the part of a daemon's gRPC services that the lab uses.
type api interface {
	GetWeights(context.Context, *farev1.GetWeightsRequest) (*farev1.GetWeightsResponse, error)
	ListWeights(context.Context, *farev1.ListWeightsRequest) (*farev1.ListWeightsResponse, error)
	Drain(context.Context, *farev1.DrainRequest) (*farev1.DrainResponse, error)
	Undrain(context.Context, *farev1.UndrainRequest) (*farev1.UndrainResponse, error)
	ListPlanes(context.Context, *farev1.ListPlanesRequest) (*farev1.ListPlanesResponse, error)
	ListSessions(context.Context, *farev1.ListSessionsRequest) (*farev1.ListSessionsResponse, error)
	// follow calls take with every message of WatchWeights until ctx or the daemon ends, also across crashes by faults.
	follow(ctx context.Context, r *farev1.WatchWeightsRequest, take func(*farev1.WatchWeightsResponse) error) error
}

// forwarding is the forwarding state of a data plane at one moment.
type forwarding interface {
	// toward returns the state for packets from one loopback to another.
	toward(src, dst netip.Addr) route
}

// route is the forwarding state toward a destination.
type route struct {
	// err is the reason why the data plane does not forward; nil if it forwards.
	err error
	// nexthop is the number of the kernel's nexthop object; 0 for a data plane in memory.
	nexthop int
	// planes holds the weights of planes by name; nil for a kernel.
	planes map[string]uint64
	// devices holds, by device, the weights of a data plane in memory or the numbers of buckets of a kernel's group.
	devices map[string]uint64
}

// errNoRoute is the state of a destination without a route that forwards.
var errNoRoute = errors.New("no route")
