package fare

import (
	"math"
	"math/big"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
)

func TestPart(t *testing.T) {
	for _, c := range []struct{ b, part, whole, want Bandwidth }{
		{800e9, 400e9, 800e9, 400e9},
		{800e9, 1, 3, 266666666667},
		{400e9, 1, 3, 133333333333},
		{800e9, 0, 3, 0},
		{0, 2, 3, 0},
		{0, 0, 0, 0},
		{1, 1, 64, 1}, // 1 and not 0, which would mean maintenance
		{MaxBandwidth, MaxBandwidth, MaxBandwidth, MaxBandwidth},
		{MaxBandwidth, MaxBandwidth - 1, MaxBandwidth, MaxBandwidth - 1},
	} {
		if got := c.b.Part(c.part, c.whole); got != c.want {
			t.Errorf("%d.Part(%d, %d) = %d, want %d", c.b, c.part, c.whole, got, c.want)
		}
	}
}

// TestPartsAddUp verifies the shares of a leaf over 1 to 64 uplinks, passed as floats by the spines and summed at
// another leaf: a server must weigh the sum, against planes without failures, by exactly the fraction that remains. The
// spines are either fared's, which encode the value they have decoded, or FRR's, which hold whole bytes/s.
func TestPartsAddUp(t *testing.T) {
	pass := func(b Bandwidth) Bandwidth {
		a, _ := Codec{}.Judge([]Community{Codec{}.Encode(b, netip.Addr{})}, nil)
		return a.Bandwidth
	}
	frr := func(b Bandwidth) Bandwidth {
		c := Codec{}.Encode(b, netip.Addr{})
		value := math.Trunc(float64(math.Float32frombits(uint32(c[4])<<24 | uint32(c[5])<<16 | uint32(c[6])<<8 | uint32(c[7]))))
		return pass(Bandwidth(8 * value))
	}
	cases := 0
	for _, speed := range []Bandwidth{400e6, 25e9, 40e9, 100e9, 200e9, 400e9, 800e9, 1600e9} {
		for _, subPorts := range []Bandwidth{1, 2, 3, 4, 8} {
			for lost := range subPorts {
				for spines := Bandwidth(1); spines <= 64; spines++ {
					for i, spine := range []func(Bandwidth) Bandwidth{pass, frr} {
						if i == 1 && speed/spines < 32e6 {
							continue // the loss of one byte/s is too much
						}
						var sum Bandwidth
						for alive := Bandwidth(1); alive <= spines; alive++ {
							sum += spine(pass(speed*(subPorts-lost)).Part(400e9, 400e9*spines))
							got := []uint64{uint64(speed * subPorts), uint64(min(speed*subPorts, pass(sum)))}
							unit := simplify(got)
							want := []uint64{uint64(subPorts * spines), uint64((subPorts - lost) * alive)}
							common := gcd(want[0], want[1])
							if got[0]/unit != want[0]/common || got[1]/unit != want[1]/common {
								t.Fatalf("%s, %d of %d sub-ports, %d of %d uplinks: %d:%d, want %d:%d", speed, subPorts-lost, subPorts, alive, spines,
									got[0]/unit, got[1]/unit, want[0]/common, want[1]/common)
							}
							cases++
						}
					}
				}
			}
		}
	}
	if cases < 500_000 {
		t.Errorf("%d cases: this test has lost its subject", cases)
	}
}

// TestSimplify verifies that a simple ratio is recovered from numbers with float32 errors, whatever their size, that
// the result is within half a millionth of any numbers, and that simplify is idempotent.
func TestSimplify(t *testing.T) {
	random := rand.New(rand.NewPCG(5, 6))
	simple, kept := 0, 0
	for range 200_000 {
		ratio := make([]uint64, 1+random.IntN(4))
		var common uint64
		for i := range ratio {
			ratio[i] = random.Uint64N(1 + simplest)
			common = gcd(common, ratio[i])
		}
		numbers := make([]uint64, len(ratio))
		unit := 1 + random.Uint64N(1<<random.IntN(52))
		for i := range ratio {
			numbers[i] = ratio[i] * unit
			if unit > 1<<24 { // half a millionth is then several units
				numbers[i] += random.Uint64N(numbers[i]>>22 + 1)
			}
		}
		if random.IntN(4) == 0 {
			for i := range numbers {
				numbers[i] = random.Uint64N(1 << 62)
			}
			common = 0
		}
		before := slices.Clone(numbers)
		if unit = simplify(numbers); unit == 0 {
			t.Fatalf("%d: no unit", before)
		}
		for i, n := range numbers {
			if n%unit != 0 {
				t.Fatalf("%d: %d is no multiple of %d", before, numbers, unit)
			}
			if common > 0 && n/unit != ratio[i]/common {
				t.Fatalf("%d: %d in units of %d, want the ratio %d", before, numbers, unit, ratio)
			}
		}
		again := slices.Clone(numbers)
		if simplify(again); !slices.Equal(again, numbers) {
			t.Fatalf("%d became %d, and then %d", before, numbers, again)
		}
		if slices.Equal(numbers, before) {
			kept++
			continue
		}
		simple++
		most := slices.Max(before)
		for i := range numbers { // both in units of the greatest number
			was, is := big.NewRat(int64(before[i]), int64(most)), big.NewRat(int64(numbers[i]), int64(slices.Max(numbers)))
			off := new(big.Rat).Sub(is, was)
			if off.Abs(off).Mul(off, big.NewRat(precision, 1)).Cmp(was) > 0 {
				t.Fatalf("%d became %d", before, numbers)
			}
		}
	}
	if simple < 10_000 || kept < 10_000 {
		t.Errorf("%d were simplified, %d kept: this test has lost its subject", simple, kept)
	}
}

// TestSplitWithoutPart checks that a link without a part of its node, or of a node without a share, has no weight, in
// the exact and in the approximate division.
func TestSplitWithoutPart(t *testing.T) {
	for _, x := range []struct {
		share, amount uint64
		want          int
	}{{5, 0, 1}, {0, 3, 1}, {5, 3, 2}} {
		for name, split := range map[string]func(c *computation, links []nodeLink){
			"exact":       func(c *computation, links []nodeLink) { c.splitExactly(c.nodes, links) },
			"approximate": func(c *computation, links []nodeLink) { c.splitNearly(c.nodes, links) },
		} {
			c := computation{nodes: []nodeSum{{share: 7, amounts: 3}, {share: x.share, amounts: 3}}}
			if split(&c, []nodeLink{{node: 0, subPort: 0, amount: 3}, {node: 1, subPort: 1, amount: x.amount}}); len(c.weights) != x.want {
				t.Errorf("%s, share %d, amount %d: weights %v, want %d", name, x.share, x.amount, c.weights, x.want)
			}
		}
	}
}
