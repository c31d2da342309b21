//go:build race

package rdmatest_test

// effort divides the size of the big runs.
const effort = 100
