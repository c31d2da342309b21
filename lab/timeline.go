package lab

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"github.com/fared/fared/lab/judge"
	"github.com/fared/fared/lab/probe"
)

// The kinds of Event, in their causal order.
const (
	// EventAction: an action of the script is complete; Detail is its line. Its effects may precede this event.
	EventAction = "action"
	// EventWeights: a server's daemon reported changed weights over WatchWeights, for the last time in this step.
	EventWeights = "weights"
	// EventAdopted: the server's sender changed its slots or their shares, for the last time.
	EventAdopted = "adopted"
	// EventInEffect: the server's daemon reported that all of those weights are in effect.
	EventInEffect = "in-effect"
	// EventLeft: the server's sender sent the last packet from a slot that it no longer uses.
	EventLeft = "left"
	// EventFirstLost and EventLastLost: the sending of the first and the last lost packet, of all servers. All packets
	// sent after the last one arrive.
	EventFirstLost = "first-lost"
	EventLastLost  = "last-lost"
)

var eventOrder = []string{EventAction, EventWeights, EventAdopted, EventInEffect, EventLeft, EventFirstLost, EventLastLost}

// Event is one event of a step.
type Event struct {
	// AtNS is the time since the first action began, nanoseconds; never negative.
	AtNS int64 `json:"at_ns"`
	// Event is one of the constants above.
	Event string `json:"event"`
	// Node is the server of the event; empty for actions.
	Node string `json:"node,omitempty"`
	// Detail describes the event for display.
	Detail string `json:"detail,omitempty"`
}

// words returns an action with its names substituted.
func (f *Fabric) words(a Action) string {
	return strings.Join(append([]string{a.Verb}, f.substArgs(a.Args)...), " ")
}

// moment is the last of some moments, and the detail of that moment.
type moment struct {
	at     time.Time
	detail string
}

func (m *moment) later(at time.Time, detail string) {
	if at.After(m.at) {
		*m = moment{at, detail}
	}
}

// timeline completes a step's result, after its packets were watched, with the events that followed its actions, which
// are given.
func (f *Fabric) timeline(r *Result, start time.Time, events []Event) {
	add := func(at time.Time, event string, server int, detail string) {
		if !at.Before(start) {
			events = append(events, Event{at.Sub(start).Nanoseconds(), event, f.Server[server].Name, detail})
		}
	}
	t := f.flow
	for src, w := range f.followers {
		var weights, adopted, effective, left moment
		moved := map[int]bool{} // by source group of the destination
		for way := range f.Toward(src) {
			h, to := w.Followed(way.Way), "toward "+f.Groups()[way.Group].Name
			moved[way.Group] = moved[way.Group] || !h.Adopted.Before(start)
			weights.later(h.Changed, judge.Ratio(h.Weights)+" "+to)
			adopted.later(h.Adopted, to)
			effective.later(h.Effective, to)
		}
		for dst := range f.Groups() {
			if !moved[dst] {
				continue
			}
			if last, plane, found := t.Left(src, dst); found {
				left.later(last, f.PlaneName(plane)+" toward "+f.Groups()[dst].Name)
			}
		}
		add(weights.at, EventWeights, src, weights.detail)
		add(adopted.at, EventAdopted, src, adopted.detail)
		add(effective.at, EventInEffect, src, effective.detail)
		add(left.at, EventLeft, src, left.detail)
		r.WeightsFollowedNS = max(r.WeightsFollowedNS, weights.at.Sub(start).Nanoseconds())
	}
	if r.Traffic != nil && r.Traffic.outage.Packets > 0 {
		o := r.Traffic.outage
		lost := func(event string, at probe.Lane, sent int64) {
			src, dst := t.Ends(at.Pair)
			add(t.Time(sent), event, f.Host(src), f.PlaneName(at.Plane)+" toward "+f.Groups()[dst].Name)
		}
		lost(EventFirstLost, o.First, o.FirstSent)
		lost(EventLastLost, o.Last, o.LastSent)
	}
	sortEvents(events)
	r.Timeline = events
}

// sortEvents sorts events by time, and those of one time in causal order.
func sortEvents(events []Event) {
	slices.SortStableFunc(events, func(a, b Event) int {
		return cmp.Or(cmp.Compare(a.AtNS, b.AtNS),
			cmp.Compare(slices.Index(eventOrder, a.Event), slices.Index(eventOrder, b.Event)), cmp.Compare(a.Node, b.Node))
	})
}
