package lab

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"math"
	"net/netip"
	"slices"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/topo"
)

// demand checks the weights that a script states.
func (f *Fabric) demand(e Expectation) []string {
	var wrong []string
	sources, _ := f.groups(f.subst(e.Source)) // Check has verified the names
	destinations, _ := f.groups(f.subst(e.Destination))
	for _, src := range sources {
		for _, dst := range destinations {
			if f.host(src) == f.host(dst) {
				continue
			}
			if got := f.observed(src, dst); !slices.Equal(got, e.Weights) {
				wrong = append(wrong, fmt.Sprintf("line %d: %s -> %s has %s, the script expects %s", e.Line, f.Groups()[src].Name, f.Groups()[dst].Name, Ratio(got), Ratio(e.Weights)))
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

// address returns the address of a source group's first GPU.
func (p *plan) address(group int) netip.Addr { return p.LoopbacksOf(p.Groups()[group])[0].Addr() }

// observed queries a server's daemon for a source group's weights toward another group's first GPU. The weights are
// zero if the daemon has none.
func (f *Fabric) observed(src, dst int) []uint32 {
	resp, err := f.api(f.Server[f.host(src)]).GetWeights(context.Background(),
		&farev1.GetWeightsRequest{Destination: f.address(dst).String(), Sources: []string{f.address(src).String()}})
	if errors.Is(err, errDead) {
		return f.inForce(src, dst) // the checks have verified the kernel
	}
	if err != nil || len(resp.Weights) != 1 {
		return make([]uint32, f.Planes)
	}
	return f.planeWeights(resp.Weights[0])
}

// Weights queries a server's daemon for a source group's weights toward another group's first GPU, by plane and in
// lowest terms. The weights are zero if the daemon has none. Source groups are numbered from 0, as in
// topo.Fabric.Groups.
func (f *Fabric) Weights(src, dst int) []uint32 { return f.observed(src, dst) }

// planeWeights returns a row's weights by plane of the fabric, with 0 in a plane to which the row's source group is not
// connected.
func (p *plan) planeWeights(d *farev1.DestinationWeights) []uint32 {
	w := make([]uint32, p.Planes)
	for i := range w {
		for _, plane := range d.Planes {
			if plane.Plane == p.PlaneName(i) {
				w[i] = plane.Weight
			}
		}
	}
	return w
}

// way is a direction from a source group to a loopback.
type way struct {
	src int
	dst netip.Addr
}

// waysOf returns the ways of a server that a row describes: one from each source group with a loopback among the row's
// sources.
func (p *plan) waysOf(server int, d *farev1.DestinationWeights) (all []way, err error) {
	dst, err := netip.ParsePrefix(d.Destination)
	if err != nil {
		return nil, err
	}
	for _, g := range p.ofServer(server) {
		if slices.ContainsFunc(p.LoopbacksOf(p.Groups()[g]), func(l netip.Prefix) bool { return slices.Contains(d.Sources, l.String()) }) {
			all = append(all, way{g, dst.Addr()})
		}
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("weights of %q, none of which is a loopback of %s", d.Sources, p.Server[server].Name)
	}
	return all, nil
}

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
	case f.dark[n]:
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
	dead := f.dead[src]
	if f.absent(src) {
		return f.checkFrozen(ctx, src, f.said[src])
	}
	if text := f.checkCables(ctx, n); text != "" {
		return fmt.Sprintf("%s: %s", name, text)
	}
	seen := map[way]*farev1.DestinationWeights{}
	for token := ""; ; {
		page, err := f.api(n).ListWeights(ctx, &farev1.ListWeightsRequest{Filter: &farev1.WeightFilter{OmitPairs: true}, PageSize: 10000, PageToken: token})
		if err != nil {
			return fmt.Sprintf("%s: %v", name, err)
		}
		for _, d := range page.Weights {
			ways, err := f.waysOf(src, d)
			if err != nil {
				return fmt.Sprintf("%s: %v", name, err)
			}
			for _, w := range ways {
				seen[w] = d
			}
		}
		if token = page.NextPageToken; token == "" {
			break
		}
	}
	for to, want := range f.toward(src) {
		if text := f.checkWeights(to, seen[to.way], want, !dead.dataplane); text != "" {
			return fmt.Sprintf("%s -> %s%s", f.Groups()[to.src].Name, to.dst, text)
		}
	}
	if dead.dataplane {
		return f.checkFrozen(ctx, src, f.said[src])
	}
	forwarding, err := f.forwarding(ctx, src)
	if err != nil {
		return fmt.Sprintf("%s: data plane: %v", name, err)
	}
	for to, want := range f.toward(src) {
		if text := forwarding.check(to.way, want, seen[to.way]); text != "" {
			return fmt.Sprintf("%s -> %s: %s", f.Groups()[to.src].Name, to.dst, text)
		}
	}
	f.said[src] = seen
	return ""
}

// checkLeaf verifies that a leaf's daemon reports the actual state of its links. Weights alone may already, or again,
// have their expected values while the step's updates are still in transit: if half of a cable comes back and the other
// half fails, the weights before and after are equal.
func (f *Fabric) checkLeaf(ctx context.Context, n *topo.Node) string {
	if f.api(n) == nil || f.asleep[n] {
		return ""
	}
	if text := f.checkCables(ctx, n); text != "" {
		return fmt.Sprintf("%s: %s", n.Name, text)
	}
	return ""
}

// established is the API's name of a session state in which both ends exchange messages.
const established = "established"

// checkCables verifies that a node's daemon sees the actual carrier of its devices, that sessions have received
// End-of-RIB over cables on which the model has one (and BFD is up, if configured), and that there is no session on the
// other cables. It returns the first difference, or "".
func (f *Fabric) checkCables(ctx context.Context, n *topo.Node) string {
	daemon := f.api(n)
	lit, heard := map[string]bool{}, map[string]bool{}
	for _, c := range f.At(n) {
		here, there := c.At(n)
		if there.Node.Kind == topo.KindServer && !f.dark[there.Node] && f.absent(there.Node.Index) {
			continue // the carrier may be up or down, but the far end has no daemon
		}
		lit[here.Device], heard[here.Device] = f.cable(c).up, f.session(c)
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
		switch speaks, known := heard[s.Device]; {
		case known && speaks && !s.EndOfRib:
			return fmt.Sprintf("%s is %s and has not sent everything: %s", s.Name, s.State, s.Reason)
		case known && speaks && f.BFD > 0 && s.BfdState != "up":
			return fmt.Sprintf("%s has BFD %s: the next failure would not be detected", s.Name, s.BfdState)
		case known && !speaks && s.State == established:
			return fmt.Sprintf("%s is still %s", s.Name, s.State)
		}
	}
	return ""
}

// others yields the source groups of other servers, with the model's vector toward each.
func (m *model) others(src int) iter.Seq2[int, vector] {
	return func(yield func(int, vector) bool) {
		for dst := range m.Groups() {
			if m.host(dst) != m.host(src) && !yield(dst, m.vector(src, dst)) {
				return
			}
		}
	}
}

// destination is a loopback with its source group, and the source group that sends to it.
type destination struct {
	way
	group int
}

// toward yields all ways from a server, with the model's vector of each.
func (m *model) toward(server int) iter.Seq2[destination, vector] {
	return func(yield func(destination, vector) bool) {
		for _, src := range m.ofServer(server) {
			for dst, want := range m.others(src) {
				for _, l := range m.LoopbacksOf(m.Groups()[dst]) {
					if !yield(destination{way{src, l.Addr()}, dst}, want) {
						return
					}
				}
			}
		}
	}
}

// checkWeights compares a daemon's weights for a destination (nil if it has none) with the model. With inEffect they
// must also be in effect.
func (m *model) checkWeights(to destination, d *farev1.DestinationWeights, want vector, inEffect bool) string {
	if d == nil || !d.Reachable {
		if slices.Max(want.planes) > 0 {
			return " is unreachable, want " + Ratio(want.planes)
		}
		return ""
	}
	if got := m.planeWeights(d); !slices.Equal(got, want.planes) {
		return fmt.Sprintf(" has %s, want %s", Ratio(got), Ratio(want.planes))
	}
	if text := m.checkLanes(to.src, subPortWeights(d), want); text != "" {
		return text
	}
	for _, p := range d.Planes {
		if inEffect && !p.InEffect {
			return fmt.Sprintf(": the weight of %s is not in effect", p.Plane)
		}
	}
	return ""
}

// checkLanes compares the weights of a source group's sub-ports with the model; devices without a weight are absent
// from weights.
func (m *model) checkLanes(src int, weights map[string]uint64, want vector) string {
	var sum float64
	for _, w := range weights {
		sum += float64(w)
	}
	left := len(weights)
	for i, c := range m.Groups()[src].Cables {
		w, there := weights[c.Down.Device]
		if there {
			left--
		}
		if got := float64(w) / max(sum, 1); math.Abs(got-want.lanes[i]) > 1e-6*want.lanes[i] {
			return fmt.Sprintf(" gives %s %.4f %%, want %.4f %%", c.Down.Device, 100*got, 100*want.lanes[i])
		}
	}
	if left > 0 {
		return fmt.Sprintf(" has %d sub-ports that do not serve %s", left, m.Groups()[src].Name)
	}
	return ""
}

// Ratio formats weights in the usual notation, such as 2:2:1:2.
func Ratio(w []uint32) string {
	var b []byte
	for i, v := range w {
		if i > 0 {
			b = append(b, ':')
		}
		b = fmt.Append(b, v)
	}
	return string(b)
}
