package linux

import (
	"math"
	"math/big"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/fared/fared/internal/testkit/gate"
)

// owners is a simple reference for runs: it deals bucket by bucket into an array.
func owners(l layout, weights []uint32) []int {
	quotas := l.quotas(weights)
	table := make([]int, l.buckets)
	for b := range table {
		table[b] = -1
	}
	for i, q := range quotas {
		for b := range l.buckets {
			if from, to := l.home(i); b >= from && b < to && b >= to-q {
				table[b] = i
			}
		}
	}
	for b, owner := range table {
		if owner >= 0 {
			continue
		}
		for i, q := range quotas {
			has := 0
			for _, o := range table {
				if o == i {
					has++
				}
			}
			if has < q {
				table[b] = i
				break
			}
		}
	}
	return table
}

func TestLayoutKeepsItsPromises(t *testing.T) {
	gate.WithoutRaceDetector(t, "has one goroutine, and a tenth of the cases with it")
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	for range gate.Count(t, gate.Models, 1000, 20_000) {
		n := 1 + random.IntN(12)
		if random.IntN(10) == 0 {
			n = 1 + random.IntN(64)
		}
		l := layout{n + random.IntN(400), n}
		if random.IntN(4) == 0 {
			l.buckets = 1024
		}
		weights := make([]uint32, n)
		most := []int{2, 4, 50, 65535}[random.IntN(4)]
		sum := new(big.Int)
		for i := range weights {
			weights[i] = uint32(random.IntN(most))
			sum.Add(sum, big.NewInt(int64(weights[i])))
		}
		runs := l.runs(weights)
		if sum.Sign() == 0 {
			if runs != nil {
				t.Fatalf("%+v %v: no weights, and %v", l, weights, runs)
			}
			continue
		}
		var table []int
		for i, r := range runs {
			if r.size <= 0 || i > 0 && runs[i-1].subPort == r.subPort {
				t.Fatalf("%+v %v: %v", l, weights, runs)
			}
			table = append(table, slices.Repeat([]int{r.subPort}, r.size)...)
		}
		if want := owners(l, weights); !slices.Equal(table, want) {
			t.Fatalf("%+v %v:\n%v\ntwin %v", l, weights, table, want)
		}
		// There are few runs: a home is cut at most once, and each sub-port that gains buckets starts one run.
		if len(runs) > 3*n {
			t.Fatalf("%+v %v: %d runs", l, weights, len(runs))
		}
		quotas, total := l.quotas(weights), 0
		for i, q := range quotas {
			total += q
			if weights[i] > 0 != (q > 0) {
				t.Fatalf("%+v %v: quotas %v", l, weights, quotas)
			}
			from, to := l.home(i)
			for b := to - min(q, l.lasting()); b < to; b++ {
				if b < from || table[b] != i {
					t.Fatalf("%+v %v: bucket %d of %d's lasting ones is %d's", l, weights, b, i, table[b])
				}
			}
			// The tolerance is half a bucket, plus a part of the effect of minimum quotas and rounding.
			exact := new(big.Rat).SetFrac(new(big.Int).Mul(big.NewInt(int64(l.buckets)), big.NewInt(int64(weights[i]))), sum)
			share, _ := exact.Float64()
			off := exact.Sub(exact, new(big.Rat).SetInt64(int64(q)))
			if slack := 1 + 2*float64(n)*share/float64(l.buckets); q > 1 && off.Abs(off).Cmp(new(big.Rat).SetFloat64(slack)) > 0 {
				t.Fatalf("%+v %v: quotas %v, sub-port %d is off by %v", l, weights, quotas, i, off)
			}
		}
		if total != l.buckets {
			t.Fatalf("%+v %v: quotas sum to %d", l, weights, total)
		}
		// Compared with the table of equal weights, only buckets that a smaller quota releases move.
		same := l.runs(slices.Repeat([]uint32{1}, n))
		for i, q := range l.quotas(slices.Repeat([]uint32{7}, n)) {
			if q != l.size(i) {
				t.Fatalf("%+v: equal weights give sub-port %d %d buckets, and its home has %d", l, i, q, l.size(i))
			}
		}
		at, moved, must := 0, 0, 0
		for _, r := range same {
			for range r.size {
				if table[at] != r.subPort {
					moved++
				}
				at++
			}
			must += max(0, r.size-quotas[r.subPort])
		}
		if moved != must {
			t.Fatalf("%+v %v: %d buckets moved, %d had to", l, weights, moved, must)
		}
	}
}

// TestSharesAreHeld checks that, with the default number of buckets, weights whose smallest share is a fortieth of the
// average are accurate to 1 % with up to 32 sub-ports, and a twentieth with 64; and that exactly the inaccurate ones
// are reported. The oracle counts the buckets of the runs and compares integers.
func TestSharesAreHeld(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	st := newState(Config{})
	st.maxWeight = 65535
	reported := 0
	for range 3000 {
		n := 1 + random.IntN(64)
		l := layout{st.buckets(n), n}
		weights, sum, least := make([]uint32, n), int64(0), int64(0)
		most := []int{2, 10, 100, 1 << 20}[random.IntN(4)]
		for i := range weights {
			weights[i] = uint32(1 + random.IntN(most))
			sum += int64(weights[i])
			if least == 0 || int64(weights[i]) < least {
				least = int64(weights[i])
			}
		}
		got := make([]int64, n)
		for _, r := range l.runs(weights) {
			got[r.subPort] += int64(r.size)
		}
		held := true
		for i, w := range weights {
			// |got/buckets - w/sum| > w/sum/100
			held = held && abs(got[i]*sum-int64(l.buckets)*int64(w))*100 <= int64(l.buckets)*int64(w)
		}
		if !held && least*int64(n)*10 >= sum {
			t.Errorf("%+v %v: buckets %v, and the smallest share is above a tenth of the average", l, weights, got)
		}
		// Rounding puts a deviation equal to the tolerance on either side of it.
		if _, off := l.deviation(weights); math.Abs(off) <= tolerance != held && math.Abs(math.Abs(off)-tolerance) > 1e-12 {
			t.Errorf("%+v %v: buckets %v; a deviation of %v is reported", l, weights, got, off)
		}
		if !held {
			reported++
		}
	}
	if reported == 0 {
		t.Error("everything was held, so that nothing was reported")
	}
}

func abs(v int64) int64 { return max(v, -v) }

func TestLayoutByHand(t *testing.T) {
	l := layout{16, 4} // homes of 4, with 1 lasting bucket
	for _, c := range []struct {
		weights []uint32
		want    []run
	}{
		{[]uint32{1, 1, 1, 1}, []run{{0, 4}, {1, 4}, {2, 4}, {3, 4}}},
		{[]uint32{1, 1, 0, 2}, []run{{0, 4}, {1, 4}, {3, 8}}},
		{[]uint32{0, 0, 1, 0}, []run{{2, 16}}},
		{[]uint32{1, 0, 0, 1}, []run{{0, 8}, {3, 8}}},
		{[]uint32{0, 1, 1, 0}, []run{{1, 8}, {2, 8}}},
		{[]uint32{1, 5, 5, 5}, []run{{1, 1}, {2, 1}, {3, 1}, {0, 1}, {1, 4}, {2, 4}, {3, 4}}},
		{[]uint32{1, 1000, 0, 0}, []run{{1, 3}, {0, 1}, {1, 12}}}, // at least one bucket each
		{[]uint32{2, 2, 0, 4}, []run{{0, 4}, {1, 4}, {3, 8}}},
	} {
		if got := l.runs(c.weights); !slices.Equal(got, c.want) {
			t.Errorf("%v: %v, want %v", c.weights, got, c.want)
		}
	}
}

// TestDealMovesWhatMust checks that a change moves only the buckets whose owner changes and those of pieces that are
// cut.
func TestDealMovesWhatMust(t *testing.T) {
	l, s := layout{1024, 4}, newScaling(1024, 65535)
	next, owner := uint32(0), map[uint32]int{}
	fresh := func(subPort int) uint32 {
		next++
		owner[next] = subPort
		return next
	}
	first := s.dealAll(l.runs([]uint32{1, 1, 1, 1}), fresh)
	if first.moved != 1024 || len(first.members) != 4 {
		t.Errorf("from nothing: %+v", first)
	}
	down := s.deal(first.segments, l.runs([]uint32{1, 1, 0, 1}), func(id uint32) int { return owner[id] }, func(id uint32) int { return owner[id] + 1 }, fresh)
	if down.moved != 256 || len(down.members) != 7 || len(down.witnesses) != 1 {
		t.Errorf("without sub-port 2: %+v", down)
	}
	again := s.deal(down.segments, l.runs([]uint32{1, 1, 0, 1}), func(id uint32) int { return owner[id] }, func(id uint32) int { return owner[id] + 1 }, fresh)
	if again.moved != 0 {
		t.Errorf("again the same: %+v", again)
	}
	sum := 0
	for _, m := range down.members {
		sum += int(m.Weight)
	}
	if sum != 1024*s.scale+1 {
		t.Errorf("weights sum to %d", sum)
	}
}

// TestQuotasByHand checks quotas whose rounded shares sum to more or fewer buckets than there are.
func TestQuotasByHand(t *testing.T) {
	for _, c := range []struct {
		buckets int
		weights []uint32
		want    []int
	}{
		{16, []uint32{1, 1, 1, 0}, []int{6, 5, 5, 0}}, // one more: the first of equal ones
		{8, []uint32{1, 1, 1, 0}, []int{3, 3, 2, 0}},  // one less: the last of equal ones
		{16, []uint32{1, 1, 1, 3}, []int{3, 3, 3, 7}}, // one less: where it is the smallest part of the share
		{10, []uint32{1, 1, 1, 1}, []int{3, 2, 3, 2}}, // homes of 3, 2, 3 and 2
		{10, []uint32{1, 1, 1, 0}, []int{4, 3, 3, 0}}, {10, []uint32{0, 1, 1, 1}, []int{0, 3, 4, 3}},
		{11, []uint32{1, 0, 1, 1}, []int{4, 0, 3, 4}}, // homes of 3, 3, 2 and 3
		{64, []uint32{1, 255, 0, 0}, []int{1, 63, 0, 0}},
		{4, []uint32{1, 1000, 1000, 1}, []int{1, 1, 1, 1}}, {4, []uint32{0, 0, 0, 9}, []int{0, 0, 0, 4}}, {4, []uint32{0, 0, 0, 0}, []int{0, 0, 0, 0}},
	} {
		if got := (layout{c.buckets, 4}).quotas(c.weights); !slices.Equal(got, c.want) {
			t.Errorf("%d buckets by %v: %v, want %v", c.buckets, c.weights, got, c.want)
		}
	}
}

// TestFirmByHand: with homes of 8 buckets and one that lasts, the last two of a home are one nexthop's, where the
// sub-port has so many.
func TestFirmByHand(t *testing.T) {
	l := layout{16, 2}
	for _, c := range []struct {
		sizes  []int // of nexthops
		target []run
		want   bool
	}{
		{[]int{8, 8}, []run{{0, 8}, {1, 8}}, true}, {[]int{6, 2, 8}, []run{{0, 8}, {1, 8}}, true}, {[]int{7, 1, 8}, []run{{0, 8}, {1, 8}}, false},
		{[]int{8, 6, 2}, []run{{0, 8}, {1, 8}}, true}, {[]int{8, 7, 1}, []run{{0, 8}, {1, 8}}, false}, {[]int{8, 1, 1, 6}, []run{{0, 8}, {1, 8}}, true},
		{[]int{15, 1}, []run{{0, 15}, {1, 1}}, true}, {[]int{7, 8, 1}, []run{{0, 15}, {1, 1}}, false}, {[]int{6, 9, 1}, []run{{0, 15}, {1, 1}}, true},
		{[]int{4, 4, 8}, []run{{1, 4}, {0, 4}, {1, 8}}, true}, {[]int{4, 3, 1, 8}, []run{{1, 4}, {0, 4}, {1, 8}}, false},
		{[]int{3, 1, 4, 8}, []run{{1, 4}, {0, 4}, {1, 8}}, true}, {[]int{16}, []run{{1, 16}}, true}, {[]int{15, 1}, []run{{1, 16}}, false},
	} {
		var segments []segment
		for i, size := range c.sizes {
			segments = append(segments, segment{uint32(i + 1), size})
		}
		if got := l.firm(segments, c.target); got != c.want {
			t.Errorf("nexthops of %v buckets, target %v: firm is %v", c.sizes, c.target, got)
		}
	}
	for buckets, want := range map[int]int{16: 1, 15: 1, 2: 1, 32: 2, 47: 2, 48: 3} {
		if got := (layout{buckets, 2}).lasting(); got != want {
			t.Errorf("%d buckets of 2 sub-ports: %d last, want %d", buckets, got, want)
		}
	}
}
