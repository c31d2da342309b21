package wecmp

import (
	"math/big"
	"math/rand/v2"
	"slices"
	"testing"
)

func randomWeights(r *rand.Rand, n int) []uint64 {
	w := make([]uint64, n)
	for i := range w {
		switch r.IntN(4) {
		case 0:
		case 1:
			w[i] = r.Uint64() >> r.IntN(64)
		default:
			w[i] = r.Uint64N(9)
		}
	}
	return w
}

func rationals(w []uint64) (out []*big.Rat) {
	for _, x := range w {
		out = append(out, frac(x, 1))
	}
	return out
}

func sumOf(w []uint64) (sum uint64) {
	for _, x := range w {
		sum += x
	}
	return sum
}

func TestApportionEqualsRationals(t *testing.T) {
	r := seeded(t)
	var buf []uint64
	for range 4000 {
		w := randomWeights(r, 1+r.IntN(12))
		total := r.Uint64N(1 << r.IntN(40))
		buf = Apportion(buf, w, total)
		for i, want := range apportion(rationals(w), int64(total)) {
			if buf[i] != uint64(want) {
				t.Fatalf("Apportion(%v, %d) = %v, want %d at %d", w, total, buf, want, i)
			}
		}
		if slices.Max(w) > 0 && sumOf(buf) != total {
			t.Fatalf("Apportion(%v, %d) = %v sums to %d", w, total, buf, sumOf(buf))
		}
		// The engine's variant gives the same result.
		shares := make([]uint32, len(w))
		for i := range w {
			w[i] %= MaxCapacity + 1
		}
		divide(shares, w, Parts, make([]uint64, len(w)))
		for i, want := range Apportion(nil, w, Parts) {
			if uint64(shares[i]) != want {
				t.Fatalf("divide(%v) = %v, want %d at %d", w, shares, want, i)
			}
		}
	}
}

// TestApportionBeyond64Bits uses sums of more than 64 bits: 64 x 64 capacities of 2^53 take 66 bits, and 4096 of
// 2^64-1 take 76.
func TestApportionBeyond64Bits(t *testing.T) {
	for _, c := range []uint64{MaxCapacity, 1<<64 - 1} {
		w := slices.Repeat([]uint64{c}, MaxSubPortsTotal)
		w[7], w[4095] = c-1, c/2
		got := Apportion(nil, w, Parts)
		for i, want := range apportion(rationals(w), Parts) {
			if got[i] != uint64(want) {
				t.Fatalf("%d of %d: %d, want %d", i, c, got[i], want)
			}
		}
	}
}

func TestLowestTerms(t *testing.T) {
	for _, c := range [][2][]uint64{
		{{800e9, 800e9, 400e9, 800e9}, {2, 2, 1, 2}}, {{0, 0}, {0, 0}}, {{0, 5, 0}, {0, 1, 0}}, {{}, {}},
		{{1 << 53, 1<<53 - 1}, {1 << 53, 1<<53 - 1}}, {{1 << 63, 1 << 62}, {2, 1}},
	} {
		got := slices.Clone(c[0])
		if LowestTerms(got); !slices.Equal(got, c[1]) {
			t.Errorf("%v: %v, want %v", c[0], got, c[1])
		}
	}
}

func TestWideArithmetic(t *testing.T) {
	r := seeded(t)
	u := func() uint64 { return r.Uint64() >> r.IntN(64) }
	wide := func(a u128) *big.Int {
		x := new(big.Int).SetUint64(a.hi)
		return x.Lsh(x, 64).Add(x, new(big.Int).SetUint64(a.lo))
	}
	for range 5000 {
		f := [8]uint64{u(), u(), u(), u(), u(), u(), u(), u()}
		p, q := big.NewInt(1), big.NewInt(1)
		for i := range 4 {
			p.Mul(p, new(big.Int).SetUint64(f[i]))
			q.Mul(q, new(big.Int).SetUint64(f[i+4]))
		}
		if got := mul4(f[0], f[1], f[2], f[3]).cmp(mul4(f[4], f[5], f[6], f[7])); got != p.Cmp(q) {
			t.Fatalf("%v: %d, want %d", f, got, p.Cmp(q))
		}
		// w·total/sum for a sum that includes w, so the quotient fits.
		w, total, sum := f[0], f[1], u128{f[2] >> 50, f[0]}.add(u128{0, f[3]})
		if sum == (u128{}) {
			continue
		}
		gotQ, gotR := mul64(w, total).div(sum)
		wantQ, wantR := new(big.Int).QuoRem(wide(mul64(w, total)), wide(sum), new(big.Int))
		if gotQ != wantQ.Uint64() || wide(gotR).Cmp(wantR) != 0 {
			t.Fatalf("%d·%d/%v: %d rest %v, want %s rest %s", w, total, sum, gotQ, gotR, wantQ, wantR)
		}
	}
}
