package lab

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
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
	*plan
	log     *slog.Logger
	nodes   map[*topo.Node]*node
	weights []*follower // by server; none when no timeline is asked for
	cancel  context.CancelFunc
	done    sync.WaitGroup
}

// node is one daemon of the fabric.
type node struct {
	name      string
	daemon    *daemon.Daemon
	links     *cables
	dataplane *memory.Dataplane // servers only
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
		w, n := newFollower(), b.nodes[at]
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

// build creates every daemon; none runs yet.
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
	return nil, errors.Join(errors.New("a fabric inside this process ends with it"), b.close(false))
}

// services are a daemon's own, without a network between.
type services struct {
	farev1.WeightServiceServer
	farev1.FabricServiceServer
}

func (b *inProcess) api(n *topo.Node) api {
	d := b.nodes[n].daemon
	return services{d.WeightService(), d.FabricService()}
}

// errNoProcesses: Check has refused a scenario that would come here.
var errNoProcesses = errors.New("a fabric inside one process has no processes and packets of its own: play it on network namespaces (--netns) or containers (--containerlab)")

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

// power: a daemon whose cables are all dark is as good as dead.
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
	return &forwarding{check: func(dst netip.Addr, want []uint32, _ *farev1.DestinationWeights) string {
		live, err := dataplane.Weights(dst)
		if err != nil && slices.Max(want) > 0 {
			return fmt.Sprintf("data plane: %v", err)
		}
		got := make([]uint32, b.Planes)
		for _, m := range live {
			for p := range got {
				if b.PlaneName(p) == m.Plane {
					got[p] += m.Weight
				}
			}
		}
		if !slices.Equal(lowestTerms(got), want) {
			return fmt.Sprintf("the data plane forwards by %s, should by %s", Ratio(got), Ratio(want))
		}
		if b.weights == nil {
			return ""
		}
		return b.weights[server].behind(dst, want, true)
	}}, nil
}
