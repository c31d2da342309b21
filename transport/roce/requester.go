package roce

import (
	"fmt"
	"time"

	"github.com/fared/fared/transport/internal/rtt"
	"github.com/fared/fared/transport/rdma"
)

const (
	// ackEvery is the interval of acknowledgement requests in a long message, in packets. The last packet of a message always requests one.
	ackEvery = 32
	// maxTimeout is the maximum retransmission timeout after doubling (rdma.Timing.Retransmit).
	maxTimeout = time.Second
	// minTimeout is the minimum retransmission timeout, longer than a busy host delays a process that is ready to run.
	minTimeout = 5 * time.Millisecond
)

// none is an invalid sequence number, lower than all valid ones.
const none seq = -1 << 62

// request is an operation with its sequence numbers: first to end-1, one per packet, or for a READ one per response (Section 9.7.3).
type request struct {
	op         *rdma.Op
	first, end seq
	bytes      int // length of the message
}

// requester sends operations.
//
// Invariants: una <= next <= high <= posted; head <= cursor <= tail; una is in ring[head] unless the ring is empty; next is in
// ring[cursor], or equals posted if cursor equals tail.
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

	limit               int // limit of outstanding READs and atomics
	readsAtomics, reads int // counts in [head, cursor): both kinds, and READs alone

	window     window
	congestion congestion
	back       seq // una at the latest goBack on a NAK; no further goBack until una advances

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
		back: none, timed: none, window: window{lossUntil: none}, timeout: cfg.Timing.Retransmit}
}

// firstTimeout returns the retransmission timeout before it doubles: from the measured round trips (RFC 6298), else Timing.Retransmit.
func (req *requester) firstTimeout() time.Duration {
	timing := &req.core.cfg.Timing
	if !req.trip.Known() {
		return timing.Retransmit
	}
	return min(max(req.trip.Late(timing.AckDelay), minTimeout), maxTimeout)
}

// measure begins to measure the round trip of a packet that requests an answer, unless another measurement is in progress. Packets that
// were transmitted before are not measured, since an answer does not name the transmission (Karn's algorithm).
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
	case op.HasImmediate && (req.headSize > 0 || op.Kind > rdma.OpWrite):
		panic("roce: immediate data outside a SEND or WRITE of a plain channel")
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

// pump sends requests while the window has room.
func (req *requester) pump() {
	if req.pause != 0 {
		return
	}
	for req.cursor < req.tail {
		r := req.at(req.cursor)
		inFlight := int(req.next - req.una)
		if inFlight == 0 {
			now := req.core.host.Now()
			req.since = now
			if req.una == req.high {
				req.lastProgress, req.quiet = now, now
			}
		}
		switch kind := r.op.Kind; {
		case isReadAtomic(kind):
			n := int(r.end - req.next)
			if req.readsAtomics == req.limit || inFlight > 0 && inFlight+n > req.window.size || kind != rdma.OpRead && req.reads > 0 {
				return
			}
			req.sendReadAtomic(r)
			req.readsAtomics++
			if kind == rdma.OpRead {
				req.reads++
			}
			req.next = r.end
		case req.reads > 0: // see "Order" in the package comment
			return
		default:
			for ; req.next < r.end; req.next++ {
				left := req.window.size - int(req.next-req.una)
				if left <= 0 {
					req.high = max(req.high, req.next)
					return
				}
				req.sendPacket(r, left == 1)
			}
		}
		req.high = max(req.high, req.next)
		req.cursor++
	}
}

// sendPacket sends the packet of a SEND or WRITE with sequence number next.
func (req *requester) sendPacket(r *request, ask bool) {
	i := int(req.next - r.first)
	from, to := i*req.mtu, min((i+1)*req.mtu, r.bytes)
	first, last := i == 0, req.next+1 == r.end
	h := header{psn: req.next.psn(), ackReq: ask || last || (i+1)%ackEvery == 0}
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
	if last && r.op.HasImmediate {
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

// sendReadAtomic sends the request of an atomic or of a READ, which starts after the received responses.
func (req *requester) sendReadAtomic(r *request) {
	op := r.op
	h := header{psn: req.next.psn(), address: op.Remote, key: op.Key}
	switch op.Kind {
	case rdma.OpRead:
		done := int(req.next-r.first) * req.mtu
		h.opcode = readRequest
		h.address += uint64(done)
		h.length = uint32(r.bytes - done)
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
	req.readsAtomics, req.reads = 0, 0
	req.timed = none
	req.touch()
}

// lost handles a loss that the peer has reported: it rewinds once for each una, and shrinks the window once per flight.
func (req *requester) lost() {
	if req.back == req.una {
		return
	}
	req.back = req.una
	req.shrinkWindow()
	req.goBack()
}

func (req *requester) shrinkWindow() {
	if req.window.shrink(req.una, req.high) {
		req.core.windowCuts++
	}
}

// answers notes a response, which proves that the path works in both directions.
func (req *requester) answers() {
	req.quiet = req.core.host.Now()
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

// timedOut retransmits everything, or gives up.
func (req *requester) timedOut(now time.Duration) {
	timing := &req.core.cfg.Timing
	// For the time by which the timer is late, the process did not run: responses that arrived meanwhile are still unread.
	req.lastProgress += now - (req.since + req.timeout)
	if silent := now - req.lastProgress; silent >= timing.GiveUp {
		req.pair.fail(fmt.Errorf("%w: no acknowledgement in %v%s", rdma.ErrRetryExceeded, silent, req.pair.shrunk()), rdma.ErrRetryExceeded, req.una, nakOperational)
		return
	}
	req.core.timeouts++
	req.timeout = max(req.timeout, min(2*req.timeout, maxTimeout))
	// The retransmission itself may be lost: the next NAK counts as a new loss.
	req.back, req.window.lossUntil = none, none
	req.shrinkWindow()
	req.goBack()
}

// rewind restarts transmission for a new path.
func (req *requester) rewind() {
	if req.una < req.high {
		req.back = none
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
