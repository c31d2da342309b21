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

// divide sets parts to an integer for each weight so that the integers sum to exactly total, each its exact quota
// weight·total/sum rounded down or up: the largest remainders are rounded up, and among equal ones those with the
// lowest index (Hamilton's method). The sum of the weights must fit 64 bits. If all weights are 0, so are all parts.
// rest is scratch memory of the length of weights.
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
		q, r := mul64(w, uint64(total)).div(sum)
		parts[i], rest[i] = uint32(q), r
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
