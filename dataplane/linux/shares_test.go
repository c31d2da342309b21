package linux

import (
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/testkit/gate"
)

// TestPacketsFollowWeights sends packets of many flows by random weights over 4 to 64 sub-ports and counts them at the
// far ends. The oracle uses the weights and the binomial distribution: shares reported in effect are within 1 % and
// five standard deviations.
func TestPacketsFollowWeights(t *testing.T) {
	gate.WithoutRaceDetector(t, "drives the kernel in one goroutine")
	gate.Needed(t, "packets of flows without a slot go by weight")
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	flows := gate.Count(t, gate.Kernel, 1<<13, 1<<15)
	for _, n := range []int{4, 8, 32, 64} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			if n != 8 {
				gate.Slow(t, gate.Kernel, "another number of sub-ports")
			}
			h := newHost(t, n)
			h.config.Buckets = 0
			h.config.Logger = slog.New(slog.DiscardHandler)
			d, c := h.start()
			s := program(t, c.server)
			e := h.tap()
			halved, tiny, mixed := make([]uint32, n), make([]uint32, n), make([]uint32, n)
			for i := range n {
				// One plane of four sub-ports at half its speed; one sub-port at 10 of 800; a mix of existing speeds.
				halved[i], tiny[i] = 2, 80
				mixed[i] = []uint32{10, 25, 40, 50, 100, 200, 400, 800}[random.IntN(8)]
			}
			for i := range min(4, n-1) {
				halved[i] = 1
			}
			tiny[random.IntN(n)] = 1
			for round, weights := range [][]uint32{halved, tiny, mixed} {
				ack := s.Answer(h.group(1, weights...))
				if round == 0 {
					s.do(destination(target4(0), 1), destination(target6(0), 1))
				}
				if ack.Level == farev1.AckLevel_ACK_LEVEL_REFUSED {
					t.Fatal(ack)
				}
				sum := 0.0
				for _, w := range weights {
					sum += float64(w)
				}
				to := []string{target4(0), target6(0)}[(round+n)%2]
				source := strings.Split(h.forwarding.Loopbacks[familyOf(mustPrefix(to).Addr())], "/")[0]
				got := e.send(source, to, flows)
				total := 0
				for i, w := range weights {
					share := float64(w) / sum
					want, count := float64(flows)*share, got[fmt.Sprintf("p%d", i)]
					total += count
					bound := 5*math.Sqrt(want*(1-share)) + 5
					if ack.Level == farev1.AckLevel_ACK_LEVEL_IN_EFFECT {
						bound += want / 100
					} else {
						bound += float64(flows) / 65535 / 2 * 10 // half a bucket, with a margin
					}
					if math.Abs(float64(count)-want) > bound {
						t.Errorf("%s, weights %v: %d of %d packets over p%d, want %.0f within %.0f (%v)", to, weights, count, flows, i, want, bound, ack)
					}
				}
				if total < flows-2 { // IPv6: see doc.go
					t.Errorf("%s: %d of %d packets came", to, total, flows)
				}
				t.Logf("%s: %v %s", to, ack.Level, ack.Message)
			}
			t.Logf("%d buckets, %+v", d.state.want.size, d.Stats())
		})
	}
}
