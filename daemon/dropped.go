package daemon

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/fared/fared/daemon/internal/core"
	"github.com/fared/fared/daemon/internal/guard"
	"github.com/fared/fared/daemon/internal/speaker"
	"github.com/fared/fared/daemon/internal/status"
	"github.com/fared/fared/fare"
)

// settleTime is the time after which the dropped routes of a session are judged although the peer has not sent
// End-of-RIB. Before, the routes that would show them to be harmless may be under way.
const settleTime = 5 * time.Second

// intake is the state of a session's peer, except the accepted routes. The zero value is that of a session that is not
// established.
type intake struct {
	up       bool
	since    time.Time         // begin of the generation
	families speaker.FamilySet // negotiated
	refused  []guard.Refused
}

// dropReasons are the reasons of dropped routes that are faults, with their remedies. Other drops are routine, such as
// those of default routes.
var dropReasons = map[guard.Reason]string{
	guard.RouteNextHop:    "another machine of the subnet is the next hop: make the leaf send itself (FRR: neighbor ADDRESS next-hop-self; BIRD: next hop self), or set subnet_next_hops: true on the session",
	guard.RouteLoop:       "the other servers have this server's AS: set as-override for it at the leaf, or bgp.allow_own_as: 1 here, or give each server a separate AS",
	guard.RouteNotHost:    "make the leaf advertise each loopback as a host route (FRR: no summary-only), or leave the subnet out of accept",
	guard.RouteOutside:    "add the range of the servers' loopbacks to accept",
	guard.RouteFirstAS:    "make the leaf put its own AS first in the path: no transparent route server",
	guard.RoutePath:       "make the leaf send AS paths without sets, confederations and AS 0",
	guard.RouteOversize:   fmt.Sprintf("shorten the AS paths to at most %d numbers", guard.MaxASPath),
	guard.RouteMalformed:  "correct or update the leaf's software: RFC 7606 withdraws routes with such attributes",
	guard.RouteIncomplete: "correct or update the leaf's software: RFC 7606 withdraws routes without a mandatory attribute",
}

// isSettled reports whether the dropped routes of an established session may be judged.
func (l *loop) isSettled(session int, now time.Time) bool {
	return l.core.SessionState(session).EndOfRIB || now.Sub(l.intakes[session].since) >= settleTime
}

// noteIntake replaces the intake of a session.
func (l *loop) noteIntake(session int, in intake) {
	l.intakes[session] = in
	l.faultReport.dirty = true
	if at := in.since.Add(settleTime); in.up && (l.settleAt.IsZero() || at.Before(l.settleAt)) {
		l.settleAt = at
	}
}

// settle has the faults of the sessions judged whose settleTime has passed.
func (l *loop) settle(now time.Time) {
	if l.settleAt.IsZero() || now.Before(l.settleAt) {
		return
	}
	l.settleAt, l.faultReport.dirty = time.Time{}, true
	for i := range l.intakes {
		if at := l.intakes[i].since.Add(settleTime); l.intakes[i].up && at.After(now) && (l.settleAt.IsZero() || at.Before(l.settleAt)) {
			l.settleAt = at
		}
	}
	l.builder.MarkFabric()
}

// droppedFaults appends the faults of dropped routes, and of families that a session should carry and does not.
func (l *loop) droppedFaults(out []sessionFault) []sessionFault {
	now := time.Now()
	server := l.core.Config().Role == fare.RoleServer
	for i := range l.intakes {
		in := &l.intakes[i]
		if !in.up || !l.isSettled(i, now) {
			continue
		}
		add := func(reason string, routes int, example netip.Prefix, remedy string) {
			out = append(out, l.faultOf(i, status.Fault{
				Kind: status.FaultRoutesDropped, Reason: reason, Routes: uint64(routes), Example: example, Remedy: remedy,
			}))
		}
		for _, r := range in.refused {
			// Spines send a leaf's routes back to it.
			if remedy := dropReasons[r.Reason]; remedy != "" && (server || r.Reason != guard.RouteLoop) {
				add(r.Reason.String(), r.Routes, r.Example, remedy)
			}
		}
		for k, family := range []speaker.Family{speaker.IPv4, speaker.IPv6} {
			if own := l.uncarried(i, k, family); len(own) > 0 {
				remedy := "the leaf did not agree to %s: activate the family for this neighbor there, or remove it from the session's families"
				if !l.core.Layout().Sessions[i].FamilySet[k] {
					remedy = "no session carries %[1]s: add sessions to the leaves' %[1]s addresses, or the family where a session can carry it"
				}
				add("family_"+family.String(), len(own), own[0], fmt.Sprintf(remedy, family))
			}
		}
	}
	return out
}

// uncarried returns the loopbacks of a family that this server cannot advertise over a session's sub-port, because none
// of the sub-port's peers has agreed to the family. The session should carry the family, by its configuration, or
// because no session of any sub-port does.
func (l *loop) uncarried(session, index int, family speaker.Family) (own []netip.Prefix) {
	layout := l.core.Layout()
	s := &layout.Sessions[session]
	for k := range layout.Sessions {
		if layout.Sessions[k].SubPort == s.SubPort && l.intakes[k].families.Has(family) {
			return nil
		}
	}
	for _, lo := range l.core.Config().Loopbacks {
		elsewhere := func(k core.LayoutSession) bool { return k.FamilySet[index] && layout.SubPorts[k.SubPort].Serves(lo) }
		if lo.Addr().Is4() == (family == speaker.IPv4) && layout.SubPorts[s.SubPort].Serves(lo) && (s.FamilySet[index] || !slices.ContainsFunc(layout.Sessions, elsewhere)) {
			own = append(own, lo)
		}
	}
	return own
}
