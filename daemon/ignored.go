package daemon

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/fared/fared/daemon/internal/status"
	"github.com/fared/fared/fare"
)

// Bounds of the log lines about ignored bandwidth. One leaf may corrupt the bandwidth of every route at once, and return to valid values just as
// quickly.
const (
	ignoredEvery = time.Second
	ignoredLines = 8 // lines per ignoredEvery; further lines follow later
)

// remedyFor returns the remedy for ignored bandwidth.
func remedyFor(reason fare.Reason) string {
	switch reason {
	case fare.ReasonMissingBandwidth:
		return "make the leaf send extended communities, or make all leaves send none"
	case fare.ReasonBelowMinimum, fare.ReasonAboveMaximum:
		return "correct path_bandwidth.minimum and maximum; or the leaf corrupts values: path_bandwidth.scale: 1000 on all nodes keeps FRR's sums right"
	case fare.ReasonWrapped:
		return "the leaf sums in 32 bits of bytes a second (FRR through 10.7.0): set path_bandwidth.scale: 1000 on all servers and fared leaves"
	case fare.ReasonOtherScale:
		return "set the same path_bandwidth.scale on all servers and fared leaves"
	}
	return "correct the leaf's export policy or software: the value is not a bandwidth"
}

// markIgnored marks the vectors whose ignored bandwidth has changed for the status.
func (l *loop) markIgnored() {
	changed := l.core.TakeIgnored(func(source int, prefix netip.Prefix) {
		if a := l.shown.destination(l.key(source, prefix)); a != nil {
			l.builder.MarkVector(a.vector)
		}
	})
	l.ignoredReport.dirty = l.ignoredReport.dirty || changed
}

// faultKey identifies a reported fault of ignored bandwidth.
type faultKey struct {
	session int
	reason  fare.Reason
}

// ignoredReport is the set of reported faults of ignored bandwidth.
type ignoredReport struct {
	reported map[faultKey]bool
	dirty    bool      // ignored bandwidth has changed since the last report
	last     time.Time // of the last report
}

// reportIgnored reports the begin and the end of each fault once: immediately if the last report is at least ignoredEvery ago, else together
// with the faults that follow until then. A fault that ends before its report is due is not reported.
func (l *loop) reportIgnored() {
	r := &l.ignoredReport
	now := time.Now()
	if !r.dirty || now.Sub(r.last) < ignoredEvery {
		return
	}
	r.dirty = false
	lines := 0
	line := func(session int, format string, args ...any) bool {
		if lines == ignoredLines {
			r.dirty = true
			return false
		}
		lines++
		r.last = now
		name, detail := l.core.Layout().Sessions[session].Name, fmt.Sprintf(format, args...)
		l.builder.Event(status.Event{Time: now, Kind: status.EventFault, Subject: name, Detail: detail})
		l.log.Warn("path bandwidth", "session", name, "detail", detail)
		return true
	}
	current := map[faultKey]bool{}
	for _, x := range l.core.IgnoredRoutes() {
		key := faultKey{x.Session, x.Reason}
		current[key] = true
		if !r.reported[key] && line(x.Session, "bandwidth of %d routes ignored, %s, such as %s: %s", x.Routes, x.Reason, x.Example, remedyFor(x.Reason)) {
			if r.reported == nil {
				r.reported = map[faultKey]bool{}
			}
			r.reported[key] = true
		}
	}
	ended := slices.SortedFunc(maps.Keys(r.reported), func(a, b faultKey) int {
		return cmp.Or(cmp.Compare(a.session, b.session), cmp.Compare(a.reason, b.reason))
	})
	for _, key := range ended {
		if !current[key] && line(key.session, "the bandwidth of no usable route is ignored now, %s", key.reason) {
			delete(r.reported, key)
		}
	}
}

// ignoredText describes the ignored bandwidth of a group: each reason with its sessions. It is empty if there is none.
func (l *loop) ignoredText(source int, list []fare.IgnoredBandwidth) string {
	const most = 4 // sessions named per reason
	var parts []string
	for reason := range fare.Reasons {
		var names []string
		for _, x := range list {
			if x.Reason == reason {
				names = append(names, l.core.Layout().Sources[source].Sessions[x.Session].Name)
			}
		}
		if len(names) == 0 {
			continue
		}
		text := reason.String() + " from " + strings.Join(names[:min(most, len(names))], ", ")
		if len(names) > most {
			text += fmt.Sprintf(" and %d more", len(names)-most)
		}
		parts = append(parts, text)
	}
	return strings.Join(parts, "; ")
}

// ignoredFaults returns every fault of ignored bandwidth.
func (l *loop) ignoredFaults() []status.Fault {
	var out []status.Fault
	for _, x := range l.core.IgnoredRoutes() {
		s := &l.core.Layout().Sessions[x.Session]
		out = append(out, status.Fault{
			Kind: status.FaultBandwidthIgnored, Plane: l.core.Layout().Planes[s.Plane], Session: s.Name, Reason: x.Reason.String(), Routes: x.Routes,
			Example: x.Example, Remedy: remedyFor(x.Reason),
		})
	}
	return out
}
