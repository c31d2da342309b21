package speaker

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"github.com/fared/fared/fare"
)

// settle waits one second between two readings: events that the watch still
// carries arrive sooner. It returns the error of a ctx that ends first.
func settle(ctx context.Context) error {
	timer := time.NewTimer(time.Second)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}

// reread periodically compares, session by session, GoBGP's routes with the
// delivered ones. GoBGP only logs an UPDATE of a kind that it cannot decode and
// keeps the previous value, and its table and its watch can diverge; reread
// detects both.
func (s *Speaker) reread(ctx context.Context) {
	ticker := time.NewTicker(s.conf.Reread)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		for _, session := range s.sessions {
			if err := session.reread(ctx, settle); err != nil && ctx.Err() == nil {
				s.queue.fault(Fault{Session: session.index, Reason: err.Error()})
			}
		}
	}
}

// reread reads twice, with settle in between, and repairs the routes that differ both times.
func (s *session) reread(ctx context.Context, settle func(context.Context) error) error {
	s.mu.Lock()
	in := s.current
	established := s.state == Established
	s.mu.Unlock()
	if !established || in == nil {
		return nil
	}
	first, _, err := s.compare(ctx, in)
	if err != nil || len(first) == 0 {
		return err
	}
	if err := settle(ctx); err != nil {
		return err
	}
	second, is, err := s.compare(ctx, in)
	if err != nil {
		return err
	}
	both := make(map[netip.Prefix]bool, len(first))
	for _, p := range first {
		both[p] = true
	}
	repaired := uint64(0)
	for _, p := range second {
		if !both[p] {
			continue
		}
		if attrs, ok := is[p]; ok {
			s.speaker.queue.route(Route{Session: s.index, Generation: in.gen, Prefix: p, Attrs: attrs})
		} else {
			s.speaker.queue.withdraw(Withdraw{Session: s.index, Generation: in.gen, Prefix: p})
		}
		repaired++
	}
	if repaired > 0 {
		s.mu.Lock()
		s.differed += repaired
		s.mu.Unlock()
		s.speaker.queue.fault(Fault{Session: s.index, Reason: fmt.Sprintf("rereading found %d routes that differ from the reported ones", repaired)})
	}
	return nil
}

// compare returns the prefixes that differ, and the routes that GoBGP holds.
func (s *session) compare(ctx context.Context, in *incarnation) ([]netip.Prefix, map[netip.Prefix]*fare.Attributes, error) {
	conv := converter{carrier: s.speaker.conf.Carrier}
	is, err := in.server.received(ctx, in.addr, &conv)
	if in.over.Load() {
		return nil, nil, nil // the neighbor is deleted, or belongs to the next incarnation
	}
	if err != nil {
		return nil, nil, err
	}
	d, _ := s.speaker.queue.difference(s.index, in.gen, is)
	return d, is, nil
}
