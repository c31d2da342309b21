package linux

import (
	"cmp"
	"slices"
)

// mostLasting bounds the lasting buckets of a sub-port: enough to find source ports in, few enough to leave any ratio of
// weights exact.
const mostLasting = 16

// layout says which sub-port owns which bucket of a group. It is a pure function of the weights, so that any two groups
// agree on everything that their weights allow.
//
// Each sub-port has an equal run of buckets as its home. One whose quota is smaller keeps the last buckets of it, because
// the kernel, when it takes buckets away by itself, takes the first. One whose quota is larger keeps all of it and gets what
// others released.
type layout struct {
	buckets  int
	subPorts int // 1 to buckets
}

// end is where the home of sub-port i ends, and that of i+1 begins.
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

// lasting is how many of the last buckets of its home a sub-port has in every group in which its weight is not 0.
func (l layout) lasting() int {
	return max(1, min(mostLasting, l.buckets/(2*l.subPorts)))
}

// least is the quota of the smallest weight: the lasting buckets, and as many again where there is room, which the kernel
// may take away without touching the lasting ones.
func (l layout) least() int {
	return min(2*l.lasting(), l.buckets/l.subPorts)
}

// quotas divides the buckets by weights; no weights above 0 get none. The largest remainders are rounded up; of equal ones that with the
// larger home, then the first. So equal weights give everybody its home.
func (l layout) quotas(weights []uint32) []int {
	quotas := make([]int, len(weights))
	rest, sum := uint64(l.buckets), uint64(0)
	for _, w := range weights {
		sum += uint64(w)
	}
	if sum == 0 {
		return quotas
	}
	// Those whose part is below the least get that, and the others share the rest, which may push more of them below.
	for again := true; again; {
		again = false
		atRest, atSum := rest, sum
		for i, w := range weights {
			if w > 0 && quotas[i] == 0 && atRest*uint64(w) < uint64(l.least())*atSum {
				quotas[i] = l.least()
				rest -= uint64(l.least())
				sum -= uint64(w)
				again = true
			}
		}
	}
	type part struct {
		subPort   int
		remainder uint64
	}
	var parts []part
	left := rest
	for i, w := range weights {
		if w > 0 && quotas[i] == 0 {
			quotas[i] = int(rest * uint64(w) / sum)
			left -= uint64(quotas[i])
			parts = append(parts, part{i, rest * uint64(w) % sum})
		}
	}
	slices.SortStableFunc(parts, func(a, b part) int {
		return cmp.Or(cmp.Compare(b.remainder, a.remainder), cmp.Compare(l.size(b.subPort), l.size(a.subPort)))
	})
	for i := range parts[:left] {
		quotas[parts[i].subPort]++
	}
	return quotas
}

// run is consecutive buckets of one sub-port.
type run struct{ subPort, size int }

// runs returns the owners of all buckets, in their order; nil when no weight is above 0. weights are in the order of the
// sub-ports.
func (l layout) runs(weights []uint32) []run {
	if !slices.ContainsFunc(weights, func(w uint32) bool { return w > 0 }) {
		return nil
	}
	quotas := l.quotas(weights)
	wants := make([]int, l.subPorts) // beyond the home
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
