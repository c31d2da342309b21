// Package race reports whether the race detector is enabled. Tests of a single goroutine, in which it finds nothing and
// costs a factor of ten, then do less; a run without the detector does all of the work.
package race
