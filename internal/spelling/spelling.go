// Package spelling suggests the word that a misspelled one was meant to be.
package spelling

import "slices"

// Distance returns the optimal string alignment distance of a and b in bytes (insertions, deletions, substitutions, and
// swaps of neighboring bytes), or limit if the distance is limit or more.
func Distance(a, b string, limit int) int {
	if len(a)-len(b) >= limit || len(b)-len(a) >= limit {
		return limit
	}
	row, before := make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		above := slices.Clone(row)
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost = 1 + min(diagonal, row[j], row[j+1])
				if i > 0 && j > 0 && a[i] == b[j-1] && a[i-1] == b[j] {
					cost = min(cost, before[j-1]+1)
				}
			}
			diagonal, row[j+1] = row[j+1], cost
		}
		before = above
	}
	return min(row[len(b)], limit)
}
