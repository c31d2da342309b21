package nupa

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/fared/fared/transport/rdma"
)

var (
	errPeerClosed = errors.New("nupa: the peer has closed the channel")
	errPeerGone   = errors.New("nupa: the peer's endpoint is gone")
	errReplaced   = errors.New("nupa: another endpoint has taken this one's place in the file, which takes it for dead: restart it")
	errSilent     = errors.New("nupa: the peer does not execute operations")
	errDamaged    = errors.New("nupa: the ring contains invalid data")
	errCancelled  = errors.New("nupa: the peer has stopped in the middle of a message")
)

// failure returns the error of a status, nil for success.
func (s status) failure() error {
	switch s {
	case remoteAccess:
		return rdma.ErrRemoteAccess
	case remoteInvalid:
		return rdma.ErrRemoteInvalid
	case remoteOperation:
		return rdma.ErrRemoteOperation
	}
	return nil
}

func statusOf(err error) status {
	switch {
	case errors.Is(err, rdma.ErrRemoteInvalid):
		return remoteInvalid
	case errors.Is(err, rdma.ErrRemoteOperation):
		return remoteOperation
	}
	return remoteAccess
}

// receive executes the operations that the peer has posted.
func (c *channel) receive() {
	for n := 0; !c.broken; n++ {
		if n == budget {
			c.t.self.notify(c.in.index, c.t.m) // continue after the other rings
			return
		}
		if c.holding {
			if !c.in.revoked() {
				return
			}
			c.holding = false
			c.goOn()
		}
		what, skips := c.in.take()
		if skips > 0 {
			c.scheduleNotify()
		}
		switch what {
		case nothing:
			return
		case closed:
			c.fail(rdma.ErrFlushed, errPeerClosed)
			return
		case damage:
			c.t.count.damaged++
			c.fail(rdma.ErrFlushed, errDamaged)
			return
		}
		if !c.execute() {
			return
		}
	}
}

// execute executes the taken operation. It returns false if the channel has to stop for now.
func (c *channel) execute() bool {
	in, host := &c.in, c.t.host
	d := &in.d
	var (
		was uint64
		err error
		b   []byte
	)
	switch d.kind {
	case rdma.OpSend:
		body, verdict := host.Admit(c, in.head(), int(d.length))
		switch {
		case c.closed: // by the host, inside Admit
			in.end(skipped, 0)
			return false
		case verdict == rdma.NotReady:
			c.t.count.notReady++
			c.holding, c.heldUp = true, true
			in.held().Store(in.start)
			c.scheduleNotify() // a parked sender revokes it
			if !in.putBack() {
				in.end(skipped, 0)
			}
			return false
		case verdict == rdma.Refused:
			err = fmt.Errorf("%w: a message of %d bytes is refused", rdma.ErrRemoteInvalid, d.length)
		case len(body) != int(d.length):
			err = fmt.Errorf("%w: a message of %d bytes whose head announces %d", rdma.ErrRemoteInvalid, d.length, len(body))
		default:
			copy(body, in.data())
			if !in.commit() {
				in.end(skipped, 0)
				c.fail(rdma.ErrFlushed, errCancelled)
				return false
			}
			host.Deliver(c, in.head())
		}
	case rdma.OpWrite:
		if b, err = host.Memory(c, d.key, d.remote, int(d.length), rdma.RemoteWrite); err == nil {
			copy(b, in.data())
		}
	case rdma.OpRead:
		if b, err = host.Memory(c, d.key, d.remote, int(d.length), rdma.RemoteRead); err == nil {
			copy(in.data(), b)
			if c.path != nil {
				c.path.Sent.Add(uint64(d.length))
			}
		}
	default:
		was, err = host.Atomic(c, d.kind, d.key, d.remote, d.compare, d.swap)
	}
	c.goOn()
	c.scheduleNotify()
	if err != nil {
		c.t.count.refused++
		in.end(statusOf(err), 0)
		// Like a RoCE queue pair after a remote error (InfiniBand Architecture, Volume 1, Section 9.9.3): later
		// operations must not be executed, since they were posted in the expectation that this one is.
		c.fail(rdma.ErrFlushed, err)
		return false
	}
	in.end(executed, was)
	c.t.count.executed++
	return !c.closed
}

// goOn withdraws the notice to the peer that its operation is held up.
func (c *channel) goOn() {
	if c.heldUp {
		c.heldUp = false
		c.in.held().Store(0)
	}
}

// collect handles the operations that the peer has executed.
func (c *channel) collect() {
	if c.broken || !c.connected {
		return
	}
	// left is read before reap, so that operations that ended before the peer left are reaped.
	left := c.out.left().Load() == c.out.start
	c.reap()
	switch {
	case c.broken:
	case left:
		c.fail(rdma.ErrFlushed, errPeerClosed)
	case c.path == nil && c.outstanding > 0:
		c.park()
	}
}

// reap completes operations, oldest first.
func (c *channel) reap() {
	for {
		e, ended, was, ok, damaged := c.out.reap()
		if damaged {
			c.t.count.damaged++
			c.fail(rdma.ErrFlushed, errDamaged)
			return
		}
		if !ok {
			return
		}
		c.progress = c.t.host.Now()
		if e.op == nil {
			c.offerRoom()
			continue
		}
		c.outstanding--
		if ended == executed {
			c.succeed(&e, was)
			c.offerRoom()
			continue
		}
		err := ended.failure()
		c.t.push(event{kind: complete, ch: c, op: e.op, err: err})
		c.fail(rdma.ErrFlushed, err)
		return
	}
}

// succeed completes an executed operation.
func (c *channel) succeed(e *sentOp, was uint64) {
	switch op := e.op; op.Kind {
	case rdma.OpRead:
		if len(op.Local) > 0 {
			copy(op.Local, c.out.mem[e.offset:])
		}
	case rdma.OpCompareSwap, rdma.OpFetchAdd:
		binary.NativeEndian.PutUint64(op.Local, was)
	default:
		e.sent.Add(uint64(len(op.Local)))
	}
	c.t.push(event{kind: complete, ch: c, op: e.op})
}

// fail fails the channel: operations that have not been executed complete with err, and the host receives why. Close
// releases the ring.
func (c *channel) fail(err, why error) {
	if c.broken {
		return
	}
	c.end(err)
	c.t.push(event{kind: failed, ch: c, err: why})
}

// end completes all operations, those that have not been executed with err, and notifies the peer.
func (c *channel) end(err error) {
	if c.broken {
		return
	}
	c.broken = true // checked by failures inside reap
	if !c.connected {
		return
	}
	c.out.cancel()
	for {
		e, ended, was, ok, _ := c.out.reap()
		switch {
		case !ok:
		case e.op == nil:
			continue
		case ended == executed:
			c.succeed(&e, was)
			continue
		default:
			c.t.push(event{kind: complete, ch: c, op: e.op, err: cmp.Or(ended.failure(), err)})
			continue
		}
		break
	}
	for seq := c.out.oldest; seq < c.out.next; seq++ {
		if e := c.out.entry(seq); e.op != nil {
			c.t.push(event{kind: complete, ch: c, op: e.op, err: err})
			e.op = nil
		}
	}
	c.outstanding = 0
	c.in.leave()
	c.scheduleNotify()
}

// check fails the channel if its peer is gone, or has executed nothing for too long. A peer that is not ready proves
// with its beat that it is alive.
func (c *channel) check(now time.Duration) {
	switch {
	case c.broken:
		return
	case !c.t.member():
		c.fail(rdma.ErrFlushed, errReplaced)
		return
	case !c.connected:
		return
	}
	gone := c.peer.generation().Load() != c.peerGeneration || !c.t.m.alive(c.peer.index)
	c.collect()
	if c.broken {
		return
	}
	if c.holding { // as after an RNR timer: retry even if the host has not called Ready
		c.Ready()
	}
	beat := c.peer.beat().Load()
	if c.out.held().Load() == c.out.start && beat != c.beat {
		c.progress = now
	}
	c.beat = beat
	switch {
	case gone:
		c.t.count.peersLost++
		c.fail(rdma.ErrRetryExceeded, errPeerGone)
	case c.outstanding > 0 && now-c.progress > c.t.cfg.Timing.GiveUp:
		c.t.count.peersLost++
		c.fail(rdma.ErrRetryExceeded, errSilent)
	}
}
