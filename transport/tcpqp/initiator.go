package tcpqp

import (
	"errors"
	"fmt"
	"time"

	"github.com/fared/fared/transport/rdma"
)

const (
	// window is the maximum number of unanswered requests of a channel, and the number of answers that the responder
	// keeps.
	window = 256
	// maxReads is the maximum number of unanswered READs and atomics among them, and so of READs that the responder may
	// have to copy.
	maxReads = 16
	maxOp    = 1 << 20
)

var (
	errAnswer = errors.New("tcpqp: a response without a matching request")
	errClosed = fmt.Errorf("%w: the peer has closed the channel", rdma.ErrFlushed)
)

// initiator is the half of a channel that sends requests.
type initiator struct {
	c *channel
	// Requests una to nxt-1 are unanswered; those from cur on have not been given to the connection; high is the first
	// that was never sent.
	una, nxt, cur, high uint32
	ops                 [window]*rdma.Op
	reads               int // READs and atomics among una to cur-1

	flow     *flow // nil before Connect and after the end
	conn     *conn // the flow's connection, once OPEN is queued
	needOpen bool
	opened   bool // ACCEPT has arrived
	held     bool // HOLD has arrived
	full     bool // Post has returned false
	epoch    uint32
	progress time.Duration // time of the latest answer, or of the post of the first unanswered request; shifted by the delay of late checks
	looked   time.Duration // time of the latest check whether to give up
	// quiet is the time of the latest transfer on the connection, of the latest answer, or of the post of the first
	// unanswered request.
	quiet   time.Duration
	stalled bool // value in the latest call of Host.Stalled
	slot    int  // slot of that call
}

func explicit(k rdma.OpKind) bool {
	return k == rdma.OpRead || k == rdma.OpCompareSwap || k == rdma.OpFetchAdd
}

func (i *initiator) post(op *rdma.Op) bool {
	if i.nxt-i.una == window {
		i.full = true
		return false
	}
	i.ops[i.nxt%window] = op
	if i.nxt++; i.nxt-i.una == 1 {
		i.patient()
	}
	i.wake()
	return true
}

func (i *initiator) wake() {
	if i.conn != nil {
		i.conn.ready(&i.c.out)
	}
}

// attach queues OPEN on a connection.
func (i *initiator) attach(k *conn) {
	i.conn, i.opened, i.held, i.needOpen = k, false, false, true
	i.epoch++
	i.wake()
}

// lost handles the end of the connection. After a HOLD the timer of GiveUp restarts here.
func (i *initiator) lost() {
	requested := i.opened && i.held
	i.conn, i.opened, i.held, i.needOpen, i.c.out.queued = nil, false, false, false, false
	if requested {
		i.patient()
	}
}

// emit fills f with the next frame. It returns false if there is none.
func (i *initiator) emit(f *frame) bool {
	c := i.c
	if i.needOpen {
		i.needOpen = false
		f.set(&header{op: opOpen, channel: c.remote.id, from: c.local.id, epoch: i.epoch, done: i.una, nonce: c.remote.nonce, features: c.e.features()})
		return true
	}
	if !i.opened || i.held || i.cur == i.nxt {
		return false
	}
	op := i.ops[i.cur%window]
	if explicit(op.Kind) && i.reads == maxReads {
		return false
	}
	h := header{channel: c.remote.id, msn: i.cur, done: i.una, address: op.Remote, key: op.Key}
	switch op.Kind {
	case rdma.OpSend:
		h.op, h.address, h.key, h.length = opSend, 0, 0, uint32(len(op.Local))
		h.headN = uint8(copy(h.head[:], op.Head))
		if op.HasImmediate {
			h.op, h.immediate = opSendImmediate, op.Immediate
		}
	case rdma.OpWrite:
		h.op, h.length = opWrite, uint32(len(op.Local))
	case rdma.OpRead:
		h.op, h.length = opRead, uint32(len(op.Local))
	case rdma.OpCompareSwap:
		h.op, h.swap, h.compare = opCompareSwap, op.Swap, op.Compare
	case rdma.OpFetchAdd:
		h.op, h.swap = opFetchAdd, op.Swap
	}
	if explicit(op.Kind) {
		i.reads++
	}
	f.set(&h)
	if p := c.path; i.cur == i.high {
		i.high++
		p.Sent.Add(uint64(h.data()))
		c.e.stats.requests++
	} else {
		p.Again.Add(uint64(h.data()))
		c.e.stats.again++
	}
	i.cur++
	return true
}

// data returns the data of a frame from emit.
func (i *initiator) data(f *frame) ([]byte, bool) {
	if f.msn-i.una >= i.nxt-i.una {
		return nil, false // answered before the frame was completely sent
	}
	return i.ops[f.msn%window].Local, true
}

// rewind makes msn the next request to send.
func (i *initiator) rewind(msn uint32) error {
	if msn-i.una > i.nxt-i.una {
		return fmt.Errorf("%w: resume from %d, which is not in [%d, %d]", errAnswer, msn, i.una, i.nxt)
	}
	i.cur, i.reads = msn, 0
	for m := i.una; m != msn; m++ {
		if explicit(i.ops[m%window].Kind) {
			i.reads++
		}
	}
	return nil
}

// hold stops or resumes sending. A HOLD also proves that the peer is alive.
func (i *initiator) hold(on bool) {
	i.held = on
	i.patient()
	if !on {
		i.wake()
	}
}

// begin handles an answer's header; its data, if any, goes to the memory that place returns.
func (i *initiator) begin(h *header) error {
	switch h.op {
	case opAccept:
		if h.epoch != i.epoch {
			return nil // answers an earlier OPEN on the same connection
		}
		if err := i.rewind(h.msn); err != nil {
			return err
		}
		i.opened = true
		i.flow.accepted()
		if h.status == statusHeld {
			i.hold(true)
		} else {
			i.held = false // not progress: connections that fail before the first answer must not prevent GiveUp
			i.wake()
		}
		return nil
	case opRefuse:
		i.c.fail(errClosed)
		return nil
	}
	if !i.opened {
		return nil // answers a request sent before OPEN
	}
	if h.op != opHold && h.op != opResume && h.msn-i.una > i.cur-i.una {
		return fmt.Errorf("%w: msn %d, not in [%d, %d]", errAnswer, h.msn, i.una, i.cur)
	}
	switch h.op {
	case opHold:
		i.hold(true)
		return i.rewind(h.msn)
	case opResume:
		i.hold(false)
		return i.rewind(h.msn)
	case opAck:
		return i.acknowledge(h.msn)
	}
	// An explicit answer also acknowledges all earlier requests.
	if err := i.acknowledge(h.msn); err != nil {
		return err
	}
	if !i.opened {
		return nil // a completion callback has moved or closed the channel
	}
	if h.msn == i.cur || i.una != h.msn {
		return fmt.Errorf("%w: msn %d", errAnswer, h.msn)
	}
	op := i.ops[h.msn%window]
	switch {
	case h.op == opReadAnswer && (op.Kind != rdma.OpRead || int(h.length) != len(op.Local)):
		return fmt.Errorf("%w: a READ response of %d bytes", errAnswer, h.length)
	case h.op == opAtomicAnswer && op.Kind != rdma.OpCompareSwap && op.Kind != rdma.OpFetchAdd:
		return fmt.Errorf("%w: the response of an atomic operation", errAnswer)
	}
	return nil
}

// place returns the destination of the last left bytes of answer h's data.
func (i *initiator) place(h *header, left int) []byte {
	if h.op != opReadAnswer || !i.opened || h.msn != i.una {
		return nil
	}
	op := i.ops[h.msn%window]
	return op.Local[len(op.Local)-left:]
}

// end handles the end of answer h.
func (i *initiator) end(h *header) {
	if !i.opened || h.msn != i.una || i.una == i.cur {
		return
	}
	var err error
	switch h.op {
	case opReadAnswer:
	case opAtomicAnswer:
		putHost(i.ops[h.msn%window].Local, h.swap)
	case opError:
		err = h.status.err()
	default:
		return
	}
	i.complete(err)
	i.room()
}

// acknowledge completes all requests before msn, none of which may need an explicit answer.
func (i *initiator) acknowledge(msn uint32) error {
	for i.opened && i.una != msn {
		if explicit(i.ops[i.una%window].Kind) {
			return fmt.Errorf("%w: an acknowledgement for an operation that needs a response", errAnswer)
		}
		i.complete(nil)
	}
	i.room()
	return nil
}

func (i *initiator) complete(err error) {
	op := i.ops[i.una%window]
	i.ops[i.una%window] = nil
	if explicit(op.Kind) && i.una != i.cur {
		i.reads--
		i.wake()
	}
	if i.una == i.cur {
		i.cur++
	}
	i.una++
	i.progress = i.c.e.host.Now()
	i.moves()
	i.c.e.host.Complete(op, err)
}

func (i *initiator) room() {
	if i.full && i.nxt-i.una < window && !i.c.ended {
		i.full = false
		i.c.e.host.Room(i.c)
	}
}

// patient restarts the timers.
func (i *initiator) patient() {
	i.progress = i.c.e.host.Now()
	i.moves()
	if due := i.look(); due != 0 {
		i.c.e.wakeAt(due)
	}
	if due := i.stallAt(); due != 0 {
		i.c.e.wakeAt(due)
	}
}

// moves notes that the path works, or restarts the stall timer for a new path.
func (i *initiator) moves() {
	i.quiet = i.c.e.host.Now()
	i.setStalled(false)
}

// setStalled reports a change of the path's state to the host.
func (i *initiator) setStalled(stalled bool) {
	if i.stalled == stalled || i.c.ended {
		return
	}
	if i.stalled = stalled; stalled {
		i.slot = i.c.path.Slot
		i.c.e.stats.stalls++
	}
	i.c.e.host.Stalled(i.c, i.slot, stalled)
	if due := i.stallAt(); due != 0 {
		i.c.e.wakeAt(due)
	}
}

// stallAt returns the time at which the path counts as stalled if its connection transfers no bytes until then; 0 means
// never. TCP accepts bytes as the peer acknowledges earlier ones, so a slow path still transfers some.
func (i *initiator) stallAt() time.Duration {
	if i.stalled || i.una == i.nxt || i.opened && i.held {
		return 0
	}
	from := i.quiet
	if i.conn != nil {
		from = max(from, i.conn.moved)
	}
	return from + i.c.e.timing.Stall
}

// silent checks whether the path has stalled.
func (i *initiator) silent(now time.Duration) {
	stall := i.c.e.timing.Stall
	switch t := i.stallAt(); {
	case t == 0 || now < t:
	case now-t > stall/4:
		i.quiet = now - stall*3/4 // the process did not run: answers may be waiting in the socket
	default:
		i.setStalled(true)
	}
}

// look returns the time of the next check whether to give up: 0 if no request is unanswered, or if the peer has sent
// HOLD. It is earlier than the end of GiveUp, so that a single late check cannot end the channel.
func (i *initiator) look() time.Duration {
	if i.una == i.nxt || i.opened && i.held {
		return 0
	}
	giveUp := i.c.e.timing.GiveUp
	return min(i.progress+giveUp, max(i.progress, i.looked)+giveUp/4)
}

// tooLong reports whether to give up. For the time by which a check is late, the process did not run: answers that
// arrived meanwhile are still unread.
func (i *initiator) tooLong(now time.Duration) bool {
	due := i.look()
	if due == 0 || now < due {
		return false
	}
	i.progress += now - due
	i.looked = now
	return now >= i.progress+i.c.e.timing.GiveUp
}

// flush completes all operations.
func (i *initiator) flush(err error) {
	for i.una != i.nxt {
		i.complete(err)
	}
}
