package tcpqp

import (
	"errors"
	"fmt"
	"time"

	"github.com/fared/fared/dataplane/rdma"
)

const (
	// window is how many requests of a channel may be unanswered. The responder keeps as many answers.
	window = 256
	// maxReads is how many READs and atomics of them may be under way, so how many READs the responder may have to copy.
	maxReads = 16
	maxOp    = 1 << 20
)

var (
	errAnswer = errors.New("tcpqp: an answer to what was not asked")
	errClosed = fmt.Errorf("%w: the peer has closed the channel", rdma.ErrFlushed)
)

// initiator is the half of a channel that asks.
type initiator struct {
	c *channel
	// Requests una to nxt-1 are unanswered, those from cur on not yet given to the connection; high is the first never sent.
	una, nxt, cur, high uint32
	ops                 [window]*rdma.Op
	reads               int // READs and atomics among una to cur-1

	flow     *flow // nil before Connect and after the end
	conn     *conn // the flow's, once OPEN is queued
	needOpen bool
	opened   bool // ACCEPT has come
	held     bool // HOLD has come
	full     bool // Post has said no
	epoch    uint32
	progress time.Duration // when something was answered last, or the first of what is unanswered was posted; later by what looks were late
	looked   time.Duration // when it was last looked whether to give up
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

// lost says that the connection is gone. Who was asked for patience has time from now on.
func (i *initiator) lost() {
	asked := i.opened && i.held
	i.conn, i.opened, i.held, i.needOpen, i.c.out.queued = nil, false, false, false, false
	if asked {
		i.patient()
	}
}

// emit gives the connection the next frame.
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

// data is what a frame that emit made carries.
func (i *initiator) data(f *frame) ([]byte, bool) {
	if f.msn-i.una >= i.nxt-i.una {
		return nil, false // answered before all of it was sent
	}
	return i.ops[f.msn%window].Local, true
}

// rewind makes msn the next to be sent.
func (i *initiator) rewind(msn uint32) error {
	if msn-i.una > i.nxt-i.una {
		return fmt.Errorf("%w: go on from %d, which is not in [%d, %d]", errAnswer, msn, i.una, i.nxt)
	}
	i.cur, i.reads = msn, 0
	for m := i.una; m != msn; m++ {
		if explicit(i.ops[m%window].Kind) {
			i.reads++
		}
	}
	return nil
}

// hold stops sending, or goes on. Being asked for patience is a sign of life.
func (i *initiator) hold(on bool) {
	i.held = on
	i.patient()
	if !on {
		i.wake()
	}
}

// begin has an answer's header; its data, if any, goes where place says.
func (i *initiator) begin(h *header) error {
	switch h.op {
	case opAccept:
		if h.epoch != i.epoch {
			return nil // to an OPEN before the last on the same connection
		}
		if err := i.rewind(h.msn); err != nil {
			return err
		}
		i.opened = true
		i.flow.accepted()
		if h.status == statusHeld {
			i.hold(true)
		} else {
			i.held = false // not progress: connections that die before anything is answered must come to an end
			i.wake()
		}
		return nil
	case opRefuse:
		i.c.fail(errClosed)
		return nil
	}
	if !i.opened {
		return nil // to what was before OPEN
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
	// An answer of its own implies the acknowledgement of what was before.
	if err := i.acknowledge(h.msn); err != nil {
		return err
	}
	if !i.opened {
		return nil // a completion has moved or closed the channel
	}
	if h.msn == i.cur || i.una != h.msn {
		return fmt.Errorf("%w: msn %d", errAnswer, h.msn)
	}
	op := i.ops[h.msn%window]
	switch {
	case h.op == opReadAnswer && (op.Kind != rdma.OpRead || int(h.length) != len(op.Local)):
		return fmt.Errorf("%w: a READ's answer of %d bytes", errAnswer, h.length)
	case h.op == opAtomicAnswer && op.Kind != rdma.OpCompareSwap && op.Kind != rdma.OpFetchAdd:
		return fmt.Errorf("%w: an atomic's", errAnswer)
	}
	return nil
}

// place is where data of the answer h goes, the last left bytes of it.
func (i *initiator) place(h *header, left int) []byte {
	if h.op != opReadAnswer || !i.opened || h.msn != i.una {
		return nil
	}
	op := i.ops[h.msn%window]
	return op.Local[len(op.Local)-left:]
}

// end has all of the answer h.
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

// acknowledge completes what was asked before msn, none of which may need an answer of its own.
func (i *initiator) acknowledge(msn uint32) error {
	for i.opened && i.una != msn {
		if explicit(i.ops[i.una%window].Kind) {
			return fmt.Errorf("%w: an acknowledgement for what needs more", errAnswer)
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
	i.c.e.host.Complete(op, err)
}

func (i *initiator) room() {
	if i.full && i.nxt-i.una < window && !i.c.ended {
		i.full = false
		i.c.e.host.Room(i.c)
	}
}

// patient begins to wait anew.
func (i *initiator) patient() {
	i.progress = i.c.e.host.Now()
	if due := i.look(); due != 0 {
		i.c.e.wakeAt(due)
	}
}

// look says when to look whether to give up: zero when nothing waits for an answer, or when the peer has asked for patience. It is sooner than
// the end of patience, so that one look that is late does not say that all is over.
func (i *initiator) look() time.Duration {
	if i.una == i.nxt || i.opened && i.held {
		return 0
	}
	giveUp := i.c.e.timing.GiveUp
	return min(i.progress+giveUp, max(i.progress, i.looked)+giveUp/4)
}

// stalled looks whether to give up. By what the look is late nobody has listened: answers that came while the process was stopped are
// yet to be read.
func (i *initiator) stalled(now time.Duration) bool {
	due := i.look()
	if due == 0 || now < due {
		return false
	}
	i.progress += now - due
	i.looked = now
	return now >= i.progress+i.c.e.timing.GiveUp
}

// flush completes everything.
func (i *initiator) flush(err error) {
	for i.una != i.nxt {
		i.complete(err)
	}
}
