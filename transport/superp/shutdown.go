package superp

import (
	"time"

	"github.com/fared/fared/transport/rdma"
)

// Shutdown ends the connection from this side. A soft shutdown accepts no new operations, lets outstanding operations of both directions
// finish and exchanges Last NULLs; then it calls Host.Failed with ErrShutdown. A hard shutdown completes all pending operations with
// rdma.ErrFlushed at once and calls Host.Failed. It does not notify the peer, which has its own agent for that.
func (c *Connection) Shutdown(soft bool) {
	if soft {
		c.shut(ErrShutdown)
		c.touch()
	} else if !c.removed {
		c.end(rdma.ErrFlushed, ErrShutdown)
	}
}

// shut stops accepting operations; why goes to the host once all have completed.
func (c *Connection) shut(why error) {
	if !c.draining && !c.removed {
		c.draining = true
		c.why = why
		c.noticed()
	}
}

// Close completes all incomplete operations with rdma.ErrFlushed, and sends Last NULL to the peer. From then on it answers the peer's
// outstanding operations with Transaction errors (MajorShutdown). The connection stays, without its host, until the peer has sent Last NULL
// too, or for rdma.Timing.GiveUp.
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

// drained advances a shutdown once no operation is outstanding.
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
	// With its Last NULL the peer confirms that its own operations have finished.
	if c.peerLast && c.why != nil {
		why := c.why
		c.why = nil
		c.failed = why
		c.drain()
		c.core.host.Failed(c, why)
	}
	if c.peerLast && c.lastAcked && c.closed {
		// The peer may not have the acknowledgement of its Last NULL: stay for its retransmissions.
		c.until = min(c.until, now+8*c.cfg.Timing.Retransmit)
	}
}

// end ends the connection at once: operations complete with err, the host receives why.
func (c *Connection) end(err, why error) {
	reported := c.failed != nil // drained has already called Host.Failed
	if !reported {
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
	if !c.closed && !reported && why != nil {
		c.why = nil
		c.core.host.Failed(c, why)
	}
}

// over reports whether the connection is finished: both Last NULLs have arrived, or it has ended otherwise.
func (c *Connection) over() bool { return c.removed || c.lastAcked && c.peerLast }

// pending returns the number of incomplete operations.
func (c *Connection) pending() int {
	n := c.queue.n
	for i := range c.out {
		if c.out[i].active {
			n += c.out[i].unreported
		}
	}
	return n
}

// release starts a connection that its agent has configured.
func (c *Connection) release() {
	c.held = false
	c.touch()
}

func (c *Connection) noticed() {
	if c.observe != nil {
		c.observe()
	}
}

// deadline returns the time of the connection's next timer; 0 means none.
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
	earlier(c.probeLostAt())
	for _, p := range c.paths.all {
		earlier(c.stallAt(p))
	}
	if c.closed {
		earlier(c.until)
	}
	return d
}

// probeAt returns the time at which to probe a silent peer. The peer holds local operations or owes its Last NULL, but has no packet to
// acknowledge. 0 means never.
func (c *Connection) probeAt() time.Duration {
	owed := c.outstanding > 0 || c.lastAcked && !c.peerLast && !c.closed
	if !owed || c.tx.waiting() || !c.connected || c.removed {
		return 0
	}
	return max(c.lastActivity, c.tx.progress) + c.cfg.Timing.GiveUp/4
}

// tick handles the timers that are due.
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
	c.stall(now)
	if t := c.tx.deadline(&c.cfg.Timing); t != 0 && now >= min(t, c.tx.progress+c.cfg.Timing.GiveUp) {
		// For the time by which the timer is late, the process did not run: acknowledgements that arrived meanwhile are still unread.
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
