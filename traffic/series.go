package traffic

import (
	"slices"
	"time"
)

// series is an amount over time, in intervals of equal length from 0.
type series struct {
	interval time.Duration
	amounts  []uint64
}

// maxIntervals limits a series: later amounts are added to its last interval.
const maxIntervals = 1 << 20

// add spreads an amount evenly over a span of time. The sum of amounts grows by exactly n.
func (s *series) add(from, to time.Duration, n uint64) {
	if n == 0 || from < 0 {
		return
	}
	first := min(int(from/s.interval), maxIntervals-1)
	last := first
	if to > from {
		last = min(int((to-1)/s.interval), maxIntervals-1)
	}
	if grow := last + 1 - len(s.amounts); grow > 0 {
		s.amounts = append(s.amounts, make([]uint64, grow)...)
	}
	given := uint64(0)
	for i := first; i < last; i++ {
		// The part due at the end of interval i, minus the parts already assigned.
		end := time.Duration(i+1) * s.interval
		part := uint64(float64(n) * float64(end-from) / float64(to-from))
		part = min(max(part, given), n)
		s.amounts[i] += part - given
		given = part
	}
	s.amounts[last] += n - given
}

// cut reassigns amounts that add placed after limit to the span [from, limit).
func (s *series) cut(from, limit time.Duration) {
	if limit <= 0 {
		return
	}
	n := uint64(0)
	for kept := int((limit-1)/s.interval) + 1; len(s.amounts) > kept; {
		last := len(s.amounts) - 1
		n += s.amounts[last]
		s.amounts = s.amounts[:last]
	}
	s.add(min(from, limit-1), limit, n)
}

// rate returns 8 times an interval's amount per second: bit/s if amounts are bytes. limit truncates the last interval.
func (s *series) rate(i int, limit time.Duration) uint64 {
	if i >= len(s.amounts) {
		return 0
	}
	length := min(s.interval, limit-time.Duration(i)*s.interval)
	return bitRate(s.amounts[i], length)
}

// spread returns the lowest, the median and the highest bit/s of whole intervals that end within limit, or zeros if
// there are none.
func (s *series) spread(limit time.Duration) (lowest, median, highest uint64) {
	whole := min(int(limit/s.interval), maxIntervals)
	if whole == 0 {
		return 0, 0, 0
	}
	rates := make([]uint64, whole)
	for i := range rates {
		rates[i] = s.rate(i, limit)
	}
	slices.Sort(rates)
	return rates[0], rates[whole/2], rates[whole-1]
}

// bitRate returns bytes per d in bit/s, or 0 if d is not positive.
func bitRate(bytes uint64, d time.Duration) uint64 {
	if d <= 0 {
		return 0
	}
	return uint64(float64(bytes) * 8 / d.Seconds())
}
