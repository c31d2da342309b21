package roce

import (
	"encoding/binary"
	"fmt"

	"github.com/fared/fared/transport/rdma"
)

// response handles an ACK, a NAK, a READ response or an atomic response (Section 9.7.6).
func (q *queuePair) response(h *header, payload []byte) {
	c := q.core
	s := q.una.near(h.psn)
	switch {
	case s < q.una-1 || s == q.una-1 && h.opcode != acknowledge:
		c.duplicates++
		return
	case s >= q.high:
		c.badResponse++
		return
	}
	q.answers()
	switch {
	case h.opcode == acknowledge:
		q.acknowledged(s, h.syndrome)
	case !q.reach(s):
	default:
		q.answer(h, payload)
	}
	q.room()
}

// reach acknowledges the PSNs before s: a response implies that all of them were executed (Section 9.7.6). It returns false in two cases,
// in which the response has no further effect. Either a READ or atomic before s lacks its response, which was lost and is requested again
// (an implied NAK), or a callback has ended the queue pair.
func (q *queuePair) reach(s seq) bool {
	for q.una < s {
		r := q.at(q.head)
		if isReadAtomic(r.op.Kind) {
			q.lost()
			return false
		}
		q.progress(min(s, r.end))
		if q.una == r.end {
			q.complete(r, nil)
			if q.state != ready {
				return false
			}
		}
	}
	return true
}

// progress advances una.
func (q *queuePair) progress(to seq) {
	q.grown += int(to - q.una)
	q.una = to
	if q.grown >= q.window {
		q.grown = 0
		q.window = min(q.window+growth, q.most)
	}
	now := q.core.host.Now()
	q.since, q.lastProgress = now, now
	q.timeout = q.core.cfg.Timing.Retransmit
	q.back = none
	q.core.activate(q)
	if q.next < q.una {
		// Acknowledged after goBack had rewound past it: no retransmission is needed.
		q.next, q.cursor = q.una, q.head
		q.readsAtomics, q.reads = 0, 0
	}
}

// complete completes the oldest operation, whose PSNs are all acknowledged.
func (q *queuePair) complete(r *request, err error) {
	op := r.op
	if q.cursor == q.head {
		q.cursor++
	} else if isReadAtomic(op.Kind) {
		q.readsAtomics--
		if op.Kind == rdma.OpRead {
			q.reads--
		}
	}
	q.requester.bytes -= r.bytes
	r.op = nil
	q.head++
	q.core.host.Complete(op, err)
}

// acknowledged handles an ACK or NAK.
func (q *queuePair) acknowledged(s seq, syndrome uint8) {
	c := q.core
	switch syndrome & syndromeMask {
	case syndromeACK:
		if s < q.una {
			c.duplicates++
			return
		}
		q.reach(s + 1)
		return
	case syndromeRNR, syndromeNAK:
		if s < q.una {
			c.duplicates++
			return
		}
	default: // reserved
		c.badResponse++
		return
	}
	if syndrome&syndromeMask == syndromeRNR {
		c.rnrReceived++
		if !q.reach(s) {
			return
		}
		// RNR proves that the peer is alive; the number of RNR retries is not limited.
		now := c.host.Now()
		q.lastProgress = now
		q.timeout = c.cfg.Timing.Retransmit
		q.pause = now + max(rnrWait(syndrome), c.cfg.Timing.NotReady)
		q.goBack()
		return
	}
	c.naksReceived++
	var err error
	switch syndrome {
	case nakSequence:
		if q.reach(s) {
			q.lost()
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
	q.reach(s)
	if q.state == ready {
		q.fail(fmt.Errorf("refused by the peer: %w", err), err, s, nakOperational)
	}
}

// answer handles a READ response or atomic response for una.
func (q *queuePair) answer(h *header, payload []byte) {
	r := q.at(q.head)
	switch {
	case h.opcode.isRead() && r.op.Kind == rdma.OpRead:
		i := int(q.una - r.first)
		from, to := i*q.mtu, min((i+1)*q.mtu, r.bytes)
		// Which response is the first depends on the start of the request that it answers; which is the last does not.
		if last := q.una+1 == r.end; last != (traits[h.opcode]&isLast != 0) || len(payload) != to-from {
			break
		}
		copy(r.op.Local[from:to], payload)
		q.finish(r, q.una+1)
		return
	case h.opcode == atomicAck && r.op.Kind > rdma.OpRead:
		binary.NativeEndian.PutUint64(r.op.Local, h.original)
		q.finish(r, r.end)
		return
	}
	q.core.badResponse++
}

// finish advances una inside or to the end of a READ or atomic.
func (q *queuePair) finish(r *request, to seq) {
	q.progress(to)
	if to == r.end {
		q.complete(r, nil)
	}
}

// flushOps completes the operation with the PSN at with err, unless err is nil, and all others with ErrFlushed.
func (q *queuePair) flushOps(err error, at seq) {
	for q.head < q.tail {
		r := q.at(q.head)
		op, result := r.op, error(rdma.ErrFlushed)
		if err != nil && r.first <= at && at < r.end {
			result = err
		}
		r.op = nil
		q.head++
		q.core.host.Complete(op, result)
	}
	q.cursor, q.requester.bytes = q.tail, 0
}
