package nccl

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// BenchmarkTwoPlanesFail takes two of four planes of 200 Mbit/s out, and returns them: the rate at the far ends while
// two planes carry, as a part of what two planes can carry, and two times from the published weights: until the rate is
// back above nine tenths of that before, and until the returned planes carry nine tenths of what the others do.
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
	// await returns the milliseconds since a time until the rate is above nine tenths of all, and until planes 1 and 2
	// carry nine tenths of the others.
	await := func(begin time.Time, all float64) (whole, shared float64) {
		for whole == 0 || shared == 0 {
			others, returned := rates(10 * time.Millisecond)
			after := float64(time.Since(begin).Microseconds()) / 1000
			if whole == 0 && others+returned >= 0.9*all {
				whole = after
			}
			if shared == 0 && others > all/10 && returned >= 0.9*others {
				shared = after
			}
			if after > 30000 {
				b.Fatal("the rate does not return")
			}
		}
		return whole, shared
	}
	f.awaitBytes(b, ranks, 20e6)
	var halves, whole, shared, nothing []float64
	for b.Loop() {
		others, failing := rates(3 * time.Second)
		all := others + failing
		for range 5 {
			rates(rand.N(time.Second)) // any time of an all-reduce
			unchanged, _ := await(time.Now(), all)
			nothing = append(nothing, unchanged)
		}
		f.setDown(b, ranks, weights, 1, 2)
		f.awaitBytes(b, ranks, 20e6)
		others, _ = rates(3 * time.Second)
		halves = append(halves, others/(all/2))
		f.setDown(b, ranks, weights)
		wholeAfter, sharedAfter := await(time.Now(), all)
		whole = append(whole, wholeAfter)
		shared = append(shared, sharedAfter)
		b.Logf("%.2f of two planes; rate back after %.0f ms, equal parts after %.0f ms; without a change the rate is there after %.0f ms",
			halves[len(halves)-1], wholeAfter, sharedAfter, nothing[len(nothing)-5:])
		if ended(ranks) {
			b.Fatal(fmt.Sprint("a rank has ended: ", ranks[0].out.String()))
		}
	}
	for _, s := range [][]float64{halves, whole, shared, nothing} {
		slices.Sort(s)
	}
	b.ReportMetric(halves[len(halves)/2], "of-two-planes")
	b.ReportMetric(whole[len(whole)/2], "ms-to-return")
	b.ReportMetric(whole[len(whole)-1], "ms-to-return-max")
	b.ReportMetric(nothing[len(nothing)/2], "ms-without-change")
	b.ReportMetric(nothing[len(nothing)-1], "ms-without-change-max")
	b.ReportMetric(shared[len(shared)/2], "ms-to-equal-parts")
	b.ReportMetric(shared[len(shared)-1], "ms-to-equal-parts-max")
}
