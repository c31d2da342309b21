package fare

import (
	"bytes"
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
)

// twin is the table done again without any cleverness: it keeps what each
// session said in maps and works out one destination from scratch, in exact
// fractions.
type twin struct {
	config   Config
	up       map[int]SessionUp
	last     map[int]uint64
	routes   map[int]map[netip.Prefix]*Attributes
	links    map[int]LinkState
	drainedP map[int]bool
	drainedS map[int]bool
	drainedN map[netip.Addr]bool
}

func newTwin(c Config) *twin {
	w := &twin{config: c, up: map[int]SessionUp{}, last: map[int]uint64{}, routes: map[int]map[netip.Prefix]*Attributes{},
		links: map[int]LinkState{}, drainedP: map[int]bool{}, drainedS: map[int]bool{}, drainedN: map[netip.Addr]bool{}}
	for i, sp := range c.SubPorts {
		w.links[i] = LinkState{SubPort: i, Speed: sp.Speed}
	}
	return w
}

func (w *twin) is(session int, generation uint64) bool {
	up, ok := w.up[session]
	return ok && up.Generation == generation
}

func (w *twin) step(e Event) {
	switch e := e.(type) {
	case SessionUp:
		if e.Generation > w.last[e.Session] {
			w.up[e.Session], w.last[e.Session], w.routes[e.Session] = e, e.Generation, map[netip.Prefix]*Attributes{}
		}
	case SessionDown:
		if w.is(e.Session, e.Generation) {
			delete(w.up, e.Session)
			delete(w.routes, e.Session)
		}
	case RouteUpdate:
		if w.is(e.Session, e.Generation) {
			if e.Attrs == nil {
				delete(w.routes[e.Session], e.Prefix)
			} else {
				w.routes[e.Session][e.Prefix] = e.Attrs
			}
		}
	case RouteWithdraw:
		if w.is(e.Session, e.Generation) {
			delete(w.routes[e.Session], e.Prefix)
		}
	case LinkState:
		if e.Speed == 0 {
			e.Speed = w.links[e.SubPort].Speed
		}
		w.links[e.SubPort] = e
	case Drain:
		switch e.Scope {
		case DrainPlane:
			w.drainedP[e.Index] = e.On
		case DrainSubPort:
			w.drainedS[e.Index] = e.On
		case DrainNode:
			w.drainedN[e.Node] = e.On
		}
	case PolicyChange:
		w.config.Missing, w.config.AllZero = e.Missing, e.AllZero
	}
}

type twinPath struct {
	session, subPort, plane int
	speed                   *big.Rat
	value                   *big.Rat // nil: none
	own                     bool
	node                    netip.Addr
	path                    []uint32
}

type twinView struct {
	exists, reachable bool
	rule              Rule
	bandwidth         []*big.Rat
	capacity          []*big.Rat
	subPorts          []map[int]*big.Rat // parts of the plane, summing to 1
	total             *big.Rat
	path              []uint32
}

func (w *twin) view(prefix netip.Prefix) twinView {
	v := twinView{total: new(big.Rat)}
	for range w.config.Planes {
		v.bandwidth, v.capacity = append(v.bandwidth, new(big.Rat)), append(v.capacity, new(big.Rat))
		v.subPorts = append(v.subPorts, map[int]*big.Rat{})
	}
	type key struct {
		plane int
		node  netip.Addr
	}
	nodes := map[key][]twinPath{}
	var usable []twinPath
	shortest := math.MaxInt
	for i, s := range w.config.Sessions {
		attrs := w.routes[i][prefix]
		up, isUp := w.up[i]
		if attrs == nil || !isUp {
			continue
		}
		v.exists = true
		link, plane := w.links[s.SubPort], w.config.SubPorts[s.SubPort].Plane
		if !link.Up || link.Speed == 0 || w.drainedP[plane] || w.drainedS[s.SubPort] || w.drainedN[up.Node] {
			continue
		}
		p := twinPath{session: i, subPort: s.SubPort, plane: plane, speed: rat(uint64(link.Speed)), node: up.Node, path: attrs.ASPath,
			own: len(attrs.ASPath) > 0 && !slices.ContainsFunc(attrs.ASPath, func(as uint32) bool { return as != up.PeerAS })}
		if a, _ := s.Codec.Judge(attrs.Communities, nil); a.Known {
			p.value = rat(uint64(a.Bandwidth))
		}
		usable, shortest = append(usable, p), min(shortest, len(p.path))
	}
	for _, p := range usable {
		if k := (key{p.plane, p.node}); w.config.Role == RoleServer || len(p.path) == shortest {
			nodes[k] = append(nodes[k], p)
		}
	}

	type node struct {
		plane   int
		b       *big.Rat
		known   bool
		amounts map[int]*big.Rat
		paths   []twinPath
	}
	var all []node
	missing, positive := 0, 0
	for k, paths := range nodes {
		n := node{plane: k.plane, amounts: map[int]*big.Rat{}, paths: paths, b: new(big.Rat)}
		own, local := true, new(big.Rat)
		var value *big.Rat
		speeds, values := map[int]*big.Rat{}, map[int]*big.Rat{}
		for _, p := range paths {
			own = own && p.own
			speeds[p.subPort] = p.speed
			if p.value != nil {
				if values[p.subPort] == nil || p.value.Cmp(values[p.subPort]) < 0 {
					values[p.subPort] = p.value
				}
				if value == nil || p.value.Cmp(value) < 0 {
					value = p.value
				}
			}
		}
		for _, s := range speeds {
			local.Add(local, s)
		}
		n.known = value != nil
		if own {
			for sp, s := range speeds {
				n.amounts[sp] = lower(s, values[sp])
				n.b.Add(n.b, n.amounts[sp])
			}
		} else {
			n.b = lower(local, value)
		}
		if !own || n.b.Sign() == 0 {
			n.amounts = speeds
		}
		if !n.known {
			missing++
		} else if n.b.Sign() > 0 {
			positive++
		}
		all = append(all, n)
	}
	skip, equal := false, false
	switch known := len(all) - missing; {
	case len(all) == 0:
		v.rule = RuleNoPath
	case known == 0:
		v.rule = RuleLocalSpeed
	case missing > 0 && w.config.Missing == MissingEqual:
		v.rule, equal = RuleMissingEqual, true
	case missing > 0 && w.config.Missing == MissingLocal:
		v.rule = RuleMissingLocal
	default:
		skip = true
		switch {
		case positive == 0 && w.config.AllZero == ZeroEqual:
			v.rule, equal = RuleAllZeroEqual, true
		case positive == 0:
			v.rule = RuleAllZeroUnreachable
		case missing > 0:
			v.rule = RuleMissingSkip
		default:
			v.rule = RuleAdvertised
		}
	}
	shares := make([]*big.Rat, len(v.capacity))
	for i := range shares {
		shares[i] = new(big.Rat)
	}
	var best *twinPath
	for _, n := range all {
		if skip && !n.known || n.b.Sign() == 0 && v.rule != RuleAllZeroEqual {
			continue
		}
		v.reachable = true
		share := n.b
		if equal {
			share = rat(1)
		}
		v.bandwidth[n.plane].Add(v.bandwidth[n.plane], n.b)
		v.total.Add(v.total, n.b)
		shares[n.plane].Add(shares[n.plane], share)
		if v.capacity[n.plane].Add(v.capacity[n.plane], share); equal {
			v.capacity[n.plane] = rat(1)
		}
		sum := new(big.Rat)
		for _, a := range n.amounts {
			sum.Add(sum, a)
		}
		for sp, a := range n.amounts {
			if v.subPorts[n.plane][sp] == nil {
				v.subPorts[n.plane][sp] = new(big.Rat)
			}
			part := new(big.Rat).Quo(new(big.Rat).Mul(share, a), sum)
			v.subPorts[n.plane][sp].Add(v.subPorts[n.plane][sp], part)
		}
		for _, p := range n.paths {
			if n.amounts[p.subPort].Sign() == 0 {
				continue
			}
			if best == nil || len(p.path) < len(best.path) || len(p.path) == len(best.path) && (p.node.Less(best.node) ||
				p.node == best.node && (p.plane < best.plane || p.plane == best.plane && (p.subPort < best.subPort || p.subPort == best.subPort && p.session < best.session))) {
				best = &p
			}
		}
	}
	for i, parts := range v.subPorts {
		var list []*big.Rat
		for sp, part := range parts {
			if part.Sign() == 0 {
				delete(parts, sp)
			} else {
				list = append(list, part)
			}
		}
		if simpler(list) > 0 {
			shares[i].SetInt64(0)
			for _, part := range list {
				shares[i].Add(shares[i], part)
			}
		}
		for _, part := range list {
			part.Quo(part, shares[i])
		}
	}
	most := new(big.Rat)
	for _, c := range v.capacity {
		if c.Cmp(most) > 0 {
			most.Set(c)
		}
	}
	if top := simpler(v.capacity); top > 0 {
		unit := rat(new(big.Int).Div(most.Num(), big.NewInt(top)).Uint64())
		for _, c := range v.capacity {
			c.Mul(c, unit)
		}
	}
	if best != nil {
		v.path = best.path
	}
	return v
}

// simpler is simplify done again: numbers that are not in a ratio of whole ones up to 1000, but within half a millionth of
// one, become its smallest. It returns the greatest of these; 0: the numbers are what they were.
func simpler(numbers []*big.Rat) int64 {
	most, common, factor := new(big.Rat), new(big.Int), big.NewInt(1)
	for _, n := range numbers {
		if n.Cmp(most) > 0 {
			most = n
		}
		factor.Mul(factor, new(big.Int).Div(n.Denom(), new(big.Int).GCD(nil, nil, factor, n.Denom())))
	}
	whole := func(n *big.Rat) *big.Int { return new(big.Rat).Mul(n, new(big.Rat).SetInt(factor)).Num() }
	for _, n := range numbers {
		common.GCD(nil, nil, common, whole(n))
	}
	if most.Sign() == 0 || new(big.Int).Div(whole(most), common).Cmp(big.NewInt(1000)) <= 0 {
		return 0
	}
	for top := int64(1); top <= 1000; top++ {
		var found []int64
		for _, n := range numbers {
			ratio, _ := new(big.Rat).Quo(n, most).Float64()
			exact := ratio * float64(top)
			if math.Abs(exact-math.Round(exact)) > exact/2e6 {
				break
			}
			found = append(found, int64(math.Round(exact)))
		}
		if len(found) == len(numbers) {
			for i, n := range numbers {
				n.SetInt64(found[i])
			}
			return top
		}
	}
	return 0
}

func rat(n uint64) *big.Rat { return new(big.Rat).SetInt(new(big.Int).SetUint64(n)) }

func lower(a, b *big.Rat) *big.Rat {
	if b == nil || a.Cmp(b) <= 0 {
		return new(big.Rat).Set(a)
	}
	return new(big.Rat).Set(b)
}

// generator makes events that are mostly possible.
type generator struct {
	*rand.Rand
	config     Config
	generation uint64
	current    map[int]uint64
}

var (
	testNodes    = []netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("10.0.0.3")}
	testSpeeds   = []Bandwidth{100e9, 400e9, 800e9, 7e9, 399999999999}
	testValues   = []Bandwidth{0, 100e9, 400e9, 800e9, 3e9, 123456789000, 133333333333, 266666666667}
	testPrefixes = func() (p []netip.Prefix) {
		for i := range 12 {
			p = append(p, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 255, 0, byte(i)}), 32))
		}
		return p
	}()
)

func pick[T any](g *generator, from []T) T { return from[g.IntN(len(from))] }

func newGenerator(seed uint64) *generator {
	g := &generator{Rand: rand.New(rand.NewPCG(seed, 7)), current: map[int]uint64{}}
	c := Config{Role: Role(g.IntN(2)), Missing: MissingPolicy(g.IntN(3)), AllZero: ZeroPolicy(g.IntN(2))}
	for p := range 1 + g.IntN(3) {
		c.Planes = append(c.Planes, fmt.Sprint("p", p))
	}
	for i := range 1 + g.IntN(5) {
		c.SubPorts = append(c.SubPorts, SubPort{Device: fmt.Sprint("d", i), Plane: g.IntN(len(c.Planes)), Speed: pick(g, testSpeeds) * Bandwidth(g.IntN(2))})
	}
	for i := range 1 + g.IntN(8) {
		c.Sessions = append(c.Sessions, Session{Name: fmt.Sprint("s", i), SubPort: g.IntN(len(c.SubPorts)), Codec: Codec{Max: 800e9 * Bandwidth(g.IntN(2))}})
	}
	g.config = c
	return g
}

// start is everything up.
func (g *generator) start() []Event {
	var events []Event
	for i := range g.config.SubPorts {
		events = append(events, LinkState{SubPort: i, Up: true, Speed: pick(g, testSpeeds)})
	}
	for i := range g.config.Sessions {
		events = append(events, g.up(i))
	}
	return events
}

func (g *generator) up(session int) Event {
	g.generation++
	g.current[session] = g.generation
	return SessionUp{session, g.generation, pick(g, testNodes), 65000 + uint32(g.IntN(2))}
}

func (g *generator) event() Event {
	session := g.IntN(len(g.config.Sessions))
	generation := g.current[session] - uint64(g.IntN(20)/19)
	switch n := g.IntN(100); {
	case n < 60:
		attrs := &Attributes{ASPath: []uint32{65000 + uint32(g.IntN(2))}}
		for range g.IntN(3) {
			attrs.Communities = append(attrs.Communities, Codec{}.Encode(pick(g, testValues), netip.Addr{}))
		}
		for range g.IntN(3) {
			attrs.ASPath = append(attrs.ASPath, 65000+uint32(g.IntN(3)))
		}
		if g.IntN(50) == 0 {
			attrs = nil
		}
		return RouteUpdate{session, generation, pick(g, testPrefixes), attrs}
	case n < 72:
		return RouteWithdraw{session, generation, pick(g, testPrefixes)}
	case n < 80:
		return LinkState{g.IntN(len(g.config.SubPorts)), g.IntN(3) > 0, pick(g, testSpeeds) * Bandwidth(g.IntN(2))}
	case n < 85:
		return SessionDown{session, generation}
	case n < 90:
		return g.up(session)
	case n < 93:
		return EndOfRIB{session, generation}
	case n < 99:
		d := Drain{Scope: DrainScope(g.IntN(3)), On: g.IntN(3) == 0}
		switch d.Scope {
		case DrainPlane:
			d.Index = g.IntN(len(g.config.Planes))
		case DrainSubPort:
			d.Index = g.IntN(len(g.config.SubPorts))
		case DrainNode:
			d.Node = pick(g, testNodes)
		}
		return d
	}
	return PolicyChange{MissingPolicy(g.IntN(3)), ZeroPolicy(g.IntN(2))}
}

// follower carries out changes as a consumer would and finds those that
// cannot be.
type follower struct {
	groups       map[GroupID]GroupView
	destinations map[netip.Prefix]GroupID
	told         map[netip.Prefix]string
}

func (f *follower) apply(t *testing.T, table *Table, changes []Change) {
	t.Helper()
	for _, c := range changes {
		switch c.Kind {
		case GroupSet:
			f.groups[c.Group] = copyView(table.Group(c.Group))
		case GroupDelete:
			for d, g := range f.destinations {
				if g == c.Group {
					t.Fatalf("group %d deleted under %s", g, d)
				}
			}
			if _, ok := f.groups[c.Group]; !ok {
				t.Fatalf("group %d deleted twice", c.Group)
			}
			delete(f.groups, c.Group)
		case DestinationSet:
			if _, ok := f.groups[c.Group]; !ok {
				t.Fatalf("%s moved to group %d, which is not set", c.Destination, c.Group)
			}
			f.destinations[c.Destination] = c.Group
		case DestinationDelete:
			if _, ok := f.destinations[c.Destination]; !ok {
				t.Fatalf("%s deleted twice", c.Destination)
			}
			delete(f.destinations, c.Destination)
		case Readvertise:
			now := readvertisedText(table, c.Destination)
			if f.told[c.Destination] == now {
				t.Fatalf("%s readvertised without a change: %s", c.Destination, now)
			}
			f.told[c.Destination] = now
		}
	}
}

func readvertisedText(table *Table, prefix netip.Prefix) string {
	if b, path, ok := table.Readvertise(prefix); ok {
		return fmt.Sprint(b, path)
	}
	return ""
}

func copyView(v GroupView) GroupView {
	v.Planes = slices.Clone(v.Planes)
	for i := range v.Planes {
		v.Planes[i].SubPorts = slices.Clone(v.Planes[i].SubPorts)
	}
	return v
}

func TestIncrementalIsFullRecompute(t *testing.T) {
	sequences := 2000
	if testing.Short() || raceEnabled { // one goroutine: what the detector would find is elsewhere
		sequences = 300
	}
	base := rand.Uint64()
	for n := range sequences {
		seed := base + uint64(n)
		if !t.Run("", func(t *testing.T) { checkSequence(t, seed) }) {
			t.Fatalf("seed %d", seed)
		}
	}
}

func checkSequence(t *testing.T, seed uint64) {
	g := newGenerator(seed)
	table, err := NewTable(g.config)
	if err != nil {
		t.Fatal(err)
	}
	dumb := newTwin(g.config)
	f := &follower{map[GroupID]GroupView{}, map[netip.Prefix]GroupID{}, map[netip.Prefix]string{}}
	events := g.start()
	for range 60 {
		events = append(events, g.event())
	}
	for i, e := range events {
		f.apply(t, table, table.Step(e))
		dumb.step(e)
		for _, prefix := range testPrefixes {
			compare(t, table, f, dumb.view(prefix), prefix)
		}
		if i%8 == 0 || i == len(events)-1 {
			checkTotals(t, table, dumb, f)
		}
		if t.Failed() {
			t.Fatalf("seed %d, after event %d: %#v", seed, i, e)
		}
	}
}

func compare(t *testing.T, table *Table, f *follower, want twinView, prefix netip.Prefix) {
	t.Helper()
	id, known := f.destinations[prefix]
	if now, ok := table.Destination(prefix); ok != known || now != id {
		t.Fatalf("%s: told group %d %v, is %d %v", prefix, id, known, now, ok)
	}
	if !known {
		if want.exists {
			t.Fatalf("%s: unknown", prefix)
		}
		return
	}
	v := f.groups[id]
	if prefix != testPrefixes[0] { // explained once is enough
	} else if d := table.Describe(prefix); d.Group != id || d.Rule != v.Rule || d.Reachable != v.Reachable || len(d.String()) == 0 {
		t.Fatalf("%s: described as %v", prefix, d)
	}
	if v.Reachable != want.reachable || v.Rule != want.rule || v.Reachable == (v.Reason != ReasonUsed) {
		t.Fatalf("%s: %+v, want %v %v", prefix, v, want.reachable, want.rule)
	}
	for i, p := range v.Planes {
		if rat(uint64(p.Bandwidth)).Cmp(want.bandwidth[i]) != 0 || rat(p.Capacity).Cmp(want.capacity[i]) != 0 ||
			(p.Capacity == 0) != (p.Reason != ReasonUsed) || len(p.SubPorts) != len(want.subPorts[i]) {
			t.Fatalf("%s plane %d: %+v, want %v %v %v", prefix, i, p, want.bandwidth[i], want.capacity[i], want.subPorts[i])
		}
		var sum, common uint64
		for k, w := range p.SubPorts {
			sum += w.Weight
			common = gcd(common, w.Weight)
			if k > 0 && p.SubPorts[k-1].SubPort >= w.SubPort {
				t.Fatalf("%s plane %d: sub-ports out of order: %v", prefix, i, p.SubPorts)
			}
		}
		if common > 1 {
			t.Fatalf("%s plane %d: not in lowest terms: %v", prefix, i, p.SubPorts)
		}
		for _, w := range p.SubPorts {
			part := new(big.Rat).Quo(rat(w.Weight), rat(sum))
			if exact := want.subPorts[i][w.SubPort]; exact == nil || part.Cmp(exact) != 0 && (!nearly(part, exact) || fits(want.subPorts[i])) {
				t.Fatalf("%s plane %d: %v, want %v", prefix, i, p.SubPorts, want.subPorts[i])
			}
		}
	}
	if table.config.Role == RoleLeaf {
		told := ""
		if want.reachable {
			told = fmt.Sprint(Bandwidth(want.total.Num().Uint64()), want.path)
		}
		if f.told[prefix] != told || readvertisedText(table, prefix) != told {
			t.Fatalf("%s: readvertised %q, is %q, want %q", prefix, f.told[prefix], readvertisedText(table, prefix), told)
		}
	}
}

// nearly allows what splitNearly may be off, 2^-40 of the plane; only weights
// that do not fit 64 bits come to that.
func nearly(a, b *big.Rat) bool {
	diff := new(big.Rat).Sub(a, b)
	return diff.Abs(diff).Cmp(big.NewRat(1, 1<<40)) < 0
}

// fits reports whether the exact weights are small enough that nothing on the
// way to them can have been too large.
func fits(parts map[int]*big.Rat) bool {
	common := big.NewInt(1)
	for _, p := range parts {
		d := p.Denom()
		common.Mul(common, new(big.Int).Div(d, new(big.Int).GCD(nil, nil, common, d)))
	}
	return common.BitLen() <= 32
}

func checkTotals(t *testing.T, table *Table, dumb *twin, f *follower) {
	t.Helper()
	stats := table.Stats()
	for _, tally := range []Tally{stats.Events, stats.Communities} {
		checkTally(t, tally)
	}
	live := 0
	for i, v := range table.Sessions(nil) {
		checkTally(t, v.Routes)
		checkTally(t, v.Communities)
		if int(v.Routes.Received) != len(dumb.routes[i]) {
			t.Fatalf("session %d has %d routes, want %d", i, v.Routes.Received, len(dumb.routes[i]))
		}
		live += len(dumb.routes[i])
	}
	if stats.Routes != live || stats.Groups != len(f.groups) || stats.Destinations != len(f.destinations) {
		t.Fatalf("%+v, want %d routes, %d groups, %d destinations", stats, live, len(f.groups), len(f.destinations))
	}
	leftovers, refs, members := 0, 0, 0
	seen := map[string]bool{}
	table.Groups(func(id GroupID, _ GroupView) bool {
		g := table.groups.get(id)
		if key := fmt.Sprint(g.entries); seen[key] {
			t.Fatalf("two groups of %s", key)
		} else {
			seen[key] = true
		}
		for i := range g.entries {
			refs += g.size
			if !table.alive(&g.entries[i]) {
				leftovers += g.size
			}
		}
		for d := g.members; d != nil; d = d.next {
			if members++; len(d.sets) != len(g.entries) {
				t.Fatalf("%s has %d sets of %d", d.prefix, len(d.sets), len(g.entries))
			}
		}
		return true
	})
	for _, head := range table.pool.set.buckets {
		for a := head; a != nil; a = a.next {
			refs -= a.refs
		}
	}
	if stats.Leftovers != leftovers || refs != 0 || members != stats.Destinations {
		t.Fatalf("leftovers %d, want %d; references off by %d; %d members of %d", stats.Leftovers, leftovers, refs, members, stats.Destinations)
	}
}

func checkTally(t *testing.T, tally Tally) {
	t.Helper()
	sum := tally.Used
	for r := range Reasons {
		sum += tally.Reason(r)
	}
	if sum != tally.Received {
		t.Fatalf("received %d is not the sum %d: %+v", tally.Received, sum, tally)
	}
}

// TestSameEventsSameBytes also replays the second time from a recording.
func TestSameEventsSameBytes(t *testing.T) {
	for seed := range uint64(50) {
		g := newGenerator(seed)
		events := g.start()
		for range 300 {
			events = append(events, g.event())
		}
		run := func(pass func(Event) Event) []byte {
			table, err := NewTable(g.config)
			if err != nil {
				t.Fatal(err)
			}
			var out bytes.Buffer
			for _, e := range events {
				for _, c := range table.Step(pass(e)) {
					fmt.Fprintln(&out, c, table.Group(c.Group), readvertisedText(table, c.Destination))
				}
			}
			for p, id := range table.Destinations {
				fmt.Fprintln(&out, p, id, table.Describe(p))
			}
			fmt.Fprintln(&out, table.Stats(), table.Sessions(nil))
			return out.Bytes()
		}
		first := run(func(e Event) Event { return e })
		second := run(func(e Event) Event {
			line, err := MarshalEvent(e)
			if err != nil {
				t.Fatal(err)
			}
			if e, err = UnmarshalEvent(line); err != nil {
				t.Fatal(err)
			}
			return e
		})
		if !bytes.Equal(first, second) {
			t.Fatalf("seed %d: two runs differ", seed)
		}
	}
}
