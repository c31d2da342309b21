package daemon

import (
	"time"

	"github.com/fared/fared/daemon/internal/speaker"
)

// promptRoutes is the number of prompt routes and withdrawals of a session, in a burst and in each second. Further changes of the session are
// bulk, which the data plane receives in turn with the prompt changes of all sessions: a leaf that changes thousands of routes delays only its
// own changes.
const promptRoutes = 256

// allowance is the unused part of a session's promptRoutes. The zero value is a full one.
type allowance struct {
	used float64
	at   time.Time // of used
	late time.Time // begin of the step from which on the session's events are bulk, so that they keep their order
}

// spend consumes one unit of the allowance in a step that began at now, and reports whether one was left.
func (a *allowance) spend(now time.Time) bool {
	a.used = max(0, a.used-promptRoutes*now.Sub(a.at).Seconds())
	a.at = now
	if a.used+1 > promptRoutes {
		return false
	}
	a.used++
	return true
}

// allows reports whether an event is prompt: a route or withdrawal within the session's allowance, or any other event that no bulk event of its
// session precedes in this step.
func (l *loop) allows(ev speaker.Event) bool {
	session, route := subject(ev)
	a := &l.allowances[session]
	if a.late.Equal(l.wokenAt) {
		return false
	}
	if !route || a.spend(l.wokenAt) {
		return true
	}
	a.late = l.wokenAt
	return false
}

// subject returns an event's session, and whether the event is a route or a withdrawal.
func subject(ev speaker.Event) (session int, route bool) {
	switch ev := ev.(type) {
	case speaker.SessionUp:
		return ev.Session, false
	case speaker.SessionDown:
		return ev.Session, false
	case speaker.EndOfRIB:
		return ev.Session, false
	case speaker.Written:
		return ev.Session, false
	case speaker.Fault:
		return ev.Session, false
	case speaker.Route:
		return ev.Session, true
	case speaker.Withdraw:
		return ev.Session, true
	}
	panic("daemon: an event of an unknown session")
}

// bulk processes the events beyond the allowances, after all prompt changes were declared.
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
	l.handOut()
}
