package superp

import (
	"time"

	"github.com/fared/fared/dataplane/rdma"
)

// run is how many packets go by one path before another's turn comes: what a socket sends in one call.
const run = 16

// path is one of a connection's paths with what the sender knows of it.
type path struct {
	rdma.Path
	share uint64 // what it takes part with: Path.Share, 1 where all have none
	// credit is the bytes that it should have carried more than it has, times the sum of shares.
	credit int64
	sent   uint64 // transmissions by it so far: the last one's number
	acked  uint64 // the highest number of a transmission that is known to have arrived
	gone   bool   // not among the connection's any more; kept until what it carried is acknowledged
}

// living says whether packets go by it.
func (p *path) living() bool { return !p.gone && p.share > 0 }

// paths deals packets to paths by share: weighted deficits in bytes, in runs. The zero value has none.
type paths struct {
	all   []*path
	total uint64
	turn  *path // whose run it is
	left  int   // packets left of it
	bytes int   // what the run has carried
	acks  int   // whose turn it was last to carry an acknowledgement alone
}

// set replaces the paths, and returns whether one that lived before does not now. A path stays itself as long as slot, port and
// tunnel do.
func (s *paths) set(to []rdma.Path) (died bool) {
	var total uint64
	for i := range to {
		total += uint64(to[i].Share)
	}
	share := func(p *rdma.Path) uint64 {
		switch {
		case total > 0:
			return uint64(p.Share)
		case p.Lent:
			return 1
		}
		return 0
	}
	lent := false
	for i := range to {
		lent = lent || to[i].Lent
	}
	next := make([]*path, 0, len(to))
	for i := range to {
		p := &path{}
		for _, old := range s.all {
			if old.Slot == to[i].Slot && old.Port == to[i].Port && old.Tunnel == to[i].Tunnel {
				p = old
			}
		}
		lived := p.living() && p.sent > 0
		p.Path, p.share, p.credit = to[i], share(&to[i]), 0
		if total == 0 && !lent {
			p.share = 1 // every one is parked and none is lent: go on trying
		}
		died = died || lived && !p.living()
		next = append(next, p)
	}
	for _, old := range s.all {
		keep := false
		for _, p := range next {
			keep = keep || p == old
		}
		if !keep {
			died = died || old.living() && old.sent > 0
			old.gone = true
		}
	}
	s.all, s.total, s.turn, s.left, s.bytes, s.acks = next, 0, nil, 0, 0, 0
	for _, p := range next {
		s.total += p.share
	}
	return died
}

// settle books the run that ends.
func (s *paths) settle() {
	if s.turn != nil && s.bytes > 0 {
		for _, p := range s.all {
			p.credit += int64(s.bytes) * int64(p.share)
		}
		s.turn.credit -= int64(s.bytes) * int64(s.total)
	}
	s.turn, s.bytes, s.left = nil, 0, 0
}

// next is the path of a packet with n bytes of payload that should not go by avoid (nil: any will do).
func (s *paths) next(n int, avoid *path) *path {
	if s.turn == nil || s.left == 0 || s.turn == avoid {
		s.settle()
		for _, p := range s.all {
			if !p.living() || p == avoid {
				continue
			}
			if s.turn == nil || p.credit > s.turn.credit {
				s.turn = p
			}
		}
		if s.turn == nil {
			s.turn = avoid // the only one there is
		}
		s.left = run
	}
	s.left--
	s.bytes += n
	return s.turn
}

// rotate is the next path for a packet without payload: acknowledgements go by all in turn, so that a dead one does not hold
// them up for long.
func (s *paths) rotate() *path {
	for range s.all {
		s.acks = (s.acks + 1) % len(s.all)
		if s.all[s.acks].living() {
			break
		}
	}
	return s.all[s.acks]
}

// count notes a transmission.
func (p *path) count(n int, again bool) {
	p.sent++
	if again {
		p.Again.Add(uint64(n))
	} else {
		p.Sent.Add(uint64(n))
	}
}

// rtt is a connection's round trip estimate (RFC 6298, Section 2), over all its paths. The zero value knows nothing.
type rtt struct{ smooth, variance, least time.Duration }

func (r *rtt) sample(d time.Duration) {
	if r.smooth == 0 {
		r.smooth, r.variance, r.least = d, d/2, d
		return
	}
	r.variance += ((r.smooth - d).Abs() - r.variance) / 4
	r.smooth += (d - r.smooth) / 8
	r.least = min(r.least, d)
}

// late is how long an acknowledgement takes at most, unless something was lost.
func (r *rtt) late(delay time.Duration) time.Duration {
	if r.smooth == 0 {
		return time.Hour
	}
	return r.smooth + 4*r.variance + delay + time.Millisecond
}
