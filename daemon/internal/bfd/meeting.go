package bfd

import (
	"sync"
	"time"
)

// leastShorter and mostShorter are the parts, in millionths, by which an interval is shortened (RFC 5880, Section
// 6.8.7). Those of a session with a multiplier of 1 are allowed for all.
const leastShorter, mostShorter = 100_000, 250_000

// part returns millionths of a duration.
func part(d time.Duration, millionths int64) time.Duration {
	return d * time.Duration(millionths) / 1e6
}

// Meeting is the time at which sessions send their next slow periodic packets. A session whose jitter allows that time
// sends then, so that sessions without a neighbor, which send for as long as they exist, share one wake-up of the
// process. The time is random, so that no two hosts send together. The zero value is ready for use.
type Meeting struct {
	mu sync.Mutex
	at time.Time
}

// join returns the part, in millionths, by which an interval that begins now is shortened: the one that ends at the
// meeting, or mostShorter if the meeting is before all of them, to come closer to the next one. Without a meeting in
// the interval, the end of the proposed part is the next meeting.
func (m *Meeting) join(now time.Time, interval time.Duration, proposed int64) int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	end := now.Add(interval)
	early := end.Sub(m.at)
	switch {
	case !m.at.After(now) || early < part(interval, leastShorter):
		m.at = end.Add(-part(interval, proposed))
		return proposed
	case early > part(interval, mostShorter):
		return mostShorter
	}
	return int64(early) * 1e6 / int64(interval)
}
