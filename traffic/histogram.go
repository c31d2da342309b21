package traffic

import "math/bits"

// The histogram's buckets: each value below 128 ns has a separate one; above, each power of two is divided into 64. So
// the width of a bucket is at most 1/64 of its values, and the error of its middle at most 1/128.
const (
	exact    = 128
	subBits  = 6
	topPower = 42 // values from 2^42 ns (73 minutes) share the last bucket
	buckets  = exact + (topPower-7)<<subBits
)

// histogram counts durations in nanoseconds. The zero value is empty.
type histogram struct {
	counts [buckets]uint64
	total  uint64
	max    uint64
}

// bucketOf returns the bucket of a value.
func bucketOf(v uint64) int {
	if v < exact {
		return int(v)
	}
	power := bits.Len64(v) - 1 // at least 7
	if power >= topPower {
		return buckets - 1
	}
	return exact + (power-7)<<subBits + int(v>>(power-subBits))&(1<<subBits-1)
}

// middle returns the value that represents a bucket.
func middle(bucket int) uint64 {
	if bucket < exact {
		return uint64(bucket)
	}
	b := bucket - exact
	power := 7 + b>>subBits
	low := (1<<subBits + uint64(b)&(1<<subBits-1)) << (power - subBits)
	return low + 1<<(power-subBits)/2
}

func (h *histogram) add(v uint64) {
	h.counts[bucketOf(v)]++
	h.total++
	h.max = max(h.max, v)
}

// addBucket adds a bucket of another histogram; it returns false if there is no such bucket.
func (h *histogram) addBucket(bucket uint32, count uint64) bool {
	if bucket >= buckets {
		return false
	}
	h.counts[bucket] += count
	h.total += count
	return true
}

func (h *histogram) merge(o *histogram) {
	for i, n := range o.counts {
		h.counts[i] += n
	}
	h.total += o.total
	h.max = max(h.max, o.max)
}

// quantile returns the smallest value that per10000 of 10,000 values do not exceed, with an error of at most 1 %, or 0
// if the histogram is empty.
func (h *histogram) quantile(per10000 uint64) uint64 {
	if h.total == 0 {
		return 0
	}
	// The product does not overflow below 1.8e15 values.
	rank := max(1, (h.total*per10000+9999)/10000)
	seen := uint64(0)
	for i, n := range h.counts {
		if seen += n; seen >= rank {
			return min(middle(i), h.max)
		}
	}
	return h.max
}
