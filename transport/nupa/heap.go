package nupa

import (
	"fmt"
	"sync/atomic"
)

// The heap has one word per page, which contains the owner, and no other state. An owner that dies while it allocates
// or frees therefore leaves nothing to repair: its pages are those with its number. An owner takes a free page by
// compare-and-swap. Searches are linear, since the registration of memory is not performance-critical.
const (
	ownerMask = 0xffff
	pageLost  = 0xffff // memory to which a stuck peer may still write; never reused
	firstPage = 1 << 31
)

// alloc allocates pages for n bytes, first fit, for an endpoint. The error contains the amount of free memory.
func (a *area) alloc(endpoint, n int) ([]byte, error) {
	if n < 0 {
		return nil, fmt.Errorf("%d bytes of shared memory: use 0 or more", n)
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
		first, owner := page-want+1, uint32(endpoint+1)
		p := first
		for p <= page && a.page(p).CompareAndSwap(0, owner) {
			p++
		}
		if p <= page { // an endpoint of another kernel has taken it
			for p--; p >= first; p-- {
				a.page(p).Store(0)
			}
			run = 0
			continue
		}
		a.page(first).Store(owner | firstPage)
		b := a.mem[a.heapAt+first*pageSize:][: n : want*pageSize]
		clear(b[:cap(b)])
		return b, nil
	}
	return nil, fmt.Errorf("%d bytes of shared memory: %d of %d are free, at most %d contiguous (Config.Size)",
		n, free*pageSize, a.pages*pageSize, longest*pageSize)
}

// free frees memory from alloc. It returns false, and does nothing, for other memory.
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
	// From the end, so that the rest is still a valid allocation if the owner dies here.
	for p := last; p >= first; p-- {
		a.page(p).Store(0)
	}
	return true
}

// freeAll frees all pages of an endpoint.
func (a *area) freeAll(endpoint int) {
	for p := range a.pages {
		if a.page(p).Load()&ownerMask == uint32(endpoint+1) {
			a.page(p).Store(0)
		}
	}
}

// owns reports whether an endpoint owns any page.
func (a *area) owns(endpoint int) bool {
	for p := range a.pages {
		if a.page(p).Load()&ownerMask == uint32(endpoint+1) {
			return true
		}
	}
	return false
}

// lose takes pages out of use permanently.
func (a *area) lose(at, n int) {
	for p := (at - a.heapAt) / pageSize; p <= (at-a.heapAt+n-1)/pageSize; p++ {
		a.page(p).Store(pageLost)
	}
}

func (a *area) page(i int) *atomic.Uint32 { return a.u32(a.pagesAt + 4*i) }
