package lab

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"net/netip"
	"slices"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// kernelTable is what a server's kernel forwards by, as iproute2 reads it: a program that shares no line with the data plane
// that wrote it.
type kernelTable struct {
	nexthop map[string]int            // the nexthop object of a destination's route, by address
	blocked map[string]bool           // destinations whose route drops packets
	buckets map[int]map[string]uint32 // of a resilient group: how many each device has
}

// What ip -j prints, as far as it is looked at here.
type (
	kernelRoute struct {
		Dst, Type string
		NHID      int `json:"nhid"`
	}
	kernelNexthop struct {
		ID        int
		Dev       string
		Blackhole *struct{}
	}
	kernelBucket struct {
		ID     int
		Bucket struct{ NHID int }
	}
)

// askKernel has ip print things of a namespace, each a line of a batch, and reads them, each into its own.
func askKernel(ctx context.Context, ns namespace, questions string, into ...any) error {
	out, err := run(ctx, questions, "ip", "-n", string(ns), "-j", "-batch", "-")
	if err != nil {
		return err
	}
	answers := json.NewDecoder(bytes.NewReader(out))
	for _, v := range into {
		if err := answers.Decode(v); err != nil {
			return fmt.Errorf("ip -j -batch (%q): %w", questions, err)
		}
	}
	return nil
}

func readKernel(ctx context.Context, ns namespace) (*kernelTable, error) {
	var routes []kernelRoute
	var nexthops []kernelNexthop
	var buckets []kernelBucket
	if err := askKernel(ctx, ns, "route show\nnexthop show\nnexthop bucket show\n", &routes, &nexthops, &buckets); err != nil {
		return nil, err
	}
	return newKernelTable(routes, nexthops, buckets), nil
}

func newKernelTable(routes []kernelRoute, nexthops []kernelNexthop, buckets []kernelBucket) *kernelTable {
	t := &kernelTable{nexthop: map[string]int{}, blocked: map[string]bool{}, buckets: map[int]map[string]uint32{}}
	device := map[int]string{}
	hole := map[int]bool{}
	for _, n := range nexthops {
		device[n.ID], hole[n.ID] = n.Dev, n.Blackhole != nil
	}
	for _, r := range routes {
		t.nexthop[r.Dst] = r.NHID
		t.blocked[r.Dst] = r.Type == "blackhole" || r.Type == "unreachable" || hole[r.NHID]
	}
	for _, b := range buckets {
		of := t.buckets[b.ID]
		if of == nil {
			of = map[string]uint32{}
			t.buckets[b.ID] = of
		}
		of[device[b.Bucket.NHID]]++
	}
	return t
}

// check compares the buckets of a destination with the weights of its sub-ports (none: unreachable).
func (t *kernelTable) check(dst netip.Addr, weights map[string]uint64) string {
	id, routed := t.nexthop[dst.String()]
	if len(weights) == 0 {
		if routed && !t.blocked[dst.String()] {
			return fmt.Sprintf("the kernel has a route, over nexthop %d, to what is unreachable", id)
		}
		return ""
	}
	if !routed || t.blocked[dst.String()] {
		return "the kernel has no route"
	}
	have := t.buckets[id]
	var all, sum uint64
	for _, n := range have {
		all += uint64(n)
	}
	for _, w := range weights {
		sum += w
	}
	if all == 0 {
		return fmt.Sprintf("the kernel's nexthop %d is no resilient group", id)
	}
	devices := maps.Clone(weights)
	for d := range have {
		devices[d] += 0
	}
	for _, d := range slices.Sorted(maps.Keys(devices)) {
		want := float64(all) * float64(weights[d]) / float64(sum)
		if math.Abs(float64(have[d])-want) > 1 || weights[d] == 0 && have[d] > 0 {
			return fmt.Sprintf("the kernel gives %s %d of %d buckets, should give %.1f", d, have[d], all, want)
		}
	}
	return ""
}

// avoids says which of some devices still has buckets of a destination, or "".
func (t *kernelTable) avoids(dst netip.Addr, devices []string) string {
	have := t.buckets[t.nexthop[dst.String()]]
	for _, d := range devices {
		if n := have[d]; n > 0 {
			return fmt.Sprintf("the kernel gives %s %d buckets, but it is dark", d, n)
		}
	}
	return ""
}

// subPortWeights spreads the planes' weights over sub-ports as the daemon says; integers, for all planes together.
func subPortWeights(d *farev1.DestinationWeights) map[string]uint64 {
	if !d.GetReachable() {
		return nil
	}
	// Each plane's weight is dealt by the sub-ports' own: brought to a common multiple of the planes' sums.
	common := uint64(1)
	sums := make([]uint64, len(d.Planes))
	for i, p := range d.Planes {
		for _, s := range p.SubPorts {
			sums[i] += uint64(s.Weight)
		}
		if p.Weight > 0 && sums[i] > 0 {
			common = common / gcd(common, sums[i]) * sums[i]
		}
	}
	weights := map[string]uint64{}
	for i, p := range d.Planes {
		for _, s := range p.SubPorts {
			if p.Weight > 0 && s.Weight > 0 {
				weights[s.Device] = uint64(p.Weight) * uint64(s.Weight) * (common / sums[i])
			}
		}
	}
	return weights
}

func gcd(a, b uint64) uint64 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

// forwarding reads a server's kernel. What the server sends by has to have arrived too: packets judge the same weights.
func (b *real) forwarding(ctx context.Context, server int) (*forwarding, error) {
	table, err := readKernel(ctx, b.namespace(b.Server[server].Name))
	if err != nil {
		return nil, err
	}
	return &forwarding{
		check: func(dst netip.Addr, want []uint32, said *farev1.DestinationWeights) string {
			if text := table.check(dst, subPortWeights(said)); text != "" {
				return text
			}
			return b.flow.senders[server].weights.behind(dst, want, !b.dead[server].any())
		},
		avoids: table.avoids,
	}, nil
}
