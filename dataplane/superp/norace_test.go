//go:build !race

package superp_test

// scale divides the sizes of long tests under the race detector; seeds is how many runs of each kind there are.
const (
	scale = 1
	seeds = 4
)
