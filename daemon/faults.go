package daemon

import (
	"cmp"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/daemon/internal/status"
	"github.com/fared/fared/internal/hostcheck"
)

// Bounds of the log lines about faults of sessions. One leaf may corrupt the bandwidth of every route at once, and
// return to valid values just as quickly.
const (
	faultsEvery = time.Second
	faultLines  = 8 // lines per faultsEvery; further lines follow later
)

// sessionFault is a current fault of a session.
type sessionFault struct {
	session int
	status.Fault
}

// faultOf completes a fault of a session.
func (l *loop) faultOf(session int, f status.Fault) sessionFault {
	s := &l.core.Layout().Sessions[session]
	f.Plane, f.Session = l.core.Layout().Planes[s.Plane], s.Name
	return sessionFault{session, f}
}

// sessionFaults returns every current fault of the sessions: ignored bandwidth, then dropped routes.
func (l *loop) sessionFaults() []sessionFault { return l.droppedFaults(l.ignoredFaults(nil)) }

// limited notes the limitations of the data plane's host, and reports those that begin or end. Without BFD its packets
// do not matter.
func (l *loop) limited(all []*farev1.Limitation) {
	now := slices.DeleteFunc(slices.Clone(all), func(x *farev1.Limitation) bool {
		return x.Reason == hostcheck.ReasonFirewallBFD && l.core.Config().BFD.Interval == 0
	})
	has := func(in []*farev1.Limitation, x *farev1.Limitation) bool {
		return slices.ContainsFunc(in, func(y *farev1.Limitation) bool { return x.Reason == y.Reason && x.Text == y.Text })
	}
	for _, x := range now {
		if !has(l.limitations, x) {
			l.event(status.EventFault, "host", x.Reason+": "+x.Text+"; "+x.Remedy)
		}
	}
	for _, x := range l.limitations {
		if !has(now, x) {
			l.report(slog.LevelInfo, status.EventFault, "host", x.Reason+" has ended: "+x.Text)
		}
	}
	l.limitations = now
	l.builder.MarkFabric()
}

// faultKey identifies a reported fault.
type faultKey struct {
	kind    string
	session int
	reason  string
}

// faultTexts are the log lines about the faults of a kind, and the message of these lines. The begin has the number of
// routes, the reason, an example and the remedy, the end has the reason.
var faultTexts = map[string]struct{ message, begin, end string }{
	status.FaultBandwidthIgnored: {"path bandwidth", "bandwidth of %d routes ignored, %s, such as %s: %s", "the bandwidth of no usable route is ignored now, %s"},
	status.FaultRoutesDropped:    {"routes dropped", "%d routes dropped, %s, such as %s: %s", "no route is dropped now, %s"},
}

// faultReport is the set of reported faults.
type faultReport struct {
	reported map[faultKey]bool
	dirty    bool      // faults may have changed since the last report
	last     time.Time // of the last report
}

// reportFaults reports the begin and the end of each fault once: immediately if the last report is at least faultsEvery
// ago, else together with the faults that follow until then. A fault that ends before its report is due is not
// reported.
func (l *loop) reportFaults() {
	r := &l.faultReport
	now := time.Now()
	if !r.dirty || now.Sub(r.last) < faultsEvery {
		return
	}
	r.dirty = false
	lines := 0
	line := func(key faultKey, format string, args ...any) bool {
		if lines == faultLines {
			r.dirty = true
			return false
		}
		lines++
		r.last = now
		name, detail := l.core.Layout().Sessions[key.session].Name, fmt.Sprintf(format, args...)
		l.builder.Event(status.Event{Time: now, Kind: status.EventFault, Subject: name, Detail: detail})
		l.log.Warn(faultTexts[key.kind].message, "session", name, "detail", detail)
		return true
	}
	current := map[faultKey]bool{}
	for _, x := range l.sessionFaults() {
		key := faultKey{x.Kind, x.session, x.Reason}
		current[key] = true
		if !r.reported[key] && line(key, faultTexts[x.Kind].begin, x.Routes, x.Reason, x.Example, x.Remedy) {
			if r.reported == nil {
				r.reported = map[faultKey]bool{}
			}
			r.reported[key] = true
		}
	}
	ended := slices.SortedFunc(maps.Keys(r.reported), func(a, b faultKey) int {
		return cmp.Or(cmp.Compare(a.kind, b.kind), cmp.Compare(a.session, b.session), cmp.Compare(a.reason, b.reason))
	})
	for _, key := range ended {
		if !current[key] && line(key, faultTexts[key.kind].end, key.reason) {
			delete(r.reported, key)
		}
	}
}
