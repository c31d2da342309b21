//go:build !race

package rdmatest_test

// effort is how many times less the big runs do.
const effort = 1
