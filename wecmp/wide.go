package wecmp

import "math/bits"

// u128 is an unsigned 128-bit integer: hi·2^64 + lo.
type u128 struct{ hi, lo uint64 }

func mul64(a, b uint64) u128 {
	hi, lo := bits.Mul64(a, b)
	return u128{hi, lo}
}

// sub returns a-b, where a >= b.
func (a u128) sub(b u128) u128 {
	lo, borrow := bits.Sub64(a.lo, b.lo, 0)
	hi, _ := bits.Sub64(a.hi, b.hi, borrow)
	return u128{hi, lo}
}

// cmp returns -1, 0 or 1 if a is below, equal to or above b.
func (a u128) cmp(b u128) int {
	switch {
	case a.hi < b.hi || a.hi == b.hi && a.lo < b.lo:
		return -1
	case a == b:
		return 0
	}
	return 1
}

// div returns the quotient and remainder of a/b; the quotient must fit 64 bits.
func (a u128) div(b uint64) (q, r uint64) { return bits.Div64(a.hi, a.lo, b) }

// product is a 256-bit integer, least significant word first.
type product [4]uint64

// mul4 multiplies four 64-bit factors exactly.
func mul4(a, b, c, d uint64) (p product) {
	x, y := mul64(a, b), mul64(c, d)
	for i, xw := range [2]uint64{x.lo, x.hi} {
		var carry uint64
		for j, yw := range [2]uint64{y.lo, y.hi} {
			hi, lo := bits.Mul64(xw, yw)
			var c0, c1 uint64
			lo, c0 = bits.Add64(lo, p[i+j], 0)
			p[i+j], c1 = bits.Add64(lo, carry, 0)
			carry = hi + c0 + c1 // cannot overflow: hi <= 2^64-2
		}
		p[i+2] = carry
	}
	return p
}

// cmp returns -1, 0 or 1 if p is below, equal to or above q.
func (p product) cmp(q product) int {
	for i := 3; i >= 0; i-- {
		switch {
		case p[i] < q[i]:
			return -1
		case p[i] > q[i]:
			return 1
		}
	}
	return 0
}

// gcd returns the greatest common divisor; gcd(0, b) = b.
func gcd(a, b uint64) uint64 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}
