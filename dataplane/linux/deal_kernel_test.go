package linux

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/rtnl"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// TestKernelDealsAsPlanned replaces one group by random weights, hundreds of times, and compares every bucket with the
// plan.
func TestKernelDealsAsPlanned(t *testing.T) {
	netnstest.Require(t)
	for _, c := range []struct{ buckets, subPorts, maxWeight int }{{1024, 4, 65535}, {1024, 8, 256}, {61, 5, 65535}, {16384, 3, 65535}, {65535, 64, 65535}, {mostNarrow, 5, 256}} {
		t.Run(fmt.Sprint(c), func(t *testing.T) {
			if c.buckets > 1024 {
				gate.Slow(t, gate.Kernel, "60 rounds of a large table")
			}
			s := netnstest.New(t)
			conn := netnstest.In(s, rtnl.Dial)
			defer conn.Close()
			do := func(fill func(*rtnl.Batch)) {
				t.Helper()
				b := conn.Begin()
				fill(b)
				if err := errors.Join(conn.Do(b)...); err != nil {
					t.Fatal(err)
				}
			}
			const drop, group = 1, 2
			do(func(b *rtnl.Batch) {
				b.SetNexthop(rtnl.Nexthop{ID: drop, Family: unix.AF_INET, Device: 1}, rtnl.Create)
			})
			owner := map[uint32]int{}
			next := uint32(100)
			l, sc := layout{c.buckets, c.subPorts}, newScaling(c.buckets, c.maxWeight)
			seed := uint64(time.Now().UnixNano())
			t.Logf("seed %d", seed)
			random := rand.New(rand.NewPCG(seed, 0))
			var current []segment
			total := 0
			for round := range 60 {
				weights := make([]uint32, c.subPorts)
				for i := range weights {
					weights[i] = uint32(random.IntN(4))
				}
				target := l.runs(weights)
				if target == nil {
					continue
				}
				taken := map[uint32]bool{}
				for _, c := range current {
					taken[c.id] = true
				}
				if round%7 == 6 {
					current = nil // redistribute everything
				}
				flags := uint16(rtnl.Change)
				if round == 0 || len(taken) == 0 {
					flags = rtnl.Create
				}
				plan := sc.deal(current, target, func(id uint32) int { return owner[id] }, func(id uint32) int { return owner[id] + 1 }, func(subPort int) uint32 {
					for id, o := range owner {
						if o == subPort && !taken[id] {
							taken[id] = true
							return id
						}
					}
					next++
					owner[next] = subPort
					taken[next] = true
					do(func(b *rtnl.Batch) {
						b.SetNexthop(rtnl.Nexthop{ID: next, Gateway: netip.AddrFrom4([4]byte{198, 18, 0, byte(subPort)}), Device: 1, OnLink: true}, rtnl.Create)
					})
					return next
				})
				do(func(b *rtnl.Batch) {
					b.SetNexthop(rtnl.Nexthop{ID: group, Members: append(plan.members, rtnl.Member{ID: drop, Weight: 1}), Resilient: true, Buckets: uint16(c.buckets)}, flags)
				})
				current = plan.segments
				total += plan.moved
				buckets, err := conn.Buckets(group)
				if err != nil {
					t.Fatal(err)
				}
				if got := segmentsOf(buckets); !slices.Equal(got, plan.segments) {
					t.Fatalf("round %d, weights %v:\nkernel %v\nplan   %v", round, weights, got, plan.segments)
				}
			}
			t.Logf("%d buckets moved, %d nexthops", total, len(owner))
		})
	}
}
