package lab

import (
	"context"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/topo"
)

// backend implements a fabric's nodes and cables. Scenarios, model and checks use only this interface. Calls on one
// Fabric are sequential, except api and light, which may run at any time after start.
type backend interface {
	// start starts every node, with all cables up. It calls fail with the error of a node that exits by itself later.
	start(ctx context.Context, fail func(error)) error
	// api returns the API of a node's daemon, or nil if the node's software has none.
	api(n *topo.Node) api
	// cables brings cables up or down, at both ends. It is also called for cables whose drain has changed.
	cables(ctx context.Context, set []cable) error
	// power stops a node like a power cut, or starts it again; its cables are set by separate calls of cables.
	power(ctx context.Context, n *topo.Node, on bool) error
	// freeze stops every process of a node, or continues them; its kernel keeps forwarding.
	freeze(n *topo.Node, on bool) error
	// lose makes a cable drop every packet in both directions while its carrier stays up, or ends the loss.
	lose(ctx context.Context, c *topo.Cable, on bool) error
	// crash kills processes of a server; revive restarts them.
	crash(server int, p parts) error
	revive(server int, p parts) error
	// light returns the number of a leaf's cables that are up, and the number of its cables.
	light(leaf *topo.Node) (up, all int)
	// forwarding reads the forwarding state of a server's data plane.
	forwarding(ctx context.Context, server int) (*forwarding, error)
	// slotsMoved returns the number of slots that have left their place since the start, over all servers.
	slotsMoved() uint64
	// followers returns one follower per server, or nil if weights are not followed.
	followers() []*follower
	// packets returns the packet traffic of the fabric, or nil if there is none.
	packets() *traffic
	// transfer returns the queue pair traffic of the fabric, or nil if there is none.
	transfer() *transfer
	// logs returns the folder with the nodes' logs, or "" if there is none.
	logs() string
	// close stops everything and waits for it. failed keeps the logs for reading.
	close(failed bool) error
	// leave closes a fabric that continues without this process. It returns lines that explain how to inspect and how
	// to end it.
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

// forwarding is the forwarding state of a data plane at one moment.
type forwarding struct {
	// check compares the state toward a destination with the model and with the daemon's weights for it (nil if it has
	// none). It returns the difference, or "".
	check func(to way, want vector, said *farev1.DestinationWeights) string
	// avoids returns a description of the first of some devices that is still used toward a destination, or "".
	avoids func(to way, devices []string) string
}
