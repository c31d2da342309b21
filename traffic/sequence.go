package traffic

// sequence knows which of a pair's messages have arrived. It remembers the last window of numbers; an older one that arrives for the
// first time is taken for a duplicate, which is wrong as well, and lost.
type sequence struct {
	seen                           [window / 64]uint64 // bit m modulo window; of numbers in [next-window, next)
	next                           uint64              // one more than the highest that has arrived
	freed                          uint64              // numbers below it have arrived, or are not waited for any more
	arrived, duplicated, reordered uint64
}

// window is a power of two, and far more than messages are outstanding.
const window = 1 << 16

// arrive counts a message; fresh: it is the first time.
func (s *sequence) arrive(m uint64) (fresh bool) {
	switch {
	case m >= s.next:
		s.forget(s.next, m)
		s.next = m + 1
	case s.next-m > window || s.seen[m%window/64]&(1<<(m%64)) != 0:
		s.duplicated++
		return false
	default:
		s.reordered++
	}
	s.seen[m%window/64] |= 1 << (m % 64)
	s.arrived++
	return true
}

// forget clears the bits of numbers from first to last, which nobody has seen yet.
func (s *sequence) forget(first, last uint64) {
	if last-first >= window {
		clear(s.seen[:])
		return
	}
	for m := first; m <= last; {
		n := min(64-m%64, last-m+1)
		mask := ^uint64(0) >> (64 - n) << (m % 64)
		s.seen[m%window/64] &^= mask
		m += n
	}
}

// free is how many messages, from the first, need their buffers no more, when so many may be outstanding. A message that has not
// arrived holds its buffer until the last one has that may come before it.
func (s *sequence) free(outstanding uint64) uint64 {
	s.freed = max(s.freed, s.next-min(s.next, window))
	for s.freed < s.next && (s.next-s.freed >= outstanding || s.seen[s.freed%window/64]&(1<<(s.freed%64)) != 0) {
		s.freed++
	}
	return s.freed
}

// full is the number whose low 32 bits an immediate has, nearest to what is expected next.
func (s *sequence) full(immediate uint32) uint64 {
	d := int32(immediate - uint32(s.next))
	if d < 0 && uint64(-int64(d)) > s.next {
		return s.next + uint64(uint32(d)) // there is nothing before 0
	}
	return s.next + uint64(int64(d))
}
