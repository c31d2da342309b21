package speaker

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"github.com/fared/fared/fare"
)

// settle is the time between two readings: what the watch is still carrying
// arrives in less.
const settle = time.Second

// reread compares, session by session, what GoBGP holds with what was
// delivered, every so often. GoBGP only logs an UPDATE of a kind it cannot
// read and keeps the value from before, and its watch is its own bookkeeping:
// this finds out should the two ever part.
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

// reread reads twice and repairs what differs in the same way both times.
func (s *session) reread(ctx context.Context, settle time.Duration) error {
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
	timer := time.NewTimer(settle)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
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
		s.speaker.queue.fault(Fault{Session: s.index, Reason: fmt.Sprintf("rereading found %d routes that differ from what was reported", repaired)})
	}
	return nil
}

// compare returns the prefixes that differ, and what GoBGP holds.
func (s *session) compare(ctx context.Context, in *incarnation) ([]netip.Prefix, map[netip.Prefix]*fare.Attributes, error) {
	conv := converter{carrier: s.speaker.conf.Carrier}
	is, err := s.server.received(ctx, in.addr, &conv)
	if in.over.Load() {
		return nil, nil, nil // the neighbour is gone, or another's
	}
	if err != nil {
		return nil, nil, err
	}
	d, _ := s.speaker.queue.difference(s.index, in.gen, is)
	return d, is, nil
}
