package daemon

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"

	"github.com/fared/fared/daemon/internal/core"
	"github.com/fared/fared/daemon/internal/status"
	"github.com/fared/fared/fare"
)

const (
	avoidBatch = 256 // changes between two turns of the loop
	avoidNamed = 3   // destinations that an event names
)

// avoider returns the function by which a new prober reports that probes by planes toward destinations are lost, or
// answered again. It must be called before the loop runs, or on its goroutine. The function may be called on every
// other goroutine, and returns when the loop has all changes, or has ended. It has no effect once there is a later
// prober.
func (l *loop) avoider() func([]core.Avoid) {
	l.probers++
	prober := l.probers
	return func(changes []core.Avoid) {
		for batch := range slices.Chunk(changes, avoidBatch) {
			run := func() {
				if prober == l.probers {
					l.avoid(batch)
				}
			}
			if l.do(context.Background(), run) != nil {
				return
			}
		}
	}
}

// avoid passes changes to the core, and reports them if proof.unproved is avoid: one event for each plane.
func (l *loop) avoid(changes []core.Avoid) {
	layout := l.core.Layout()
	lost, answered := make([][]string, len(layout.Planes)), make([][]string, len(layout.Planes))
	for _, ev := range changes {
		if l.core.Avoided(ev) == ev.On {
			continue
		}
		if l.step(ev); l.core.Avoided(ev) != ev.On {
			continue // the core has reported the fault
		}
		to := ev.Destination.String()
		if name := layout.Sources[ev.Source].Name; name.IsValid() {
			to += " from " + name.String()
		}
		if ev.On {
			lost[ev.Plane] = append(lost[ev.Plane], to)
		} else {
			answered[ev.Plane] = append(answered[ev.Plane], to)
		}
	}
	if l.core.Config().Proof.Unproved != fare.UnprovedAvoid {
		return
	}
	for p, name := range layout.Planes {
		if len(lost[p]) > 0 {
			l.event(status.EventFault, "plane "+name, "probes by it are lost, so it is avoided toward "+someOf(lost[p]))
		}
		if len(answered[p]) > 0 {
			l.report(slog.LevelInfo, status.EventFault, "plane "+name, "probes by it are answered, so it is used toward "+someOf(answered[p]))
		}
	}
}

// someOf names the first ones of a list, and counts the others.
func someOf(list []string) string {
	text := strings.Join(list[:min(avoidNamed, len(list))], ", ")
	if more := len(list) - avoidNamed; more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}

// avoidedRules explains the avoided planes of a destination.
func avoidedRules(desc *fare.Description) (rules []string) {
	for i := range desc.Routes {
		r, rule := &desc.Routes[i], ""
		switch {
		case !r.Avoided:
		case r.Reason == fare.ReasonAvoided:
			rule = "plane " + r.Plane + " is avoided: probes by it to this destination are lost"
		case r.Reason == fare.ReasonUsed:
			rule = "plane " + r.Plane + " is used although probes by it to this destination are lost: no other plane is left"
		}
		if rule != "" && !slices.Contains(rules, rule) {
			rules = append(rules, rule)
		}
	}
	return rules
}
