package wecmp

import (
	"fmt"
	"math/big"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
)

// fabric returns a configuration of planes with the given numbers of sub-ports.
func fabric(subPorts ...int) Config {
	var cfg Config
	for p, n := range subPorts {
		plane := Plane{Name: fmt.Sprintf("p%d", p)}
		for s := range n {
			plane.SubPorts = append(plane.SubPorts, SubPort{Name: fmt.Sprintf("p%ds%d", p, s)})
		}
		cfg.Planes = append(cfg.Planes, plane)
	}
	return cfg
}

// square returns a configuration of equal planes.
func square(planes, subPorts int) Config {
	return fabric(slices.Repeat([]int{subPorts}, planes)...)
}

func mustEngine(t testing.TB, cfg Config) *Engine {
	t.Helper()
	e, err := NewEngine(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// capacities returns planes with equal sub-ports.
func capacities(cfg Config, values ...uint64) []Capacity {
	var out []Capacity
	for p, v := range values {
		c := Capacity{Capacity: v, Bandwidth: v, SubPorts: make([]uint64, len(cfg.Planes[p].SubPorts))}
		for s := range c.SubPorts {
			c.SubPorts[s] = 1
		}
		out = append(out, c)
	}
	return out
}

func address(i int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 255, byte(i >> 8), byte(i)}), 32)
}

// seeded prints its seed if the test fails, so that the failure can be reproduced.
func seeded(t *testing.T) *rand.Rand {
	seed := rand.Uint64()
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("seed %d", seed)
		}
	})
	return rand.New(rand.NewPCG(seed, 0))
}

// randomConfig returns a configuration of any mode, mostly of a small size.
func randomConfig(r *rand.Rand) Config {
	var ports []int
	for range 1 + r.IntN(5) {
		ports = append(ports, 1+r.IntN(4))
	}
	cfg := fabric(ports...)
	cfg.Policy, cfg.Mode, cfg.Ordering = Policy(r.IntN(2)), Mode(r.IntN(2)), Ordering(r.IntN(3))
	if r.IntN(2) == 0 {
		cfg.Slots = cfg.subPorts() + r.IntN(12)
	}
	return cfg
}

// randomCapacities mixes round figures, ties, zeros and arbitrary values.
func randomCapacities(r *rand.Rand, cfg Config) []Capacity {
	var out []Capacity
	for _, p := range cfg.Planes {
		c := Capacity{SubPorts: make([]uint64, len(p.SubPorts))}
		switch r.IntN(6) {
		case 0:
		case 1:
			c.Capacity = r.Uint64N(MaxCapacity + 1)
		case 2:
			c.Capacity = uint64(r.IntN(5))
		default:
			c.Capacity = 100e9 * uint64(1+r.IntN(8))
		}
		c.Bandwidth = c.Capacity
		for s := range c.SubPorts {
			switch r.IntN(8) {
			case 0:
			case 1:
				c.SubPorts[s] = r.Uint64N(100)
			case 2:
				c.SubPorts[s] = r.Uint64() >> r.IntN(64)
			default:
				c.SubPorts[s] = 1
			}
		}
		out = append(out, c)
	}
	return out
}

// twin is a reference model of the engine without optimization: every destination has a separate history, and each
// result is computed from scratch, in rationals.
type twin struct {
	cfg    Config
	places []Place
	home   []int // index of places
	groups map[uint32][]Capacity
	dests  map[netip.Prefix]*twinDest
}

type twinDest struct {
	group uint32
	at    []int
}

func newTwin(cfg Config) *twin {
	t := &twin{cfg: cfg, groups: map[uint32][]Capacity{}, dests: map[netip.Prefix]*twinDest{}}
	// The order of places here is the order of homes.
	for s := range MaxSubPorts {
		for p := range cfg.Planes {
			switch {
			case cfg.Mode == PerPacket && s == 0:
				t.places = append(t.places, Place{p, -1})
			case cfg.Mode == PerFlow && s < len(cfg.Planes[p].SubPorts):
				t.places = append(t.places, Place{p, s})
			}
		}
	}
	slots := cfg.Slots
	if slots == 0 {
		slots = len(t.places)
	}
	for i := range slots {
		t.home = append(t.home, i%len(t.places))
	}
	return t
}

func frac(a, b uint64) *big.Rat {
	return new(big.Rat).SetFrac(new(big.Int).SetUint64(a), new(big.Int).SetUint64(b))
}

// subPorts returns the fractions of a plane's sub-ports, by the engine's rule that ratios keep 32 bits.
func (t *twin) subPorts(c Capacity) []*big.Rat {
	var g, most uint64
	for _, w := range c.SubPorts {
		g = gcd(w, g)
		most = max(most, w)
	}
	out := make([]*big.Rat, len(c.SubPorts))
	sum := new(big.Rat)
	shift := 0
	for g != 0 && most/g>>shift > 1<<32-1 {
		shift++
	}
	for s, w := range c.SubPorts {
		out[s] = new(big.Rat)
		if w != 0 {
			out[s] = frac(max(w/g>>shift, 1), 1)
		}
		sum.Add(sum, out[s])
	}
	if sum.Sign() != 0 {
		for _, x := range out {
			x.Quo(x, sum)
		}
	}
	return out
}

// capacity returns a place's exact capacity.
func (t *twin) capacity(group []Capacity, at Place) *big.Rat {
	c := group[at.Plane]
	total := new(big.Rat)
	for s, x := range t.subPorts(c) {
		if at.SubPort < 0 || at.SubPort == s {
			total.Add(total, x)
		}
	}
	return total.Mul(total, frac(c.Capacity, 1))
}

// whole returns a sub-port's capacity by the given weights, whatever their size.
func (t *twin) whole(group []Capacity, at Place) *big.Rat {
	c := group[at.Plane]
	sum := bigSum(c.SubPorts)
	if sum.Sign() == 0 {
		return new(big.Rat)
	}
	return new(big.Rat).Mul(frac(c.Capacity, 1), new(big.Rat).Quo(frac(c.SubPorts[at.SubPort], 1), new(big.Rat).SetInt(sum)))
}

// quotas sorts all seats that Webster's method may assign, and takes one for each slot.
func (t *twin) quotas(group []Capacity) []int {
	type seat struct {
		place    int
		priority *big.Rat
	}
	quota, left := make([]int, len(t.places)), len(t.home)
	var seats []seat
	for i, at := range t.places {
		c := t.capacity(group, at)
		if c.Sign() == 0 {
			continue
		}
		quota[i] = 1
		left--
		for n := range t.home {
			seats = append(seats, seat{i, new(big.Rat).Quo(c, frac(uint64(2*n+3), 1))})
		}
	}
	slices.SortStableFunc(seats, func(a, b seat) int { return b.priority.Cmp(a.priority) })
	for _, s := range seats[:min(max(left, 0), len(seats))] {
		quota[s.place]++
	}
	return quota
}

// step moves one destination's slots.
func (t *twin) step(at []int, group []Capacity) {
	if t.cfg.Policy == Reweight {
		return
	}
	quota := t.quotas(group)
	lack, home := slices.Clone(quota), slices.Clone(quota)
	total := 0
	for s := range at {
		lack[at[s]]--
		home[t.home[s]]--
	}
	for i := range quota {
		total += quota[i]
	}
	if total == 0 {
		return
	}
	if slices.Max(home) == 0 {
		copy(at, t.home)
		return
	}
	move := func(s, to int) {
		lack[at[s]]++
		lack[to]--
		at[s] = to
	}
	for s := range at {
		if at[s] != t.home[s] && lack[at[s]] < 0 && lack[t.home[s]] > 0 {
			move(s, t.home[s])
		}
	}
	for _, atHome := range []bool{false, true} {
		for s := len(at) - 1; s >= 0; s-- {
			if lack[at[s]] < 0 && (at[s] == t.home[s]) == atHome {
				move(s, slices.Index(lack, slices.Max(lack)))
			}
		}
	}
}

func (t *twin) setGroup(id uint32, planes []Capacity) {
	t.groups[id] = planes
	for _, d := range t.dests {
		if d.group == id {
			t.step(d.at, planes)
		}
	}
}

func (t *twin) setDestination(dst netip.Prefix, group uint32) {
	d := t.dests[dst]
	if d == nil {
		d = &twinDest{at: slices.Clone(t.home)}
		t.dests[dst] = d
	} else if d.group == group {
		return
	}
	d.group = group
	t.step(d.at, t.groups[group])
}

// apportion is the largest remainder method in rationals.
func apportion(weights []*big.Rat, total int64) []int64 {
	sum := new(big.Rat)
	for _, w := range weights {
		sum.Add(sum, w)
	}
	out, rest, order := make([]int64, len(weights)), make([]*big.Rat, len(weights)), make([]int, len(weights))
	if sum.Sign() == 0 {
		return out
	}
	left := total
	for i, w := range weights {
		q := new(big.Rat).Mul(w, big.NewRat(total, 1))
		q.Quo(q, sum)
		whole := new(big.Int).Quo(q.Num(), q.Denom())
		out[i] = whole.Int64()
		left -= out[i]
		rest[i] = q.Sub(q, new(big.Rat).SetInt(whole))
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return rest[b].Cmp(rest[a]) })
	for _, i := range order[:left] {
		out[i]++
	}
	return out
}

// slots returns the expected slots of a destination.
func (t *twin) slots(d *twinDest) []Slot {
	group := t.groups[d.group]
	var planes []*big.Rat
	for p := range t.cfg.Planes {
		planes = append(planes, t.capacity(group, Place{p, -1}))
	}
	shares := apportion(planes, Parts)
	out := make([]Slot, len(d.at))
	byPlace := make([][]int, len(t.places))
	for s, at := range d.at {
		out[s] = Slot{Plane: t.places[at].Plane, SubPort: t.places[at].SubPort, Parked: true}
		if t.capacity(group, t.places[at]).Sign() != 0 {
			out[s].Parked = false
			byPlace[at] = append(byPlace[at], s)
		}
	}
	for p := range planes {
		var of []int // the plane's places, first sub-port first
		var weights []*big.Rat
		for i, at := range t.places {
			if at.Plane == p {
				of, weights = append(of, i), append(weights, t.capacity(group, at))
			}
		}
		for i, parts := range apportion(weights, shares[p]) {
			even := make([]*big.Rat, len(byPlace[of[i]]))
			for k := range even {
				even[k] = big.NewRat(1, 1)
			}
			for k, share := range apportion(even, parts) {
				out[byPlace[of[i]][k]].SharePPB = uint32(share)
			}
		}
	}
	return out
}

// check compares every destination of the engine with the model, and verifies the invariants of every vector.
func (t *twin) check(tb testing.TB, e *Engine) {
	tb.Helper()
	for dst, d := range t.dests {
		id, ok := e.Destination(dst)
		v, known := e.Vector(id)
		if !ok || !known || v.Group != d.group {
			tb.Fatalf("%s: vector %d of group %d, %v %v; want group %d", dst, id, v.Group, ok, known, d.group)
		}
		got, want := slices.Clone(v.Slots), t.slots(d)
		for i := range got {
			got[i].Drain = false
		}
		if !slices.Equal(got, want) {
			tb.Fatalf("%s, group %+v\n got %+v\nwant %+v", dst, t.groups[d.group], got, want)
		}
		t.checkWeights(tb, v)
	}
	if len(t.dests) != countDestinations(e) {
		tb.Fatalf("%d destinations, want %d", countDestinations(e), len(t.dests))
	}
}

func countDestinations(e *Engine) (n int) {
	for i := range e.destinations {
		if e.destinations[i].vector != 0 {
			n++
		}
	}
	return n
}

// checkWeights compares a vector's weights with the exact rationals.
func (t *twin) checkWeights(tb testing.TB, v VectorView) {
	tb.Helper()
	group := t.groups[v.Group]
	total, sum := new(big.Rat), uint64(0)
	for p := range group {
		total.Add(total, t.capacity(group, Place{p, -1}))
	}
	for _, s := range v.Slots {
		sum += uint64(s.SharePPB)
	}
	switch {
	case v.Reachable != (total.Sign() != 0):
		tb.Fatalf("reachable is %v with a capacity of %s", v.Reachable, total)
	case !v.Reachable:
		if sum != 0 || len(v.Members) != 0 || v.Reason == "" {
			tb.Fatalf("unreachable with shares %d, members %v, reason %q", sum, v.Members, v.Reason)
		}
		return
	case sum != Parts:
		tb.Fatalf("shares sum to %d", sum)
	}
	var weights, members uint64
	live := 0
	for _, w := range v.Weights {
		weights += uint64(w)
	}
	for _, m := range v.Members {
		members += uint64(m.Weight)
	}
	for p := range group {
		exact := t.capacity(group, Place{p, -1})
		if exact.Quo(exact, total); v.Exact && exact.Cmp(frac(uint64(v.Weights[p]), weights)) != 0 {
			tb.Fatalf("plane %d: weights %v, want the share %s", p, v.Weights, exact)
		}
		for s := range group[p].SubPorts {
			want := t.capacity(group, Place{p, s})
			i := slices.IndexFunc(v.Members, func(m Member) bool { return m.Plane == p && m.SubPort == s })
			if (i >= 0) != (want.Sign() != 0) {
				tb.Fatalf("sub-port %d of plane %d: members %v, capacity %s", s, p, v.Members, want)
			}
			if i < 0 {
				continue
			}
			live++
			if want.Quo(want, total); v.Exact && want.Cmp(frac(uint64(v.Members[i].Weight), members)) != 0 {
				tb.Fatalf("sub-port %d of plane %d: members %v, want the share %s", s, p, v.Members, want)
			}
		}
	}
	if live != len(v.Members) {
		tb.Fatalf("members %v, %d are live", v.Members, live)
	}
}

// mirror is the state of a caller that only applies updates.
type mirror struct {
	vectors map[uint32][]Place
	dests   map[netip.Prefix]uint32
}

func newMirror() *mirror {
	return &mirror{map[uint32][]Place{}, map[netip.Prefix]uint32{}}
}

// apply applies updates. It verifies that each is possible when it comes and counts its moves correctly, and that no
// object in use is deleted.
func (m *mirror) apply(tb testing.TB, e *Engine) (moved int) {
	tb.Helper()
	last := VectorSet
	before := m.clone()
	for _, u := range e.Updates() {
		if u.Kind < last {
			tb.Fatalf("%v after %v", u, last)
		}
		last = u.Kind
		want := 0
		switch u.Kind {
		case VectorSet:
			v, ok := e.Vector(u.Vector)
			if !ok {
				tb.Fatalf("%v: there is no such vector", u)
			}
			want = differing(before.vectors[u.Vector], v.Places())
			m.vectors[u.Vector] = v.Places()
		case DestinationSet:
			places, ok := m.vectors[u.Vector]
			if !ok {
				tb.Fatalf("%v: its vector was not set", u)
			}
			if old, had := before.dests[u.Destination]; had {
				want = differing(before.vectors[old], places)
			}
			m.dests[u.Destination] = u.Vector
		case DestinationDelete:
			if _, ok := m.dests[u.Destination]; !ok {
				tb.Fatalf("%v: was not set", u)
			}
			delete(m.dests, u.Destination)
		case VectorDelete:
			if _, ok := m.vectors[u.Vector]; !ok {
				tb.Fatalf("%v: was not set", u)
			}
			for dst, id := range m.dests {
				if id == u.Vector {
					tb.Fatalf("%v: %s still uses it", u, dst)
				}
			}
			delete(m.vectors, u.Vector)
		}
		if u.SlotsMoved != want {
			tb.Fatalf("%v: %d slots moved", u, want)
		}
		moved += want
	}
	for dst, id := range m.dests {
		if now, ok := e.Destination(dst); !ok || now != id {
			tb.Fatalf("%s: the caller has vector %d, the engine %d", dst, id, now)
		}
	}
	if len(m.dests) != countDestinations(e) {
		tb.Fatalf("the caller has %d destinations, the engine %d", len(m.dests), countDestinations(e))
	}
	for id := range e.vectors {
		v, ok := e.Vector(uint32(id))
		if places, had := m.vectors[uint32(id)]; ok != had || ok && differing(places, v.Places()) != 0 {
			tb.Fatalf("vector %d: the caller has %v %v, the engine %v %v", id, had, places, ok, v.Slots)
		}
	}
	return moved
}

func (m *mirror) clone() *mirror {
	c := newMirror()
	for k, v := range m.vectors {
		c.vectors[k] = v
	}
	for k, v := range m.dests {
		c.dests[k] = v
	}
	return c
}

func differing(a, b []Place) (n int) {
	for i := range a {
		if a[i] != b[i] {
			n++
		}
	}
	return n
}
