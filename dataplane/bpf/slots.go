package bpf

import "slices"

// span is a run of slot counters.
type span struct{ from, n uint32 }

// slotCounters allocates runs of counters to pairs. free and the runs of pairs are disjoint, and together all counters.
type slotCounters struct {
	kernel bpfMap
	free   []span // by from, never adjacent
	clean  uint32 // counters from here on were never used
}

// newSlotCounters derives the free runs from the used ones; used may be empty.
func newSlotCounters(kernel bpfMap, adopted bool, used []span) *slotCounters {
	s := &slotCounters{kernel: kernel}
	if adopted {
		s.clean = kernel.MaxEntries()
	}
	slices.SortFunc(used, func(a, b span) int { return int(a.from) - int(b.from) })
	at := uint32(0)
	for _, u := range used {
		if u.from > at {
			s.free = append(s.free, span{at, u.from - at})
		}
		at = max(at, u.from+u.n)
	}
	if n := kernel.MaxEntries(); at < n {
		s.free = append(s.free, span{at, n - at})
	}
	return s
}

// clone returns an allocation that changes independently.
func (s *slotCounters) clone() *slotCounters {
	return &slotCounters{kernel: s.kernel, free: slices.Clone(s.free), clean: s.clean}
}

// take allocates the first n free counters. Those below dirty have to be set to zero. It returns false if there are
// none.
func (s *slotCounters) take(n uint32) (from, dirty uint32, ok bool) {
	for i := range s.free {
		f := &s.free[i]
		if f.n < n {
			continue
		}
		from = f.from
		if f.from, f.n = f.from+n, f.n-n; f.n == 0 {
			s.free = slices.Delete(s.free, i, i+1)
		}
		dirty = min(s.clean, from+n)
		s.clean = max(s.clean, from+n)
		return from, dirty, true
	}
	return 0, 0, false
}

// zero sets counters to zero; upto is excluded.
func (s *slotCounters) zero(from, upto uint32) error {
	keys := make([]uint32, upto-from)
	for i := range keys {
		keys[i] = from + uint32(i)
	}
	_, err := s.kernel.BatchUpdate(keys, make([]steerSlotCounter, len(keys)), nil)
	return err
}

// give frees counters.
func (s *slotCounters) give(back span) {
	i, _ := slices.BinarySearchFunc(s.free, back.from, func(f span, from uint32) int { return int(f.from) - int(from) })
	s.free = slices.Insert(s.free, i, back)
	if i+1 < len(s.free) && s.free[i].from+s.free[i].n == s.free[i+1].from {
		s.free[i].n += s.free[i+1].n
		s.free = slices.Delete(s.free, i+1, i+2)
	}
	if i > 0 && s.free[i-1].from+s.free[i-1].n == s.free[i].from {
		s.free[i-1].n += s.free[i].n
		s.free = slices.Delete(s.free, i, i+1)
	}
}

// read returns all counters.
func (s *slotCounters) read() ([]steerSlotCounter, error) {
	return readWords[steerSlotCounter](s.kernel)
}
