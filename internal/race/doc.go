// Package race says whether the race detector watches: tests of a single goroutine, in which it finds nothing and costs a factor of ten,
// do less then, and all of it in a run without.
package race
