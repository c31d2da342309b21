package bpf

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"testing"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// TestGuardReports takes a guard through comparisons and checks the reports of each, the count of repairs, and whether
// a comparison of everything is due.
func TestGuardReports(t *testing.T) {
	g := guard{log: slog.New(slog.DiscardHandler)}
	var got []string
	g.report = func(i *farev1.Integrity) { got = append(got, fmt.Sprintf("%v %d %s", i.Intact, i.Repairs, i.Message)) }
	fixed := func(all ...string) func(*findings) error {
		return func(f *findings) error {
			for _, difference := range all {
				f.differs("%s", difference)
			}
			return nil
		}
	}
	fails := func(f *findings) error {
		f.differs("x is gone")
		return errors.New("no x")
	}
	for i, step := range []struct {
		ousted     string
		compare    func(*findings) error
		want       []string
		unrepaired bool
	}{
		{"", fixed(), nil, false},
		{"", fixed("a", "b"), []string{"false 0 steering: a", "true 2 steering: repaired: a"}, false},
		{"", fails, []string{"false 2 steering: x is gone", "false 2 steering: no x"}, true},
		{"", fails, []string{"false 2 steering: x is gone", "false 2 steering: no x"}, true},
		{"", fixed(), []string{"true 2 steering: repaired: no x"}, false},
		{"in front", fixed(), []string{"false 2 steering: in front"}, false},
		{"in front", fixed(), nil, false},
		{"in front", fixed("c"), []string{"false 2 steering: c", "false 3 steering: in front"}, false},
		{"", fixed(), []string{"true 3 steering: repaired: in front"}, false},
	} {
		got, g.head.ousted = nil, step.ousted
		g.check(step.compare)
		if !slices.Equal(got, step.want) || g.unrepaired() != step.unrepaired {
			t.Errorf("step %d: reports %q, unrepaired %v; want %q, %v", i, got, g.unrepaired(), step.want, step.unrepaired)
		}
	}
}

// TestFreed checks that a retry is suggested once after each refusal.
func TestFreed(t *testing.T) {
	g, suggested := guard{occupied: true}, 0
	g.freed() // no receiver: the refusal stays
	g.again = func() { suggested++ }
	for range 2 {
		g.freed()
	}
	if suggested != 1 {
		t.Errorf("%d suggestions, want 1", suggested)
	}
}

// TestContest checks that the program returns to the head up to mostReturns times within returnsIn, at any position in
// time.
func TestContest(t *testing.T) {
	var c contest
	start := time.Now()
	enter := func(after time.Duration, want bool) {
		t.Helper()
		if got := c.enter(start.Add(after)); got != want {
			t.Errorf("after %v: %v, want %v", after, got, want)
		}
	}
	for i := range mostReturns {
		enter(time.Duration(i)*time.Second, true)
	}
	enter(returnsIn, false)
	for i := range mostReturns { // the refusal has forgotten the earlier ones
		enter(returnsIn+time.Duration(i)*time.Second, true)
	}
	enter(2*returnsIn+time.Millisecond, true) // the first one is older than returnsIn
	enter(2*returnsIn+2*time.Millisecond, false)
}
