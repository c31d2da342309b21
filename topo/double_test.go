package topo

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/fared/fared/internal/testkit/gate"
)

// outcome simulates failures in addition to those of s, and returns pairs by their weights, in any order of the planes,
// the worst receiver's rate, and the number of broken rules.
func outcome(t *testing.T, s *Simulation, parts ...string) string {
	t.Helper()
	fail(t, s, parts...)
	defer heal(t, s, parts...)
	pairs := map[string]int{}
	for _, p := range s.Summary() {
		slices.Sort(p.Weights)
		pairs[fmt.Sprint(p.Weights)] += p.Pairs
	}
	worst := 1.0
	if w := s.Fairness().Worst; w != nil {
		worst = w.Ratio
	}
	return fmt.Sprintf("%v %.6f %d", pairs, worst, len(s.Check()))
}

// TestAlike compares the representatives, as often as they count, with all single failures and all pairs of them: in
// intact fabrics, next to failures that break their symmetry, and where GPUs own their ports.
func TestAlike(t *testing.T) {
	for name, c := range map[string]struct {
		spec   Spec
		failed []string
	}{
		"one tier": {Spec{Planes: 2, Servers: 3}, nil},
		"failures": {Spec{Planes: 3, Servers: 4, SubPorts: 1}, []string{"server2/p1", "leaf0", "drain:server3/p0"}},
		"split":    {Spec{Planes: 1, Leaves: 3, Servers: 3, SubPorts: 4}, nil},
		"two":      {Spec{Planes: 2, Leaves: 2, Spines: 2, Servers: 4, SubPorts: 1}, nil},
		"uneven":   {Spec{Planes: 1, Leaves: 3, Spines: 2, Servers: 4, SubPorts: 1, Overrides: "server2/p0 speed=200G"}, []string{"leaf0-1/up1"}},
		"frr":      {Spec{Planes: 1, Leaves: 3, Spines: 2, Servers: 4, SubPorts: 1, Leaf: FRR, Spine: FRR}, []string{"leaf0-0/up1", "server1/p0"}},
		"bird":     {Spec{Planes: 2, Leaves: 2, Spines: 2, Servers: 3, SubPorts: 1, Leaf: BIRD, Spine: BIRD}, []string{"spine1-1"}},
		"own":      {Spec{Planes: 2, Servers: 2, GPUs: 2, GPUPorts: Own, SubPorts: 1}, []string{"server1/g0p1"}},
	} {
		t.Run(name, func(t *testing.T) { compareAlike(t, c.spec, c.failed) })
	}
}

// compareAlike compares representatives with all failures.
func compareAlike(t *testing.T, spec Spec, failed []string) {
	t.Helper()
	s := Simulate(number(t, spec))
	fail(t, s, failed...)
	items, _ := s.singles()
	for _, all := range [][]Failures{s.Singles(), s.Doubles()} {
		got, want := map[string]int{}, map[string]int{}
		for _, x := range all {
			got[outcome(t, s, x.Parts...)] += x.Count
		}
		for i, a := range items {
			if len(all[0].Parts) == 1 {
				want[outcome(t, s, a.name)]++
				continue
			}
			for _, b := range items[i+1:] {
				want[outcome(t, s, a.name, b.name)]++
			}
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%+v %v: results\n%v, want\n%v", spec, failed, got, want)
		}
	}
}

// TestAlikeAtRandom is TestAlike with random fabrics and failures.
func TestAlikeAtRandom(t *testing.T) {
	gate.Slow(t, gate.Models, "simulates all double failures one by one")
	for seed := range 40 {
		random := rand.New(rand.NewPCG(5, uint64(seed)))
		spec := Spec{Planes: 1 + random.IntN(2), Leaves: 1 + random.IntN(3), Servers: 3 + random.IntN(2), SubPorts: 1 + random.IntN(2), Leaf: []string{Fared, FRR, BIRD}[random.IntN(3)]}
		if spec.Leaves > 1 {
			spec.Spines, spec.Spine = 1+random.IntN(3), []string{Fared, FRR, BIRD}[random.IntN(3)]
		}
		f, err := New(spec)
		if err != nil || len(f.Single()) > 30 {
			continue
		}
		var failed []string
		for names := f.Single(); len(failed) < random.IntN(4); {
			failed = append(failed, []string{"", drainPrefix}[random.IntN(2)]+names[random.IntN(len(names))])
		}
		if s := Simulate(f); slices.ContainsFunc(failed, func(name string) bool { _, err := s.Fail(name); return err != nil }) {
			continue // drains of uplinks
		}
		compareAlike(t, spec, failed)
	}
}
