package daemon

import (
	"time"

	"github.com/fared/fared/daemon/internal/speaker"
)

// promptRoutes is the number of prompt routes and withdrawals of a session, in a burst and in each second. Further
// changes of the session are bulk, which the data plane receives in turn with the prompt changes of all sessions: a
// leaf that changes thousands of routes delays only its own changes.
const promptRoutes = 256

// allowance is the unused part of a session's promptRoutes. The zero value is a full one.
type allowance struct {
	used float64
	at   time.Time // of used
	late time.Time // begin of the step from which on the session's events are bulk, so that they keep their order
}

// spend consumes up to n units of the allowance in a step that began at now, and returns the number of consumed ones.
func (a *allowance) spend(now time.Time, n int) int {
	a.used = max(0, a.used-promptRoutes*now.Sub(a.at).Seconds())
	a.at = now
	n = min(n, int(promptRoutes-a.used))
	a.used += float64(n)
	return n
}

// divide splits an event into a prompt and a bulk part; one of them may be nil. Changed routes within the session's
// allowance are prompt, and so is any other event that no bulk event of its session precedes in this step.
func (l *loop) divide(ev speaker.Event) (prompt, bulk speaker.Event) {
	a := &l.allowances[sessionOf(ev)]
	if a.late.Equal(l.wokenAt) {
		return nil, ev
	}
	routes, ok := ev.(speaker.Routes)
	if !ok {
		return ev, nil
	}
	n := a.spend(l.wokenAt, len(routes.Changes))
	if n == len(routes.Changes) {
		return ev, nil
	}
	a.late = l.wokenAt
	rest := routes
	if routes.Changes, rest.Changes = routes.Changes[:n], routes.Changes[n:]; n == 0 {
		return nil, rest
	}
	return routes, rest
}

// sessionOf returns an event's session.
func sessionOf(ev speaker.Event) int {
	switch ev := ev.(type) {
	case speaker.SessionUp:
		return ev.Session
	case speaker.SessionDown:
		return ev.Session
	case speaker.Refused:
		return ev.Session
	case speaker.EndOfRIB:
		return ev.Session
	case speaker.Written:
		return ev.Session
	case speaker.Fault:
		return ev.Session
	case speaker.Routes:
		return ev.Session
	}
	panic("daemon: an event of an unknown session")
}

// late reports whether the session of an event has bulk events in this step.
func (l *loop) late(ev speaker.Event) bool {
	return l.allowances[sessionOf(ev)].late.Equal(l.wokenAt)
}

// bulk processes the events beyond the allowances, after the prompt ones.
func (l *loop) bulk() {
	if len(l.bulkEvents) == 0 {
		return
	}
	if l.d.client != nil {
		l.d.client.Bulk(true)
		defer l.d.client.Bulk(false)
	}
	for _, ev := range l.bulkEvents {
		l.bgp(ev)
	}
	clear(l.bulkEvents)
	l.bulkEvents = l.bulkEvents[:0]
	l.deliver()
}
