package wecmp

import "slices"

// LowestTerms divides weights by their greatest common divisor, in place: 800:800:400:800 becomes 2:2:1:2. All zeros
// remain all zeros.
func LowestTerms(weights []uint64) {
	var g uint64
	for _, w := range weights {
		g = gcd(w, g)
	}
	if g == 0 {
		return
	}
	for i := range weights {
		weights[i] /= g
	}
}

// Apportion appends to buf[:0] an integer for each weight so that the integers sum to exactly total, each its exact
// quota weight·total/sum rounded down or up: the largest remainders are rounded up, and among equal ones those with the
// lowest index (Hamilton's method). The arithmetic is exact for all inputs. If all weights are 0, so are all parts.
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
	// The remainders sum to left·sum and each is below sum, so left is less than the number of nonzero remainders.
	slices.SortStableFunc(order, func(i, j int) int { return rest[j].cmp(rest[i]) })
	for _, i := range order[:left] {
		buf[i]++
	}
	return buf
}

// divide is Apportion for the engine's sizes: weights whose sum fits 64 bits, into at most 2^32-1 parts. rest is
// scratch memory of the length of weights.
func divide(parts []uint32, weights []uint64, total uint32, rest []uint64) {
	var sum uint64
	for _, w := range weights {
		sum += w
	}
	if sum == 0 {
		clear(parts)
		return
	}
	left := uint64(total)
	for i, w := range weights {
		q, r := mul64(w, uint64(total)).div(u128{0, sum})
		parts[i], rest[i] = uint32(q), r.lo
		left -= q
	}
	// left is less than the number of nonzero remainders. There is one pass for each distinct remainder, so equal
	// weights take one.
	for left > 0 {
		most := slices.Max(rest[:len(weights)])
		for i := range weights {
			if left > 0 && rest[i] == most {
				parts[i]++
				rest[i] = 0
				left--
			}
		}
	}
}
