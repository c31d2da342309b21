package traffic

import (
	"slices"
	"testing"
)

func TestPairs(t *testing.T) {
	for _, c := range []struct {
		pattern Pattern
		n       int
		want    []Pair
	}{
		{AllToAll, 2, []Pair{{0, 1}, {1, 0}}},
		{AllToAll, 3, []Pair{{0, 1}, {1, 2}, {2, 0}, {0, 2}, {1, 0}, {2, 1}}},
		{Incast, 2, []Pair{{1, 0}}},
		{Incast, 4, []Pair{{1, 0}, {2, 0}, {3, 0}}},
		{Ring, 2, []Pair{{0, 1}, {1, 0}}},
		{Ring, 4, []Pair{{0, 1}, {1, 2}, {2, 3}, {3, 0}}},
		{PeerPeer, 2, []Pair{{0, 1}}},
		{PeerPeer, 5, []Pair{{0, 1}, {2, 3}}},
	} {
		if got, err := c.pattern.Pairs(c.n); err != nil || !slices.Equal(got, c.want) {
			t.Errorf("%s of %d: %v, %v; want %v", c.pattern, c.n, got, err, c.want)
		}
	}
	for _, p := range append(Patterns(), "star") {
		for _, n := range []int{-1, 0, 1} {
			if got, err := Pattern(p).Pairs(n); err == nil {
				t.Errorf("%s of %d: %v, want an error", p, n, got)
			}
		}
	}
	if got, err := Pattern("star").Pairs(4); err == nil {
		t.Errorf("an unknown pattern: %v", got)
	}
}

// TestAllToAllIsBalanced verifies that, among each n consecutive pairs, every rank is the source of one and the
// destination of one.
func TestAllToAllIsBalanced(t *testing.T) {
	for n := 2; n < 20; n++ {
		pairs, err := AllToAll.Pairs(n)
		if err != nil || len(pairs) != n*(n-1) {
			t.Fatalf("%d ranks: %d pairs, %v", n, len(pairs), err)
		}
		all := map[Pair]bool{}
		for round := range slices.Chunk(pairs, n) {
			sources, destinations := map[int]bool{}, map[int]bool{}
			for _, p := range round {
				sources[p.Source], destinations[p.Destination], all[p] = true, true, true
			}
			if len(sources) != n || len(destinations) != n {
				t.Fatalf("%d ranks: %v", n, round)
			}
		}
		if len(all) != len(pairs) {
			t.Errorf("%d ranks: a pair comes twice", n)
		}
	}
}

// TestRingStepsAreAnAllReduce plays the steps with sets of ranks as sums: at the end every rank has every chunk of all
// ranks, and a rank sends only chunks that it has received in the previous step.
func TestRingStepsAreAnAllReduce(t *testing.T) {
	for n := 2; n < 9; n++ {
		has := make([][]uint, n) // by rank and chunk: the ranks in the sum
		for r := range has {
			has[r] = make([]uint, n)
			for c := range has[r] {
				has[r][c] = 1 << r
			}
		}
		for step := range RingSteps(n) {
			type sent struct {
				to, chunk int
				sum       uint
			}
			var all []sent
			for r := range n {
				c := RingChunk(n, r, step)
				if step > 0 && c != RingChunk(n, (r+n-1)%n, step-1) {
					t.Fatalf("%d ranks: in step %d rank %d sends chunk %d, which did not come in the step before", n, step, r, c)
				}
				all = append(all, sent{(r + 1) % n, c, has[r][c]})
			}
			for _, s := range all {
				if step < n-1 {
					has[s.to][s.chunk] |= s.sum
				} else {
					has[s.to][s.chunk] = s.sum
				}
			}
		}
		for r := range has {
			for c, sum := range has[r] {
				if sum != 1<<n-1 {
					t.Errorf("%d ranks: at the end rank %d has of chunk %d the parts %b", n, r, c, sum)
				}
			}
		}
	}
}

func TestRingSchedule(t *testing.T) {
	if got := (schedule{}).granted(0); got != ^uint64(0) {
		t.Errorf("without a ring %d messages are granted", got)
	}
	s := schedule{step: 5, ranks: 3}
	for arrived, want := range map[uint64]uint64{0: 5, 1: 5, 4: 5, 5: 10, 9: 10, 10: 15} {
		if got := s.granted(arrived); got != want {
			t.Errorf("%d arrived: %d granted, want %d", arrived, got, want)
		}
	}
	for _, c := range []struct{ n, messages, outstanding, want uint64 }{{2, 100, 8, 50}, {4, 100, 8, 17}, {4, 1, 8, 1}, {4, 0, 8, 8}} {
		if got := ringStepMessages(int(c.n), c.messages, c.outstanding); got != c.want {
			t.Errorf("%+v: %d messages a step", c, got)
		}
	}
	// In all-gather a chunk is the same at every hop; all other messages differ.
	type message struct{ stream, number uint64 }
	const n, step, rounds = 4, 3, 2
	count := map[message]int{}
	for rank := range n {
		s := schedule{pair: uint32(rank), ranks: n, rank: rank, step: step}
		for m := range uint64(rounds * step * 2 * (n - 1)) {
			stream, number := s.stream(m)
			count[message{stream, number}]++
		}
	}
	hops := map[int]int{}
	for _, k := range count {
		hops[k]++
	}
	if once, passed := hops[1], hops[n-1]; once != n*rounds*step*(n-1) || passed != n*rounds*step || len(hops) != 2 {
		t.Errorf("%v: messages by how often they are sent", hops)
	}
}
