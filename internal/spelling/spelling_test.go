package spelling

import "testing"

func TestDistance(t *testing.T) {
	for _, test := range []struct {
		a, b        string
		limit, want int
	}{
		{"", "", 5, 0},
		{"planes", "planes", 5, 0},
		{"plane", "planes", 5, 1},
		{"palnes", "planes", 5, 1},
		{"mxaimum", "minimum", 5, 2},
		{"mxaimum", "maximum", 5, 1},
		{"", "abc", 5, 3},
		{"kitten", "sitting", 9, 3},
		{"kitten", "sitting", 2, 2},
		{"a", "abcdefgh", 4, 4},
	} {
		for _, swap := range []bool{false, true} {
			a, b := test.a, test.b
			if swap {
				a, b = b, a
			}
			if got := Distance(a, b, test.limit); got != test.want {
				t.Errorf("%q to %q within %d: %d, want %d", a, b, test.limit, got, test.want)
			}
		}
	}
}
