package superp

import (
	"math/rand/v2"
	"testing"
	"time"
)

// TestReuse compares the protection against wrapped psns with the time of the latest transmission of each psn, over
// many rounds of a space of 512 psns: no psn is assigned within two seconds of its latest transmission, and a pause has
// a psn of the next block as its reason.
func TestReuse(t *testing.T) {
	const shift, space = 4, reuseBlocks << 4
	for _, every := range []time.Duration{time.Millisecond, 3900 * time.Microsecond, 3910 * time.Microsecond, 4100 * time.Microsecond, 5 * time.Millisecond} {
		for _, start := range []uint32{0, ^uint32(0) - 100} {
			rng := rand.New(rand.NewPCG(1, uint64(every)))
			u := reuse{shift: shift}
			var last [space]time.Duration // 0: never sent
			now, next, pauses, reports := time.Second, start, 0, 0
			for range 20 * space {
				now += every
				if !u.allows(now) {
					pauses++
					if u.tooEarly() {
						reports++
					}
					recent := false
					for psn := next; psn>>shift == next>>shift; psn++ {
						at := last[psn%space]
						recent = recent || at != 0 && now-at < reusePause
					}
					if next%(1<<shift) != 0 || !recent {
						t.Fatalf("psn %d is not allowed at %v", next, now)
					}
					continue
				}
				if at := last[next%space]; at != 0 && now-at < reusePause {
					t.Fatalf("psn %d is assigned again %v after its latest transmission", next, now-at)
				}
				u.assigned(next)
				u.sent(next, now)
				last[next%space] = now
				if next++; rng.IntN(4) == 0 { // a retransmission of one of the latest
					psn := next - 1 - rng.Uint32N(8)
					if int32(psn-start) >= 0 {
						u.sent(psn, now)
						last[psn%space] = now
					}
				}
			}
			// All psns but the 16 of a block within less than two seconds.
			if tooFast := every*(space-1<<shift) < reusePause; tooFast != (pauses > 0) || tooFast != (reports > 0) || reports > 20*reuseBlocks {
				t.Errorf("a psn each %v: %d pauses, %d reports", every, pauses, reports)
			}
		}
	}
}
