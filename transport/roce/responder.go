package roce

import (
	"fmt"
	"time"

	"github.com/fared/fared/transport/rdma"
)

// message is the kind of a partly received message.
type message uint8

const (
	noMessage message = iota
	sending
	writing
)

// result is the result of an atomic, kept for duplicate requests (Section 9.4.5).
type result struct {
	at    seq
	was   uint64
	valid bool
}

// responder executes the peer's operations.
type responder struct {
	expected seq    // the next to be executed
	msn      uint32 // number of executed messages, modulo 2^24
	answered bool   // at least one request was executed, so that an ACK is meaningful
	// nakSent: a NAK has reported expected as missing; no further NAK is sent until it arrives (Section 9.7.5). Meanwhile later requests are
	// dropped.
	nakSent bool

	ackNow bool          // acknowledge at the next flush
	ackAt  time.Duration // time of a delayed acknowledgement; 0: none

	message message
	begun   [rdma.MaxHead]byte // head of a SEND
	body    []byte             // destination of a SEND
	offset  int                // bytes of the message in place
	key     uint32             // of a WRITE
	address uint64
	length  int

	atomics []result // the latest results, up to the peer's limit of outstanding atomics; a circular buffer
	oldest  int
}

// request handles a request (Section 9.7.4).
func (q *queuePair) request(h *header, payload []byte) {
	switch s := q.expected.near(h.psn); {
	case s > q.expected:
		q.core.outOfSequence++
		if !q.nakSent {
			q.nakSent = true
			q.nak(nakSequence, q.expected)
		}
	case s < q.expected:
		q.core.duplicates++
		q.repeat(s, h)
	default:
		q.nakSent = false
		q.execute(h, payload)
	}
}

// execute executes the request with the expected PSN.
func (q *queuePair) execute(h *header, payload []byte) {
	t := traits[h.opcode]
	// The packets of a message must have the same kind, without another message in between (Section 9.7.4).
	want := noMessage
	if t&isFirst == 0 {
		want = writing
		if h.opcode.isSend() {
			want = sending
		}
	}
	// All packets of a message but the last are full, and the last of several is not empty (Section 9.7.4).
	wrong := q.message != want || len(payload) > q.mtu || t&hasImm != 0 ||
		t&isLast == 0 && len(payload) != q.mtu || t&(isFirst|isLast) == isLast && len(payload) == 0
	switch {
	case wrong: // immediate data is invalid: package rdma carries it in the head
		q.refuse(nakInvalid, fmt.Errorf("%w: opcode %d with %d bytes", rdma.ErrRemoteInvalid, h.opcode, len(payload)))
	case h.opcode.isSend():
		q.executeSend(h, t, payload)
	case h.opcode.isWrite():
		q.executeWrite(h, t, payload)
	case h.opcode == readRequest:
		q.executeRead(h)
	default:
		q.executeAtomic(h)
	}
}

// executed advances expected by n, and schedules an acknowledgement.
func (q *queuePair) executed(h *header, n seq, last bool) {
	q.expected += n
	q.answered = true
	if last {
		q.msn = (q.msn + 1) & mask24
		q.message = noMessage
	}
	if h.ackReq {
		q.ackNow = true
	} else if q.ackAt == 0 {
		q.ackAt = q.core.host.Now() + q.core.cfg.Timing.AckDelay
	}
	q.core.activate(q)
}

func (q *queuePair) executeSend(h *header, t has, payload []byte) {
	c := q.core
	size := c.cfg.HeadSize
	last := t&isLast != 0
	if t&isFirst != 0 {
		if len(payload) < size {
			q.refuse(nakInvalid, fmt.Errorf("%w: a SEND of %d bytes, shorter than its head", rdma.ErrRemoteInvalid, len(payload)))
			return
		}
		n := -1
		if last {
			n = len(payload) - size
		}
		copy(q.begun[:], payload[:size])
		body, verdict := c.host.Admit(q, q.begun[:size], n)
		switch {
		case q.state != ready:
			return
		case verdict == rdma.NotReady:
			c.rnrSent++
			q.nakSent = true
			q.nak(syndromeRNR|rnrCode(c.cfg.Timing.NotReady), q.expected)
			return
		case verdict != rdma.Accepted:
			q.refuse(nakInvalid, fmt.Errorf("%w: a SEND was refused", rdma.ErrRemoteInvalid))
			return
		}
		q.message, q.body, q.offset = sending, body, 0
		payload = payload[size:]
	}
	if end := q.offset + len(payload); end > len(q.body) || last && end != len(q.body) {
		q.refuse(nakInvalid, fmt.Errorf("%w: a SEND is not %d bytes long", rdma.ErrRemoteInvalid, len(q.body)))
		return
	}
	q.offset += copy(q.body[q.offset:], payload)
	q.executed(h, 1, last)
	if last {
		q.body = nil
		c.host.Deliver(q, q.begun[:size])
	}
}

func (q *queuePair) executeWrite(h *header, t has, payload []byte) {
	host := q.core.host
	last := t&isLast != 0
	if t&isFirst != 0 {
		q.message, q.key, q.address, q.length, q.offset = writing, h.key, h.address, int(h.length), 0
		// Check the whole range before the first byte is written.
		if uint64(h.length) > 1<<31 {
			q.refuse(nakInvalid, fmt.Errorf("%w: a WRITE of %d bytes", rdma.ErrRemoteInvalid, h.length))
			return
		}
		if _, err := host.Memory(q, q.key, q.address, q.length, rdma.RemoteWrite); err != nil {
			q.refuse(nakAccess, err)
			return
		}
	}
	if end := q.offset + len(payload); end > q.length || last != (end == q.length) {
		q.refuse(nakInvalid, fmt.Errorf("%w: a WRITE is not %d bytes long", rdma.ErrRemoteInvalid, q.length))
		return
	}
	// Checked for each packet: the region may be deregistered while the message arrives.
	to, err := host.Memory(q, q.key, q.address+uint64(q.offset), len(payload), rdma.RemoteWrite)
	if err != nil {
		q.refuse(nakAccess, err)
		return
	}
	q.offset += copy(to, payload)
	q.executed(h, 1, last)
}

// responses returns the number of packets that answer a READ of n bytes.
func (q *queuePair) responses(n uint32) seq {
	return max(1, (seq(n)+seq(q.mtu)-1)/seq(q.mtu))
}

func (q *queuePair) executeRead(h *header) {
	if h.length > maxRead {
		q.refuse(nakInvalid, fmt.Errorf("%w: a READ of %d bytes", rdma.ErrRemoteInvalid, h.length))
		return
	}
	b, err := q.core.host.Memory(q, h.key, h.address, int(h.length), rdma.RemoteRead)
	if err != nil {
		q.refuse(nakAccess, err)
		return
	}
	s := q.expected
	q.executed(h, q.responses(h.length), true)
	q.respond(s, b, false)
}

// respond sends a READ's responses, which also acknowledge all earlier requests. They contain a copy of the memory, which the application
// may change before the flush, so that the ICRC is correct.
func (q *queuePair) respond(s seq, b []byte, again bool) {
	if !again {
		q.ackNow, q.ackAt = false, 0
	}
	for first := true; ; first = false {
		n := min(len(b), q.mtu)
		h := header{opcode: readMiddle, psn: s.psn(), syndrome: syndromeACK | noCredits, msn: q.msn}
		switch last := n == len(b); {
		case first && last:
			h.opcode = readOnly
		case first:
			h.opcode = readFirst
		case last:
			h.opcode = readLast
		}
		if again {
			q.core.readsAgain++
			q.path.Again.Add(uint64(n))
		} else {
			q.path.Sent.Add(uint64(n))
		}
		q.core.sendCopy(&q.link, &h, b[:n])
		b = b[n:]
		s++
		if len(b) == 0 {
			return
		}
	}
}

func (q *queuePair) executeAtomic(h *header) {
	kind := rdma.OpFetchAdd
	if h.opcode == compareSwap {
		kind = rdma.OpCompareSwap
	}
	was, err := q.core.host.Atomic(q, kind, h.key, h.address, h.compare, h.swap)
	if err != nil {
		q.refuse(nakAccess, err)
		return
	}
	r := &q.atomics[q.oldest]
	*r = result{at: q.expected, was: was, valid: true}
	q.oldest = (q.oldest + 1) % len(q.atomics)
	q.executed(h, 1, true)
	q.answerAtomic(r)
}

func (q *queuePair) answerAtomic(r *result) {
	if r.at == q.expected-1 {
		q.ackNow, q.ackAt = false, 0
	}
	h := header{opcode: atomicAck, psn: r.at.psn(), syndrome: syndromeACK | noCredits, msn: q.msn, original: r.was}
	q.core.send(&q.link, &h, nil, nil)
}

// repeat answers a request that has already been executed (Section 9.7.4).
func (q *queuePair) repeat(s seq, h *header) {
	switch {
	case h.opcode.isSend() || h.opcode.isWrite():
		q.ackNow = true
		q.core.activate(q)
	case h.opcode == readRequest:
		if h.length > maxRead || s+q.responses(h.length) > q.expected {
			q.core.malformed++
			return
		}
		b, err := q.core.host.Memory(q, h.key, h.address, int(h.length), rdma.RemoteRead)
		if err != nil {
			// A late duplicate of an old request must not break the connection; the requester ignores the NAK of an old PSN.
			q.nak(nakAccess, s)
			return
		}
		q.respond(s, b, true)
	default:
		for i := range q.atomics {
			if r := &q.atomics[i]; r.valid && r.at == s {
				q.answerAtomic(r)
				return
			}
		}
		// The requester must have received the response to so old a request: dropped.
	}
}

// acknowledge sends an ACK for all executed requests.
func (q *queuePair) acknowledge() {
	q.ackNow, q.ackAt = false, 0
	q.core.acksSent++
	h := header{opcode: acknowledge, psn: (q.expected - 1).psn(), syndrome: syndromeACK | noCredits, msn: q.msn}
	q.core.send(&q.link, &h, nil, nil)
}

// nak sends a NAK, which acknowledges the requests before s.
func (q *queuePair) nak(syndrome uint8, s seq) {
	if s == q.expected {
		q.ackNow, q.ackAt = false, 0
	}
	if syndrome&syndromeMask == syndromeNAK {
		q.core.naksSent++
	}
	h := header{opcode: acknowledge, psn: s.psn(), syndrome: syndrome, msn: q.msn}
	q.core.send(&q.link, &h, nil, nil)
}

// refuse answers the expected request with a NAK and fails the queue pair.
func (q *queuePair) refuse(syndrome uint8, cause error) {
	q.nak(syndrome, q.expected)
	q.fail(cause, nil, 0, syndrome)
}
