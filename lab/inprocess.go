package lab

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/daemon"
	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/dataplane/memory"
	"github.com/fared/fared/topo"
)

// inProcess is a fabric whose nodes are daemons in this process, with in-memory data planes and simulated cables.
type inProcess struct {
	*model
	log     *slog.Logger
	nodes   map[*topo.Node]*node
	weights []*follower // by server; empty without a timeline
	cancel  context.CancelFunc
	done    sync.WaitGroup
}

// node is one daemon of the fabric.
type node struct {
	name      string
	daemon    *daemon.Daemon
	links     *cables
	dataplane *memory.Dataplane // nil on leaves
	conn      *memory.Conn
}

func (b *inProcess) start(ctx context.Context, fail func(error)) error {
	ctx, b.cancel = context.WithCancel(ctx)
	if err := b.build(); err != nil {
		return err
	}
	for _, at := range b.leavesFirst() {
		n := b.nodes[at]
		b.done.Go(func() {
			if err := n.daemon.Run(ctx); err != nil && ctx.Err() == nil {
				fail(fmt.Errorf("%s: %w", n.name, err))
			}
		})
	}
	if !b.options.Timeline {
		return nil
	}
	for _, at := range b.Server {
		w, n := newFollower(b.plan, at.Index), b.nodes[at]
		b.weights = append(b.weights, w)
		b.done.Go(func() {
			if err := w.watch(ctx, n.daemon.WeightService()); err != nil && ctx.Err() == nil {
				fail(fmt.Errorf("weights of %s: %w", n.name, err))
			}
		})
	}
	return nil
}

func (b *inProcess) followers() []*follower { return b.weights }

// build creates every daemon without running any.
func (b *inProcess) build() error {
	b.nodes = map[*topo.Node]*node{}
	for _, at := range b.leavesFirst() {
		n := &node{name: at.Name, links: newCables(b.At(at))}
		if at.Kind == topo.KindServer {
			n.dataplane = memory.New(memory.Config{})
		}
		b.nodes[at] = n
		if err := n.create(b.Files(at, b.site)[0].Text, b.log); err != nil {
			return err
		}
	}
	return nil
}

func (b *inProcess) leavesFirst() []*topo.Node { return slices.Concat(b.Spine, b.Leaf, b.Server) }

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

func (b *inProcess) close(bool) error {
	b.cancel()
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

func (b *inProcess) logs() string { return "" }

func (b *inProcess) leave() ([]string, error) {
	return nil, errors.Join(errors.New("a fabric inside this process cannot outlive the process"), b.close(false))
}

// services gives access to a daemon's services without a network in between.
type services struct {
	farev1.WeightServiceServer
	farev1.FabricServiceServer
}

func (b *inProcess) api(n *topo.Node) api {
	d := b.nodes[n].daemon
	return services{d.WeightService(), d.FabricService()}
}

// errNoProcesses is returned for actions that need processes or packets; Check rejects scenarios with such
// actions.
var errNoProcesses = errors.New("a fabric inside one process has no separate processes and no packets: use network namespaces (--netns) or containers (--containerlab)")

func (b *inProcess) crash(int, parts) error                        { return errNoProcesses }
func (b *inProcess) revive(int, parts) error                       { return errNoProcesses }
func (b *inProcess) freeze(*topo.Node, bool) error                 { return errNoProcesses }
func (b *inProcess) lose(context.Context, *topo.Cable, bool) error { return errNoProcesses }

func (b *inProcess) cables(_ context.Context, set []cable) error {
	for _, c := range set {
		for _, n := range []*topo.Node{c.Down.Node, c.Up.Node} {
			b.nodes[n].links.set(b.port(n, c.Cable), c.up)
		}
	}
	return nil
}

// power does nothing: a daemon whose cables are all down has the same effect as one without power.
func (b *inProcess) power(context.Context, *topo.Node, bool) error { return nil }

func (b *inProcess) light(leaf *topo.Node) (up, all int) { return b.nodes[leaf].links.count() }

func (b *inProcess) slotsMoved() uint64 {
	var n uint64
	for _, s := range b.Server {
		n += b.nodes[s].daemon.SlotsMoved()
	}
	return n
}

func (b *inProcess) packets() *traffic { return nil }

func (b *inProcess) transfer() *transfer { return nil }

func (b *inProcess) forwarding(_ context.Context, server int) (*forwarding, error) {
	dataplane := b.nodes[b.Server[server]].dataplane
	return &forwarding{check: func(to way, want vector, _ *farev1.DestinationWeights) string {
		live, err := dataplane.WeightsFrom(b.address(to.src), to.dst)
		if err != nil && slices.Max(want.planes) > 0 {
			return fmt.Sprintf("data plane: %v", err)
		}
		got, devices := make([]uint32, b.Planes), map[string]uint64{}
		for _, m := range live {
			devices[m.Device] += uint64(m.Weight)
			for p := range got {
				if b.PlaneName(p) == m.Plane {
					got[p] += m.Weight
				}
			}
		}
		if !slices.Equal(lowestTerms(got), want.planes) {
			return fmt.Sprintf("the data plane forwards by %s, want %s", Ratio(got), Ratio(want.planes))
		}
		if text := b.checkLanes(to.src, devices, want); text != "" {
			return "the data plane" + text
		}
		if b.weights == nil {
			return ""
		}
		return b.weights[server].behind(to, want.planes, true)
	}}, nil
}
