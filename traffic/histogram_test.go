package traffic

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// TestHistogramAgainstSorted verifies that percentiles equal those of the sorted values within 1 %, and that the
// maximum is exact.
func TestHistogramAgainstSorted(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for round := range 60 {
		var a, b, both histogram
		values := make([]uint64, 1+r.IntN(5000))
		for i := range values {
			values[i] = uint64(math.Exp(r.Float64() * 28)) // 1 ns to 24 minutes
			if round%3 == 0 {
				values[i] = uint64(r.IntN(300))
			}
			h := &a
			if r.IntN(2) == 0 {
				h = &b
			}
			h.add(values[i])
		}
		both.merge(&a)
		for i, n := range b.counts {
			if n > 0 && !both.addBucket(uint32(i), n) {
				t.Fatalf("bucket %d is refused", i)
			}
		}
		both.max = max(a.max, b.max)
		slices.Sort(values)
		for _, q := range []uint64{1, 5000, 9000, 9900, 9990, 10000} {
			want := values[max(1, (uint64(len(values))*q+9999)/10000)-1]
			if got := both.quantile(q); math.Abs(float64(got)-float64(want)) > 0.01*float64(want) {
				t.Errorf("round %d: %d of 10,000 of %d values: %d, want %d", round, q, len(values), got, want)
			}
		}
		if both.max != values[len(values)-1] || both.total != uint64(len(values)) {
			t.Errorf("%d values to %d: %d values to %d", len(values), values[len(values)-1], both.total, both.max)
		}
	}
}

// TestBuckets verifies that each value is in the bucket with the nearest middle, that buckets rise with values, and
// that none is skipped.
func TestBuckets(t *testing.T) {
	last := -1
	for v := uint64(0); v < 1<<topPower; v += 1 + v/1000 {
		i := bucketOf(v)
		if i < last || i > last+1 || i >= buckets {
			t.Fatalf("%d is in bucket %d, after %d", v, i, last)
		}
		last = i
		if d := math.Abs(float64(middle(i)) - float64(v)); d > float64(v)/128+0.5 {
			t.Fatalf("%d is in bucket %d, whose middle is %d", v, i, middle(i))
		}
	}
	if last != buckets-1 || bucketOf(math.MaxUint64) != buckets-1 {
		t.Errorf("the last bucket is %d of %d", last, buckets)
	}
	h := new(histogram)
	if h.quantile(5000) != 0 || h.addBucket(buckets, 1) {
		t.Error("an empty histogram has a median, or a bucket too much")
	}
	if n := testing.AllocsPerRun(100, func() { h.add(12345) }); n != 0 {
		t.Errorf("%v allocations a value", n)
	}
}
