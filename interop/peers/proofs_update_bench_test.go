package peers

import (
	"errors"
	"slices"
	"testing"
	"time"
)

// BenchmarkProofsUpdate measures an UPDATE of one destination until the weights are in the kernel, with proofs, whose
// destination answers and probes, and without, in turn. It reports the medians, and the one with by the one without.
func BenchmarkProofsUpdate(b *testing.B) {
	beds := []*bed{newBed(b, fared{driver: "linux"}, 1, variant{}), newBed(b, fared{driver: "linux"}, 1, variant{silent: true})}
	beds[0].reflect()
	for _, x := range beds {
		if err := x.settle(); err != nil {
			b.Fatal(err)
		}
	}
	idle(5 * time.Second) // the destination has been found to answer
	took := make([][]float64, len(beds))
	round := func() {
		for i, x := range beds {
			for _, to := range []struct {
				speed int
				want  weights
			}{{half, degraded}, {full, even}} {
				idle(300 * time.Millisecond)
				ms, err := event(x, to.want, even, func() (moment, error) { return x.leaves[0].announce(to.speed, []int{0}) })
				switch {
				case err == nil:
					took[i] = append(took[i], ms)
				case !errors.Is(err, errLearned):
					b.Fatal(err)
				}
			}
		}
	}
	round()
	took = make([][]float64, len(beds))
	b.ResetTimer()
	for range b.N {
		slices.Reverse(beds)
		slices.Reverse(took)
		round()
	}
	if b.N%2 == 1 {
		slices.Reverse(took)
	}
	var medians [2]float64
	for i, all := range took {
		slices.Sort(all)
		medians[i] = all[len(all)/2]
	}
	b.ReportMetric(1000*medians[0], "with-us")
	b.ReportMetric(1000*medians[1], "without-us")
	b.ReportMetric(medians[0]/medians[1], "ratio")
	b.ReportMetric(float64(len(took[0])), "n")
	b.ReportMetric(0, "ns/op")
}
