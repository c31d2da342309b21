package speaker

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/fared/fared/daemon/internal/guard"
	"github.com/fared/fared/fare"
)

// wanted is the newest set that a session is to advertise.
type wanted struct {
	ready chan struct{} // one slot

	mu     sync.Mutex // guards the fields below
	routes []Advertisement
	mark   uint64        // mark of routes; 0 requests no report
	serial uint64        // serial number of routes
	done   uint64        // serial number of the newest set that GoBGP has received
	silent uint64        // mark of the set of done if that set is empty and GoBGP holds no route, else 0
	grown  chan struct{} // closed when done grows; nil if no goroutine waits
}

func (w *wanted) set(routes []Advertisement, mark uint64) {
	if routes == nil {
		return
	}
	w.mu.Lock()
	w.routes, w.mark = routes, mark
	w.serial++
	w.mu.Unlock()
	w.wake()
}

func (w *wanted) get() (routes []Advertisement, mark, serial uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.routes, w.mark, w.serial
}

func (w *wanted) newer(serial uint64) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.serial != serial
}

// redo renumbers the newest set, so that advertise passes it to a replaced GoBGP.
func (w *wanted) redo() {
	w.mu.Lock()
	w.serial++
	w.mu.Unlock()
	w.wake()
}

// wake notifies the session's advertise goroutine.
func (w *wanted) wake() {
	select {
	case w.ready <- struct{}{}:
	default:
	}
}

// carriedOut records that GoBGP has received a set. silent is the set's mark if GoBGP holds no route after it, else 0.
func (w *wanted) carriedOut(serial, silent uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.done, w.silent = serial, silent
	if w.grown != nil {
		close(w.grown)
		w.grown = nil
	}
}

// silence returns the mark of the newest set if GoBGP has received it and holds no route, else 0.
func (w *wanted) silence() uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.done != w.serial {
		return 0
	}
	return w.silent
}

// wait returns when GoBGP has received the newest set, or ctx ends. silent is the mark of that set if GoBGP holds no
// route, else 0.
func (w *wanted) wait(ctx context.Context) (silent uint64, err error) {
	for {
		w.mu.Lock()
		if w.done == w.serial {
			silent = w.silent
			w.mu.Unlock()
			return silent, nil
		}
		if w.grown == nil {
			w.grown = make(chan struct{})
		}
		grown := w.grown
		w.mu.Unlock()
		select {
		case <-grown:
		case <-ctx.Done():
			return 0, context.Cause(ctx)
		}
	}
}

// advertise keeps GoBGP's own routes equal to the wanted set. They persist
// across incarnations; GoBGP sends all of them to a new incarnation, then
// End-of-RIB.
func (s *session) advertise(ctx context.Context) {
	o := originator{
		session: s, conv: converter{carrier: s.speaker.conf.Carrier}, routes: make(map[netip.Prefix]Advertisement),
		pace: pace{interval: s.speaker.conf.IncreaseInterval, risen: make(map[netip.Prefix]time.Time)},
	}
	timer := time.NewTimer(time.Hour)
	timer.Stop() // the timer runs only while the pace holds a change
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.wanted.ready:
		case <-timer.C:
		}
		routes, mark, serial := s.wanted.get()
		held, complete := o.originate(ctx, routes, serial)
		if held > 0 {
			timer.Reset(held)
		}
		if ctx.Err() != nil {
			return
		}
		silent := uint64(0)
		if complete && len(o.routes) == 0 {
			silent = mark
		}
		s.wanted.carriedOut(serial, silent)
		if complete {
			o.follow(mark)
		}
		if s.wanted.newer(serial) {
			continue // what GoBGP has now may be a part of a set, or nothing after it was replaced
		}
		s.mu.Lock()
		s.advertised = len(o.routes)
		s.mu.Unlock()
	}
}

// originator updates the routes that a session originates in GoBGP. It is used by one goroutine.
type originator struct {
	session *session
	conv    converter
	pace    pace
	server  *bgpServer // the server that holds routes
	routes  map[netip.Prefix]Advertisement
	marks   uint32 // number of marks issued so far
	gen     uint64 // incarnation of the last mark
	mark    uint64 // the owner's mark that it represents
}

// originate applies the steps to a wanted set, until there is a newer set or
// ctx ends. It returns how long to wait before a held step is due, 0 if the
// pace holds none, and whether GoBGP has accepted every step.
func (o *originator) originate(ctx context.Context, routes []Advertisement, serial uint64) (held time.Duration, complete bool) {
	s := o.session
	if now := s.server.Load(); now != o.server {
		o.server = now
		clear(o.routes)
	}
	complete = true
	for _, step := range difference(o.routes, routes) {
		if ctx.Err() != nil || s.wanted.newer(serial) {
			return 0, false // a newer set has already notified advertise
		}
		now, prefix := time.Now(), step.route.Prefix
		before, replaces := o.routes[prefix]
		if replaces && !step.retract {
			if d := o.pace.hold(&before, &step.route, now); d > 0 {
				if held == 0 || d < held {
					held = d
				}
				complete = false
				continue
			}
		}
		s.awaitReader()
		if err := carryOut(o.server, step, &o.conv); err != nil {
			s.speaker.queue.fault(Fault{Session: s.id, Reason: err.Error()})
			complete = false
			continue
		}
		if step.retract {
			o.pace.forget(prefix)
			delete(o.routes, prefix)
			continue
		}
		if replaces {
			o.pace.note(&before, &step.route, now)
		}
		o.routes[prefix] = step.route
	}
	return held, complete
}

// follow sends a mark behind the applied steps to the established incarnation, once for each of the owner's marks:
// GoBGP sends in order, so when the mark reaches the guard, all earlier routes have. Without an established incarnation
// follow does nothing; the next one wakes advertise when it is up.
func (o *originator) follow(mark uint64) {
	gen, family := o.session.carrying()
	if mark == 0 || gen == 0 || o.gen == gen && o.mark == mark {
		return
	}
	o.marks = o.marks%guard.MaxMark + 1
	p := Advertisement{Prefix: guard.Mark(family, o.marks)}
	o.session.expect(o.marks, mark)
	for _, s := range [...]step{{route: p}, {route: p, retract: true}} {
		if err := carryOut(o.server, s, &o.conv); err != nil {
			o.session.speaker.queue.fault(Fault{Session: o.session.id, Reason: err.Error()})
			return
		}
	}
	o.gen, o.mark = gen, mark
}

// step is one change of the originated routes.
type step struct {
	route   Advertisement
	retract bool
}

// difference lists the steps from is to wanted, in order of prefix, with
// additions and replacements first. If wanted contains several routes for a
// prefix, the last one counts.
func difference(is map[netip.Prefix]Advertisement, wanted []Advertisement) []step {
	target := make(map[netip.Prefix]Advertisement, len(wanted))
	for _, r := range wanted {
		r.Prefix = r.Prefix.Masked()
		target[r.Prefix] = r
	}
	var steps []step
	for prefix, r := range target {
		if old, ok := is[prefix]; !ok || !equalAdvertisement(&old, &r) {
			steps = append(steps, step{route: r})
		}
	}
	for prefix, r := range is {
		if _, ok := target[prefix]; !ok {
			steps = append(steps, step{route: r, retract: true})
		}
	}
	slices.SortFunc(steps, func(a, b step) int {
		if a.retract != b.retract {
			if a.retract {
				return 1
			}
			return -1
		}
		return a.route.Prefix.Compare(b.route.Prefix)
	})
	return steps
}

func equalAdvertisement(a, b *Advertisement) bool {
	return slices.Equal(a.Communities, b.Communities) && slices.Equal(a.ASPath, b.ASPath) && a.Signals == b.Signals && a.Extended == b.Extended
}

func carryOut(s *bgpServer, step step, conv *converter) error {
	if step.retract {
		p, err := destination(step.route.Prefix)
		if err == nil {
			p.IsWithdraw = true
			err = s.retract(p)
		}
		if err != nil {
			return fmt.Errorf("withdraw %v: %w", step.route.Prefix, err)
		}
		return nil
	}
	p, err := conv.path(&step.route)
	if err == nil {
		err = s.originate(p)
	}
	if err != nil {
		return fmt.Errorf("advertise %v: %w", step.route.Prefix, err)
	}
	return nil
}

// cloneAdvertisements returns a deep copy of routes, which the caller may change afterwards.
func cloneAdvertisements(routes []Advertisement) []Advertisement {
	if routes == nil {
		return nil
	}
	out := make([]Advertisement, len(routes))
	for i, r := range routes {
		out[i] = Advertisement{
			Prefix:      r.Prefix,
			Communities: append([]fare.Community(nil), r.Communities...),
			ASPath:      append([]uint32(nil), r.ASPath...),
			Signals:     r.Signals,
			Extended:    r.Extended,
		}
	}
	return out
}
