package topo

import (
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/fared/fared/fare"
)

// rates are the actual and the ideal rate of each server that can be reached.
func rates(s *Simulation) map[string][2]float64 {
	all := map[string][2]float64{}
	o := s.orbits()
	kinds := map[string]Receiver{}
	for _, r := range s.Fairness().Receivers {
		kinds[r.Server] = r
	}
	for i, k := range o.servers.of {
		if r, ok := kinds[s.fabric.Server[o.servers.first[k]].Name]; ok {
			all[s.fabric.Server[i].Name] = [2]float64{r.Actual, r.Ideal}
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

// TestFairness: cases worked out by hand, in units of a sub-port of 400G. With n servers and all whole each pair of a plane has
// the same part of the server's port.
func TestFairness(t *testing.T) {
	for _, c := range []struct {
		name string
		spec Spec
		fail string
		want string // server: actual/ideal, of each kind
	}{
		{"intact", Spec{}, "", "server1 x8: 8.0000/8.0000"},
		{"a leaf lost", Spec{}, "leaf2", "server1 x8: 6.0000/6.0000"},
		// 2:2:1:2 to and from server2. Its planes are all full at once: 7 of 7. The others send 2/7 of that to the whole planes and 1/7 to
		// the half: of 2 in a whole plane 2/7 go to server2, and 12/7 are left for 6 others. The plane that is half has 13/7 left,
		// and the pairs do not get more for it: their other planes are full. 6*4*(2/7) + 1 = 7.857 of 8, which need but 1/7 in a
		// plane that is half, and were there with free splits.
		{"half a Y-cable", Spec{}, "server2/p2.0", "server1 x7: 7.8571/8.0000, server2 x1: 7.0000/7.0000"},
		// 1:1:0:1 to and from server2, which takes 2/7 in three planes.
		{"a port", Spec{}, "server2/p2", "server1 x7: 7.7143/8.0000, server2 x1: 6.0000/6.0000"},
		// Two servers: what is lost is lost.
		{"two servers", Spec{Servers: 2}, "server2/p2.0", "server1 x1: 7.0000/7.0000, server2 x1: 7.0000/7.0000"},
		{"nobody there", Spec{Servers: 3}, "server2", "server1 x2: 8.0000/8.0000"},
		{"split cables", Spec{Leaves: 2}, "leaf1-0", "server1 x8: 7.0000/7.0000"},
		{"split cables, opposite halves", Spec{Leaves: 2, Servers: 2}, "server1/p0.0 server2/p0.1", "server1 x1: 6.0000/6.0000, server2 x1: 6.0000/6.0000"},
		{"two tiers, intact", Spec{Planes: 2, Leaves: 2, Spines: 2, Servers: 4}, "", "server1 x4: 4.0000/4.0000"},
		// With a spine of plane 0 lost pairs that cross have 1:2, those within a leaf 1:1. A server's 2 sub-ports in plane 1 are full when
		// each of its pairs has x with 2*x*2/3 + x/2 = 2, which is 12/11, 36/11 in all. Ideally each has 4/3: those within a leaf
		// could use more of plane 0.
		{"two tiers, a spine lost", Spec{Planes: 2, Leaves: 2, Spines: 2, Servers: 4}, "spine0-1", "server1 x4: 3.2727/4.0000, slowest 1.0909/1.3333"},
		// Half of server2's cable behind a leaf with two spines. Its pairs have 1:2 in all: 3 of 3 reach it. The others' pairs have each
		// y with 2*y/2 + 2/3 = 2 in plane 1, 4/3 of ideally 3/2; and 8/3 + 1 is 11/3.
		{"two tiers, half a Y-cable", Spec{Planes: 2, Leaves: 2, Spines: 2, Servers: 4}, "server2/p0.0",
			"server1 x1: 3.6667/4.0000, server2 x1: 3.0000/3.0000, server3 x2: 3.6667/4.0000, slowest 1.3333/1.5000"},
		// One uplink of 1 a leaf and plane: 4 pairs cross in each direction, a quarter each in a plane, 1/2 in all. Those within the leaf
		// get the 3 that are left. There is nothing better.
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

// TestWorstIsNotAboveIdeal: on random fabrics with random failures nobody does better than the ideal everywhere.
func TestWorstIsNotAboveIdeal(t *testing.T) {
	random := rand.New(rand.NewPCG(5, 6))
	below := 0
	for range 150 {
		f := number(t, smallSpec(random))
		s := Simulate(f)
		names := f.Single()
		for range random.IntN(4) {
			fail(t, s, names[random.IntN(len(names))])
		}
		fair := s.Fairness()
		worst := fair.Worst
		if worst == nil {
			continue
		}
		if worst.Ratio > 1+1e-9 || fair.Slowest.Ratio > 1+1e-9 {
			t.Errorf("%+v: %v: %+v, slowest %+v", f.Spec, s.Failed(), worst, fair.Slowest)
		}
		if worst.Ratio < 1-1e-9 {
			below++
		}
	}
	if below < 20 {
		t.Errorf("only %d cases below the ideal: this test has lost its subject", below)
	}
}

// TestSimplex compares with a search of all vertices.
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
		box := make([]*big.Rat, n) // so that it is bounded
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

// best is the greatest value at a vertex: every choice of as many constraints, x >= 0 among them, as there are variables.
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

// solve is Gauss's elimination; nil: there is no one solution.
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
