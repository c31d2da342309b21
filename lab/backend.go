package lab

import (
	"context"
	"net/netip"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/topo"
)

// backend is what a fabric's nodes and cables are made of. Scenarios, model and checks know nothing else of them. Calls of
// one Fabric come one after the other, but for api and light, which may come at any time after start.
type backend interface {
	// start brings every node up, all cables with light. fail is told of a node that ends by itself later.
	start(ctx context.Context, fail func(error)) error
	// api is a node's daemon; nil: what runs there has none.
	api(n *topo.Node) api
	// cables gives cables light or takes it, at both ends. It is told again of cables whose drain has changed.
	cables(ctx context.Context, set []cable) error
	// power ends a node as a power cut does, or starts it again; its cables are told of separately.
	power(ctx context.Context, n *topo.Node, on bool) error
	// freeze stops every process of a node where it is, or lets them go on; its kernel forwards all the time.
	freeze(n *topo.Node, on bool) error
	// lose makes a cable drop every packet, both ways, with its light on, or ends that.
	lose(ctx context.Context, c *topo.Cable, on bool) error
	// crash kills processes of a server; revive starts them again as they were.
	crash(server int, p parts) error
	revive(server int, p parts) error
	// light is how many of a leaf's cables have it, of how many.
	light(leaf *topo.Node) (up, all int)
	// forwarding reads what a server's data plane forwards by.
	forwarding(ctx context.Context, server int) (*forwarding, error)
	// slotsMoved is how many slots have left their place since the start, over all servers.
	slotsMoved() uint64
	// followers follow the weights of every server; nil: nobody does.
	followers() []*follower
	// packets are what flows through the fabric; nil: nothing does.
	packets() *traffic
	// transfer is what queue pairs carry through it; nil: there are none.
	transfer() *transfer
	// logs is the folder of what the nodes have written; "": there is none.
	logs() string
	// close ends everything and waits for it. failed says that somebody will want to read the logs.
	close(failed bool) error
	// leave is close for a fabric that goes on without this process; it returns lines that say how to look at it and to end it.
	leave() ([]string, error)
}

// api is the part of a daemon's gRPC services that the lab uses.
type api interface {
	GetWeights(context.Context, *farev1.GetWeightsRequest) (*farev1.GetWeightsResponse, error)
	ListWeights(context.Context, *farev1.ListWeightsRequest) (*farev1.ListWeightsResponse, error)
	Drain(context.Context, *farev1.DrainRequest) (*farev1.DrainResponse, error)
	Undrain(context.Context, *farev1.UndrainRequest) (*farev1.UndrainResponse, error)
	ListPlanes(context.Context, *farev1.ListPlanesRequest) (*farev1.ListPlanesResponse, error)
	ListSessions(context.Context, *farev1.ListSessionsRequest) (*farev1.ListSessionsResponse, error)
}

// forwarding is what a data plane forwards by at a moment.
type forwarding struct {
	// check compares it toward a destination with the weights of its planes, and with what the daemon says of it (nil: nothing); it
	// returns the difference, or "".
	check func(dst netip.Addr, weights []uint32, said *farev1.DestinationWeights) string
	// avoids says which of some devices is still used toward a destination, or "".
	avoids func(dst netip.Addr, devices []string) string
}
