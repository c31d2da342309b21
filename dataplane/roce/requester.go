package roce

import (
	"fmt"
	"time"

	"github.com/fared/fared/dataplane/rdma"
)

const (
	// ackEvery is after how many packets of a long message an acknowledgement is asked for. The last packet of a message always
	// asks.
	ackEvery = 32
	// leastWindow is what losses leave of the window, and growth what an acknowledged window adds: packets.
	leastWindow = 16
	growth      = 16
	// maxTimeout is where the retransmission timeout stops to double (rdma.Timing.Retransmit).
	maxTimeout = time.Second
)

// none is no sequence number.
const none seq = -1 << 62

// request is an operation with its place in the sequence: PSNs first to end-1, one for each packet, of a READ for each response
// (Section 9.7.3).
type request struct {
	op         *rdma.Op
	first, end seq
	bytes      int // of the message
}

// requester sends operations.
//
// Invariants: una <= next <= high <= posted; head <= cursor <= tail; una is in ring[head] unless that is empty; next is in ring[cursor],
// or posted when cursor is tail.
type requester struct {
	ring               []request // a power of two long
	head, cursor, tail uint64    // the oldest, the one to send from, the next to be posted: index modulo len(ring)
	first              seq       // of all
	una                seq       // the oldest not acknowledged; inside a READ: the next response
	next               seq       // to be sent
	high               seq       // the highest sent, plus 1
	posted             seq       // the highest that an operation has, plus 1

	bytes   int // of operations in the ring
	refused int // size of the operation that Post refused, plus 1; 0: none since Room was called

	limit               int // of READs and atomics outstanding
	readsAtomics, reads int // of [head, cursor): both, and READs alone

	window, most int // packets that may be in flight
	grown        int // acknowledged since the window grew
	lossUntil    seq // losses below belong to one that has been reacted to
	back         seq // una when it was last gone back to on the peer's word; until that moves, it is not gone back to again

	since   time.Duration // the retransmission timer's start
	timeout time.Duration // its length
	heard   time.Duration // when the peer last acknowledged something new, or was given something to; later by what timers were late
	pause   time.Duration // nothing is sent until then: RNR; 0: no such time
}

func (r *requester) init(cfg *Config, first seq) {
	*r = requester{ring: make([]request, cfg.Depth), first: first, una: first, next: first, high: first, posted: first,
		back: none, lossUntil: none, timeout: cfg.Timing.Retransmit}
}

func (r *requester) at(i uint64) *request { return &r.ring[i&uint64(len(r.ring)-1)] }

// isReadAtomic: answered by something other than an ACK.
func isReadAtomic(k rdma.OpKind) bool { return k >= rdma.OpRead }

// hasRoom says whether an operation of n bytes may be posted.
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
		panic(fmt.Sprintf("roce: an operation of %d bytes, more than %d", n, cfg.MaxOp))
	case op.Kind == rdma.OpSend:
		if len(op.Head) != cfg.HeadSize {
			panic(fmt.Sprintf("roce: a head of %d bytes, want %d", len(op.Head), cfg.HeadSize))
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

// room tells the host when what was refused has room.
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
				q.heard = now
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
		case q.reads > 0: // see the package's comment on order
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

// sendPacket sends the packet of a SEND or WRITE that has the PSN next.
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
		// The head goes before Local; only the first packet has any of it.
		if first {
			head = r.op.Head
		}
		from, to = max(from-len(r.op.Head), 0), to-len(r.op.Head)
	}
	payload := r.op.Local[from:to]
	q.count(len(head) + len(payload))
	q.core.send(&q.link, &h, head, payload)
}

// sendReadAtomic sends the request of a READ, from where its responses have stopped, or of an atomic.
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

// count counts a request's packet with n bytes of payload.
func (q *queuePair) count(n int) {
	if q.next < q.high {
		q.core.retransmitted++
		q.path.Again.Add(uint64(n))
	} else {
		q.path.Sent.Add(uint64(n))
	}
}

// goBack has everything sent again from una on.
func (q *queuePair) goBack() {
	q.next, q.cursor = q.una, q.head
	q.readsAtomics, q.reads = 0, 0
	q.core.activate(q)
}

// lost goes back on the peer's word, once for each una, and makes the window smaller, once for each that was in flight.
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

// timedOut sends everything again, or gives up.
func (q *queuePair) timedOut(now time.Duration) {
	timing := &q.core.cfg.Timing
	// By what the timer is late nobody has listened: answers that came while the process was stopped are yet to be read.
	q.heard += now - (q.since + q.timeout)
	if silent := now - q.heard; silent >= timing.GiveUp {
		q.fail(fmt.Errorf("%w: nothing acknowledged in %v", rdma.ErrRetryExceeded, silent), rdma.ErrRetryExceeded, q.una, nakOperational)
		return
	}
	q.core.timeouts++
	q.timeout = max(q.timeout, min(2*q.timeout, maxTimeout))
	// What was gone back to is lost again: a NAK that comes now is news.
	q.back, q.lossUntil = none, none
	q.shrink()
	q.goBack()
}
