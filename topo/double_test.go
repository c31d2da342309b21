package topo

import (
	"fmt"
	"slices"
	"testing"
)

// TestDoubles compares the representatives, as often as they count, with all pairs of single failures: in an intact
// fabric, next to failures that make servers differ, and where GPUs own their ports.
func TestDoubles(t *testing.T) {
	for name, c := range map[string]struct {
		spec   Spec
		failed []string
	}{
		"alike":    {Spec{Planes: 2, Servers: 4}, nil},
		"failures": {Spec{Planes: 2, Servers: 4, SubPorts: 1}, []string{"server2/p1", "leaf0", "drain:server3/p0"}},
		"two":      {Spec{Planes: 2, Leaves: 2, Spines: 2, Servers: 4, SubPorts: 1}, nil},
		"own":      {Spec{Planes: 2, Servers: 3, GPUs: 2, GPUPorts: Own, SubPorts: 1}, []string{"server1/g0p1"}},
	} {
		t.Run(name, func(t *testing.T) {
			s := Simulate(number(t, c.spec))
			fail(t, s, c.failed...)
			result := func(names ...string) string {
				fail(t, s, names...)
				defer func() {
					if _, err := s.Heal(names...); err != nil {
						t.Fatal(err)
					}
				}()
				return fmt.Sprint(s.Summary())
			}
			got, want := map[string]int{}, map[string]int{}
			doubles := s.Doubles()
			for _, d := range doubles {
				got[result(d.Failed[:]...)] += d.Count
			}
			items := s.singles()
			for i, a := range items {
				for _, b := range items[i+1:] {
					want[result(a.name, b.name)]++
				}
			}
			if fmt.Sprint(got) != fmt.Sprint(want) {
				t.Errorf("results %v, want %v", got, want)
			}
			if len(doubles) == 0 || slices.ContainsFunc(doubles, func(d Double) bool { return d.Count < 1 }) || name == "alike" && len(doubles) > len(items)*(len(items)-1)/2/3 {
				t.Errorf("%d doubles of %d failures", len(doubles), len(items))
			}
		})
	}
}
