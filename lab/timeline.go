package lab

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// What an Event can be, in the order in which things follow each other.
const (
	// EventAction: an action of the script was done; Detail is its line. What it causes may come before.
	EventAction = "action"
	// EventWeights: a server's daemon said over WatchWeights that its weights are others, for the last time in this step.
	EventWeights = "weights"
	// EventAdopted: the server's sender changed the slots that it sends from, or their shares, for the last time.
	EventAdopted = "adopted"
	// EventInEffect: the server's daemon said that its data plane forwards by all of those weights.
	EventInEffect = "in-effect"
	// EventLeft: the server's sender sent the last packet from a slot that it uses no more.
	EventLeft = "left"
	// EventFirstLost and EventLastLost: the first and the last packet that did not arrive was sent, of all servers. What is sent
	// after the last one arrives.
	EventFirstLost = "first-lost"
	EventLastLost  = "last-lost"
)

var eventOrder = []string{EventAction, EventWeights, EventAdopted, EventInEffect, EventLeft, EventFirstLost, EventLastLost}

// Event is one moment of a step.
type Event struct {
	// AtNS is when, nanoseconds after the first action began; never negative.
	AtNS int64 `json:"at_ns"`
	// Event is one of the constants above.
	Event string `json:"event"`
	// Node is the server it happened at; empty for actions.
	Node string `json:"node,omitempty"`
	// Detail says what, for people.
	Detail string `json:"detail,omitempty"`
}

// follower hears from a server's daemon what its weights are (WatchWeights), and notes when they change.
type follower struct {
	mu     sync.Mutex // guards what follows
	toward map[netip.Addr]*heard
}

// heard is what a follower knows of a destination.
type heard struct {
	weights  []uint32 // by plane
	inEffect bool
	// changed is when the weights last became others, effective when they were first said to be in effect since then, adopted when
	// the slots that are sent from last became others. Zero: never yet.
	changed, effective, adopted time.Time
}

func newFollower() *follower { return &follower{toward: map[netip.Addr]*heard{}} }

// forget is for a daemon that begins anew.
func (w *follower) forget() {
	w.mu.Lock()
	defer w.mu.Unlock()
	clear(w.toward)
}

// note takes what the daemon said of a destination at a moment. adopted is when that changed what is sent from; zero: it did not.
func (w *follower) note(dst netip.Addr, d *farev1.DestinationWeights, at, adopted time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	h := w.toward[dst]
	if h == nil {
		h = &heard{}
		w.toward[dst] = h
	}
	weights := planeWeights(d)
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

// heard is what is known of a destination: the zero value when that is nothing.
func (w *follower) heard(dst netip.Addr) heard {
	w.mu.Lock()
	defer w.mu.Unlock()
	if h := w.toward[dst]; h != nil {
		return *h
	}
	return heard{}
}

// behind says what a server's daemon has not told of yet, or "". inEffect: it is to have told that the data plane forwards so, too.
func (w *follower) behind(dst netip.Addr, want []uint32, inEffect bool) string {
	h := w.heard(dst)
	positive := func(w uint32) bool { return w > 0 }
	reachable := slices.ContainsFunc(want, positive)
	switch {
	case reachable && !slices.Equal(h.weights, want), !reachable && slices.ContainsFunc(h.weights, positive):
		return fmt.Sprintf("WatchWeights tells of the weights %q, should tell of %s", Ratio(h.weights), Ratio(want))
	case reachable && inEffect && !h.inEffect:
		return fmt.Sprintf("WatchWeights does not tell that the weights %s are in effect", Ratio(want))
	}
	return ""
}

// weightStream is the answer to WatchWeights of a daemon in this process.
type weightStream struct {
	grpc.ServerStream // of which WatchWeights uses no more than what follows
	ctx               context.Context
	take              func(*farev1.WatchWeightsResponse) error
}

func (s *weightStream) Context() context.Context                  { return s.ctx }
func (s *weightStream) Send(m *farev1.WatchWeightsResponse) error { return s.take(m) }

// watch follows a daemon in this process until ctx ends, or the daemon.
func (w *follower) watch(ctx context.Context, service farev1.WeightServiceServer) error {
	take := func(m *farev1.WatchWeightsResponse) error {
		at := time.Now()
		return eachDestination(m, func(dst netip.Addr, d *farev1.DestinationWeights) error {
			w.note(dst, d, at, time.Time{})
			return nil
		})
	}
	request := &farev1.WatchWeightsRequest{Filter: &farev1.WeightFilter{OmitPairs: true}}
	return service.WatchWeights(request, &weightStream{ctx: ctx, take: take})
}

func (b *real) followers() []*follower {
	all := make([]*follower, b.Servers)
	for s, o := range b.flow.senders {
		all[s] = o.weights
	}
	return all
}

// eachDestination calls f for every destination that a message tells of; of one that is gone, without planes.
func eachDestination(m *farev1.WatchWeightsResponse, f func(netip.Addr, *farev1.DestinationWeights) error) error {
	for _, d := range m.Weights {
		prefix, err := netip.ParsePrefix(d.Destination)
		if err == nil {
			err = f(prefix.Addr(), d)
		}
		if err != nil {
			return err
		}
	}
	for _, text := range m.Removed {
		prefix, err := netip.ParsePrefix(text)
		if err == nil {
			err = f(prefix.Addr(), &farev1.DestinationWeights{Destination: text})
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// words is an action as it is done here.
func (f *Fabric) words(a Action) string {
	words := []string{a.Verb}
	for _, w := range a.Args {
		words = append(words, f.subst(w))
	}
	return strings.Join(words, " ")
}

// moment is the last of some moments, and what happened then.
type moment struct {
	at     time.Time
	detail string
}

func (m *moment) later(at time.Time, detail string) {
	if at.After(m.at) {
		*m = moment{at, detail}
	}
}

// timeline completes a step's result, after its packets were watched, by what followed its actions, which are given as events.
func (f *Fabric) timeline(r *Result, start time.Time, events []Event) {
	add := func(at time.Time, event string, server int, detail string) {
		if !at.Before(start) {
			events = append(events, Event{at.Sub(start).Nanoseconds(), event, f.Server[server].Name, detail})
		}
	}
	t := f.packets()
	for src, w := range f.followers() {
		var weights, adopted, effective, left moment
		for dst := range f.others(src) {
			to := "toward " + f.Server[dst].Name
			moved := false
			for g := range f.GPUs {
				h := w.heard(f.Loopback(dst, g).Addr())
				moved = moved || !h.adopted.Before(start)
				weights.later(h.changed, Ratio(h.weights)+" "+to)
				adopted.later(h.adopted, to)
				effective.later(h.effective, to)
			}
			if moved {
				if last, in := t.senders[src].left(dst); last >= 0 {
					left.later(t.epoch.Add(time.Duration(last)), f.PlaneName(in.plane)+" "+to)
				}
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
			add(t.epoch.Add(time.Duration(sent)), event, src, f.PlaneName(at.plane)+" toward "+f.Server[dst].Name)
		}
		lost(EventFirstLost, o.first, o.firstSent)
		lost(EventLastLost, o.last, o.lastSent)
	}
	sortEvents(events)
	r.Timeline = events
}

// sortEvents puts events in the order of time, and those of one time in the order in which they follow each other.
func sortEvents(events []Event) {
	slices.SortStableFunc(events, func(a, b Event) int {
		return cmp.Or(cmp.Compare(a.AtNS, b.AtNS),
			cmp.Compare(slices.Index(eventOrder, a.Event), slices.Index(eventOrder, b.Event)), cmp.Compare(a.Node, b.Node))
	})
}
