package speaker

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"

	"github.com/fared/fared/fare"
)

// wanted is the newest set a session is to advertise.
type wanted struct {
	knock chan struct{} // one slot

	mu     sync.Mutex // guards what follows
	routes []Advertisement
	serial uint64        // of routes
	done   uint64        // the newest that GoBGP has been told
	told   chan struct{} // closed when done grows; nil: nobody waits
}

func (w *wanted) set(routes []Advertisement) {
	if routes == nil {
		return
	}
	w.mu.Lock()
	w.routes = routes
	w.serial++
	w.mu.Unlock()
	select {
	case w.knock <- struct{}{}:
	default:
	}
}

func (w *wanted) get() ([]Advertisement, uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.routes, w.serial
}

func (w *wanted) newer(serial uint64) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.serial != serial
}

// carriedOut notes that GoBGP was told a set.
func (w *wanted) carriedOut(serial uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.done = serial
	if w.told != nil {
		close(w.told)
		w.told = nil
	}
}

// wait returns when GoBGP has been told everything that is wanted, or ctx ends.
func (w *wanted) wait(ctx context.Context) error {
	for {
		w.mu.Lock()
		if w.done == w.serial {
			w.mu.Unlock()
			return nil
		}
		if w.told == nil {
			w.told = make(chan struct{})
		}
		told := w.told
		w.mu.Unlock()
		select {
		case <-told:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// advertise keeps GoBGP's own routes equal to what is wanted. They stay there
// from incarnation to incarnation, and a new one is sent them all, then
// End-of-RIB.
func (s *session) advertise(ctx context.Context) {
	originated := make(map[netip.Prefix]Advertisement)
	conv := converter{carrier: s.speaker.conf.Carrier}
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.wanted.knock:
		}
		routes, serial := s.wanted.get()
		for _, step := range difference(originated, routes) {
			if ctx.Err() != nil {
				return
			}
			if s.wanted.newer(serial) {
				break // there is a knock
			}
			if err := s.carryOut(step, &conv); err != nil {
				s.speaker.queue.fault(Fault{Session: s.index, Reason: err.Error()})
				continue
			}
			if step.retract {
				delete(originated, step.route.Prefix)
			} else {
				originated[step.route.Prefix] = step.route
			}
		}
		s.wanted.carriedOut(serial)
		s.mu.Lock()
		s.advertised = len(originated)
		s.mu.Unlock()
	}
}

// step is one change of what is originated.
type step struct {
	route   Advertisement
	retract bool
}

// difference lists the steps from what is to what is wanted, in order of
// prefix, those that add or replace first. Of several wanted routes for one
// prefix, the last counts.
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
	return slices.Equal(a.Communities, b.Communities) && slices.Equal(a.ASPath, b.ASPath)
}

func (s *session) carryOut(step step, conv *converter) error {
	if step.retract {
		p, err := destination(step.route.Prefix)
		if err == nil {
			p.IsWithdraw = true
			err = s.server.retract(p)
		}
		if err != nil {
			return fmt.Errorf("withdraw %v: %w", step.route.Prefix, err)
		}
		return nil
	}
	p, err := conv.path(&step.route)
	if err == nil {
		err = s.server.originate(p)
	}
	if err != nil {
		return fmt.Errorf("advertise %v: %w", step.route.Prefix, err)
	}
	return nil
}

// clone is a copy that shares nothing with what the caller may still change.
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
		}
	}
	return out
}
