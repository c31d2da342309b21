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

// flowKey is what tells flows of an endpoint apart.
type flowKey struct {
	remote netip.AddrPort
	port   uint16 // the local port: the slot's
}

// flow is a slot's way to a peer: at most one connection, dialled again while a channel wants it.
type flow struct {
	key      flowKey
	e        *endpoint
	channels []*channel
	conn     *conn
	dialling bool
	backoff  time.Duration
	dialAt   time.Duration // when to dial again; 0: not
}

// dial begins to dial.
func (f *flow) dial() {
	f.dialling, f.dialAt = true, 0
	f.e.stats.dialled++
	f.e.net.dial(f)
}

// dialled says that dialling is over: x is what carries the connection, or nil. It returns the connection, nil when nobody wants
// it any more; x then is the caller's to close.
func (f *flow) dialled(x edge) *conn {
	f.dialling = false
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

// again dials later, and ever later until a channel is accepted.
func (f *flow) again() {
	f.dialAt = f.e.host.Now() + f.backoff
	f.backoff = min(max(2*f.backoff, backoffMin), backoffMax)
	f.e.wakeAt(f.dialAt)
}

// accepted says that the connection works.
func (f *flow) accepted() { f.backoff = 0 }

// lost says that the connection is gone.
func (f *flow) lost() {
	f.conn = nil
	for _, c := range f.channels {
		c.out0.lost()
	}
	if len(f.channels) > 0 {
		f.again()
	}
}

// attach gives a channel the flow of its path.
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
	} else if !f.dialling && f.dialAt == 0 {
		f.dial()
	}
}

// detach takes a channel from its flow, which ends with its last.
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
	if last && f.dialling {
		e.net.cancel(f)
	}
}
