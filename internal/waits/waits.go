// Package waits has the waits of goroutines that a context ends.
package waits

import (
	"context"
	"time"
)

// For waits for a time; false if ctx has ended.
func For(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// Ring wakes the receiver of a channel with one slot, now or at its next look.
func Ring(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
