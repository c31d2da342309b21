package beat

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

func TestUntil(t *testing.T) {
	second := time.Unix(1000, 0).Add(Phase())
	for _, c := range []struct{ after, period, want time.Duration }{
		{0, time.Second, time.Second},
		{1, time.Second, time.Second - 1},
		{time.Second - 1, time.Second, 1},
		{300 * time.Millisecond, 250 * time.Millisecond, 200 * time.Millisecond},
	} {
		if got := Until(second.Add(c.after), c.period); got != c.want {
			t.Errorf("%v after a second, period %v: %v, want %v", c.after, c.period, got, c.want)
		}
	}
}

// TestWakeUps counts the times at which works of several periods, begun at different times, are done in ten seconds.
func TestWakeUps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(Until(time.Now(), time.Second)) // the phase of the process is random
		var mu sync.Mutex
		wakes := map[time.Time]int{}
		for i, period := range []time.Duration{250 * time.Millisecond, 500 * time.Millisecond, time.Second, time.Second} {
			time.Sleep(time.Duration(i) * 7 * time.Millisecond)
			mu.Lock()
			var timer *time.Timer
			timer = time.AfterFunc(Until(time.Now(), period), func() {
				mu.Lock()
				defer mu.Unlock()
				wakes[time.Now().Round(0)]++
				timer.Reset(Until(time.Now(), period))
			})
			mu.Unlock()
			defer timer.Stop()
		}
		time.Sleep(10*time.Second - 41*time.Millisecond) // a millisecond after the last works
		mu.Lock()
		defer mu.Unlock()
		works := 0
		for _, n := range wakes {
			works += n
		}
		if len(wakes) != 40 || works != 80 {
			t.Errorf("%d wake-ups for %d works, want 40 for 80", len(wakes), works)
		}
	})
}
