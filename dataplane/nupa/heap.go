package nupa

import (
	"fmt"
	"sync/atomic"
)

// The heap: a word per page says who has it, and nothing else is kept, so that an owner that dies in the middle of allocating or
// freeing leaves nothing to repair: its pages are those with its number. Searching is linear; registering memory is not the fast path.
const (
	ownerMask = 0xffff
	pageLost  = 0xffff // memory that a stuck peer may still write to; never used again
	firstPage = 1 << 31
)

// alloc finds pages for n bytes, first fit, for an endpoint. Under the file's lock. An error says how much there is.
func (a *area) alloc(endpoint, n int) ([]byte, error) {
	if n < 0 {
		return nil, fmt.Errorf("%d bytes of shared memory: want 0 or more", n)
	}
	want := max(1, n/pageSize+min(n%pageSize, 1))
	run, free, longest := 0, 0, 0
	for page := range a.pages {
		if a.page(page).Load() != 0 {
			run = 0
			continue
		}
		run, free = run+1, free+1
		longest = max(longest, run)
		if run < want {
			continue
		}
		first := page - want + 1
		owner := uint32(endpoint + 1)
		for p := first; p <= page; p++ {
			a.page(p).Store(owner)
		}
		a.page(first).Store(owner | firstPage)
		b := a.mem[a.heapAt+first*pageSize:][: n : want*pageSize]
		clear(b[:cap(b)])
		return b, nil
	}
	return nil, fmt.Errorf("%d bytes of shared memory: %d of %d are free, %d in one piece (Config.Size)",
		n, free*pageSize, a.pages*pageSize, longest*pageSize)
}

// free gives back what alloc gave. Anything else is left alone: false.
func (a *area) free(endpoint int, b []byte) bool {
	at, ok := a.offset(b[:min(1, cap(b))])
	if !ok || (at-a.heapAt)%pageSize != 0 {
		return false
	}
	first := (at - a.heapAt) / pageSize
	owner := uint32(endpoint + 1)
	if a.page(first).Load() != owner|firstPage {
		return false
	}
	last := first
	for last+1 < a.pages && a.page(last+1).Load() == owner {
		last++
	}
	// From the end, so that what is left when its owner dies here is still an allocation.
	for p := last; p >= first; p-- {
		a.page(p).Store(0)
	}
	return true
}

// freeAll gives back everything of an endpoint.
func (a *area) freeAll(endpoint int) {
	for p := range a.pages {
		if a.page(p).Load()&ownerMask == uint32(endpoint+1) {
			a.page(p).Store(0)
		}
	}
}

// owns says whether an endpoint has any page.
func (a *area) owns(endpoint int) bool {
	for p := range a.pages {
		if a.page(p).Load()&ownerMask == uint32(endpoint+1) {
			return true
		}
	}
	return false
}

// lose takes pages out of use for good.
func (a *area) lose(at, n int) {
	for p := (at - a.heapAt) / pageSize; p <= (at-a.heapAt+n-1)/pageSize; p++ {
		a.page(p).Store(pageLost)
	}
}

func (a *area) page(i int) *atomic.Uint32 { return a.u32(a.pagesAt + 4*i) }
