package wecmp

import (
	"math/big"
	"math/rand/v2"
	"slices"
	"testing"
)

// tables calls try with every table of the given sum in which each member with a weight has at least one entry.
func tables(weights []uint64, sum uint64, try func([]uint64)) {
	table := make([]uint64, len(weights))
	var fill func(i int, left uint64)
	fill = func(i int, left uint64) {
		if i == len(weights) {
			if left == 0 {
				try(table)
			}
			return
		}
		if weights[i] == 0 {
			table[i] = 0
			fill(i+1, left)
			return
		}
		for n := uint64(1); n <= left; n++ {
			table[i] = n
			fill(i+1, left-n)
		}
	}
	fill(0, sum)
}

func TestFitGolden(t *testing.T) {
	for _, c := range []struct {
		weights         []uint64
		maxWeight, size uint64
		want            []uint64
	}{
		{[]uint64{2, 2, 1, 2}, 0, 0, []uint64{2, 2, 1, 2}},
		{[]uint64{2, 2, 1, 2}, 256, 64, []uint64{2, 2, 1, 2}},
		{[]uint64{400, 400, 400, 200}, 0, 7, []uint64{2, 2, 2, 1}},
		{[]uint64{400, 400, 400, 200}, 0, 4, []uint64{1, 1, 1, 1}},
		{[]uint64{1001, 1000}, 256, 0, []uint64{256, 255}},
		{[]uint64{1000, 1, 0}, 0, 16, []uint64{15, 1, 0}},
		{[]uint64{1 << 52, 1}, 256, 0, []uint64{255, 1}},
		{[]uint64{5, 5, 5}, 0, 2, []uint64{1, 1, 1}},
		{[]uint64{0, 0}, 1, 1, []uint64{0, 0}},
		{[]uint64{4, 2}, 256, 64, []uint64{4, 2}}, // within the limits: not reduced to lowest terms
	} {
		if got := Fit(nil, c.weights, c.maxWeight, c.size); !slices.Equal(got, c.want) {
			t.Errorf("Fit(%v, %d, %d) = %v, want %v", c.weights, c.maxWeight, c.size, got, c.want)
		}
	}
}

// TestFitAgainstExactSearch verifies that no table of the size is nearer to the quotas (sum of squared distances).
func TestFitAgainstExactSearch(t *testing.T) {
	r := seeded(t)
	for range 400 {
		w := make([]uint64, 2+r.IntN(3))
		for i := range w {
			w[i] = r.Uint64N(1 << (1 + r.IntN(12)))
		}
		w[0] += 40 // so that every size below is a limit
		size := uint64(len(w)) + r.Uint64N(12)
		distance := func(table []uint64) *big.Rat {
			sum := new(big.Rat)
			for i := range w {
				d := new(big.Rat).Sub(frac(table[i], 1), frac(w[i]*size, sumOf(w)))
				sum.Add(sum, d.Mul(d, d))
			}
			return sum
		}
		got := Fit(nil, w, 0, size)
		best := slices.Clone(got)
		var least *big.Rat
		tables(w, size, func(table []uint64) {
			if d := distance(table); least == nil || d.Cmp(least) < 0 {
				least, best = d, slices.Clone(table)
			}
		})
		// The result of Fit is in lowest terms, so it is scaled back for the comparison.
		scaled := slices.Clone(got)
		for i := range scaled {
			scaled[i] *= size / sumOf(got)
		}
		if sumOf(scaled) != size || distance(scaled).Cmp(least) != 0 {
			t.Fatalf("Fit(%v, size %d) = %v, nearer is %v", w, size, got, best)
		}
	}
}

// TestFitBounds verifies that for any weights the result respects the limits, keeps every live member, and
// oversubscribes no member by an entry or more beyond its quota, unless the quota is below one.
func TestFitBounds(t *testing.T) {
	r := seeded(t)
	for range 4000 {
		w := boundedWeights(r)
		maxWeight, size := 1+r.Uint64N(300), uint64(len(w))+r.Uint64N(600)
		got := Fit(nil, w, maxWeight, size)
		if sumOf(got) > max(size, sumOf(w)) || sumOf(w) > size && sumOf(got) > size || slices.Max(got) > max(maxWeight, 1) {
			t.Fatalf("Fit(%v, %d, %d) = %v exceeds its bounds", w, maxWeight, size, got)
		}
		for i := range w {
			if (w[i] == 0) != (got[i] == 0) {
				t.Fatalf("Fit(%v, %d, %d) = %v: member %d appears or vanishes", w, maxWeight, size, got, i)
			}
			// got/Σgot is in lowest terms: only a multiple of Σgot is known of the table's size, so an entry is at most
			// 1/Σgot.
			quota := new(big.Rat).Quo(frac(w[i], 1), new(big.Rat).SetInt(bigSum(w)))
			share := frac(got[i], sumOf(got))
			if entry := frac(1, sumOf(got)); got[i] > 1 && share.Sub(share, quota).Cmp(entry) >= 0 {
				t.Fatalf("Fit(%v, %d, %d) = %v: member %d exceeds its quota by an entry", w, maxWeight, size, got, i)
			}
		}
	}
}

func bigSum(weights []uint64) *big.Int {
	sum := new(big.Int)
	for _, w := range weights {
		sum.Add(sum, new(big.Int).SetUint64(w))
	}
	return sum
}

func boundedWeights(r *rand.Rand) []uint64 {
	w := make([]uint64, 1+r.IntN(16))
	for i := range w {
		w[i] = r.Uint64() >> (5 + r.IntN(59))
	}
	w[0]++
	return w
}
