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

func TestDivideEqualsRationals(t *testing.T) {
	r := seeded(t)
	for range 4000 {
		w := randomWeights(r, 1+r.IntN(12))
		for i := range w {
			w[i] %= MaxCapacity + 1
		}
		total := uint32(r.Uint64N(1 << r.IntN(33)))
		got := make([]uint32, len(w))
		divide(got, w, total, make([]uint64, len(w)))
		for i, want := range apportion(rationals(w), int64(total)) {
			if int64(got[i]) != want {
				t.Fatalf("divide(%v, %d) = %v, want %d at %d", w, total, got, want, i)
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
		w, total, sum := f[0]>>1, f[1], f[0]>>1+f[2]>>1
		if sum == 0 {
			continue
		}
		gotQ, gotR := mul64(w, total).div(sum)
		big64 := func(x uint64) *big.Int { return new(big.Int).SetUint64(x) }
		wantQ, wantR := new(big.Int).QuoRem(new(big.Int).Mul(big64(w), big64(total)), big64(sum), new(big.Int))
		if gotQ != wantQ.Uint64() || gotR != wantR.Uint64() {
			t.Fatalf("%d·%d/%d: %d rest %d, want %s rest %s", w, total, sum, gotQ, gotR, wantQ, wantR)
		}
	}
}
