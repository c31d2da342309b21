package tcpqp

import (
	"crypto/rand"
	"errors"
	"slices"
	"time"

	"github.com/fared/fared/transport/rdma"
)

var (
	errUnused = errors.New("tcpqp: no channel uses the connection now")
	errLonely = errors.New("tcpqp: no channel has attached to the connection")
)

// maxStrangers limits the accepted connections without an attached channel.
const maxStrangers = 1024

// network dials for an endpoint. The caller holds the device's lock in all methods.
type network interface {
	// dial starts to dial; it calls flow.dialed at the end.
	dial(f *flow)
	// cancel aborts a dial without waiters. flow.dialed may or may not be called.
	cancel(f *flow)
	// wakeAt requests endpoint.tick at a time of Host.Now, and replaces the previous request.
	wakeAt(time.Duration)
	// marker returns the marker of a connection, nil if segments cannot carry the option.
	marker(k *conn) marker
	// option reports whether segments can carry the option.
	option() bool
}

// counters are the counters of an endpoint.
type counters struct {
	requests, again, executed, held, copied, moved     uint64
	dialed, accepted, lost, refused, malformed, failed uint64
	bytesSent, strangers, stalls                       uint64
}

// endpoint is the protocol without sockets, clock and goroutines. The caller holds the device's lock in all methods.
type endpoint struct {
	host     rdma.Host
	net      network
	timing   rdma.Timing
	port     uint16
	lastID   uint32
	channels map[uint32]*channel
	list     []*channel // the same, in the order of creation
	flows    map[flowKey]*flow
	conns    []*conn
	kicked   []*conn // set of connections for dirty
	wake     time.Duration
	stats    counters
}

func newEndpoint(host rdma.Host, n network, timing rdma.Timing, port uint16) *endpoint {
	return &endpoint{
		host: host, net: n, timing: timing.WithDefaults(), port: port,
		channels: map[uint32]*channel{}, flows: map[flowKey]*flow{},
	}
}

// channel makes a channel.
func (e *endpoint) channel(cfg rdma.ChannelConfig) *channel {
	for e.lastID++; e.lastID == 0 || e.channels[e.lastID] != nil; e.lastID++ {
	}
	p := parameters{port: e.port, id: e.lastID}
	rand.Read(p.nonce[:]) // never fails
	c := newChannel(e, cfg.Remote, p)
	e.channels[p.id] = c
	e.list = append(e.list, c)
	return c
}

// forget removes a channel.
func (e *endpoint) forget(c *channel) {
	delete(e.channels, c.local.id)
	e.list = slices.DeleteFunc(e.list, func(x *channel) bool { return x == c })
}

// accept handles a connection that a peer has dialed. It returns nil if there are too many strangers; the caller then
// closes x.
func (e *endpoint) accept(x edge) *conn {
	strangers := 0
	for _, k := range e.conns {
		if k.flow == nil && len(k.in) == 0 {
			strangers++
		}
	}
	if strangers >= maxStrangers {
		e.stats.strangers++
		return nil
	}
	k := newConn(e, nil, x)
	e.conns = append(e.conns, k)
	e.stats.accepted++
	e.wakeAt(k.begun + e.timing.GiveUp)
	return k
}

// gone handles the end of a connection.
func (e *endpoint) gone(k *conn) {
	e.conns = slices.DeleteFunc(e.conns, func(x *conn) bool { return x == k })
	if !errors.Is(k.dead, errUnused) {
		e.stats.lost++
	}
	if k.flow != nil {
		k.flow.lost()
		return
	}
	for _, c := range k.in {
		c.in0.lost()
	}
	k.in = nil
}

// dirty schedules a kick of a connection that may have data to send.
func (e *endpoint) dirty(k *conn) {
	if n := len(e.kicked); n > 0 && e.kicked[n-1] == k {
		return
	}
	e.kicked = append(e.kicked, k)
}

// flush kicks the scheduled connections.
func (e *endpoint) flush() {
	for _, k := range e.kicked {
		if k.dead == nil {
			k.edge.kick()
		}
	}
	clear(e.kicked)
	e.kicked = e.kicked[:0]
}

// wakeAt requests a tick.
func (e *endpoint) wakeAt(t time.Duration) {
	if e.wake == 0 || t < e.wake {
		e.wake = t
		e.net.wakeAt(t)
	}
}

// tick handles the timers that are due.
func (e *endpoint) tick() {
	e.wake = 0
	now := e.host.Now()
	for _, k := range slices.Clone(e.conns) {
		if k.flow != nil || len(k.in) > 0 {
			continue
		}
		if due := k.begun + e.timing.GiveUp; due <= now {
			k.fail(errLonely)
		} else {
			e.wakeAt(due)
		}
	}
	for _, c := range slices.Clone(e.list) {
		if c.out0.tooLong(now) {
			c.fail(rdma.ErrRetryExceeded)
		} else if due := c.out0.look(); due != 0 {
			e.wakeAt(due)
		}
		c.out0.silent(now)
		if due := c.out0.stallAt(); due != 0 {
			e.wakeAt(due)
		}
		f := c.out0.flow
		switch {
		case f == nil || f.dialAt == 0 || f.conn != nil || f.dialing:
		case f.dialAt <= now:
			f.dial()
		default:
			e.wakeAt(f.dialAt)
		}
	}
}

// features returns the features for OPEN and ACCEPT.
func (e *endpoint) features() uint32 {
	if e.net.option() {
		return featureOption
	}
	return 0
}

// marker returns the marker of a connection's stream, nil if segments cannot carry the option.
func (e *endpoint) marker(k *conn) marker {
	if !e.net.option() {
		return nil
	}
	return e.net.marker(k)
}

func (e *endpoint) counters() map[string]uint64 {
	s := &e.stats
	return map[string]uint64{
		"requests_sent": s.requests, "retransmitted": s.again, "executed": s.executed, "held": s.held, "reads_copied": s.copied,
		"moved": s.moved, "dialed": s.dialed, "accepted": s.accepted, "connections_lost": s.lost, "refused": s.refused,
		"malformed": s.malformed, "failed": s.failed, "bytes_sent": s.bytesSent, "strangers": s.strangers, "stalls": s.stalls,
	}
}
