package peers

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"
)

// BenchmarkIdleToInEffect measures the time from a leaf's write of an UPDATE until the kernel's notification of the new
// weights of the only destination, and until packets follow them; of BIRD, of the least that a program in Go can do
// with a route and with a group, and of fared with both drivers in two processes and in one, in turn. All processes are
// idle for 300 ms before an event, so their code and data have left the caches. Aim: 200 µs at the median;
// docs/benchmarks.md has the figures.
func BenchmarkIdleToInEffect(b *testing.B) {
	kinds := []contestant{bird{}, floor{"route"}, floor{"group"},
		fared{driver: "linux"}, fared{driver: "linux", inside: true}, fared{driver: "bpf"}, fared{driver: "bpf", inside: true}}
	var beds []*bed
	for _, k := range kinds {
		x := newBed(b, k, 1, variant{})
		if err := x.settle(); err != nil {
			b.Fatalf("%s: %v", k.name(), err)
		}
		beds = append(beds, x)
	}
	judges := []string{"kernel", "packets"}
	took := map[string][]float64{}
	one := func(x *bed, judge string, speed int, want weights) {
		idle(300 * time.Millisecond)
		change := func() (moment, error) { return x.leaves[0].announce(speed, []int{0}) }
		var ms float64
		var err error
		if judge == "kernel" {
			ms, err = event(x, want, even, change)
		} else {
			ms, err = packetEvent(x, fmt.Sprint("idle ", speed), x.every(), x.state[0], want, change)
			x.state = [2]weights{want, even}
		}
		if err != nil && !errors.Is(err, errLearned) {
			b.Fatalf("%s by %s: %v", x.name, judge, err)
		}
		if err == nil {
			took[x.name+"-"+judge] = append(took[x.name+"-"+judge], ms)
		}
	}
	round := func() {
		for _, x := range beds {
			for _, judge := range judges {
				if judge == "kernel" && !x.contestant.inKernel() {
					continue
				}
				one(x, judge, half, degraded)
				one(x, judge, full, even)
			}
		}
	}
	round()
	clear(took)
	b.ResetTimer()
	for range b.N {
		round()
	}
	for name, all := range took {
		slices.Sort(all)
		at := func(p float64) float64 { return 1000 * all[int(p*float64(len(all)-1))] }
		b.ReportMetric(at(0.5), name+"-p50-µs")
		b.ReportMetric(at(0.99), name+"-p99-µs")
	}
	b.ReportMetric(0, "ns/op") // includes the pauses
}
