// Package waits has the waits of goroutines that a context ends.
package waits

import (
	"context"
	"math/rand/v2"
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

// Pause is the time between attempts: First, then twice as long each time, at most Most. A random part of up to half is
// left out, so that thousands of processes do not try at once.
type Pause struct {
	First, Most time.Duration
	next        time.Duration
}

// Next returns the time to wait after an attempt that has lasted for a time; one that has lasted for Most begins anew.
func (p *Pause) Next(lasted time.Duration) time.Duration {
	if lasted >= p.Most || p.next == 0 {
		p.next = p.First
	}
	now := p.next
	p.next = min(2*now, p.Most)
	return now - rand.N(now/2+1)
}
