package linkpoll

import (
	"testing"
	"time"
)

func TestSchedule(t *testing.T) {
	var s Schedule
	now := time.Unix(1000, 0)
	if s.Due(now) || !s.Next().IsZero() {
		t.Error("the zero value polls")
	}
	s.Start(now)
	if !s.Due(now) {
		t.Error("not due at the start")
	}
	polls := 0
	for s.Next().Before(now.Add(Window)) {
		at := s.Next()
		s.Done(at, at.Add(time.Millisecond))
		if s.Due(at.Add(Period)) {
			t.Fatalf("due %v after the start of a poll of a millisecond", Period)
		}
		polls++
	}
	for _, c := range []struct{ took, wait time.Duration }{
		{10 * time.Microsecond, Idle}, {500 * time.Microsecond, 49500 * time.Microsecond}, {time.Second, MostIdle},
	} {
		at := s.Next()
		s.Done(at, at.Add(c.took))
		if got := s.Next().Sub(at) - c.took; got != c.wait {
			t.Errorf("idle, %v after a poll of %v, want %v", got, c.took, c.wait)
		}
	}
	if polls < 180 || polls > 190 { // 1,100 ms / (1 + 5) ms
		t.Errorf("%d polls", polls)
	}
	s.Start(now)
	s.Done(now, now.Add(100*time.Millisecond)) // a slow poll
	if want := now.Add(100*time.Millisecond + MostPeriod); !s.Next().Equal(want) {
		t.Errorf("next poll at %v, want %v", s.Next(), want)
	}
	s.Start(now.Add(200 * time.Millisecond)) // an event is polled at once
	if !s.Due(now.Add(200 * time.Millisecond)) {
		t.Error("not due after another event")
	}
}
