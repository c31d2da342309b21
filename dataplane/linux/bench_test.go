package linux

import (
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"testing"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
)

const (
	benchPlanes = 8
	benchBatch  = 1024
)

// bench is a Driver whose Commit is called directly, after Settle.
type bench struct {
	b       *testing.B
	h       *host
	p       *Driver
	vectors int
	groups  []*farev1.Vector
	took    []time.Duration // durations of single Commits
}

func newBench(b *testing.B, vectors, planes int) *bench {
	h := newHost(b, planes)
	h.config.Logger = slog.New(slog.DiscardHandler)
	h.config.AuditInterval, h.config.Buckets = time.Hour, 0 // as in production
	n := &bench{b: b, h: h, p: h.open(), vectors: vectors, groups: make([]*farev1.Vector, vectors+1)}
	if err := n.p.SetForwarding(h.forwarding); err != nil {
		b.Fatal(err)
	}
	if err := n.p.Settle(); err != nil {
		b.Fatal(err)
	}
	return n
}

func (n *bench) commit(changes []contract.Change) {
	for batch := range slices.Chunk(changes, benchBatch) {
		begin := time.Now()
		if err := n.p.Commit(batch); err != nil {
			n.b.Fatal(err)
		}
		n.took = append(n.took, time.Since(begin))
	}
}

// vector returns group i of a state; the weights differ between groups and between states.
func (n *bench) vector(i, state int) *farev1.Vector {
	weights := make([]uint32, len(n.h.forwarding.Planes))
	for j := range weights {
		weights[j] = uint32(4 + (i*7+j*j+state)%13)
	}
	weights[i%len(weights)] += uint32(i)
	return n.h.group(uint32(i), weights...).GetSetVector()
}

func (n *bench) setGroups(changes []contract.Change, state int, without string) []contract.Change {
	for i := 1; i <= n.vectors; i++ {
		g := n.vector(i, state)
		g.Members = slices.DeleteFunc(g.Members, func(m *farev1.VectorMember) bool { return m.Device == without })
		changes = append(changes, contract.Change{Kind: contract.GroupChange, Group: uint32(i), Before: n.groups[i], After: g})
		n.groups[i] = g
	}
	return changes
}

func (n *bench) destinations(count int, there bool) (changes []contract.Change) {
	for i := range count {
		c := contract.Change{
			Kind: contract.DestinationChange, To: contract.Destination{Group: uint32(1 + i%n.vectors)},
			Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(128 + i>>16), byte(i >> 8), byte(i)}), 32),
		}
		if !there {
			c.From, c.To = c.To, c.From
		}
		changes = append(changes, c)
	}
	return changes
}

func (n *bench) removeGroups() (changes []contract.Change) {
	for i := 1; i <= n.vectors; i++ {
		changes = append(changes, contract.Change{Kind: contract.GroupChange, Group: uint32(i), Before: n.groups[i]})
		n.groups[i] = nil
	}
	return changes
}

// report adds percentiles of the durations, the changes sent to the kernel per Commit, and the number of kernel
// objects.
func (n *bench) report(before, after Stats, times int) {
	slices.Sort(n.took)
	n.b.ReportMetric(float64(n.took[len(n.took)/2].Microseconds()), "commit-p50-us")
	n.b.ReportMetric(float64(n.took[len(n.took)*99/100].Microseconds()), "commit-p99-us")
	n.b.ReportMetric(float64(sent(after)-sent(before))/float64(times), "kernel-ops/op")
	n.b.ReportMetric(float64(after.NexthopObjects), "nexthops")
	n.b.ReportMetric(float64(after.GroupObjects), "groups")
	n.b.ReportMetric(float64(after.RouteObjects), "routes")
}

// BenchmarkProgram programs destinations over a number of vectors from an empty state, in batches of 1,024.
func BenchmarkProgram(b *testing.B) {
	for _, c := range []struct{ destinations, vectors int }{{16384, 1}, {16384, 16}, {16384, 256}, {10000, 1}} {
		b.Run(fmt.Sprintf("destinations=%d/vectors=%d", c.destinations, c.vectors), func(b *testing.B) {
			n := newBench(b, c.vectors, benchPlanes)
			var whole []time.Duration
			var before, after Stats
			for b.Loop() {
				before = n.p.Stats()
				begin := time.Now()
				n.commit(append(n.setGroups(nil, 0, ""), n.destinations(c.destinations, true)...))
				whole = append(whole, time.Since(begin))
				after = n.p.Stats()
				b.StopTimer()
				timed := n.took
				n.commit(n.destinations(c.destinations, false))
				n.commit(n.removeGroups())
				n.took = timed
				b.StartTimer()
			}
			n.report(before, after, 1)
			slices.Sort(whole)
			b.ReportMetric(float64(whole[len(whole)/2].Nanoseconds())/float64(c.destinations), "ns/destination")
		})
	}
}

// BenchmarkPlaneLost removes a sub-port from 16,384 destinations: SubPortState, then the new weights of every group.
// "down" is the duration of SubPortState alone, the total includes the new weights.
func BenchmarkPlaneLost(b *testing.B) {
	for _, vectors := range []int{1, 4, 16, 256} {
		b.Run(fmt.Sprintf("vectors=%d", vectors), func(b *testing.B) {
			n := newBench(b, vectors, benchPlanes)
			n.commit(append(n.setGroups(nil, 0, ""), n.destinations(16384, true)...))
			n.took = nil
			var down, whole []time.Duration
			before := n.p.Stats()
			times, ops, downOps := 0, uint64(0), uint64(0)
			for b.Loop() {
				at := n.p.Stats()
				begin := time.Now()
				n.commit([]contract.Change{{Kind: contract.SubPortChange, Device: "p3", Up: false}})
				down = append(down, time.Since(begin))
				downOps += sent(n.p.Stats()) - sent(at)
				n.commit(n.setGroups(nil, 1, "p3"))
				whole = append(whole, time.Since(begin))
				ops += sent(n.p.Stats()) - sent(at)
				times++
				b.StopTimer()
				n.commit(append(n.setGroups(nil, 0, ""), contract.Change{Kind: contract.SubPortChange, Device: "p3", Up: true}))
				b.StartTimer()
			}
			after := n.p.Stats()
			n.took = whole
			n.report(before, after, times)
			b.ReportMetric(float64(ops)/float64(times), "kernel-ops/op")
			b.ReportMetric(float64(downOps)/float64(times), "down-ops/op")
			slices.Sort(down)
			b.ReportMetric(float64(down[len(down)/2].Microseconds()), "down-p50-us")
			b.ReportMetric(float64(down[len(down)*99/100].Microseconds()), "down-p99-us")
		})
	}
}

// BenchmarkSetVector changes the weights of one vector between two states: a change of its group in place.
func BenchmarkSetVector(b *testing.B) {
	for _, planes := range []int{2, benchPlanes, 32} {
		for _, routes := range []int{1, 64} {
			b.Run(fmt.Sprintf("buckets=%d/routes=%d", planes*DefaultBuckets, routes), func(b *testing.B) {
				n := newBench(b, 1, planes)
				n.commit(append(n.setGroups(nil, 0, ""), n.destinations(routes, true)...))
				n.took = nil
				for state := 0; b.Loop(); state++ {
					n.commit(n.setGroups(nil, state%2, ""))
				}
				n.report(n.p.Stats(), n.p.Stats(), 1)
			})
		}
	}
}

// BenchmarkLook measures a look for routes of other programs that packets to 10,000 destinations follow.
func BenchmarkLook(b *testing.B) {
	n := newBench(b, 8, benchPlanes)
	n.commit(n.setGroups(nil, 0, ""))
	n.commit(n.destinations(10_000, true))
	for b.Loop() {
		n.p.look()
	}
}

// BenchmarkAudit measures an audit of 10,000 destinations, as one happens every minute.
func BenchmarkAudit(b *testing.B) {
	n := newBench(b, 8, benchPlanes)
	n.commit(n.setGroups(nil, 0, ""))
	n.commit(n.destinations(10_000, true))
	for b.Loop() {
		n.p.audit()
		n.p.lookInAudit()
	}
}
