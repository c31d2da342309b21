package lab

import (
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
)

// TestSpread verifies that as many values lie below the median as above it, and all within the extremes.
func TestSpread(t *testing.T) {
	if got := spread(nil); got != nil {
		t.Errorf("of nothing: %+v", got)
	}
	for want, values := range map[Spread][]int64{
		{7, 7, 7}:   {7},
		{3, 1, 5}:   {5, 1},
		{3, 2, 5}:   {5, 2}, // 3.5
		{4, 1, 900}: {900, 1, 4},
		{0, 0, 0}:   {0, 0, 0, 0},
		{5, 1, 9}:   {1, 9, 6, 4},
	} {
		if got := spread(slices.Clone(values)); *got != want {
			t.Errorf("of %v: %+v, want %+v", values, *got, want)
		}
	}
	r := rand.New(rand.NewPCG(1, 1))
	for range 200 {
		values := make([]int64, 1+r.IntN(9))
		for i := range values {
			values[i] = 2 * r.Int64N(20) // even, so that a mean of two is exact
		}
		s := spread(slices.Clone(values))
		below, above := 0, 0
		for _, v := range values {
			if v < s.Median {
				below++
			}
			if v > s.Median {
				above++
			}
		}
		if below > len(values)/2 || above > len(values)/2 || s.Min != slices.Min(values) || s.Max != slices.Max(values) {
			t.Fatalf("of %v: %+v", values, *s)
		}
	}
}

// TestSummarize verifies one summary per step, also for steps that not every run has played, and for runs
// without packets.
func TestSummarize(t *testing.T) {
	result := func(step string, ok bool, followed int64, interval int64, lost uint64) Result {
		return Result{Scenario: "s", Step: step, OK: ok, WeightsFollowedNS: followed, Traffic: &Traffic{LossIntervalNS: interval, Lost: lost}}
	}
	got := Summarize([][]Result{
		{result("a", true, 10, 100, 1), result("b", true, 0, 0, 0)},
		{result("a", false, 30, 500, 3), result("b", true, 8, 2, 0)},
		{result("a", true, 20, 200, 2)},
	})
	want := []Summary{
		{Scenario: "s", Step: "a", Runs: 3, OK: 2, WeightsFollowed: Spread{20, 10, 30}, LossInterval: &Spread{200, 100, 500}, PacketsLost: &Spread{2, 1, 3}},
		{Scenario: "s", Step: "b", Runs: 2, OK: 2, WeightsFollowed: Spread{4, 0, 8}, LossInterval: &Spread{1, 0, 2}, PacketsLost: &Spread{}},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%+v\nwant\n%+v", got, want)
	}
	got = Summarize([][]Result{{{Scenario: "s", Step: "a", OK: true, WeightsFollowedNS: 5}}})
	if want := []Summary{{Scenario: "s", Step: "a", Runs: 1, OK: 1, WeightsFollowed: Spread{5, 5, 5}}}; !reflect.DeepEqual(got, want) {
		t.Errorf("without packets: %+v, want %+v", got, want)
	}
	if got := Summarize(nil); got != nil {
		t.Errorf("of no runs: %+v", got)
	}
}
