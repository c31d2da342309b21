package tcpqp

import (
	"net/netip"
	"slices"
	"time"
)

const (
	backoffMin = 5 * time.Millisecond
	backoffMax = 100 * time.Millisecond
)

// flowKey identifies a flow of an endpoint.
type flowKey struct {
	remote netip.AddrPort
	port   uint16 // the local port, which is the slot's
}

// flow is the connection of a slot to a peer: at most one at a time, redialed while a channel needs it.
type flow struct {
	key      flowKey
	e        *endpoint
	channels []*channel
	conn     *conn
	dialing  bool
	backoff  time.Duration
	dialAt   time.Duration // time of the next attempt; 0: none
}

// dial starts to dial.
func (f *flow) dial() {
	f.dialing, f.dialAt = true, 0
	f.e.stats.dialed++
	f.e.net.dial(f)
}

// dialed handles the end of dialing: x carries the connection, or is nil after a failure. It returns the connection, or
// nil if no channel needs it any longer; the caller then closes x.
func (f *flow) dialed(x edge) *conn {
	f.dialing = false
	switch {
	case len(f.channels) == 0 || f.e.flows[f.key] != f:
		return nil
	case x == nil:
		f.again()
		return nil
	}
	f.conn = newConn(f.e, f, x)
	f.e.conns = append(f.e.conns, f.conn)
	for _, c := range f.channels {
		c.out0.attach(f.conn)
	}
	return f.conn
}

// again schedules another attempt, with a backoff that doubles until a channel is accepted.
func (f *flow) again() {
	f.dialAt = f.e.host.Now() + f.backoff
	f.backoff = min(max(2*f.backoff, backoffMin), backoffMax)
	f.e.wakeAt(f.dialAt)
}

// accepted resets the backoff: the connection works.
func (f *flow) accepted() { f.backoff = 0 }

// lost handles the end of the connection.
func (f *flow) lost() {
	f.conn = nil
	for _, c := range f.channels {
		c.out0.lost()
	}
	if len(f.channels) > 0 {
		f.again()
	}
}

// attach attaches a channel to the flow of its path.
func (e *endpoint) attach(c *channel) {
	key := c.flowKey()
	f := e.flows[key]
	if f == nil {
		f = &flow{key: key, e: e}
		e.flows[key] = f
	}
	f.channels = append(f.channels, c)
	c.out0.flow = f
	if f.conn != nil {
		c.out0.attach(f.conn)
	} else if !f.dialing && f.dialAt == 0 {
		f.dial()
	}
}

// detach removes a channel from its flow, which ends with its last channel.
func (e *endpoint) detach(c *channel) {
	f := c.out0.flow
	if f == nil {
		return
	}
	f.channels = slices.DeleteFunc(f.channels, func(x *channel) bool { return x == c })
	k := c.out0.conn
	last := len(f.channels) == 0
	if last {
		delete(e.flows, f.key)
	}
	switch {
	case k == nil:
	case last:
		k.fail(errUnused)
	default:
		k.settle()
		k.detach(&c.out)
	}
	c.out0.lost()
	c.out0.flow = nil
	if last && f.dialing {
		e.net.cancel(f)
	}
}
