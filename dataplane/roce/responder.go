package roce

import (
	"fmt"
	"time"

	"github.com/fared/fared/dataplane/rdma"
)

// message is what of a message has come.
type message uint8

const (
	noMessage message = iota
	sending
	writing
)

// result is what an atomic answered, kept for a requester that asks again (Section 9.4.5).
type result struct {
	at    seq
	was   uint64
	valid bool
}

// responder executes the peer's operations.
type responder struct {
	expected seq    // the next to be executed
	msn      uint32 // messages executed, modulo 2^24
	answered bool   // anything was: an ACK means something
	// told: the requester knows by a NAK that expected is missing, and is not told again until that has come (Section
	// 9.7.5). Meanwhile what follows is dropped.
	told bool

	ackNow bool          // at the next flush
	ackAt  time.Duration // or then; 0: nothing to acknowledge

	message message
	begun   [rdma.MaxHead]byte // the head of a SEND
	body    []byte             // where it goes
	offset  int                // how much of the message's data is in place
	key     uint32             // of a WRITE
	address uint64
	length  int

	atomics []result // the newest, as many as the peer may have outstanding; next is replaced next
	oldest  int
}

// request takes a request (Section 9.7.4).
func (q *queuePair) request(h *header, payload []byte) {
	switch s := q.expected.near(h.psn); {
	case s > q.expected:
		q.core.outOfSequence++
		if !q.told {
			q.told = true
			q.nak(nakSequence, q.expected)
		}
	case s < q.expected:
		q.core.duplicates++
		q.repeat(s, h, payload)
	default:
		q.told = false
		q.execute(h, payload)
	}
}

// execute executes the request that is expected.
func (q *queuePair) execute(h *header, payload []byte) {
	t := traits[h.opcode]
	// What a message begins with must end it, before another begins (Section 9.7.4).
	want := noMessage
	if t&isFirst == 0 {
		want = writing
		if h.opcode.isSend() {
			want = sending
		}
	}
	// Packets that do not end a message are full, those that do and are not alone have something (Section 9.7.4).
	wrong := q.message != want || len(payload) > q.mtu || t&hasImm != 0 ||
		t&isLast == 0 && len(payload) != q.mtu || t&(isFirst|isLast) == isLast && len(payload) == 0
	switch {
	case wrong: // immediate data travels in the head (package rdma), so nobody would take it
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

// executed moves expected on by n, and sees to an acknowledgement.
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
			q.told = true
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
		// The whole of it is allowed, or nothing is written.
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
	// Asked for packet by packet: the region may go while the message comes.
	to, err := host.Memory(q, q.key, q.address+uint64(q.offset), len(payload), rdma.RemoteWrite)
	if err != nil {
		q.refuse(nakAccess, err)
		return
	}
	q.offset += copy(to, payload)
	q.executed(h, 1, last)
}

// responses is how many packets answer a READ of n bytes.
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

// respond sends a READ's responses. They acknowledge what is before them; and the ICRC is of a copy of the memory, which others
// may write to.
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

// repeat answers a request that has been executed (Section 9.7.4).
func (q *queuePair) repeat(s seq, h *header, payload []byte) {
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
			// A late copy of a request that was answered long ago must not break anything; the requester knows which it is.
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
		// So old that the requester must have its answer: dropped.
	}
}

// acknowledge sends an ACK for everything that was executed.
func (q *queuePair) acknowledge() {
	q.ackNow, q.ackAt = false, 0
	q.core.acksSent++
	h := header{opcode: acknowledge, psn: (q.expected - 1).psn(), syndrome: syndromeACK | noCredits, msn: q.msn}
	q.core.send(&q.link, &h, nil, nil)
}

// nak sends a NAK, which acknowledges what is before s.
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

// refuse answers the expected request with a NAK of an error, after which the queue pair takes no more.
func (q *queuePair) refuse(syndrome uint8, cause error) {
	q.nak(syndrome, q.expected)
	q.fail(cause, nil, 0, syndrome)
}
