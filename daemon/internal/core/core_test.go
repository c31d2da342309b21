package core

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/fared/fared/daemon/internal/coretest"
	"github.com/fared/fared/fare"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/wecmp"
)

// weightsOf returns a destination's weights; nil when it is unreachable.
func weightsOf(c *Core, d netip.Prefix) []uint32 {
	if v, ok := coretest.VectorFrom(c, 0, d); ok {
		return slices.Clone(v.Weights)
	}
	return nil
}

// TestFiguresOfTheDraft checks the table of draft-xu-rtgwg-fare-in-sun-02, Section 1, at the core: UPDATEs and links
// are the input, weights the output.
func TestFiguresOfTheDraft(t *testing.T) {
	s := shape{Planes: 4, SubPorts: 2}
	full := func(int, int) fare.Bandwidth { return 800e9 }
	receiver := func(b fare.Bandwidth) []Event {
		var out []Event
		for i := 4; i < 6; i++ {
			out = append(out, Fabric{fare.RouteUpdate{Session: i, Generation: 1, Prefix: destination(0), Attrs: attributes(b, s.PeerAS(i), 65001)}})
		}
		return out
	}
	withdraw := []Event{
		Fabric{fare.RouteWithdraw{Session: 4, Generation: 1, Prefix: destination(0)}},
		Fabric{fare.RouteWithdraw{Session: 5, Generation: 1, Prefix: destination(0)}},
	}
	leafDown := []Event{Fabric{fare.SessionDown{Session: 4, Generation: 1}}, Fabric{fare.SessionDown{Session: 5, Generation: 1}}}
	leafBack := []Event{
		Fabric{fare.SessionUp{Session: 4, Generation: 2, Node: leafNode(2), PeerAS: s.PeerAS(4)}},
		Fabric{fare.SessionUp{Session: 5, Generation: 2, Node: leafNode(2), PeerAS: s.PeerAS(5)}},
		Fabric{fare.RouteUpdate{Session: 4, Generation: 2, Prefix: destination(0), Attrs: attributes(800e9, s.PeerAS(4), 65001)}},
		Fabric{fare.RouteUpdate{Session: 5, Generation: 2, Prefix: destination(0), Attrs: attributes(800e9, s.PeerAS(5), 65001)}},
	}
	cases := []struct {
		name   string
		events [][]Event
		want   []string
	}{
		{"none", nil, nil},
		{"sub-cable at the receiver", [][]Event{receiver(400e9), receiver(800e9)}, []string{"[2 2 1 2]", "[1 1 1 1]"}},
		{"sub-cable at both ends", [][]Event{receiver(400e9), {down(4)}, {up(4, 0)}, receiver(800e9)}, []string{"[2 2 1 2]", "[2 2 1 2]", "[2 2 1 2]", "[1 1 1 1]"}},
		{"port at the receiver", [][]Event{withdraw, receiver(800e9)}, []string{"[1 1 0 1]", "[1 1 1 1]"}},
		{"port at the sender", [][]Event{{down(4), down(5)}, {up(4, 0), up(5, 0)}}, []string{"[1 1 0 1]", "[1 1 1 1]"}},
		{"leaf", [][]Event{leafDown, leafBack}, []string{"[1 1 0 1]", "[1 1 1 1]"}},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			c := coreOf(t, s.Text())
			bring(t, s, c, 1, full)
			c.Updates()
			if got := fmt.Sprint(weightsOf(c, destination(0))); got != "[1 1 1 1]" {
				t.Fatalf("before: %s", got)
			}
			for i, events := range tc.events {
				do(t, c, events...)
				for _, u := range c.Updates() {
					if u.SlotsMoved != 0 {
						t.Errorf("step %d: %d slots moved", i, u.SlotsMoved)
					}
				}
				if got := fmt.Sprint(weightsOf(c, destination(0))); got != tc.want[i] {
					t.Errorf("step %d: weights %s, want %s", i, got, tc.want[i])
				}
			}
		})
	}
}

// TestLostSubPortCostsOneOperation checks that the cost of a failed sub-port depends on the number of distinct vectors,
// not of destinations.
func TestLostSubPortCostsOneOperation(t *testing.T) {
	s := shape{Planes: 4, SubPorts: 2}
	values := []fare.Bandwidth{800e9, 400e9, 200e9}
	for _, n := range []int{1, 1024, 16384} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			c := coreOf(t, s.Text())
			bring(t, s, c, n, func(d, sub int) fare.Bandwidth {
				if sub < 2 {
					return values[d%3]
				}
				return 800e9
			})
			want := min(len(values), n) // one vector per value, but at most one per destination
			c.SubPortOps(nil)
			c.Updates()
			for _, ev := range []struct {
				name   string
				event  Event
				op     SubPortOp
				groups int
			}{
				{"link down", down(1), SubPortOp{1, false}, want},
				{"session down", Fabric{fare.SessionDown{Session: 2, Generation: 1}}, SubPortOp{2, false}, want},
				{"link up again", up(1, 0), SubPortOp{1, true}, want},
			} {
				do(t, c, ev.event)
				if ops := c.SubPortOps(nil); len(ops) != 1 || ops[0] != ev.op {
					t.Errorf("%s: sub-port operations %v, want exactly %v", ev.name, ops, ev.op)
				}
				updates := c.Updates()
				vectors := map[uint32]bool{}
				for _, u := range updates {
					if u.Kind != wecmp.VectorSet || vectors[u.Vector] {
						t.Fatalf("%s: update %+v, only one for each vector is wanted", ev.name, u)
					}
					vectors[u.Vector] = true
				}
				if len(vectors) != ev.groups {
					t.Errorf("%s: %d vectors set, want %d", ev.name, len(vectors), ev.groups)
				}
			}
			if ops := c.SubPortOps(nil); len(ops) != 0 {
				t.Errorf("nothing happened, yet %v", ops)
			}
		})
	}
}

// TestSubPortOpsBeforeConvergence checks that a sub-port that has not been up is not declared down until the start is
// complete.
func TestSubPortOpsBeforeConvergence(t *testing.T) {
	s := shape{Planes: 1, SubPorts: 3}
	c := coreOf(t, s.Text())
	do(t, c, up(0, 0), Fabric{fare.SessionUp{Session: 0, Generation: 1, Node: leafNode(0), PeerAS: s.PeerAS(0)}}, up(1, 0))
	if ops := c.SubPortOps(nil); !slices.Equal(ops, []SubPortOp{{0, true}}) {
		t.Errorf("at the start %v, want sub-port 0 up alone", ops)
	}
	do(t, c, Fabric{fare.SessionDown{Session: 0, Generation: 1}})
	if ops := c.SubPortOps(nil); !slices.Equal(ops, []SubPortOp{{0, false}}) {
		t.Errorf("a sub-port that was lost: %v, want it down at once", ops)
	}
	do(t, c, StartDeadline{})
	if ops := c.SubPortOps(nil); !slices.Equal(ops, []SubPortOp{{1, false}, {2, false}}) {
		t.Errorf("after the deadline %v, want the others down", ops)
	}
}

// TestConvergence checks that the start ends with the last End-of-RIB of the sessions that can come up, one for each
// family.
func TestConvergence(t *testing.T) {
	for _, families := range [][]bool{{false}, {true}, {false, true}, {true, false}} { // IPv6, in the order in which End-of-RIB arrives
		names := make([]string, len(families))
		for i, ipv6 := range families {
			names[i] = map[bool]string{false: "ipv4", true: "ipv6"}[ipv6]
		}
		s := shape{Planes: 3, SubPorts: 1, Session: "families: [" + strings.Join(names, ", ") + "], ", Loopbacks: []string{"10.255.0.1/32", "\"fd00::1/128\""}}.Defaults()
		if len(families) == 1 {
			s.Loopbacks = s.Loopbacks[:1]
			if families[0] {
				s.Loopbacks = []string{"\"fd00::1/128\""}
			}
		}
		text := s.Text()
		for i := range 3 { // sessions over IPv6 addresses carry both families
			text = strings.NewReplacer(s.There(i).String(), fmt.Sprintf("\"fd99::%d:1\"", i), s.Here(i).String(), fmt.Sprintf("\"fd99::%d:2\"", i)).Replace(text)
		}
		c, err := New(coretest.Parse(t, strings.Replace(text, "accept: [", "accept: [\"fd00::/16\", ", 1)))
		if err != nil {
			t.Fatal(err)
		}
		for i := range 3 {
			do(t, c, up(i, 0), Fabric{fare.SessionUp{Session: i, Generation: 1, Node: leafNode(i), PeerAS: s.PeerAS(i)}})
		}
		end := func(session int, generation uint64, ipv6 bool) {
			t.Helper()
			if c.Converged() {
				t.Fatalf("%v: converged before session %d ended", names, session)
			}
			do(t, c, EndOfRIB{Session: session, Generation: generation, IPv6: ipv6})
		}
		for _, ipv6 := range families {
			end(0, 1, ipv6)
			end(1, 7, ipv6) // another generation
			end(2, 1, ipv6)
		}
		for _, ipv6 := range families {
			end(1, 1, ipv6)
		}
		if !c.Converged() {
			t.Errorf("%v: not converged when every family of all sessions has ended", names)
		}
	}
	s := shape{Planes: 2, SubPorts: 1}
	c := coreOf(t, s.Text())
	for i := range 2 {
		do(t, c, up(i, 0), Fabric{fare.SessionUp{Session: i, Generation: 1, Node: leafNode(i), PeerAS: s.PeerAS(i)}})
	}
	do(t, c, EndOfRIB{Session: 0, Generation: 1})
	if c.Converged() {
		t.Error("converged with one End-of-RIB of two")
	}
	do(t, c, down(1))
	if !c.Converged() {
		t.Error("the second one's link is down, it cannot come")
	}
}

// player produces random events for a configuration and records the resulting facts.
type player struct {
	s        shape
	r        *rand.Rand
	sessions int
	links    []bool
	speeds   []fare.Bandwidth
	up       []fare.SessionUp // Generation 0 means down
	gen      []uint64
	node     []netip.Addr // the last neighbor
	routes   []map[netip.Prefix]*fare.Attributes
	drains   map[DrainTarget]DrainStage
	text     string
	config   []fare.Bandwidth // speeds in the configuration
	policy   string
	avoided  map[Avoid]bool
}

func newPlayer(s shape, seed uint64) *player {
	n := s.Planes * s.SubPorts
	p := &player{s: s, r: rand.New(rand.NewPCG(seed, 1)), sessions: n, drains: map[DrainTarget]DrainStage{}, avoided: map[Avoid]bool{}}
	p.links, p.speeds, p.up, p.gen = make([]bool, n), make([]fare.Bandwidth, n), make([]fare.SessionUp, n), make([]uint64, n)
	p.node, p.config = make([]netip.Addr, n), make([]fare.Bandwidth, n)
	for range n {
		p.routes = append(p.routes, map[netip.Prefix]*fare.Attributes{})
	}
	return p
}

// nodes returns the two possible leaves of a session.
func (p *player) nodes(session int) [2]netip.Addr {
	return [2]netip.Addr{leafNode(session / p.s.SubPorts), leafNode(100 + session/p.s.SubPorts)}
}

// prologue makes every node known, so that every drain can be requested.
func (p *player) prologue() []Event {
	var out []Event
	for i := range p.sessions {
		for k, node := range p.nodes(i) {
			out = append(out, Fabric{fare.SessionUp{Session: i, Generation: uint64(k + 1), Node: node, PeerAS: p.s.PeerAS(i)}})
		}
		out = append(out, Fabric{fare.SessionDown{Session: i, Generation: 2}})
		p.gen[i], p.node[i] = 2, p.nodes(i)[1]
	}
	return out
}

func (p *player) reload() Event {
	n := p.r.IntN(p.sessions)
	if speed := []fare.Bandwidth{100e9, 200e9, 400e9}[p.r.IntN(3)]; p.config[n] != speed {
		p.config[n], p.speeds[n] = speed, speed
	}
	p.policy = fmt.Sprintf("path_bandwidth: {missing: %s, all_missing: %s, all_zero: %s, advertise: %s}\nproof: {unproved: %s}\n",
		[]string{"equal", "local", "skip"}[p.r.IntN(3)], []string{"local", "equal"}[p.r.IntN(2)], []string{"equal", "unreachable"}[p.r.IntN(2)], []string{"sub-port", "node"}[p.r.IntN(2)], []string{"avoid", "report"}[p.r.IntN(3)/2])
	p.text = p.yaml()
	return Reload{Config: p.text}
}

func (p *player) yaml() string {
	s := p.s
	s.Extra += p.policy
	text := s.Text()
	for i, speed := range p.config {
		if speed != 0 {
			device := fmt.Sprintf("- device: %s\n", s.Device(i))
			text = strings.Replace(text, device, device+"        speed: "+speed.String()+"\n", 1)
		}
	}
	return text
}

func (p *player) target() DrainTarget {
	i := p.r.IntN(p.sessions)
	switch p.r.IntN(3) {
	case 0:
		return DrainTarget{Plane: fmt.Sprintf("p%d", i/p.s.SubPorts)}
	case 1:
		return DrainTarget{Leaf: p.node[i]}
	default:
		return DrainTarget{SubPort: p.s.Device(i)}
	}
}

func (p *player) attrs(session int) *fare.Attributes {
	path := []uint32{p.s.PeerAS(session), uint32(65001 + p.r.IntN(2))}
	if p.r.IntN(3) == 0 {
		path = path[:1]
	} else if p.r.IntN(3) == 0 {
		path = append(path, p.s.PeerAS(p.r.IntN(p.sessions)))
	}
	a := &fare.Attributes{ASPath: path}
	for range []int{0, 1, 1, 1, 2}[p.r.IntN(5)] {
		b := []fare.Bandwidth{0, 100e9, 200e9, 400e9, 800e9}[p.r.IntN(5)]
		a.Communities = append(a.Communities, fare.Codec{}.Encode(b, netip.Addr{}))
	}
	return a
}

// next returns a random event and updates the facts.
func (p *player) next() Event {
	i := p.r.IntN(p.sessions)
	session := p.up[i]
	switch p.r.IntN(21) {
	case 0, 1:
		p.links[i] = !p.links[i]
		speed := []fare.Bandwidth{0, 100e9, 200e9, 400e9}[p.r.IntN(4)]
		if speed != 0 {
			p.speeds[i] = speed
		}
		return Fabric{fare.LinkState{SubPort: i, Up: p.links[i], Speed: speed}}
	case 2, 3, 4:
		p.gen[i] += uint64(1 + p.r.IntN(3))
		p.up[i] = fare.SessionUp{Session: i, Generation: p.gen[i], Node: p.nodes(i)[p.r.IntN(8)/7], PeerAS: p.s.PeerAS(i)}
		p.node[i] = p.up[i].Node
		clear(p.routes[i])
		return Fabric{p.up[i]}
	case 5:
		generation := p.gen[i] - uint64(p.r.IntN(2)) // an event of the previous generation must not count
		if generation == session.Generation {
			p.up[i] = fare.SessionUp{}
			clear(p.routes[i])
		}
		return Fabric{fare.SessionDown{Session: i, Generation: generation}}
	case 6:
		return EndOfRIB{Session: i, Generation: p.gen[i]}
	case 7:
		return p.drainEvent()
	case 8:
		for t, stage := range p.drains { // the order does not matter: of several existing drains, the lowest
			_ = stage
			return p.drainStep(p.lowest(t))
		}
		return p.drainEvent()
	case 9:
		if p.r.IntN(4) == 0 {
			return p.reload()
		}
		return EndOfRIB{Session: i, Generation: p.gen[i], IPv6: true}
	case 20:
		ev := Avoid{Destination: destination(p.r.IntN(4)), Plane: p.r.IntN(p.s.Planes), On: true}
		p.avoided[ev] = p.r.IntN(3) > 0
		ev.On = p.avoided[ev]
		return ev
	case 10, 11:
		d := destination(p.r.IntN(4))
		delete(p.routes[i], d)
		return Fabric{fare.RouteWithdraw{Session: i, Generation: p.gen[i], Prefix: d}}
	default:
		d, attrs := destination(p.r.IntN(4)), p.attrs(i)
		generation := p.gen[i]
		if p.r.IntN(8) == 0 {
			generation--
		}
		if session.Generation != 0 && generation == session.Generation {
			p.routes[i][d] = attrs
		}
		return Fabric{fare.RouteUpdate{Session: i, Generation: generation, Prefix: d, Attrs: attrs}}
	}
}

func (p *player) lowest(t DrainTarget) DrainTarget {
	for other := range p.drains {
		if other.String() < t.String() {
			t = other
		}
	}
	return t
}

func (p *player) drainEvent() Event {
	t, on := p.target(), p.r.IntN(2) == 0
	stage, found := p.drains[t]
	if on && (!found || stage == Undraining) {
		p.drains[t] = DrainShares
	} else if !on && found {
		p.drains[t] = Undraining
	}
	return DrainRequest{t, on}
}

func (p *player) drainStep(t DrainTarget) Event {
	confirmed := p.r.IntN(2) == 0
	switch stage := p.drains[t]; {
	case stage == DrainShares && confirmed:
		p.drains[t] = DrainRoutes
	case stage == DrainRoutes && !confirmed:
		p.drains[t] = Drained
	case stage == Undraining && !confirmed:
		delete(p.drains, t)
	}
	return DrainStep{t, confirmed}
}

// facts returns the events that bring a fresh core directly to the final state of the sequence.
func (p *player) facts() []Event {
	var out []Event
	for k := range 2 { // a leaf can be drained while a session to it is known
		for i := range p.sessions {
			out = append(out, Fabric{fare.SessionUp{Session: i, Generation: uint64(k + 1), Node: p.nodes(i)[k], PeerAS: p.s.PeerAS(i)}})
		}
		for t, stage := range p.drains { // drains are independent of each other
			second := !t.Leaf.IsValid() || t.Leaf.As4()[3] > 100 // see nodes
			if second == (k == 1) {
				out = append(out, drainTo(t, stage)...)
			}
		}
	}
	for i := range p.sessions {
		out = append(out, Fabric{fare.SessionDown{Session: i, Generation: 2}})
	}
	if p.text != "" {
		out = append(out, Reload{Config: p.text})
	}
	for i := range p.sessions {
		out = append(out, Fabric{fare.LinkState{SubPort: i, Up: p.links[i], Speed: p.speeds[i]}})
	}
	for ev, on := range p.avoided {
		if on {
			out = append(out, ev)
		}
	}
	for i := range p.sessions {
		if p.up[i].Generation == 0 {
			continue
		}
		out = append(out, Fabric{p.up[i]})
		for n := range 4 {
			if attrs, ok := p.routes[i][destination(n)]; ok {
				out = append(out, Fabric{fare.RouteUpdate{Session: i, Generation: p.up[i].Generation, Prefix: destination(n), Attrs: attrs}})
			}
		}
	}
	return out
}

// drainTo returns the events of a drain that has reached stage.
func drainTo(t DrainTarget, stage DrainStage) []Event {
	out := []Event{DrainRequest{Target: t, On: true}}
	switch stage {
	case Drained:
		out = append(out, DrainStep{Target: t, Confirmed: true}, DrainStep{Target: t, Confirmed: false})
	case DrainRoutes:
		out = append(out, DrainStep{Target: t, Confirmed: true})
	case Undraining:
		out = append(out, DrainRequest{Target: t, On: false})
	}
	return out
}

// outcome returns all outputs of a core, without the numbers of groups and vectors.
func outcome(c *Core) string {
	var b strings.Builder
	for i := range c.subPorts {
		p := &c.subPorts[i]
		fmt.Fprintf(&b, "sub-port %d %v %s\n", i, p.link && p.established > 0, p.speed)
	}
	c.Drains(func(t DrainTarget, s DrainStage) { fmt.Fprintf(&b, "drain %s %s\n", t, s) })
	for prefix := range c.sources[0].table.Destinations {
		if bandwidth, path, ok := c.sources[0].table.Readvertise(prefix); ok {
			fmt.Fprintf(&b, "%s readvertise %s %v\n", prefix, bandwidth, path)
		}
		if c.sources[0].engine == nil {
			continue
		}
		id, _ := c.sources[0].engine.Destination(prefix)
		if v, ok := c.sources[0].engine.Vector(id); ok && v.Reachable {
			fmt.Fprintf(&b, "%s %v %v %v %v\n", prefix, v.Weights, v.Bandwidths, v.SubPortWeights, v.Slots)
		}
	}
	c.advertDirty = true
	c.Advertise(func(session int, routes []Route) {
		// The leaf of a session that is not established, and so whether a drain covers the session, follows from
		// history only.
		if c.sessions[session].up {
			fmt.Fprintf(&b, "session %d %v\n", session, routes)
		}
	})
	return b.String()
}

// TestRandomEventsAgainstFacts checks that, wherever a random sequence of events ends, a fresh core that receives only
// the final facts is in the same state, and that the last applied outputs equal the wanted ones. On the way, a server
// never advertises anything except its own loopbacks (F2), and a leaf never passes a route to an AS that is in its
// path.
func TestRandomEventsAgainstFacts(t *testing.T) {
	shapes := []shape{
		{Planes: 2, SubPorts: 2, NoSpeed: true},
		{Planes: 3, SubPorts: 1, NoSpeed: true},
		{Planes: 1, SubPorts: 2, NoSpeed: true, Extra: "weights: {mode: per-packet}\n"},
		{Planes: 1, SubPorts: 4, NoSpeed: true, Leaf: true},
		{Planes: 2, SubPorts: 2, NoSpeed: true, Leaf: true},
		{Planes: 2, SubPorts: 2, NoSpeed: true, Leaf: true, Extra: coretest.LeafDataplane},
		{Planes: 2, SubPorts: 3, NoSpeed: true, Leaf: true, Uplinks: 2},
	}
	sequences := gate.Count(t, gate.Models, 700, 4000)
	for n := range sequences {
		s, seed := shapes[n%len(shapes)], uint64(n)
		p := newPlayer(s, seed)
		c := coreOf(t, s.Text())
		own := c.cfg.Loopbacks
		handed := map[int][]Route{}
		do(t, c, p.prologue()...)
		for range 5 + p.r.IntN(60) {
			do(t, c, p.next())
			if p.r.IntN(4) == 0 {
				c.SubPortOps(nil)
				c.Updates()
			}
			c.Advertise(func(session int, routes []Route) {
				handed[session] = routes
				for _, r := range routes {
					if !s.Leaf && (!slices.Contains(own, r.Prefix) || len(r.ASPath) != 0) {
						t.Fatalf("seed %d: session %d: a server advertises %v", seed, session, r)
					}
					if s.Leaf && slices.Contains(r.ASPath, c.sessions[session].peerAS) {
						t.Fatalf("seed %d: session %d: a leaf sends %v to AS %d", seed, session, r, c.sessions[session].peerAS)
					}
				}
			})
		}
		for i := range c.sessions {
			if want := c.wanted(i); c.sessions[i].up && !reflect.DeepEqual(handed[i], want) {
				t.Fatalf("seed %d: session %d advertises %v, wanted is %v", seed, i, handed[i], want)
			}
		}
		fresh := coreOf(t, s.Text())
		do(t, fresh, p.facts()...)
		if got, want := outcome(c), outcome(fresh); got != want {
			t.Fatalf("seed %d: after the sequence\n%s\na fresh core with the final facts\n%s", seed, got, want)
		}
	}
}

// TestSameEventsSameBytes checks that no map order, time or chance affects the core's decisions.
func TestSameEventsSameBytes(t *testing.T) {
	for _, policy := range []string{"reweight", "remap"} {
		s := shape{Planes: 3, SubPorts: 2, NoSpeed: true, Extra: "weights: {policy: " + policy + "}\n"}
		for seed := range uint64(50) {
			run := func() string {
				p, c := newPlayer(s, seed), coreOf(t, s.Text())
				var b strings.Builder
				do(t, c, p.prologue()...)
				for range 80 {
					do(t, c, p.next())
					fmt.Fprintln(&b, c.SubPortOps(nil), c.Updates())
					c.Advertise(func(session int, routes []Route) { fmt.Fprintln(&b, session, routes) })
				}
				return b.String() + coretest.Describe(c)
			}
			if a, b := run(), run(); a != b {
				t.Fatalf("%s, seed %d: two runs of the same events\n%s\n%s", policy, seed, a, b)
			}
		}
	}
}

// TestDrainStagesAtTheCore checks the effect of each stage on shares and routes, in order. Only the established
// connection completes a drain, and only by carrying the routes of the last stage.
func TestDrainStagesAtTheCore(t *testing.T) {
	s := shape{Planes: 2, SubPorts: 1}
	target := DrainTarget{Plane: "p1"}
	c := coreOf(t, s.Text())
	bring(t, s, c, 1, func(int, int) fare.Bandwidth { return 400e9 })
	advertised := func() string {
		var out string
		c.advertDirty = true
		c.Advertise(func(session int, routes []Route) {
			if session != 1 {
				return
			}
			out = "none"
			for _, r := range routes {
				a, _ := fare.Codec{}.Judge(r.Communities, nil)
				out = a.String()
			}
		})
		return out
	}
	steps := []struct {
		name    string
		event   Event
		weights string
		route   string
		stage   string
	}{
		{"asked", DrainRequest{target, true}, "[1 0]", "400G", "shares"},
		{"asked again", DrainRequest{target, true}, "[1 0]", "400G", "shares"},
		{"delay passed, not confirmed", DrainStep{target, false}, "[1 0]", "400G", "shares"},
		{"confirmed", DrainStep{target, true}, "[1 0]", "0", "routes"},
		{"confirmed again", DrainStep{target, true}, "[1 0]", "0", "routes"},
		{"delay passed", DrainStep{target, false}, "[1 0]", "none", "withdrawing"},
		{"zero bandwidth carried late", RoutesWritten{Session: 1, Generation: 1, Mark: 1}, "[1 0]", "none", "withdrawing"},
		{"carried by an earlier connection", RoutesWritten{Session: 1, Generation: 0, Mark: 2}, "[1 0]", "none", "withdrawing"},
		{"withdrawals carried", RoutesWritten{Session: 1, Generation: 1, Mark: 2}, "[1 0]", "none", "drained"},
		{"session lost", Fabric{fare.SessionDown{Session: 1, Generation: 1}}, "[1 0]", "none", "drained"},
		{"session back", Fabric{fare.SessionUp{Session: 1, Generation: 2, Node: leafNode(1), PeerAS: s.PeerAS(1)}}, "[1 0]", "none", "withdrawing"},
		{"session lost again", Fabric{fare.SessionDown{Session: 1, Generation: 2}}, "[1 0]", "none", "drained"},
		{"session back again", Fabric{fare.SessionUp{Session: 1, Generation: 3, Node: leafNode(1), PeerAS: s.PeerAS(1)}}, "[1 0]", "none", "withdrawing"},
		{"it carries nothing", RoutesWritten{Session: 1, Generation: 3, Mark: 2}, "[1 0]", "none", "drained"},
		{"back", DrainRequest{target, false}, "[1 0]", "400G", "undraining"},
		{"back again", DrainRequest{target, false}, "[1 0]", "400G", "undraining"},
		{"a route of the leaf", Fabric{fare.RouteUpdate{Session: 1, Generation: 3, Prefix: destination(0), Attrs: attributes(400e9, s.PeerAS(1), 65001)}}, "[1 0]", "400G", "undraining"},
		{"delay passed", DrainStep{target, false}, "[1 1]", "400G", "none"},
		{"back from nothing", DrainRequest{target, false}, "[1 1]", "400G", "none"},
	}
	for _, st := range steps {
		do(t, c, st.event)
		stage := "none"
		c.Drains(func(_ DrainTarget, s DrainStage) { stage = s.String() })
		if w, r := fmt.Sprint(weightsOf(c, destination(0))), advertised(); w != st.weights || r != st.route || stage != st.stage {
			t.Fatalf("%s: weights %s, route %s, stage %s; want %s, %s, %s", st.name, w, r, stage, st.weights, st.route, st.stage)
		}
	}
}

// TestDrainRefusesWhatIsNotThere checks that the error for an unknown target lists the existing ones.
func TestDrainRefusesWhatIsNotThere(t *testing.T) {
	c := coreOf(t, shape{Planes: 2, SubPorts: 1}.Text())
	for target, want := range map[DrainTarget]string{
		{Plane: "p9"}:                            `no plane "p9": the planes are p0, p1`,
		{SubPort: "eth9"}:                        `no sub-port "eth9": the sub-ports are p0.0, p1.0`,
		{Leaf: netip.MustParseAddr("192.0.2.1")}: "no leaf 192.0.2.1: no session has been established yet, so no leaf is known",
		{}:                                       "the drain has no target: name a plane, a leaf or a sub-port",
	} {
		if err := c.Step(DrainRequest{target, true}); err == nil || err.Error() != want {
			t.Errorf("%v: %v, want %s", target, err, want)
		}
	}
	do(t, c, Fabric{fare.SessionUp{Session: 0, Generation: 1, Node: leafNode(0), PeerAS: 65100}})
	if err := c.Step(DrainRequest{DrainTarget{Leaf: leafNode(9)}, true}); err == nil || !strings.Contains(err.Error(), "the known leaves are 10.1.0.1") {
		t.Errorf("an unknown leaf: %v", err)
	}
}
