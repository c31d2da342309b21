package linkpoll

import (
	"testing"
	"time"

	"github.com/fared/fared/internal/beat"
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

// TestStartLater checks that the first poll waits for the delay, unless one is due sooner.
func TestStartLater(t *testing.T) {
	var s Schedule
	now := time.Unix(1000, 0)
	if s.StartLater(now, time.Millisecond); s.Due(now) || !s.Due(now.Add(time.Millisecond)) {
		t.Errorf("next poll at %v, want a millisecond after %v", s.Next(), now)
	}
	if s.StartLater(now.Add(time.Millisecond/2), time.Millisecond); !s.Next().Equal(now.Add(time.Millisecond)) {
		t.Errorf("the poll was put off until %v", s.Next())
	}
	if s.Start(now); !s.Due(now) {
		t.Error("not due at once after Start")
	}
	s.Done(now, now)
	if want := now.Add(Period); !s.Next().Equal(want) {
		t.Errorf("next poll at %v, want %v", s.Next(), want)
	}
}

// TestFlapping checks that links which fail again and again have no quick polls all the time, that each failure is
// polled at once, and that single failures far apart have their whole window.
func TestFlapping(t *testing.T) {
	run := func(every, length time.Duration) (quick time.Duration) {
		var s Schedule
		start := time.Unix(1000, 0)
		event := start
		for now := start; now.Before(start.Add(length)); {
			if !event.After(now) {
				s.Start(now)
				if !s.Due(now) {
					t.Fatalf("every %v: an event after %v is not polled at once", every, now.Sub(start))
				}
				event = event.Add(every)
			}
			s.Done(now, now)
			wait := s.Next().Sub(now)
			if wait == Period {
				quick += wait
			}
			now = later(now, s.Next())
			if event.Before(now) {
				now = event
			}
		}
		return quick
	}
	near := func(what string, events int, got, want time.Duration) {
		// The last interval of a window may exceed it.
		if got < want-100*time.Millisecond || got > want+time.Duration(events)*Period {
			t.Errorf("%s: quick polls for %v, want %v", what, got, want)
		}
	}
	near("10 Hz for 10 s", 100, run(100*time.Millisecond, 10*time.Second), burst+10*time.Second/refill)
	near("10 Hz for 100 s", 1000, run(100*time.Millisecond, 100*time.Second), burst+100*time.Second/refill)
	near("two failures", 2, run(500*time.Millisecond, time.Second), time.Second)
	near("one failure in 20 s, ten times", 10, run(20*time.Second, 200*time.Second), 10*Window)
}

// TestCover checks that polls are rare while carriers are covered, that link events start none then, that a report
// does, and that a switch in either direction makes a poll due at once.
func TestCover(t *testing.T) {
	var s Schedule
	now := time.Unix(1000, 0).Add(beat.Phase())
	if s.Cover(false, now) || !s.Next().IsZero() {
		t.Error("a switch to the same state polls")
	}
	if !s.Cover(true, now) || !s.Due(now) {
		t.Error("not due at the switch")
	}
	s.Done(now, now.Add(time.Second))
	if got := s.Next().Sub(now) - time.Second; got != Covered {
		t.Errorf("covered, %v between polls, want %v", got, Covered)
	}
	now = now.Add(time.Second)
	if s.Event(now) {
		t.Error("due after a link event while covered")
	}
	if s.Start(now); !s.Due(now) {
		t.Error("not due after a report")
	}
	s.Done(now, now)
	if s.Event(now.Add(Covered)) != true || s.Cover(true, now) {
		t.Error("not due after the interval, or a second switch")
	}
	s.Done(now, now)
	if !s.Cover(false, now) || !s.Due(now) {
		t.Error("not due at the end")
	}
	s.Done(now, now)
	if got := s.Next().Sub(now); got != Period {
		t.Errorf("%v after the end, want %v", got, Period)
	}
	now = now.Add(time.Hour)
	s.Done(now, now)
	if !s.Event(now) {
		t.Error("not due after a link event")
	}
}

// TestListen checks that polls are rare outside the window of an event if the events of all namespaces are received,
// and that links which fail so often that quick polls end are still polled every Idle within the window: the kernel may
// delay an event then.
func TestListen(t *testing.T) {
	var s Schedule
	s.Listen()
	now := time.Unix(1000, 0)
	s.Start(now)
	polls := 0
	for end := now.Add(Window); now.Before(end); now = s.Next() {
		s.Done(now, now)
		polls++
		if wait := s.Next().Sub(now); now.Before(end) && wait != Period {
			t.Fatalf("%v after a poll in the window, want %v", wait, Period)
		}
	}
	if polls != int(Window/Period) {
		t.Errorf("%d polls in the window", polls)
	}
	for i := range 5 {
		s.Done(now, now)
		if wait := s.Next().Sub(now); i > 0 && wait != Listening || wait > Listening {
			t.Fatalf("%v to the next poll after the window, want %v", wait, Listening)
		}
		now = s.Next()
	}
	if !s.Event(now.Add(-Listening / 2)) {
		t.Error("an event between rare polls is not polled at once")
	}
	slow := 0
	for event, end := now, now.Add(20*time.Second); now.Before(end); now = s.Next() {
		if !now.Before(event) {
			s.Event(now)
			event = now.Add(100 * time.Millisecond)
		}
		s.Done(now, now)
		switch wait := s.Next().Sub(now); wait {
		case Period:
		case Idle:
			slow++
		default:
			t.Fatalf("%v between polls while links fail", wait)
		}
	}
	if slow == 0 {
		t.Error("polls are quick all the time: this test has lost its subject")
	}
}
