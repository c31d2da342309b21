package proof

import (
	"testing"
	"time"
)

// between reports whether a packet is one between two servers.
func between(h hop, a, b int) bool { return h.from == a && h.to == b || h.from == b && h.to == a }

// avoided returns the number of avoidances of a server.
func (s *server) avoided() (n int) {
	for _, on := range s.avoids {
		if on {
			n++
		}
	}
	return n
}

// avoidWorld is a fabric in which all works, and lost ways are avoided.
func avoidWorld(t *testing.T, n int, seed uint64) *world {
	w := newWorldOf(t, n, seed, 400*time.Millisecond)
	w.know()
	w.quiet(time.Duration(5+n) * time.Second) // all have been found to answer
	return w
}

// until runs until a condition holds, and returns the time that it took.
func (w *world) until(limit time.Duration, what string, holds func() bool) time.Duration {
	w.t.Helper()
	for start := w.now; w.now.Sub(start) < limit; {
		if w.run(10 * time.Millisecond); holds() {
			return w.now.Sub(start)
		}
	}
	w.t.Fatalf("%s: not within %v", what, limit)
	return 0
}

// TestAvoid loses one pair's packets at a plane: that pair alone leaves the plane, and returns after the cure.
func TestAvoid(t *testing.T) {
	seeds(t, 20, func(t *testing.T, seed uint64) {
		w := avoidWorld(t, 4, seed)
		w.drop = func(h hop) bool { return h.plane == 2 && between(h, 0, 1) }
		both := func(n int) func() bool {
			return func() bool { return w.servers[0].avoided() == n && w.servers[1].avoided() == n }
		}
		took := w.until(10*time.Second, "avoided", both(1))
		if !w.servers[0].avoids[Avoidance{ID{0, address(1)}, 2, true}] || !w.servers[1].avoids[Avoidance{ID{0, address(0)}, 2, true}] {
			t.Fatalf("another way is avoided: %v, %v", w.servers[0].avoids, w.servers[1].avoids)
		}
		for range 500 { // it stays a finding of both, and nobody else's
			w.run(20 * time.Millisecond)
			for i, want := range []string{"lost p2 avoided toward 1 both", "lost p2 avoided toward 1 both", "", ""} {
				if got := w.servers[i].text(); w.now.Sub(begin) > 30*time.Second && got != want {
					t.Fatalf("server %d has %q, want %q", i, got, want)
				}
			}
		}
		w.drop = func(hop) bool { return false }
		back := w.until(5*time.Second, "the return", both(0))
		w.quiet(5 * time.Second)
		t.Logf("seed %d: avoided after %v, back after %v", seed, took, back)

		// A relapse holds twice as long.
		w.drop = func(h hop) bool { return h.plane == 2 && between(h, 0, 1) }
		w.until(10*time.Second, "avoided again", both(1))
		w.drop = func(hop) bool { return false }
		if again := w.until(10*time.Second, "the second return", both(0)); again < 2*holdFirst {
			t.Fatalf("seed %d: back after %v", seed, again)
		}
	})
}

// TestAvoidWithin bounds the time until both servers of a pair leave a plane: from the first lost probe, and from the
// fault if the rate suffices for a probe of each plane and destination at each point of the grid.
func TestAvoidWithin(t *testing.T) {
	var worst, worstOfTwo time.Duration
	seeds(t, 40, func(t *testing.T, seed uint64) {
		for _, n := range []int{2, 4} {
			w := avoidWorld(t, n, seed)
			if n == 2 {
				for _, s := range w.servers {
					s.core.SetRate(50)
				}
			}
			w.run(2*time.Second + time.Duration(w.r.Int64N(int64(time.Second))))
			var lost [2]time.Time // the first lost probe of each
			w.drop = func(h hop) bool {
				if h.plane != 2 || !between(h, 0, 1) {
					return false
				}
				if !h.answer && lost[h.from].IsZero() {
					lost[h.from] = w.now
				}
				return true
			}
			start := w.now
			for i := range lost {
				w.until(3*time.Second, "avoided", func() bool { return w.servers[i].avoided() == 1 })
			}
			for i, s := range w.servers[:2] {
				for _, a := range s.core.avoided {
					worst = max(worst, a.since.Sub(lost[i]))
					if n == 2 {
						worstOfTwo = max(worstOfTwo, a.since.Sub(start))
					}
				}
			}
		}
	})
	t.Logf("worst of 40: %v after the first lost probe; %v after the fault, with two servers", worst, worstOfTwo)
	if worst > 650*time.Millisecond || worstOfTwo > 900*time.Millisecond {
		t.Error("that is too late")
	}
}

// TestAvoidAlone has one server that avoids lost ways: the others read as often as it needs. Its regular probes begin
// no trials, and it leaves a plane as soon as among equals.
func TestAvoidAlone(t *testing.T) {
	var worst time.Duration
	seeds(t, 20, func(t *testing.T, seed uint64) {
		w := newWorld(t, 3, seed)
		s := w.servers[0]
		s.core.SetAvoid(w.now, true, 400*time.Millisecond)
		w.know()
		w.quiet(10 * time.Second)
		s.atOnce = 0
		w.quiet(20 * time.Second)
		if s.atOnce > 0 {
			t.Fatalf("seed %d: %d probes of trials", seed, s.atOnce)
		}
		var lost time.Time
		w.drop = func(h hop) bool {
			if h.plane == 2 && h.from == 0 && h.to == 1 && !h.answer && lost.IsZero() {
				lost = w.now
			}
			return h.plane == 2 && between(h, 0, 1)
		}
		w.until(3*time.Second, "avoided", func() bool { return s.avoided() == 1 })
		worst = max(worst, w.now.Sub(lost))
		for _, other := range w.servers[1:] {
			if other.avoided() > 0 {
				t.Fatalf("seed %d: server %d avoids %v", seed, other.i, other.avoids)
			}
		}
	})
	if t.Logf("worst of 20: %v after the first lost packet", worst); worst > 700*time.Millisecond {
		t.Error("that is too late")
	}
}

// TestAvoidAll loses a plane: all leave it, and return together after the cure.
func TestAvoidAll(t *testing.T) {
	seeds(t, 5, func(t *testing.T, seed uint64) {
		const n = 30
		w := avoidWorld(t, n, seed)
		w.drop = func(h hop) bool { return h.plane == 1 }
		all := func(want int) func() bool {
			return func() bool {
				for _, s := range w.servers {
					if s.avoided() != want {
						return false
					}
				}
				return true
			}
		}
		took := w.until(10*time.Second, "avoided", all(n-1))
		w.run(10 * time.Second)
		for _, s := range w.servers {
			for a := range s.avoids {
				if a.Plane != 1 {
					t.Fatalf("server %d avoids %+v", s.i, a)
				}
			}
		}
		w.drop = func(hop) bool { return false }
		t.Logf("seed %d: avoided after %v, back after %v", seed, took, w.until(20*time.Second, "the return", all(0)))
	})
}

// TestAvoidNever has faults for which no plane may be avoided, or no second one.
func TestAvoidNever(t *testing.T) {
	for _, c := range []struct {
		name string
		drop func(hop) bool
		most int // avoidances of server 0
	}{
		{"one sub-port", func(h hop) bool { return h.subPort == 4 && !h.answer }, 0},
		{"packets from the peer", func(h hop) bool { return h.plane == 2 && h.from == 1 && h.to == 0 }, 0},
		{"two planes", func(h hop) bool { return h.plane < 2 && between(h, 0, 1) }, 1},
		{"all planes", func(h hop) bool { return between(h, 0, 1) }, 0},
		{"all planes but one", func(h hop) bool { return h.plane > 0 && between(h, 0, 1) }, 1},
		{"big packets", func(h hop) bool { return h.plane == 2 && h.big }, 0},
		{"a lost packet now and then", nil, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			seeds(t, 10, func(t *testing.T, seed uint64) {
				w := avoidWorld(t, 3, seed)
				if w.drop = c.drop; c.drop == nil {
					w.drop = func(hop) bool { return w.r.IntN(50) == 0 }
				}
				for range 1000 {
					w.run(20 * time.Millisecond)
					if n := w.servers[0].avoided(); n > c.most {
						t.Fatalf("seed %d: %d ways are avoided after %v: %v", seed, n, w.now.Sub(begin), w.servers[0].avoids)
					}
				}
				if c.most > 0 && w.servers[0].avoided() != c.most {
					t.Fatalf("seed %d: %d ways are avoided", seed, w.servers[0].avoided())
				}
			})
		})
	}
}

// TestAvoidEnds ends avoidances by configuration, and those toward a peer that is gone.
func TestAvoidEnds(t *testing.T) {
	w := avoidWorld(t, 4, 1)
	w.drop = func(h hop) bool { return h.plane == 2 && (between(h, 0, 1) || between(h, 0, 2)) }
	s := w.servers[0]
	w.until(10*time.Second, "avoided", func() bool { return s.avoided() == 2 })
	s.core.SetPeers(w.now, s.core.sources, []Peer{{ID{0, address(2)}, paths(2)}})
	s.kick()
	if s.avoided() != 1 {
		t.Errorf("%d ways are avoided without the peer", s.avoided())
	}
	s.core.SetAvoid(w.now, true, 0)
	s.kick()
	if s.avoided() != 0 {
		t.Errorf("%d ways are avoided by the policy report", s.avoided())
	}
}
