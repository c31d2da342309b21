package linux

import (
	"math/big"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// owners is the dumb twin of runs: it deals bucket by bucket into an array.
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
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	for range 4000 {
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
		// Few runs: a home is cut once, and each that gets more begins one.
		if len(runs) > 3*n {
			t.Fatalf("%+v %v: %d runs", l, weights, len(runs))
		}
		quotas, total, forced := l.quotas(weights), 0, false
		if least := l.least(); least < l.lasting() || least < 1 {
			t.Fatalf("%+v: least %d, lasting %d", l, least, l.lasting())
		}
		for i, q := range quotas {
			total += q
			exact := new(big.Rat).SetFrac(new(big.Int).Mul(big.NewInt(int64(l.buckets)), big.NewInt(int64(weights[i]))), sum)
			forced = forced || weights[i] > 0 && exact.Cmp(new(big.Rat).SetInt64(int64(l.least()))) < 0
			if weights[i] == 0 && q != 0 || weights[i] > 0 && q < l.least() {
				t.Fatalf("%+v %v: quotas %v", l, weights, quotas)
			}
			from, to := l.home(i)
			for b := to - l.lasting(); b < to && weights[i] > 0; b++ {
				if b < from || table[b] != i {
					t.Fatalf("%+v %v: bucket %d of %d's lasting ones is %d's", l, weights, b, i, table[b])
				}
			}
		}
		if total != l.buckets {
			t.Fatalf("%+v %v: quotas sum to %d", l, weights, total)
		}
		for i, q := range quotas {
			exact := new(big.Rat).SetFrac(new(big.Int).Mul(big.NewInt(int64(l.buckets)), big.NewInt(int64(weights[i]))), sum)
			off := exact.Sub(exact, new(big.Rat).SetInt64(int64(q)))
			if one := big.NewRat(1, 1); !forced && off.Abs(off).Cmp(one) >= 0 {
				t.Fatalf("%+v %v: quotas %v, sub-port %d is off by %v", l, weights, quotas, i, off)
			}
		}
		// Against the table of equal weights, only what a smaller quota releases moves.
		same := l.runs(slices.Repeat([]uint32{1}, n))
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

func TestLayoutByHand(t *testing.T) {
	l := layout{16, 4} // homes of 4, 2 lasting, least 4
	for _, c := range []struct {
		weights []uint32
		want    []run
	}{
		{[]uint32{1, 1, 1, 1}, []run{{0, 4}, {1, 4}, {2, 4}, {3, 4}}},
		{[]uint32{1, 1, 0, 2}, []run{{0, 4}, {1, 4}, {3, 8}}},
		{[]uint32{0, 0, 1, 0}, []run{{2, 16}}},
		{[]uint32{1, 0, 0, 1}, []run{{0, 8}, {3, 8}}},
		{[]uint32{0, 1, 1, 0}, []run{{1, 8}, {2, 8}}},
	} {
		if got := l.runs(c.weights); !slices.Equal(got, c.want) {
			t.Errorf("%v: %v, want %v", c.weights, got, c.want)
		}
	}
}

// TestDealMovesWhatMust: a change costs the buckets whose owner changes, and those of pieces that are cut, no others.
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
