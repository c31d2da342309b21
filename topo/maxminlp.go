package topo

import "math/big"

// simplex returns an x >= 0 that maximizes objective·x subject to rows·x <= bounds. No bound may be negative; nil
// stands for zero. The solution must be bounded. It is Dantzig's method on a dense tableau in exact arithmetic, with
// Bland's rule, which prevents cycles: the linear programs here have a few dozen rows and are highly degenerate, so
// rounding errors would lead to wrong results.
func simplex(rows [][]*big.Rat, bounds, objective []*big.Rat) []*big.Rat {
	n, m := len(objective), len(rows)
	width := n + m + 1
	set := func(row []*big.Rat, values []*big.Rat) {
		for i, v := range values {
			if v != nil && v.Sign() != 0 {
				row[i] = new(big.Rat).Set(v)
			}
		}
	}
	tableau, basis := make([][]*big.Rat, m+1), make([]int, m)
	for i := range tableau {
		tableau[i] = make([]*big.Rat, width)
		if i == m {
			set(tableau[i], objective)
			break
		}
		set(tableau[i], rows[i])
		set(tableau[i][n+i:], []*big.Rat{big.NewRat(1, 1)})
		set(tableau[i][width-1:], bounds[i:i+1])
		basis[i] = n + i
	}
	positive := func(v *big.Rat) bool { return v != nil && v.Sign() > 0 }
	var a, b big.Rat
	for {
		in := 0
		for in < width-1 && !positive(tableau[m][in]) {
			in++
		}
		if in == width-1 {
			break
		}
		out := -1
		var least big.Rat
		for i := range m {
			if !positive(tableau[i][in]) {
				continue
			}
			a.SetInt64(0)
			if bound := tableau[i][width-1]; bound != nil {
				a.Quo(bound, tableau[i][in])
			}
			if d := a.Cmp(&least); out < 0 || d < 0 || d == 0 && basis[i] < basis[out] {
				out = i
				least.Set(&a)
			}
		}
		if out < 0 {
			panic("topo: simplex: the solution is not bounded")
		}
		pivot := tableau[out]
		scale := new(big.Rat).Inv(pivot[in])
		for _, v := range pivot {
			if v != nil {
				v.Mul(v, scale)
			}
		}
		for i, row := range tableau {
			if i == out || row[in] == nil {
				continue
			}
			b.Set(row[in])
			for k, v := range pivot {
				if v == nil {
					continue
				}
				if a.Mul(&b, v); row[k] == nil {
					row[k] = new(big.Rat)
				}
				if row[k].Sub(row[k], &a); row[k].Sign() == 0 {
					row[k] = nil
				}
			}
		}
		basis[out] = in
	}
	x := make([]*big.Rat, n)
	for v := range x {
		x[v] = new(big.Rat)
	}
	for i, v := range basis {
		if v < n && tableau[i][width-1] != nil {
			x[v].Set(tableau[i][width-1])
		}
	}
	return x
}
