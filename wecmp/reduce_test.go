package wecmp

import (
	"errors"
	"math/big"
	"math/rand/v2"
	"slices"
	"testing"
)

// TestReduceGolden uses tables computed in exact rationals, ties to the lowest index.
func TestReduceGolden(t *testing.T) {
	for _, c := range []struct {
		weights []uint64
		percent uint64
		want    []uint64
	}{
		{[]uint64{400, 400, 400, 200}, 110, []uint64{2, 2, 2, 1}},
		{[]uint64{400, 400, 400, 200}, 120, []uint64{2, 2, 1, 1}},
		{[]uint64{100, 97, 53, 12}, 105, []uint64{8, 8, 4, 1}},
		{[]uint64{64, 63, 62, 61}, 105, []uint64{1, 1, 1, 1}},
		{[]uint64{255, 204}, 105, []uint64{4, 3}},
		{[]uint64{1600, 1200, 800, 400, 100}, 105, []uint64{16, 12, 8, 3, 1}},
		{[]uint64{7, 11, 13, 17, 19, 23, 29, 31}, 110, []uint64{1, 2, 2, 3, 3, 4, 5, 5}},
		{[]uint64{400, 0, 400}, 100, []uint64{1, 0, 1}},
		{[]uint64{0, 0}, 105, []uint64{0, 0}},
	} {
		got, within, err := Reduce(nil, c.weights, Theta{c.percent, 100}, 0)
		if err != nil || !within || !slices.Equal(got, c.want) {
			t.Errorf("Reduce(%v, %d%%) = %v, %v, %v; want %v", c.weights, c.percent, got, within, err, c.want)
		}
	}
}

// over returns max p_i·ΣG/(ΣP·g_i), exactly.
func over(weights, table []uint64) *big.Rat {
	most := new(big.Rat)
	for i, g := range weights {
		if g == 0 {
			continue
		}
		x := new(big.Rat).Mul(frac(table[i], sumOf(table)), frac(sumOf(weights), g))
		if x.Cmp(most) > 0 {
			most = x
		}
	}
	return most
}

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

// TestReduceAgainstExactSearch verifies that no smaller table is within theta, and that none of the same size is less
// oversubscribed.
func TestReduceAgainstExactSearch(t *testing.T) {
	r := seeded(t)
	for range 300 {
		w := make([]uint64, 2+r.IntN(3))
		for i := range w {
			w[i] = r.Uint64N(1 << (1 + r.IntN(12)))
		}
		w[0]++
		theta := Theta{100 + r.Uint64N(60), 100}
		const size = 14
		got, within, err := Reduce(nil, w, theta, size)
		if err != nil {
			t.Fatal(err)
		}
		bound := frac(theta.Num, theta.Den)
		if within != (over(w, got).Cmp(bound) <= 0) {
			t.Fatalf("Reduce(%v, %v) = %v: within is %v", w, theta, got, within)
		}
		if !within && sumOf(got) != size {
			t.Fatalf("Reduce(%v, %v) = %v: gave up before %d", w, theta, got, size)
		}
		for sum := uint64(1); sum <= sumOf(got); sum++ {
			tables(w, sum, func(table []uint64) {
				if o := over(w, table); sum < sumOf(got) && o.Cmp(bound) <= 0 || sum == sumOf(got) && o.Cmp(over(w, got)) < 0 {
					t.Fatalf("Reduce(%v, %v) = %v; better: %v", w, theta, got, table)
				}
			})
		}
	}
}

func TestReduceRefuses(t *testing.T) {
	if _, _, err := Reduce(nil, []uint64{1, 2}, Theta{99, 100}, 0); err == nil {
		t.Error("theta below 1")
	}
	if _, _, err := Reduce(nil, []uint64{1, 2}, Theta{}, 0); err == nil {
		t.Error("theta 0/0")
	}
	if _, _, err := Reduce(nil, []uint64{1, 2, 3}, Theta{2, 1}, 2); !errors.Is(err, ErrTable) {
		t.Errorf("table too small: %v", err)
	}
	if got, _, err := Reduce(nil, []uint64{1, 2, 3}, Theta{2, 1}, 3); err != nil || sumOf(got) != 3 {
		t.Errorf("a table of one entry each: %v, %v", got, err)
	}
	if _, _, err := Reduce(nil, []uint64{1<<64 - 1, 2}, Theta{2, 1}, 9); err == nil {
		t.Error("sum above 2^64")
	}
	if got, within, err := Reduce(nil, []uint64{1 << 60, 1<<60 + 1}, Theta{1, 1}, 100); err != nil || within || sumOf(got) != 100 {
		t.Errorf("theta 1 for near-equal weights: %v, %v, %v", got, within, err)
	}
}

func TestOversubscription(t *testing.T) {
	if d := Oversubscription([]uint64{4, 4, 4, 2}, []uint64{2, 2, 1, 1}); d < 1.1666 || d > 1.1667 {
		t.Errorf("got %v, want 7/6", d)
	}
	if d := Oversubscription([]uint64{0, 0}, []uint64{0, 0}); d != 0 {
		t.Errorf("got %v for nothing", d)
	}
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
