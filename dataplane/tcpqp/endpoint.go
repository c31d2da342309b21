package tcpqp

import (
	"crypto/rand"
	"errors"
	"slices"
	"time"

	"github.com/fared/fared/dataplane/rdma"
)

var (
	errUnused = errors.New("tcpqp: no channel uses the connection any more")
	errLonely = errors.New("tcpqp: no channel has attached to the connection")
)

// maxStrangers is how many accepted connections may be there that no channel is attached to.
const maxStrangers = 1024

// network is what an endpoint dials by. Its methods are called with the device's lock held.
type network interface {
	// dial begins to dial; flow.dialled is called when that is over.
	dial(f *flow)
	// cancel ends a dial that nobody waits for. flow.dialled may be called or not.
	cancel(f *flow)
	// wakeAt asks for endpoint.tick at a time of Host.Now, instead of any asked for before.
	wakeAt(time.Duration)
	// marker returns what writes the marks of a connection, nil if segments cannot carry the option.
	marker(k *conn) marker
	// option says whether segments can carry the option.
	option() bool
}

// counters are the endpoint's.
type counters struct {
	requests, again, executed, held, copied, moved      uint64
	dialled, accepted, lost, refused, malformed, failed uint64
	bytesSent, strangers                                uint64
}

// endpoint is the protocol: no socket, no clock, no goroutine. Its methods are called with the device's lock held.
type endpoint struct {
	host     rdma.Host
	net      network
	timing   rdma.Timing
	port     uint16
	lastID   uint32
	channels map[uint32]*channel
	list     []*channel // the same, in the order of making
	flows    map[flowKey]*flow
	conns    []*conn
	kicked   []*conn // dirty
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

// forget ends what is known of a channel.
func (e *endpoint) forget(c *channel) {
	delete(e.channels, c.local.id)
	e.list = slices.DeleteFunc(e.list, func(x *channel) bool { return x == c })
}

// accept takes a connection that a peer has dialled; nil: there are too many strangers, x is the caller's to close.
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

// gone says that a connection has ended.
func (e *endpoint) gone(k *conn) {
	e.conns = slices.DeleteFunc(e.conns, func(x *conn) bool { return x == k })
	if k.dead != errUnused {
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

// dirty notes that a connection may have something to send.
func (e *endpoint) dirty(k *conn) {
	if n := len(e.kicked); n > 0 && e.kicked[n-1] == k {
		return
	}
	e.kicked = append(e.kicked, k)
}

// flush kicks connections that may have something to send.
func (e *endpoint) flush() {
	for _, k := range e.kicked {
		if k.dead == nil {
			k.edge.kick()
		}
	}
	clear(e.kicked)
	e.kicked = e.kicked[:0]
}

// wakeAt asks for a tick.
func (e *endpoint) wakeAt(t time.Duration) {
	if e.wake == 0 || t < e.wake {
		e.wake = t
		e.net.wakeAt(t)
	}
}

// tick does what is due.
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
		if c.out0.stalled(now) {
			c.fail(rdma.ErrRetryExceeded)
		} else if due := c.out0.look(); due != 0 {
			e.wakeAt(due)
		}
		f := c.out0.flow
		switch {
		case f == nil || f.dialAt == 0 || f.conn != nil || f.dialling:
		case f.dialAt <= now:
			f.dial()
		default:
			e.wakeAt(f.dialAt)
		}
	}
}

// features are what OPEN and ACCEPT say.
func (e *endpoint) features() uint32 {
	if e.net.option() {
		return featureOption
	}
	return 0
}

// marker is what marks a connection's stream, if segments can carry the option.
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
		"moved": s.moved, "dialled": s.dialled, "accepted": s.accepted, "connections_lost": s.lost, "refused": s.refused,
		"malformed": s.malformed, "failed": s.failed, "bytes_sent": s.bytesSent, "strangers": s.strangers,
	}
}
