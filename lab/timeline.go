package lab

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/lab/backend"
	"github.com/fared/fared/lab/judge"
	"github.com/fared/fared/topo"
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

// follower receives the weights of a server's daemon (WatchWeights) and records their changes.
type follower struct {
	fabric *topo.Fabric
	server int
	mu     sync.Mutex // guards the fields below
	toward map[topo.Way]*heard
}

// heard is a follower's state of a destination.
type heard struct {
	weights  []uint32 // by plane
	inEffect bool
	// changed is the time of the last change of the weights, effective the time when they were first reported in effect
	// after it, adopted the time of the last change of the sending slots. Zero means never.
	changed, effective, adopted time.Time
}

func newFollower(f *topo.Fabric, server int) *follower {
	return &follower{fabric: f, server: server, toward: map[topo.Way]*heard{}}
}

// forget discards everything, for a daemon that restarts.
func (w *follower) forget() {
	w.mu.Lock()
	defer w.mu.Unlock()
	clear(w.toward)
}

// note records the daemon's row for a way. at is the time of receipt, adopted the time at which the row changed the
// sending slots, zero if it did not.
func (w *follower) note(to topo.Way, d *farev1.DestinationWeights, at, adopted time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	h := w.toward[to]
	if h == nil {
		h = &heard{}
		w.toward[to] = h
	}
	weights := planeWeights(w.fabric, d)
	h.inEffect = d.Reachable
	for _, p := range d.Planes {
		h.inEffect = h.inEffect && p.InEffect
	}
	if !slices.Equal(weights, h.weights) {
		h.weights, h.changed, h.effective = weights, at, time.Time{}
	}
	if h.inEffect && h.effective.IsZero() {
		h.effective = at
	}
	if !adopted.IsZero() {
		h.adopted = adopted
	}
}

// heard returns the state of a way, or the zero value if there is none.
func (w *follower) heard(to topo.Way) heard {
	w.mu.Lock()
	defer w.mu.Unlock()
	if h := w.toward[to]; h != nil {
		return *h
	}
	return heard{}
}

// watch follows a server's daemon until ctx or the daemon ends.
func (w *follower) watch(ctx context.Context, daemon backend.API) error {
	request := &farev1.WatchWeightsRequest{Filter: &farev1.WeightFilter{OmitPairs: true}}
	return daemon.Follow(ctx, request, func(m *farev1.WatchWeightsResponse) error {
		at := time.Now()
		return eachRow(m, func(d *farev1.DestinationWeights) error {
			ways, err := waysOf(w.fabric, w.server, d)
			for _, to := range ways {
				w.note(to, d, at, time.Time{})
			}
			return err
		})
	})
}

// eachRow calls f for every row of a message, and with a row without planes for every removed one.
func eachRow(m *farev1.WatchWeightsResponse, f func(*farev1.DestinationWeights) error) error {
	for _, d := range m.Weights {
		if err := f(d); err != nil {
			return err
		}
	}
	for _, gone := range m.Removed {
		if err := f(&farev1.DestinationWeights{Destination: gone.Destination, Sources: gone.Sources}); err != nil {
			return err
		}
	}
	return nil
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
			h, to := w.heard(way.Way), "toward "+f.Groups()[way.Group].Name
			moved[way.Group] = moved[way.Group] || !h.adopted.Before(start)
			weights.later(h.changed, judge.Ratio(h.weights)+" "+to)
			adopted.later(h.adopted, to)
			effective.later(h.effective, to)
		}
		for dst := range f.Groups() {
			if !moved[dst] {
				continue
			}
			if last, in := t.senders[src].left(dst); last >= 0 {
				left.later(t.epoch.Add(time.Duration(last)), f.PlaneName(in.plane)+" toward "+f.Groups()[dst].Name)
			}
		}
		add(weights.at, EventWeights, src, weights.detail)
		add(adopted.at, EventAdopted, src, adopted.detail)
		add(effective.at, EventInEffect, src, effective.detail)
		add(left.at, EventLeft, src, left.detail)
		r.WeightsFollowedNS = max(r.WeightsFollowedNS, weights.at.Sub(start).Nanoseconds())
	}
	if r.Traffic != nil && r.Traffic.outage.packets > 0 {
		o := r.Traffic.outage
		lost := func(event string, at lane, sent int64) {
			src, dst := t.ends(at.pair)
			add(t.epoch.Add(time.Duration(sent)), event, f.Host(src), f.PlaneName(at.plane)+" toward "+f.Groups()[dst].Name)
		}
		lost(EventFirstLost, o.first, o.firstSent)
		lost(EventLastLost, o.last, o.lastSent)
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
