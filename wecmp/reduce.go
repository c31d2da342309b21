package wecmp

import (
	"errors"
	"fmt"
	"math/bits"
)

// Theta is a bound on oversubscription as a fraction, Num/Den >= 1: Theta{110, 100} lets a member carry at most 1.10
// times its ideal share.
type Theta struct{ Num, Den uint64 }

// MaxTable limits the number of entries of the table that Reduce tries if no size is given.
const MaxTable = 1 << 20

// ErrTable is returned for a table that is too small for one entry per member.
var ErrTable = errors.New("table too small")

// Reduce appends to buf[:0] the smallest table of integer weights in which no member is oversubscribed beyond theta:
// for every i, (table_i/Σtable) / (weights_i/Σweights) <= theta. It starts with one entry per member and repeatedly
// adds one entry to the member for which that costs the least; ties go to the lowest index (Zhou et al., WCMP, EuroSys
// 2014, Algorithm 1). For each size this yields the least possible oversubscription (it is the divisor method of
// D'Hondt with at least one entry each), so the first table within theta is a smallest one.
//
// Weights of 0 stay 0. The table never grows beyond size entries (0: MaxTable) nor beyond the weights in lowest terms,
// which are exact. within is false if size ended the search; the table is then the best of that size.
func Reduce(buf, weights []uint64, theta Theta, size uint64) (table []uint64, within bool, err error) {
	if theta.Den == 0 || theta.Num < theta.Den {
		return nil, false, fmt.Errorf("theta %d/%d is below 1: no table can satisfy it", theta.Num, theta.Den)
	}
	if size == 0 {
		size = MaxTable
	}
	goal := append([]uint64(nil), weights...)
	LowestTerms(goal)
	var goalSum, sum, carry uint64
	buf = buf[:0]
	for _, g := range goal {
		if goalSum, carry = bits.Add64(goalSum, g, 0); carry != 0 {
			return nil, false, errors.New("the weights' sum exceeds 2^64-1: scale them down")
		}
		one := min(g, 1)
		buf = append(buf, one)
		sum += one
	}
	if sum > size {
		return nil, false, fmt.Errorf("%w: %d entries for %d members", ErrTable, size, sum)
	}
	for {
		worst, cheapest := -1, -1 // the largest p/g, the smallest (p+1)/g
		for i, g := range goal {
			if g == 0 {
				continue
			}
			if worst < 0 || mul64(buf[i], goal[worst]).cmp(mul64(buf[worst], g)) > 0 {
				worst = i
			}
			if cheapest < 0 || mul64(buf[i]+1, goal[cheapest]).cmp(mul64(buf[cheapest]+1, g)) < 0 {
				cheapest = i
			}
		}
		if worst < 0 || mul4(buf[worst], goalSum, theta.Den, 1).cmp(mul4(theta.Num, sum, goal[worst], 1)) <= 0 {
			return buf, true, nil
		}
		if sum >= size {
			return buf, false, nil
		}
		buf[cheapest]++
		sum++
	}
}

// Oversubscription returns the factor by which the table's most oversubscribed member exceeds its ideal share: the δ of
// the paper, max over members of (table_i/Σtable) / (weights_i/Σweights). 1 means exact; 0 means that there are no
// weights.
func Oversubscription(weights, table []uint64) float64 {
	var w, t, most float64
	for i := range weights {
		w += float64(weights[i])
		t += float64(table[i])
	}
	for i := range weights {
		if weights[i] > 0 && t > 0 {
			most = max(most, float64(table[i])/t/(float64(weights[i])/w))
		}
	}
	return most
}

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
			fitting, _ := q.div(u128{0, most})
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
			q, _ := mul64(w, total).div(u128{0, sum})
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
