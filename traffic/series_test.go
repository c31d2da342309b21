package traffic

import (
	"math/rand/v2"
	"testing"
	"time"
)

// TestSeriesCountsAll verifies that, for amounts over any spans, the sum is exact and each interval has its
// part.
func TestSeriesCountsAll(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	for range 200 {
		s := series{interval: time.Duration(1 + r.IntN(50))}
		dumb := make([]float64, 2000)
		total := uint64(0)
		for at := time.Duration(0); at < 900; {
			to := at + time.Duration(r.IntN(120))
			n := uint64(r.IntN(1e6))
			s.add(at, to, n)
			total += n
			for i := range dumb {
				from, end := time.Duration(i)*s.interval, time.Duration(i+1)*s.interval
				switch {
				case to == at && from <= at && at < end:
					dumb[i] += float64(n)
				case to > at:
					dumb[i] += float64(n) * float64(max(0, min(to, end)-max(at, from))) / float64(to-at)
				}
			}
			at = to
			if to == 0 {
				at++
			}
		}
		sum := uint64(0)
		for i, n := range s.amounts {
			sum += n
			if d := float64(n) - dumb[i]; d > 100 || d < -100 { // a rounding error of one for each span
				t.Fatalf("interval %d has %d, want %.0f", i, n, dumb[i])
			}
		}
		if sum != total {
			t.Fatalf("%d of %d", sum, total)
		}
	}
}

// TestCut verifies that amounts beyond the end are within it after cut.
func TestCut(t *testing.T) {
	for _, limit := range []time.Duration{1, 5, 9, 10, 11, 29, 30, 31, 79, 80, 200} {
		s := series{interval: 10}
		s.add(0, 5, 500)
		s.add(5, 80, 7500)
		s.cut(5, limit)
		s.cut(5, limit)
		sum := uint64(0)
		for _, n := range s.amounts {
			sum += n
		}
		if whole := int((limit + 9) / 10); sum != 8000 || len(s.amounts) > whole {
			t.Errorf("until %d: %v, which adds up to %d", limit, s.amounts, sum)
		}
	}
	s := series{interval: 10}
	s.add(0, 40, 400)
	if s.cut(0, 20); s.amounts[0] != 200 || s.amounts[1] != 200 {
		t.Errorf("%v", s.amounts)
	}
	if s.cut(0, 0); len(s.amounts) != 2 {
		t.Errorf("%v after nothing at all", s.amounts)
	}
}

func TestSpread(t *testing.T) {
	s := series{interval: time.Second}
	for i, n := range []uint64{100, 300, 0, 200} {
		s.add(time.Duration(i)*time.Second, time.Duration(i+1)*time.Second, n)
	}
	s.add(4*time.Second, 4500*time.Millisecond, 50)
	low, mid, high := s.spread(4500 * time.Millisecond)
	if low != 0 || mid != 1600 || high != 2400 {
		t.Errorf("lowest %d, median %d, highest %d", low, mid, high)
	}
	if got := s.rate(4, 4500*time.Millisecond); got != 800 {
		t.Errorf("the last half of a second has %d bit/s, want 800", got)
	}
	if low, mid, high := s.spread(999 * time.Millisecond); low+mid+high != 0 {
		t.Errorf("no whole interval, and %d %d %d", low, mid, high)
	}
	if low, _, _ := s.spread(9 * time.Second); low != 0 {
		t.Errorf("intervals without anything have %d", low)
	}
	if s.rate(99, time.Hour) != 0 || bitRate(5, 0) != 0 {
		t.Error("nothing has a rate")
	}
}
