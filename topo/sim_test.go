package topo

import (
	"fmt"
	"math/big"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/fared/fared/fare"
	"github.com/fared/fared/internal/testkit/gate"
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

// TestDraftFigures checks draft-xu-rtgwg-fare-in-sun-02, Section 1, on Figure 1.
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

// TestCost fails half a Y-cable in Figure 1. 63 of the 64 servers receive an update from the leaf on two sessions; the
// other server receives none. An UPDATE with a path of two AS numbers is 63 octets.
func TestCost(t *testing.T) {
	s := Simulate(example(t, "figure1"))
	want := Cost{Rounds: 1, Updates: 126, Bytes: 126 * 63, Announced: 126, SubPorts: 1, Pairs: 126, Destinations: 126, Vectors: 64}
	if got := fail(t, s, "server2/p2.0"); got != want {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	// Recovery: server2 sends its loopback and End-of-RIB, the leaf sends it 63 loopbacks and End-of-RIB, and sends the
	// sum to the others.
	want = Cost{Rounds: 2, Updates: 2 + 64 + 126, Bytes: 59 + 23 + 63*63 + 23 + 126*63, Announced: 1 + 63 + 126, SubPorts: 1, Pairs: 126, Destinations: 126, Vectors: 1}
	if got := heal(t, s, "server2/p2.0"); got != want {
		t.Errorf("back\ngot  %+v\nwant %+v", got, want)
	}
	// The other half too: one withdrawal per session, and for server2 one operation per sub-port.
	fail(t, s, "server2/p2.0")
	want = Cost{Rounds: 1, Updates: 126, Bytes: 126 * 28, Withdrawn: 126, SubPorts: 1, Pairs: 126, Destinations: 126, Vectors: 64}
	if got := fail(t, s, "server2/p2.1"); got != want {
		t.Errorf("other half\ngot  %+v\nwant %+v", got, want)
	}
	if got := fail(t, s, "server2/p2.1"); got != (Cost{}) {
		t.Errorf("failed already: %+v", got)
	}
	// fared sends a message for each GPU, FRR one for all GPUs of a server, and one octet more.
	gpus := Spec{Servers: 4, GPUs: 8}
	s = Simulate(number(t, gpus))
	if got := fail(t, s, "server2/p2.0"); got.Updates != 3*2*8 || got.Bytes != 3*2*8*63 || got.Destinations != 8*got.Pairs {
		t.Errorf("8 GPUs: %+v", got)
	}
	gpus.Leaf = FRR
	s = Simulate(number(t, gpus))
	// Server2 receives its own routes too, over its remaining cable.
	if got := fail(t, s, "server2/p2.0"); got.Updates != 3*2+1 || got.Bytes != 7*(64+7*5) || got.Announced != 7*8 {
		t.Errorf("8 GPUs, FRR: %+v", got)
	}
}

// TestGPUsOwnPorts uses Figure 1 as 8 servers of 8 GPUs. A failure at one GPU changes only its weights, in both
// directions, and none between the other GPUs of its server and the rest.
func TestGPUsOwnPorts(t *testing.T) {
	f := example(t, "figure1-servers")
	s := Simulate(f)
	if got, want := fmt.Sprint(s.Summary()), fmt.Sprintf("[{[1 1 1 1] %d}]", 64*56); got != want {
		t.Fatalf("%s, want %s", got, want)
	}
	hit, other, far := f.Group("server2/g3").Index, f.Group("server2/g4").Index, f.Group("server7/g0").Index
	for _, c := range []struct{ fail, hit, other, summary string }{
		{"server2/g3p2", "[1 1 0 1]", "[1 1 1 1]", "[{[1 1 1 1] 3472} {[1 1 0 1] 112}]"},
		{"server2/g3p2.1", "[2 2 1 2]", "[1 1 1 1]", "[{[1 1 1 1] 3472} {[2 2 1 2] 112}]"},
		{"server2/g3", "[0 0 0 0]", "[1 1 1 1]", "[{[1 1 1 1] 3472} {[0 0 0 0] 112}]"},
		{"server2/p2", "[1 1 0 1]", "[1 1 0 1]", "[{[1 1 1 1] 2688} {[1 1 0 1] 896}]"},
		{"drain:server2/g3p2", "[1 1 0 1]", "[1 1 1 1]", "[{[1 1 1 1] 3472} {[1 1 0 1] 112}]"},
		{"leaf2", "[1 1 0 1]", "[1 1 0 1]", "[{[1 1 0 1] 3584}]"},
	} {
		cost := fail(t, s, c.fail)
		got := fmt.Sprint(s.Weights(hit, far), s.Weights(far, hit), s.Weights(other, far), s.Weights(far, other), s.Summary())
		if want := strings.Join([]string{c.hit, c.hit, c.other, c.other, c.summary}, " "); got != want {
			t.Errorf("%s:\ngot  %s\nwant %s", c.fail, got, want)
		}
		// Each of the 56 GPUs of other servers, over both of its sub-ports in the plane, receives an update about the
		// one GPU.
		if c.fail == "server2/g3p2.1" && (cost.Updates != 56*2 || cost.SubPorts != 1 || cost.Pairs != 112 || cost.Destinations != 112) {
			t.Errorf("%s: %+v", c.fail, cost)
		}
		if v := s.Check(); len(v) > 0 {
			t.Errorf("%s: %v", c.fail, v)
		}
		heal(t, s)
	}
	if s.Weights(hit, other) != nil {
		t.Error("there are weights between the GPUs of one server")
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
			t.Errorf("%+v: weights %s, failed %v", step, got, s.failed)
		}
		if v := s.Check(); len(v) > 0 {
			t.Errorf("%+v: %v", step, v)
		}
	}
	if got := s.failed; len(got) > 0 {
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
		{s.Fail, "leaf9", `"leaf9": not found in this fabric: name a node (server1 to server4, leaf0-0 to leaf1-1, spine0-0 to spine1-1)`},
		{s.Fail, "drain:spine0-0", `"drain:spine0-0": not found in this fabric: servers drain their sub-ports, and no server has a sub-port there`},
		{s.Heal, "leaf0-1", `"leaf0-1" has not failed: the failures are [leaf0-0]`},
	} {
		before := state(s)
		if _, err := c.do("server1", c.name); err == nil && c.name != "leaf0-1" {
			t.Errorf("%s: no error", c.name)
		}
		if _, err := c.do(c.name); err == nil || !strings.HasPrefix(err.Error(), c.want) {
			t.Errorf("%s:\ngot  %v\nwant %s", c.name, err, c.want)
		}
		if after := state(s); after != before || !slices.Equal(s.failed, []string{"leaf0-0"}) {
			t.Errorf("%s: something was done", c.name)
		}
	}
}

// state returns the advertisements of every leaf and spine for every server, and every weight; they do not depend on
// the classes of servers.
func state(s *Simulation) string {
	var b strings.Builder
	f := s.fabric
	for _, n := range s.net.nodes {
		for i, g := range f.groups {
			if n.Kind == KindServer {
				continue
			}
			if what := n.adverts[s.net.classes[s.net.classOf[g.Server.Index]].reps[0]+i%f.owners()]; what.attrs != nil {
				fmt.Fprintln(&b, n.Name, g.Name, what.bandwidth(), len(what.attrs.ASPath))
			}
		}
	}
	for src := range f.groups {
		for dst := range f.groups {
			fmt.Fprintln(&b, src, dst, s.Weights(src, dst), s.SubPortWeights(src, dst))
		}
	}
	return b.String()
}

// model is a reference model of the weights: it computes each node's advertisement from the cables alone. It covers
// fared and FRR, and BIRD if servers advertise a node's sum. Speeds are in fractions of a bit/s, as many as a plane has
// spines: uplinks are equally fast, so the share of one is an integer.
func model(s *Simulation, src, dst int) ([]uint32, []uint64) {
	f := s.fabric
	var sums []uint64
	for p := range f.Planes {
		var sum uint64
		for i := range f.Leaves {
			leaf := f.Leaf[p*f.Leaves+i]
			sum += min(toLeaf(s, leaf, src), advertised(s, leaf, dst))
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

// laneWeights returns the weights of a plane's sub-ports computed from the cables alone, in lowest terms: the traffic
// to a leaf is the lesser of the sub-ports there and of the leaf's advertisement, and is divided over the sub-ports by
// speed.
func laneWeights(s *Simulation, src, dst, plane int) []uint32 {
	f := s.fabric
	var all []*big.Rat
	for _, c := range f.groups[src].Planes[plane] {
		part := new(big.Rat)
		if there := toLeaf(s, c.Up.Node, src); s.speedOf(c) > 0 {
			part.SetFrac64(int64(min(there, advertised(s, c.Up.Node, dst))), int64(there))
			part.Mul(part, big.NewRat(int64(c.Speed), 1))
		}
		all = append(all, part)
	}
	return lowest(all)
}

// lowest returns a ratio in the smallest integers.
func lowest(ratio []*big.Rat) []uint32 {
	common, divisor := big.NewInt(1), new(big.Int)
	for _, r := range ratio {
		g := new(big.Int).GCD(nil, nil, common, r.Denom())
		common.Mul(common, new(big.Int).Quo(r.Denom(), g))
	}
	whole := make([]*big.Int, len(ratio))
	for i, r := range ratio {
		whole[i] = new(big.Int).Quo(new(big.Int).Mul(r.Num(), common), r.Denom())
		divisor.GCD(nil, nil, divisor, whole[i])
	}
	out := make([]uint32, len(ratio))
	for i, n := range whole {
		if divisor.Sign() > 0 {
			out[i] = uint32(new(big.Int).Quo(n, divisor).Uint64())
		}
	}
	return out
}

func parts(f *Fabric) uint64 { return uint64(max(f.Spines, 1)) }

func toLeaf(s *Simulation, leaf *Node, host int) (sum uint64) {
	for _, c := range s.fabric.At(leaf) {
		if c.Group != nil && c.Group.Index == host {
			sum += uint64(s.speedOf(c)) * parts(s.fabric)
		}
	}
	return sum
}

func advertised(s *Simulation, leaf *Node, server int) (sum uint64) {
	if n := toLeaf(s, leaf, server); n > 0 {
		return n
	}
	through := func(n *Node, c *Cable, advertised uint64) uint64 {
		if s.fabric.Software(n) == Fared {
			return min(advertised, uint64(c.Speed)*parts(s.fabric))
		}
		return advertised
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

// TestFailures plays all single failures and random double ones, on every example, with leaves of FRR and BIRD, and on
// planes with spines. It compares each with the reference model and the rules of conservation, and recovers from all of
// them.
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
	// Ports of GPUs with different speeds and numbers of sub-ports, and planes without some GPUs.
	fabrics["GPUs own ports"] = number(t, Spec{Planes: 3, Servers: 4, GPUs: 3, GPUPorts: Own})
	fabrics["GPUs own different ports"] = number(t, Spec{Planes: 3, Servers: 3, GPUs: 2, GPUPorts: Own,
		Overrides: "server2 speed=200G; */g1/p2 sub_ports=0; server3/g0/p1 sub_ports=1 speed=800G"})
	fabrics["different servers, split"] = number(t, Spec{Planes: 3, Servers: 4, SubPorts: 3, Leaves: 2, Leaf: FRR, Overrides: "server1/p1 sub_ports=1; server4 speed=100G; */p2 speed=300G"})
	fabrics["different GPUs, two tiers"] = number(t, Spec{Planes: 2, Leaves: 2, Spines: 2, Servers: 4, GPUs: 2, GPUPorts: Own, Overrides: "server1/g0 speed=800G; server4/p1 speed=200G"})
	for _, leaf := range software {
		fabrics["one AS, "+leaf] = number(t, Spec{Planes: 3, Servers: 4, GPUs: 2, GPUPorts: Own, SharedAS: SharedServers, Leaf: leaf, Overrides: "server2 speed=200G"})
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
			doubles, every := gate.Count(t, gate.Models, 25, 100), 1
			if len(singles) > 60 {
				every = gate.Count(t, gate.Models, 3, 1)
			}
			for i := 0; i < len(singles); i += every {
				cases = append(cases, []string{singles[i]})
			}
			random := rand.New(rand.NewPCG(1, 2))
			if len(f.groups) > 16 && f.owners() > 1 { // all alike: a part of them is sufficient
				for i := range cases {
					if i%11 > 0 && strings.Contains(cases[i][0], "/g") {
						cases[i] = nil
					}
				}
				cases = slices.DeleteFunc(cases, func(c []string) bool { return c == nil })
			}
			for range doubles {
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
					for p, got := range s.SubPortWeights(src, dst) {
						if want := laneWeights(s, src, dst, p); !slices.Equal(got, want) {
							t.Errorf("%v: %d to %d: plane %d has sub-ports %v, want %v", names, src, dst, p, got, want)
						}
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
			if f.Overrides != "" {
				room = less > 0 // depends on the ports
			}
			if len(cases) < doubles+min(len(f.Cables), 40)/every || room != (less > 0) {
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
	from := vertex{s.fabric.groups[src].Server, s.fabric.groups[src].Cables}
	for p := range s.fabric.Planes {
		all = append(all, uint64(s.flow(from, s.fabric.groups[dst], p)))
	}
	return all
}

// ratio reports whether weights are in the ratio of capacities.
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

// smallSpec returns a fabric of any shape that is small enough to simulate every server, with speeds that a community
// holds exactly.
func smallSpec(random *rand.Rand) (s Spec) {
	software := []string{Fared, FRR, BIRD}
	s = Spec{Planes: 1 + random.IntN(3), Servers: 2 + random.IntN(5), GPUs: 1 + random.IntN(3), SubPorts: 1 + random.IntN(3), Leaf: software[random.IntN(3)]}
	if s.GPUs > 1 && random.IntN(2) == 0 {
		s.GPUPorts = Own
	}
	if random.IntN(3) == 0 {
		s.SharedAS = SharedServers
	}
	defer func() {
		if random.IntN(2) > 0 {
			return
		}
		for range 20 {
			with := s
			with.Overrides = randomOverrides(random, s.WithDefaults())
			if with.WithDefaults().Validate() == nil {
				s = with
				return
			}
		}
	}()
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

// TestClassesAreExact compares the simulation with one that simulates every server, on random fabrics, failures and
// repairs: all advertisements, weights, costs, violations, and the rates of all-to-all traffic.
func TestClassesAreExact(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	rated := 0
	for range gate.Count(t, gate.Models, 50, 120) {
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
			if failed := quick.failed; len(failed) > 0 && random.IntN(3) == 0 {
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
		if len(f.groups)*f.Planes <= 8 { // the linear program of all pairs and paths grows fast
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
	if rated < gate.Count(t, gate.Models, 8, 20) {
		t.Errorf("rates of only %d fabrics were compared: this test has lost its subject", rated)
	}
}

// count counts violations by rule and plane.
func count(all []Violation) map[string]int {
	sums := map[string]int{}
	for _, v := range all {
		sums[string(v.Rule)+" "+v.Plane+" "+v.Text] += v.Pairs
	}
	return sums
}

// TestWhatBreaks verifies which software breaks which rule, and which breaks none.
func TestWhatBreaks(t *testing.T) {
	tier := Spec{Planes: 2, Leaves: 2, Spines: 2, Servers: 4}
	thin := tier
	thin.UplinkSpeed = 100 * fare.Gigabit
	for _, c := range []struct {
		spec        Spec
		leaf, spine string
		fail        string
		want        []Rule
		line        string // the last violation
	}{
		{Spec{}, Fared, "", "server2/p1.0", nil, ""},
		{Spec{}, FRR, "", "server2/p1.0", nil, ""},
		{Spec{}, BIRD, "", "server2/p1.0", nil, ""},
		{Spec{Leaves: 2}, FRR, "", "leaf1-0", nil, ""},
		{Spec{Leaves: 2}, BIRD, "", "leaf1-0", nil, ""},
		// A leaf with fared divides its bandwidth, and every failure reduces the sum.
		{tier, Fared, Fared, "server2/p1.0", nil, ""},
		{tier, Fared, FRR, "server2/p1.0", nil, ""},
		{tier, Fared, FRR, "spine1-0", nil, ""},
		{tier, Fared, BIRD, "leaf1-0/up0", nil, ""},
		{thin, Fared, Fared, "leaf0-0/up0", nil, ""},
		// FRR advertises the whole to two spines, both pass it on, and the near leaf sums them. A failed spine reduces
		// the sum: half of the double.
		{tier, FRR, FRR, "server2/p1.0", []Rule{RuleAdvertise, RulePlane},
			"plane: server3 to server2 in p1: weight 1 of [1 1], for 400G of 1.2T (and 1 pairs like it)"},
		{tier, FRR, FRR, "spine1-0", []Rule{RuleAdvertise, RulePlane},
			"plane: server3 to server1 in p1: weight 1 of [1 1], for 400G of 1.2T (and 3 pairs like it)"},
		// BIRD passes on one route, which is correct as long as one spine could carry it.
		{tier, BIRD, BIRD, "server2/p1.0", nil, ""},
		{tier, BIRD, BIRD, "spine1-0", []Rule{RulePlane},
			"plane: server3 to server1 in p1: weight 1 of [1 1], for 400G of 1.2T (and 3 pairs like it)"},
		// FRR and BIRD do not consider the speed of their links.
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

// TestCheckFinds breaks a healthy state in each way that violates a rule.
func TestCheckFinds(t *testing.T) {
	for rule, spoil := range map[Rule]func(*Simulation){
		// The cables differ from the speakers' view.
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

// darken takes cables down without a notification to any node.
func (s *Simulation) darken(name string) {
	found, _ := s.fabric.Find(name)
	for _, c := range found {
		s.state[c.Index] = dark
	}
}

func TestSingle(t *testing.T) {
	want := "server1/p0.0 server2/p0.0 leaf0" // two servers and a plane
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

// BenchmarkSimulate simulates 16,384 GPUs of 2,048 servers on 8 planes: the start, and the failure of half a Y-cable
// and of a spine.
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

// TestLargest verifies that one simulation handles 16,384 GPUs on 8 planes.
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
