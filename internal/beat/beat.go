// Package beat aligns periodic work, so that one wake-up of a process serves all work that is due in it.
//
// A wake-up of an idle process takes longer than most periodic work: threads of the runtime wake too, and their data
// has left the caches.
package beat

import (
	"math/rand/v2"
	"time"
)

// phase keeps servers whose clocks agree from working in step.
var phase = rand.N(time.Second)

// Phase returns the offset of the multiples of all periods in this process, from 0 to a second. It is random.
func Phase() time.Duration { return phase }

// Until returns the time from now to the next multiple of period, counted from Phase: above zero, and at most period.
// Periods that divide each other coincide. A change of the wall clock moves the multiples.
func Until(now time.Time, period time.Duration) time.Duration {
	t := now.Round(0).Add(-phase)
	return t.Truncate(period).Add(period).Sub(t)
}
