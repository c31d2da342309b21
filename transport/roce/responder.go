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
	*common
	expected seq    // the next to be executed
	msn      uint32 // number of executed messages, modulo 2^24
	answered bool   // at least one request was executed, so that an ACK is meaningful
	// nakSent: a NAK has reported expected as missing; no further NAK is sent until it arrives (Section 9.7.5).
	// Meanwhile later requests are dropped.
	nakSent bool

	ackNow bool          // acknowledge at the next flush
	ackAt  time.Duration // time of a delayed acknowledgement; 0: none

	message message
	begun   [rdma.MaxHead]byte // head of a SEND
	body    []byte             // destination of a SEND; on a plain channel, the buffer of its receive
	offset  int                // bytes of the message in place
	key     uint32             // of a WRITE
	address uint64
	length  int

	atomics []result // the latest results, up to the peer's limit of outstanding atomics; a circular buffer
	oldest  int
}

// request handles a request (Section 9.7.4).
func (rsp *responder) request(h *header, payload []byte) {
	switch s := rsp.expected.near(h.psn); {
	case s > rsp.expected:
		rsp.core.outOfSequence++
		if !rsp.nakSent {
			rsp.nakSent = true
			rsp.nak(nakSequence, rsp.expected)
		}
	case s < rsp.expected:
		rsp.core.duplicates++
		rsp.repeat(s, h)
	default:
		rsp.nakSent = false
		rsp.execute(h, payload)
	}
}

// execute executes the request with the expected PSN.
func (rsp *responder) execute(h *header, payload []byte) {
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
	wrong := rsp.message != want || len(payload) > rsp.mtu || t&hasImm != 0 && rsp.headSize > 0 ||
		t&isLast == 0 && len(payload) != rsp.mtu || t&(isFirst|isLast) == isLast && len(payload) == 0
	switch {
	case wrong: // with heads, immediate data is invalid: package rdma carries it in the head
		rsp.refuse(nakInvalid, fmt.Errorf("%w: opcode %d with %d bytes", rdma.ErrRemoteInvalid, h.opcode, len(payload)))
	case h.opcode.isSend() && rsp.headSize == 0:
		rsp.executePlainSend(h, t, payload)
	case h.opcode.isSend():
		rsp.executeSend(h, t, payload)
	case h.opcode.isWrite():
		rsp.executeWrite(h, t, payload)
	case h.opcode == readRequest:
		rsp.executeRead(h)
	default:
		rsp.executeAtomic(h)
	}
}

// executed advances expected by n, and schedules an acknowledgement.
func (rsp *responder) executed(h *header, n seq, last bool) {
	rsp.expected += n
	rsp.answered = true
	if last {
		rsp.msn = (rsp.msn + 1) & mask24
		rsp.message = noMessage
	}
	if h.ackReq {
		rsp.ackNow = true
	} else if rsp.ackAt == 0 {
		rsp.ackAt = rsp.core.host.Now() + rsp.core.cfg.Timing.AckDelay
	}
	rsp.touch()
}

// admitted answers the expected request unless the host has accepted its message.
func (rsp *responder) admitted(verdict rdma.Verdict) bool {
	c := rsp.core
	switch {
	case rsp.state != ready:
		return false
	case verdict == rdma.NotReady:
		c.rnrSent++
		rsp.nakSent = true
		rsp.nak(syndromeRNR|rnrCode(c.cfg.Timing.NotReady), rsp.expected)
		return false
	case verdict != rdma.Accepted:
		rsp.refuse(nakInvalid, fmt.Errorf("%w: a message was refused", rdma.ErrRemoteInvalid))
		return false
	}
	return true
}

// executePlainSend executes a packet of a SEND without head, which goes to the oldest receive.
func (rsp *responder) executePlainSend(h *header, t has, payload []byte) {
	if t&isFirst != 0 {
		body, verdict := rsp.core.plain.Receive(rsp.pair)
		if !rsp.admitted(verdict) {
			return
		}
		rsp.message, rsp.body, rsp.offset = sending, body, 0
	}
	if rsp.offset+len(payload) > len(rsp.body) {
		rsp.refuse(nakInvalid, fmt.Errorf("%w: a SEND of more than %d bytes, the length of its receive", rdma.ErrRemoteInvalid, len(rsp.body)))
		return
	}
	rsp.offset += copy(rsp.body[rsp.offset:], payload)
	last := t&isLast != 0
	rsp.executed(h, 1, last)
	if last {
		rsp.body = nil
		rsp.core.plain.Received(rsp.pair, rdma.Arrival{Bytes: rsp.offset, HasImmediate: t&hasImm != 0, Immediate: h.immediate})
	}
}

func (rsp *responder) executeSend(h *header, t has, payload []byte) {
	c := rsp.core
	size := rsp.headSize
	last := t&isLast != 0
	if t&isFirst != 0 {
		if len(payload) < size {
			rsp.refuse(nakInvalid, fmt.Errorf("%w: a SEND of %d bytes, shorter than its head", rdma.ErrRemoteInvalid, len(payload)))
			return
		}
		n := -1
		if last {
			n = len(payload) - size
		}
		copy(rsp.begun[:], payload[:size])
		body, verdict := c.host.Admit(rsp.pair, rsp.begun[:size], n)
		if !rsp.admitted(verdict) {
			return
		}
		rsp.message, rsp.body, rsp.offset = sending, body, 0
		payload = payload[size:]
	}
	if end := rsp.offset + len(payload); end > len(rsp.body) || last && end != len(rsp.body) {
		rsp.refuse(nakInvalid, fmt.Errorf("%w: a SEND is not %d bytes long", rdma.ErrRemoteInvalid, len(rsp.body)))
		return
	}
	rsp.offset += copy(rsp.body[rsp.offset:], payload)
	rsp.executed(h, 1, last)
	if last {
		rsp.body = nil
		c.host.Deliver(rsp.pair, rsp.begun[:size])
	}
}

// memory returns n bytes of local memory. Operations of no bytes access none, so that their R_Key is not checked
// (C9-88).
func (rsp *responder) memory(key uint32, address uint64, n int, need rdma.Access) ([]byte, error) {
	if n == 0 {
		return nil, nil
	}
	return rsp.core.host.Memory(rsp.pair, key, address, n, need)
}

func (rsp *responder) executeWrite(h *header, t has, payload []byte) {
	last := t&isLast != 0
	if t&isFirst != 0 {
		rsp.message, rsp.key, rsp.address, rsp.length, rsp.offset = writing, h.key, h.address, int(h.length), 0
		// Check the whole range before the first byte is written.
		if uint64(h.length) > 1<<31 {
			rsp.refuse(nakInvalid, fmt.Errorf("%w: a WRITE of %d bytes", rdma.ErrRemoteInvalid, h.length))
			return
		}
		if _, err := rsp.memory(rsp.key, rsp.address, rsp.length, rdma.RemoteWrite); err != nil {
			rsp.refuse(nakAccess, err)
			return
		}
	}
	if end := rsp.offset + len(payload); end > rsp.length || last != (end == rsp.length) {
		rsp.refuse(nakInvalid, fmt.Errorf("%w: a WRITE is not %d bytes long", rdma.ErrRemoteInvalid, rsp.length))
		return
	}
	// Checked for each packet: the region may be deregistered while the message arrives.
	to, err := rsp.memory(rsp.key, rsp.address+uint64(rsp.offset), len(payload), rdma.RemoteWrite)
	if err != nil {
		rsp.refuse(nakAccess, err)
		return
	}
	if t&hasImm != 0 {
		if _, verdict := rsp.core.plain.Receive(rsp.pair); !rsp.admitted(verdict) {
			if t&isFirst != 0 {
				rsp.message = noMessage // the whole message follows again
			}
			return
		}
	}
	rsp.offset += copy(to, payload)
	rsp.executed(h, 1, last)
	if t&hasImm != 0 {
		rsp.core.plain.Received(rsp.pair, rdma.Arrival{Bytes: rsp.length, Written: true, HasImmediate: true, Immediate: h.immediate})
	}
}

// responses returns the number of packets that answer a READ of n bytes.
func (rsp *responder) responses(n uint32) seq {
	return max(1, (seq(n)+seq(rsp.mtu)-1)/seq(rsp.mtu))
}

func (rsp *responder) executeRead(h *header) {
	if h.length > maxRead {
		rsp.refuse(nakInvalid, fmt.Errorf("%w: a READ of %d bytes", rdma.ErrRemoteInvalid, h.length))
		return
	}
	b, err := rsp.memory(h.key, h.address, int(h.length), rdma.RemoteRead)
	if err != nil {
		rsp.refuse(nakAccess, err)
		return
	}
	s := rsp.expected
	rsp.executed(h, rsp.responses(h.length), true)
	rsp.respond(s, b, false)
}

// respond sends a READ's responses, which also acknowledge all earlier requests. They contain a copy of the memory,
// which the application may change before the flush, so that the ICRC is correct.
func (rsp *responder) respond(s seq, b []byte, again bool) {
	if !again {
		rsp.ackNow, rsp.ackAt = false, 0
	}
	for first := true; ; first = false {
		n := min(len(b), rsp.mtu)
		h := header{opcode: readMiddle, psn: s.psn(), syndrome: syndromeACK | noCredits, msn: rsp.msn}
		switch last := n == len(b); {
		case first && last:
			h.opcode = readOnly
		case first:
			h.opcode = readFirst
		case last:
			h.opcode = readLast
		}
		if again {
			rsp.core.readsAgain++
			rsp.path.Again.Add(uint64(n))
		} else {
			rsp.path.Sent.Add(uint64(n))
		}
		rsp.core.sendCopy(&rsp.link, &h, b[:n])
		b = b[n:]
		s++
		if len(b) == 0 {
			return
		}
	}
}

func (rsp *responder) executeAtomic(h *header) {
	kind := rdma.OpFetchAdd
	if h.opcode == compareSwap {
		kind = rdma.OpCompareSwap
	}
	was, err := rsp.core.host.Atomic(rsp.pair, kind, h.key, h.address, h.compare, h.swap)
	if err != nil {
		rsp.refuse(nakAccess, err)
		return
	}
	r := &rsp.atomics[rsp.oldest]
	*r = result{at: rsp.expected, was: was, valid: true}
	rsp.oldest = (rsp.oldest + 1) % len(rsp.atomics)
	rsp.executed(h, 1, true)
	rsp.answerAtomic(r)
}

func (rsp *responder) answerAtomic(r *result) {
	if r.at == rsp.expected-1 {
		rsp.ackNow, rsp.ackAt = false, 0
	}
	h := header{opcode: atomicAck, psn: r.at.psn(), syndrome: syndromeACK | noCredits, msn: rsp.msn, original: r.was}
	rsp.core.send(&rsp.link, &h, nil, nil)
}

// repeat answers a request that has already been executed (Section 9.7.4).
func (rsp *responder) repeat(s seq, h *header) {
	switch {
	case h.opcode.isSend() || h.opcode.isWrite():
		rsp.ackNow = true
		rsp.touch()
	case h.opcode == readRequest:
		if h.length > maxRead || s+rsp.responses(h.length) > rsp.expected {
			rsp.core.malformed++
			return
		}
		b, err := rsp.memory(h.key, h.address, int(h.length), rdma.RemoteRead)
		if err != nil {
			// A late duplicate of an old request must not break the connection; the requester ignores the NAK of an old
			// PSN.
			rsp.nak(nakAccess, s)
			return
		}
		rsp.respond(s, b, true)
	default:
		for i := range rsp.atomics {
			if r := &rsp.atomics[i]; r.valid && r.at == s {
				rsp.answerAtomic(r)
				return
			}
		}
		// The requester must have received the response to so old a request: dropped.
	}
}

// owes reports whether executed requests have not been acknowledged.
func (rsp *responder) owes() bool { return rsp.ackNow || rsp.ackAt != 0 }

// acknowledge sends an ACK for all executed requests.
func (rsp *responder) acknowledge() {
	rsp.ackNow, rsp.ackAt = false, 0
	rsp.core.acksSent++
	h := header{opcode: acknowledge, psn: (rsp.expected - 1).psn(), syndrome: syndromeACK | noCredits, msn: rsp.msn}
	rsp.core.send(&rsp.link, &h, nil, nil)
}

// nak sends a NAK, which acknowledges the requests before s.
func (rsp *responder) nak(syndrome uint8, s seq) {
	if s == rsp.expected {
		rsp.ackNow, rsp.ackAt = false, 0
	}
	if syndrome&syndromeMask == syndromeNAK {
		rsp.core.naksSent++
	}
	h := header{opcode: acknowledge, psn: s.psn(), syndrome: syndrome, msn: rsp.msn}
	rsp.core.send(&rsp.link, &h, nil, nil)
}

// refuse answers the expected request with a NAK and fails the queue pair.
func (rsp *responder) refuse(syndrome uint8, cause error) {
	rsp.nak(syndrome, rsp.expected)
	rsp.pair.fail(cause, nil, 0, syndrome)
}
