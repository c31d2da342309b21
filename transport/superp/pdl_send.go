package superp

import (
	"time"

	"github.com/fared/fared/transport/internal/congestion"
	"github.com/fared/fared/transport/internal/rtt"
	"github.com/fared/fared/transport/rdma"
)

// reordering is the time for which a path may deliver packets in another order: a host whose threads change processors
// does so, and a retransmission then would be needless, and no sign of congestion (as in RACK, RFC 8985, Section 6.2).
const reordering = 300 * time.Microsecond

// sent is a packet of the send window: its content, from which it can be rebuilt, and its state.
type sent struct {
	content content
	acked   bool
	lost    bool // to be retransmitted
	expired bool // lost by timeout: prefer another path
	asks    bool // requests an acknowledgement
	path    *path
	number  uint64        // number on path of the latest transmission
	at      time.Duration // time of the latest transmission
	times   int           // number of transmissions
	passed  time.Duration // when an acknowledgement first showed that a later packet on path has arrived; 0: never
	flies   bool          // counted in sender.flight: requests and replies, since the peer may acknowledge others late
}

// acker receives the content of each packet that has arrived, once, and the paths that delivered packets.
type acker interface {
	acked(*content)
	works(*path)
}

// sender is the sending half of the packet delivery layer: psns, the window, acknowledgements and losses. It neither
// sends packets nor reads a clock: its caller requests packets and reports the times of their transmission.
//
// A window may be longer than the 32 psns of sack_bitmap. A packet that arrived beyond the bitmap is acknowledged late,
// after the hole before it is filled. Until then only a timeout marks it lost; the receiver drops the resulting
// duplicate.
type sender struct {
	window   uint32 // the local limit, in packets
	offered  uint32 // the peer's latest rwin + 1; before its first packet, the value from Connect
	una      uint32 // oldest unacknowledged psn
	nxt      uint32 // next new psn
	until    uint32 // psn after the last packet that requests an acknowledgement: the timer runs while una is before it (see waiting)
	high     uint32 // psn after the highest acknowledged one
	ring     []sent // by psn; its length is a power of two
	lost     int    // number of packets to be retransmitted
	rtt      rtt.Estimate
	flight   *congestion.Flight
	detectAt time.Duration // time at which to call detect; 0: none
	cuts     *uint64       // counts reductions of the congestion window after losses
	reorder  uint64
	// progress is the time of the latest new acknowledgement, or of the start of waiting; timeouts counts from there.
	progress time.Duration
	armed    time.Duration // start of the running timer
	timeouts int
	news     bool // the latest acknowledgement acknowledged a packet for the first time, or was outdated
	reuse    reuse
}

func newSender(p Parameters, flight *congestion.Flight, cuts *uint64) sender {
	return sender{window: uint32(p.Window), offered: uint32(p.Window), ring: make([]sent, ceilPow2(p.Window)), reorder: uint64(p.Reorder),
		flight: flight, cuts: cuts, reuse: reuse{shift: reuseShift}}
}

func ceilPow2(n int) int {
	p := 1
	for p < n {
		p *= 2
	}
	return p
}

func (s *sender) at(psn uint32) *sent { return &s.ring[psn&uint32(len(s.ring)-1)] }

// oldest returns the oldest unacknowledged packet if it requests an acknowledgement and has been sent, else nil.
func (s *sender) oldest() *sent {
	if s.una == s.nxt {
		return nil
	}
	if r := s.at(s.una); r.asks && r.path != nil {
		return r
	}
	return nil
}

// limit returns the send window: min(pdl_window_size, rwin + 1).
func (s *sender) limit() uint32 { return max(1, min(s.window, s.offered)) }

// room reports whether a new packet may be sent. The last place of the window is reserved for a packet with a new
// acknowledgement: otherwise two ends with full windows could not open each other's window.
func (s *sender) room(newAck bool) bool {
	used, limit := s.nxt-s.una, s.limit()
	return used+1 < limit || used < limit && (newAck || limit == 1)
}

// begin sets the first psn.
func (s *sender) begin(psn uint32) { s.una, s.nxt, s.until, s.high = psn, psn, psn, psn }

// push assigns the next psn to a packet. asks is false for a packet that only acknowledges.
func (s *sender) push(c content, asks bool, now time.Duration) (uint32, *sent) {
	psn, waiting := s.nxt, s.waiting()
	s.reuse.assigned(psn)
	s.nxt++
	r := s.at(psn)
	*r = sent{content: c, asks: asks}
	if asks {
		s.until = s.nxt
	}
	if !waiting && s.waiting() {
		s.progress, s.armed = now, now
	}
	return psn, r
}

// waiting reports whether a requested acknowledgement is missing. A full window counts as such, whatever its packets
// are, since no new packet could request one. (Not with limits below 4, where a single acknowledgement fills the window
// and two ends would acknowledge each other forever.)
func (s *sender) waiting() bool {
	return int32(s.until-s.una) > 0 || s.limit() >= 4 && s.nxt-s.una >= s.limit()
}

// ask requests acknowledgements for pure-ACK packets while a sender waits for room. Such packets normally request none,
// so a window filled with them, except for the reserved place, might never advance. It reports whether the request is
// new; the caller then retransmits the oldest packet, because the peer answers a duplicate at once.
func (s *sender) ask(now time.Duration) bool {
	if s.waiting() || s.una == s.nxt {
		return false
	}
	s.until, s.progress, s.armed = s.nxt, now, now
	return true
}

// went records a transmission of r.
func (s *sender) went(r *sent, p *path, now time.Duration) {
	if r.lost {
		r.lost, r.expired = false, false
		s.lost--
	}
	r.path, r.number, r.at, r.passed = p, p.sent, now, 0
	if k := r.content.kind; !r.flies && (k == request || k == reply) {
		r.flies = true
		s.flight.Add(1)
	}
	if r.asks {
		if p.ackRequested <= p.acked {
			p.quiet, p.losses = now, 0
		}
		p.ackRequested = p.sent
	}
	r.times++
}

// ack handles the acknowledgements of a header from the peer. It returns false if they cover a packet that was never
// sent.
func (s *sender) ack(h *PDL, now time.Duration, to acker) bool {
	before, known := s.una, s.high
	s.news = true
	first, fresh := h.AckPSN+1, false
	if h.NACK() {
		first = h.AckPSN
	}
	if ahead := int32(first - s.nxt); ahead > 0 || ahead == 0 && h.NACK() {
		return false
	}
	if int32(first-s.una) < 0 {
		return true // outdated
	}
	waiting := s.waiting()
	s.offered = uint32(h.RWin) + 1
	if !waiting && s.waiting() {
		s.progress, s.armed = now, now // the peer has shrunk its window, which is full now: measure time from here
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
	s.news = fresh
	if fresh {
		s.timeouts, s.progress, s.armed = 0, now, now
	}
	if fresh || s.una != before || s.high != known || int32(shown-s.una) > 0 {
		s.detect(shown, now)
	}
	return true
}

// advance moves the window past acknowledged packets.
func (s *sender) advance() {
	for s.una != s.nxt && s.at(s.una).acked {
		s.una++
	}
	if int32(s.high-s.una) < 0 {
		s.high = s.una
	}
}

// mark acknowledges a psn. It reports whether the acknowledgement is new.
func (s *sender) mark(psn uint32, now time.Duration, to acker) bool {
	r := s.at(psn)
	if r.acked {
		return false
	}
	if r.path != nil && (r.lost || now-r.at < s.rtt.Least()) {
		r.path.suspect = 0 // the packet was not dropped
	}
	s.arrived(r, to)
	if r.path != nil && (r.times == 1 || now-r.at >= s.rtt.Least()) {
		// The acknowledgement of a packet with several transmissions may be for the first (Karn's algorithm). It counts
		// for the latest only if at least the minimum round trip time has passed since.
		r.path.acked = max(r.path.acked, r.number)
		s.verify(r.path, now)
		to.works(r.path)
		if r.times == 1 {
			s.rtt.Sample(now - r.at)
			s.flight.Sample(now - r.at)
		}
	}
	if int32(psn+1-s.high) > 0 {
		s.high = psn + 1
	}
	return true
}

// arrived marks a packet as received by the peer. The transaction layer may know this before the packet delivery layer
// does.
func (s *sender) arrived(r *sent, to acker) {
	if r.acked {
		return
	}
	if r.flies {
		r.flies = false
		s.flight.Acked(1)
	}
	if r.lost {
		r.lost = false
		s.lost--
	}
	r.acked = true
	to.acked(&r.content)
	r.content = content{}
}

// detect marks holes that are losses. With several paths a hole alone is no proof, but each path keeps order: a packet
// is lost if packets sent later on the same path have arrived, and it has not within the time of reordering. On any
// path, a packet is lost if an acknowledgement shows it missing for longer than acknowledgements take.
func (s *sender) detect(shown uint32, now time.Duration) {
	wait := late(&s.rtt, time.Millisecond)
	s.detectAt = 0
	for psn := s.una; int32(psn-s.high) < 0; psn++ {
		r := s.at(psn)
		if r.acked || r.lost || r.path == nil {
			continue
		}
		p := r.path
		if r.passed == 0 && p.acked > r.number && (p.acked-r.number >= s.reorder || p.acked == p.sent) {
			r.passed = max(now, 1)
		}
		later := r.passed != 0 && now-r.passed >= reordering
		if r.passed != 0 && !later && s.detectAt == 0 {
			s.detectAt = r.passed + reordering
		}
		if later || int32(psn-shown) < 0 && now-r.at > wait {
			s.suspect(r)
			s.lose(r)
			p.losses++
			s.verify(p, now)
		}
	}
}

// suspect notes a packet that was dropped, or is on a path that delivers nothing.
func (s *sender) suspect(r *sent) {
	if p := r.path; p != nil && !r.acked && !r.lost {
		p.suspect, p.suspectAt = r.number, r.at
	}
}

// verify reduces the congestion window for a suspected packet of a path if the path has delivered a later one and was
// not stalled meanwhile.
func (s *sender) verify(p *path, now time.Duration) {
	if p.suspect == 0 || p.acked <= p.suspect {
		return
	}
	if !p.stalled && s.flight.Lost(p.suspectAt, now) {
		*s.cuts++
	}
	p.suspect = 0
}

func (s *sender) lose(r *sent) {
	if r.flies {
		r.flies = false
		s.flight.Add(-1)
	}
	if !r.acked && !r.lost {
		r.lost = true
		s.lost++
	}
}

// strand marks the packets in flight on unusable paths as lost.
func (s *sender) strand(usable func(*path) bool) {
	for psn := s.una; psn != s.nxt; psn++ {
		if r := s.at(psn); r.path != nil && !usable(r.path) {
			s.lose(r)
		}
	}
}

// deadline returns the time at which the retransmission timer expires; 0 means never.
func (s *sender) deadline(t *rdma.Timing) time.Duration {
	if !s.waiting() {
		return 0
	}
	return s.armed + min(t.Retransmit<<min(s.timeouts, 20), max(time.Second, t.Retransmit))
}

// expire handles the expiry of the timer: it marks the oldest unacknowledged packet and up to proactive more as lost.
func (s *sender) expire(proactive int, now time.Duration) {
	s.timeouts++
	s.armed = now
	n := 0
	for psn := s.una; psn != s.nxt && n <= proactive; psn++ {
		if r := s.at(psn); !r.acked {
			s.suspect(r)
			s.lose(r)
			r.expired = true
			n++
		}
	}
}
