package status

import (
	"fmt"
	"net/netip"
	"testing"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// full returns a loop with n destinations over 32 vectors of 8 planes x 4 sub-ports and 32 slots, with one view built.
func full(n int) (*fakeLoop, []Key) {
	l := newFake(1, 0)
	l.layout.Groups[0].Planes = nil
	v := Vector{Reachable: true}
	for p := range 8 {
		lp, vp := LayoutPlane{Name: fmt.Sprintf("p%d", p)}, VectorPlane{Weight: 1, Bandwidth: 400e9, InEffect: true}
		for s := range 4 {
			lp.SubPorts, vp.SubPorts = append(lp.SubPorts, fmt.Sprintf("p%d-%d", p, s)), append(vp.SubPorts, 1)
			v.Slots = append(v.Slots, Slot{Plane: p, SubPort: s, Share: 31250000})
		}
		g := &l.layout.Groups[0]
		g.Planes, v.Planes = append(g.Planes, lp), append(v.Planes, vp)
	}
	l.builder = NewBuilder(l, l.layout, "bench")
	close(l.builder.started)
	for id := range uint32(32) {
		l.vectors[id+1] = v
		l.builder.MarkVector(id + 1)
	}
	prefixes := make([]Key, n)
	for i := range prefixes {
		prefixes[i] = Key{Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 255, byte(i >> 8), byte(i)}), 32)}
		l.destinations[prefixes[i]] = Destination{Vector: uint32(i%32) + 1, InEffect: true}
		l.builder.MarkDestination(prefixes[i])
	}
	l.builder.Commit()
	l.builder.build()
	return l, prefixes
}

// TestMarksDoNotAllocate checks that the loop's marks do not allocate.
func TestMarksDoNotAllocate(t *testing.T) {
	l, prefixes := full(1000)
	b := l.builder
	for _, p := range prefixes { // from here on the list of marks has its capacity
		b.MarkDestination(p)
	}
	b.Commit()
	b.build()
	i := 0
	for name, fn := range map[string]func(){
		"MarkDestination": func() { b.MarkDestination(prefixes[i%len(prefixes)]) },
		"MarkVector":      func() { b.MarkVector(uint32(i%32) + 1) },
		"MarkFabric":      func() { b.MarkFabric() },
		"Event":           func() { b.Event(Event{Kind: EventWeights, Subject: "10.255.0.1/32", Detail: "2:2:1:2"}) },
		"a whole step": func() {
			b.MarkVector(1)
			b.MarkDestination(prefixes[i%len(prefixes)])
			b.MarkFabric()
			b.Commit()
		},
	} {
		if n := testing.AllocsPerRun(1000, func() { fn(); i++ }); n != 0 {
			t.Errorf("%s allocates %v times", name, n)
		}
	}
	_, m, _ := newMetrics(t, l)
	if n := testing.AllocsPerRun(1000, func() { m.ObserveStep(1); m.ObserveAcknowledged(1) }); n != 0 {
		t.Errorf("observing allocates %v times", n)
	}
}

func BenchmarkMark(b *testing.B) {
	l, prefixes := full(16384)
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		l.builder.MarkDestination(prefixes[i&16383])
		l.builder.Commit()
	}
}

// BenchmarkView builds a view after one change among n destinations.
func BenchmarkView(b *testing.B) {
	for _, n := range []int{1024, 16384} {
		b.Run(fmt.Sprintf("destination/n=%d", n), func(b *testing.B) {
			l, prefixes := full(n)
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				l.builder.MarkDestination(prefixes[i*7919%n])
				l.builder.Commit()
				l.builder.build()
			}
		})
		b.Run(fmt.Sprintf("vector/n=%d", n), func(b *testing.B) {
			l, _ := full(n)
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				l.builder.MarkVector(uint32(i%32) + 1)
				l.builder.Commit()
				l.builder.build()
			}
		})
		b.Run(fmt.Sprintf("all/n=%d", n), func(b *testing.B) {
			l, prefixes := full(n)
			b.ReportAllocs()
			for b.Loop() {
				for _, p := range prefixes {
					l.builder.MarkDestination(p)
				}
				l.builder.Commit()
				l.builder.build()
			}
		})
	}
}

// discard is a watcher that only counts.
type discard struct{ destinations int }

func (d *discard) Send(m *farev1.WatchWeightsResponse) error {
	d.destinations += len(m.Weights)
	return nil
}

// BenchmarkWatchFanOut sends one change among 16,384 destinations to 64 watchers: a change of one destination, or of a
// vector that 512 share.
func BenchmarkWatchFanOut(b *testing.B) {
	const watchers = 64
	for _, c := range []struct {
		name string
		mark func(*Builder, int, []Key)
		want int
	}{
		{"destination", func(x *Builder, i int, p []Key) { x.MarkDestination(p[i*7919%len(p)]) }, 1},
		{"vector", func(x *Builder, i int, _ []Key) { x.MarkVector(uint32(i%32) + 1) }, 512},
	} {
		b.Run(c.name, func(b *testing.B) {
			l, prefixes := full(16384)
			f := &filter{omitPairs: true}
			var got discard
			b.ReportAllocs()
			n := 0
			for ; b.Loop(); n++ {
				since := l.builder.Revision()
				c.mark(l.builder, n, prefixes)
				l.builder.Commit()
				v := l.builder.build()
				for range watchers {
					if err := v.sendChanges(&got, "bench", f, since, false); err != nil {
						b.Fatal(err)
					}
				}
			}
			if got.destinations != n*watchers*c.want {
				b.Fatalf("%d destinations told of, want %d", got.destinations, n*watchers*c.want)
			}
		})
	}
}

// BenchmarkListPage lists a page of 1,000 destinations with 8 planes x 4 sub-ports, without pairs.
func BenchmarkListPage(b *testing.B) {
	l, _ := full(16384)
	s := l.service(b, func(c *ServiceConfig) { c.Reader = l.builder.Reader(here) })
	b.ReportAllocs()
	for b.Loop() {
		if _, err := s.Weights().ListWeights(b.Context(), &farev1.ListWeightsRequest{Filter: &farev1.WeightFilter{OmitPairs: true}}); err != nil {
			b.Fatal(err)
		}
	}
}
