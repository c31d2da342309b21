package wecmp

// Fit appends to buf[:0] the weights, fitted to a table: none exceeds maxWeight, their sum is at most size, and every
// nonzero weight stays at least 1 (a limit of 0 disables it). Weights within the limits are copied unchanged. Others
// are apportioned by largest remainder with at least one each, ties to the lowest index, to the largest sum within both
// limits, and reduced to lowest terms; no member then exceeds its ideal share by one entry or more, unless its ideal is
// below one. The weights' sum must fit 64 bits. If size is less than the number of members, the table has one entry for
// each.
func Fit(buf, weights []uint64, maxWeight, size uint64) []uint64 {
	buf = append(buf[:0], weights...)
	var sum, most, live uint64
	for _, w := range weights {
		sum += w
		most = max(most, w)
		live += min(w, 1)
	}
	if sum == 0 {
		return buf
	}
	total := sum
	if size != 0 {
		total = min(total, size)
	}
	if maxWeight != 0 && most > maxWeight {
		// The largest total for which the largest quota, most·total/sum, is still within maxWeight.
		if q := mul64(maxWeight, sum); q.hi < most {
			fitting, _ := q.div(most)
			total = min(total, fitting)
		}
	}
	if total >= sum {
		return buf
	}
	total = max(total, live)

	var given uint64
	for i, w := range weights {
		if w != 0 {
			q, _ := mul64(w, total).div(sum)
			buf[i] = max(q, 1)
			given += buf[i]
		}
	}
	// One entry at a time moves between the table and the rest, where that reduces the distance to the quota most. The
	// result is the least sum of squared distances; without the "at least one" it equals the largest remainder.
	for ; given < total; given++ {
		best := -1
		for i := range buf {
			if weights[i] != 0 && (best < 0 || deficit(weights[i], buf[i], total, sum).above(deficit(weights[best], buf[best], total, sum))) {
				best = i
			}
		}
		buf[best]++
	}
	for ; given > total; given-- {
		best := -1
		for i := range buf {
			if buf[i] > 1 && (best < 0 || !deficit(weights[i], buf[i], total, sum).above(deficit(weights[best], buf[best], total, sum))) {
				best = i
			}
		}
		buf[best]--
	}
	LowestTerms(buf)
	return buf
}

// lack is weight·total - part·sum, the signed 128-bit distance of a part from its quota.
type lack struct {
	u128
	negative bool
}

func deficit(weight, part, total, sum uint64) lack {
	quota, has := mul64(weight, total), mul64(part, sum)
	if quota.cmp(has) < 0 {
		return lack{has.sub(quota), true}
	}
	return lack{quota.sub(has), false}
}

func (a lack) above(b lack) bool {
	if a.negative != b.negative {
		return b.negative
	}
	if a.negative {
		return a.cmp(b.u128) < 0
	}
	return a.cmp(b.u128) > 0
}
