package roce

import (
	"container/heap"
	"encoding/binary"
	"hash/crc32"
	"net/netip"
	"time"

	"github.com/fared/fared/transport/internal/congestion"
	"github.com/fared/fared/transport/internal/wire"
	"github.com/fared/fared/transport/rdma"
)

// Core is a transport without sockets and clock: it is an rdma.Transport and a wire.Core. It passes requests and ACKs
// to wire.Out in Flush, and calls WakeAt there. Its owner calls the flush of wire.Out right after Flush, so the bytes
// of operations cannot change in between.
type Core struct {
	cfg     Config
	host    rdma.Host
	plain   rdma.PlainHost // host; nil: no plain channels
	out     wire.Out
	address netip.Addr

	pairs  map[uint32]*queuePair // by local number
	peers  congestion.Peers
	graves graveyard
	// active are the queue pairs with data to send at the next Flush. timers are those with a pending timer, ordered by
	// queuePair.wake, which is not later than queuePair.due.
	active []*queuePair
	timers timers
	wakeAt time.Duration // latest argument of WakeAt

	checker checker
	// scratch and tail are buffers to build a packet: headers, and the payload of READ responses; padding and ICRC.
	scratch [maxHeader + 4096]byte
	tail    [3 + icrcSize]byte
	stray   seed // for packets without a queue pair
	marked  bool // the packet of the present Receive arrived with "congestion experienced"
	counters
}

var (
	_ rdma.Transport = (*Core)(nil)
	_ wire.Marked    = (*Core)(nil)
)

// NewCore makes a core that sends through out.
func NewCore(cfg Config, out wire.Out) *Core {
	return &Core{cfg: cfg.withDefaults(), out: out, pairs: make(map[uint32]*queuePair), peers: congestion.Peers{}}
}

// Name implements rdma.Transport.
func (c *Core) Name() string { return "roce" }

// Limits implements rdma.Transport.
func (c *Core) Limits() rdma.Limits {
	return rdma.Limits{MaxOp: c.cfg.MaxOp, Ordered: true, Plain: c.plain != nil}
}

// Start implements rdma.Transport.
func (c *Core) Start(h rdma.Host) error {
	c.host, c.address = h, h.Address().Unmap()
	c.plain, _ = h.(rdma.PlainHost)
	return nil
}

// Stop implements rdma.Transport; a core has no goroutines or sockets.
func (c *Core) Stop() {}

// Flush implements rdma.Transport.
func (c *Core) Flush() {
	for _, q := range c.active {
		q.active = false
		q.flush()
		c.watch(q)
	}
	clear(c.active) // drops references to closed queue pairs
	c.active = c.active[:0]
	var at time.Duration
	if len(c.timers) > 0 {
		at = max(c.timers[0].wake, 1) // 0 would mean never
	}
	if at != c.wakeAt {
		c.wakeAt = at
		c.out.WakeAt(at)
	}
}

// activate schedules q for the next Flush.
func (c *Core) activate(q *queuePair) {
	if !q.active {
		q.active = true
		c.active = append(c.active, q)
	}
}

// watch ensures that Tick runs no later than q.due. If due has moved to a later time, the timer stays and Tick rearms
// it.
func (c *Core) watch(q *queuePair) {
	due := q.due()
	switch {
	case due == 0:
	case q.timer < 0:
		q.wake = due
		heap.Push(&c.timers, q)
	case due < q.wake:
		q.wake = due
		heap.Fix(&c.timers, q.timer)
	}
}

// unwatch removes q's timer.
func (c *Core) unwatch(q *queuePair) {
	if q.timer >= 0 {
		heap.Remove(&c.timers, q.timer)
	}
}

// Tick implements wire.Core.
func (c *Core) Tick() {
	now := c.host.Now()
	c.wakeAt = -1 // the timer has fired
	for len(c.timers) > 0 && c.timers[0].wake <= now {
		q := c.timers[0]
		c.unwatch(q)
		if due := q.due(); due == 0 || due > now {
			c.watch(q)
			continue
		}
		c.activate(q)
		q.expire(now)
	}
}

// timers is a heap of queue pairs by wake.
type timers []*queuePair

func (t timers) Len() int           { return len(t) }
func (t timers) Less(i, j int) bool { return t[i].wake < t[j].wake }
func (t timers) Swap(i, j int) {
	t[i], t[j] = t[j], t[i]
	t[i].timer, t[j].timer = i, j
}

// Push implements heap.Interface.
func (t *timers) Push(q any) {
	q.(*queuePair).timer = len(*t)
	*t = append(*t, q.(*queuePair))
}

// Pop implements heap.Interface.
func (t *timers) Pop() any {
	last := len(*t) - 1
	q := (*t)[last]
	(*t)[last] = nil
	*t = (*t)[:last]
	q.timer = -1
	return q
}

// link is the destination of a queue pair's packets, with their source port.
type link struct {
	remote netip.Addr
	peer   uint32 // the peer's queue pair number
	port   uint16
	tunnel rdma.Tunnel // nil: the network
	sent   seed
}

// send sends a packet: headers, then head, which is short, then payload, which must not change until the flush.
func (c *Core) send(l *link, h *header, head, payload []byte) {
	n := c.prepare(l, h, len(head)+len(payload))
	n += copy(c.scratch[n:], head)
	c.finish(l, h, n, payload)
}

// sendCopy is like send for a payload that may change before the flush: it copies the payload, so that the ICRC matches
// the bytes sent.
func (c *Core) sendCopy(l *link, h *header, payload []byte) {
	n := c.prepare(l, h, len(payload))
	n += copy(c.scratch[n:], payload)
	c.finish(l, h, n, nil)
}

// prepare writes the headers of a packet with n bytes of payload to scratch, and returns their length.
func (c *Core) prepare(l *link, h *header, n int) int {
	h.pkey, h.migrated, h.qpn, h.pad = defaultPKey, true, l.peer, uint8(-n&3)
	return h.marshal(c.scratch[:])
}

// finish sends the first n bytes of scratch, payload, padding and ICRC.
func (c *Core) finish(l *link, h *header, n int, payload []byte) {
	tail := c.tail[:int(h.pad)+icrcSize]
	clear(tail)
	length := n + len(payload) + len(tail)
	to := netip.AddrPortFrom(l.remote, c.cfg.Port)
	e := endpoints{source: c.address, destination: l.remote, sourcePort: l.port, destinationPort: c.cfg.Port}
	var id uint16
	if c.address.Is4() && l.tunnel == nil {
		id = c.out.Next(to, l.port, length)
	}
	crc := c.checker.cover(c.checker.begin(&l.sent, &e, length, id), c.scratch[:n])
	crc = crc32.Update(crc, crc32.IEEETable, payload)
	crc = crc32.Update(crc, crc32.IEEETable, tail[:h.pad])
	binary.LittleEndian.PutUint32(tail[h.pad:], crc)
	if l.tunnel != nil {
		l.tunnel.Carry(l.port, c.scratch[:n], payload, tail)
	} else {
		c.out.Send(to, l.port, c.scratch[:n], payload, tail)
	}
	c.packetsSent++
}

// Receive implements wire.Core.
func (c *Core) Receive(from netip.AddrPort, p []byte) {
	c.packetsReceived++
	if len(p) < bthSize+icrcSize || len(p) > maxDatagram || len(p)%4 != 0 {
		c.malformed++
		return
	}
	source := from.Addr().Unmap()
	if source.Is4() != c.address.Is4() {
		c.wrongSource++
		return
	}
	// Before the ICRC is checked, the number only selects the seed that is likely to fit.
	qpn := binary.BigEndian.Uint32(p[4:]) & mask24
	q, s, mostID := c.pairs[qpn], &c.stray, uint16(anyID)
	if q != nil && q.remote == source {
		s, mostID = &q.received, q.mostID
	} else {
		c.stray = seed{}
	}
	e := endpoints{source: source, destination: c.address, sourcePort: from.Port(), destinationPort: c.cfg.Port}
	id, ok := c.checker.check(s, &e, p, mostID)
	if !ok {
		c.badICRC++
		return
	}
	if id != 0 {
		c.identified++
	}
	if isNotification(p) {
		c.notification(q, qpn, source)
		return
	}
	var h header
	payload, err := h.unmarshal(p[:len(p)-icrcSize])
	if err != nil || h.pkey|0x8000 != defaultPKey { // the high bit is the membership type
		c.malformed++
		return
	}
	switch {
	case q == nil:
		c.answerForGone(qpn, source, &h)
	case q.remote != source:
		c.wrongSource++
	case q.state != ready:
		c.unknownPair++
	default:
		if c.marked {
			q.notify()
		}
		if h.opcode.isResponse() {
			if c.marked && h.opcode.isRead() {
				q.requester.congested() // responses are in the requester's window
			}
			q.requester.response(&h, payload)
		} else {
			q.responder.request(&h, payload)
		}
	}
}

// notification handles a CNP.
func (c *Core) notification(q *queuePair, qpn uint32, source netip.Addr) {
	switch {
	case q == nil && c.graves.byNumber[qpn] != nil: // late
	case q == nil || q.state != ready:
		c.unknownPair++
	case q.remote != source:
		c.wrongSource++
	default:
		c.cnpsReceived++
		q.requester.congested()
	}
}
