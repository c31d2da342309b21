package rtnl_test

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/rtnl"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// groupBench holds eight sub-ports with two nexthop objects each, a nexthop on the loopback device, and a connection to
// the kernel.
type groupBench struct {
	*testing.B
	c *rtnl.Conn
}

const benchSubPorts = 8

func nexthopID(subPort, object int) uint32 { return uint32(1000 + subPort*10 + object) }

// do executes messages and returns the time from the request to the last answer.
func (g *groupBench) do(f func(*rtnl.Batch)) time.Duration {
	g.Helper()
	begin := time.Now()
	b := g.c.Begin()
	f(b)
	for _, err := range g.c.Do(b) {
		if err != nil {
			g.Fatal(err)
		}
	}
	return time.Since(begin)
}

// members returns the members of a group with equal shares or, if half is set, with half a share of sub-port 2, whose
// other buckets go to second objects of the other sub-ports.
func members(buckets int, half bool) (all []rtnl.Member) {
	home := buckets / benchSubPorts
	scale := max(2, 1<<16/max(home, 1024)-1)
	part := home / 2 / (benchSubPorts - 1)
	for i := range benchSubPorts {
		n := home
		if half && i == 2 {
			n -= part * (benchSubPorts - 1)
		}
		all = append(all, rtnl.Member{ID: nexthopID(i, 0), Weight: uint32(n * scale)})
	}
	for i := range benchSubPorts {
		if half && i != 2 {
			all = append(all, rtnl.Member{ID: nexthopID(i, 1), Weight: uint32(part * scale)})
		}
	}
	return append(all, rtnl.Member{ID: 999, Weight: 1})
}

// BenchmarkGroup measures a change of a resilient group, by its number of buckets: its replacement in place, its
// replacement with the number of buckets repeated in the message, the replacement of all owners, and a new group with
// one route to it.
func BenchmarkGroup(b *testing.B) {
	netnstest.Require(b)
	n := netnstest.New(b)
	leaf := netnstest.New(b)
	for i := range benchSubPorts {
		device := fmt.Sprintf("p%d", i)
		netnstest.Cable(b, n, device, fmt.Sprintf("10.1.%d.1/24", i), leaf, device, fmt.Sprintf("10.1.%d.2/24", i))
	}
	c := netnstest.In(n, rtnl.Dial)
	b.Cleanup(func() { c.Close() })
	links, err := c.Links()
	if err != nil {
		b.Fatal(err)
	}
	index := map[string]int{}
	for _, l := range links {
		index[l.Name] = l.Index
	}
	setUp := &groupBench{b, c}
	setUp.do(func(batch *rtnl.Batch) {
		for i := range benchSubPorts {
			for object := range 3 {
				batch.SetNexthop(rtnl.Nexthop{
					ID: nexthopID(i, object), Gateway: netip.AddrFrom4([4]byte{10, 1, byte(i), 2}), Device: index[fmt.Sprintf("p%d", i)], OnLink: true,
				}, rtnl.Create)
			}
		}
		batch.SetNexthop(rtnl.Nexthop{ID: 999, Family: unix.AF_INET, Device: index["lo"]}, rtnl.Create)
	})
	route := func(group uint32) rtnl.Route {
		return rtnl.Route{Prefix: netip.MustParsePrefix("10.255.0.2/32"), Metric: 20, Nexthop: group}
	}
	for _, buckets := range []int{1024, 2048, 4096, 8192, 16384, 65528} {
		group := func(id uint32, all []rtnl.Member, size int) rtnl.Nexthop {
			return rtnl.Nexthop{ID: id, Members: all, Resilient: true, Buckets: uint16(size)}
		}
		for name, change := range map[string]func(g *groupBench, turn int) time.Duration{
			"replace": func(g *groupBench, turn int) time.Duration {
				return g.do(func(batch *rtnl.Batch) { batch.SetNexthop(group(5000, members(buckets, turn%2 == 0), 0), rtnl.Change) })
			},
			"replace with the number": func(g *groupBench, turn int) time.Duration {
				return g.do(func(batch *rtnl.Batch) {
					batch.SetNexthop(group(5000, members(buckets, turn%2 == 0), buckets), rtnl.Change)
				})
			},
			"replace all": func(g *groupBench, turn int) time.Duration {
				all := members(buckets, false)
				for i := range all[:benchSubPorts] {
					all[i].ID = nexthopID(i, 1+turn%2)
				}
				return g.do(func(batch *rtnl.Batch) { batch.SetNexthop(group(5000, all, 0), rtnl.Change) })
			},
			"new group and route": func(g *groupBench, turn int) time.Duration {
				id := uint32(5000 + turn%2)
				took := g.do(func(batch *rtnl.Batch) {
					batch.SetNexthop(group(5001-uint32(turn%2), members(buckets, turn%2 == 0), buckets), rtnl.Create)
					batch.SetRoute(route(5001-uint32(turn%2)), rtnl.Change)
				})
				g.do(func(batch *rtnl.Batch) { batch.DelNexthop(id) })
				return took
			},
		} {
			b.Run(fmt.Sprintf("%s/buckets=%d", name, buckets), func(b *testing.B) {
				g := &groupBench{b, c}
				g.do(func(batch *rtnl.Batch) {
					batch.SetNexthop(group(5000, members(buckets, false), buckets), rtnl.Create)
					batch.SetRoute(route(5000), rtnl.Create)
				})
				var took []time.Duration
				turns := 0
				for b.Loop() {
					took = append(took, change(g, turns))
					turns++
				}
				last := uint32(5000)
				if name == "new group and route" {
					last += uint32(turns % 2)
				}
				g.do(func(batch *rtnl.Batch) { batch.DelNexthop(last) })
				slices.Sort(took)
				b.ReportMetric(float64(took[len(took)/2].Nanoseconds())/1000, "p50-us")
				b.ReportMetric(float64(took[len(took)*99/100].Nanoseconds())/1000, "p99-us")
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}
