//go:build !race

package superp_test

// scale divides the sizes of long tests under the race detector; seeds is the number of runs of each kind.
const (
	scale = 1
	seeds = 3
)
