package supervise

import "time"

// The pauses before a command is started again: none at first, then from firstPause, doubling, to lastPause, while each
// run is shorter than healthy.
const (
	firstPause = 100 * time.Millisecond
	lastPause  = 5 * time.Second
	healthy    = time.Second
)

// backoff computes the pauses of a command. The zero value is a command without early ends.
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
