package supervise

import (
	"testing"
	"time"
)

func TestBackoff(t *testing.T) {
	var b backoff
	for i, step := range []struct{ lived, pause time.Duration }{
		{time.Hour, 0}, {0, 100 * time.Millisecond}, {10 * time.Millisecond, 200 * time.Millisecond}, {0, 400 * time.Millisecond},
		{0, 800 * time.Millisecond}, {0, 1600 * time.Millisecond}, {0, 3200 * time.Millisecond}, {999 * time.Millisecond, 5 * time.Second},
		{0, 5 * time.Second}, {time.Second, 0}, {time.Second, 0}, {0, 100 * time.Millisecond},
	} {
		if got := b.after(step.lived); got != step.pause {
			t.Errorf("run %d of %v: pause %v, want %v", i, step.lived, got, step.pause)
		}
	}
	if got := new(backoff).after(0); got != 0 {
		t.Errorf("the first pause is %v, want none", got)
	}
}
