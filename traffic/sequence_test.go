package traffic

import (
	"math"
	"math/rand/v2"
	"testing"
)

// FuzzSequence compares a sequence with a map.
func FuzzSequence(f *testing.F) {
	f.Add(uint64(1), uint16(500))
	f.Add(uint64(77), uint16(3000))
	f.Fuzz(func(t *testing.T, seed uint64, steps uint16) {
		r := rand.New(rand.NewPCG(seed, 0))
		s, seen := new(sequence), map[uint64]bool{}
		next, arrived, duplicated, reordered := uint64(0), uint64(0), uint64(0), uint64(0)
		for range steps % 4096 {
			m := next
			switch r.IntN(8) {
			case 0:
				m += uint64(r.IntN(200)) // some are lost
			case 1:
				m += uint64(r.IntN(3 * window))
			case 2, 3:
				m -= min(m, uint64(r.IntN(100))) // late, or repeated
			case 4:
				m -= min(m, uint64(r.IntN(2*window)))
			}
			fresh := !seen[m] && (m >= next || next-m <= window)
			switch {
			case !fresh:
				duplicated++
			case m < next:
				reordered++
			}
			if fresh {
				seen[m] = true
				arrived++
				next = max(next, m+1)
			}
			if low := s.full(uint32(m)); low != m && (m >= s.next && m-s.next < 1<<31 || m < s.next && s.next-m < 1<<31) {
				t.Fatalf("%d is read as %d when %d is next", m, low, s.next)
			}
			if got := s.arrive(m); got != fresh {
				t.Fatalf("%d after %d: fresh is %v", m, next, got)
			}
			if r.IntN(4) == 0 {
				outstanding := uint64(1 + r.IntN(300))
				before, got := s.freed, s.free(outstanding)
				if got < before || got > s.next || s.next-got >= window {
					t.Fatalf("%d free after %d, %d is next", got, before, s.next)
				}
				if s.next-got >= outstanding || got < s.next && seen[got] {
					t.Fatalf("%d free, %d outstanding, %d is next", got, outstanding, s.next)
				}
			}
		}
		if s.arrived != arrived || s.duplicated != duplicated || s.reordered != reordered {
			t.Fatalf("%d arrived, %d duplicated, %d reordered; want %d, %d, %d", s.arrived, s.duplicated, s.reordered, arrived, duplicated, reordered)
		}
	})
}

// TestFreeWaitsForHoles verifies that a late message keeps its buffer, and that a missing one loses it in the
// end.
func TestFreeWaitsForHoles(t *testing.T) {
	var s sequence
	for _, c := range []struct{ m, free uint64 }{{0, 1}, {2, 1}, {3, 1}, {1, 4}, {5, 4}, {6, 4}, {7, 8}, {9, 8}} {
		s.arrive(c.m)
		if got := s.free(4); got != c.free {
			t.Errorf("after message %d, %d are free, want %d", c.m, got, c.free)
		}
	}
}

func TestFullNumbers(t *testing.T) {
	for _, c := range []struct {
		next      uint64
		immediate uint32
		want      uint64
	}{
		{0, 0, 0}, {0, 5, 5}, {10, 9, 9}, {1 << 32, 0, 1 << 32}, {1 << 32, math.MaxUint32, 1<<32 - 1}, {1<<32 - 1, 0, 1 << 32},
		{5 << 32, 7, 5<<32 + 7}, {0, math.MaxUint32, math.MaxUint32}, // numbers are not negative
	} {
		if got := (&sequence{next: c.next}).full(c.immediate); got != c.want {
			t.Errorf("%d when %d is next: %d, want %d", c.immediate, c.next, got, c.want)
		}
	}
}
