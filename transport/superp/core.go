package superp

import (
	"container/heap"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/fared/fared/transport/internal/congestion"
	"github.com/fared/fared/transport/internal/wire"
	"github.com/fared/fared/transport/rdma"
)

// Core is SUPERp without sockets. The transport of New runs it over package udp, tests run it over a simulated network.
// It is a wire.Core and, except for sockets, an rdma.Transport. The caller holds the device's lock in all methods.
type Core struct {
	cfg     Config
	out     carrier
	host    rdma.FlatHost
	conns   map[uint16]*Connection
	lite    map[netip.Addr]*Connection // SUPERp-lite: the connection to each peer
	nextCID uint16                     // 0: cids are random
	retired fifo[uint16]               // cids of the latest closed connections
	dirty   []*Connection
	timers  timers
	wakeAt  time.Duration // latest argument of carrier.WakeAt
	count   counters

	scratch []byte                    // buffer for a packet's headers
	answers []*answer                 // free list
	buffers [][]byte                  // free list; all have the same capacity
	peers   [classes]congestion.Peers // by class, since each has separate queues; nil: none yet
	pools   pools
	marked  bool // the packet of the present Receive arrived with "congestion experienced"
	// violated is called for each protocol error; nil means that it is only counted.
	violated func(ProtocolError)
}

var _ wire.Marked = (*Core)(nil)

// carrier sends a core's packets. Its methods are called with the device's lock held.
type carrier interface {
	// send sends a packet of a traffic class on a path: head, which is copied, and payload, which may be read until the
	// next flush.
	send(p *rdma.Path, to netip.Addr, class uint8, head, payload []byte)
	// WakeAt requests a call of Core.Tick, as in wire.Out.
	WakeAt(time.Duration)
}

// datagrams is a carrier in UDP.
type datagrams struct {
	wire.Out
	classes wire.Classes // nil: all have the class of the sockets
	port    uint16       // of all destinations
}

func newDatagrams(out wire.Out, port uint16) datagrams {
	classes, _ := out.(wire.Classes)
	return datagrams{out, classes, port}
}

func (d datagrams) send(p *rdma.Path, to netip.Addr, class uint8, head, payload []byte) {
	if d.classes != nil {
		d.classes.SendClass(class, netip.AddrPortFrom(to, d.port), p.Port, head, payload, nil)
		return
	}
	d.Send(netip.AddrPortFrom(to, d.port), p.Port, head, payload, nil)
}

// counters are the values of Counters.
type counters struct {
	sent, received, retransmitted, timeouts, stalls, pureAcks uint64
	duplicates, malformed, unknownCID, unknownAddress         uint64
	refused, marked, echoes, windowCuts                       uint64

	violations [violations]uint64
}

// NewCore returns a core that sends through out. It panics if Config.Resolve rejects the configuration.
func NewCore(cfg Config, out wire.Out) *Core {
	cfg, err := cfg.Resolve()
	if err != nil {
		panic("superp: " + err.Error())
	}
	cfg.HeadSize, cfg.Parameters.Proactive = max(cfg.HeadSize, 0), max(cfg.Parameters.Proactive, 0)
	c := &Core{cfg: cfg, out: newDatagrams(out, cfg.Port), conns: map[uint16]*Connection{}, lite: map[netip.Addr]*Connection{}, nextCID: cfg.FirstCID,
		scratch: make([]byte, 0, cfg.Payload+256)}
	return c
}

// Name returns "superp".
func (c *Core) Name() string { return "superp" }

// Limits returns the maximum operation, and Spread: unordered connections spread their packets.
func (c *Core) Limits() rdma.Limits { return rdma.Limits{MaxOp: c.cfg.maxOp(), Spread: true} }

// Start sets the device, which must be an rdma.FlatHost, since SUPERp names memory by address.
func (c *Core) Start(h rdma.Host) error {
	flat, ok := h.(rdma.FlatHost)
	if !ok {
		return fmt.Errorf("superp: host %T has no FlatMemory", h)
	}
	c.host = flat
	return nil
}

// Channel makes an unconnected connection with a free cid.
func (c *Core) Channel(cfg rdma.ChannelConfig) (rdma.Channel, error) {
	cid, err := c.freeCID()
	if err != nil {
		return nil, err
	}
	x, err := c.open(cid, cfg.Remote, c.cfg.TrafficClass, cfg.Ordered, cfg.Ordered)
	if err != nil {
		return nil, err
	}
	var b [4]byte
	rand.Read(b[:])
	x.sendKey = binary.NativeEndian.Uint32(b[:])
	return x, nil
}

// maxRetired is the number of closed connections whose cids are not used again.
const maxRetired = 4096

// maxConnections leaves enough cids that a random one is free after a few attempts.
const maxConnections = 1<<16 - 1 - 2*maxRetired

func (c *Core) freeCID() (uint16, error) {
	if len(c.conns) >= maxConnections {
		return 0, fmt.Errorf("superp: %d connections are open, which is the limit", len(c.conns))
	}
	for {
		cid := c.nextCID
		if cid != 0 {
			c.nextCID = max(1, c.nextCID+1)
		} else if cid = randomCID(); cid == 0 || c.isRetired(cid) {
			continue
		}
		if c.conns[cid] == nil {
			return cid, nil
		}
	}
}

func randomCID() uint16 {
	var b [2]byte
	rand.Read(b[:])
	return binary.NativeEndian.Uint16(b[:])
}

func (c *Core) isRetired(cid uint16) bool {
	for i := range c.retired.n {
		if *c.retired.at(i) == cid {
			return true
		}
	}
	return false
}

// Connection makes an unconnected connection with a cid chosen by the caller, such as a connection manager. out is
// whether this end's transactions are executed in order, in whether the peer's are; the peer's end has them the other
// way round. The connection has Config.TrafficClass.
func (c *Core) Connection(cid uint16, remote netip.Addr, out, in bool) (*Connection, error) {
	return c.ConnectionOfClass(cid, remote, c.cfg.TrafficClass, out, in)
}

// ConnectionOfClass is Connection with a traffic class: a multiple of 4, since its lower bits are for ECN. Connections
// of a class share a pool of buffers and the congestion windows to their peers.
func (c *Core) ConnectionOfClass(cid uint16, remote netip.Addr, class uint8, out, in bool) (*Connection, error) {
	switch {
	case c.conns[cid] != nil:
		return nil, fmt.Errorf("superp: cid %d is in use", cid)
	case class&3 != 0:
		return nil, fmt.Errorf("superp: traffic class %d is not a multiple of 4", class)
	}
	return c.open(cid, remote, class, out, in)
}

func (c *Core) open(cid uint16, remote netip.Addr, class uint8, out, in bool) (*Connection, error) {
	if !remote.IsValid() {
		return nil, errors.New("superp: no remote address")
	}
	if s := c.cfg.SUNH; s.enabled() && !s.Subnet.Contains(remote.Unmap()) {
		return nil, fmt.Errorf("superp: %v is not in the SUPERp subnet %v, so SUNH cannot address it", remote, s.Subnet)
	}
	if c.lite[remote.Unmap()] != nil {
		return nil, fmt.Errorf("superp: there is a connection to %v: SUPERp-lite has one between two nodes", remote)
	}
	x := newConnection(c, remote.Unmap(), cid, class, out, in)
	c.conns[cid] = x
	if x.lite {
		c.lite[x.remote] = x
	}
	c.pools.join(class)
	return x, nil
}

func (c *Core) remove(x *Connection) {
	if !x.removed {
		c.pools.leave(x.class)
	}
	x.removed = true
	if c.lite[x.remote] == x {
		delete(c.lite, x.remote)
	}
	x.tx.flight.Leave()
	if c.conns[x.cid] == x {
		delete(c.conns, x.cid)
		if c.retired.n == maxRetired {
			c.retired.pop()
		}
		c.retired.push(x.cid)
	}
	if x.index >= 0 {
		heap.Remove(&c.timers, x.index)
	}
}

// Receive handles a datagram. It counts and drops datagrams that are not SUPERp, that are for an unknown connection, or
// that do not come from the peer's address.
func (c *Core) Receive(from netip.AddrPort, p []byte) { c.receive(from, p, false) }

// receive is Receive; padded is whether p may end with the padding of an Ethernet frame.
func (c *Core) receive(from netip.AddrPort, p []byte, padded bool) {
	c.count.received++
	packet, err := decode(p, c.cfg.SUNH.Lite)
	if err != nil {
		c.count.malformed++
		return
	}
	packet.padded = padded
	x := c.conns[packet.PDL.DCID]
	if c.cfg.SUNH.Lite {
		x = c.lite[from.Addr().Unmap()]
	}
	if x == nil || !x.connected {
		c.count.unknownCID++
		return
	}
	if from.Addr().Unmap() != x.remote {
		c.count.unknownAddress++
		return
	}
	if c.marked {
		c.count.marked++
		x.marked = true
	}
	x.receive(&packet, p, c.host.Now())
	x.drain()
	x.touch()
}

// ReceiveMarked handles a datagram that arrived with "congestion experienced".
func (c *Core) ReceiveMarked(from netip.AddrPort, p []byte) {
	c.marked = true
	c.Receive(from, p)
	c.marked = false
}

// Tick handles the connections whose timer has expired.
func (c *Core) Tick() {
	now := c.host.Now()
	c.wakeAt = 0
	for len(c.timers) > 0 && c.timers[0].wake <= now {
		x := heap.Pop(&c.timers).(*Connection)
		x.wake = 0
		x.tick(now)
		x.touch()
	}
}

// Flush sends the queued packets.
func (c *Core) Flush() {
	if c.host == nil {
		return
	}
	now := c.host.Now()
	for i := 0; i < len(c.dirty); i++ { // grows meanwhile: the host posts further operations on completions
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
	// An obsolete timer fires without effect and is not rearmed: this costs less than tracking every deadline.
	if len(c.timers) > 0 && c.timers[0].wake != c.wakeAt {
		c.wakeAt = c.timers[0].wake
		c.out.WakeAt(c.wakeAt)
	}
}

// Counters returns the core's counters by name.
func (c *Core) Counters() map[string]uint64 {
	n := &c.count
	m := map[string]uint64{
		"packets_sent": n.sent, "packets_received": n.received, "retransmitted": n.retransmitted, "timeouts": n.timeouts, "stalls": n.stalls,
		"pure_acks": n.pureAcks, "duplicates": n.duplicates,
		"malformed": n.malformed, "unknown_cid": n.unknownCID, "unknown_address": n.unknownAddress,
		"refused_operations": n.refused, "packets_marked": n.marked, "marks_echoed": n.echoes, "window_cuts": n.windowCuts,
	}
	for v := Violation(1); v < violations; v++ {
		m[violationNames[v].counter] = n.violations[v]
		m["protocol_errors"] += n.violations[v]
	}
	return m
}

// Stop does nothing: a core has no goroutines or sockets.
func (c *Core) Stop() {}

// copyOf copies b into a buffer of the core.
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

// release puts a buffer of copyOf on the free list.
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

// Push implements heap.Interface.
func (t *timers) Push(x any) {
	c := x.(*Connection)
	c.index = len(*t)
	*t = append(*t, c)
}

// Pop implements heap.Interface.
func (t *timers) Pop() any {
	last := len(*t) - 1
	c := (*t)[last]
	(*t)[last] = nil
	*t = (*t)[:last]
	c.index = -1
	return c
}
