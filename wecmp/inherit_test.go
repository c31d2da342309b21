package wecmp

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
)

// anyPlanes returns a random configuration with some of the planes a to d, and their sub-ports 0 to 2, in any order.
func anyPlanes(r *rand.Rand, mode Mode, slots int) Config {
	cfg := Config{Mode: mode, Slots: slots, Ordering: Strong}
	for _, p := range r.Perm(4)[:1+r.IntN(4)] {
		plane := Plane{Name: string(rune('a' + p))}
		for _, s := range r.Perm(3)[:1+r.IntN(3)] {
			plane.SubPorts = append(plane.SubPorts, SubPort{Name: fmt.Sprint(s)})
		}
		cfg.Planes = append(cfg.Planes, plane)
	}
	return cfg
}

func (c *Config) nameOf(p Place) string {
	if p.SubPort < 0 {
		return c.Planes[p.Plane].Name
	}
	return c.Planes[p.Plane].Name + c.Planes[p.Plane].SubPorts[p.SubPort].Name
}

// named returns the place with a name, Plane -1 if there is none.
func (c *Config) named(name string) Place {
	for p := range c.Planes {
		if c.Planes[p].Name == name {
			return Place{p, -1}
		}
		for s := range c.Planes[p].SubPorts {
			if c.Planes[p].Name+c.Planes[p].SubPorts[s].Name == name {
				return Place{p, s}
			}
		}
	}
	return Place{-1, -1}
}

// TestRehome checks, for random changes of planes and sub-ports one after another, that every place has as many slots
// as in turn, and that a slot leaves its place only if that is full of other slots that have it already.
func TestRehome(t *testing.T) {
	for seed := range uint64(400) {
		r := rand.New(rand.NewPCG(seed, 5))
		mode, slots := Mode(r.IntN(2)), []int{0, 12, 16, 40}[r.IntN(4)]
		was := anyPlanes(r, mode, slots)
		for range 5 {
			cfg := anyPlanes(r, mode, slots)
			inTurn := map[Place]int{}
			for _, h := range cfg.HomePlaces() {
				inTurn[h]++
			}
			before := was.HomePlaces()
			for s := range before {
				before[s] = cfg.named(was.nameOf(before[s]))
			}
			cfg.Homes = Rehome(cfg, before)
			if err := cfg.Validate(); err != nil {
				t.Fatal(err)
			}
			held, kept := map[Place]int{}, map[Place]int{}
			for s, h := range cfg.Homes {
				held[h]++
				if s < len(before) && before[s] == h {
					kept[h]++
				}
			}
			if fmt.Sprint(held) != fmt.Sprint(inTurn) {
				t.Fatalf("seed %d: slots by place %v, want %v", seed, held, inTurn)
			}
			for s, h := range before[:min(len(before), len(cfg.Homes))] {
				if h.Plane >= 0 && cfg.Homes[s] != h && kept[h] < held[h] {
					t.Fatalf("seed %d: slot %d has left %v: %v to %v", seed, s, h, before, cfg.Homes)
				}
			}
			was = cfg
		}
	}
}

// TestHomesAreValid checks that homes have to name each place, and nothing else.
func TestHomesAreValid(t *testing.T) {
	cfg := Config{Planes: []Plane{{Name: "a", SubPorts: []SubPort{{"0"}, {"1"}}}, {Name: "b", SubPorts: []SubPort{{"0"}}}}}
	for _, homes := range [][]Place{{}, {{0, 0}, {0, 1}}, {{0, 0}, {0, 1}, {0, 1}}, {{0, 0}, {0, 1}, {1, 1}}, {{0, 0}, {0, 1}, {1, -1}}, {{0, 0}, {0, 1}, {2, 0}}, {{0, 0}, {0, 1}, {1, 0}, {0, 0}}} {
		cfg.Homes = homes
		if cfg.Validate() == nil {
			t.Errorf("%v is accepted", homes)
		}
	}
	cfg.Homes = []Place{{1, 0}, {0, 1}, {0, 0}}
	if err := cfg.Validate(); err != nil || !slices.Equal(cfg.HomePlaces(), cfg.Homes) {
		t.Errorf("%v: %v, homes %v", cfg.Homes, err, cfg.HomePlaces())
	}
}

// anyEngine returns an engine for a configuration with random groups and destinations.
func anyEngine(t *testing.T, r *rand.Rand, cfg Config) *Engine {
	e, err := NewEngine(cfg)
	if err != nil {
		t.Fatal(err)
	}
	for id := uint32(1); id <= 4; id++ {
		var planes []Capacity
		for p := range cfg.Planes {
			c := Capacity{Capacity: uint64(r.IntN(4))}
			for range cfg.Planes[p].SubPorts {
				c.SubPorts = append(c.SubPorts, uint64(r.IntN(3)))
			}
			planes = append(planes, c)
		}
		if err := e.SetGroup(id, planes); err != nil {
			t.Fatal(err)
		}
	}
	for d := range 12 {
		if r.IntN(4) > 0 {
			if err := e.SetDestination(netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(d)}), 32), uint32(1+r.IntN(4))); err != nil {
				t.Fatal(err)
			}
		}
	}
	return e
}

// TestInherit checks that an engine that inherits from another one gives its vectors the numbers of those that the same
// destinations had, no number of another vector, and counts moved slots; and that it works on.
func TestInherit(t *testing.T) {
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 6))
		policy := Policy(r.IntN(2))
		first := anyPlanes(r, PerFlow, 16)
		first.Policy = policy
		was := anyEngine(t, r, first)
		was.Updates()
		cfg := anyPlanes(r, PerFlow, 16)
		cfg.Policy = policy
		place := func(p Place) Place { return cfg.named(first.nameOf(p)) }
		before := first.HomePlaces()
		for s := range before {
			before[s] = place(before[s])
		}
		cfg.Homes = Rehome(cfg, before)
		e := anyEngine(t, r, cfg)
		e.Inherit(was, place)
		of := map[uint32]bool{} // vectors of which some destination keeps the number
		for prefix, v := range e.Destinations {
			if old, ok := was.Destination(prefix); ok && old == v {
				of[v] = true
			}
		}
		for v := range e.Vectors {
			if was.vector(v) != nil && !of[v] {
				t.Fatalf("seed %d: vector %d has the number of another one:\n%s\n%s", seed, v, was, e)
			}
		}
		for _, u := range e.Updates() {
			if u.Kind != VectorSet {
				continue
			}
			view, _ := e.Vector(u.Vector)
			if old, ok := was.Vector(u.Vector); ok {
				moved, differs := 0, false
				for s := range view.Slots {
					if place(old.Places()[s]) != view.Places()[s] {
						moved++
					}
					differs = differs || old.Slots[s].SharePPB != view.Slots[s].SharePPB
				}
				if u.SlotsMoved != moved {
					t.Fatalf("seed %d: %d slots moved, want %d", seed, u.SlotsMoved, moved)
				}
				drains := 0
				for s := range old.Slots {
					if !old.Slots[s].Parked && (moved > 0 || differs) {
						drains++
					}
				}
				if len(u.Drain) != drains {
					t.Fatalf("seed %d: drains %v, want %d slots", seed, u.Drain, drains)
				}
			} else if u.SlotsMoved > 0 || u.Drain != nil {
				t.Fatalf("seed %d: a new vector: %v", seed, u)
			}
		}
		for prefix := range e.Destinations {
			if err := e.SetDestination(prefix, 1); err != nil {
				t.Fatal(err)
			}
		}
		e.Updates()
		for id := uint32(2); id <= 4; id++ {
			if err := e.DeleteGroup(id); err != nil {
				t.Fatal(err)
			}
		}
		e.Updates()
		for v := range e.Vectors {
			if view, _ := e.Vector(v); view.Group != 1 || view.ID != v {
				t.Fatalf("seed %d: vector %d is %v", seed, v, view)
			}
		}
	}
}

// TestInheritReports checks that the first updates omit destinations whose vector has kept its number, and delete an
// inherited vector that no destination uses any more.
func TestInheritReports(t *testing.T) {
	cfg := Config{Planes: []Plane{{Name: "p0", SubPorts: []SubPort{{Name: "d0"}}}, {Name: "p1", SubPorts: []SubPort{{Name: "d1"}}}}}
	var engines [2]*Engine
	for i := range engines {
		engines[i], _ = NewEngine(cfg)
		for id, capacity := range []uint64{1: 1, 2: 2} {
			if id > 0 {
				if err := engines[i].SetGroup(uint32(id), []Capacity{{1, 1, []uint64{1}}, {capacity, 1, []uint64{1}}}); err != nil {
					t.Fatal(err)
				}
				if err := engines[i].SetDestination(netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(id)}), 32), uint32(id)); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	was, e := engines[0], engines[1]
	was.Updates()
	second := netip.MustParsePrefix("10.0.0.2/32")
	old, _ := was.Destination(second)
	e.Inherit(was, func(p Place) Place { return p })
	if err := errors.Join(e.SetDestination(second, 1), e.DeleteGroup(2)); err != nil {
		t.Fatal(err)
	}
	now, _ := e.Destination(second)
	want := []Update{{Kind: VectorSet, Vector: now}, {Kind: DestinationSet, Vector: now, Destination: second}, {Kind: VectorDelete, Vector: old}}
	if got := fmt.Sprint(e.Updates()); got != fmt.Sprint(want) {
		t.Errorf("%s, want %v", got, want)
	}
}
