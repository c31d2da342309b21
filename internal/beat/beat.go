// Package beat aligns periodic work, so that one wake-up of a process serves all work that is due in it.
//
// A wake-up of an idle process takes longer than most periodic work: threads of the runtime wake too, and their data
// has left the caches.
package beat

import "time"

// Until returns the time from now to the next multiple of period, counted from the zero time: above zero, and at most
// period. Periods that divide each other coincide. A change of the wall clock moves the multiples.
func Until(now time.Time, period time.Duration) time.Duration {
	return now.Truncate(period).Add(period).Sub(now.Round(0))
}
