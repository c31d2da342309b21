package mailbox

import "unsafe"

// Implemented in flush_arm64.s, for lines of 64 bytes. Linux lets processes execute these instructions (SCTLR_EL1.UCI),
// or executes them for the process.

//go:noescape
func cvac(first unsafe.Pointer, lines, step int)

//go:noescape
func civac(first unsafe.Pointer, lines, step int)

// cacheType returns CTR_EL0.
func cacheType() uint64

// newFlusher returns the instructions for the processor's cache lines. Lines of more than 64 bytes are no obstacle:
// both halves of the memory begin at a page.
func newFlusher() (flusher, error) {
	step := min(lineSize, 4<<(cacheType()>>16&15))
	return flusher{"dc",
		func(first unsafe.Pointer, lines int) { cvac(first, lines, step) },
		func(first unsafe.Pointer, lines int) { civac(first, lines, step) }}, nil
}

func flushers() []flusher {
	f, _ := newFlusher()
	return []flusher{f}
}
