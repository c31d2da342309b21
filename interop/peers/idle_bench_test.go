package peers

import (
	"errors"
	"slices"
	"testing"
	"time"
)

// BenchmarkIdleToInEffect measures the time from a leaf's write of an UPDATE until the kernel's notification of the new weights of the only
// destination, with driver linux in two processes and in one, in turn. All processes are idle for 300 ms before an event, so their code and data
// have left the caches. Aim: 200 µs at the median; docs/benchmarks.md has the figures.
func BenchmarkIdleToInEffect(b *testing.B) {
	kinds := []fared{{driver: "linux"}, {driver: "linux", inside: true}}
	var beds []*bed
	for _, k := range kinds {
		beds = append(beds, newBed(b, k, 1, variant{}))
	}
	one := func(x *bed, speed int, want weights) float64 {
		idle(300 * time.Millisecond)
		took, err := event(x, want, even, func() (moment, error) { return x.leaves[0].announce(speed, []int{0}) })
		if err != nil && !errors.Is(err, errLearned) {
			b.Fatal(err)
		}
		return took
	}
	took := make([][]float64, len(beds))
	round := func() {
		for k, x := range beds {
			took[k] = append(took[k], one(x, half, degraded), one(x, full, even))
		}
	}
	for _, x := range beds {
		if err := x.settle(); err != nil {
			b.Fatal(err)
		}
	}
	round()
	clear(took)
	b.ResetTimer()
	for range b.N {
		round()
	}
	for k, all := range took {
		slices.Sort(all)
		at := func(p float64) float64 { return 1000 * all[int(p*float64(len(all)-1))] }
		b.ReportMetric(at(0.5), kinds[k].name()+"-p50-µs")
		b.ReportMetric(at(0.99), kinds[k].name()+"-p99-µs")
	}
	b.ReportMetric(0, "ns/op") // includes the pauses
}
