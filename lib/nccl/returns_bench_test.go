package nccl

import (
	"fmt"
	"slices"
	"testing"
	"time"
)

// BenchmarkTwoPlanesFail takes two of four planes of 200 Mbit/s out, and returns them: the rate at the far ends while two planes carry, as a part of what two
// planes can carry, and the time from the published weights until the rate is back above nine tenths of that before.
func BenchmarkTwoPlanesFail(b *testing.B) {
	built := release(b)
	f := newFabric(b, 200, 200, 200, 200)
	weights := []int{1, 1, 1, 1}
	f.setWeights(b, weights...)
	_, args := until(b, "--bytes", "64000000")
	ranks := f.run(b, built, nil, args...)
	awaitIteration(b, ranks, 0)
	// rate returns the bytes a second that arrive at the far ends over a time.
	rate := func(d time.Duration) float64 {
		_, before := f.sent(b)
		begin := time.Now()
		time.Sleep(d)
		_, after := f.sent(b)
		return (after - before) / time.Since(begin).Seconds()
	}
	f.awaitBytes(b, ranks, 20e6)
	var halves, returns []float64
	for b.Loop() {
		whole := rate(3 * time.Second)
		f.setDown(b, ranks, weights, 1, 2)
		f.awaitBytes(b, ranks, 20e6)
		half := rate(3 * time.Second)
		halves = append(halves, half/(whole/2))
		f.setDown(b, ranks, weights)
		begin := time.Now()
		for rate(20*time.Millisecond) < 0.9*whole {
			if time.Since(begin) > 30*time.Second {
				b.Fatal("the rate does not return")
			}
		}
		returns = append(returns, float64(time.Since(begin).Milliseconds()))
		if ended(ranks) {
			b.Fatal(fmt.Sprint("a rank has ended: ", ranks[0].out.String()))
		}
	}
	slices.Sort(halves)
	slices.Sort(returns)
	b.ReportMetric(halves[len(halves)/2], "of-two-planes")
	b.ReportMetric(returns[len(returns)/2], "ms-to-return")
	b.ReportMetric(returns[len(returns)-1], "ms-to-return-max")
}
