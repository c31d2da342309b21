package judge

import "testing"

// TestCheckBuckets verifies that buckets that differ from the weights are found, and that a difference of one is
// tolerated.
func TestCheckBuckets(t *testing.T) {
	have := map[string]uint64{"p0.0": 6, "p1.0": 4}
	for _, test := range []struct {
		routed  bool
		have    map[string]uint64
		weights map[string]uint64
		want    string
	}{
		{true, have, map[string]uint64{"p0.0": 6, "p1.0": 4}, ""},
		{true, have, map[string]uint64{"p0.0": 1, "p1.0": 1}, ""},
		{true, have, map[string]uint64{"p0.0": 3, "p1.0": 1}, "the kernel gives p0.0 6 of 10 buckets, want 7.5"},
		{true, have, map[string]uint64{"p0.0": 1}, "the kernel gives p0.0 6 of 10 buckets, want 10.0"},
		{true, have, map[string]uint64{"p0.0": 6, "p1.0": 4, "p2.0": 5}, "the kernel gives p0.0 6 of 10 buckets, want 4.0"},
		{true, have, nil, "the kernel has a route, over nexthop 10, to an unreachable destination"},
		{false, have, nil, ""},
		{false, nil, nil, ""},
		{false, have, map[string]uint64{"p0.0": 1}, "the kernel has no route"},
		{true, nil, map[string]uint64{"p0.0": 1}, "the kernel's nexthop 10 is not a resilient group"},
	} {
		if got := CheckBuckets(test.routed, 10, test.have, test.weights); got != test.want {
			t.Errorf("%v, %v by %v: %q, want %q", test.routed, test.have, test.weights, got, test.want)
		}
	}
	if got, want := CheckAvoided(have, []string{"p1.0"}), "the kernel gives p1.0 4 buckets, but its link is down"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	if got := CheckAvoided(have, []string{"p2.0"}); got != "" {
		t.Error(got)
	}
}
