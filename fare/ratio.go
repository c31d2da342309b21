package fare

import "math/bits"

// Bounds of [simplify].
const (
	simplest  = 1000      // the largest number of a simple ratio
	precision = 2_000_000 // numbers are within 1/precision of it
)

// simplify brings numbers to a simple ratio if they are within half a millionth
// of one: to multiples of a unit, at most 1000 times the unit. It returns the
// unit. If it leaves the numbers unchanged, the unit is their greatest common
// divisor, or 1 when all are zero. Each number must be less than 2^63.
//
// A value becomes a float32 at every node that passes on a sum or a part of one
// ([Bandwidth.Part]). Three thirds of 400G may arrive as 399.99999G, and two
// thirds of 800G as 533.33334G; together with 800G they would result in weights
// of eight digits. The float32 error is less than half a millionth, and two
// different simple ratios are at least a millionth apart, so no ratio is
// mistaken for another.
func simplify(numbers []uint64) (unit uint64) {
	var most, common uint64
	for _, n := range numbers {
		most = max(most, n)
		common = gcd(common, n)
	}
	if most == 0 {
		return 1
	}
	if most/common <= simplest {
		return common
	}
	for top := uint64(1); top <= simplest; top++ {
		if !near(numbers, top, most) {
			continue
		}
		unit = most / top
		for i, n := range numbers {
			numbers[i] = unit * scale(n, top, most)
		}
		return unit
	}
	return common
}

// near reports whether numbers are close to a simple ratio in which most, the
// greatest of them, is top.
func near(numbers []uint64, top, most uint64) bool {
	for _, n := range numbers {
		hi, lo := bits.Mul64(n, top)
		_, off := bits.Div64(hi, lo, most)
		offHi, offLo := bits.Mul64(min(off, most-off), precision)
		if offHi > hi || offHi == hi && offLo > lo {
			return false
		}
	}
	return true
}

// scale returns n * part / whole, rounded to nearest. part must not exceed
// whole.
func scale(n, part, whole uint64) uint64 {
	hi, lo := bits.Mul64(n, part)
	lo, carry := bits.Add64(lo, whole/2, 0)
	quotient, _ := bits.Div64(hi+carry, lo, whole)
	return quotient
}

// gcd returns the greatest common divisor; gcd(0, x) is x.
func gcd(a, b uint64) uint64 {
	if a == 1 {
		return 1
	}
	for b != 0 {
		a, b = b, a%b
	}
	return a
}
