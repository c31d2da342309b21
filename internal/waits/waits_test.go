package waits

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

func TestFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		begun := time.Now()
		if !For(ctx, time.Hour) || time.Since(begun) != time.Hour {
			t.Errorf("waited for %s", time.Since(begun))
		}
		cancel()
		if For(ctx, time.Hour) || time.Since(begun) != time.Hour {
			t.Error("waits after the end")
		}
	})
}

func TestRing(t *testing.T) {
	c := make(chan struct{}, 1)
	Ring(c)
	Ring(c) // does not block
	<-c
	if len(c) != 0 {
		t.Error("rings twice")
	}
}

// TestPause waits longer after each failure, and briefly after an attempt that has lasted.
func TestPause(t *testing.T) {
	p := Pause{First: 20 * time.Millisecond, Most: 100 * time.Millisecond}
	for _, c := range []struct{ lasted, most time.Duration }{{0, 20}, {99, 40}, {0, 80}, {0, 100}, {0, 100}, {100, 20}, {0, 40}} {
		if got, most := p.Next(c.lasted*time.Millisecond), c.most*time.Millisecond; got < most/2 || got > most {
			t.Errorf("%s, want %s to %s", got, most/2, most)
		}
	}
}
