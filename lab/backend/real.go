package backend

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/rtnl"
	"github.com/fared/fared/topo"
)

// RateScale is the factor by which the cables of a fabric of namespaces are shaped to less than their speed.
const RateScale = topo.LabRateScale

// real is the common part of fabrics whose nodes have network namespaces and separate processes, created by the lab or
// by containerlab.
type real struct {
	*Plan
	log     *slog.Logger
	fail    func(error)
	clients map[*topo.Node]*client // clients of the nodes that run fared
	conns   []*grpc.ClientConn
	mu      sync.Mutex // guards the records of processes
}

func newReal(p *Plan, log *slog.Logger) *real {
	return &real{Plan: p, log: log, clients: map[*topo.Node]*client{}}
}

// Impatient returns gRPC connection parameters with short delays between attempts, for a server on this machine that is
// about to listen.
func Impatient() grpc.ConnectParams {
	retry := backoff.DefaultConfig
	retry.BaseDelay, retry.MaxDelay = 20*time.Millisecond, 100*time.Millisecond
	return grpc.ConnectParams{Backoff: retry, MinConnectTimeout: time.Second}
}

// dial creates clients of every daemon; their calls wait until it listens.
func (b *real) dial() error {
	for _, n := range b.leavesFirst() {
		if b.Software(n) != topo.Fared {
			continue
		}
		conn, err := grpc.NewClient("unix:"+b.Site.Socket(n.Name), grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20), grpc.WaitForReady(true)),
			grpc.WithConnectParams(Impatient()), grpc.WithIdleTimeout(0))
		if err != nil {
			return err
		}
		b.conns = append(b.conns, conn)
		b.clients[n] = &client{weights: farev1.NewWeightServiceClient(conn), fabric: farev1.NewFabricServiceClient(conn)}
	}
	return nil
}

// establish waits until every session of every server is established; progress receives the count.
func (b *real) establish(ctx context.Context, progress func(string)) error {
	ctx, cancel := context.WithTimeout(ctx, b.StartTimeout())
	defer cancel()
	var wanted, shown uint32
	for _, n := range b.Server {
		wanted += uint32(len(b.At(n)))
	}
	for {
		var up uint32
		for _, n := range b.Server {
			status, err := b.clients[n].fabric.GetStatus(ctx, &farev1.GetStatusRequest{})
			if err != nil {
				return errors.Join(ctx.Err(), fmt.Errorf("%s: %w", n.Name, err)) // gRPC wraps the context's error in its own
			}
			up += status.SessionsEstablished
		}
		if up != shown {
			progress(fmt.Sprintf("%d of %d BGP sessions", up, wanted))
			shown = up
		}
		if up == wanted {
			return nil
		}
		if err := Sleep(ctx, 50*time.Millisecond); err != nil {
			return fmt.Errorf("%d of %d BGP sessions are established%s: %w", up, wanted, b.missing(), err)
		}
	}
}

// missing names the first session that is not established.
func (b *real) missing() string {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	for _, n := range b.Server {
		list, err := b.clients[n].ListSessions(ctx, &farev1.ListSessionsRequest{})
		if err != nil {
			continue // another server may respond
		}
		for _, s := range list.Sessions {
			if s.State != Established {
				return fmt.Sprintf(" (%s: %s is %s: %s)", n.Name, s.Name, s.State, s.Reason)
			}
		}
	}
	return ""
}

func (b *real) API(n *topo.Node) API {
	if c := b.clients[n]; c != nil {
		return c
	}
	return nil
}

// SetCables sets the upper ends of cables up or down, which changes the carrier at both ends.
func (b *real) SetCables(ctx context.Context, set []Cable) error {
	lines := map[*topo.Node][]string{}
	for _, c := range set {
		state := "down"
		if c.Connected {
			state = "up"
		}
		lines[c.Up.Node] = append(lines[c.Up.Node], fmt.Sprintf("link set dev %s %s", c.Up.Device, state))
	}
	var errs []error
	for n, batch := range lines {
		errs = append(errs, b.Namespace(n.Name).batch(ctx, "ip", batch))
	}
	return errors.Join(errs...)
}

// Light reads the leaf's kernel. A leaf whose kernel cannot be read has no device that is up.
func (b *real) Light(leaf *topo.Node) (up, all int) {
	ports := b.At(leaf)
	var links []rtnl.Link
	if err := b.Namespace(leaf.Name).Do(func() error {
		conn, err := rtnl.Dial()
		if err != nil {
			return err
		}
		defer conn.Close()
		links, err = conn.Links()
		return err
	}); err != nil {
		return 0, len(ports)
	}
	for _, c := range ports {
		here, _ := c.At(leaf)
		if slices.ContainsFunc(links, func(l rtnl.Link) bool { return l.Name == here.Device && l.Usable() }) {
			up++
		}
	}
	return up, len(ports)
}

// Lose makes the upper end of a cable drop all packets in both directions, by a filter of one instruction: return
// TC_ACT_SHOT.
func (b *real) Lose(ctx context.Context, c *topo.Cable, on bool) error {
	lines := []string{fmt.Sprintf("qdisc del dev %s clsact", c.Up.Device)}
	if on {
		lines = []string{fmt.Sprintf("qdisc add dev %s clsact", c.Up.Device)}
		for _, way := range []string{"ingress", "egress"} {
			lines = append(lines, fmt.Sprintf(`filter add dev %s %s bpf da bytecode "1,6 0 0 2,"`, c.Up.Device, way))
		}
	}
	return b.Namespace(c.Up.Node.Name).batch(ctx, "tc", lines)
}

// SlotsMoved returns 0: the daemons run in other processes.
func (b *real) SlotsMoved() uint64 { return 0 }

// hangUp closes the connections to the daemons.
func (b *real) hangUp() {
	for _, c := range b.conns {
		c.Close()
	}
}

// died marks a server's daemon as dead, so that calls do not wait for it, or as alive again.
func (b *real) died(server int, dead bool) {
	c := b.clients[b.Server[server]]
	if dead {
		c.crashes.Add(1)
	}
	c.dead.Store(dead)
}

// client connects to a node's daemon over its socket.
type client struct {
	weights farev1.WeightServiceClient
	fabric  farev1.FabricServiceClient
	// dead is true while the daemon has crashed, and calls must not wait for it; crashes counts its crashes.
	dead    atomic.Bool
	crashes atomic.Uint32
}

// ErrDead is the error of calls to a daemon that has crashed.
var ErrDead = errors.New("fared has crashed here: revive it first")

// callTimeout bounds a call to a daemon. Calls wait until the daemon listens, so one that ended without a crash of the
// scenario would never return.
const callTimeout = time.Minute

// ask calls a daemon, or returns errDead.
func ask[Q, R any](ctx context.Context, c *client, call func(context.Context, Q, ...grpc.CallOption) (R, error), question Q) (answer R, err error) {
	if c.dead.Load() {
		return answer, ErrDead
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	return call(ctx, question)
}

func (c *client) GetWeights(ctx context.Context, r *farev1.GetWeightsRequest) (*farev1.GetWeightsResponse, error) {
	return ask(ctx, c, c.weights.GetWeights, r)
}

func (c *client) ListWeights(ctx context.Context, r *farev1.ListWeightsRequest) (*farev1.ListWeightsResponse, error) {
	return ask(ctx, c, c.weights.ListWeights, r)
}

func (c *client) Drain(ctx context.Context, r *farev1.DrainRequest) (*farev1.DrainResponse, error) {
	return ask(ctx, c, c.fabric.Drain, r)
}

func (c *client) Undrain(ctx context.Context, r *farev1.UndrainRequest) (*farev1.UndrainResponse, error) {
	return ask(ctx, c, c.fabric.Undrain, r)
}

func (c *client) ListPlanes(ctx context.Context, r *farev1.ListPlanesRequest) (*farev1.ListPlanesResponse, error) {
	return ask(ctx, c, c.fabric.ListPlanes, r)
}

func (c *client) ListSessions(ctx context.Context, r *farev1.ListSessionsRequest) (*farev1.ListSessionsResponse, error) {
	return ask(ctx, c, c.fabric.ListSessions, r)
}

func (c *client) GetStatus(ctx context.Context, r *farev1.GetStatusRequest) (*farev1.GetStatusResponse, error) {
	return ask(ctx, c, c.fabric.GetStatus, r)
}

// Follow applies a subscription again after each crash by faults: the subscriber keeps the last weights until it
// receives new ones, as queue pairs do.
func (c *client) Follow(ctx context.Context, r *farev1.WatchWeightsRequest, take func(*farev1.WatchWeightsResponse) error) error {
	for {
		crashes := c.crashes.Load()
		if err := c.watch(ctx, r, take); c.crashes.Load() == crashes {
			return err
		}
	}
}

// FollowEvents ends with the daemon: the page subscribes again.
func (c *client) FollowEvents(ctx context.Context, r *farev1.WatchEventsRequest, take func(*farev1.FabricEvent) error) error {
	if c.dead.Load() {
		return ErrDead
	}
	events, err := c.fabric.WatchEvents(ctx, r)
	for err == nil {
		var m *farev1.FabricEvent
		if m, err = events.Recv(); err == nil {
			err = take(m)
		}
	}
	return err
}

// watch calls take with every message of WatchWeights until the stream ends.
func (c *client) watch(ctx context.Context, r *farev1.WatchWeightsRequest, take func(*farev1.WatchWeightsResponse) error) error {
	stream, err := c.weights.WatchWeights(ctx, r)
	if err != nil {
		return err
	}
	for {
		message, err := stream.Recv()
		if err != nil {
			return err
		}
		if err := take(message); err != nil {
			return err
		}
	}
}
