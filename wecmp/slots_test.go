package wecmp

import (
	"math/big"
	"math/rand/v2"
	"slices"
	"testing"
)

func placesOf(t testing.TB, e *Engine, dst int) []Place {
	t.Helper()
	id, _ := e.Destination(address(dst))
	v, ok := e.Vector(id)
	if !ok {
		t.Fatalf("destination %d has no vector", dst)
	}
	return v.Places()
}

func counts(places []Place) map[Place]int {
	out := map[Place]int{}
	for _, p := range places {
		out[p]++
	}
	return out
}

// TestEverySubPortHasItsQueuePair verifies requirements F6 and F7 of the draft: per-flow at least one slot per
// sub-port, per-packet one per plane, sprayed; extra slots are spread over planes.
func TestEverySubPortHasItsQueuePair(t *testing.T) {
	r := seeded(t)
	for range 300 {
		cfg := randomConfig(r)
		e := mustEngine(t, cfg)
		planes := capacities(cfg, slices.Repeat([]uint64{8}, len(cfg.Planes))...)
		must(t, e.SetGroup(1, planes))
		must(t, e.SetDestination(address(1), 1))
		held := counts(placesOf(t, e, 1))
		want := cfg.subPorts()
		if cfg.Mode == PerPacket {
			want = len(cfg.Planes)
		}
		if len(held) != want {
			t.Fatalf("%+v: %d places hold slots, want all %d", cfg, len(held), want)
		}
		for p, n := range held {
			if (p.SubPort == -1) != (cfg.Mode == PerPacket) {
				t.Fatalf("mode %v: slot at %+v", cfg.Mode, p)
			}
			for q, m := range held {
				if cfg.Policy == Reweight && (n-m > 1 || m-n > 1) {
					t.Fatalf("homes are uneven: %+v has %d, %+v has %d", p, n, q, m)
				}
			}
		}
	}
	cfg := square(4, 2)
	cfg.Mode = PerPacket
	e := mustEngine(t, cfg)
	if len(e.home) != 4 {
		t.Fatalf("per-packet: %d slots by default, want one a plane", len(e.home))
	}
}

// TestSlotsFollowSubPorts verifies that a sub-port at 200G next to one at 400G carries half as much, by one slot or by
// several. For every sub-port of random planes, under both policies, the shares of its slots must sum to its part of
// all capacity, within the rounding of two largest remainders, and must differ by at most one part.
func TestSlotsFollowSubPorts(t *testing.T) {
	cfg := fabric(2, 2)
	for slots, want := range map[int][]uint32{
		4: {200_000_000, 300_000_000, 400_000_000, 100_000_000},
		6: {100_000_000, 150_000_000, 400_000_000, 100_000_000, 100_000_000, 150_000_000},
	} {
		cfg.Slots = slots
		e := mustEngine(t, cfg)
		must(t, e.SetGroup(1, []Capacity{
			{Capacity: 600e9, SubPorts: []uint64{200e9, 400e9}}, {Capacity: 400e9, SubPorts: []uint64{300e9, 100e9}},
		}))
		v, _ := e.Vector(1)
		for s, slot := range v.Slots {
			if slot.SharePPB != want[s] {
				t.Errorf("%d slots: %v, want %v", slots, v.Slots, want)
				break
			}
		}
	}
	r := seeded(t)
	for range 500 {
		cfg := randomConfig(r)
		cfg.Mode = PerFlow
		e, twin := mustEngine(t, cfg), newTwin(cfg)
		planes := randomCapacities(r, cfg)
		must(t, e.SetGroup(1, planes))
		must(t, e.SetDestination(address(1), 1))
		v, _ := e.Vector(1)
		total := new(big.Rat)
		for _, at := range twin.places {
			total.Add(total, twin.capacity(planes, at))
		}
		if !v.Reachable {
			continue
		}
		for _, at := range twin.places {
			var sum, least, most uint32 = 0, Parts, 0
			for _, s := range v.Slots {
				if s.Plane == at.Plane && s.SubPort == at.SubPort {
					sum, least, most = sum+s.SharePPB, min(least, s.SharePPB), max(most, s.SharePPB)
				}
			}
			want := new(big.Rat).Quo(twin.capacity(planes, at), total)
			off := want.Mul(want, big.NewRat(Parts, 1)).Sub(want, big.NewRat(int64(sum), 1))
			if off.Abs(off).Cmp(big.NewRat(2, 1)) >= 0 || most > least+1 {
				t.Fatalf("%+v carries %d parts, off by %s, slots %d to %d:\n%v", at, sum, off.FloatString(2), least, most, v)
			}
		}
	}
}

// TestReweightNeverMoves verifies requirement F4: slots never move, and among slots whose inputs did not change the
// exact proportions stay.
func TestReweightNeverMoves(t *testing.T) {
	r := seeded(t)
	for range 100 {
		cfg := randomConfig(r)
		cfg.Policy = Reweight
		e, m := mustEngine(t, cfg), newMirror()
		must(t, e.SetGroup(1, capacities(cfg, slices.Repeat([]uint64{800e9}, len(cfg.Planes))...)))
		must(t, e.SetDestination(address(1), 1))
		want := placesOf(t, e, 1)
		for range 40 {
			must(t, e.SetGroup(uint32(1+r.IntN(2)), randomCapacities(r, cfg)))
			if e.group(2) != nil {
				must(t, e.SetDestination(address(1), uint32(1+r.IntN(2))))
			}
			if moved := m.apply(t, e); moved != 0 || !slices.Equal(placesOf(t, e, 1), want) {
				t.Fatalf("slots moved: %v, home %v", placesOf(t, e, 1), want)
			}
		}
	}
}

// TestRemapMovesTheLeast verifies that each step moves exactly half the sum of |quota - held|, that a failure moves
// only the slots of the failed places, and that full health brings every slot home.
func TestRemapMovesTheLeast(t *testing.T) {
	r := seeded(t)
	for range 200 {
		cfg := randomConfig(r)
		cfg.Policy = Remap
		e, twin := mustEngine(t, cfg), newTwin(cfg)
		full := capacities(cfg, slices.Repeat([]uint64{0}, len(cfg.Planes))...)
		for p := range full { // equal sub-ports everywhere, so that the quotas at full health are those of the homes
			full[p].Capacity = uint64(len(full[p].SubPorts)) * 400e9
			if cfg.Mode == PerPacket {
				full[p].Capacity = 400e9
			}
		}
		must(t, e.SetGroup(1, full))
		must(t, e.SetDestination(address(1), 1))
		home := placesOf(t, e, 1)
		for range 30 {
			before := placesOf(t, e, 1)
			planes := randomCapacities(r, cfg)
			healthy := r.IntN(4) == 0
			if healthy {
				planes = full
			}
			must(t, e.SetGroup(1, planes))
			after := placesOf(t, e, 1)
			quota, total := map[Place]int{}, 0
			for i, q := range twin.quotas(planes) {
				quota[twin.places[i]] = q
				total += q
			}
			moved := differing(before, after)
			if total == 0 {
				if moved != 0 {
					t.Fatalf("nothing is reachable and %d slots moved", moved)
				}
				continue
			}
			least, atHome := 0, true
			for p, q := range quota {
				least += max(0, q-counts(before)[p])
				atHome = atHome && q == counts(home)[p]
			}
			if healthy && !atHome {
				t.Fatalf("full health has quotas %v, homes are %v", quota, counts(home))
			}
			if atHome {
				if !slices.Equal(after, home) {
					t.Fatalf("full health: %v, home %v", after, home)
				}
				continue
			}
			if moved != least {
				t.Fatalf("%d slots moved, %d suffice: %v to %v, quotas %v", moved, least, before, after, quota)
			}
			for p, n := range counts(after) {
				if quota[p] != n {
					t.Fatalf("%+v holds %d, quota %d", p, n, quota[p])
				}
			}
		}
	}
}

// TestRemapSparesWhatDidNotChange verifies that a loss of capacity moves no slot elsewhere, and that on recovery all
// slots return.
func TestRemapSparesWhatDidNotChange(t *testing.T) {
	r := seeded(t)
	for range 300 {
		cfg := randomConfig(r)
		cfg.Policy = Remap
		e := mustEngine(t, cfg)
		start := randomCapacities(r, cfg)
		must(t, e.SetGroup(1, start))
		must(t, e.SetDestination(address(1), 1))
		if v, _ := e.Vector(1); !v.Reachable {
			continue
		}
		before := placesOf(t, e, 1)
		broken := slices.Clone(start)
		p := r.IntN(len(broken))
		broken[p].Capacity /= uint64(1 + r.IntN(4))
		if r.IntN(2) == 0 {
			broken[p].Capacity = 0
		}
		must(t, e.SetGroup(1, broken))
		after := placesOf(t, e, 1)
		for s := range before {
			if before[s].Plane != p && after[s] != before[s] {
				t.Fatalf("plane %d fell, slot %d moved from %+v to %+v", p, s, before[s], after[s])
			}
		}
		must(t, e.SetGroup(1, start))
		for place, n := range counts(placesOf(t, e, 1)) {
			if counts(before)[place] != n {
				t.Fatalf("after recovery %+v holds %d, before %d", place, n, counts(before)[place])
			}
		}
	}
}

// TestRemapTravelsWithTheDestination verifies that a destination that changes groups keeps its slots as far as the new
// group allows, and that destinations with equal histories share a vector.
func TestRemapTravelsWithTheDestination(t *testing.T) {
	cfg := square(4, 2)
	cfg.Policy, cfg.Slots = Remap, 16
	e, m := mustEngine(t, cfg), newMirror()
	must(t, e.SetGroup(1, capacities(cfg, 8, 8, 8, 8)))
	must(t, e.SetGroup(2, capacities(cfg, 8, 8, 0, 8)))
	for i := range 3 {
		must(t, e.SetDestination(address(i), 1))
	}
	home := placesOf(t, e, 0)
	m.apply(t, e)
	must(t, e.SetDestination(address(0), 2))
	must(t, e.SetDestination(address(1), 2))
	if a, b := e.destinations[0].vector, e.destinations[1].vector; a != b {
		t.Fatalf("equal histories have vectors %d and %d", a, b)
	}
	if moved := m.apply(t, e); moved != 2*4 {
		t.Fatalf("%d slots moved, want the failed plane's 4 of both destinations", moved)
	}
	must(t, e.SetDestination(address(0), 1))
	if m.apply(t, e); !slices.Equal(placesOf(t, e, 0), home) {
		t.Fatalf("not home again: %v", placesOf(t, e, 0))
	}
}

// TestDeleteWhatIsNotThere verifies that deleting a destination that is unknown or already deleted changes nothing.
func TestDeleteWhatIsNotThere(t *testing.T) {
	cfg := square(2, 1)
	e, m := mustEngine(t, cfg), newMirror()
	must(t, e.SetGroup(1, capacities(cfg, 8, 8)))
	must(t, e.SetDestination(address(1), 1))
	e.DeleteDestination(address(2))
	m.apply(t, e)
	if _, ok := e.Destination(address(1)); !ok {
		t.Fatal("an unknown destination took another one with it")
	}
	if id, ok := e.Destination(address(2)); ok || id != 0 {
		t.Fatalf("an unknown destination has vector %d", id)
	}
	must(t, e.SetDestination(address(1), 1))
	if u := e.Updates(); len(u) != 0 {
		t.Fatalf("the same destination again: %v", u)
	}
	e.DeleteDestination(address(1))
	e.DeleteDestination(address(1))
	m.apply(t, e)
	must(t, e.DeleteGroup(1))
	if u := e.Updates(); len(m.dests) != 0 || len(u) != 1 || u[0].Kind != VectorDelete {
		t.Fatalf("%v, %v left", u, m.dests)
	}
}

// TestManyHistories fills the intern table and empties it.
func TestManyHistories(t *testing.T) {
	cfg := square(4, 2)
	cfg.Policy, cfg.Slots = Remap, 24
	e, twin, m := mustEngine(t, cfg), newTwin(cfg), newMirror()
	r := rand.New(rand.NewPCG(1, 2))
	for id := uint32(1); id <= 40; id++ {
		c := randomCapacities(r, cfg)
		must(t, e.SetGroup(id, c))
		twin.setGroup(id, c)
	}
	for range 3000 {
		dst, id := address(r.IntN(600)), uint32(1+r.IntN(40))
		must(t, e.SetDestination(dst, id))
		twin.setDestination(dst, id)
	}
	twin.check(t, e)
	m.apply(t, e)
	if e.interned < 100 {
		t.Fatalf("only %d vectors", e.interned)
	}
	for dst := range twin.dests {
		e.DeleteDestination(dst)
	}
	m.apply(t, e)
	for id := uint32(1); id <= 40; id++ {
		must(t, e.DeleteGroup(id))
	}
	if e.interned != 0 || len(m.vectors) != 0 {
		t.Fatalf("%d vectors are left, the caller has %d", e.interned, len(m.vectors))
	}
}
