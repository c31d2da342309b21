//go:build race

package rdmatest

// seeds is how many runs of a kind there are.
const seeds = 2
