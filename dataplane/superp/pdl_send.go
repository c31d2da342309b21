package superp

import (
	"time"

	"github.com/fared/fared/dataplane/rdma"
)

// sent is a packet of the send window: what it carries, so that it can be built again, and what became of it.
type sent struct {
	content content
	acked   bool
	lost    bool // to be sent again
	expired bool // lost by timeout: another path may do better
	path    *path
	number  uint64        // path's transmission number of the last transmission
	at      time.Duration // of the last transmission
	times   int           // transmissions
}

// acker is told what packets carried that have arrived, once each.
type acker interface{ acked(*content) }

// sender is the sending half of the packet delivery layer: psns, the window, what is acknowledged and what is lost. It neither
// sends nor knows the time: its caller asks for packets and says when they went.
//
// Windows are longer than the 32 psns that sack_bitmap shows. What arrived beyond is then acknowledged late, when the hole before
// it is filled; until then it is neither acknowledged nor called lost, but for a timeout, and then the receiver drops what it has.
type sender struct {
	window  uint32 // ours, packets
	offered uint32 // the peer's last rwin + 1; before its first packet, what Connect says
	una     uint32 // oldest psn not acknowledged
	nxt     uint32 // next new psn
	until   uint32 // psn after the last packet that asks for acknowledgement: the timer runs while una is before it (waiting)
	high    uint32 // psn after the highest one that is acknowledged
	ring    []sent // by psn; a power of two
	lost    int    // packets to be sent again
	rtt     rtt
	reorder uint64
	// progress is when something new was acknowledged, or when the window stopped being empty; timeouts counts since then.
	progress time.Duration
	armed    time.Duration // since when the timer runs
	timeouts int
}

func newSender(p Parameters) sender {
	return sender{window: uint32(p.Window), offered: uint32(p.Window), ring: make([]sent, ceilPow2(p.Window)), reorder: uint64(p.Reorder)}
}

func ceilPow2(n int) int {
	p := 1
	for p < n {
		p *= 2
	}
	return p
}

func (s *sender) at(psn uint32) *sent { return &s.ring[psn&uint32(len(s.ring)-1)] }

// limit is the send window: min(pdl_window_size, rwin + 1).
func (s *sender) limit() uint32 { return max(1, min(s.window, s.offered)) }

// room says whether a new packet may go. The window's last place is kept for one with a new acknowledgement: two ends whose
// windows are full could otherwise not tell each other that they need not be.
func (s *sender) room(newAck bool) bool {
	used, limit := s.nxt-s.una, s.limit()
	return used+1 < limit || used < limit && (newAck || limit == 1)
}

// push takes the next psn for a packet. asks is false for one that only acknowledges.
func (s *sender) push(c content, asks bool, now time.Duration) (uint32, *sent) {
	psn, waiting := s.nxt, s.waiting()
	s.nxt++
	r := s.at(psn)
	*r = sent{content: c}
	if asks {
		s.until = s.nxt
	}
	if !waiting && s.waiting() {
		s.progress, s.armed = now, now
	}
	return psn, r
}

// waiting says whether something asks for an acknowledgement that has not come. A full window does, whatever is in it: nothing else
// could. (In the smallest ones a single acknowledgement would fill it, and two ends would acknowledge each other without end.)
func (s *sender) waiting() bool {
	return int32(s.until-s.una) > 0 || s.limit() >= 4 && s.nxt-s.una >= s.limit()
}

// ask is for when something waits for room. Packets that only acknowledge are not acknowledged for their own sake, so a window that
// is full of them, but for the place kept, may never move: they do ask from now on. It returns whether they did not before: then the
// oldest is to be sent again, for a duplicate is answered at once.
func (s *sender) ask(now time.Duration) bool {
	if s.waiting() || s.una == s.nxt {
		return false
	}
	s.until, s.progress, s.armed = s.nxt, now, now
	return true
}

// went notes a transmission of r.
func (s *sender) went(r *sent, p *path, now time.Duration) {
	if r.lost {
		r.lost, r.expired = false, false
		s.lost--
	}
	r.path, r.number, r.at = p, p.sent, now
	r.times++
}

// ack takes what a header of the peer's acknowledges. false: it acknowledges what was never sent.
func (s *sender) ack(h *PDL, now time.Duration, to acker) bool {
	before, known := s.una, s.high
	first, fresh := h.AckPSN+1, false
	if h.NACK() {
		first = h.AckPSN
	}
	if ahead := int32(first - s.nxt); ahead > 0 || ahead == 0 && h.NACK() {
		return false
	}
	if int32(first-s.una) < 0 {
		return true // older than what is known
	}
	waiting := s.waiting()
	s.offered = uint32(h.RWin) + 1
	if !waiting && s.waiting() {
		s.progress, s.armed = now, now // a smaller window is full: the time before does not count
	}
	if !h.NACK() {
		for s.una != first {
			fresh = s.mark(s.una, now, to) || fresh
			s.una++
		}
	}
	shown := s.una
	for i, bits := uint32(0), h.SACK; bits != 0; i, bits = i+1, bits>>1 {
		if psn := first + i; bits&1 != 0 && int32(psn-s.nxt) < 0 {
			fresh = s.mark(psn, now, to) || fresh
			shown = psn
		}
	}
	s.advance()
	if fresh {
		s.timeouts, s.progress, s.armed = 0, now, now
	}
	if fresh || s.una != before || s.high != known || int32(shown-s.una) > 0 {
		s.detect(shown, now)
	}
	return true
}

// advance moves the window past what is acknowledged.
func (s *sender) advance() {
	for s.una != s.nxt && s.at(s.una).acked {
		s.una++
	}
	if int32(s.high-s.una) < 0 {
		s.high = s.una
	}
}

// mark acknowledges one psn, if it was not.
func (s *sender) mark(psn uint32, now time.Duration, to acker) bool {
	r := s.at(psn)
	if r.acked {
		return false
	}
	s.arrived(r, to)
	if r.path != nil && (r.times == 1 || now-r.at >= s.rtt.least) {
		// Of a packet that went several times the acknowledgement may be the first transmission's (Karn): it is the last one's only
		// if it took as long as a round trip takes at least.
		r.path.acked = max(r.path.acked, r.number)
		if r.times == 1 {
			s.rtt.sample(now - r.at)
		}
	}
	if int32(psn+1-s.high) > 0 {
		s.high = psn + 1
	}
	return true
}

// arrived says that the peer has a packet: the transaction layer may know it before the packet delivery layer does.
func (s *sender) arrived(r *sent, to acker) {
	if r.acked {
		return
	}
	if r.lost {
		r.lost = false
		s.lost--
	}
	r.acked = true
	to.acked(&r.content)
	r.content = content{}
}

// detect finds holes that are losses. A hole alone says nothing where packets take several paths; but a path keeps order, so one
// that was sent before others that arrived by the same path is lost. And one that an acknowledgement shows missing, longer after
// it was sent than acknowledgements take, is lost whatever the path.
func (s *sender) detect(shown uint32, now time.Duration) {
	late := s.rtt.late(time.Millisecond)
	for psn := s.una; int32(psn-s.high) < 0; psn++ {
		r := s.at(psn)
		if r.acked || r.lost || r.path == nil {
			continue
		}
		p := r.path
		later := p.acked > r.number && (p.acked-r.number >= s.reorder || p.acked == p.sent)
		if later || int32(psn-shown) < 0 && now-r.at > late {
			s.lose(r)
		}
	}
}

func (s *sender) lose(r *sent) {
	if !r.acked && !r.lost {
		r.lost = true
		s.lost++
	}
}

// strand loses what is in flight by paths that do not live.
func (s *sender) strand() {
	for psn := s.una; psn != s.nxt; psn++ {
		if r := s.at(psn); r.path != nil && !r.path.living() {
			s.lose(r)
		}
	}
}

// deadline is when the retransmission timer fires; 0: never.
func (s *sender) deadline(t *rdma.Timing) time.Duration {
	if !s.waiting() {
		return 0
	}
	return s.armed + min(t.Retransmit<<min(s.timeouts, 20), max(time.Second, t.Retransmit))
}

// expire is what happens at deadline: the oldest packet that is not acknowledged and some after it count as lost.
func (s *sender) expire(proactive int, now time.Duration) {
	s.timeouts++
	s.armed = now
	n := 0
	for psn := s.una; psn != s.nxt && n <= proactive; psn++ {
		if r := s.at(psn); !r.acked {
			s.lose(r)
			r.expired = true
			n++
		}
	}
}
