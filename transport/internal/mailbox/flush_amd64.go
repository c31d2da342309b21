package mailbox

import (
	"errors"
	"unsafe"
)

// Implemented in flush_amd64.s, for lines of 64 bytes.

//go:noescape
func cpuid(leaf, part uint32) (a, b, c, d uint32)

//go:noescape
func clwb(first unsafe.Pointer, lines int)

//go:noescape
func clflushopt(first unsafe.Pointer, lines int)

//go:noescape
func clflush(first unsafe.Pointer, lines int)

// newFlusher returns the best instructions of the processor.
func newFlusher() (flusher, error) {
	all := flushers()
	if len(all) == 0 {
		return flusher{}, errors.New("the processor has no instruction CLFLUSH: memory that is not coherent needs it")
	}
	return all[0], nil
}

// flushers returns the sets of instructions that the processor has, the best one first.
func flushers() (all []flusher) {
	leaves, _, _, _ := cpuid(0, 0)
	_, _, _, d := cpuid(1, 0)
	var b uint32
	if leaves >= 7 {
		_, b, _, _ = cpuid(7, 0)
	}
	if b&(1<<23) != 0 {
		if b&(1<<24) != 0 {
			all = append(all, flusher{"clwb", clwb, clflushopt})
		}
		all = append(all, flusher{"clflushopt", clflushopt, clflushopt})
	}
	if d&(1<<19) != 0 {
		all = append(all, flusher{"clflush", clflush, clflush})
	}
	return all
}
