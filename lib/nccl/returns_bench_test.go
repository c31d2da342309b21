package nccl

import (
	"fmt"
	"slices"
	"testing"
	"time"
)

// BenchmarkTwoPlanesFail takes two of four planes of 200 Mbit/s out, and returns them: the rate at the far ends while two planes carry, as a part of what two
// planes can carry, and two times from the published weights: until the rate is back above nine tenths of that before, and until the returned planes carry nine tenths
// of what the others do.
func BenchmarkTwoPlanesFail(b *testing.B) {
	built := release(b)
	f := newFabric(b, 200, 200, 200, 200)
	weights := []int{1, 1, 1, 1}
	f.setWeights(b, weights...)
	_, args := until(b, "--bytes", "64000000")
	ranks := f.run(b, built, nil, args...)
	awaitIteration(b, ranks, 0)
	// rates returns the bytes a second that arrive at the far ends over a time, from planes 0 and 3, and from 1 and 2.
	rates := func(d time.Duration) (others, returned float64) {
		before, _ := f.sent(b)
		begin := time.Now()
		time.Sleep(d)
		after, _ := f.sent(b)
		seconds := time.Since(begin).Seconds()
		return (after[0] + after[3] - before[0] - before[3]) / seconds, (after[1] + after[2] - before[1] - before[2]) / seconds
	}
	f.awaitBytes(b, ranks, 20e6)
	var halves, whole, shared []float64
	for b.Loop() {
		others, failing := rates(3 * time.Second)
		all := others + failing
		f.setDown(b, ranks, weights, 1, 2)
		f.awaitBytes(b, ranks, 20e6)
		others, _ = rates(3 * time.Second)
		halves = append(halves, others/(all/2))
		f.setDown(b, ranks, weights)
		begin := time.Now()
		wholeAfter, sharedAfter := 0.0, 0.0
		for wholeAfter == 0 || sharedAfter == 0 {
			others, returned := rates(10 * time.Millisecond)
			after := float64(time.Since(begin).Microseconds()) / 1000
			if wholeAfter == 0 && others+returned >= 0.9*all {
				wholeAfter = after
			}
			if sharedAfter == 0 && others > all/10 && returned >= 0.9*others {
				sharedAfter = after
			}
			if after > 30000 {
				b.Fatal("the rate does not return")
			}
		}
		whole = append(whole, wholeAfter)
		shared = append(shared, sharedAfter)
		b.Logf("%.2f of two planes; rate back after %.0f ms, equal parts after %.0f ms", halves[len(halves)-1], wholeAfter, sharedAfter)
		if ended(ranks) {
			b.Fatal(fmt.Sprint("a rank has ended: ", ranks[0].out.String()))
		}
	}
	for _, s := range [][]float64{halves, whole, shared} {
		slices.Sort(s)
	}
	b.ReportMetric(halves[len(halves)/2], "of-two-planes")
	b.ReportMetric(whole[len(whole)/2], "ms-to-return")
	b.ReportMetric(whole[len(whole)-1], "ms-to-return-max")
	b.ReportMetric(shared[len(shared)/2], "ms-to-equal-parts")
	b.ReportMetric(shared[len(shared)-1], "ms-to-equal-parts-max")
}
