package packets

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// BenchmarkAvoid measures the time from the fault of a leaf that drops one pair's packets until both servers of the
// pair have the plane's weight 0 toward the other in effect, and from the cure until both have it again. Aims: 1 s and
// 5 s. After a first time for each plane and pair the return takes longer, on purpose: it is not reported.
func BenchmarkAvoid(b *testing.B) {
	for _, driver := range []string{"linux", "bpf"} {
		b.Run(driver, func(b *testing.B) { benchmarkAvoid(b, newProofLab(b, driver)) })
	}
}

func benchmarkAvoid(b *testing.B, l *proofLab) {
	for i := range 3 {
		l.configure(fmt.Sprintf("server%d", i+1), "proof: {unproved: avoid}\n")
	}
	var left, back []float64
	b.ResetTimer()
	for i := range b.N {
		plane, first, second := i%2, (i/2)%3, (i/2+1)%3
		first, second = min(first, second), max(first, second)
		time.Sleep(time.Second + rand.N(time.Second)) // at any time of the servers' grids
		pair := fmt.Sprintf("{ 10.255.0.%d, 10.255.0.%d }", first+1, second+1)
		leaf := fmt.Sprintf("leaf%d", plane)
		l.nft(leaf, "forward", "ip saddr "+pair+" ip daddr "+pair+" drop")
		without := func(place int) []uint32 { // of two planes toward the first of the others, then of those toward the second
			all := []uint32{1, 1, 1, 1}
			all[2*place+plane] = 0
			return all
		}
		begin := time.Now()
		l.awaitWeights(fmt.Sprintf("server%d", first+1), without(second-1)...)
		l.awaitWeights(fmt.Sprintf("server%d", second+1), without(first)...)
		left = append(left, time.Since(begin).Seconds())
		l.Node(leaf).Run("nft", "delete table ip proof")
		begin = time.Now()
		for _, s := range []int{first, second} {
			l.awaitWeights(fmt.Sprintf("server%d", s+1), 1, 1, 1, 1)
		}
		if i < 6 {
			back = append(back, time.Since(begin).Seconds())
		}
	}
	for name, all := range map[string][]float64{"left": left, "back": back} {
		slices.Sort(all)
		b.ReportMetric(all[len(all)/2], name+"-p50-s")
		b.ReportMetric(all[len(all)-1], name+"-max-s")
	}
	b.ReportMetric(0, "ns/op")
}
