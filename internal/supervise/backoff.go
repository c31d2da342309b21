package supervise

import "time"

// The pauses before a command is started again: none at first, then from firstPause, doubling, to lastPause, while it ends
// sooner than healthy after its start.
const (
	firstPause = 100 * time.Millisecond
	lastPause  = 5 * time.Second
	healthy    = time.Second
)

// backoff counts how often a command ended early in a row. The zero value is a command that never did.
type backoff struct{ next time.Duration }

// after returns the pause after a run of the given length.
func (b *backoff) after(lived time.Duration) time.Duration {
	if lived >= healthy {
		b.next = 0
	}
	pause := b.next
	b.next = min(max(2*pause, firstPause), lastPause)
	return pause
}
