package superp

import (
	"time"

	"github.com/fared/fared/transport/rdma"
)

// shutdown is the state of a shutdown.
type shutdown struct {
	draining  bool          // no new operations are accepted
	lastSent  bool          // Last NULL has been sent
	lastAcked bool          // the peer has acknowledged it, by ack_xid
	abrupt    bool          // Close has abandoned operations: ack_xid may never cover Last NULL, and the acknowledgement of its psn suffices
	peerLast  bool          // the peer's Last NULL has arrived
	why       error         // argument of Host.Failed once all operations have completed; nil: already called, or not needed
	until     time.Duration // time at which a closed connection is removed
}

// exchanged reports whether both ends have received the other's Last NULL.
func (s *shutdown) exchanged() bool { return s.lastAcked && s.peerLast }

// takeReason returns the argument of Host.Failed once, as soon as the peer has sent its Last NULL, and otherwise nil.
func (s *shutdown) takeReason() error {
	if !s.peerLast {
		return nil
	}
	why := s.why
	s.why = nil
	return why
}

// Shutdown ends the connection from this side. A soft shutdown accepts no new operations, lets outstanding operations
// of both directions finish and exchanges Last NULLs; then it calls Host.Failed with ErrShutdown. A hard shutdown
// completes all pending operations with rdma.ErrFlushed at once and calls Host.Failed. It does not notify the peer,
// which has its own agent for that.
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
	if !c.shutdown.draining && !c.removed {
		c.shutdown.draining = true
		c.shutdown.why = why
		c.noticed()
	}
}

// Close completes all incomplete operations with rdma.ErrFlushed, and sends Last NULL to the peer. From then on it
// answers the peer's outstanding operations with Transaction errors (MajorShutdown). The connection stays, without its
// host, until the peer has sent Last NULL too, or for rdma.Timing.GiveUp.
func (c *Connection) Close() {
	if c.closed {
		return
	}
	if c.removed || !c.connected {
		c.closed = true
		c.initiator.abandon(rdma.ErrFlushed)
		c.drain()
		c.core.remove(c)
		return
	}
	if c.lite && c.shutdown.exchanged() { // nothing is retransmitted, and the peer's address must become free
		c.end(rdma.ErrFlushed, nil)
		c.closed = true
		return
	}
	c.shutdown.abrupt = !c.initiator.idle()
	c.initiator.abandon(rdma.ErrFlushed)
	c.drain()
	c.closed, c.shutdown.draining, c.shutdown.why = true, true, nil
	c.shutdown.until = c.core.host.Now() + c.cfg.Timing.GiveUp
	c.target.refuseIncomplete()
	c.touch()
}

// drained advances a shutdown once no operation is outstanding.
func (c *Connection) drained(now time.Duration) {
	if !c.shutdown.draining || !c.initiator.idle() || c.removed {
		return
	}
	if !c.shutdown.lastSent {
		xid, ok := uint16(0), c.tx.room(true) && c.mayAssign(now)
		if ok {
			xid, ok = c.initiator.nextNull(OpcodeLast)
		}
		if ok {
			c.shutdown.lastSent, c.initiator.lastSent = true, max(now, 1)
			c.send(content{kind: last, xid: xid}, now)
		} else {
			c.ask(now)
		}
	}
	// With its Last NULL the peer confirms that its own operations have finished.
	if why := c.shutdown.takeReason(); why != nil {
		c.failed = why
		c.drain()
		c.core.host.Failed(c, why)
	}
	if c.shutdown.exchanged() && c.closed {
		// The peer may not have the acknowledgement of its Last NULL: stay for its retransmissions.
		c.shutdown.until = min(c.shutdown.until, now+8*c.cfg.Timing.Retransmit)
	}
}

// end ends the connection at once: operations complete with err, the host receives why.
func (c *Connection) end(err, why error) {
	reported := c.failed != nil // drained has already called Host.Failed
	if !reported {
		c.failed = why
	}
	c.shutdown.draining = true
	c.initiator.abandon(err)
	c.core.remove(c)
	c.noticed()
	c.target.releaseBuffers()
	for i, b := range c.early {
		if b != nil {
			c.free(b)
			c.early[i] = nil
		}
	}
	if c.closed {
		return
	}
	c.drain()
	if !c.closed && !reported && why != nil {
		c.shutdown.why = nil
		c.core.host.Failed(c, why)
	}
}

// over reports whether the connection is finished: both Last NULLs have arrived, or it has ended otherwise.
func (c *Connection) over() bool { return c.removed || c.shutdown.exchanged() }

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
	d := c.acks.at
	earlier := func(t time.Duration) {
		if t != 0 && (d == 0 || t < d) {
			d = t
		}
	}
	if t := c.tx.deadline(&c.cfg.Timing); t != 0 {
		earlier(min(t, c.tx.progress+c.cfg.Timing.GiveUp))
	}
	earlier(c.tx.detectAt)
	earlier(c.tx.reuse.free)
	earlier(c.initiator.timeoutAt())
	if t := c.probeAt(); t != 0 {
		earlier(t)
	}
	earlier(c.paths.probeLostAt(&c.tx, &c.cfg.Timing))
	for _, p := range c.paths.all {
		earlier(c.paths.stallAt(p, &c.tx, &c.cfg.Timing))
	}
	if c.closed {
		earlier(c.shutdown.until)
	}
	return d
}

// probeAt returns the time at which to probe a silent peer. The peer holds local operations or owes its Last NULL, but
// has no packet to acknowledge. 0 means never.
func (c *Connection) probeAt() time.Duration {
	owed := c.initiator.outstanding > 0 || c.shutdown.lastSent && !c.shutdown.exchanged() && !c.closed
	if !owed || c.lite || c.tx.waiting() || !c.connected || c.removed {
		return 0
	}
	return max(c.lastActivity, c.tx.progress) + c.cfg.Timing.GiveUp/4
}

// tick handles the timers that are due.
func (c *Connection) tick(now time.Duration) {
	if c.closed && now >= c.shutdown.until {
		c.end(rdma.ErrFlushed, nil)
		return
	}
	if c.acks.at != 0 && now >= c.acks.at {
		c.acks.now = true
	}
	if t := c.probeAt(); t != 0 && now >= t {
		c.probe = true
	}
	c.tx.reuse.allows(now) // ends a pause
	if t := c.initiator.timeoutAt(); t != 0 && now >= t {
		if late := now - t; late > c.cfg.Timing.AckDelay {
			c.initiator.late += late + c.cfg.Timing.AckDelay // the process did not run: the answer may be in the socket
		} else {
			c.initiator.timedOut()
			c.end(ErrTransactionTimeout, ErrTransactionTimeout)
			return
		}
	}
	if t := c.tx.detectAt; t != 0 && now >= t {
		c.tx.detect(c.tx.una, now)
	}
	c.core.count.stalls += c.paths.detectStalls(&c.tx, &c.cfg.Timing, now)
	if t := c.tx.deadline(&c.cfg.Timing); t != 0 && now >= min(t, c.tx.progress+c.cfg.Timing.GiveUp) {
		// For the time by which the timer is late, the process did not run: acknowledgements that arrived meanwhile are
		// still unread.
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
