package lab

import (
	"context"
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// demand checks what a script itself expects.
func (f *Fabric) demand(e Expectation) []string {
	var wrong []string
	for src := range f.Servers {
		for dst := range f.Servers {
			if src == dst || e.Source != "*" && f.subst(e.Source) != f.serverName(src) || e.Destination != "*" && f.subst(e.Destination) != f.serverName(dst) {
				continue
			}
			if got := f.observed(src, dst); !slices.Equal(got, e.Weights) {
				wrong = append(wrong, fmt.Sprintf("line %d: %s -> %s has %s, the script expects %s", e.Line, f.serverName(src), f.serverName(dst), Ratio(got), Ratio(e.Weights)))
			}
		}
	}
	return wrong
}

func (f *Fabric) named(w []uint32) map[string]uint32 {
	m := make(map[string]uint32, len(w))
	for p, v := range w {
		m[f.planeName(p)] = v
	}
	return m
}

// observed asks a server's daemon for its weights toward another's first GPU; nil when it knows none.
func (f *Fabric) observed(src, dst int) []uint32 {
	resp, err := f.api(src).GetWeights(context.Background(), &farev1.GetWeightsRequest{Destination: f.loopback(dst, 0).Addr().String()})
	if err != nil {
		return make([]uint32, f.Planes)
	}
	return planeWeights(resp.Weights)
}

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
	waiting := make([]int, f.Servers)
	for s := range waiting {
		waiting[s] = s
	}
	for delay := time.Millisecond; ; delay = min(2*delay, 50*time.Millisecond) {
		var wrong []string
		left := waiting[:0]
		for _, s := range waiting {
			if text := f.checkServer(ctx, s); text != "" {
				left = append(left, s)
				wrong = append(wrong, text)
			}
		}
		waiting = left
		if len(waiting) == 0 {
			// Nothing may have changed back behind our back: the verdict is over all servers at once.
			for s := range f.Servers {
				if text := f.checkServer(ctx, s); text != "" {
					waiting = append(waiting, s)
					wrong = append(wrong, text)
				}
			}
			if len(waiting) == 0 {
				return nil
			}
		}
		pause.Reset(delay)
		select {
		case <-ctx.Done():
			return wrong
		case <-pause.C:
		}
	}
}

// checkServer compares all of a server's weights with the model, in its daemon and in what its data plane forwards by;
// it returns the first difference, or "".
func (f *Fabric) checkServer(ctx context.Context, src int) string {
	name := f.serverName(src)
	seen := map[netip.Addr]*farev1.DestinationWeights{}
	for token := ""; ; {
		page, err := f.api(src).ListWeights(ctx, &farev1.ListWeightsRequest{Filter: &farev1.WeightFilter{OmitPairs: true}, PageSize: 10000, PageToken: token})
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
			addr := f.loopback(dst, g).Addr()
			if text := checkWeights(seen[addr], want); text != "" {
				return fmt.Sprintf("%s -> %s%s", name, addr, text)
			}
		}
	}
	forwarding, err := f.forwarding(ctx, src)
	if err != nil {
		return fmt.Sprintf("%s: data plane: %v", name, err)
	}
	for dst, want := range f.others(src) {
		for g := range f.GPUs {
			addr := f.loopback(dst, g).Addr()
			if text := forwarding(addr, want, seen[addr]); text != "" {
				return fmt.Sprintf("%s -> %s: %s", name, addr, text)
			}
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

// checkWeights compares what a daemon says of a destination (nil: nothing) with the model.
func checkWeights(d *farev1.DestinationWeights, want []uint32) string {
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
		if !p.InEffect {
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
