package topo

import (
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/fared/fared/fare"
	"github.com/fared/fared/internal/testkit/gate"
)

// rates returns the actual and the ideal rate of each reachable source group.
func rates(s *Simulation) map[string][2]float64 {
	all := map[string][2]float64{}
	o := s.orbits()
	kinds := map[string]Receiver{}
	for _, r := range s.Fairness().Receivers {
		kinds[r.Server] = r
	}
	for i, k := range o.hosts.of {
		if r, ok := kinds[s.fabric.groups[o.hosts.first[k]].Name]; ok {
			all[s.fabric.groups[i].Name] = [2]float64{r.Actual, r.Ideal}
		}
	}
	return all
}

func equalRates(x, y map[string][2]float64) bool {
	if len(x) != len(y) {
		return false
	}
	for name, a := range x {
		b, ok := y[name]
		if !ok || !near(a[0], b[0]) || !near(a[1], b[1]) {
			return false
		}
	}
	return true
}

func near(a, b float64) bool { return math.Abs(a-b) <= 1e-6*max(math.Abs(a), math.Abs(b)) }

// TestFairness uses cases computed by hand, in units of a sub-port of 400G. With n servers and no failure, each pair of
// a plane has the same part of the server's port.
func TestFairness(t *testing.T) {
	for _, c := range []struct {
		name string
		spec Spec
		fail string
		want string // server: actual/ideal, of each kind
	}{
		{"intact", Spec{}, "", "server1 x8: 8.0000/8.0000"},
		{"a leaf lost", Spec{}, "leaf2", "server1 x8: 6.0000/6.0000"},
		// 2:2:1:2 to and from server2. All its planes are full at once: 7 of 7. The others send 2/7 of their traffic to
		// server2 over each whole plane and 1/7 over the half one. Of 2 in a whole plane 2/7 go to server2, and 12/7
		// are left for 6 others. In the half plane 13/7 are left, but the pairs cannot use more of it, because their
		// other planes are full. 6*4*(2/7) + 1 = 7.857 of 8. With free splits it would be 8: server2 needs only 1/7 in
		// the half plane.
		{"half a Y-cable", Spec{}, "server2/p2.0", "server1 x7: 7.8571/8.0000, server2 x1: 7.0000/7.0000"},
		// 1:1:0:1 to and from server2, which takes 2/7 in three planes.
		{"a port", Spec{}, "server2/p2", "server1 x7: 7.7143/8.0000, server2 x1: 6.0000/6.0000"},
		// Two servers: nothing replaces the failed capacity.
		{"two servers", Spec{Servers: 2}, "server2/p2.0", "server1 x1: 7.0000/7.0000, server2 x1: 7.0000/7.0000"},
		{"no traffic", Spec{Servers: 3}, "server2", "server1 x2: 8.0000/8.0000"},
		{"split cables", Spec{Leaves: 2}, "leaf1-0", "server1 x8: 7.0000/7.0000"},
		{"split cables, opposite halves", Spec{Leaves: 2, Servers: 2}, "server1/p0.0 server2/p0.1", "server1 x1: 6.0000/6.0000, server2 x1: 6.0000/6.0000"},
		{"two tiers, intact", Spec{Planes: 2, Leaves: 2, Spines: 2, Servers: 4}, "", "server1 x4: 4.0000/4.0000"},
		// After the failure of a spine of plane 0, pairs that cross have 1:2, pairs within a leaf 1:1. A server's 2
		// sub-ports in plane 1 are full when each of its pairs has x with 2*x*2/3 + x/2 = 2, so x = 12/11, and 36/11 in
		// all. The ideal is 4/3 each: the pairs within a leaf could use more of plane 0.
		{"two tiers, a spine lost", Spec{Planes: 2, Leaves: 2, Spines: 2, Servers: 4}, "spine0-1", "server1 x4: 3.2727/4.0000, slowest 1.0909/1.3333"},
		// Half of server2's cable behind a leaf with two spines. Its pairs have 1:2: 3 of 3 reach it. The others' pairs
		// have each y with 2*y/2 + 2/3 = 2 in plane 1, so y = 4/3, where the ideal is 3/2; and 8/3 + 1 = 11/3.
		{"two tiers, half a Y-cable", Spec{Planes: 2, Leaves: 2, Spines: 2, Servers: 4}, "server2/p0.0",
			"server1 x1: 3.6667/4.0000, server2 x1: 3.0000/3.0000, server3 x2: 3.6667/4.0000, slowest 1.3333/1.5000"},
		// One uplink of 1 per leaf and plane: 4 pairs cross in each direction, with a quarter each in a plane, 1/2 in
		// all. The pairs within a leaf get the remaining 3. No split is better.
		{"two tiers, thin", Spec{Planes: 2, Leaves: 2, Spines: 1, Servers: 4, UplinkSpeed: 400 * fare.Gigabit}, "", "server1 x4: 4.0000/4.0000, slowest 3.0000/3.0000"},
	} {
		s := Simulate(number(t, c.spec))
		if c.fail != "" {
			fail(t, s, strings.Fields(c.fail)...)
		}
		var got []string
		unit := float64(s.fabric.Speed)
		for _, r := range s.Fairness().Receivers {
			got = append(got, fmt.Sprintf("%s x%d: %.4f/%.4f", r.Server, r.Servers, r.Actual/unit, r.Ideal/unit))
		}
		if p := s.Fairness().Slowest; strings.Contains(c.want, "slowest") {
			got = append(got, fmt.Sprintf("slowest %.4f/%.4f", p.Actual/unit, p.Ideal/unit))
		}
		if got := strings.Join(got, ", "); got != c.want {
			t.Errorf("%s:\ngot  %s\nwant %s", c.name, got, c.want)
		}
	}
}

// TestWorstIsNotAboveIdeal verifies, on random fabrics with random failures, that not every receiver exceeds the ideal.
func TestWorstIsNotAboveIdeal(t *testing.T) {
	random := rand.New(rand.NewPCG(5, 6))
	below := 0
	for range gate.Count(t, gate.Models, 35, 150) {
		f := number(t, smallSpec(random))
		s := Simulate(f)
		names := f.Single()
		for range random.IntN(4) {
			fail(t, s, names[random.IntN(len(names))])
		}
		if o := s.orbits(); len(o.pairs) > 60 { // exact arithmetic would take many seconds
			continue
		}
		fair := s.Fairness()
		worst := fair.Worst
		if worst == nil {
			continue
		}
		if worst.Ratio > 1+1e-9 || fair.Slowest.Ratio > 1+1e-9 {
			t.Errorf("%+v: %v: %+v, slowest %+v", f.Spec, s.failed, worst, fair.Slowest)
		}
		if worst.Ratio < 1-1e-9 {
			below++
		}
	}
	if below < gate.Count(t, gate.Models, 8, 20) {
		t.Errorf("only %d cases below the ideal: this test has lost its subject", below)
	}
}

// TestTooManyPaths verifies that rates that would take minutes are not computed, and that the result reports it.
func TestTooManyPaths(t *testing.T) {
	var o []string
	for i := range 12 {
		o = append(o, fmt.Sprintf("server%d speed=%dG", i+1, 100*(i+1)))
	}
	s := Simulate(number(t, Spec{Servers: 12, Overrides: Overrides(strings.Join(o, ";"))}))
	if f := s.Fairness(); f.TooMany != 132 || len(f.Receivers) > 0 || f.Worst != nil { // 12*11 pairs, all planes alike
		t.Errorf("%+v", f)
	}
}

// TestSimplex compares simplex with a search of all vertices.
func TestSimplex(t *testing.T) {
	random := rand.New(rand.NewPCG(7, 8))
	for range 300 {
		n, m := 1+random.IntN(3), 1+random.IntN(3)
		whole := func(low, top int) *big.Rat { return big.NewRat(int64(low+random.IntN(top-low+1)), 1) }
		var rows [][]*big.Rat
		var bounds []*big.Rat
		for range m {
			row := make([]*big.Rat, n)
			for k := range row {
				if row[k] = whole(-3, 5); row[k].Sign() == 0 {
					row[k] = nil
				}
			}
			rows, bounds = append(rows, row), append(bounds, whole(0, 6))
		}
		box := make([]*big.Rat, n) // makes the problem bounded
		objective := make([]*big.Rat, n)
		for k := range box {
			box[k], objective[k] = big.NewRat(1, 1), whole(-2, 5)
		}
		rows, bounds = append(rows, box), append(bounds, whole(0, 9))
		x := simplex(rows, bounds, objective)
		if !feasible(rows, bounds, x) {
			t.Fatalf("%v is not allowed: %v <= %v", x, rows, bounds)
		}
		got, want := dot(objective, x), best(rows, bounds, objective)
		if got.Cmp(want) != 0 {
			t.Fatalf("greatest %v of %v, %v <= %v: %v, want %v", got, objective, rows, bounds, x, want)
		}
	}
}

func dot(a, x []*big.Rat) *big.Rat {
	sum := new(big.Rat)
	for i := range a {
		if a[i] != nil {
			sum.Add(sum, new(big.Rat).Mul(a[i], x[i]))
		}
	}
	return sum
}

func feasible(rows [][]*big.Rat, bounds, x []*big.Rat) bool {
	for i := range rows {
		if dot(rows[i], x).Cmp(bounds[i]) > 0 {
			return false
		}
	}
	for _, v := range x {
		if v.Sign() < 0 {
			return false
		}
	}
	return true
}

// best returns the greatest value at a vertex, over every choice of as many constraints (including x >= 0) as there are
// variables.
func best(rows [][]*big.Rat, bounds, objective []*big.Rat) *big.Rat {
	n := len(objective)
	all, right := append([][]*big.Rat(nil), rows...), append([]*big.Rat(nil), bounds...)
	for k := range n {
		unit := make([]*big.Rat, n)
		unit[k] = big.NewRat(1, 1)
		all, right = append(all, unit), append(right, new(big.Rat))
	}
	var greatest *big.Rat
	for set := range 1 << len(all) {
		var a [][]*big.Rat
		var b []*big.Rat
		for i := range all {
			if set>>i&1 == 1 {
				a, b = append(a, all[i]), append(b, right[i])
			}
		}
		if len(a) != n {
			continue
		}
		x := solve(a, b)
		if x == nil || !feasible(rows, bounds, x) {
			continue
		}
		if v := dot(objective, x); greatest == nil || v.Cmp(greatest) > 0 {
			greatest = v
		}
	}
	return greatest
}

// solve is Gaussian elimination; it returns nil if there is no unique solution.
func solve(a [][]*big.Rat, b []*big.Rat) []*big.Rat {
	n := len(b)
	m := make([][]*big.Rat, n)
	for i := range m {
		for k := range n {
			v := new(big.Rat)
			if a[i][k] != nil {
				v.Set(a[i][k])
			}
			m[i] = append(m[i], v)
		}
		m[i] = append(m[i], new(big.Rat).Set(b[i]))
	}
	for k := range n {
		pivot := k
		for pivot < n && m[pivot][k].Sign() == 0 {
			pivot++
		}
		if pivot == n {
			return nil
		}
		m[k], m[pivot] = m[pivot], m[k]
		for i := range n {
			if i == k || m[i][k].Sign() == 0 {
				continue
			}
			factor := new(big.Rat).Quo(m[i][k], m[k][k])
			for j := range m[i] {
				m[i][j].Sub(m[i][j], new(big.Rat).Mul(factor, m[k][j]))
			}
		}
	}
	x := make([]*big.Rat, n)
	for k := range n {
		x[k] = new(big.Rat).Quo(m[k][n], m[k][k])
	}
	return x
}
