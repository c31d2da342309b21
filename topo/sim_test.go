package topo

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/fared/fared/fare"
)

func number(t testing.TB, s Spec) *Fabric {
	t.Helper()
	f, err := New(s)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func fail(t testing.TB, s *Simulation, names ...string) Cost {
	t.Helper()
	c, err := s.Fail(names...)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func heal(t testing.TB, s *Simulation, names ...string) Cost {
	t.Helper()
	c, err := s.Heal(names...)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// TestDraftFigures: draft-xu-rtgwg-fare-in-sun-02, Section 1, on Figure 1.
func TestDraftFigures(t *testing.T) {
	f := example(t, "figure1")
	for _, c := range []struct {
		fail            []string
		forth, back     string // between server1 and server2
		summary         string
		rounds, updates int
	}{
		{nil, "[1 1 1 1]", "[1 1 1 1]", "[{[1 1 1 1] 4032}]", 0, 0},
		{[]string{"server2/p2.0"}, "[2 2 1 2]", "[2 2 1 2]", "[{[1 1 1 1] 3906} {[2 2 1 2] 126}]", 1, 126},
		{[]string{"server1/p2.0", "server2/p2.0"}, "[2 2 1 2]", "[2 2 1 2]", "[{[1 1 1 1] 3782} {[2 2 1 2] 250}]", 1, 250},
		{[]string{"server2/p2"}, "[1 1 0 1]", "[1 1 0 1]", "[{[1 1 1 1] 3906} {[1 1 0 1] 126}]", 1, 126},
		{[]string{"leaf2"}, "[1 1 0 1]", "[1 1 0 1]", "[{[1 1 0 1] 4032}]", 0, 0},
		{[]string{"drain:server2/p2"}, "[1 1 0 1]", "[1 1 0 1]", "[{[1 1 1 1] 3906} {[1 1 0 1] 126}]", 4, 256},
		{[]string{"server2"}, "[0 0 0 0]", "[0 0 0 0]", "[{[1 1 1 1] 3906} {[0 0 0 0] 126}]", 1, 504},
		{[]string{"server2/p0.0", "server2/p1", "leaf3"}, "[1 0 2 0]", "[1 0 2 0]", "[{[1 1 1 0] 3906} {[1 0 2 0] 126}]", 1, 252},
	} {
		s := Simulate(f)
		cost := fail(t, s, c.fail...)
		got := fmt.Sprintf("%v %v %v %d %d", s.Weights(0, 1), s.Weights(1, 0), s.Summary(), cost.Rounds, cost.Updates)
		if want := fmt.Sprintf("%s %s %s %d %d", c.forth, c.back, c.summary, c.rounds, c.updates); got != want {
			t.Errorf("%v:\ngot  %s\nwant %s", c.fail, got, want)
		}
		if v := s.Check(); len(v) > 0 {
			t.Errorf("%v: %v", c.fail, v)
		}
		heal(t, s)
		if got := fmt.Sprint(s.Summary()); got != "[{[1 1 1 1] 4032}]" {
			t.Errorf("%v: healed: %s", c.fail, got)
		}
	}
	if s := Simulate(f); s.Weights(3, 3) != nil {
		t.Error("a server has weights to itself")
	}
}

// TestCost: half a Y-cable in Figure 1. Of 64 servers 63 have two sessions to hear about it from the leaf, the other one has
// nothing to hear. An UPDATE with a path of two AS numbers is 63 octets.
func TestCost(t *testing.T) {
	s := Simulate(example(t, "figure1"))
	want := Cost{Rounds: 1, Updates: 126, Bytes: 126 * 63, Announced: 126, SubPorts: 1, Pairs: 126, Destinations: 126, Vectors: 64}
	if got := fail(t, s, "server2/p2.0"); got != want {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	// Back: server2 says its loopback and End-of-RIB, the leaf tells it 63 loopbacks and End-of-RIB, and the others the sum.
	want = Cost{Rounds: 2, Updates: 2 + 64 + 126, Bytes: 59 + 23 + 63*63 + 23 + 126*63, Announced: 1 + 63 + 126, SubPorts: 1, Pairs: 126, Destinations: 126, Vectors: 1}
	if got := heal(t, s, "server2/p2.0"); got != want {
		t.Errorf("back\ngot  %+v\nwant %+v", got, want)
	}
	// The other half too: one withdrawal a session, and for server2 an operation a sub-port.
	fail(t, s, "server2/p2.0")
	want = Cost{Rounds: 1, Updates: 126, Bytes: 126 * 28, Withdrawn: 126, SubPorts: 1, Pairs: 126, Destinations: 126, Vectors: 64}
	if got := fail(t, s, "server2/p2.1"); got != want {
		t.Errorf("other half\ngot  %+v\nwant %+v", got, want)
	}
	if got := fail(t, s, "server2/p2.1"); got != (Cost{}) {
		t.Errorf("failed already: %+v", got)
	}
	// fared sends a message for each GPU, FRR one for all of a server, and one octet more.
	gpus := Spec{Servers: 4, GPUs: 8}
	s = Simulate(number(t, gpus))
	if got := fail(t, s, "server2/p2.0"); got.Updates != 3*2*8 || got.Bytes != 3*2*8*63 || got.Destinations != 8*got.Pairs {
		t.Errorf("8 GPUs: %+v", got)
	}
	gpus.Leaf = FRR
	s = Simulate(number(t, gpus))
	// Server2 hears of itself too, over the cable that it has left.
	if got := fail(t, s, "server2/p2.0"); got.Updates != 3*2+1 || got.Bytes != 7*(64+7*5) || got.Announced != 7*8 {
		t.Errorf("8 GPUs, FRR: %+v", got)
	}
}

func TestOverlaps(t *testing.T) {
	s := Simulate(example(t, "figure1"))
	for _, step := range []struct {
		heal bool
		name string
		want string
	}{
		{false, "server2/p1.0", "[2 1 2 2]"}, {false, "leaf1", "[1 0 1 1]"}, {false, "p1", "[1 0 1 1]"}, {true, "leaf1", "[1 0 1 1]"},
		{true, "server2/p1.0", "[1 0 1 1]"}, {false, "server2/p1.0", "[1 0 1 1]"}, {true, "p1", "[2 1 2 2]"},
		{false, "drain:server2/p1.0", "[2 1 2 2]"}, {true, "server2/p1.0", "[2 1 2 2]"}, {false, "drain:server2/p1", "[1 0 1 1]"},
		{true, "drain:server2/p1.0", "[1 0 1 1]"}, {true, "drain:server2/p1", "[1 1 1 1]"},
	} {
		if step.heal {
			heal(t, s, step.name)
		} else {
			fail(t, s, step.name)
		}
		if got := fmt.Sprint(s.Weights(0, 1)); got != step.want {
			t.Errorf("%+v: weights %s, failed %v", step, got, s.Failed())
		}
		if v := s.Check(); len(v) > 0 {
			t.Errorf("%+v: %v", step, v)
		}
	}
	if got := s.Failed(); len(got) > 0 {
		t.Errorf("still failed: %v", got)
	}
}

func TestFailErrors(t *testing.T) {
	s := Simulate(example(t, "two-tier"))
	fail(t, s, "leaf0-0")
	for _, c := range []struct {
		do         func(...string) (Cost, error)
		name, want string
	}{
		{s.Fail, "leaf9", `"leaf9": there is no such thing in this fabric: name a node (server1 to server4, leaf0-0 to leaf1-1, spine0-0 to spine1-1)`},
		{s.Fail, "drain:spine0-0", `"drain:spine0-0": there is no such thing in this fabric: servers drain their sub-ports, and none has one there`},
		{s.Heal, "leaf0-1", `"leaf0-1" is not failed: heal what is, [leaf0-0]`},
	} {
		before := state(s)
		if _, err := c.do("server1", c.name); err == nil && c.name != "leaf0-1" {
			t.Errorf("%s: no error", c.name)
		}
		if _, err := c.do(c.name); err == nil || !strings.HasPrefix(err.Error(), c.want) {
			t.Errorf("%s:\ngot  %v\nwant %s", c.name, err, c.want)
		}
		if after := state(s); after != before || !slices.Equal(s.Failed(), []string{"leaf0-0"}) {
			t.Errorf("%s: something was done", c.name)
		}
	}
}

// state is what every leaf and spine says about every server, and every weight; the same however servers are put into classes.
func state(s *Simulation) string {
	var b strings.Builder
	f := s.fabric
	for _, n := range s.net.nodes {
		for server := range f.Servers {
			if n.Kind == KindServer {
				continue
			}
			if what := n.told[s.net.classes[s.net.classOf[server]].reps[0]]; what.attrs != nil {
				fmt.Fprintln(&b, n.Name, f.Server[server].Name, what.bandwidth(), len(what.attrs.ASPath))
			}
		}
	}
	for src := range f.Servers {
		for dst := range f.Servers {
			fmt.Fprintln(&b, src, dst, s.Weights(src, dst), s.SubPortWeights(src, dst))
		}
	}
	return b.String()
}

// model is the dumb arithmetic that weights are held against: what each node says, from the cables alone. It is for fared and FRR,
// and for BIRD where servers say a node's sum. Speeds are in parts of a bit/s, as many as a plane has spines: uplinks are equally
// fast, so the share of one is a whole number of them.
func model(s *Simulation, src, dst int) ([]uint32, []uint64) {
	f := s.fabric
	var sums []uint64
	for p := range f.Planes {
		var sum uint64
		for i := range f.Leaves {
			leaf := f.Leaf[p*f.Leaves+i]
			sum += min(toLeaf(s, leaf, src), says(s, leaf, dst))
		}
		sums = append(sums, sum)
	}
	var g uint64
	for _, v := range sums {
		for a, b := g, v; ; a, b = b, a%b {
			if b == 0 {
				g = a
				break
			}
		}
	}
	w := make([]uint32, len(sums))
	for i := range sums {
		w[i] = uint32(sums[i] / max(g, 1))
	}
	return w, sums
}

func parts(f *Fabric) uint64 { return uint64(max(f.Spines, 1)) }

func toLeaf(s *Simulation, leaf *Node, server int) (sum uint64) {
	for _, c := range s.fabric.At(leaf) {
		if c.Down.Node == s.fabric.Server[server] {
			sum += uint64(s.speedOf(c)) * parts(s.fabric)
		}
	}
	return sum
}

func says(s *Simulation, leaf *Node, server int) (sum uint64) {
	if n := toLeaf(s, leaf, server); n > 0 {
		return n
	}
	through := func(n *Node, c *Cable, told uint64) uint64 {
		if s.fabric.Software(n) == Fared {
			return min(told, uint64(c.Speed)*parts(s.fabric))
		}
		return told
	}
	for _, near := range s.fabric.At(leaf) {
		if !near.Uplink() || s.state[near.Index]&dark != 0 {
			continue
		}
		for _, far := range s.fabric.At(near.Up.Node) {
			if s.state[far.Index]&dark != 0 {
				continue
			}
			told := toLeaf(s, far.Down.Node, server)
			if s.fabric.Spec.Leaf == Fared {
				told /= parts(s.fabric)
			}
			sum += through(leaf, near, through(near.Up.Node, far, told))
		}
	}
	return sum
}

// TestFailures: all single failures and random double ones, of every example, of leaves with FRR and BIRD, and of planes with
// spines, each against the arithmetic and the rules of conservation; and all is healed again.
func TestFailures(t *testing.T) {
	fabrics := map[string]*Fabric{}
	for _, name := range Examples() {
		fabrics[name] = example(t, name)
	}
	for _, leaf := range []string{FRR, BIRD} {
		fabrics[leaf] = number(t, Spec{Servers: 6, SubPorts: 3, GPUs: 2, Leaf: leaf})
		fabrics[leaf+", split"] = number(t, Spec{Servers: 5, SubPorts: 3, Leaves: 2, Leaf: leaf})
	}
	for _, spine := range []string{Fared, FRR, BIRD} {
		fabrics["two spines, "+spine] = number(t, Spec{Planes: 2, Leaves: 2, Spines: 2, Servers: 4, Spine: spine})
		// Shares that no community holds exactly; three leaves, and uplinks of 342857142857 bit/s.
		fabrics["three spines, "+spine] = number(t, Spec{Planes: 3, Leaves: 2, Spines: 3, Servers: 4, Spine: spine})
		fabrics["seven spines, "+spine] = number(t, Spec{Planes: 2, Leaves: 3, Spines: 7, Servers: 6, SubPorts: 3, Spine: spine})
	}
	// More servers than uplinks can carry.
	fabrics["narrow uplinks"] = number(t, Spec{Planes: 2, Leaves: 2, Spines: 2, Servers: 4, UplinkSpeed: 100 * fare.Gigabit})
	for name, f := range fabrics {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := Simulate(f)
			start := state(s)
			singles := f.Single()
			var cases [][]string
			for _, one := range singles {
				cases = append(cases, []string{one})
			}
			random := rand.New(rand.NewPCG(1, 2))
			for range 100 {
				cases = append(cases, []string{singles[random.IntN(len(singles))], singles[random.IntN(len(singles))]})
			}
			less := 0
			for _, names := range cases {
				fail(t, s, names...)
				s.net.pairs(func(src, dst, count int) {
					got, flow := s.Weights(src, dst), capacities(s, src, dst)
					want, has := model(s, src, dst)
					if !slices.Equal(got, want) {
						t.Errorf("%v: %d to %d: weights %v, want %v", names, src, dst, got, want)
					}
					if f.Spines == 0 && !ratio(got, flow) {
						t.Errorf("%v: %d to %d: weights %v for %v", names, src, dst, got, flow)
					}
					for p := range has {
						if has[p] > flow[p]*parts(f) {
							t.Errorf("%v: %d to %d: plane %d has %d of %d", names, src, dst, p, has[p]/parts(f), flow[p])
						}
						if has[p] < flow[p]*parts(f) {
							less++
						}
					}
				})
				if v := s.Check(); len(v) > 0 {
					t.Errorf("%v: %v", names, v)
				}
				heal(t, s)
			}
			room := uint64(f.UplinkSpeed)*uint64(f.Spines) > uint64(f.Speed)*uint64(f.SubPorts) // for more than a server's share
			if len(cases) < 100+len(f.Cables) || room != (less > 0) {
				t.Errorf("%d cases, a plane has less for a pair than it could %d times: this test has lost its subject", len(cases), less)
			}
			if got := state(s); got != start {
				t.Errorf("healed, it is not as it was:\n%s\nwas\n%s", got, start)
			}
		})
	}
}

func capacities(s *Simulation, src, dst int) []uint64 {
	var all []uint64
	for p := range s.fabric.Planes {
		all = append(all, uint64(s.flow(s.fabric.Server[src], s.fabric.Server[dst], p)))
	}
	return all
}

// ratio says whether weights are in the ratio of capacities.
func ratio(weights []uint32, capacity []uint64) bool {
	for i := range weights {
		for k := range weights {
			if uint64(weights[i])*capacity[k] != uint64(weights[k])*capacity[i] {
				return false
			}
		}
		if (weights[i] > 0) != (capacity[i] > 0) {
			return false
		}
	}
	return true
}

// smallSpec is a fabric of any shape that is small enough to simulate every server, with speeds that a community holds exactly.
func smallSpec(random *rand.Rand) Spec {
	software := []string{Fared, FRR, BIRD}
	s := Spec{Planes: 1 + random.IntN(3), Servers: 2 + random.IntN(5), GPUs: 1 + random.IntN(3), SubPorts: 1 + random.IntN(3), Leaf: software[random.IntN(3)]}
	switch random.IntN(3) {
	case 0:
		s.Leaves, s.Spines, s.Spine = 1+random.IntN(min(3, s.Servers)), 1+random.IntN(3), software[random.IntN(3)]
		if random.IntN(2) == 0 {
			s.UplinkSpeed = fare.Bandwidth(1+random.IntN(4)) * 200 * fare.Gigabit
		}
	case 1:
		s.Leaves = 1 + random.IntN(s.SubPorts)
	}
	return s
}

// TestClassesAreExact compares the simulation with one that simulates every server, on random fabrics, failures and repairs: what
// is said and by whom, every weight, every cost, the violations, and the rates of all-to-all traffic.
func TestClassesAreExact(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	rated := 0
	for range 120 {
		spec := smallSpec(random)
		f := number(t, spec)
		quick, slow := simulate(f, false), simulate(f, true)
		names := f.Single()
		for _, n := range names[:min(len(names), 12)] {
			if !strings.Contains(n, "/up") {
				names = append(names, drainPrefix+n)
			}
		}
		var log []string
		for range 6 {
			var a, b Cost
			if failed := quick.Failed(); len(failed) > 0 && random.IntN(3) == 0 {
				name := failed[random.IntN(len(failed))]
				log = append(log, "heal "+name)
				a, b = heal(t, quick, name), heal(t, slow, name)
			} else {
				two := []string{names[random.IntN(len(names))], names[random.IntN(len(names))]}
				log = append(log, "fail "+strings.Join(two, " "))
				a, b = fail(t, quick, two...), fail(t, slow, two...)
			}
			where := fmt.Sprintf("%+v: %v", f.Spec, log)
			if a != b {
				t.Fatalf("%s: cost\n%+v, want\n%+v", where, a, b)
			}
			if x, y := state(quick), state(slow); x != y {
				t.Fatalf("%s: state\n%s, want\n%s", where, x, y)
			}
			if x, y := count(quick.Check()), count(slow.Check()); !reflect.DeepEqual(x, y) {
				t.Fatalf("%s: violations %v, want %v", where, x, y)
			}
		}
		if f.Servers*f.Planes <= 8 { // the linear program of all pairs and paths grows fast
			if x, y := rates(quick), rates(slow); !equalRates(x, y) {
				t.Fatalf("%+v: %v: rates\n%v, want\n%v", f.Spec, log, x, y)
			}
			rated++
		}
		heal(t, slow)
		if got, want := state(slow), state(Simulate(f)); got != want {
			t.Fatalf("%+v: %v: healed:\n%s\nwant\n%s", f.Spec, log, got, want)
		}
	}
	if rated < 20 {
		t.Errorf("rates of only %d fabrics were compared: this test has lost its subject", rated)
	}
}

// count adds up violations by rule and plane.
func count(all []Violation) map[string]int {
	sums := map[string]int{}
	for _, v := range all {
		sums[string(v.Rule)+" "+v.Plane+" "+v.Text] += v.Pairs
	}
	return sums
}

// TestWhatBreaks: who breaks which rule, and where nobody does.
func TestWhatBreaks(t *testing.T) {
	tier := Spec{Planes: 2, Leaves: 2, Spines: 2, Servers: 4}
	thin := tier
	thin.UplinkSpeed = 100 * fare.Gigabit
	for _, c := range []struct {
		spec        Spec
		leaf, spine string
		fail        string
		want        []Rule
		line        string // of the last violation
	}{
		{Spec{}, Fared, "", "server2/p1.0", nil, ""},
		{Spec{}, FRR, "", "server2/p1.0", nil, ""},
		{Spec{}, BIRD, "", "server2/p1.0", nil, ""},
		{Spec{Leaves: 2}, FRR, "", "leaf1-0", nil, ""},
		{Spec{Leaves: 2}, BIRD, "", "leaf1-0", nil, ""},
		// A leaf with fared shares out what it has, and whatever is lost is missed.
		{tier, Fared, Fared, "server2/p1.0", nil, ""},
		{tier, Fared, FRR, "server2/p1.0", nil, ""},
		{tier, Fared, FRR, "spine1-0", nil, ""},
		{tier, Fared, BIRD, "leaf1-0/up0", nil, ""},
		{thin, Fared, Fared, "leaf0-0/up0", nil, ""},
		// FRR tells two spines all of it, both pass it on, and the near leaf adds them up. A lost spine is missed: half of twice as much.
		{tier, FRR, FRR, "server2/p1.0", []Rule{RuleAdvertise, RulePlane},
			"plane: server3 to server2 in p1: weight 1 of [1 1], for 400G of 1.2T (and 1 pairs like it)"},
		{tier, FRR, FRR, "spine1-0", []Rule{RuleAdvertise, RulePlane},
			"plane: server3 to server1 in p1: weight 1 of [1 1], for 400G of 1.2T (and 3 pairs like it)"},
		// BIRD passes on one route, which is right as long as one spine could carry it.
		{tier, BIRD, BIRD, "server2/p1.0", nil, ""},
		{tier, BIRD, BIRD, "spine1-0", []Rule{RulePlane},
			"plane: server3 to server1 in p1: weight 1 of [1 1], for 400G of 1.2T (and 3 pairs like it)"},
		// FRR and BIRD do not look at their links.
		{thin, FRR, FRR, "leaf0-0/up0", []Rule{RuleAdvertise, RulePlane},
			"plane: server3 to server1 in p0: weight 1 of [1 1], for 100G of 300G (and 3 pairs like it)"},
		{thin, BIRD, BIRD, "leaf0-0/up0", []Rule{RuleAdvertise, RulePlane},
			"plane: server3 to server1 in p0: weight 1 of [1 1], for 100G of 300G (and 3 pairs like it)"},
	} {
		c.spec.Leaf, c.spec.Spine = c.leaf, c.spine
		s := Simulate(number(t, c.spec))
		fail(t, s, c.fail)
		var rules []Rule
		last := ""
		for _, v := range s.Check() {
			if !slices.Contains(rules, v.Rule) {
				rules = append(rules, v.Rule)
			}
			last = v.String()
		}
		if !slices.Equal(rules, c.want) || last != c.line {
			t.Errorf("%s leaves, %s spines, %s: broken are %v, last\n%s", c.leaf, c.spine, c.fail, rules, last)
		}
	}
}

// TestCheckFinds spoils a healthy state in each way that there is a rule against.
func TestCheckFinds(t *testing.T) {
	for rule, spoil := range map[Rule]func(*Simulation){
		// The cables are not what the speakers think.
		RuleNoPath:    func(s *Simulation) { s.darken("server2/p1") },
		RuleUnused:    func(s *Simulation) { fail(t, s, "server2/p1"); clear(s.state) },
		RulePlane:     func(s *Simulation) { s.darken("server2/p1.0") },
		RuleSubPort:   func(s *Simulation) { s.darken("server1/p1.0") },
		RuleAdvertise: func(s *Simulation) { s.darken("leaf2") },
	} {
		s := Simulate(number(t, Spec{Servers: 3}))
		spoil(s)
		if !slices.ContainsFunc(s.Check(), func(v Violation) bool { return v.Rule == rule }) {
			t.Errorf("%s is not found: %v", rule, s.Check())
		}
	}
}

// darken takes the light from cables behind everybody's back.
func (s *Simulation) darken(name string) {
	found, _ := s.fabric.Find(name)
	for _, c := range found {
		s.state[c.Index] = dark
	}
}

func TestSingle(t *testing.T) {
	want := "server1/p0.0 server2/p0.0 leaf0" // which are two servers and a plane
	if got := strings.Join(number(t, Spec{Servers: 2, Planes: 1, SubPorts: 1}).Single(), " "); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	names := example(t, "two-tier").Single()
	for _, name := range []string{"server4/p1.1", "leaf1-1/up1", "server1/p0", "server3", "leaf0-1", "spine1-0", "p1"} {
		if !slices.Contains(names, name) {
			t.Errorf("%s is missing", name)
		}
	}
}

// BenchmarkSimulate is 16,384 GPUs of 2,048 servers on 8 planes: to bring the fabric up, and to lose half a Y-cable and a spine.
func BenchmarkSimulate(b *testing.B) {
	for _, size := range []struct{ leaves, spines int }{{8, 8}, {16, 16}, {64, 32}} {
		f := number(b, Spec{Servers: 2048, GPUs: 8, Planes: 8, Leaves: size.leaves, Spines: size.spines})
		b.Run(fmt.Sprintf("up/leaves=%d/spines=%d", size.leaves, size.spines), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				Simulate(f)
			}
		})
		b.Run(fmt.Sprintf("fail/leaves=%d/spines=%d", size.leaves, size.spines), func(b *testing.B) {
			s := Simulate(f)
			for b.Loop() {
				fail(b, s, "server7/p3.0", "spine2-4")
				heal(b, s)
			}
		})
		b.Run(fmt.Sprintf("check/leaves=%d/spines=%d", size.leaves, size.spines), func(b *testing.B) {
			s := Simulate(f)
			for b.Loop() {
				s.Check()
			}
		})
	}
}

// TestLargest is what one simulation is to hold: 16,384 GPUs on 8 planes.
func TestLargest(t *testing.T) {
	s := Simulate(number(t, Spec{Servers: 2048, GPUs: 8, Planes: 8, Leaves: 8, Spines: 8}))
	fail(t, s, "server7/p3.0", "p5")
	if got, want := fmt.Sprint(s.Weights(0, 1000), s.Weights(0, 6)), "[1 1 1 1 1 0 1 1] [2 2 2 1 2 0 2 2]"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	pairs := 0
	for _, p := range s.Summary() {
		pairs += p.Pairs
	}
	if pairs != 2048*2047 {
		t.Errorf("%d pairs", pairs)
	}
}
