// Package linkpoll decides when to ask the kernel for the carriers of network devices instead of waiting for its
// events.
//
// Linux announces a lost carrier late: net/core/link_watch.c handles the events of all devices of the machine at most
// once a second, except urgent ones. The loss of carrier of a device whose ifindex equals its iflink, as in every
// physical NIC, is not urgent. So when two cables of a port are cut together, the kernel announces the first at once
// and the second up to a second later. RTM_GETLINK reports IFF_LOWER_UP (netif_carrier_ok) without that delay. Since
// Linux 6.8 it also handles the device's pending event (linkwatch_sync_dev), so that the kernel itself and every other
// listener act on it. Before Linux 6.8 only the answer is prompt.
package linkpoll

import (
	"time"

	"github.com/fared/fared/internal/beat"
)

const (
	// Window is the time for which a Schedule polls quickly after its last Start: the second by which the kernel may
	// delay an event (HZ in linkwatch_schedule_work), and a tenth for timer ticks.
	Window = 1100 * time.Millisecond
	// Period is the shortest interval of polls within Window.
	Period = 5 * time.Millisecond
	// Idle is the shortest interval at other times. Idle polls are necessary because the event that delays all others
	// may belong to another device in another network namespace, so that this process is not notified, unless it
	// receives those events too (Listen).
	Idle = 20 * time.Millisecond
	// A poll begins this many times the previous one's duration after its end, if that is longer: polls take at most a
	// fifth of one processor within Window, and at most a hundredth at other times.
	share, shareIdle = 4, 99
	// MostPeriod bounds that within Window: on a busy machine a poll takes long because it waits, not because it uses
	// the processor.
	MostPeriod = 20 * time.Millisecond
	// MostIdle bounds that at other times.
	MostIdle = 60 * time.Millisecond
	// Listening is the interval of polls, at multiples of it (package beat), outside Window while no event is missed
	// (Listen). It bounds the delay should an event be missed; the kernel's own bound is a second.
	Listening = 500 * time.Millisecond
	// Covered is that while another mechanism reports carriers (Cover), should it fail without notice.
	Covered = time.Second

	// Links that fail again and again start one window after another. So quick polls last at most for burst, and for
	// one part in refill of the time since: each costs 100 us of a processor, most of it outside the poll (timers,
	// wake-ups).
	burst, refill = 2 * Window, 16
)

// Schedule decides when to poll. The zero value never polls; Start begins. It is not safe for concurrent use.
type Schedule struct {
	until, next time.Time
	// rested is when quick polls may last for burst again.
	rested  time.Time
	covered bool
	// alert is when the kernel delays no event any more because of the last Start; listens is set by Listen.
	alert   time.Time
	listens bool
}

// Listen makes polls rare at other times than the Window after each Start: the caller calls Event for the link events
// of all network namespaces, so that the kernel delays no event at other times.
func (s *Schedule) Listen() { s.listens = true }

// Cover sets whether another mechanism reports each change of a carrier without the kernel's delay: a program in the
// kernel, or the polls of another program, which since Linux 6.8 make the kernel announce what they find to every
// listener. Polls are then rare. Changes before Cover are not covered, so each switch makes a poll due now. It reports
// whether there was one.
func (s *Schedule) Cover(on bool, now time.Time) (switched bool) {
	if s.covered == on {
		return false
	}
	s.covered = on
	s.Start(now)
	return true
}

// Event is Start after a link event of any device, which the kernel may delay the events of others for. It does nothing
// while the carriers are covered. It reports whether a poll is due.
func (s *Schedule) Event(now time.Time) (due bool) {
	if !s.covered {
		s.Start(now)
	}
	return s.Due(now)
}

// Start makes a poll due now, further polls every Period until Window has passed, then every Idle, or every Listening
// after Listen. While the carriers are covered, further polls are due every Covered. Call it when a carrier may have
// changed: after a closed BGP session, a failed BFD session, or a report by the mechanism of Cover.
func (s *Schedule) Start(now time.Time) { s.StartLater(now, 0) }

// StartLater is Start with the first poll due after a delay, unless one is due sooner.
func (s *Schedule) StartLater(now time.Time, delay time.Duration) {
	if due := now.Add(delay); s.next.IsZero() || due.Before(s.next) {
		s.next = due
	}
	if s.covered {
		return
	}
	s.alert = later(s.alert, now.Add(Window))
	from, rested := later(s.until, now), later(s.rested, now)
	// An extension by d delays rested by refill times d, and rested is at most refill times burst ahead.
	more := min(now.Add(Window).Sub(from), burst-rested.Sub(now)/refill)
	if more > 0 {
		s.until, s.rested = from.Add(more), rested.Add(refill*more)
	}
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// Next returns the time of the next poll; the zero time, before Start, means never.
func (s *Schedule) Next() time.Time { return s.next }

// Due reports whether a poll is due.
func (s *Schedule) Due(now time.Time) bool { return !s.next.IsZero() && !now.Before(s.next) }

// Done schedules the next poll after one that lasted from start to now.
func (s *Schedule) Done(start, now time.Time) {
	if s.covered {
		s.next = now.Add(beat.Until(now, Covered))
	} else if s.listens && !now.Before(s.alert) {
		s.next = now.Add(beat.Until(now, Listening))
	} else if now.Before(s.until) {
		s.next = now.Add(min(MostPeriod, max(Period, share*now.Sub(start))))
	} else {
		s.next = now.Add(min(MostIdle, max(Idle, shareIdle*now.Sub(start))))
	}
}
