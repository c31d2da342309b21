package roce

import (
	"encoding/binary"
	"fmt"

	"github.com/fared/fared/transport/rdma"
)

// response handles an ACK, a NAK, a READ response or an atomic response (Section 9.7.6).
func (req *requester) response(h *header, payload []byte) {
	c := req.core
	s := req.una.near(h.psn)
	switch {
	case s < req.una-1 || s == req.una-1 && h.opcode != acknowledge:
		c.duplicates++
		return
	case s >= req.high:
		c.badResponse++
		return
	}
	req.answers()
	switch {
	case h.opcode == acknowledge:
		req.acknowledged(s, h.syndrome)
	case !req.reach(s):
	default:
		req.answer(h, payload)
	}
	req.room()
}

// reach acknowledges the PSNs before s: a response implies that all of them were executed (Section 9.7.6). It returns
// false in two cases, in which the response has no further effect. Either a READ or atomic before s lacks its response,
// which was lost and is requested again (an implied NAK), or a callback has ended the queue pair.
func (req *requester) reach(s seq) bool {
	for req.una < s {
		r := req.at(req.head)
		if isReadAtomic(r.op.Kind) {
			req.lost()
			return false
		}
		req.progress(min(s, r.end))
		if req.una == r.end {
			req.complete(r, nil)
			if req.state != ready {
				return false
			}
		}
	}
	return true
}

// progress advances una.
func (req *requester) progress(to seq) {
	now := req.core.host.Now()
	req.verify(to, now)
	req.flight.Acked(int(to - req.una))
	req.una = to
	for len(req.parts) > 0 && req.parts[0] <= to {
		req.parts = req.parts[:copy(req.parts, req.parts[1:])]
		req.asked = max(req.asked-1, 0)
	}
	req.since, req.lastProgress = now, now
	if req.timed != none && req.timed < to {
		req.trip.Sample(now - req.sent)
		req.flight.Sample(now - req.sent)
		req.timed = none
	}
	req.timeout = req.firstTimeout()
	req.back = none
	req.touch()
	if req.next < req.una {
		// Acknowledged after goBack had rewound past it: no retransmission is needed.
		req.next, req.cursor = req.una, req.head
		req.asked, req.reads = 0, 0
	}
}

// complete completes the oldest operation, whose PSNs are all acknowledged.
func (req *requester) complete(r *request, err error) {
	op := r.op
	if req.cursor == req.head {
		req.cursor++
	} else if op.Kind == rdma.OpRead {
		req.reads--
	}
	req.bytes -= r.bytes
	r.op = nil
	req.head++
	req.core.host.Complete(op, err)
}

// acknowledged handles an ACK or NAK.
func (req *requester) acknowledged(s seq, syndrome uint8) {
	c := req.core
	switch syndrome & syndromeMask {
	case syndromeACK:
		if s < req.una {
			c.duplicates++
			return
		}
		req.reach(s + 1)
		return
	case syndromeRNR, syndromeNAK:
		if s < req.una {
			c.duplicates++
			return
		}
	default: // reserved
		c.badResponse++
		return
	}
	if syndrome&syndromeMask == syndromeRNR {
		c.rnrReceived++
		if !req.reach(s) {
			return
		}
		// RNR proves that the peer is alive; the number of RNR retries is not limited.
		now := c.host.Now()
		req.lastProgress = now
		req.timeout = req.firstTimeout()
		req.pause = now + max(rnrWait(syndrome), c.cfg.Timing.NotReady)
		req.goBack()
		return
	}
	c.naksReceived++
	var err error
	switch syndrome {
	case nakSequence:
		if req.reach(s) {
			req.lost()
		}
		return
	case nakInvalid:
		err = rdma.ErrRemoteInvalid
	case nakAccess:
		err = rdma.ErrRemoteAccess
	case nakOperational:
		err = rdma.ErrRemoteOperation
	default: // invalid RD request and reserved codes
		c.badResponse++
		return
	}
	// The peer executes no further requests, so a READ before s with lost responses is flushed.
	req.reach(s)
	if req.state == ready {
		req.pair.fail(fmt.Errorf("refused by the peer: %w", err), err, s, nakOperational)
	}
}

// answer handles a READ response or atomic response for una.
func (req *requester) answer(h *header, payload []byte) {
	r := req.at(req.head)
	switch {
	case h.opcode.isRead() && r.op.Kind == rdma.OpRead:
		i := int(req.una - r.first)
		from, to := i*req.mtu, min((i+1)*req.mtu, r.bytes)
		// Which response is the first depends on the start of the request that it answers; which is the last does not:
		// all requests for a part end with it.
		if last := req.una+1 == req.parts[0]; last != (traits[h.opcode]&isLast != 0) || len(payload) != to-from {
			break
		}
		copy(r.op.Local[from:to], payload)
		req.finish(r, req.una+1)
		return
	case h.opcode == atomicAck && r.op.Kind > rdma.OpRead:
		binary.NativeEndian.PutUint64(r.op.Local, h.original)
		req.finish(r, r.end)
		return
	}
	req.core.badResponse++
}

// finish advances una inside or to the end of a READ or atomic.
func (req *requester) finish(r *request, to seq) {
	req.progress(to)
	if to == r.end {
		req.complete(r, nil)
	}
}

// flushOps completes the operation with the PSN at with err, unless err is nil, and all others with ErrFlushed.
func (req *requester) flushOps(err error, at seq) {
	for req.head < req.tail {
		r := req.at(req.head)
		op, result := r.op, error(rdma.ErrFlushed)
		if err != nil && r.first <= at && at < r.end {
			result = err
		}
		r.op = nil
		req.head++
		req.core.host.Complete(op, result)
	}
	req.cursor, req.bytes = req.tail, 0
}
