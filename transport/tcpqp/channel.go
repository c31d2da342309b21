package tcpqp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/fared/fared/transport/rdma"
)

// parameters are the contents of Local: version (1), 0, port (2), id (4), nonce (16). The version is that of frames and
// option, too.
type parameters struct {
	port  uint16 // listening port of the endpoint
	id    uint32 // of the channel, unique in its endpoint
	nonce [nonceSize]byte
}

const (
	parametersSize    = 8 + nonceSize
	parametersVersion = 2
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
	if len(b) > 0 && b[0] != parametersVersion {
		return fmt.Errorf("tcpqp: the peer's parameters have version %d, not %d: both ends need the same version of fared", b[0], parametersVersion)
	}
	if len(b) != parametersSize || b[1] != 0 {
		return fmt.Errorf("tcpqp: malformed parameters of %d bytes", len(b))
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
	out  source // queue entry of out0
	in   source // queue entry of in0

	// The latest OPEN received before Connect.
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
		return errors.New("tcpqp: the channel is connected already")
	}
	if len(paths) == 0 {
		return errors.New("tcpqp: the channel has no path")
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

// choose returns the path on which a channel sends: the one with the largest share, otherwise the lent one.
func choose(paths []rdma.Path) rdma.Path {
	best := paths[0]
	for _, p := range paths[1:] {
		if p.Share > best.Share || p.Share == best.Share && p.Lent && !best.Lent {
			best = p
		}
	}
	return best
}

// SetPaths moves the channel to another flow if its port changes. A channel with a lent path and no outstanding
// operations stays; its next request uses the latest path.
func (c *channel) SetPaths(paths []rdma.Path) {
	if !c.connected || c.ended {
		return
	}
	path := choose(paths)
	if path.Port != c.path.Port {
		c.out0.moves()
	}
	c.path = path
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
		panic(fmt.Sprintf("tcpqp: an invalid operation of kind %d, %d bytes and a head of %d", op.Kind, len(op.Local), len(op.Head)))
	}
	if op.HasImmediate && op.Kind != rdma.OpSend {
		panic("tcpqp: immediate data outside a SEND")
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

// opened handles an OPEN of the peer's channel.
func (c *channel) opened(k *conn, h *header) error {
	if !c.connected {
		if c.early == nil || int32(h.epoch-c.earlyOpen.epoch) > 0 { // otherwise an OPEN on another connection has overtaken it
			c.early, c.earlyOpen = k, *h
		}
		return nil
	}
	if h.from != c.remote.id {
		return fmt.Errorf("%w: OPEN of channel %d instead of %d", errRequest, h.from, c.remote.id)
	}
	return c.in0.open(k, h)
}

func (c *channel) Close() {
	c.end(rdma.ErrFlushed)
	c.e.forget(c)
}

// fail ends the channel and notifies the set.
func (c *channel) fail(err error) {
	if c.ended {
		return
	}
	c.end(err)
	c.e.stats.failed++
	c.e.host.Failed(c, err)
}

// end detaches the channel from both connections and completes all operations.
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
