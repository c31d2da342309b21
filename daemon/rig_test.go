package daemon

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/daemon/internal/core"
	"github.com/fared/fared/daemon/internal/coretest"
	"github.com/fared/fared/dataplane/memory"
	"github.com/fared/fared/fare"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// rig is a server's daemon between raw leaves, one per session, and a data plane in memory.
type rig struct {
	t       testing.TB
	s       shape
	d       *Daemon
	links   *testLinks
	leaves  []*rawLeaf
	dp      *memory.Dataplane
	journal *journal
	cancel  func() // ends the context of Run
	stop    func()
}

// rigOptions are a test's deviations from the default rig.
type rigOptions struct {
	dp     *memory.Dataplane        // an existing data plane
	conn   grpc.ClientConnInterface // instead of a connection to dp
	leaves func(*rawLeaf)           // called before the daemon starts
	deps   func(*Deps)
	links  *testLinks
	// checked reports that the caller has called checkLeaks, before creating objects that end after the rig.
	checked bool
}

var nextNet = 100

// newRig starts leaves, data plane and daemon. They end with the test.
func newRig(t testing.TB, s shape, o rigOptions) *rig {
	t.Helper()
	if !o.checked {
		checkLeaks(t)
	}
	s.Port, s.Net = netnstest.FreePort(t), nextNet
	if nextNet++; nextNet > 250 {
		nextNet = 100
	}
	// The leaves send no KEEPALIVE, so sessions last for the hold time.
	if hold := "bgp: {hold_time: 1h"; !strings.Contains(s.Extra, "bgp: {") {
		s.Extra += hold + "}\n"
	} else {
		s.Extra = strings.Replace(s.Extra, "bgp: {", hold+", ", 1)
	}
	s = s.Defaults()
	r := &rig{t: t, s: s, journal: &journal{}, dp: o.dp, links: o.links}
	if r.dp == nil {
		r.dp = memory.New(memory.Config{Observe: r.observe})
	}
	n := s.Planes * s.SubPorts
	if r.links == nil {
		r.links = newTestLinks(n, 400e9)
	}
	for i := range n {
		l := newRawLeaf(t, s.Device(i), uint16(s.PeerAS(i)), leafNode(i/s.SubPorts), netip.AddrPortFrom(s.There(i), uint16(s.Port)), r.journal)
		if o.leaves != nil {
			o.leaves(l)
		}
		r.leaves = append(r.leaves, l)
	}
	deps := Deps{Links: r.links, Dataplane: o.conn, Embedded: true, Instance: "test"}
	if o.conn == nil {
		conn, err := memory.Dial(r.dp)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		deps.Dataplane = conn
	}
	if o.deps != nil {
		o.deps(&deps)
	}
	d, err := New(s.Config(t), deps)
	if err != nil {
		t.Fatal(err)
	}
	r.d = d
	r.cancel, r.stop = running(t, d)
	return r
}

// dialMemory is a Deps.Memory.
func dialMemory() (Conn, error) { return memory.Dial(memory.New(memory.Config{})) }

// running runs a daemon until the test ends or stop is called. cancel ends the daemon's context without waiting.
func running(t testing.TB, d *Daemon) (cancel, stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- d.Run(ctx) }()
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
		if err := d.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	}
	t.Cleanup(stop)
	return cancel, stop
}

func (r *rig) observe(op *farev1.Operation) {
	switch x := op.Op.(type) {
	case *farev1.Operation_SubPort:
		r.journal.add("dataplane: sub-port %s %v", x.SubPort.Device, x.SubPort.Up)
	case *farev1.Operation_SetVector:
		var members []string
		for _, m := range x.SetVector.Members {
			members = append(members, fmt.Sprintf("%s=%d", m.Device, m.Weight))
		}
		r.journal.add("dataplane: group %s", strings.Join(members, " "))
	case *farev1.Operation_SetDestination:
		r.journal.add("dataplane: destination %s", x.SetDestination.Prefix)
	case *farev1.Operation_DeleteDestination:
		r.journal.add("dataplane: no destination %s", x.DeleteDestination.GetPrefix())
	case *farev1.Operation_DeleteVector:
		r.journal.add("dataplane: no group")
	}
}

// weights returns the daemon's weights for a destination, "1:1" when all of them are in effect.
func (r *rig) weights(d netip.Prefix) string {
	resp, err := r.d.WeightService().GetWeights(context.Background(), &farev1.GetWeightsRequest{Destination: d.Addr().String()})
	if err != nil {
		return "unknown"
	}
	if !resp.Weights[0].Reachable {
		return "unreachable"
	}
	var out []string
	for _, p := range resp.Weights[0].Planes {
		w := fmt.Sprint(p.Weight)
		if !p.InEffect {
			w += "?"
		}
		out = append(out, w)
	}
	return strings.Join(out, ":")
}

// forwards returns the weights by which the data plane forwards to a destination.
func (r *rig) forwards(d netip.Prefix) string {
	members, err := r.dp.Weights(d.Addr())
	if err != nil {
		return err.Error()
	}
	var out []string
	for _, m := range members {
		out = append(out, fmt.Sprintf("%s=%d", m.Device, m.Weight))
	}
	return strings.Join(out, " ")
}

func (r *rig) wait(d netip.Prefix, want string) {
	r.t.Helper()
	eventually(r.t, fmt.Sprintf("weights %s of %s (are %s)", want, d, r.weights(d)), func() bool { return r.weights(d) == want })
}

// settled waits until every session is up and has sent End-of-RIB, n destinations are known, and no operation is
// pending, also none that removes objects of the way here.
func (r *rig) settled(n int) {
	r.t.Helper()
	eventually(r.t, fmt.Sprintf("%d destinations in effect, nothing pending", n), func() bool {
		if _, there := r.dp.Size(); there != n {
			return false
		}
		resp, err := r.d.FabricService().GetStatus(context.Background(), &farev1.GetStatusRequest{})
		st := r.d.client.Status() // after resp: removals are queued before Converged is set
		return err == nil && resp.Converged && int(resp.SessionsEstablished) == len(r.leaves) && int(resp.DestinationsReachable) == n &&
			resp.Dataplane.OperationsPending == 0 && st.Queued == 0 && st.InFlight == 0
	})
	if groups, _ := r.dp.Size(); n > 0 && groups == 0 {
		r.t.Fatal("destinations without a group")
	}
}

// uniform waits until all of n destinations have the same weights from one group, so that no change is pending.
func (r *rig) uniform(weights string, n int) {
	r.t.Helper()
	r.wait(destination(n-1), weights)
	eventually(r.t, "one group for all", func() bool { groups, _ := r.dp.Size(); return groups == 1 })
	r.wait(destination(n-1), weights)
}

func (r *rig) waitAnnounced(i int, p netip.Prefix, want string) {
	r.t.Helper()
	eventually(r.t, fmt.Sprintf("leaf %d has %s of %s", i, want, p), func() bool { return r.leaves[i].has(p) == want })
}

// inside runs f on the daemon's loop.
func (r *rig) inside(f func(*loop)) {
	r.t.Helper()
	if err := r.d.loop.do(context.Background(), func() { f(r.d.loop) }); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) stage(t core.DrainTarget) string {
	stage := "none"
	r.inside(func(l *loop) {
		l.core.Drains(func(is core.DrainTarget, s core.DrainStage) {
			if is == t {
				stage = s.String()
			}
		})
	})
	return stage
}

func (r *rig) drain(plane string, on bool) {
	r.t.Helper()
	target := &farev1.DrainTarget{Target: &farev1.DrainTarget_Plane{Plane: plane}}
	var err error
	if on {
		_, err = r.d.FabricService().Drain(context.Background(), &farev1.DrainRequest{Target: target})
	} else {
		_, err = r.d.FabricService().Undrain(context.Background(), &farev1.UndrainRequest{Target: target})
	}
	if err != nil {
		r.t.Fatal(err)
	}
}

// inOrder fails the test unless the journal has lines with these prefixes, after line n and in this order.
func (r *rig) inOrder(n int, prefixes ...string) {
	r.t.Helper()
	at := n
	for _, p := range prefixes {
		i := r.journal.index(at, p)
		if i < 0 {
			r.t.Fatalf("no %q after line %d; it should be in order %q:\n%s", p, at-n, prefixes, strings.Join(r.journal.since(n), "\n"))
		}
		at = i + 1
	}
}

// announceAll makes every leaf announce destinations from the start.
func announceAll(b fare.Bandwidth, n int) func(*rawLeaf) {
	return func(l *rawLeaf) {
		for _, d := range coretest.Destinations(n) {
			l.table[d] = b
		}
	}
}

func programmed(dp *memory.Dataplane) []string {
	var out []string
	for _, d := range dp.State().Destinations {
		out = append(out, d.Prefix)
	}
	slices.Sort(out)
	return out
}
