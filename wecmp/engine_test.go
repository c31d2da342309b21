package wecmp

import (
	"errors"
	"fmt"
	"math/big"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/race"
)

// run passes the same random inputs, chosen by next, to an engine and to its reference model.
func run(t testing.TB, cfg Config, steps int, next func(n int) int, planes func() []Capacity) {
	e, twin, m := mustEngine(t, cfg), newTwin(cfg), newMirror()
	const groups, dests = 4, 8
	for range steps {
		id, dst := uint32(1+next(groups)), address(next(dests))
		switch next(8) {
		case 0, 1, 2:
			c := planes()
			must(t, e.SetGroup(id, c))
			twin.setGroup(id, c)
		case 3, 4, 5:
			err := e.SetDestination(dst, id)
			if _, ok := twin.groups[id]; !ok {
				if !errors.Is(err, ErrUnknownGroup) {
					t.Fatalf("destination of an unknown group: %v", err)
				}
				break
			}
			must(t, err)
			twin.setDestination(dst, id)
		case 6:
			e.DeleteDestination(dst)
			delete(twin.dests, dst)
		case 7:
			used := false
			for _, d := range twin.dests {
				used = used || d.group == id
			}
			if err := e.DeleteGroup(id); errors.Is(err, ErrGroupInUse) != used {
				t.Fatalf("delete of group %d, used %v: %v", id, used, err)
			}
			if !used {
				delete(twin.groups, id)
			}
		}
		twin.check(t, e)
		if next(3) == 0 {
			m.apply(t, e)
		}
	}
	m.apply(t, e)
}

func TestEngineEqualsFullRecompute(t *testing.T) {
	r := seeded(t)
	for range gate.Count(t, gate.Models, 40, 80) {
		cfg := randomConfig(r)
		run(t, cfg, 50, r.IntN, func() []Capacity { return randomCapacities(r, cfg) })
	}
}

// FuzzEngine reads a configuration and events from bytes.
func FuzzEngine(f *testing.F) {
	f.Add([]byte{0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7})
	f.Add([]byte("remap: set, move, fail, recover, delete"))
	f.Add(slices.Repeat([]byte{1, 3, 0, 200, 9, 77}, 40))
	f.Fuzz(func(t *testing.T, data []byte) {
		next := func(n int) int {
			if len(data) == 0 {
				return 0
			}
			b := data[0]
			data = data[1:]
			return int(b) % n
		}
		var ports []int
		for range 1 + next(4) {
			ports = append(ports, 1+next(3))
		}
		cfg := fabric(ports...)
		cfg.Policy, cfg.Mode, cfg.Ordering = Policy(next(2)), Mode(next(2)), Ordering(next(3))
		if extra := next(8); extra > 0 {
			cfg.Slots = cfg.subPorts() + extra
		}
		run(t, cfg, min(len(data)/3, 80), next, func() []Capacity {
			out := capacities(cfg, make([]uint64, len(cfg.Planes))...)
			for p := range out {
				out[p].Capacity = uint64(next(4)) << next(54) >> 2
				for s := range out[p].SubPorts {
					out[p].SubPorts[s] = uint64(next(4)) << next(62)
				}
			}
			return out
		})
	})
}

// TestSameInputsSameBytes replays one random sequence into two engines and compares all of their output.
func TestSameInputsSameBytes(t *testing.T) {
	seed := seeded(t).Uint64()
	play := func() string {
		var b strings.Builder
		r := rand.New(rand.NewPCG(seed, 1))
		for range 30 {
			cfg := randomConfig(r)
			cfg.Hash = LinuxL4{Seed: uint32(seed)}
			e := mustEngine(t, cfg)
			for range 40 {
				id, dst := uint32(1+r.IntN(3)), address(r.IntN(5))
				must(t, e.SetGroup(id, randomCapacities(r, cfg)))
				must(t, e.SetDestination(dst, id))
				for _, u := range e.Updates() {
					b.WriteString(u.String() + "\n")
				}
				vector, _ := e.Destination(dst)
				v, _ := e.Vector(vector)
				ports, placement := e.Planner().Ports(netip.MustParseAddr("10.0.0.1"), dst.Addr(), v.Places(), nil)
				for _, p := range ports {
					b.WriteString(netip.AddrPortFrom(dst.Addr(), p).String() + " " + placement.String() + "\n")
				}
			}
			b.WriteString(e.String())
		}
		return b.String()
	}
	if a, b := play(), play(); a != b || len(a) < 1000 {
		t.Fatalf("two runs differ or show nothing: %d and %d bytes", len(a), len(b))
	}
}

// TestPermutedInputs verifies that an equal input has no effect, and that the order in which groups and destinations
// were set does not affect the result for destinations (under Reweight, which has no history).
func TestPermutedInputs(t *testing.T) {
	r := seeded(t)
	cfg := square(4, 2)
	groups := make([][]Capacity, 6)
	for i := range groups {
		groups[i] = randomCapacities(r, cfg)
	}
	show := func(order []int, twice bool) (out []string) {
		e := mustEngine(t, cfg)
		for _, i := range order {
			must(t, e.SetGroup(uint32(i+1), groups[i]))
			must(t, e.SetDestination(address(i), uint32(i+1)))
		}
		if e.Updates(); twice {
			for _, i := range order {
				must(t, e.SetGroup(uint32(i+1), groups[i]))
				must(t, e.SetDestination(address(i), uint32(i+1)))
			}
			if u := e.Updates(); len(u) != 0 {
				t.Fatalf("equal input again: %v", u)
			}
		}
		for i := range groups {
			id, _ := e.Destination(address(i))
			v, _ := e.Vector(id)
			v.ID = 0
			out = append(out, v.String())
		}
		return out
	}
	order := []int{0, 1, 2, 3, 4, 5}
	want := show(order, true)
	for range 20 {
		r.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
		if got := show(order, true); !slices.Equal(got, want) {
			t.Fatalf("order %v\n got %v\nwant %v", order, got, want)
		}
	}
}

// TestLimitsAgain verifies that unchanged limits change nothing, and that new limits change all groups.
func TestLimitsAgain(t *testing.T) {
	cfg := square(2, 1)
	e := mustEngine(t, cfg)
	must(t, e.SetGroup(1, capacities(cfg, 1000, 999)))
	e.Updates()
	for i, want := range []int{1, 0} {
		must(t, e.SetLimits(100, 150))
		if u := e.Updates(); len(u) != want {
			t.Errorf("limits set for the %d. time: %v", i+1, u)
		}
	}
}

// TestMergedUpdates verifies that changes between two reports are reported as their result.
func TestMergedUpdates(t *testing.T) {
	cfg := square(2, 1)
	e := mustEngine(t, cfg)
	must(t, e.SetGroup(1, capacities(cfg, 1, 1)))
	must(t, e.SetDestination(address(1), 1))
	e.DeleteDestination(address(1))
	must(t, e.DeleteGroup(1))
	if u := e.Updates(); len(u) != 0 {
		t.Fatalf("set and deleted: %v", u)
	}
	must(t, e.SetGroup(1, capacities(cfg, 1, 1)))
	must(t, e.SetDestination(address(1), 1))
	if u := e.Updates(); len(u) != 2 {
		t.Fatalf("set: %v", u)
	}
	// The old vector's number must not be reused before its deletion is reported.
	must(t, e.SetGroup(2, capacities(cfg, 2, 1)))
	must(t, e.SetDestination(address(1), 2))
	must(t, e.DeleteGroup(1))
	must(t, e.SetGroup(3, capacities(cfg, 3, 1)))
	var got []string
	for _, u := range e.Updates() {
		got = append(got, u.String())
	}
	want := []string{"vector-set vector 2 moved 0", "vector-set vector 3 moved 0", "destination-set 10.255.0.1/32 vector 2 moved 0", "vector-delete vector 1"}
	if !slices.Equal(got, want) {
		t.Fatalf("got %q", got)
	}
	must(t, e.SetGroup(4, capacities(cfg, 4, 1)))
	if u := e.Updates(); len(u) != 1 || u[0].Vector != 1 {
		t.Fatalf("a free number is used again: %v", u)
	}
	must(t, e.SetDestination(address(1), 0))
	if u := e.Updates(); len(u) != 1 || u[0].Kind != DestinationDelete {
		t.Fatalf("group 0: %v", u)
	}
}

// TestExactIsHonest verifies, with 4 to 64 sub-ports and any table, that a vector is exact if and only if its weights,
// its members and its weights of sub-ports equal the ratios of the inputs, and that every table respects its limits and
// holds each member that carries traffic.
func TestExactIsHonest(t *testing.T) {
	r := seeded(t)
	exact, fitted := 0, 0
	for range gate.Count(t, gate.Models, 1000, 2000) {
		cfg := square(1<<r.IntN(7), 1)
		for p := range cfg.Planes {
			for len(cfg.Planes[p].SubPorts) < 64/len(cfg.Planes) && r.IntN(8) > 0 {
				cfg.Planes[p].SubPorts = append(cfg.Planes[p].SubPorts, SubPort{Name: fmt.Sprint(len(cfg.Planes[p].SubPorts))})
			}
		}
		cfg.Slots = 128
		least := uint32(cfg.subPorts())
		cfg.MaxWeight, cfg.MaxWeightSum = []uint32{0, 16, 256, 65535}[r.IntN(4)], []uint32{0, least, 4 * least, 1024, 65535}[r.IntN(5)]
		e, twin := mustEngine(t, cfg), newTwin(cfg)
		planes := randomCapacities(r, cfg)
		if r.IntN(2) == 0 { // as with real links: speeds of a few kinds
			for p := range planes {
				planes[p].Capacity = 0
				for s := range planes[p].SubPorts {
					planes[p].SubPorts[s] = []uint64{0, 10e9, 100e9, 400e9, 800e9}[r.IntN(5)]
					planes[p].Capacity += planes[p].SubPorts[s]
				}
			}
		}
		must(t, e.SetGroup(1, planes))
		twin.groups[1] = planes
		v, _ := e.Vector(1)
		if !v.Reachable {
			continue
		}
		twin.checkWeights(t, v) // exact weights equal the ratios
		var capacity, weights, wholes, members []*big.Rat
		same := true
		for p, c := range planes {
			capacity, weights = append(capacity, twin.capacity(planes, Place{p, -1})), append(weights, frac(uint64(v.Weights[p]), 1))
			var given, shown []*big.Rat
			for s, w := range c.SubPorts {
				given, shown = append(given, frac(w, 1)), append(shown, frac(uint64(v.SubPortWeights[p][s]), 1))
				member := new(big.Rat)
				for _, m := range v.Members {
					if m.Plane == p && m.SubPort == s {
						member = frac(uint64(m.Weight), 1)
					}
				}
				wholes, members = append(wholes, twin.whole(planes, Place{p, s})), append(members, member)
			}
			same = same && (c.Capacity == 0 || proportional(given, shown))
		}
		if same = same && proportional(capacity, weights) && proportional(wholes, members); same != v.Exact {
			t.Fatalf("exact is %v, the ratios are the inputs': %v\n%+v\n%v", v.Exact, same, planes, v)
		}
		if v.Exact {
			exact++
		} else {
			fitted++
		}
		if cfg.MaxWeight == 0 && cfg.MaxWeightSum == 0 && !near(wholes, members) {
			t.Fatalf("without a bound, members are off by more than 32 bits hold:\n%+v\n%v", planes, v)
		}
		for _, table := range [][]uint32{v.Weights, memberWeights(v)} {
			var sum uint64
			for _, w := range table {
				sum += uint64(w)
				if cfg.MaxWeight != 0 && w > cfg.MaxWeight {
					t.Fatalf("weight %d above %d", w, cfg.MaxWeight)
				}
			}
			if cfg.MaxWeightSum != 0 && sum > uint64(cfg.MaxWeightSum) {
				t.Fatalf("sum %d above %d", sum, cfg.MaxWeightSum)
			}
		}
	}
	if exact < 100 || fitted < 100 {
		t.Fatalf("%d vectors are exact, %d are not: one side goes without a test", exact, fitted)
	}
}

// memberWeights returns the weights of a vector's members.
func memberWeights(v VectorView) (w []uint32) {
	for _, m := range v.Members {
		w = append(w, m.Weight)
	}
	return w
}

// near reports whether b's parts of its sum equal those of a, within the effect of 64 weights of at least 1 on 2^32
// entries.
func near(a, b []*big.Rat) bool {
	sumA, sumB := new(big.Rat), new(big.Rat)
	for i := range a {
		sumA.Add(sumA, a[i])
		sumB.Add(sumB, b[i])
	}
	for i := range a {
		d := new(big.Rat).Sub(new(big.Rat).Quo(a[i], sumA), new(big.Rat).Quo(b[i], sumB))
		if d.Abs(d).Cmp(big.NewRat(1, 1<<25)) > 0 {
			return false
		}
	}
	return true
}

// proportional reports whether b is a multiple of a.
func proportional(a, b []*big.Rat) bool {
	sumA, sumB := new(big.Rat), new(big.Rat)
	for i := range a {
		sumA.Add(sumA, a[i])
		sumB.Add(sumB, b[i])
	}
	for i := range a {
		if new(big.Rat).Mul(a[i], sumB).Cmp(new(big.Rat).Mul(b[i], sumA)) != 0 {
			return false
		}
	}
	return true
}

func TestEngineRefuses(t *testing.T) {
	cfg := square(2, 2)
	e := mustEngine(t, cfg)
	good := capacities(cfg, 1, 1)
	must(t, e.SetGroup(1, good))
	e.Updates()
	big, short := capacities(cfg, MaxCapacity+1, 1), capacities(cfg, 1, 5)
	short[0].SubPorts = short[0].SubPorts[:1]
	for name, err := range map[string]error{
		"group 0":       e.SetGroup(0, good),
		"large id":      e.SetGroup(MaxGroupID+1, good),
		"planes":        e.SetGroup(1, good[:1]),
		"capacity":      e.SetGroup(1, big),
		"sub-ports":     e.SetGroup(1, short),
		"prefix":        e.SetDestination(netip.Prefix{}, 1),
		"unknown group": e.SetDestination(address(1), 9),
		"limits":        e.SetLimits(0, 3),
	} {
		if err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	if u := e.Updates(); len(u) != 0 {
		t.Errorf("refused inputs changed %v", u)
	}
}

func TestConfigFaultsAllAtOnce(t *testing.T) {
	cfg := fabric(2, 2)
	cfg.Planes[1].Name, cfg.Planes[0].SubPorts[1].Name = "p0", "p0s0"
	cfg.Mode, cfg.Policy, cfg.Addressing, cfg.Ordering = 7, 7, 7, 7
	cfg.Slots, cfg.MaxWeightSum, cfg.Protocol = 3, 3, 1
	_, err := NewEngine(cfg)
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range []string{
		`planes[1]: name "p0"`, `planes[0].sub_ports[1]: name "p0s0"`, "mode: 7", "policy: 7", "addressing: 7", "ordering: 7",
		"slots: 3", "max_weight_sum: 3", "protocol: 1",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is missing in\n%v", want, err)
		}
	}
	for name, cfg := range map[string]Config{
		"no planes": {}, "65 planes": square(65, 1), "1025 sub-ports": square(1, 1025), "5120 sub-ports": square(5, 1024), "no sub-ports": square(1, 0),
		"129 slots": {Planes: square(2, 2).Planes, Slots: 129}, "TCP to no port": {Planes: square(2, 2).Planes, Protocol: ProtocolTCP},
	} {
		if _, err := NewEngine(cfg); err == nil {
			t.Errorf("%s: no error", name)
		}
		if _, err := NewPlanner(cfg); err == nil {
			t.Errorf("%s: no error of NewPlanner", name)
		}
	}
}

func TestNamesRoundTrip(t *testing.T) {
	type text interface {
		MarshalText() ([]byte, error)
		UnmarshalText([]byte) error
		String() string
	}
	var m Mode
	var p Policy
	var a Addressing
	var o Ordering
	for want, v := range map[string]text{
		"per-flow": &m, "per-packet": &m, "reweight": &p, "remap": &p, "loopback": &a, "port": &a, "sub-port": &a,
		"weak": &o, "partial": &o, "strong": &o,
	} {
		if err := v.UnmarshalText([]byte(want)); err != nil || v.String() != want {
			t.Errorf("%q reads as %v, %v", want, v, err)
		}
		if got, err := v.MarshalText(); err != nil || string(got) != want {
			t.Errorf("%q writes as %q, %v", want, got, err)
		}
		if v.UnmarshalText([]byte("x"+want)) == nil {
			t.Errorf("x%s was read", want)
		}
	}
	if got := Mode(2).String(); got != "invalid(2)" {
		t.Errorf("a mode that does not exist is %q", got)
	}
}

// TestLargest runs the largest server and the largest leaf at the largest capacities, with ratios whose exact member
// weights need far more than 64 bits.
func TestLargest(t *testing.T) {
	gate.Slow(t, gate.Models, "the largest configuration against the model")
	r := seeded(t)
	total, sole := MaxSubPortsTotal, MaxSubPorts
	if race.Enabled {
		total, sole = total/8, sole/8
	}
	server, leaf := square(MaxPlanes, total/MaxPlanes), square(1, sole)
	remapping := server
	remapping.Policy = Remap
	for _, cfg := range []Config{server, remapping, leaf} {
		e, twin := mustEngine(t, cfg), newTwin(cfg)
		planes := capacities(cfg, slices.Repeat([]uint64{MaxCapacity}, len(cfg.Planes))...)
		for step := range 3 {
			for p := range planes {
				for s := range planes[p].SubPorts {
					switch step {
					case 1:
						planes[p].SubPorts[s] = 1<<64 - 1 - r.Uint64N(1000)
					case 2:
						planes[p].Capacity = MaxCapacity - r.Uint64N(1000)
						planes[p].SubPorts[s] = r.Uint64() >> r.IntN(64)
					}
				}
			}
			must(t, e.SetGroup(1, planes))
			must(t, e.SetDestination(address(1), 1))
			v, _ := e.Vector(1)
			twin.groups[1] = planes
			twin.checkWeights(t, v)
			if len(v.Slots) != cfg.subPorts() {
				t.Fatalf("%d slots", len(v.Slots))
			}
			var members uint64
			for _, m := range v.Members {
				members += uint64(m.Weight)
			}
			if members > 1<<32-1 || members == 0 {
				t.Fatalf("member weights sum to %d", members)
			}
		}
	}
}
