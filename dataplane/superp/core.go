package superp

import (
	"container/heap"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"time"

	"github.com/fared/fared/dataplane/internal/wire"
	"github.com/fared/fared/dataplane/rdma"
)

// Core is SUPERp without sockets: what New's transport runs over package udp, and tests over a simulated network. It is a
// wire.Core and, but for sockets, an rdma.Transport. Its methods are called with the device's lock held.
type Core struct {
	cfg     Config
	out     wire.Out
	host    rdma.Host
	conns   map[uint16]*Connection
	nextCID uint16
	dirty   []*Connection
	timers  timers
	asked   time.Duration // of wire.Out.WakeAt
	count   counters

	scratch []byte    // a packet's headers
	answers []*answer // free ones
	buffers [][]byte  // free ones, of equal capacity
}

// counters are what Counters gives names.
type counters struct {
	sent, received, retransmitted, timeouts, pureAcks                          uint64
	duplicates, outside, badAcks, malformed, stale, unknownCID, unknownAddress uint64
}

// NewCore returns a core that sends by out. The configuration must be one that Config.Resolve takes: else it panics.
func NewCore(cfg Config, out wire.Out) *Core {
	cfg, err := cfg.Resolve()
	if err != nil {
		panic("superp: " + err.Error())
	}
	cfg.HeadSize, cfg.Parameters.Proactive = max(cfg.HeadSize, 0), max(cfg.Parameters.Proactive, 0)
	c := &Core{cfg: cfg, out: out, conns: map[uint16]*Connection{}, nextCID: cfg.FirstCID, scratch: make([]byte, 0, cfg.Payload+256)}
	for c.nextCID == 0 {
		c.nextCID = uint16(rand.Uint32())
	}
	return c
}

// Name is "superp".
func (c *Core) Name() string { return "superp" }

// Limits says that unordered connections spread their packets.
func (c *Core) Limits() rdma.Limits { return rdma.Limits{MaxOp: c.cfg.maxOp(), Spread: true} }

// Start gives the core the device.
func (c *Core) Start(h rdma.Host) error {
	c.host = h
	return nil
}

// Channel makes an unconnected connection with the next free cid.
func (c *Core) Channel(cfg rdma.ChannelConfig) (rdma.Channel, error) {
	for range 1 << 16 {
		cid := c.nextCID
		if c.nextCID++; c.nextCID == 0 {
			c.nextCID = 1
		}
		if c.conns[cid] == nil {
			return c.open(cid, cfg)
		}
	}
	return nil, fmt.Errorf("superp: all connection identifiers are in use")
}

// Connection makes an unconnected connection with a cid that somebody else has chosen: a connection manager.
func (c *Core) Connection(cid uint16, cfg rdma.ChannelConfig) (*Connection, error) {
	if c.conns[cid] != nil {
		return nil, fmt.Errorf("superp: cid %d is in use", cid)
	}
	return c.open(cid, cfg)
}

func (c *Core) open(cid uint16, cfg rdma.ChannelConfig) (*Connection, error) {
	if !cfg.Remote.IsValid() {
		return nil, fmt.Errorf("superp: no remote address")
	}
	x := newConnection(c, cfg.Remote.Unmap(), cid, cfg.Ordered)
	c.conns[cid] = x
	return x, nil
}

func (c *Core) remove(x *Connection) {
	x.removed = true
	if c.conns[x.cid] == x {
		delete(c.conns, x.cid)
	}
	if x.index >= 0 {
		heap.Remove(&c.timers, x.index)
	}
}

// Receive takes a datagram. What is not SUPERp, for no connection here or not from its peer's address is counted and dropped.
func (c *Core) Receive(from netip.AddrPort, p []byte) {
	c.count.received++
	packet, err := Decode(p)
	if err != nil {
		c.count.malformed++
		return
	}
	x := c.conns[packet.PDL.DCID]
	if x == nil || !x.connected {
		c.count.unknownCID++
		return
	}
	if from.Addr().Unmap() != x.remote {
		c.count.unknownAddress++
		return
	}
	x.receive(&packet, p, c.host.Now())
	x.drain()
	x.touch()
}

// Tick looks at connections whose time has come.
func (c *Core) Tick() {
	now := c.host.Now()
	c.asked = 0
	for len(c.timers) > 0 && c.timers[0].wake <= now {
		x := heap.Pop(&c.timers).(*Connection)
		x.wake = 0
		x.tick(now)
		x.touch()
	}
}

// Flush sends what has been queued.
func (c *Core) Flush() {
	if c.host == nil {
		return
	}
	now := c.host.Now()
	for i := 0; i < len(c.dirty); i++ { // grows meanwhile: the host posts again when it is told
		x := c.dirty[i]
		x.dirty = false
		x.flush(now)
		x.drain()
		if d := x.deadline(); d != 0 && !x.removed && (x.wake == 0 || d < x.wake) {
			x.wake = d
			if x.index >= 0 {
				heap.Fix(&c.timers, x.index)
			} else {
				heap.Push(&c.timers, x)
			}
		}
	}
	clear(c.dirty)
	c.dirty = c.dirty[:0]
	// A timer that is not needed any more fires for nothing and is not asked for again: cheaper than following every deadline.
	if len(c.timers) > 0 && c.timers[0].wake != c.asked {
		c.asked = c.timers[0].wake
		c.out.WakeAt(c.asked)
	}
}

// Counters are the core's, by name.
func (c *Core) Counters() map[string]uint64 {
	n := &c.count
	return map[string]uint64{
		"packets_sent": n.sent, "packets_received": n.received, "retransmitted": n.retransmitted, "timeouts": n.timeouts,
		"pure_acks": n.pureAcks, "duplicates": n.duplicates, "outside_window": n.outside, "bad_acks": n.badAcks,
		"malformed": n.malformed, "stale_transactions": n.stale, "unknown_cid": n.unknownCID, "unknown_address": n.unknownAddress,
	}
}

// Stop is what ends a transport; a core has nothing to end.
func (c *Core) Stop() {}

// copyOf copies b into a buffer of the core's.
func (c *Core) copyOf(b []byte) []byte {
	if len(b) > c.bufferSize() {
		return append([]byte(nil), b...)
	}
	if n := len(c.buffers); n > 0 {
		buffer := c.buffers[n-1]
		c.buffers = c.buffers[:n-1]
		return append(buffer, b...)
	}
	return append(make([]byte, 0, c.bufferSize()), b...)
}

// release takes a buffer of copyOf back.
func (c *Core) release(b []byte) {
	if cap(b) == c.bufferSize() && len(c.buffers) < 1<<12 {
		c.buffers = append(c.buffers, b[:0])
	}
}

func (c *Core) bufferSize() int { return c.cfg.Payload + 192 }

// timers is a heap of connections by wake.
type timers []*Connection

func (t timers) Len() int           { return len(t) }
func (t timers) Less(i, j int) bool { return t[i].wake < t[j].wake }
func (t timers) Swap(i, j int) {
	t[i], t[j] = t[j], t[i]
	t[i].index, t[j].index = i, j
}

// Push is heap.Interface's.
func (t *timers) Push(x any) {
	c := x.(*Connection)
	c.index = len(*t)
	*t = append(*t, c)
}

// Pop is heap.Interface's.
func (t *timers) Pop() any {
	last := len(*t) - 1
	c := (*t)[last]
	(*t)[last] = nil
	*t = (*t)[:last]
	c.index = -1
	return c
}
