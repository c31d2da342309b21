package wecmp

import (
	"math"
	"slices"
	"testing"
)

func TestMinusLog2(t *testing.T) {
	r := seeded(t)
	for range 20000 {
		h := r.Uint64() >> r.IntN(64)
		want := 64 - math.Log2(float64(h|1))
		if got := float64(minusLog2(h)) / (1 << logFraction); math.Abs(got-want) > 2e-7 {
			t.Fatalf("-log2(%d/2^64) = %v, want %v", h, got, want)
		}
	}
	last := uint64(math.MaxUint64)
	for _, h := range []uint64{0, 1, 2, 3, 1 << 32, 1<<63 - 1, 1 << 63, 1<<63 + 1<<52, math.MaxUint64} {
		got := minusLog2(h)
		if got > last || got < 1 || got >= 1<<52 {
			t.Fatalf("%d after %d at %d", got, last, h)
		}
		last = got
	}
}

const samples = 40_000

func draw(e *Engine, vector uint32) []int {
	v, _ := e.Vector(vector)
	shares := make([]uint32, len(v.Slots))
	for s, slot := range v.Slots {
		shares[s] = slot.SharePPB
	}
	out := make([]int, samples)
	for i := range out {
		out[i] = Rendezvous(shares, uint64(i)*64)
	}
	return out
}

// TestRendezvousIsWeighted verifies that every slot gets its share of the addresses, within five standard deviations.
func TestRendezvousIsWeighted(t *testing.T) {
	for _, mode := range []Mode{PerFlow, PerPacket} {
		t.Run(mode.String(), func(t *testing.T) { rendezvousIsWeighted(t, mode) })
	}
}

func rendezvousIsWeighted(t *testing.T, mode Mode) {
	cfg := square(4, 2)
	cfg.Mode = mode
	cfg.Slots = 11
	e := mustEngine(t, cfg)
	planes := capacities(cfg, 800e9, 400e9, 0, 700e9)
	planes[3].SubPorts[1] = 0
	planes[0].SubPorts[1] = 3 // one sub-port three times as fast
	must(t, e.SetGroup(1, planes))
	v, _ := e.Vector(1)
	got := make([]int, len(v.Slots))
	for _, s := range draw(e, 1) {
		got[s]++
	}
	for s, slot := range v.Slots {
		p := float64(slot.SharePPB) / Parts
		if d := math.Abs(float64(got[s]) - samples*p); d > 5*math.Sqrt(samples*p*(1-p)) {
			t.Errorf("slot %d: %d of %d addresses, share %v", s, got[s], samples, p)
		}
	}
	if s := Rendezvous(make([]uint32, 3), 1); s != -1 {
		t.Errorf("slot %d where every share is 0", s)
	}
	must(t, e.SetGroup(2, capacities(cfg, 0, 0, 0, 0)))
	if s := draw(e, 2)[0]; s != -1 {
		t.Errorf("slot %d where nothing is reachable", s)
	}
}

// TestAddressesMoveOnlyWhenTheyMust verifies that an address leaves only slots that are marked to drain. If one plane's
// weight changes, by itself or because its sub-ports fail, no more addresses move than the shares that moved, and 5 %.
func TestAddressesMoveOnlyWhenTheyMust(t *testing.T) {
	r, bounded := seeded(t), 0
	for i := range 16 {
		cfg := square(4, 2)
		cfg.Ordering, cfg.Policy, cfg.Slots = Ordering(1+i%2), Policy(i/2%2), 8+i/4%2*3
		e := mustEngine(t, cfg)
		planes := capacities(cfg, 800e9, 800e9, 800e9, 800e9)
		must(t, e.SetGroup(1, planes))
		must(t, e.SetDestination(address(1), 1))
		e.Updates()
		for range 6 {
			v, _ := e.Vector(1)
			before, slots, reachable, total := draw(e, 1), slices.Clone(v.Slots), v.Reachable, live(planes)
			// The capacity per live slot changes in one direction: one plane's weight changes.
			p, up := r.IntN(4), r.Uint64N(2)
			planes[p].Capacity, planes[p].SubPorts[0], planes[p].SubPorts[1] = 400e9*(1+up), 1, up
			if r.IntN(4) == 0 { // the second sub-port at 100G, the first at 400G
				planes[p].Capacity, planes[p].SubPorts[0], planes[p].SubPorts[1] = 500e9, 4, 1
			}
			simple := cfg.Policy == Reweight && cfg.Slots == 8
			if r.IntN(3) == 0 {
				planes[p].Capacity = 100e9 * uint64(r.IntN(9))
			}
			must(t, e.SetGroup(1, planes))
			e.Updates()
			if v, _ = e.Vector(1); !v.Reachable || !reachable {
				continue
			}
			after, moved, share := draw(e, 1), 0, 0.0
			for k := range before {
				if before[k] != after[k] {
					moved++
					if !v.Slots[before[k]].Drain {
						t.Fatalf("an address left slot %d, which is not drained:\n%v", before[k], v)
					}
				}
			}
			// Slots whose capacities change by different factors exchange addresses with each other, too.
			least, most := math.Inf(1), math.Inf(-1)
			for s := range slots {
				was, is := float64(slots[s].SharePPB)/Parts, float64(v.Slots[s].SharePPB)/Parts
				share += math.Max(0, was-is)
				before, after := was*total, is*live(planes) // capacity behind the slot, bit/s
				if math.Abs(after-before) > 1e6 {
					factor := math.Log(after / before)
					least, most = min(least, factor), max(most, factor)
				}
			}
			if !simple || most > least+1e-3 {
				continue
			}
			bounded++
			if limit := 1.05*share + 5/math.Sqrt(samples); float64(moved)/samples > limit {
				t.Fatalf("%d of %d addresses moved, share %v moved", moved, samples, share)
			}
		}
	}
	if bounded < 8 {
		t.Fatalf("only %d steps had a bound", bounded)
	}
}

// live sums the capacities of planes with a live sub-port.
func live(planes []Capacity) (sum float64) {
	for _, p := range planes {
		if slices.Max(p.SubPorts) > 0 {
			sum += float64(p.Capacity)
		}
	}
	return sum
}

// TestDrainMarks verifies that only the slots of a plane lose addresses when its weight falls, that it takes addresses
// from all others when its weight rises, and that nothing is marked under Weak.
func TestDrainMarks(t *testing.T) {
	cfg := square(4, 2)
	cfg.Ordering = Strong
	e := mustEngine(t, cfg)
	marked := func() []uint16 {
		for _, u := range e.Updates() {
			if u.Kind == VectorSet {
				return u.Drain
			}
		}
		t.Fatal("no vector was set")
		return nil
	}
	must(t, e.SetGroup(1, capacities(cfg, 8, 8, 8, 8)))
	if d := marked(); d != nil {
		t.Errorf("new: %v", d)
	}
	must(t, e.SetGroup(1, capacities(cfg, 8, 8, 4, 8)))
	if d := marked(); !slices.Equal(d, []uint16{2, 6}) {
		t.Errorf("plane 2 fell: %v", d)
	}
	must(t, e.SetGroup(1, capacities(cfg, 8, 8, 8, 8)))
	if d := marked(); !slices.Equal(d, []uint16{0, 1, 3, 4, 5, 7}) {
		t.Errorf("plane 2 rose: %v", d)
	}
	must(t, e.SetGroup(1, capacities(cfg, 4, 4, 4, 4)))
	if d := marked(); d != nil {
		t.Errorf("all fell alike: %v", d)
	}
	// A sub-port fails and the plane halves: the other sub-port's slot keeps its weight and its addresses.
	half := capacities(cfg, 4, 4, 2, 4)
	half[2].SubPorts[1] = 0
	must(t, e.SetGroup(1, half))
	if d := marked(); !slices.Equal(d, []uint16{6}) {
		t.Errorf("half of plane 2 failed: %v", d)
	}
	// One sub-port and so its plane slow down: only its slot loses addresses. As it recovers it takes addresses from
	// all others.
	slow := capacities(cfg, 4, 3, 4, 4)
	slow[1].SubPorts[0] = 2
	must(t, e.SetGroup(1, capacities(cfg, 4, 4, 4, 4)))
	e.Updates()
	must(t, e.SetGroup(1, slow))
	if d := marked(); !slices.Equal(d, []uint16{5}) {
		t.Errorf("a sub-port of plane 1 slowed down: %v", d)
	}
	must(t, e.SetGroup(1, capacities(cfg, 4, 4, 4, 4)))
	if d := marked(); !slices.Equal(d, []uint16{0, 1, 2, 3, 4, 6, 7}) {
		t.Errorf("the sub-port of plane 1 recovered: %v", d)
	}
	// A plane recovers: its slots had no addresses to lose.
	must(t, e.SetGroup(1, capacities(cfg, 4, 4, 0, 4)))
	e.Updates()
	must(t, e.SetGroup(1, capacities(cfg, 4, 4, 4, 4)))
	if d := marked(); !slices.Equal(d, []uint16{0, 1, 3, 4, 5, 7}) {
		t.Errorf("plane 2 returned: %v", d)
	}
	// Slot 0 falls less than all others, so only slot 0 gains.
	most := capacities(cfg, 3, 2, 2, 2)
	most[0].SubPorts[0] = 2
	must(t, e.SetGroup(1, most))
	if d := marked(); !slices.Equal(d, []uint16{1, 2, 3, 4, 5, 6, 7}) {
		t.Errorf("all but slot 0 halved: %v", d)
	}
	must(t, e.SetGroup(1, half))
	e.Updates()
	// A destination that changes vectors drains the slots that lose addresses by the change.
	must(t, e.SetGroup(2, capacities(cfg, 4, 0, 4, 4)))
	must(t, e.SetGroup(1, capacities(cfg, 4, 4, 4, 4)))
	must(t, e.SetDestination(address(1), 1))
	e.Updates()
	must(t, e.SetDestination(address(1), 2))
	u := e.Updates()
	if len(u) != 1 || !slices.Equal(u[0].Drain, []uint16{1, 5}) {
		t.Errorf("changed vectors: %v", u)
	}
	cfg.Ordering = Weak
	e = mustEngine(t, cfg)
	must(t, e.SetGroup(1, capacities(cfg, 8, 8, 8, 8)))
	e.Updates()
	must(t, e.SetGroup(1, capacities(cfg, 8, 8, 0, 8)))
	if d := marked(); d != nil {
		t.Errorf("weak: %v", d)
	}
}
