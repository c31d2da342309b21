package traffic

// sequence records which of a pair's messages have arrived. It remembers the last window of numbers. An older message
// that arrives for the first time counts as a duplicate and remains lost; both are errors.
type sequence struct {
	seen                           [window / 64]uint64 // bit m modulo window; numbers in [next-window, next)
	next                           uint64              // one more than the highest that has arrived
	freed                          uint64              // lower numbers have arrived, or are no longer expected
	arrived, duplicated, reordered uint64
}

// window is a power of two, and far larger than the number of outstanding messages.
const window = 1 << 16

// arrive counts a message; fresh is true for its first arrival.
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

// forget clears the bits of numbers from first to last, which have not arrived yet.
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

// free returns the number of messages, from the first on, that no longer need their buffers, if outstanding messages
// may be in transit. A missing message keeps its buffer until the last message that it may follow has arrived.
func (s *sequence) free(outstanding uint64) uint64 {
	s.freed = max(s.freed, s.next-min(s.next, window))
	for s.freed < s.next && (s.next-s.freed >= outstanding || s.seen[s.freed%window/64]&(1<<(s.freed%64)) != 0) {
		s.freed++
	}
	return s.freed
}

// full returns the number, nearest to the next expected one, whose low 32 bits equal an immediate.
func (s *sequence) full(immediate uint32) uint64 {
	d := int32(immediate - uint32(s.next))
	if d < 0 && uint64(-int64(d)) > s.next {
		return s.next + uint64(uint32(d)) // numbers are not negative
	}
	return s.next + uint64(int64(d))
}
