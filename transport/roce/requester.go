package roce

import (
	"fmt"
	"time"

	"github.com/fared/fared/transport/internal/congestion"
	"github.com/fared/fared/transport/internal/rtt"
	"github.com/fared/fared/transport/rdma"
)

const (
	// ackEvery is the interval of acknowledgement requests in a long message, in packets, or a quarter of the window if
	// that is less. The last packet of a message, and the last for which the window has room, always request one.
	ackEvery = 32
	// maxTimeout is the maximum retransmission timeout after doubling (rdma.Timing.Retransmit).
	maxTimeout = time.Second
	// minTimeout is the minimum of the retransmission timeout above the average round trip, longer than a busy host
	// delays a process that is ready to run.
	minTimeout = 5 * time.Millisecond
	// partsInFlight is the number of parts of READs that fill a queue pair's share of the window: a request for fewer
	// packets, unless they are the rest of a READ, waits for more room. Otherwise each response would cause a request
	// for a single packet, and the limit of outstanding requests would be reached.
	partsInFlight = 4
)

// none is an invalid sequence number, lower than all valid ones.
const none seq = -1 << 62

// request is an operation with its sequence numbers: first to end-1, one per packet, or for a READ one per response
// (Section 9.7.3).
type request struct {
	op         *rdma.Op
	first, end seq
	bytes      int // length of the message
}

// requester sends operations.
//
// Invariants: una <= next <= high <= posted; head <= cursor <= tail; una is in ring[head] unless the ring is empty;
// next is in ring[cursor], or equals posted if cursor equals tail. parts[:asked] are the ends of parts in (una, next].
type requester struct {
	*common
	ring               []request // its length is a power of two
	head, cursor, tail uint64    // the oldest, the next to send, the next to post: index modulo len(ring)
	first              seq       // of the queue pair
	una                seq       // the oldest unacknowledged; inside a READ: the next response
	next               seq       // the next to send
	high               seq       // the highest sent, plus 1
	posted             seq       // the highest of a posted operation, plus 1

	bytes   int // total of the operations in the ring
	refused int // size of the operation that Post refused, plus 1; 0: none since the latest call of Room

	limit int // limit of outstanding READ requests and atomics
	// parts are the ends of the READ requests and atomics in (una, high], in ascending order. A READ is requested in
	// parts of the size for which the window has room. A retransmitted request ends where the original did, because the
	// responder may know the original (Section 9.4.4).
	parts []seq
	asked int // the number of parts that are sent, but not answered
	reads int // the number of READs in [head, cursor)

	flight *congestion.Flight
	back   seq // una at the latest goBack on a NAK; no further goBack until una advances
	// probing: after a loss the path gets the oldest packet alone until it is acknowledged. The later packets of the
	// flight, which the peer drops, may still be in queues, and another flight would meet them there.
	probing bool
	// suspect is the time at which the timer was started whose expiry has reported a loss that is not proven; 0: none.
	suspect time.Duration

	trip  rtt.Estimate
	timed seq           // the packet whose round trip is being measured; none: none
	sent  time.Duration // its time of transmission

	since        time.Duration // start of the retransmission timer
	timeout      time.Duration // duration of the retransmission timer
	lastProgress time.Duration // time at which the peer last made progress, or received a request after idleness; shifted by the delay of late timers
	pause        time.Duration // time until which RNR suspends sending; 0: not suspended
	quiet        time.Duration // time of the latest response, or of the first request after idleness
	stalled      bool          // value in the latest call of Host.Stalled
}

func newRequester(c *common, first seq) requester {
	cfg := &c.core.cfg
	return requester{common: c, ring: make([]request, cfg.Depth), first: first, una: first, next: first, high: first, posted: first,
		back: none, timed: none, flight: c.core.peers.Join(c.remote), timeout: cfg.Timing.Retransmit}
}

// firstTimeout returns the retransmission timeout before it doubles: from the measured round trips (RFC 6298), else
// Timing.Retransmit.
func (req *requester) firstTimeout() time.Duration {
	timing := &req.core.cfg.Timing
	if !req.trip.Known() {
		return timing.Retransmit
	}
	return min(max(req.trip.Late(timing.AckDelay), req.trip.Smooth()+minTimeout), maxTimeout)
}

// measure begins to measure the round trip of a packet that requests an answer, unless another measurement is in
// progress. Packets that were transmitted before are not measured, since an answer does not name the transmission
// (Karn's algorithm).
func (req *requester) measure(h *header) {
	if req.timed == none && req.next >= req.high && (h.ackReq || traits[h.opcode]&hasPayload == 0) {
		req.timed, req.sent = req.next, req.core.host.Now()
	}
}

func (req *requester) at(i uint64) *request { return &req.ring[i&uint64(len(req.ring)-1)] }

// isReadAtomic reports whether an operation is answered by a response other than an ACK.
func isReadAtomic(k rdma.OpKind) bool { return k >= rdma.OpRead }

// hasRoom reports whether an operation of n bytes may be posted.
func (req *requester) hasRoom(n int) bool {
	outstanding := req.tail - req.head
	return outstanding == 0 || outstanding < uint64(len(req.ring)) && req.bytes+n <= req.core.cfg.Window
}

// post is queuePair.Post.
func (req *requester) post(op *rdma.Op) bool {
	n, packets := len(op.Local), 1
	switch {
	case n > req.longest(op.Kind):
		panic(fmt.Sprintf("roce: an operation of %d bytes, above the limit of %d", n, req.longest(op.Kind)))
	case op.HasImmediate && op.Kind != rdma.OpSend && (req.headSize > 0 || op.Kind != rdma.OpWrite):
		panic("roce: immediate data outside a SEND, or a WRITE of a plain channel")
	case op.Kind == rdma.OpSend:
		if len(op.Head) != req.headSize {
			panic(fmt.Sprintf("roce: a head of %d bytes instead of %d", len(op.Head), req.headSize))
		}
		n += req.headSize
	case op.Kind > rdma.OpRead && n != 8:
		panic(fmt.Sprintf("roce: an atomic of %d bytes", n))
	}
	if req.state != ready {
		return false
	}
	if !req.hasRoom(n) {
		req.refused = n + 1
		return false
	}
	if n > 0 {
		packets = (n + req.mtu - 1) / req.mtu
	}
	*req.at(req.tail) = request{op: op, first: req.posted, end: req.posted + seq(packets), bytes: n}
	req.tail++
	req.posted += seq(packets)
	req.bytes += n
	req.touch()
	return true
}

// longest returns the maximum length of an operation.
func (req *requester) longest(k rdma.OpKind) int {
	if req.headSize == 0 && !isReadAtomic(k) {
		return rdma.MaxPlain
	}
	return req.core.cfg.MaxOp
}

// room calls Host.Room once there is space for the refused operation.
func (req *requester) room() {
	if req.refused != 0 && req.state == ready && req.hasRoom(req.refused-1) {
		req.refused = 0
		req.core.host.Room(req.pair)
	}
}

// inFlight returns the number of packets that wait for an acknowledgement.
func (req *requester) inFlight() int { return int(req.next - req.una) }

// countFlight sets the number of packets in flight. Those on a path that may deliver nothing take no room from other
// queue pairs; those of a flight with a proven loss do until the oldest is acknowledged, since they are still in
// queues.
func (req *requester) countFlight() {
	switch {
	case req.suspect != 0:
		req.flight.Set(0)
	case !req.probing:
		req.flight.Set(req.inFlight())
	}
}

// pump sends requests while the window has room.
func (req *requester) pump() {
	req.countFlight()
	if req.pause != 0 {
		return
	}
	window := req.inFlight() + req.flight.Room()
	if req.probing {
		window = 1
	}
	req.fill(window)
	req.countFlight()
}

// fill sends requests until a number of packets is in flight.
func (req *requester) fill(window int) {
	every := min(ackEvery, max(1, req.flight.Size()/4))
	for req.cursor < req.tail {
		r := req.at(req.cursor)
		inFlight := req.inFlight()
		if inFlight == 0 {
			now := req.core.host.Now()
			req.since = now
			if req.una == req.high {
				req.lastProgress, req.quiet = now, now
			}
		}
		switch kind := r.op.Kind; {
		case isReadAtomic(kind):
			if kind != rdma.OpRead && req.reads > 0 || !req.requestAnswers(r, window) {
				return
			}
			if kind == rdma.OpRead {
				req.reads++
			}
		case req.reads > 0: // see "Order" in the package comment
			return
		default:
			for ; req.next < r.end; req.next++ {
				left := window - req.inFlight()
				if left <= 0 {
					req.high = max(req.high, req.next)
					return
				}
				req.sendPacket(r, left == 1, every)
			}
		}
		req.high = max(req.high, req.next)
		req.cursor++
	}
}

// requestAnswers sends the requests of an atomic or of the rest of a READ. It returns false if some of them have to
// wait for room in the window or for answers.
func (req *requester) requestAnswers(r *request, window int) bool {
	for req.next < r.end {
		end := req.nextPart(r, window-req.inFlight())
		if end == none {
			return false
		}
		if req.asked == len(req.parts) {
			req.parts = append(req.parts, end)
			if end < r.end {
				req.core.readParts++
			}
		}
		req.asked++
		req.sendReadAtomic(r, end)
		req.next = end
		req.high = max(req.high, end)
	}
	return true
}

// nextPart returns the end of the next READ request or atomic, or none if it has to wait. room is the number of packets
// for which the window has room. As long as nothing is in flight one request is sent, whatever its answer's length if
// it is a retransmission.
func (req *requester) nextPart(r *request, room int) seq {
	idle := req.inFlight() == 0
	switch {
	case req.asked == req.limit:
		return none
	case req.asked < len(req.parts):
		if end := req.parts[req.asked]; idle || int(end-req.next) <= room {
			return end
		}
		return none
	}
	rest := int(r.end - req.next)
	switch n := min(rest, room); {
	case idle:
		return req.next + seq(max(n, 1))
	case n > 0 && (n == rest || n >= req.flight.Share()/min(partsInFlight, req.limit)):
		return req.next + seq(n)
	}
	return none
}

// sendPacket sends the packet of a SEND or WRITE with sequence number next. It requests an acknowledgement if ask is
// set, and every so many packets of a message.
func (req *requester) sendPacket(r *request, ask bool, every int) {
	i := int(req.next - r.first)
	from, to := i*req.mtu, min((i+1)*req.mtu, r.bytes)
	first, last := i == 0, req.next+1 == r.end
	h := header{psn: req.next.psn(), ackReq: ask || last || (i+1)%every == 0}
	send := r.op.Kind == rdma.OpSend
	switch {
	case first && last && send:
		h.opcode = sendOnly
	case first && send:
		h.opcode = sendFirst
	case last && send:
		h.opcode = sendLast
	case send:
		h.opcode = sendMiddle
	case first && last:
		h.opcode = writeOnly
	case first:
		h.opcode = writeFirst
	case last:
		h.opcode = writeLast
	default:
		h.opcode = writeMiddle
	}
	if last && r.op.HasImmediate && req.headSize == 0 { // a head has it already
		h.opcode++ // the opcodes with immediate data follow those without
		h.immediate = r.op.Immediate
	}
	if !send && first {
		h.address, h.key, h.length = r.op.Remote, r.op.Key, uint32(r.bytes)
	}
	var head []byte
	if send {
		// The head precedes Local and is in the first packet only.
		if first {
			head = r.op.Head
		}
		from, to = max(from-len(r.op.Head), 0), to-len(r.op.Head)
	}
	payload := r.op.Local[from:to]
	req.measure(&h)
	req.count(len(head) + len(payload))
	req.core.send(&req.link, &h, head, payload)
}

// sendReadAtomic sends the request of an atomic, or of a READ's responses from next to end-1.
func (req *requester) sendReadAtomic(r *request, end seq) {
	op := r.op
	h := header{psn: req.next.psn(), address: op.Remote, key: op.Key}
	switch op.Kind {
	case rdma.OpRead:
		from, to := int(req.next-r.first)*req.mtu, min(int(end-r.first)*req.mtu, r.bytes)
		h.opcode = readRequest
		h.address += uint64(from)
		h.length = uint32(to - from)
	case rdma.OpCompareSwap:
		h.opcode, h.compare, h.swap = compareSwap, op.Compare, op.Swap
	default:
		h.opcode, h.swap = fetchAdd, op.Swap
	}
	req.measure(&h)
	req.count(0)
	req.core.send(&req.link, &h, nil, nil)
}

// count counts a request packet with n bytes of payload.
func (req *requester) count(n int) {
	if req.next < req.high {
		req.core.retransmitted++
		req.path.Again.Add(uint64(n))
	} else {
		req.path.Sent.Add(uint64(n))
	}
}

// goBack rewinds to una: everything from there on is sent again.
func (req *requester) goBack() {
	req.next, req.cursor = req.una, req.head
	req.asked, req.reads = 0, 0
	req.timed = none
	req.touch()
}

// lost handles a loss that the peer has reported: it rewinds once for each una, and shrinks the window once per flight.
func (req *requester) lost() {
	if req.back == req.una {
		return
	}
	req.back, req.suspect, req.probing = req.una, 0, true
	now := req.core.host.Now()
	req.dropped(now-req.trip.Smooth(), now)
	req.goBack()
}

// dropped reduces the window for a dropped packet that was sent at a time.
func (req *requester) dropped(sent, now time.Duration) {
	if req.flight.Lost(sent, now) {
		req.core.windowCuts++
	}
}

// verify decides about a suspected loss when packets before to are acknowledged. The suspicion was wrong if they
// include more than the retransmitted one, or if the acknowledgement came too early for it (as in RFC 5682 and RFC
// 3522).
func (req *requester) verify(to seq, now time.Duration) {
	req.probing = false
	if req.suspect == 0 {
		return
	}
	if to <= req.next && now-req.since >= req.trip.Least() {
		req.dropped(req.suspect, now)
	}
	req.suspect = 0
}

// answers notes a response, which proves that the path works in both directions.
func (req *requester) answers() {
	req.quiet = req.core.host.Now()
	if req.stalled {
		req.suspect = 0 // a path that delivered nothing, which is no congestion
	}
	req.setStalled(false)
}

// setStalled reports a change of the path's state to the host.
func (req *requester) setStalled(stalled bool) {
	if req.stalled == stalled {
		return
	}
	if req.stalled = stalled; stalled {
		req.core.stalls++
	}
	req.core.host.Stalled(req.pair, req.path.Slot, stalled)
	req.touch() // its next timer has changed
}

// silent handles Timing.Stall without a response.
func (req *requester) silent(now time.Duration) {
	stall := req.core.cfg.Timing.Stall
	if late := now - (req.quiet + stall); late > stall/4 {
		req.quiet = now - stall*3/4 // the process did not run: responses may be waiting in the socket
		return
	}
	req.setStalled(true)
}

// timedOut retransmits the oldest packet, or gives up.
func (req *requester) timedOut(now time.Duration) {
	timing := &req.core.cfg.Timing
	// For the time by which the timer is late, the process did not run: responses that arrived meanwhile are still
	// unread.
	req.lastProgress += now - (req.since + req.timeout)
	if silent := now - req.lastProgress; silent >= timing.GiveUp {
		req.pair.fail(fmt.Errorf("%w: no acknowledgement in %v%s", rdma.ErrRetryExceeded, silent, req.pair.shrunk()), rdma.ErrRetryExceeded, req.una, nakOperational)
		return
	}
	req.core.timeouts++
	req.timeout = max(req.timeout, min(2*req.timeout, maxTimeout))
	req.back = none // the retransmission itself may be lost: the next NAK counts as a new loss
	if req.suspect == 0 {
		req.suspect = req.since
	}
	req.probing = true
	req.goBack()
}

// rewind restarts transmission for a new path.
func (req *requester) rewind() {
	if req.una < req.high {
		req.back, req.suspect, req.probing = none, 0, false
		req.goBack()
		req.timeout = req.firstTimeout()
	}
}

// due returns the time of the next expire; 0 means never.
func (req *requester) due() time.Duration {
	at := req.pause
	if req.una < req.next {
		at = earlier(at, req.since+req.timeout)
		if !req.stalled {
			at = earlier(at, req.quiet+req.core.cfg.Timing.Stall)
		}
	}
	return at
}

// expire handles the timers that are due.
func (req *requester) expire(now time.Duration) {
	if req.pause != 0 && req.pause <= now {
		req.pause = 0
	}
	if req.una < req.next && !req.stalled && req.quiet+req.core.cfg.Timing.Stall <= now {
		req.silent(now)
	}
	if req.una < req.next && req.since+req.timeout <= now {
		req.timedOut(now)
	}
}
