package lab

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/lab/backend"
	"github.com/fared/fared/lab/judge"
	"github.com/fared/fared/lab/probe"
	"github.com/fared/fared/topo"
)

// demand checks the weights that a script states.
func (f *Fabric) demand(e Expectation) []string {
	var wrong []string
	sources, _ := f.GroupsNamed(f.subst(e.Source)) // Check has verified the names
	destinations, _ := f.GroupsNamed(f.subst(e.Destination))
	for _, src := range sources {
		for _, dst := range destinations {
			if f.Host(src) == f.Host(dst) {
				continue
			}
			if got := f.observed(src, dst); !slices.Equal(got, e.Weights) {
				wrong = append(wrong, fmt.Sprintf("line %d: %s -> %s has %s, the script expects %s", e.Line, f.Groups()[src].Name, f.Groups()[dst].Name, judge.Ratio(got), judge.Ratio(e.Weights)))
			}
		}
	}
	return wrong
}

func (f *Fabric) named(w []uint32) map[string]uint32 {
	m := make(map[string]uint32, len(w))
	for p, v := range w {
		m[f.PlaneName(p)] = v
	}
	return m
}

// observed queries a server's daemon for a source group's weights toward another group's first GPU. The weights are
// zero if the daemon has none.
func (f *Fabric) observed(src, dst int) []uint32 {
	resp, err := f.backend.API(f.Server[f.Host(src)]).GetWeights(context.Background(),
		&farev1.GetWeightsRequest{Destination: f.Address(dst).String(), Sources: []string{f.Address(src).String()}})
	if errors.Is(err, backend.ErrDead) {
		return f.InForce(src, dst) // the checks have verified the kernel
	}
	if err != nil || len(resp.Weights) != 1 {
		return make([]uint32, f.Planes)
	}
	return probe.PlaneWeights(f.Fabric, resp.Weights[0])
}

// Weights queries a server's daemon for a source group's weights toward another group's first GPU, by plane and in
// lowest terms. The weights are zero if the daemon has none. Source groups are numbered from 0, as in
// topo.Fabric.Groups.
func (f *Fabric) Weights(src, dst int) []uint32 { return f.observed(src, dst) }

// settle waits until every pair has the model's weights, in effect in the data plane. If the limit passes first, it
// returns the remaining differences.
func (f *Fabric) settle(ctx context.Context, limit time.Duration) []string {
	return f.settleTelling(ctx, limit, nil)
}

// progressBeat is the minimum time between two reports of progress.
const progressBeat = time.Second

// settleTelling is settle with reports of progress; nil disables them.
func (f *Fabric) settleTelling(ctx context.Context, limit time.Duration, progress func(string)) []string {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	pause := time.NewTimer(0)
	defer pause.Stop()
	// Leaves first: an update that a leaf has received reaches the servers in the meantime.
	all := slices.Concat(f.Leaf, f.Spine, f.Server)
	waiting := slices.Clone(all)
	var last []string // differences found by the last round that queried all nodes
	reported, most := time.Now(), 0
	for delay := time.Millisecond; ; delay = min(2*delay, 50*time.Millisecond) {
		var wrong []string
		left := waiting[:0]
		began := time.Now()
		for _, n := range waiting {
			if text := f.checkNode(ctx, n); text != "" {
				left = append(left, n)
				wrong = append(wrong, text)
			}
		}
		waiting = left
		if len(waiting) == 0 {
			// A node checked earlier may have changed since: the verdict needs all nodes in one round.
			for _, n := range all {
				if text := f.checkNode(ctx, n); text != "" {
					waiting = append(waiting, n)
					wrong = append(wrong, text)
				}
			}
			if len(waiting) == 0 {
				return nil
			}
		}
		if ctx.Err() != nil && last != nil {
			return last // a query that the limit cut short is not a difference
		}
		last = wrong
		if right := len(all) - len(waiting); progress != nil && right > most && time.Since(reported) >= progressBeat {
			progress(fmt.Sprintf("%d of %d nodes are in the expected state", right, len(all)))
			reported, most = time.Now(), right
		}
		// Slow checks pause as long as they ran, which leaves half of the processor time to the nodes.
		pause.Reset(max(delay, time.Since(began)))
		select {
		case <-ctx.Done():
			return wrong
		case <-pause.C:
		}
	}
}

// checkNode checks a node of any kind. A node without power passes.
func (f *Fabric) checkNode(ctx context.Context, n *topo.Node) string {
	switch {
	case f.Dark[n]:
		return ""
	case n.Kind == topo.KindServer:
		return f.checkServer(ctx, n.Index)
	}
	return f.checkLeaf(ctx, n)
}

// checkServer compares all of a server's weights, in its daemon and in its data plane, with the model. It returns the
// first difference, or "".
func (f *Fabric) checkServer(ctx context.Context, src int) string {
	n := f.Server[src]
	name := n.Name
	dead := f.Dead[src]
	if f.Absent(src) {
		return f.checkFrozen(ctx, src, f.lastRows[src])
	}
	if text := f.checkCables(ctx, n); text != "" {
		return fmt.Sprintf("%s: %s", name, text)
	}
	seen := map[topo.Way]*judge.Row{}
	for token := ""; ; {
		page, err := f.backend.API(n).ListWeights(ctx, &farev1.ListWeightsRequest{Filter: &farev1.WeightFilter{OmitPairs: true}, PageSize: 10000, PageToken: token})
		if err != nil {
			return fmt.Sprintf("%s: %v", name, err)
		}
		for _, d := range page.Weights {
			ways, err := probe.WaysOf(f.Fabric, src, d)
			if err != nil {
				return fmt.Sprintf("%s: %v", name, err)
			}
			weights := newRow(f.Fabric, d)
			for _, w := range ways {
				seen[w] = weights
			}
		}
		if token = page.NextPageToken; token == "" {
			break
		}
	}
	for to, want := range f.Toward(src) {
		if text := f.CheckWeights(to, seen[to.Way], want, !dead.Dataplane); text != "" {
			return fmt.Sprintf("%s -> %s%s", f.Groups()[to.Source].Name, to.Destination, text)
		}
	}
	if dead.Dataplane {
		return f.checkFrozen(ctx, src, f.lastRows[src])
	}
	forwarding, err := f.backend.Forwarding(ctx, src)
	if err != nil {
		return fmt.Sprintf("%s: data plane: %v", name, err)
	}
	for to, want := range f.Toward(src) {
		if text := f.checkForwarding(forwarding, src, to, want, seen[to.Way]); text != "" {
			return fmt.Sprintf("%s -> %s: %s", f.Groups()[to.Source].Name, to.Destination, text)
		}
	}
	f.lastRows[src] = seen
	return ""
}

// checkForwarding compares a data plane's state toward a destination with the model and with the daemon's weights for
// it (nil if it has none), and the weights that the server's subscriber has received, because packets are judged by
// them.
func (f *Fabric) checkForwarding(state backend.Forwarding, server int, to judge.Destination, want judge.Vector, said *judge.Row) string {
	if f.hosts == nil {
		r := state.Toward(f.Address(to.Source), to.Destination)
		if r.Err != nil && slices.Max(want.Planes) > 0 {
			return fmt.Sprintf("data plane: %v", r.Err)
		}
		if text := f.CheckMembers(to.Source, r.Planes, r.Devices, want); text != "" || f.followers == nil {
			return text
		}
		h := f.followers[server].Followed(to.Way)
		return judge.CheckFollowed(h.Weights, h.InEffect, want.Planes, true)
	}
	for _, src := range f.LoopbacksOf(f.Groups()[to.Source]) {
		r := state.Toward(src.Addr(), to.Destination)
		if text := judge.CheckBuckets(r.Err == nil, r.Nexthop, r.Devices, said.Devices()); text != "" {
			return text
		}
	}
	h := f.followers[server].Followed(to.Way)
	return judge.CheckFollowed(h.Weights, h.InEffect, want.Planes, !f.Dead[server].Any())
}

// checkLeaf verifies that a leaf's daemon reports the actual state of its links. Weights alone may already, or again,
// have their expected values while the step's updates are still in transit: if half of a cable comes back and the other
// half fails, the weights before and after are equal.
func (f *Fabric) checkLeaf(ctx context.Context, n *topo.Node) string {
	if f.backend.API(n) == nil || f.Asleep[n] {
		return ""
	}
	if text := f.checkCables(ctx, n); text != "" {
		return fmt.Sprintf("%s: %s", n.Name, text)
	}
	return ""
}

// checkCables verifies that a node's daemon sees the actual carrier of its devices, that sessions have received
// End-of-RIB over cables on which the model has one (and BFD is up, if configured), and that there is no session on the
// other cables. It returns the first difference, or "".
func (f *Fabric) checkCables(ctx context.Context, n *topo.Node) string {
	daemon := f.backend.API(n)
	lit, established := map[string]bool{}, map[string]bool{}
	for _, c := range f.At(n) {
		here, there := c.At(n)
		if there.Node.Kind == topo.KindServer && !f.Dark[there.Node] && f.Absent(there.Node.Index) {
			continue // the carrier may be up or down, but the far end has no daemon
		}
		lit[here.Device], established[here.Device] = f.Up(c), f.Session(c)
	}
	planes, err := daemon.ListPlanes(ctx, &farev1.ListPlanesRequest{})
	if err != nil {
		return err.Error()
	}
	for _, p := range planes.Planes {
		for _, s := range p.SubPorts {
			if up, known := lit[s.Device]; known && s.Carrier != up {
				return fmt.Sprintf("%s has a carrier: %v, want %v", s.Device, s.Carrier, up)
			}
		}
	}
	sessions, err := daemon.ListSessions(ctx, &farev1.ListSessionsRequest{})
	if err != nil {
		return err.Error()
	}
	for _, s := range sessions.Sessions {
		switch speaks, known := established[s.Device]; {
		case known && speaks && !s.EndOfRib:
			return fmt.Sprintf("%s is %s and has not sent everything: %s", s.Name, s.State, s.Reason)
		case known && speaks && f.BFD > 0 && s.BfdState != "up":
			return fmt.Sprintf("%s has BFD %s: the next failure would not be detected", s.Name, s.BfdState)
		case known && !speaks && s.State == backend.Established:
			return fmt.Sprintf("%s is still %s", s.Name, s.State)
		}
	}
	return ""
}

// leavesForward waits until the kernels of leaves without fared have a route to every server that they should reach,
// because bgpd announces a route without waiting for zebra. ("bgp suppress-fib-pending" would make it wait, but it also
// delays withdrawals, by most of a second.) If a route is still missing after the limit, the check of packets reports
// it.
func (f *Fabric) leavesForward(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	for _, n := range slices.Concat(f.Leaf, f.Spine) {
		for f.Software(n) != topo.Fared && !f.Dark[n] && !f.Asleep[n] && !f.forwards(ctx, n) {
			if backend.Sleep(ctx, 10*time.Millisecond) != nil {
				return
			}
		}
	}
}

// forwards reports whether a leaf's kernel has a route to every loopback that the model's leaf reaches.
func (f *Fabric) forwards(ctx context.Context, n *topo.Node) bool {
	there, err := f.hosts.Routes(ctx, n)
	if err != nil {
		return false
	}
	for _, g := range f.Groups() {
		for _, l := range f.LoopbacksOf(g) {
			if f.Reaches(n, g.Index) && !there[l.Addr().String()] {
				return false
			}
		}
	}
	return true
}
