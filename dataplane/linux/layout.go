package linux

import (
	"math"
	"slices"
)

// lastingPart is the divisor of a home that gives its lasting buckets: 1/8. Enough source ports fall there for the
// slots of every sub-port, and a sub-port with an eighth of the weight of the others still has all its lasting buckets.
const lastingPart = 8

// tolerance is the largest relative deviation of a share that counts as accurate.
const tolerance = 0.01

// layout assigns the buckets of a group to sub-ports. It is a pure function of the weights, so that any two groups
// agree on as many buckets as their weights allow.
//
// Each sub-port has an equal run of buckets as its home. A sub-port whose quota is smaller than its home keeps the last
// buckets of the home, because the kernel, when it removes buckets on its own, removes the first ones. A sub-port whose
// quota is larger keeps its whole home and receives buckets that other sub-ports released.
type layout struct {
	buckets  int
	subPorts int // 1 to buckets
}

// end returns the end of the home of sub-port i, which is the start of the home of sub-port i+1.
func (l layout) end(i int) int {
	return (2*l.buckets*(i+1) + l.subPorts) / (2 * l.subPorts)
}

func (l layout) home(i int) (from, to int) {
	if i > 0 {
		from = l.end(i - 1)
	}
	return from, l.end(i)
}

func (l layout) size(i int) int {
	from, to := l.home(i)
	return to - from
}

// lasting returns the number of last buckets of its home that a sub-port has in every group in which its quota is at
// least that large.
func (l layout) lasting() int {
	return max(1, l.buckets/(lastingPart*l.subPorts))
}

// quotas divides the buckets by weights; if all weights are 0, all quotas are 0. Every weight above 0 gets the nearest
// whole number to its share, but at least one bucket. If the sum differs from the number of buckets, the sub-ports
// change for which one bucket is the smallest part of their share; among equals a sub-port with a larger home gets
// more, then the first. Equal weights therefore give every sub-port exactly its home.
func (l layout) quotas(weights []uint32) []int {
	quotas, shares := make([]int, len(weights)), l.shares(weights)
	left := l.buckets
	for i, share := range shares {
		if share > 0 {
			quotas[i] = max(1, int(math.Round(share)))
			left -= quotas[i]
		}
	}
	if left == l.buckets {
		return quotas
	}
	for left != 0 {
		step := 1
		if left < 0 {
			step = -1
		}
		// Homes only decide between equal costs.
		best, least, home := -1, math.Inf(1), 0
		for i, share := range shares {
			if share == 0 || quotas[i]+step < 1 {
				continue
			}
			cost := math.Abs(float64(quotas[i]+step)-share) / share
			if mine := step * l.size(i); cost < least || cost == least && (mine > home || mine == home && step < 0) {
				best, least, home = i, cost, mine
			}
		}
		quotas[best] += step
		left -= step
	}
	return quotas
}

// shares returns the exact shares of the buckets, all 0 if all weights are 0. Weights in the same ratio give identical
// results: products and sums are integers below 2^53, so each share is the correctly rounded value of the same
// fraction.
func (l layout) shares(weights []uint32) []float64 {
	shares, sum := make([]float64, len(weights)), 0.0
	for _, w := range weights {
		sum += float64(w)
	}
	for i, w := range weights {
		if w > 0 {
			shares[i] = float64(l.buckets) * float64(w) / sum
		}
	}
	return shares
}

// deviation returns the sub-port with the largest relative deviation of its quota from its share, and that deviation.
func (l layout) deviation(weights []uint32) (subPort int, part float64) {
	quotas := l.quotas(weights)
	for i, share := range l.shares(weights) {
		if share > 0 {
			if off := float64(quotas[i])/share - 1; math.Abs(off) > math.Abs(part) {
				subPort, part = i, off
			}
		}
	}
	return subPort, part
}

// run is a sequence of consecutive buckets of one sub-port.
type run struct{ subPort, size int }

// runs returns the owners of all buckets in order, or nil if no weight is above 0. weights are in the order of the
// sub-ports.
func (l layout) runs(weights []uint32) []run {
	if !slices.ContainsFunc(weights, func(w uint32) bool { return w > 0 }) {
		return nil
	}
	quotas := l.quotas(weights)
	wants := make([]int, l.subPorts) // buckets beyond the home
	for i, q := range quotas {
		wants[i] = max(0, q-l.size(i))
	}
	var runs []run
	add := func(subPort, size int) {
		if n := len(runs); n > 0 && runs[n-1].subPort == subPort {
			runs[n-1].size += size
		} else if size > 0 {
			runs = append(runs, run{subPort, size})
		}
	}
	taker := 0
	for i, q := range quotas {
		keeps := min(q, l.size(i))
		for released := l.size(i) - keeps; released > 0; {
			for wants[taker] == 0 {
				taker++
			}
			n := min(released, wants[taker])
			add(taker, n)
			wants[taker] -= n
			released -= n
		}
		add(i, keeps)
	}
	return runs
}

// firm reports whether the lasting buckets of every sub-port are far enough from the start of the segment of one
// nexthop. When a group loses members, the kernel may take the first buckets of each remaining member, once per removed
// member; the lasting buckets are out of reach behind an equal number of other buckets. In a shorter run, a segment
// that starts with the run is sufficient.
func (l layout) firm(segments []segment, target []run) bool {
	deep := 2 * l.lasting()
	at, i := 0, 0
	begins := 0 // of segments[i]
	for _, r := range target {
		from := at
		at += r.size
		_, end := l.home(r.subPort)
		if end <= from || end > at {
			continue // this run does not hold its lasting buckets
		}
		for begins+segments[i].size < end {
			begins += segments[i].size
			i++
		}
		if begins > max(from, end-deep) {
			return false
		}
	}
	return true
}
