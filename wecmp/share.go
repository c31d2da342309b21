package wecmp

import "slices"

// LowestTerms divides weights by their greatest common divisor, in place: 800:800:400:800 becomes 2:2:1:2. All zero
// stays all zero.
func LowestTerms(weights []uint64) {
	var g uint64
	for _, w := range weights {
		if g = gcd(w, g); g == 1 {
			return
		}
	}
	if g == 0 {
		return
	}
	for i := range weights {
		weights[i] /= g
	}
}

// Apportion appends to buf[:0] a whole number for each weight so that they sum to exactly total, each its exact quota
// weight·total/sum rounded down or up: the largest remainders are rounded up, of equal ones those with the lowest index
// (Hamilton's method). The arithmetic is exact for all inputs. When all weights are 0 so are all parts.
func Apportion(buf, weights []uint64, total uint64) []uint64 {
	buf = append(buf[:0], weights...)
	var sum u128
	for _, w := range weights {
		sum = sum.add(u128{0, w})
	}
	if sum == (u128{}) {
		return buf
	}
	left := total
	rest, order := make([]u128, len(weights)), make([]int, len(weights))
	for i, w := range weights {
		buf[i], rest[i] = mul64(w, total).div(sum)
		left -= buf[i]
		order[i] = i
	}
	// The remainders sum to left·sum and each is below sum: fewer parts are left than there are remainders above 0.
	slices.SortStableFunc(order, func(i, j int) int { return rest[j].cmp(rest[i]) })
	for _, i := range order[:left] {
		buf[i]++
	}
	return buf
}

// planeShares is Apportion for the engine's own sizes: at most MaxPlanes capacities of at most MaxCapacity, whose sum
// fits 64 bits, into Parts. It divides once per plane.
func planeShares(shares []uint32, capacity []uint64) {
	var sum uint64
	for _, c := range capacity {
		sum += c
	}
	if sum == 0 {
		clear(shares)
		return
	}
	var rest [MaxPlanes]uint64
	left := uint64(Parts)
	for i, c := range capacity {
		if c == 0 {
			shares[i], rest[i] = 0, 0
			continue
		}
		q, r := mul64(c, Parts).div(u128{0, sum})
		shares[i], rest[i] = uint32(q), r.lo
		left -= q
	}
	for ; left > 0; left-- {
		best := 0
		for i := range capacity {
			if rest[i] > rest[best] {
				best = i
			}
		}
		shares[best]++
		rest[best] = 0 // a plane with a remainder of 0 is never rounded up: fewer parts are left than remainders above 0
	}
}
