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
