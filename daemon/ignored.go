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

// ignoredKey identifies a session with routes whose bandwidth is ignored for a reason.
type ignoredKey struct {
	session int
	reason  fare.Reason
}

// ignored tracks the ignored bandwidth of all source groups. The zero value is empty.
type ignored struct {
	groups  map[sourceKey[fare.GroupID]][]fare.IgnoredBandwidth // groups with ignored bandwidth
	changed []sourceKey[fare.GroupID]                           // since the last call of takeIgnored; it omits deleted groups
	dirty   bool                                                // a table has changed since that call
}

// noteIgnored updates the ignored bandwidth after a change of a table, in O(1) for groups without any before and after.
func (c *Core) noteIgnored(source int, ch fare.Change) {
	g := &c.unbelieved
	key := sourceKey[fare.GroupID]{source, ch.Group}
	switch ch.Kind {
	case fare.GroupSet:
		now := c.sources[source].table.Group(ch.Group).Ignored
		if slices.Equal(now, g.groups[key]) {
			return
		}
		g.dirty = true
		g.changed = append(g.changed, key)
		if len(now) == 0 {
			delete(g.groups, key)
			return
		}
		if g.groups == nil {
			g.groups = map[sourceKey[fare.GroupID]][]fare.IgnoredBandwidth{}
		}
		g.groups[key] = slices.Clone(now)
	case fare.GroupDelete:
		if _, ok := g.groups[key]; ok {
			g.dirty = true
			delete(g.groups, key)
		}
	}
}

// ignoredRoutes counts routes with ignored bandwidth by session and reason, sorted. A session that serves several source groups has its routes
// in each; its count is the largest of these.
func (c *Core) ignoredRoutes() []fare.IgnoredRoutes {
	all := map[ignoredKey]fare.IgnoredRoutes{}
	for i := range c.sources {
		at := c.layout.sources[i].at.sessions
		for _, x := range c.sources[i].table.Ignored() {
			x.Session = slices.Index(at, x.Session)
			if key := (ignoredKey{x.Session, x.Reason}); x.Routes > all[key].Routes {
				all[key] = x
			}
		}
	}
	return slices.SortedFunc(maps.Values(all), func(a, b fare.IgnoredRoutes) int {
		return cmp.Or(cmp.Compare(a.Session, b.Session), cmp.Compare(a.Reason, b.Reason))
	})
}

// remedyFor returns the remedy for ignored bandwidth.
func remedyFor(reason fare.Reason) string {
	switch reason {
	case fare.ReasonMissingBandwidth:
		return "make the leaf send extended communities, or make all leaves send none"
	case fare.ReasonBelowMinimum, fare.ReasonAboveMaximum:
		return "a leaf that corrupts values (FRR before July 2026 above 34 Gbit/s) needs path_bandwidth.encoding: extended-community with advertise: node on all servers; else correct path_bandwidth.minimum and maximum"
	}
	return "correct the leaf's export policy or software: the value is not a bandwidth"
}

// takeIgnored calls destination for the destinations whose ignored bandwidth has changed since the last call. It reports whether any ignored
// bandwidth has changed, that of removed destinations included.
func (c *Core) takeIgnored(destination func(source int, prefix netip.Prefix)) bool {
	g := &c.unbelieved
	for _, key := range g.changed {
		for prefix := range c.sources[key.source].table.Members(key.of) {
			destination(key.source, prefix)
		}
	}
	dirty := g.dirty
	g.changed, g.dirty = g.changed[:0], false
	return dirty
}

// markIgnored marks the vectors whose ignored bandwidth has changed for the status.
func (l *loop) markIgnored() {
	changed := l.core.takeIgnored(func(source int, prefix netip.Prefix) {
		if a, ok := l.effects.destinations[l.key(source, prefix)]; ok {
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
		name, detail := l.core.Layout().sessions[session].Name, fmt.Sprintf(format, args...)
		l.builder.Event(status.Event{Time: now, Kind: status.EventFault, Subject: name, Detail: detail})
		l.log.Warn("path bandwidth", "session", name, "detail", detail)
		return true
	}
	current := map[faultKey]bool{}
	for _, x := range l.core.ignoredRoutes() {
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
				names = append(names, l.core.Layout().sources[source].sessions[x.Session].Name)
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
	for _, x := range l.core.ignoredRoutes() {
		s := &l.core.Layout().sessions[x.Session]
		out = append(out, status.Fault{
			Kind: status.FaultBandwidthIgnored, Plane: l.core.Layout().planes[s.plane], Session: s.Name, Reason: x.Reason.String(), Routes: x.Routes,
			Example: x.Example, Remedy: remedyFor(x.Reason),
		})
	}
	return out
}
