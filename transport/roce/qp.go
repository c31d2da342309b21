package roce

import (
	"errors"
	"fmt"
	"time"

	"github.com/fared/fared/transport/rdma"
)

// state is the state of a queue pair. RTR does not exist, because Connect performs both transitions.
type state uint8

const (
	initial state = iota // has a number, accepts no operations
	ready                // RTS
	broken               // ERROR: all operations have completed, or are about to
	closed
)

// queuePair is a channel: a requester, which sends the local operations, and a responder, which executes the peer's.
type queuePair struct {
	common
	received seed
	mostID   uint16 // the highest IPv4 identification of the peer's packets
	// notifiedAt is the time of the latest CNP sent; 0: none.
	notifiedAt time.Duration

	active bool          // in core.active
	timer  int           // index in core.timers; -1: not there
	wake   time.Duration // its time in core.timers

	requester requester
	responder responder
}

// common is the state that the parts of a queue pair share.
type common struct {
	core  *Core
	pair  *queuePair // for calls of the core and the host, and to fail
	state state
	link
	qpn      uint32
	mtu      int
	headSize int // length of rdma.Op.Head of every SEND; 0: the channel is plain
	path     rdma.Path
}

// touch schedules the queue pair for the next Flush.
func (c *common) touch() { c.core.activate(c.pair) }

var _ rdma.Channel = (*queuePair)(nil)

// Channel implements rdma.Transport.
func (c *Core) Channel(cfg rdma.ChannelConfig) (rdma.Channel, error) {
	remote := cfg.Remote.Unmap()
	if !remote.IsValid() || remote.Is4() != c.address.Is4() {
		return nil, fmt.Errorf("roce: no path from %v to %v", c.address, cfg.Remote)
	}
	head := c.cfg.HeadSize
	if cfg.Plain {
		head = 0
	}
	if cfg.Plain && c.plain == nil {
		return nil, errors.New("roce: the host has no plain channels")
	}
	mtu, err := c.pathMTU(remote)
	if err != nil {
		return nil, err
	}
	q := &queuePair{common: common{core: c, link: link{remote: remote}, qpn: c.number(), mtu: mtu, headSize: head}, mostID: anyID, timer: -1}
	q.pair = q
	q.requester = newRequester(&q.common, seq(c.cfg.Random()&mask24))
	q.responder = responder{common: &q.common, atomics: make([]result, c.cfg.MaxReadAtomic)}
	c.pairs[q.qpn] = q
	return q, nil
}

// number returns an unused queue pair number that no remembered queue pair had. 0 and 1 are reserved.
func (c *Core) number() uint32 {
	for {
		n := c.cfg.Random() & mask24
		if n > 1 && c.pairs[n] == nil && c.graves.byNumber[n] == nil {
			return n
		}
	}
}

// Local implements rdma.Channel.
func (q *queuePair) Local() []byte {
	return Parameters{QPN: q.qpn, PSN: q.requester.first.psn(), MTU: q.mtu, ReadAtomic: q.core.cfg.MaxReadAtomic, head: uint8(q.headSize), socket: true}.Bytes()
}

// Connect implements rdma.Channel.
func (q *queuePair) Connect(remote []byte, paths []rdma.Path) error {
	cfg := &q.core.cfg
	if q.state != initial {
		return errors.New("roce: the queue pair is connected already")
	}
	p, err := ParseParameters(remote)
	switch {
	case err != nil:
		return err
	case int(p.head) != q.headSize:
		return fmt.Errorf("roce: the peer's heads have %d bytes, the local ones %d: use as many slots at both ends (a single one has none)", p.head, q.headSize)
	case len(paths) == 0:
		return errors.New("roce: the queue pair has no path")
	}
	q.mtu = min(q.mtu, p.MTU)
	if p.socket {
		q.mostID = maxBatch - 1
	}
	q.requester.limit = min(cfg.MaxReadAtomic, p.ReadAtomic)
	q.responder.expected = seq(p.PSN)
	q.link.peer = p.QPN
	q.path, q.link.port, q.link.tunnel = paths[0], paths[0].Port, paths[0].Tunnel
	q.state = ready
	return nil
}

// SetPaths implements rdma.Channel. The queue pair uses the port and tunnel of the first path, whatever its share:
// without a live path, it retransmits on that one until the plane is up.
func (q *queuePair) SetPaths(paths []rdma.Path) {
	if q.state == ready && (q.link.port != paths[0].Port || q.link.tunnel != paths[0].Tunnel) {
		q.requester.answers() // restarts the stall timer for the new path
	}
	q.path = paths[0]
	if q.state != ready || q.link.port == q.path.Port && q.link.tunnel == q.path.Tunnel {
		return
	}
	q.link.port, q.link.tunnel = q.path.Port, q.path.Tunnel
	q.requester.rewind()
	// Responses were on the old path too. An ACK reports the executed requests, and makes the peer request READs again
	// whose responses it lacks.
	if q.responder.answered {
		q.responder.ackNow = true
	}
	q.touch()
}

// Post implements rdma.Channel.
func (q *queuePair) Post(op *rdma.Op) bool { return q.requester.post(op) }

// Ready implements rdma.Channel. It does nothing, since the responder keeps no messages: the requester retransmits
// after the RNR timer.
func (q *queuePair) Ready() {}

// Close implements rdma.Channel.
func (q *queuePair) Close() {
	if q.state == closed {
		return
	}
	if q.state == ready && q.responder.owes() {
		q.responder.acknowledge()
	}
	q.leave(closed, nakOperational)
	q.requester.flushOps(nil, 0)
}

// fail moves the queue pair to the error state. The operation with the PSN at completes with err, all others with
// ErrFlushed; further requests of the peer are answered with syndrome.
func (q *queuePair) fail(cause, err error, at seq, syndrome uint8) {
	q.leave(broken, syndrome)
	q.requester.flushOps(err, at)
	if q.state == broken { // not closed by a callback
		q.core.host.Failed(q, fmt.Errorf("roce: queue pair %#06x to %v: %w", q.qpn, q.remote, cause))
	}
}

// leave removes the queue pair from the core.
func (q *queuePair) leave(to state, syndrome uint8) {
	was := q.state
	q.state = to
	if c := q.core; c.pairs[q.qpn] == q {
		delete(c.pairs, q.qpn)
		if was == ready {
			c.graves.add(&grave{link: q.link, qpn: q.qpn, expected: q.responder.expected, msn: q.responder.msn, syndrome: syndrome})
		}
	}
	q.core.unwatch(q)
	q.requester.flight.Leave()
	q.responder.body = nil
}

// flush sends pending ACKs, then requests.
func (q *queuePair) flush() {
	if q.state != ready {
		return
	}
	if q.responder.ackNow {
		q.responder.acknowledge()
	}
	q.requester.pump()
}

// due returns the time of the next expire; 0 means never.
func (q *queuePair) due() time.Duration {
	if q.state != ready {
		return 0
	}
	return earlier(q.responder.ackAt, q.requester.due())
}

// expire handles the timers that are due.
func (q *queuePair) expire(now time.Duration) {
	if q.responder.ackAt != 0 && q.responder.ackAt <= now {
		q.responder.ackNow = true
	}
	q.requester.expire(now)
}

// earlier returns the earlier of two times, of which 0 means never.
func earlier(a, b time.Duration) time.Duration {
	if a == 0 || b != 0 && b < a {
		return b
	}
	return a
}
