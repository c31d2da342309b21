package tcpqp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/fared/fared/dataplane/rdma"
)

// parameters are what Local says: version (1), 0, port (2), id (4), nonce (16).
type parameters struct {
	port  uint16 // where the endpoint listens
	id    uint32 // of the channel at its endpoint
	nonce [nonceSize]byte
}

const (
	parametersSize    = 8 + nonceSize
	parametersVersion = 1
)

func (p *parameters) put() []byte {
	b := make([]byte, parametersSize)
	b[0] = parametersVersion
	binary.BigEndian.PutUint16(b[2:], p.port)
	binary.BigEndian.PutUint32(b[4:], p.id)
	copy(b[8:], p.nonce[:])
	return b
}

func (p *parameters) parse(b []byte) error {
	if len(b) != parametersSize || b[0] != parametersVersion || b[1] != 0 {
		return fmt.Errorf("tcpqp: parameters of %d bytes, of another version", len(b))
	}
	got := parameters{port: binary.BigEndian.Uint16(b[2:]), id: binary.BigEndian.Uint32(b[4:]), nonce: [nonceSize]byte(b[8:])}
	if got.port == 0 {
		return errors.New("tcpqp: parameters without a port")
	}
	*p = got
	return nil
}

// channel is an rdma.Channel: two halves that share the peer and the path.
type channel struct {
	e             *endpoint
	peer          netip.Addr
	local, remote parameters
	connected     bool
	ended         bool // closed or failed
	path          rdma.Path

	out0 initiator
	in0  responder
	out  source // out0
	in   source // in0

	// An OPEN that came before Connect.
	early     *conn
	earlyOpen header
}

func newChannel(e *endpoint, peer netip.Addr, local parameters) *channel {
	c := &channel{e: e, peer: peer, local: local}
	c.out0.c, c.in0.c = c, c
	c.out.half, c.in.half = &c.out0, &c.in0
	return c
}

func (c *channel) Local() []byte { return c.local.put() }

func (c *channel) Connect(remote []byte, paths []rdma.Path) error {
	var p parameters
	if err := p.parse(remote); err != nil {
		return err
	}
	if c.connected || c.ended {
		return errors.New("tcpqp: the channel has been connected already")
	}
	if len(paths) == 0 {
		return errors.New("tcpqp: a channel without a path")
	}
	c.remote, c.connected = p, true
	c.path = choose(paths)
	c.e.attach(c)
	if k := c.early; k != nil && k.dead == nil {
		c.early = nil
		if err := c.opened(k, &c.earlyOpen); err != nil {
			k.fail(err)
		}
	}
	return nil
}

// choose returns the path that a channel sends by: the one with the largest share, else the one that is lent.
func choose(paths []rdma.Path) rdma.Path {
	best := paths[0]
	for _, p := range paths[1:] {
		if p.Share > best.Share || p.Share == best.Share && p.Lent && !best.Lent {
			best = p
		}
	}
	return best
}

// SetPaths moves the channel to another flow when its port is another now. A channel that is lent a path and has nothing under
// way stays: a later request would go by what SetPaths says then.
func (c *channel) SetPaths(paths []rdma.Path) {
	if !c.connected || c.ended {
		return
	}
	c.path = choose(paths)
	if c.path.Share > 0 || c.out0.una != c.out0.nxt {
		c.move()
	}
}

// move attaches the channel to its path's flow.
func (c *channel) move() {
	if c.out0.flow != nil && c.out0.flow.key == c.flowKey() {
		return
	}
	c.e.detach(c)
	c.e.attach(c)
	c.e.stats.moved++
}

func (c *channel) flowKey() flowKey {
	return flowKey{remote: netip.AddrPortFrom(c.peer, c.remote.port), port: c.path.Port}
}

func (c *channel) Post(op *rdma.Op) bool {
	if op.Kind > rdma.OpFetchAdd || len(op.Local) > maxOp || len(op.Head) > rdma.MaxHead {
		panic(fmt.Sprintf("tcpqp: an operation of kind %d, %d bytes and a head of %d", op.Kind, len(op.Local), len(op.Head)))
	}
	if !c.connected || c.ended {
		return false
	}
	if !c.out0.post(op) {
		return false
	}
	c.move()
	return true
}

func (c *channel) Ready() { c.in0.resume() }

// opened takes an OPEN of the peer's channel.
func (c *channel) opened(k *conn, h *header) error {
	if !c.connected {
		if c.early == nil || int32(h.epoch-c.earlyOpen.epoch) > 0 { // else overtaken by one on another connection
			c.early, c.earlyOpen = k, *h
		}
		return nil
	}
	if h.from != c.remote.id {
		return fmt.Errorf("%w: OPEN of channel %d, not %d", errRequest, h.from, c.remote.id)
	}
	return c.in0.open(k, h)
}

func (c *channel) Close() {
	c.end(rdma.ErrFlushed)
	c.e.forget(c)
}

// fail ends the channel and tells the set.
func (c *channel) fail(err error) {
	if c.ended {
		return
	}
	c.end(err)
	c.e.stats.failed++
	c.e.host.Failed(c, err)
}

// end leaves both connections and completes everything.
func (c *channel) end(err error) {
	if c.ended {
		return
	}
	c.ended, c.early = true, nil
	if c.connected {
		c.e.detach(c)
	}
	if k := c.in0.conn; k != nil {
		k.settle()
		c.in0.leave()
		if k.dead == nil {
			k.refuse(c.remote.id)
		}
	}
	c.out0.flush(err)
}

// putHost writes a number in host byte order.
func putHost(p []byte, v uint64) {
	if len(p) == 8 {
		binary.NativeEndian.PutUint64(p, v)
	}
}
