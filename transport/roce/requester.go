package roce

import (
	"fmt"
	"time"

	"github.com/fared/fared/transport/rdma"
)

const (
	// ackEvery is the interval of acknowledgement requests in a long message, in packets. The last packet of a message always requests one.
	ackEvery = 32
	// leastWindow is the minimum window after losses, growth the increase for each fully acknowledged window, in packets.
	leastWindow = 16
	growth      = 16
	// maxTimeout is the maximum retransmission timeout after doubling (rdma.Timing.Retransmit).
	maxTimeout = time.Second
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

	window, most int // limit of packets in flight, and its maximum
	grown        int // packets acknowledged since the window grew
	lossUntil    seq // losses below this number belong to an earlier loss that has shrunk the window
	back         seq // una at the latest goBack on a NAK; no further goBack until una advances

	since        time.Duration // start of the retransmission timer
	timeout      time.Duration // duration of the retransmission timer
	lastProgress time.Duration // time at which the peer last made progress, or received a request after idleness; shifted by the delay of late timers
	pause        time.Duration // time until which RNR suspends sending; 0: not suspended
	quiet        time.Duration // time of the latest response, or of the first request after idleness
	stalled      bool          // value in the latest call of Host.Stalled
}

func (r *requester) init(cfg *Config, first seq) {
	*r = requester{ring: make([]request, cfg.Depth), first: first, una: first, next: first, high: first, posted: first,
		back: none, lossUntil: none, timeout: cfg.Timing.Retransmit}
}

func (r *requester) at(i uint64) *request { return &r.ring[i&uint64(len(r.ring)-1)] }

// isReadAtomic reports whether an operation is answered by a response other than an ACK.
func isReadAtomic(k rdma.OpKind) bool { return k >= rdma.OpRead }

// hasRoom reports whether an operation of n bytes may be posted.
func (q *queuePair) hasRoom(n int) bool {
	outstanding := q.tail - q.head
	return outstanding == 0 || outstanding < uint64(len(q.ring)) && q.requester.bytes+n <= q.core.cfg.Window
}

// Post implements rdma.Channel.
func (q *queuePair) Post(op *rdma.Op) bool {
	cfg := &q.core.cfg
	n, packets := len(op.Local), 1
	switch {
	case n > cfg.MaxOp:
		panic(fmt.Sprintf("roce: an operation of %d bytes, above the limit of %d", n, cfg.MaxOp))
	case op.Kind == rdma.OpSend:
		if len(op.Head) != cfg.HeadSize {
			panic(fmt.Sprintf("roce: a head of %d bytes instead of %d", len(op.Head), cfg.HeadSize))
		}
		n += cfg.HeadSize
	case op.Kind > rdma.OpRead && n != 8:
		panic(fmt.Sprintf("roce: an atomic of %d bytes", n))
	}
	if q.state != ready {
		return false
	}
	if !q.hasRoom(n) {
		q.refused = n + 1
		return false
	}
	if n > 0 {
		packets = (n + q.mtu - 1) / q.mtu
	}
	*q.at(q.tail) = request{op: op, first: q.posted, end: q.posted + seq(packets), bytes: n}
	q.tail++
	q.posted += seq(packets)
	q.requester.bytes += n
	q.core.activate(q)
	return true
}

// room calls Host.Room once there is space for the refused operation.
func (q *queuePair) room() {
	if q.refused != 0 && q.state == ready && q.hasRoom(q.refused-1) {
		q.refused = 0
		q.core.host.Room(q)
	}
}

// pump sends requests while the window has room.
func (q *queuePair) pump() {
	if q.pause != 0 {
		return
	}
	for q.cursor < q.tail {
		r := q.at(q.cursor)
		inFlight := int(q.next - q.una)
		if inFlight == 0 {
			now := q.core.host.Now()
			q.since = now
			if q.una == q.high {
				q.lastProgress, q.quiet = now, now
			}
		}
		switch kind := r.op.Kind; {
		case isReadAtomic(kind):
			n := int(r.end - q.next)
			if q.readsAtomics == q.limit || inFlight > 0 && inFlight+n > q.window || kind != rdma.OpRead && q.reads > 0 {
				return
			}
			q.sendReadAtomic(r)
			q.readsAtomics++
			if kind == rdma.OpRead {
				q.reads++
			}
			q.next = r.end
		case q.reads > 0: // see "Order" in the package comment
			return
		default:
			for ; q.next < r.end; q.next++ {
				left := q.window - int(q.next-q.una)
				if left <= 0 {
					q.high = max(q.high, q.next)
					return
				}
				q.sendPacket(r, left == 1)
			}
		}
		q.high = max(q.high, q.next)
		q.cursor++
	}
}

// sendPacket sends the packet of a SEND or WRITE with sequence number next.
func (q *queuePair) sendPacket(r *request, ask bool) {
	i := int(q.next - r.first)
	from, to := i*q.mtu, min((i+1)*q.mtu, r.bytes)
	first, last := i == 0, q.next+1 == r.end
	h := header{psn: q.next.psn(), ackReq: ask || last || (i+1)%ackEvery == 0}
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
	q.count(len(head) + len(payload))
	q.core.send(&q.link, &h, head, payload)
}

// sendReadAtomic sends the request of an atomic or of a READ, which starts after the received responses.
func (q *queuePair) sendReadAtomic(r *request) {
	op := r.op
	h := header{psn: q.next.psn(), address: op.Remote, key: op.Key}
	switch op.Kind {
	case rdma.OpRead:
		done := int(q.next-r.first) * q.mtu
		h.opcode = readRequest
		h.address += uint64(done)
		h.length = uint32(r.bytes - done)
	case rdma.OpCompareSwap:
		h.opcode, h.compare, h.swap = compareSwap, op.Compare, op.Swap
	default:
		h.opcode, h.swap = fetchAdd, op.Swap
	}
	q.count(0)
	q.core.send(&q.link, &h, nil, nil)
}

// count counts a request packet with n bytes of payload.
func (q *queuePair) count(n int) {
	if q.next < q.high {
		q.core.retransmitted++
		q.path.Again.Add(uint64(n))
	} else {
		q.path.Sent.Add(uint64(n))
	}
}

// goBack rewinds to una: everything from there on is sent again.
func (q *queuePair) goBack() {
	q.next, q.cursor = q.una, q.head
	q.readsAtomics, q.reads = 0, 0
	q.core.activate(q)
}

// lost handles a loss that the peer has reported: it rewinds once for each una, and shrinks the window once per flight.
func (q *queuePair) lost() {
	if q.back == q.una {
		return
	}
	q.back = q.una
	q.shrink()
	q.goBack()
}

func (q *queuePair) shrink() {
	if q.una < q.lossUntil {
		return
	}
	q.lossUntil = q.high
	q.core.windowCuts++
	q.window = max(q.window/2, min(leastWindow, q.most))
	q.grown = 0
}

// answers notes a response, which proves that the path works in both directions.
func (q *queuePair) answers() {
	q.quiet = q.core.host.Now()
	q.setStalled(false)
}

// setStalled reports a change of the path's state to the host.
func (q *queuePair) setStalled(stalled bool) {
	if q.requester.stalled == stalled {
		return
	}
	if q.requester.stalled = stalled; stalled {
		q.core.stalls++
	}
	q.core.host.Stalled(q, q.path.Slot, stalled)
	q.core.activate(q) // its next timer has changed
}

// silent handles Timing.Stall without a response.
func (q *queuePair) silent(now time.Duration) {
	stall := q.core.cfg.Timing.Stall
	if late := now - (q.quiet + stall); late > stall/4 {
		q.quiet = now - stall*3/4 // the process did not run: responses may be waiting in the socket
		return
	}
	q.setStalled(true)
}

// timedOut retransmits everything, or gives up.
func (q *queuePair) timedOut(now time.Duration) {
	timing := &q.core.cfg.Timing
	// For the time by which the timer is late, the process did not run: responses that arrived meanwhile are still unread.
	q.lastProgress += now - (q.since + q.timeout)
	if silent := now - q.lastProgress; silent >= timing.GiveUp {
		q.fail(fmt.Errorf("%w: no acknowledgement in %v", rdma.ErrRetryExceeded, silent), rdma.ErrRetryExceeded, q.una, nakOperational)
		return
	}
	q.core.timeouts++
	q.timeout = max(q.timeout, min(2*q.timeout, maxTimeout))
	// The retransmission itself may be lost: the next NAK counts as a new loss.
	q.back, q.lossUntil = none, none
	q.shrink()
	q.goBack()
}
