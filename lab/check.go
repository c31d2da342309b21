package lab

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/topo"
)

// demand checks what a script itself expects.
func (f *Fabric) demand(e Expectation) []string {
	var wrong []string
	for src := range f.Servers {
		for dst := range f.Servers {
			if src == dst || e.Source != "*" && f.subst(e.Source) != f.Server[src].Name || e.Destination != "*" && f.subst(e.Destination) != f.Server[dst].Name {
				continue
			}
			if got := f.observed(src, dst); !slices.Equal(got, e.Weights) {
				wrong = append(wrong, fmt.Sprintf("line %d: %s -> %s has %s, the script expects %s", e.Line, f.Server[src].Name, f.Server[dst].Name, Ratio(got), Ratio(e.Weights)))
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

// observed asks a server's daemon for its weights toward another's first GPU; zeros when it knows none.
func (f *Fabric) observed(src, dst int) []uint32 {
	resp, err := f.api(f.Server[src]).GetWeights(context.Background(), &farev1.GetWeightsRequest{Destination: f.Loopback(dst, 0).Addr().String()})
	if errors.Is(err, errDead) {
		return f.inForce(src, dst) // the checks have found its kernel so
	}
	if err != nil {
		return make([]uint32, f.Planes)
	}
	return planeWeights(resp.Weights)
}

// Weights asks a server's daemon for its weights toward another's first GPU, by plane and in lowest terms; zeros when it knows none.
// Servers are counted from 0.
func (f *Fabric) Weights(src, dst int) []uint32 { return f.observed(src, dst) }

func planeWeights(d *farev1.DestinationWeights) []uint32 {
	w := make([]uint32, len(d.Planes))
	for i, p := range d.Planes {
		w[i] = p.Weight
	}
	return w
}

// settle waits until every pair has the model's weights, in effect in the data plane; it returns what is still wrong
// when the time is over.
func (f *Fabric) settle(ctx context.Context, limit time.Duration) []string {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	pause := time.NewTimer(0)
	defer pause.Stop()
	// Leaves are asked first: what they have heard is on its way to servers then.
	all := slices.Concat(f.Leaf, f.Spine, f.Server)
	waiting := slices.Clone(all)
	var last []string // what was wrong when all could be asked
	for delay := time.Millisecond; ; delay = min(2*delay, 50*time.Millisecond) {
		var wrong []string
		left := waiting[:0]
		for _, n := range waiting {
			if text := f.checkNode(ctx, n); text != "" {
				left = append(left, n)
				wrong = append(wrong, text)
			}
		}
		waiting = left
		if len(waiting) == 0 {
			// Nothing may have changed back behind our back: the verdict is over all nodes at once.
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
			return last // that a question was cut short is no finding
		}
		last = wrong
		pause.Reset(delay)
		select {
		case <-ctx.Done():
			return wrong
		case <-pause.C:
		}
	}
}

// checkNode checks a node of any kind; one without power has nothing to say.
func (f *Fabric) checkNode(ctx context.Context, n *topo.Node) string {
	switch {
	case f.dark[n]:
		return ""
	case n.Kind == topo.KindServer:
		return f.checkServer(ctx, n.Index)
	}
	return f.checkLeaf(ctx, n)
}

// checkServer compares all of a server's weights with the model, in its daemon and in what its data plane forwards by;
// it returns the first difference, or "".
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
	seen := map[netip.Addr]*farev1.DestinationWeights{}
	for token := ""; ; {
		page, err := f.api(n).ListWeights(ctx, &farev1.ListWeightsRequest{Filter: &farev1.WeightFilter{OmitPairs: true}, PageSize: 10000, PageToken: token})
		if err != nil {
			return fmt.Sprintf("%s: %v", name, err)
		}
		for _, d := range page.Weights {
			prefix, err := netip.ParsePrefix(d.Destination)
			if err != nil {
				return fmt.Sprintf("%s: %v", name, err)
			}
			seen[prefix.Addr()] = d
		}
		if token = page.NextPageToken; token == "" {
			break
		}
	}
	for dst, want := range f.others(src) {
		for g := range f.GPUs {
			addr := f.Loopback(dst, g).Addr()
			if text := checkWeights(seen[addr], want, !dead.dataplane); text != "" {
				return fmt.Sprintf("%s -> %s%s", name, addr, text)
			}
		}
	}
	if dead.dataplane {
		return f.checkFrozen(ctx, src, f.said[src])
	}
	forwarding, err := f.forwarding(ctx, src)
	if err != nil {
		return fmt.Sprintf("%s: data plane: %v", name, err)
	}
	for dst, want := range f.others(src) {
		for g := range f.GPUs {
			addr := f.Loopback(dst, g).Addr()
			if text := forwarding.check(addr, want, seen[addr]); text != "" {
				return fmt.Sprintf("%s -> %s: %s", name, addr, text)
			}
		}
	}
	f.said[src] = seen
	return ""
}

// checkLeaf checks that a leaf's daemon knows of its cables what is so. Weights alone could still be, or again, what they should be
// while the step's news are under way: when half a cable returns and the other half fails, they are the same before and after.
func (f *Fabric) checkLeaf(ctx context.Context, n *topo.Node) string {
	if f.api(n) == nil || f.asleep[n] {
		return ""
	}
	if text := f.checkCables(ctx, n); text != "" {
		return fmt.Sprintf("%s: %s", n.Name, text)
	}
	return ""
}

// established is a session's state in the API when both ends speak.
const established = "established"

// checkCables checks that a node's daemon sees the carrier of its devices as it is, and has heard everything over those whose other
// end speaks, and nothing over the others; it returns the first difference, or "".
func (f *Fabric) checkCables(ctx context.Context, n *topo.Node) string {
	daemon := f.api(n)
	lit, heard := map[string]bool{}, map[string]bool{}
	for _, c := range f.At(n) {
		here, there := c.At(n)
		if there.Node.Kind == topo.KindServer && !f.dark[there.Node] && f.absent(there.Node.Index) {
			continue // the carrier is there, or not, but nobody at its other end
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
				return fmt.Sprintf("%s has a carrier: %v, should be %v", s.Device, s.Carrier, up)
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
			return fmt.Sprintf("%s has BFD %s, what comes next would not be noticed", s.Name, s.BfdState)
		case known && !speaks && s.State == established:
			return fmt.Sprintf("%s is still %s", s.Name, s.State)
		}
	}
	return ""
}

// others are the other servers and the weights toward them by the model.
func (f *Fabric) others(src int) iter.Seq2[int, []uint32] {
	return func(yield func(int, []uint32) bool) {
		for dst := range f.Servers {
			if dst != src && !yield(dst, f.weights(src, dst)) {
				return
			}
		}
	}
}

// checkWeights compares what a daemon says of a destination (nil: nothing) with the model; they are to be in effect if there is a
// data plane.
func checkWeights(d *farev1.DestinationWeights, want []uint32, inEffect bool) string {
	if d == nil || !d.Reachable {
		if slices.Max(want) > 0 {
			return " is unreachable, should have " + Ratio(want)
		}
		return ""
	}
	if got := planeWeights(d); !slices.Equal(got, want) {
		return fmt.Sprintf(" has %s, should have %s", Ratio(got), Ratio(want))
	}
	for _, p := range d.Planes {
		if inEffect && !p.InEffect {
			return fmt.Sprintf(": the weight of %s is not in effect", p.Plane)
		}
	}
	return ""
}

// Ratio writes weights as the field does: 2:2:1:2.
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
