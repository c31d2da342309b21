//go:build !race

package rdmatest

// seeds is the number of runs of each kind.
const seeds = 8
