package tcpqp

import (
	"errors"
	"fmt"
	"slices"
	"unsafe"

	"github.com/fared/fared/transport/rdma"
)

var errRequest = errors.New("tcpqp: a request that breaks the protocol")

// record is the answer to an executed request.
type record struct {
	op      opcode // opAck, opReadAnswer, opAtomicAnswer or opError
	status  status
	length  uint32
	key     uint32
	address uint64
	was     uint64
	copied  []byte // READ: the bytes that it returned, once a later request has overwritten them
}

// responder is the half of a channel that executes requests.
type responder struct {
	c        *channel
	conn     *conn  // connection to which the peer's channel is attached
	epoch    uint32 // of its latest OPEN; 0: none
	expected uint32 // next request to execute
	cur      uint32 // next request to answer
	high     uint32 // first request that was never answered
	done     uint32 // the peer has the answers to all requests before it; expected-done <= window
	records  [window]record
	reads    [maxReads]uint32 // READs from done on, in order
	nReads   int

	needAccept, needHold, needResume bool
	held                             bool // a SEND waits for a receive
	skipping                         bool // until request expected arrives again

	// State of the incoming request.
	failed   status // answer with this status, without executing the request
	ignore   bool
	admitted bool // Host.Admit has returned body for request expected
	body     []byte
	bodyHead [rdma.MaxHead]byte
	bodyN    int
}

func (r *responder) wake() {
	if r.conn != nil {
		r.conn.ready(&r.c.in)
	}
}

// open handles the peer's OPEN on a connection.
func (r *responder) open(k *conn, h *header) error {
	if r.epoch != 0 && int32(h.epoch-r.epoch) <= 0 {
		return nil // overtaken by an OPEN on another connection
	}
	if h.done-r.done > r.expected-r.done {
		return fmt.Errorf("%w: responses up to %d, not in [%d, %d]", errRequest, h.done, r.done, r.expected)
	}
	if r.conn != nil {
		r.conn.settle() // its reader may be writing to this request's destination
		r.leave()
		if k.dead != nil {
			return k.dead
		}
	}
	r.conn, r.epoch, r.ignore = k, h.epoch, true
	k.in = append(k.in, r.c)
	r.confirm(h.done)
	r.cur = h.done
	r.needAccept, r.needHold, r.needResume = true, false, false
	r.skipping = false
	r.wake()
	return nil
}

// leave detaches from the connection.
func (r *responder) leave() {
	k := r.conn
	k.in = slices.DeleteFunc(k.in, func(c *channel) bool { return c == r.c })
	k.detach(&r.c.in)
	r.lost()
}

// lost handles the end of the connection.
func (r *responder) lost() { r.conn, r.ignore, r.c.in.queued = nil, true, false }

// confirm discards answers that the peer has.
func (r *responder) confirm(done uint32) {
	n := 0
	for _, m := range r.reads[:r.nReads] {
		if int32(m-done) < 0 {
			r.records[m%window].copied = nil
		} else {
			r.reads[n] = m
			n++
		}
	}
	r.nReads, r.done = n, done
}

// begin handles a request's header.
func (r *responder) begin(h *header) error {
	r.ignore, r.failed = true, statusNone
	if h.msn != r.expected {
		if r.skipping {
			return nil
		}
		return fmt.Errorf("%w: msn %d instead of %d", errRequest, h.msn, r.expected)
	}
	if r.held {
		return nil // sent before the peer received HOLD
	}
	if h.done-r.done > r.cur-r.done || r.expected-h.done >= window {
		return fmt.Errorf("%w: msn %d with responses up to %d", errRequest, h.msn, h.done)
	}
	r.skipping = false
	r.confirm(h.done)
	host := r.c.e.host
	r.ignore = false
	switch h.op {
	case opWrite:
		b, err := host.Memory(r.c, h.key, h.address, int(h.length), rdma.RemoteWrite)
		if err != nil {
			r.failed = statusOf(err)
			return nil
		}
		r.preserve(b)
	case opSend, opSendImmediate:
		return r.admit(h)
	case opRead:
		if r.nReads == maxReads {
			return fmt.Errorf("%w: more than %d READs outstanding", errRequest, maxReads)
		}
		if _, err := host.Memory(r.c, h.key, h.address, int(h.length), rdma.RemoteRead); err != nil {
			r.failed = statusOf(err)
		}
	case opCompareSwap, opFetchAdd:
		if b, err := host.Memory(r.c, h.key, h.address, 8, rdma.RemoteAtomic); err == nil {
			r.preserve(b) // Host.Atomic will return the error
		}
	}
	return nil
}

// admit requests the destination of a SEND, once for each accepted SEND.
func (r *responder) admit(h *header) error {
	if r.admitted {
		if int(h.length) != len(r.body) {
			return fmt.Errorf("%w: a retransmitted SEND differs from the original", errRequest)
		}
		return nil
	}
	head := h.head[:h.headN]
	body, verdict := r.c.e.host.Admit(r.c, head, int(h.length))
	switch {
	case r.c.ended:
		r.ignore = true
	case verdict == rdma.NotReady:
		r.ignore, r.held, r.skipping = true, true, true
		r.needHold, r.needResume = true, false
		r.c.e.stats.held++
		r.wake()
	case verdict == rdma.Refused || len(body) != int(h.length):
		r.failed = statusInvalid
	default:
		r.admitted, r.body = true, body
		r.bodyN = copy(r.bodyHead[:], head)
		r.preserve(body)
	}
	return nil
}

// resume lets the peer repeat the held SEND.
func (r *responder) resume() {
	if r.held {
		r.held, r.needHold, r.needResume = false, false, true
		r.wake()
	}
}

// place returns the destination of the last left bytes of request h's data. It checks the region each time, since it
// may be deregistered.
func (r *responder) place(h *header, left int) []byte {
	switch {
	case r.ignore || r.failed != statusNone:
		return nil
	case h.op == opSend || h.op == opSendImmediate:
		return r.body[len(r.body)-left:]
	}
	b, err := r.c.e.host.Memory(r.c, h.key, h.address+uint64(int(h.length)-left), left, rdma.RemoteWrite)
	if err != nil {
		r.failed = statusOf(err)
	}
	return b
}

// end executes request h, which is complete.
func (r *responder) end(h *header) {
	if r.ignore {
		return
	}
	r.ignore = true // the following calls to the host may close the channel
	host := r.c.e.host
	a := record{op: opAck}
	switch {
	case r.failed != statusNone:
	case h.op == opRead:
		a.op, a.key, a.address, a.length = opReadAnswer, h.key, h.address, h.length
		r.reads[r.nReads] = r.expected
		r.nReads++
	case h.op == opCompareSwap || h.op == opFetchAdd:
		kind := rdma.OpFetchAdd
		if h.op == opCompareSwap {
			kind = rdma.OpCompareSwap
		}
		was, err := host.Atomic(r.c, kind, h.key, h.address, h.compare, h.swap)
		if err != nil {
			r.failed = statusOf(err)
			break
		}
		a.op, a.was = opAtomicAnswer, was
	}
	if r.failed != statusNone {
		a = record{op: opError, status: r.failed}
	}
	r.records[r.expected%window] = a
	r.expected++
	r.c.e.stats.executed++
	r.wake()
	if (h.op == opSend || h.op == opSendImmediate) && r.admitted {
		r.admitted, r.body = false, nil
		head := r.bodyHead
		host.Deliver(r.c, head[:r.bodyN])
	}
}

// preserve copies the results of unanswered READs before a request overwrites memory b.
func (r *responder) preserve(b []byte) {
	if r.nReads == 0 || len(b) == 0 {
		return
	}
	for _, m := range r.reads[:r.nReads] {
		a := &r.records[m%window]
		if a.copied != nil || a.length == 0 {
			continue
		}
		saw, err := r.c.e.host.Memory(r.c, a.key, a.address, int(a.length), rdma.RemoteRead)
		if err != nil || !overlap(saw, b) {
			continue
		}
		if r.conn != nil {
			r.conn.settle() // the writer may be sending it
		}
		a.copied = append([]byte(nil), saw...)
		r.c.e.stats.copied++
	}
}

func overlap(a, b []byte) bool {
	x, y := uintptr(unsafe.Pointer(unsafe.SliceData(a))), uintptr(unsafe.Pointer(unsafe.SliceData(b)))
	return x < y+uintptr(len(b)) && y < x+uintptr(len(a))
}

// emit fills f with the next frame. It returns false if there is none.
func (r *responder) emit(f *frame) bool {
	h := header{channel: r.c.remote.id}
	switch {
	case r.needAccept:
		r.needAccept, r.needResume = false, false // ACCEPT also contains the request from which to continue
		h.op, h.msn, h.epoch, h.features = opAccept, r.expected, r.epoch, r.c.e.features()
		if r.held {
			h.status = statusHeld
			r.skipping = true
		}
	case r.needHold:
		r.needHold = false
		h.op, h.msn = opHold, r.expected
	case r.needResume:
		r.needResume = false
		h.op, h.msn = opResume, r.expected
	case r.cur == r.expected:
		return false
	default:
		for r.cur != r.expected && r.records[r.cur%window].op == opAck {
			r.cur++
		}
		if r.cur == r.expected {
			h.op, h.msn = opAck, r.cur
			break
		}
		r.answer(&h)
		r.cur++
	}
	if int32(r.cur-r.high) > 0 {
		r.high = r.cur
	}
	f.set(&h)
	return true
}

// answer fills h with the answer to request cur, which needs an explicit one.
func (r *responder) answer(h *header) {
	a := &r.records[r.cur%window]
	h.op, h.msn = a.op, r.cur
	switch a.op {
	case opReadAnswer:
		if a.copied == nil {
			if _, err := r.c.e.host.Memory(r.c, a.key, a.address, int(a.length), rdma.RemoteRead); err != nil {
				h.op, h.status = opError, statusOf(err) // the region has been deregistered since
				return
			}
		}
		h.length = a.length
		if int32(r.cur-r.high) >= 0 {
			r.c.path.Sent.Add(uint64(a.length))
		} else {
			r.c.path.Again.Add(uint64(a.length))
		}
	case opAtomicAnswer:
		h.swap = a.was
	case opError:
		h.status = a.status
	}
}

// data returns the data of a READ's answer; false means that the region was deregistered during the transmission.
func (r *responder) data(f *frame) ([]byte, bool) {
	if f.msn-r.done >= r.cur-r.done {
		return nil, false // confirmed before the frame was completely sent
	}
	a := &r.records[f.msn%window]
	if a.copied != nil {
		return a.copied, true
	}
	b, err := r.c.e.host.Memory(r.c, a.key, a.address, int(a.length), rdma.RemoteRead)
	return b, err == nil
}
