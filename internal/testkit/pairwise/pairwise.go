// Package pairwise chooses test cases from the combinations of several variants. Most faults need one value, or a pair
// of values of two variants; a set of rows in which every pair occurs finds them with a fraction of the full product.
package pairwise

// Rows returns rows with one value of each variant, 0 to sizes[i]-1 for variant i, so that every pair of values of two
// variants occurs in a row. It is deterministic: each row is the first of those combinations, in order of their values,
// that have the most pairs without a row. There are at least two sizes, all positive.
func Rows(sizes ...int) [][]int {
	type pair struct{ a, x, b, y int } // value x of variant a with value y of variant b, a < b
	missing := make(map[pair]bool)
	for b := range sizes {
		for a := range b {
			for x := range sizes[a] {
				for y := range sizes[b] {
					missing[pair{a, x, b, y}] = true
				}
			}
		}
	}
	var rows [][]int
	for len(missing) > 0 {
		var best []int
		most := 0
		for row := make([]int, len(sizes)); row != nil; row = next(row, sizes) {
			n := 0
			for b := range row {
				for a := range b {
					if missing[pair{a, row[a], b, row[b]}] {
						n++
					}
				}
			}
			if n > most {
				best, most = append(best[:0], row...), n
			}
		}
		for b := range best {
			for a := range b {
				delete(missing, pair{a, best[a], b, best[b]})
			}
		}
		rows = append(rows, best)
	}
	return rows
}

// next increments a row and returns it, or nil after the last row.
func next(row, sizes []int) []int {
	for i := len(row) - 1; i >= 0; i-- {
		if row[i]++; row[i] < sizes[i] {
			return row
		}
		row[i] = 0
	}
	return nil
}
