package daemon

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"github.com/fared/fared/daemon/internal/core"
	"github.com/fared/fared/daemon/internal/dpclient"
	"github.com/fared/fared/daemon/internal/status"
)

// confirmDrains advances drains in their first stage once the data plane sends nothing over the drained target. It does
// not wait for other changes that the data plane has not acknowledged or has refused. A leaf without a data plane has
// nothing to wait for.
func (l *loop) confirmDrains() {
	var confirmed []core.DrainTarget
	waiting := map[core.DrainTarget]*dpclient.Evacuation{}
	l.core.Drains(func(t core.DrainTarget, s core.DrainStage) {
		if s != core.DrainShares {
			return
		}
		if l.d.client == nil {
			confirmed = append(confirmed, t)
			return
		}
		e := l.evacuations[t]
		if e == nil {
			e = l.d.client.Evacuate(l.drainedDevices(t))
		}
		if e.Done() {
			confirmed = append(confirmed, t)
		} else {
			waiting[t] = e
		}
	})
	l.evacuations = waiting
	for _, t := range confirmed {
		l.step(core.DrainStep{Target: t, Confirmed: true})
		l.builder.MarkFabric()
	}
	l.armDrains()
}

// drainedDevices returns the devices of the sub-ports that lead to a drain's target.
func (l *loop) drainedDevices(t core.DrainTarget) []string {
	var out []string
	for i := range l.core.Layout().Sessions {
		if device := l.core.Layout().SubPorts[l.core.Layout().Sessions[i].SubPort].Device; l.core.Covers(t, i) && !slices.Contains(out, device) {
			out = append(out, device)
		}
	}
	return out
}

// shownTarget converts a target to the status's type.
func shownTarget(t core.DrainTarget) status.DrainTarget {
	out := status.DrainTarget{Plane: t.Plane, SubPort: t.SubPort}
	if t.Leaf.IsValid() {
		out.Leaf = t.Leaf.String()
	}
	return out
}

// drainReasons is the greatest number of destinations shown that a drain waits for.
const drainReasons = 3

// drainSessions is the greatest number of sessions shown that a drain waits for.
const drainSessions = 3

// drains returns every drain, with the objects that it waits for; those given up and dormant ones come last.
func (l *loop) drains() []status.Drain {
	var out []status.Drain
	l.core.Drains(func(t core.DrainTarget, s core.DrainStage) {
		r := l.drained.all[t]
		d := status.Drain{Target: shownTarget(t), Stage: s.String(), Since: r.Since, By: r.By, Reason: r.Reason}
		if e := l.evacuations[t]; s == core.DrainShares && e != nil {
			d.Waiting, d.WaitsFor = e.Waiting(drainReasons)
		}
		switch s {
		case core.DrainRoutes:
			if d.WaitsFor = l.unwritten(t, "zero bandwidth"); d.WaitsFor == nil {
				d.WaitsFor = []string{fmt.Sprintf("drain_delay, %v: the leaves have zero bandwidth; the other servers move their traffic meanwhile", l.core.Config().DrainDelay)}
			}
		case core.Undraining:
			d.WaitsFor = []string{fmt.Sprintf("drain_delay, %v: the routes are advertised again; traffic returns once the other servers have had this time to learn them", l.core.Config().DrainDelay)}
		case core.DrainWithdrawing:
			d.WaitsFor = l.unwritten(t, "withdrawals")
		}
		out = append(out, d)
	})
	for _, t := range slices.SortedFunc(maps.Keys(l.drained.givenUp), func(a, b core.DrainTarget) int { return cmp.Compare(a.String(), b.String()) }) {
		g := l.drained.givenUp[t]
		out = append(out, status.Drain{Target: shownTarget(t), Stage: stageGivenUp, WaitsFor: []string{g.why.Error()}, Since: g.record.Since, By: g.record.By, Reason: g.record.Reason})
	}
	for _, r := range l.dormant() {
		out = append(out, status.Drain{Target: shownTarget(r.DrainTarget), Stage: stageDormant, Since: r.Since, By: r.By, Reason: r.Reason})
	}
	return out
}

// unwritten describes the sessions of a drain's target that have not carried the routes of its stage yet, and why, if
// that is known.
func (l *loop) unwritten(t core.DrainTarget, routes string) []string {
	var out []string
	sessions := l.core.Unsettled(t)
	for _, i := range sessions[:min(len(sessions), drainSessions)] {
		text := "session " + l.core.Layout().Sessions[i].Name + ": " + routes + " not acknowledged by the leaf's TCP yet"
		if l.d.speaker.Status(i).Untaken {
			text += ", the leaf reads nothing from its connection"
		}
		out = append(out, text)
	}
	if more := len(sessions) - len(out); more > 0 {
		out = append(out, fmt.Sprintf("and %d more sessions", more))
	}
	return out
}
