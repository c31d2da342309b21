package backend

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"

	"google.golang.org/grpc"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/daemon"
	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/dataplane/memory"
	"github.com/fared/fared/topo"
)

// inProcess is a fabric whose nodes are daemons in this process, with in-memory data planes and simulated cables.
type inProcess struct {
	*Plan
	log    *slog.Logger
	nodes  map[*topo.Node]*node
	fail   func(error)
	cancel context.CancelFunc // nil until start
	done   sync.WaitGroup
}

// NewInProcess returns a fabric in this process; build creates its nodes.
func NewInProcess(p *Plan, log *slog.Logger) Backend { return &inProcess{Plan: p, log: log} }

// node is one daemon of the fabric.
type node struct {
	name      string
	daemon    *daemon.Daemon
	links     *cables
	dataplane *memory.Dataplane // nil on leaves
	conn      *memory.Conn
}

func (b *inProcess) Start(ctx context.Context) error {
	ctx, b.cancel = context.WithCancel(ctx)
	for _, at := range b.leavesFirst() {
		n := b.nodes[at]
		b.done.Go(func() {
			if err := n.daemon.Run(ctx); err != nil && ctx.Err() == nil {
				b.fail(fmt.Errorf("%s: %w", n.name, err))
			}
		})
	}
	return nil
}

// Build creates every daemon without running any.
func (b *inProcess) Build(_ context.Context, fail func(error)) error {
	b.fail = fail
	b.nodes = map[*topo.Node]*node{}
	for _, at := range b.leavesFirst() {
		n := &node{name: at.Name, links: newCables(b.At(at))}
		if at.Kind == topo.KindServer {
			n.dataplane = memory.New(memory.Config{})
		}
		b.nodes[at] = n
		if err := n.create(b.Files(at, b.Site)[0].Text, b.log); err != nil {
			return err
		}
	}
	return nil
}

func (n *node) create(text string, log *slog.Logger) error {
	cfg, err := config.Parse(n.name+".yaml", []byte(text))
	if err != nil {
		return err
	}
	deps := daemon.Deps{Logger: log.With("node", n.name), Links: n.links, Instance: n.name, Embedded: true}
	if n.dataplane != nil {
		if n.conn, err = memory.Dial(n.dataplane); err != nil {
			return err
		}
		deps.Dataplane = n.conn
	}
	n.daemon, err = daemon.New(cfg, deps)
	return err
}

func (b *inProcess) Close(bool) error {
	if b.cancel != nil {
		b.cancel()
	}
	b.done.Wait()
	for _, n := range b.nodes {
		if n.daemon != nil {
			n.daemon.Close()
		}
		if n.conn != nil {
			n.conn.Close()
		}
	}
	return nil
}

func (b *inProcess) Logs() string { return "" }

func (b *inProcess) Leave() ([]string, error) {
	return nil, errors.Join(errors.New("a fabric inside this process cannot outlive the process"), b.Close(false))
}

// services gives access to a daemon's services without a network in between.
type services struct {
	farev1.WeightServiceServer
	farev1.FabricServiceServer
}

func (s services) Follow(ctx context.Context, r *farev1.WatchWeightsRequest, take func(*farev1.WatchWeightsResponse) error) error {
	return s.WatchWeights(r, &stream[farev1.WatchWeightsResponse]{ctx: ctx, take: take})
}

func (s services) FollowEvents(ctx context.Context, r *farev1.WatchEventsRequest, take func(*farev1.FabricEvent) error) error {
	return s.WatchEvents(r, &stream[farev1.FabricEvent]{ctx: ctx, take: take})
}

// stream is the stream of a watch of a daemon in this process.
type stream[T any] struct {
	grpc.ServerStream // watches use only the methods below
	ctx               context.Context
	take              func(*T) error
}

func (s *stream[T]) Context() context.Context { return s.ctx }
func (s *stream[T]) Send(m *T) error          { return s.take(m) }

func (b *inProcess) API(n *topo.Node) API {
	d := b.nodes[n].daemon
	return services{d.WeightService(), d.FabricService()}
}

// ErrNoProcesses is returned for faults of processes and packets.
var ErrNoProcesses error = NewOptionError("a fabric inside one process has no separate processes and no packets: use network namespaces ({Netns}) or containers ({Containerlab})")

func (b *inProcess) Crash(int, Programs) error                     { return ErrNoProcesses }
func (b *inProcess) Revive(int, Programs) error                    { return ErrNoProcesses }
func (b *inProcess) Freeze(*topo.Node, bool) error                 { return ErrNoProcesses }
func (b *inProcess) Lose(context.Context, *topo.Cable, bool) error { return ErrNoProcesses }

func (b *inProcess) SetCables(_ context.Context, set []Cable) error {
	for _, c := range set {
		for _, n := range []*topo.Node{c.Down.Node, c.Up.Node} {
			b.nodes[n].links.set(b.port(n, c.Cable), c.Connected)
		}
	}
	return nil
}

// Power does nothing: a daemon whose cables are all down has the same effect as one without power.
func (b *inProcess) Power(context.Context, *topo.Node, bool) error { return nil }

func (b *inProcess) Light(leaf *topo.Node) (up, all int) { return b.nodes[leaf].links.count() }

func (b *inProcess) SlotsMoved() uint64 {
	var n uint64
	for _, s := range b.Server {
		n += b.nodes[s].daemon.SlotsMoved()
	}
	return n
}

func (b *inProcess) Forwarding(_ context.Context, server int) (Forwarding, error) {
	return memoryTable{b.nodes[b.Server[server]].dataplane}, nil
}

// memoryTable is the forwarding state of a data plane in memory.
type memoryTable struct{ *memory.Dataplane }

func (t memoryTable) Toward(src, dst netip.Addr) Route {
	live, err := t.WeightsFrom(src, dst)
	r := Route{Err: err, Planes: map[string]uint64{}, Devices: map[string]uint64{}}
	for _, m := range live {
		r.Planes[m.Plane] += uint64(m.Weight)
		r.Devices[m.Device] += uint64(m.Weight)
	}
	return r
}
