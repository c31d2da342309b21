package wecmp

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/fared/fared/internal/testkit/race"
)

// allocates fails if fn allocates on average, after some calls to reach the steady state.
func allocates(t *testing.T, what string, fn func()) {
	t.Helper()
	for range 64 {
		fn()
	}
	if n := testing.AllocsPerRun(500, fn); n != 0 {
		t.Errorf("%s: %v allocations", what, n)
	}
}

func TestSteadyStateAllocatesNothing(t *testing.T) {
	for _, policy := range []Policy{Reweight, Remap} {
		for _, ordering := range []Ordering{Weak, Strong} {
			t.Run(fmt.Sprint(policy, " ", ordering), func(t *testing.T) {
				cfg := square(8, 4)
				cfg.Policy, cfg.Ordering, cfg.MaxWeightSum, cfg.Hash = policy, ordering, 64, LinuxL4{Seed: 3}
				e := mustEngine(t, cfg)
				healthy := capacities(cfg, slices.Repeat([]uint64{800e9}, 8)...)
				failed := capacities(cfg, 800e9, 800e9, 0, 800e9, 800e9, 800e9, 800e9, 800e9)
				must(t, e.SetGroup(1, healthy))
				must(t, e.SetGroup(2, failed))
				for i := range 1024 {
					must(t, e.SetDestination(address(i), uint32(1+i%2)))
				}
				e.Updates()
				n := uint64(0)
				allocates(t, "group changes", func() {
					n++
					healthy[3].Capacity = 100e9 * (1 + n%8)
					must(t, e.SetGroup(1, healthy))
					e.Updates()
				})
				allocates(t, "destination moves", func() {
					n++
					must(t, e.SetDestination(address(int(n/2)%1024), uint32(1+n%2)))
					e.Updates()
				})
				allocates(t, "group comes and goes", func() {
					n++
					failed[5].Capacity = 100e9 * (1 + n%8)
					must(t, e.SetGroup(3, failed))
					must(t, e.SetDestination(address(7), 3))
					e.Updates()
					must(t, e.SetDestination(address(7), 1))
					must(t, e.DeleteGroup(3))
					e.Updates()
				})
				allocates(t, "destination comes and goes", func() {
					e.DeleteDestination(address(9))
					e.Updates()
					must(t, e.SetDestination(address(9), 1))
					e.Updates()
				})
				buf, src, dst := make([]uint16, 0, 32), netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")
				id, _ := e.Destination(address(0))
				allocates(t, "views", func() {
					n++
					_, _ = e.Vector(id)
				})
				v, _ := e.Vector(id)
				places := v.Places()
				if !race.Enabled { // under the race detector sync.Pool drops items at random
					allocates(t, "ports", func() { buf, _ = e.Planner().Ports(src, dst, places, buf) })
				}
			})
		}
	}
}

// TestGroupChangeCostsNoDestinations verifies that the report of a group's change has one update per vector, whatever
// the number of destinations.
func TestGroupChangeCostsNoDestinations(t *testing.T) {
	for _, policy := range []Policy{Reweight, Remap} {
		cfg := square(4, 2)
		cfg.Policy = policy
		e := mustEngine(t, cfg)
		must(t, e.SetGroup(1, capacities(cfg, 8, 8, 8, 8)))
		for i := range 5000 {
			must(t, e.SetDestination(address(i), 1))
		}
		if u := e.Updates(); len(u) != 5001 {
			t.Fatalf("%d updates", len(u))
		}
		must(t, e.SetGroup(1, capacities(cfg, 8, 8, 0, 8)))
		if u := e.Updates(); len(u) != 1 || len(e.dirtyDests) != 0 {
			t.Fatalf("%v: %d updates for one failure", policy, len(u))
		}
	}
}
