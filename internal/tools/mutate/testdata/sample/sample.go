// Package sample has one function that its test checks, one that its test only runs, and one that no test runs.
package sample

// Checked returns the larger of both, at least 0.
func Checked(a, b int) int {
	if a < b {
		a = b
	}
	return max(a, 0)
}

// Sign returns -1, 0 or 1.
func Sign(a int) int {
	switch {
	case a < 0:
		return -1
	case a > 0:
		return 1
	}
	return 0
}

// Ran counts down from n.
func Ran(n int) int {
	return n - 1
}

// Unreached adds both.
func Unreached(a, b int) int {
	return a + b
}
