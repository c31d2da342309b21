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
)

// inProcess is a fabric whose nodes are daemons in this process, with in-memory data planes and simulated cables.
type inProcess struct {
	*plan
	log     *slog.Logger
	servers []*node
	leaves  []*node
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
	for _, n := range slices.Concat(b.leaves, b.servers) {
		b.done.Go(func() {
			if err := n.daemon.Run(ctx); err != nil && ctx.Err() == nil {
				fail(fmt.Errorf("%s: %w", n.name, err))
			}
		})
	}
	return nil
}

// build creates every daemon; none runs yet.
func (b *inProcess) build() error {
	for plane := range b.Planes {
		n := &node{name: b.leafName(plane), links: newCables(b.Servers*b.SubPorts, b.Speed)}
		b.leaves = append(b.leaves, n)
		if err := n.create(b.leafConfig(plane), b.log); err != nil {
			return err
		}
	}
	for s := range b.Servers {
		n := &node{name: b.serverName(s), links: newCables(b.Planes*b.SubPorts, b.Speed), dataplane: memory.New(memory.Config{})}
		b.servers = append(b.servers, n)
		if err := n.create(b.serverConfig(s), b.log); err != nil {
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

func (b *inProcess) close(bool) error {
	b.cancel()
	b.done.Wait()
	for _, n := range slices.Concat(b.leaves, b.servers) {
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

func (b *inProcess) api(server int) api { return b.servers[server].api() }

func (b *inProcess) leafAPI(plane int) api { return b.leaves[plane].api() }

func (n *node) api() api { return services{n.daemon.WeightService(), n.daemon.FabricService()} }

// errNoProcesses: Check has refused a scenario that would come here.
var errNoProcesses = errors.New("a fabric inside one process has no processes to crash: play it on network namespaces (--netns)")

func (b *inProcess) crash(int, parts) error  { return errNoProcesses }
func (b *inProcess) revive(int, parts) error { return errNoProcesses }

func (b *inProcess) cables(_ context.Context, plane int, set []cable) error {
	for _, c := range set {
		b.servers[c.server].links.set(b.serverSubPort(plane, c.sub), c.up)
		b.leaves[plane].links.set(b.leafSubPort(c.server, c.sub), c.up)
	}
	return nil
}

// power: a daemon whose cables are all dark is as good as dead.
func (b *inProcess) power(context.Context, int, bool) error { return nil }

func (b *inProcess) light(plane int) (up, all int) { return b.leaves[plane].links.count() }

func (b *inProcess) slotsMoved() uint64 {
	var n uint64
	for _, s := range b.servers {
		n += s.daemon.SlotsMoved()
	}
	return n
}

func (b *inProcess) packets() *traffic { return nil }

func (b *inProcess) forwarding(_ context.Context, server int) (*forwarding, error) {
	dataplane := b.servers[server].dataplane
	return &forwarding{check: func(dst netip.Addr, want []uint32, _ *farev1.DestinationWeights) string {
		live, err := dataplane.Weights(dst)
		if err != nil && slices.Max(want) > 0 {
			return fmt.Sprintf("data plane: %v", err)
		}
		got := make([]uint32, b.Planes)
		for _, m := range live {
			for p := range got {
				if b.planeName(p) == m.Plane {
					got[p] += m.Weight
				}
			}
		}
		if !slices.Equal(lowestTerms(got), want) {
			return fmt.Sprintf("the data plane forwards by %s, should by %s", Ratio(got), Ratio(want))
		}
		return ""
	}}, nil
}
