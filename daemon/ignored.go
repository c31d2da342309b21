package daemon

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/fared/fared/daemon/internal/status"
	"github.com/fared/fared/fare"
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
	l.faultReport.dirty = l.faultReport.dirty || changed
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

// ignoredFaults appends the faults of ignored bandwidth.
func (l *loop) ignoredFaults(out []sessionFault) []sessionFault {
	for _, x := range l.core.IgnoredRoutes() {
		out = append(out, l.faultOf(x.Session, status.Fault{
			Kind: status.FaultBandwidthIgnored, Reason: x.Reason.String(), Routes: x.Routes, Example: x.Example, Remedy: remedyFor(x.Reason),
		}))
	}
	return out
}
