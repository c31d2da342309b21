package pairwise

import (
	"slices"
	"testing"

	"github.com/fared/fared/internal/testkit/gate"
)

var _ = gate.Package{NoGoroutine: true}

// TestRows looks for every pair of values in the rows, and compares their number with its lower bound, the product of
// the two greatest sizes.
func TestRows(t *testing.T) {
	for _, sizes := range [][]int{{1, 1}, {2, 2}, {3, 2, 2}, {4, 4, 3, 4}, {2, 2, 2, 2, 2, 2}, {5, 1, 3}} {
		rows := Rows(sizes...)
		for b := range sizes {
			for a := range b {
				for x := range sizes[a] {
					for y := range sizes[b] {
						if !slices.ContainsFunc(rows, func(row []int) bool { return row[a] == x && row[b] == y }) {
							t.Errorf("%v: no row has value %d of variant %d with value %d of variant %d", sizes, x, a, y, b)
						}
					}
				}
			}
		}
		sorted := slices.Sorted(slices.Values(sizes))
		if least := sorted[len(sorted)-1] * sorted[len(sorted)-2]; len(rows) < least || len(rows) > 2*least {
			t.Errorf("%v: %d rows, want %d to %d", sizes, len(rows), least, 2*least)
		}
		if !slices.EqualFunc(rows, Rows(sizes...), slices.Equal) {
			t.Errorf("%v: two calls return different rows", sizes)
		}
		t.Logf("%v: %d rows", sizes, len(rows))
	}
}
