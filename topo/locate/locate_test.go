package locate

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/topo"
)

// fabrics are one shape each: planes of one leaf, GPUs with own ports, sub-ports to two leaves, two tiers.
var fabrics = map[string]topo.Spec{
	"one-leaf":   {Planes: 3, Servers: 5},
	"own-ports":  {Planes: 2, Servers: 3, GPUs: 2, GPUPorts: topo.Own},
	"dual-leaf":  {Planes: 2, Leaves: 2, Servers: 5},
	"two-tier":   {Planes: 2, Leaves: 3, Spines: 3, Servers: 6},
	"one-port":   {Planes: 4, Servers: 4, SubPorts: 1},
	"frr-leaves": {Planes: 2, Leaves: 3, Spines: 2, Servers: 6, Leaf: topo.FRR},
}

func number(t testing.TB, s topo.Spec) *topo.Fabric {
	t.Helper()
	f, err := topo.New(s)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// begun is the time of all failures of the tests.
var begun = time.Unix(1_800_000_000, 0)

// truth is a fabric with failures, by the simulation.
type truth struct {
	*topo.Fabric
	sim    *topo.Simulation
	failed []string
	dark   []bool
}

func fail(t testing.TB, sim *topo.Simulation, f *topo.Fabric, names ...string) *truth {
	t.Helper()
	if _, err := sim.Fail(names...); err != nil {
		t.Fatal(err)
	}
	return newTruth(t, f, sim, names)
}

func newTruth(t testing.TB, f *topo.Fabric, sim *topo.Simulation, names []string) *truth {
	t.Helper()
	x := &truth{f, sim, names, make([]bool, len(f.Cables))}
	for _, name := range names {
		found, err := f.Find(name)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range found {
			x.dark[c.Index] = true
		}
	}
	return x
}

// ports returns the states of a node's cables.
func (x *truth) ports(n *topo.Node) (all []Port) {
	for _, c := range x.At(n) {
		p := Port{State: Up}
		if x.dark[c.Index] {
			p = Port{State: Dark, Since: begun}
		}
		all = append(all, p)
	}
	return all
}

// view returns the view of a node.
func (x *truth) view(n *topo.Node) *View {
	v := &View{Ports: x.ports(n)}
	if n.Kind != topo.KindServer {
		return v
	}
	for _, from := range x.GroupsAt(n.Index) {
		for to := range x.Groups() {
			if b := x.sim.PathBandwidth(from, to); b != nil {
				v.Paths = append(v.Paths, Path{from, to, to, b})
			}
		}
	}
	return v
}

// views returns the views of all servers, and of the leaves if these report, except some nodes.
func (x *truth) views(leaves bool, without ...string) map[*topo.Node]*View {
	all := map[*topo.Node]*View{}
	for _, n := range x.Nodes() {
		if (n.Kind == topo.KindServer || leaves) && !slices.Contains(without, n.Name) {
			all[n] = x.view(n)
		}
	}
	return all
}

// right reports whether the named parts are the failed ones: the same cables, by no more parts.
func (x *truth) right(t testing.TB, got []Guilty) bool {
	t.Helper()
	dark := make([]bool, len(x.Cables))
	for _, g := range got {
		found, err := x.Find(g.Part)
		if err != nil {
			t.Fatalf("%v: named %q", x.failed, g.Part)
		}
		for _, c := range found {
			dark[c.Index] = true
		}
	}
	return slices.Equal(dark, x.dark) && len(got) <= len(x.failed)
}

func parts(all []Guilty) (names []string) {
	for _, g := range all {
		names = append(names, g.Part)
	}
	return names
}

// TestSingleFaults lets every part of every fabric fail alone: exactly that part is named, with its time.
func TestSingleFaults(t *testing.T) {
	for name, spec := range fabrics {
		t.Run(name, func(t *testing.T) {
			f := number(t, spec)
			l, sim := New(f), topo.Simulate(f)
			if got := l.Locate(fail(t, sim, f).views(true)); got != nil {
				t.Errorf("nothing has failed: %+v", got)
			}
			for _, part := range f.Single() {
				x := fail(t, sim, f, part)
				got := l.Locate(x.views(true, part)) // a failed node does not report
				if !x.right(t, got) || got[0].Part != part || got[0].Confidence < 0.99 || !got[0].Since.Equal(begun) && f.Node(part) == nil {
					t.Errorf("%s: named %+v", part, got)
				}
				if _, err := sim.Heal(); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

// TestDoubleFaults lets pairs of parts fail at once, with one report too late: at least 99 of 100 are named.
func TestDoubleFaults(t *testing.T) {
	for name, spec := range fabrics {
		t.Run(name, func(t *testing.T) {
			f := number(t, spec)
			l, sim := New(f), topo.Simulate(f)
			names := f.Single()
			random := rand.New(rand.NewPCG(7, 0))
			cases, wrong := gate.Count(t, gate.Models, 60, 2000), 0
			for range cases {
				i, k := random.IntN(len(names)), random.IntN(len(names)-1)
				if k >= i {
					k++
				}
				x := fail(t, sim, f, names[i], names[k])
				if got := l.Locate(x.views(true)); !x.right(t, got) {
					wrong++
					t.Logf("%v: named %v", x.failed, parts(got))
				}
				if _, err := sim.Heal(); err != nil {
					t.Fatal(err)
				}
			}
			if wrong*100 > cases {
				t.Errorf("%d of %d doubles named wrong", wrong, cases)
			}
		})
	}
}

// TestUplinksByBandwidth names uplinks and spines of leaves that do not report: the truth is among the alternatives,
// and these are of the failed kind alone.
func TestUplinksByBandwidth(t *testing.T) {
	f := number(t, fabrics["two-tier"])
	l, sim := New(f), topo.Simulate(f)
	for _, part := range []string{"leaf0-1/up2", "leaf1-0/up0", "spine0-1", "spine1-2"} {
		got := l.Locate(fail(t, sim, f, part).views(false))
		if len(got) != 1 || !slices.Contains(append(got[0].Alternatives, got[0].Part), part) || len(got[0].Alternatives) != f.Spines-1 || got[0].Fault != FaultCapacity {
			t.Errorf("%s: named %+v", part, got)
		}
		if _, err := sim.Heal(); err != nil {
			t.Fatal(err)
		}
	}
	x := fail(t, sim, f, "spine0-0", "leaf0-1/up1")
	if got := l.Locate(x.views(false)); len(got) != 2 || got[0].Kind != spine || got[1].Kind != uplink || got[1].Part != "leaf0-1/up0" {
		t.Errorf("%v: named %+v", x.failed, got)
	}
}

// TestUnheardServer names a server without a report by the others' bandwidth toward it, and none if they reach it.
func TestUnheardServer(t *testing.T) {
	f := number(t, fabrics["one-leaf"])
	l, sim := New(f), topo.Simulate(f)
	if got := l.Locate(fail(t, sim, f).views(false, "server2")); got != nil {
		t.Errorf("server2 only does not report: %+v", got)
	}
	if got := l.Locate(fail(t, sim, f, "server2/p1").views(false, "server2")); len(got) != 1 || got[0].Part != "server2/p1" {
		t.Errorf("named %+v", got)
	}
	if got := l.Locate(nil); got != nil {
		t.Errorf("without a view: %+v", got)
	}
}

// TestLateReport names a leaf although one server still reports its cable as up, and no leaf for a third of its cables.
func TestLateReport(t *testing.T) {
	f := number(t, topo.Spec{Planes: 2, Servers: 9, SubPorts: 1})
	l, sim := New(f), topo.Simulate(f)
	views := fail(t, sim, f, "leaf1").views(false)
	views[f.Server[3]].Ports[1] = Port{State: Up}
	got := l.Locate(views)
	if len(got) != 1 || got[0].Part != "leaf1" || len(got[0].Evidence) != 2 {
		t.Errorf("named %+v", got)
	}
	for i := range 6 {
		views[f.Server[i]].Ports[1] = Port{State: Up}
	}
	if got := parts(l.Locate(views)); !slices.Equal(got, []string{"server7/p1.0", "server8/p1.0", "server9/p1.0"}) {
		t.Errorf("named %v", got)
	}
}

// TestSilentAndDrained tells a leaf without sessions from one without power, and names nothing that is drained.
func TestSilentAndDrained(t *testing.T) {
	f := number(t, fabrics["one-leaf"])
	l, sim := New(f), topo.Simulate(f)
	for state, fault := range map[State]string{Silent: FaultSilent, Dark: FaultDark, Drained: ""} {
		views := fail(t, sim, f).views(false)
		for _, n := range f.Server {
			views[n].Ports[0].State, views[n].Ports[1].State = state, state
		}
		got := l.Locate(views)
		if fault == "" && got != nil || fault != "" && (len(got) != 1 || got[0].Part != "leaf0" || got[0].Fault != fault) {
			t.Errorf("%s: named %+v", state, got)
		}
	}
}

// TestCommunities names who sends invalid bandwidths: a leaf, one session, or the server whose routes they are.
func TestCommunities(t *testing.T) {
	f := number(t, fabrics["one-leaf"])
	l, sim := New(f), topo.Simulate(f)
	for want, wrong := range map[string]func(server int, c *topo.Cable) (bool, int){
		"leaf2":        func(_ int, c *topo.Cable) (bool, int) { return c.Plane == 2, 0 },
		"server3/p1.1": func(server int, c *topo.Cable) (bool, int) { return server == 2 && c.Plane == 1 && c.Sub == 1, 0 },
		"server4":      func(server int, _ *topo.Cable) (bool, int) { return server != 3, 4 },
	} {
		views := fail(t, sim, f).views(false)
		for i, n := range f.Server {
			for k, c := range f.At(n) {
				if is, origin := wrong(i, c); is {
					views[n].Ports[k].Ignored, views[n].Ports[k].Origin = "negative", origin
				}
			}
		}
		if got := l.Locate(views); len(got) != 1 || got[0].Part != want || got[0].Fault != FaultCommunity {
			t.Errorf("%s: named %+v", want, got)
		}
	}
}

// gray is a part that loses packets. The judge's model averages over every path, and draws the losses of each pair.
type gray struct {
	part, side string
	rate       float64
	node       *topo.Node
	cables     map[*topo.Cable]bool
	pair       [2]*topo.Group
	plane      int
}

func newPair(f *topo.Fabric, a, b *topo.Group, plane int) gray {
	g := newGray(f, fmt.Sprintf("%s->%s %s", a.Name, b.Name, f.PlaneName(plane)), "")
	g.pair, g.plane = [2]*topo.Group{a, b}, plane
	return g
}

func newGray(f *topo.Fabric, part, side string) gray {
	g := gray{part: part, side: side, rate: 0.01, node: f.Node(part), cables: map[*topo.Cable]bool{}}
	found, _ := f.Find(part) // none for a pair
	for _, c := range found {
		g.cables[c] = true
	}
	return g
}

// loses returns the probability that a packet is lost that goes up a cable, over a spine and down another cable.
func (g gray) loses(f *topo.Fabric, up, down *topo.Cable, over int) float64 {
	crosses := up.Up.Node != down.Up.Node
	hit := false
	switch {
	case g.pair[0] != nil:
		hit = g.pair == [2]*topo.Group{up.Group, down.Group} && g.plane == up.Plane
	case g.node != nil && g.node.Kind == topo.KindLeaf:
		hit = up.Up.Node == g.node || down.Up.Node == g.node
	case g.node != nil && g.node.Kind == topo.KindSpine:
		hit = crosses && g.node.Index == up.Plane*f.Spines+over
	case g.side == "":
		for c := range g.cables {
			hit = hit || crosses && c.Sub == over && (c.Down.Node == up.Up.Node || c.Down.Node == down.Up.Node)
		}
	default:
		hit = g.side == FromServer && g.cables[up] || g.side == ToServer && g.cables[down]
	}
	if hit {
		return g.rate
	}
	return 0
}

// oneWay returns the loss rate of a sub-port's packets to a group, over all of the group's sub-ports and all spines.
// With split cabling packets stay at a leaf.
func (g gray) oneWay(f *topo.Fabric, up *topo.Cable, to *topo.Group) (rate float64) {
	spines := 1
	if g.side == "" {
		spines = max(f.Spines, 1)
	}
	for _, down := range to.Planes[up.Plane] {
		if f.Cabling == topo.Split && down.Sub != up.Sub {
			continue
		}
		for over := range spines {
			rate += g.loses(f, up, down, over) / float64(spines)
		}
	}
	if f.Cabling == topo.Split {
		return rate
	}
	return rate / float64(len(to.Planes[up.Plane]))
}

// poisson draws a number of losses.
func poisson(random *rand.Rand, mean float64) (n float64) {
	for sum := random.ExpFloat64(); sum < mean; sum += random.ExpFloat64() {
		n++
	}
	return n
}

// probe sends n probes of each sub-port, evenly to all peers, and adds the results to the views. Directed probes tell
// the direction of each loss.
func probe(f *topo.Fabric, views map[*topo.Node]*View, g gray, base float64, n int, directed bool, random *rand.Rand) {
	direction := RoundTrip
	if directed {
		direction = Forth
	}
	peers := len(f.Groups()) - f.GroupsEach()
	each := float64(n) / float64(peers)
	for _, c := range f.Cables {
		if c.Uplink() {
			return
		}
		v, from := views[c.Group.Server], c.Group
		for _, to := range f.Groups() {
			if to.Server == from.Server {
				continue
			}
			rate := base + g.oneWay(f, c, to)
			if !directed {
				for _, back := range to.Planes[c.Plane] {
					rate += g.oneWay(f, back, from) / float64(len(to.Planes[c.Plane]))
				}
			}
			if lost := min(poisson(random, each*rate), each); lost > 0 {
				v.Lost = append(v.Lost, Loss{from.Index, to.Index, c.Plane, c.Sub + 1, direction, each, lost})
			}
		}
		v.Sent = append(v.Sent, Sent{From: from.Index, Plane: c.Plane, Sub: c.Sub + 1, Direction: direction, Peers: peers, Probes: float64(n)})
	}
}

// TestGrayFaults lets parts lose 1 % of their packets, one at a time: at least 95 of 100 are named, and nothing else.
func TestGrayFaults(t *testing.T) {
	for name, spec := range fabrics {
		t.Run(name, func(t *testing.T) {
			f := number(t, spec)
			l, sim := New(f), topo.Simulate(f)
			random := rand.New(rand.NewPCG(11, 0))
			cases, wrong := gate.Count(t, gate.Models, 20, 400), 0
			for i := range cases {
				g := drawGray(f, f.Single(), random)
				views := fail(t, sim, f).views(false)
				directed := i%2 == 0
				probe(f, views, g, 1e-4, 20_000, directed, random)
				got := l.Locate(views)
				if len(got) != 1 || !names(f, got[0], g, directed) {
					wrong++
					t.Logf("%+v: named %+v", g, got)
				}
			}
			if wrong*20 > cases {
				t.Errorf("%d of %d gray faults named wrong", wrong, cases)
			}
		})
	}
}

// names reports whether a part is named, with few alternatives, and with its direction if the probes tell it.
func names(f *topo.Fabric, got Guilty, g gray, directed bool) bool {
	return (got.Part == g.part || slices.Contains(got.Alternatives, g.part)) && (!directed || got.Side == g.side || len(got.Alternatives) > 0) &&
		len(got.Alternatives) <= max(2, f.Spines) && got.Rate > 0.002 && got.Rate < 0.05
}

// drawGray draws a part and a direction. Planes share no hardware, so none is gray.
func drawGray(f *topo.Fabric, all []string, random *rand.Rand) gray {
	if random.IntN(5) == 0 {
		a, b := f.Groups()[0], f.Groups()[len(f.Groups())-1]
		return newPair(f, a, b, random.IntN(f.Planes))
	}
	for {
		name := all[random.IntN(len(all))]
		found, _ := f.Find(name)
		switch kindOf(f, name, found) {
		case plane:
		case leaf, spine, uplink:
			return newGray(f, name, "")
		default:
			return newGray(f, name, []string{FromServer, ToServer}[random.IntN(2)])
		}
	}
}

// TestNoFault names nothing at evenly distributed losses.
func TestNoFault(t *testing.T) {
	f := number(t, fabrics["two-tier"])
	l, sim := New(f), topo.Simulate(f)
	random := rand.New(rand.NewPCG(13, 0))
	for range gate.Count(t, gate.Models, 20, 1000) {
		views := fail(t, sim, f).views(false)
		probe(f, views, gray{}, 2e-3, 1000, false, random)
		if got := l.Locate(views); got != nil {
			t.Fatalf("named %+v", got)
		}
	}
}

// TestSilentLeaf names a leaf that drops all packets, by a part of the servers, and a gray half of a cable next to it.
func TestSilentLeaf(t *testing.T) {
	f := number(t, topo.Spec{Planes: 2, Leaves: 2, Spines: 2, Servers: 300})
	random := rand.New(rand.NewPCG(41, 0))
	silent, faint := newGray(f, "leaf1-0", ""), newGray(f, "server7/p0.0", FromServer)
	silent.rate = 1
	_, views := broken(t, f)
	probe(f, views, silent, 1e-4, 20_000, true, random)
	_, others := broken(t, f)
	probe(f, others, faint, 0, 20_000, true, random)
	n := 0
	for _, server := range f.Server {
		views[server].Lost = append(views[server].Lost, others[server].Lost...)
		n += len(views[server].Lost)
	}
	got := New(f).Locate(views)
	if len(got) != 2 || got[0].Part != silent.part || got[1].Part != faint.part || got[1].Side != FromServer || n <= maxLosses {
		t.Errorf("of %d losses named %+v", n, got)
	}
}

// large is the largest fabric: 2,048 servers with 8 GPUs, whose leaves have at most 1,024 sessions.
func large(planes, leaves, spines int) topo.Spec {
	return topo.Spec{Planes: planes, Servers: 2048, GPUs: 8, Leaves: leaves, Spines: spines}
}

// broken returns a large fabric with failures, without a simulation of its routes, and the ports of all its nodes.
func broken(t testing.TB, f *topo.Fabric, names ...string) (*truth, map[*topo.Node]*View) {
	x := newTruth(t, f, nil, names)
	views := map[*topo.Node]*View{}
	for _, n := range f.Nodes() {
		if !slices.Contains(names, n.Name) {
			views[n] = &View{Ports: x.ports(n)}
		}
	}
	return x, views
}

// TestLargeFabric names double and gray faults of 2,048 servers.
func TestLargeFabric(t *testing.T) {
	gate.Slow(t, gate.Models, "fabrics of 2,048 servers")
	for name, spec := range map[string]topo.Spec{"4 planes": large(4, 8, 8), "8 planes": large(8, 32, 16)} {
		t.Run(name, func(t *testing.T) {
			f := number(t, spec)
			l := New(f)
			random := rand.New(rand.NewPCG(17, 0))
			all := f.Single()
			hard, lossy := 0, 0
			for range 100 {
				x, views := broken(t, f, all[random.IntN(len(all))], all[random.IntN(len(all))])
				if got := l.Locate(views); !x.right(t, got) {
					hard++
					t.Logf("%v: named %v", x.failed, parts(got))
				}
			}
			for range 3 {
				g := drawGray(f, all, random)
				if g.pair[0] != nil {
					continue // each pair has ten probes
				}
				_, views := broken(t, f)
				probe(f, views, g, 1e-4, 20_000, true, random)
				if got := l.Locate(views); len(got) != 1 || !names(f, got[0], g, true) {
					lossy++
					t.Logf("%s %s: named %+v", g.part, g.side, got)
				}
			}
			if hard > 1 || lossy > 0 {
				t.Errorf("%d of 100 doubles, %d of 3 gray faults named wrong", hard, lossy)
			}
		})
	}
}

// truncate makes the view that of a daemon: no sub-ports, and no losses above a limit; then the probes of their planes
// whose results are not known do not count.
func (v *View) truncate(limit int) {
	full := len(v.Lost) > limit
	v.Lost = v.Lost[:min(len(v.Lost), limit)]
	probes, peers := map[int]float64{}, map[int]int{}
	for i := range v.Lost {
		v.Lost[i].Sub = 0
		probes[v.Lost[i].Plane] += v.Lost[i].Probes
		peers[v.Lost[i].Plane]++
	}
	for i := range v.Sent {
		s := &v.Sent[i]
		if first := s.Sub == 1; full && peers[s.Plane] > 0 && first {
			s.Probes, s.Peers = probes[s.Plane], peers[s.Plane]
		} else if full && peers[s.Plane] > 0 {
			s.Probes = 0
		}
		s.Sub = 0
	}
}

// BenchmarkLocate measures a decision for 2,048 servers, 8 planes, with two failed parts, with a lossy one, and with a
// leaf that drops all packets.
func BenchmarkLocate(b *testing.B) {
	f := number(b, large(8, 32, 16))
	l := New(f)
	b.Run("hard", func(b *testing.B) {
		_, views := broken(b, f, "leaf3-1", "server7/p1.0")
		for b.Loop() {
			l.Locate(views)
		}
	})
	b.Run("gray", func(b *testing.B) {
		_, views := broken(b, f)
		probe(f, views, newGray(f, "server7/p1.0", FromServer), 1e-4, 2000, true, rand.New(rand.NewPCG(1, 1)))
		for b.Loop() {
			l.Locate(views)
		}
	})
	b.Run("silent", func(b *testing.B) {
		_, views := broken(b, f)
		g := newGray(f, "leaf1-3", "")
		g.rate = 1
		probe(f, views, g, 1e-5, 2000, false, rand.New(rand.NewPCG(1, 1)))
		for _, v := range views {
			v.truncate(256) // as many as a daemon reports
		}
		for b.Loop() {
			if got := l.Locate(views); len(got) != 1 || got[0].Part != g.part {
				b.Fatalf("named %+v", got)
			}
		}
	})
}
