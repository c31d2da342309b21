package superp

import (
	"time"

	"github.com/fared/fared/dataplane/rdma"
)

// Shutdown ends the connection from this side. Soft: nothing new is taken, what is outstanding both ways finishes, Last NULLs go
// both ways, then Host.Failed is told ErrShutdown. Hard: all that is pending fails with rdma.ErrFlushed at once, Host.Failed is
// told, and the peer is not: its agent is.
func (c *Connection) Shutdown(soft bool) {
	if soft {
		c.shut(ErrShutdown)
		c.touch()
	} else if !c.removed {
		c.end(rdma.ErrFlushed, ErrShutdown)
	}
}

// shut stops taking operations; why goes to the host when all have completed.
func (c *Connection) shut(why error) {
	if !c.draining && !c.removed {
		c.draining = true
		c.why = why
		c.noticed()
	}
}

// Close completes what has not with rdma.ErrFlushed, and says Last NULL to the peer. What the peer has outstanding is answered
// with Transaction errors (MajorShutdown) from now on; the connection lingers without the host until the peer has said Last NULL
// too, or rdma.Timing.GiveUp is over.
func (c *Connection) Close() {
	if c.closed {
		return
	}
	if c.removed || !c.connected {
		c.closed = true
		c.abandon(rdma.ErrFlushed)
		c.drain()
		c.core.remove(c)
		return
	}
	c.abandon(rdma.ErrFlushed)
	c.drain()
	c.closed, c.draining, c.why = true, true, nil
	c.until = c.core.host.Now() + c.cfg.Timing.GiveUp
	for i := range c.in {
		s := &c.in[i]
		begun := s.opcode == OpcodeSend && !s.msg.refused && !s.msg.delivered || s.opcode == OpcodeSendQP && s.msg.waiting
		if s.open && !s.done && begun {
			s.msg.refused, s.msg.waiting, s.msg.body = true, false, nil
			c.refuse(s, s.msg.seqno, s.msg.op, rdma.ErrFlushed)
			c.dropHeld(&s.msg)
			c.refuseMore(s, rdma.ErrFlushed)
			c.settle(s)
		}
	}
	c.waiters, c.reading = 0, 0
	c.unblock()
	c.touch()
}

// drained goes on with a shutdown when nothing is outstanding.
func (c *Connection) drained(now time.Duration) {
	if !c.draining || c.outstanding > 0 || c.queue.n > 0 || c.removed {
		return
	}
	switch {
	case c.lastSent:
	case c.tx.room(true):
		c.lastSent = true
		c.send(content{kind: last}, now)
	default:
		c.ask(now)
	}
	// What the peer has outstanding is done when it says Last NULL.
	if c.peerLast && c.why != nil {
		why := c.why
		c.why = nil
		c.failed = why
		c.drain()
		c.core.host.Failed(c, why)
	}
	if c.peerLast && c.lastAcked && c.closed {
		// The peer may not know that its Last NULL has come: stay for its retransmissions.
		c.until = min(c.until, now+8*c.cfg.Timing.Retransmit)
	}
}

// end is the end at once: operations complete with err, the host is told why.
func (c *Connection) end(err, why error) {
	told := c.failed != nil // by drained
	if !told {
		c.failed = why
	}
	c.draining = true
	c.abandon(err)
	c.core.remove(c)
	c.noticed()
	for i := range c.in {
		s := &c.in[i]
		c.dropHeld(&s.msg)
		for _, w := range s.more {
			c.core.release(w.data)
		}
		s.more = nil
	}
	for c.blocked.n > 0 {
		c.core.release(c.blocked.pop())
	}
	for i, b := range c.early {
		if b != nil {
			c.core.release(b)
			c.early[i] = nil
		}
	}
	if c.closed {
		return
	}
	c.drain()
	if !c.closed && !told && why != nil {
		c.why = nil
		c.core.host.Failed(c, why)
	}
}

// over says that nothing more comes of the connection: both Last NULLs have come, or it has ended otherwise.
func (c *Connection) over() bool { return c.removed || c.lastAcked && c.peerLast }

// pending is how many operations have not completed.
func (c *Connection) pending() int {
	n := c.queue.n
	for i := range c.out {
		if c.out[i].active {
			n += c.out[i].unreported
		}
	}
	return n
}

// release lets a connection carry operations that an agent has held.
func (c *Connection) release() {
	c.held = false
	c.touch()
}

func (c *Connection) noticed() {
	if c.observe != nil {
		c.observe()
	}
}

// deadline is when the connection wants to be looked at; 0: never.
func (c *Connection) deadline() time.Duration {
	d := c.ackAt
	earlier := func(t time.Duration) {
		if t != 0 && (d == 0 || t < d) {
			d = t
		}
	}
	if t := c.tx.deadline(&c.cfg.Timing); t != 0 {
		earlier(min(t, c.tx.progress+c.cfg.Timing.GiveUp))
	}
	if t := c.probeAt(); t != 0 {
		earlier(t)
	}
	if c.closed {
		earlier(c.until)
	}
	return d
}

// probeAt is when to ask a silent peer for a sign of life that has operations of ours, or owes its Last NULL, but has no packet to
// acknowledge; 0: never.
func (c *Connection) probeAt() time.Duration {
	owed := c.outstanding > 0 || c.lastAcked && !c.peerLast && !c.closed
	if !owed || c.tx.waiting() || !c.connected || c.removed {
		return 0
	}
	return max(c.heard, c.tx.progress) + c.cfg.Timing.GiveUp/4
}

// tick does what is due.
func (c *Connection) tick(now time.Duration) {
	if c.closed && now >= c.until {
		c.end(rdma.ErrFlushed, nil)
		return
	}
	if c.ackAt != 0 && now >= c.ackAt {
		c.ackNow = true
	}
	if t := c.probeAt(); t != 0 && now >= t {
		c.probe = true
	}
	if t := c.tx.deadline(&c.cfg.Timing); t != 0 && now >= min(t, c.tx.progress+c.cfg.Timing.GiveUp) {
		// By what the timer is late nobody has listened: acknowledgements that came while the process was stopped are yet to be read.
		c.tx.progress += now - min(t, c.tx.progress+c.cfg.Timing.GiveUp)
		if now >= c.tx.progress+c.cfg.Timing.GiveUp {
			c.end(rdma.ErrRetryExceeded, rdma.ErrRetryExceeded)
			return
		}
		c.core.count.timeouts++
		c.tx.expire(c.cfg.Parameters.Proactive, now)
	}
	c.touch()
}
