package superp

import (
	"time"

	"github.com/fared/fared/transport/internal/rtt"
	"github.com/fared/fared/transport/rdma"
)

// run is the number of consecutive packets on one path: as many as a socket sends in one call.
const run = 16

// maxProbe is the maximum interval between two probe packets on a stalled path.
const maxProbe = time.Second

// path is one of a connection's paths with its send state.
type path struct {
	rdma.Path
	share uint64 // effective share: Path.Share, or 1 if all paths have share 0
	// credit is the number of bytes by which the path is behind its share, times the sum of shares.
	credit int64
	sent   uint64 // number of transmissions, and so the number of the latest one
	acked  uint64 // highest number of a transmission that is known to have arrived
	gone   bool   // removed from the connection; kept until its packets are acknowledged

	ackRequested uint64        // number of the latest transmission that requests an acknowledgement
	quiet        time.Duration // time at which it was last known to work, or began to carry packets that request acknowledgements
	losses       int           // packets detected as lost on it since quiet
	suspect      uint64        // number of the latest transmission that may have been dropped; 0: none
	suspectAt    time.Duration // time of that transmission
	stalled      bool
	reported     bool          // value of stalled in the latest call of Host.Stalled
	probe        time.Duration // stalled: time of the next probe packet
	wait         time.Duration // stalled: interval from that probe to the next
}

// living reports whether the path is in use and has a share.
func (p *path) living() bool { return !p.gone && p.share > 0 }

// paths assigns packets to paths by share: weighted deficits in bytes, in runs. The zero value has no paths.
type paths struct {
	all   []*path
	total uint64
	// around: packets avoid stalled paths, since another path works.
	around bool
	turn   *path // path of the current run; nil: none
	left   int   // packets left in the run
	bytes  int   // bytes carried by the run
	acks   int   // index of the latest path that carried a pure acknowledgement
	// changed are paths that have stalled or recovered since the latest report to the host.
	changed []*path
}

// set replaces the paths. It reports whether a path that has carried packets is no longer live. A path keeps its state
// as long as slot, port and tunnel stay the same.
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
			p.share = 1 // all paths are parked and none is lent: keep trying
		}
		died = died || lived && !p.living()
		if p.stalled && !p.living() {
			s.restored(p, p.quiet) // other paths retransmit its packets; whether it works is tested again once it is live
		}
		next = append(next, p)
	}
	for _, old := range s.all {
		keep := false
		for _, p := range next {
			keep = keep || p == old
		}
		if !keep {
			died = died || old.living() && old.sent > 0
			if old.stalled {
				s.restored(old, old.quiet)
			}
			old.gone = true
		}
	}
	s.all, s.turn, s.left, s.bytes, s.acks = next, nil, 0, 0, 0
	s.share()
	return died
}

// settle accounts the bytes of the current run and ends it.
func (s *paths) settle() {
	if s.turn != nil && s.bytes > 0 {
		for _, p := range s.all {
			if s.usable(p) {
				p.credit += int64(s.bytes) * int64(p.share)
			}
		}
		s.turn.credit -= int64(s.bytes) * int64(s.total)
	}
	s.turn, s.bytes, s.left = nil, 0, 0
}

// stall excludes a path until it works again; the other paths take over its share. The caller retransmits the path's
// packets in flight.
func (s *paths) stall(p *path, now time.Duration, t *rdma.Timing) {
	s.settle()
	p.stalled, p.wait = true, t.Retransmit
	p.probe = now + p.wait
	s.share()
	s.changed = append(s.changed, p)
}

// stallAt returns the time at which a path counts as stalled if none of its packets is acknowledged until then; 0 means
// never. It considers only paths that have lost packets or carry the oldest unacknowledged one, since sack_bitmap does
// not show packets far behind the oldest one.
func (s *paths) stallAt(p *path, tx *sender, t *rdma.Timing) time.Duration {
	if p.stalled || !p.living() || p.ackRequested <= p.acked {
		return 0
	}
	from := p.quiet
	if r := tx.oldest(); p.losses == 0 {
		if r == nil || r.path != p {
			return 0
		}
		from = max(from, r.at)
	}
	return from + t.Stall
}

// probeLostAt returns the time at which the probe packet of a stalled path counts as lost, if the window waits for it;
// 0 means never.
func (s *paths) probeLostAt(tx *sender, t *rdma.Timing) time.Duration {
	r := tx.oldest()
	if r == nil || r.lost || s.usable(r.path) {
		return 0
	}
	return r.at + late(&tx.rtt, t.AckDelay)
}

// detectStalls detects stalled paths and returns their number. Their packets in flight move to other paths, if any
// works.
func (s *paths) detectStalls(tx *sender, timing *rdma.Timing, now time.Duration) (n uint64) {
	if t := s.probeLostAt(tx, timing); t != 0 && now >= t {
		r := tx.oldest()
		tx.lose(r)
		r.expired = true
	}
	for _, p := range s.all {
		t := s.stallAt(p, tx, timing)
		switch {
		case t == 0 || now < t:
		case now-t > timing.Stall/4:
			p.quiet = now - timing.Stall*3/4 // the process did not run: acknowledgements may be waiting in the socket
		default:
			n++
			s.stall(p, now, timing)
			tx.strand(s.usable)
		}
	}
	return n
}

// restored readmits a path after a stall. It gets no extra traffic for the time of the stall.
func (s *paths) restored(p *path, now time.Duration) {
	p.quiet, p.losses = now, 0
	if !p.stalled {
		return
	}
	s.settle()
	p.stalled, p.credit = false, 0
	s.share()
	s.changed = append(s.changed, p)
}

// share sums the shares of the usable paths: live paths that have not stalled, or all live paths if all have stalled.
func (s *paths) share() {
	s.around, s.total = false, 0
	for _, p := range s.all {
		s.around = s.around || p.living() && !p.stalled
	}
	for _, p := range s.all {
		p.credit = 0
		if s.usable(p) {
			s.total += p.share
		}
	}
}

// usable reports whether packets may be assigned to a path.
func (s *paths) usable(p *path) bool { return p.living() && !(p.stalled && s.around) }

// next returns the path of a packet with n bytes of payload. It returns avoid only if there is no other path; nil
// allows all paths.
func (s *paths) next(n int, avoid *path, now time.Duration) *path {
	for _, p := range s.all {
		if p.stalled && s.around && p.living() && now >= p.probe && p != avoid {
			p.wait = min(2*p.wait, maxProbe)
			p.probe = now + p.wait
			return p
		}
	}
	if s.turn == nil || s.left == 0 || s.turn == avoid {
		s.settle()
		for _, p := range s.all {
			if !s.usable(p) || p == avoid {
				continue
			}
			if s.turn == nil || p.credit > s.turn.credit {
				s.turn = p
			}
		}
		if s.turn == nil {
			s.turn = avoid // the only path
		}
		s.left = run
	}
	s.left--
	s.bytes += n
	return s.turn
}

// single returns the path of all packets, in order: the first live one.
func (s *paths) single() *path {
	for _, p := range s.all {
		if p.living() {
			return p
		}
	}
	return s.all[0]
}

// rotate returns the path of a packet without payload. Acknowledgements use all paths in turn, so that a dead one does
// not delay them for long.
func (s *paths) rotate() *path {
	for range s.all {
		s.acks = (s.acks + 1) % len(s.all)
		if s.usable(s.all[s.acks]) {
			break
		}
	}
	return s.all[s.acks]
}

// count counts a transmission.
func (p *path) count(n int, again bool) {
	p.sent++
	if again {
		p.Again.Add(uint64(n))
	} else {
		p.Sent.Add(uint64(n))
	}
}

// late returns the time within which an acknowledgement arrives unless a packet was lost; an hour without an estimate.
func late(r *rtt.Estimate, delay time.Duration) time.Duration {
	if !r.Known() {
		return time.Hour
	}
	return r.Late(delay) + time.Millisecond
}
