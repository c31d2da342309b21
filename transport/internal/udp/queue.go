package udp

import "net/netip"

const (
	// maxSegments is the maximum number of datagrams per batch in Linux: UDP_MAX_SEGMENTS was 64 before 6.9.
	maxSegments = 64
	// maxPayload4 is the longest UDP payload in IPv4, and so the longest batch: 65,535 - 20 - 8 bytes.
	maxPayload4 = 65507
	// maxPayload6 also excludes the IPv6 header, so that a batch stays below a device's gso_max_size of 65,536 bytes.
	maxPayload6 = 65535 - 40 - 8
	// When maxQueued datagrams or maxArena bytes of heads and tails are queued, they are sent without waiting for
	// Flush.
	maxQueued = 1024
	maxArena  = 1 << 20
)

// flow identifies the datagrams that may share a batch.
type flow struct {
	to    netip.AddrPort
	port  uint16
	class class
}

// class is the traffic class of a flow's datagrams: classed plus the byte for their headers, or 0 for that of the
// sockets.
type class uint16

const classed class = 0x100

// datagram is a queued datagram: its head and tail are copied, one after the other, into the queue's arena.
type datagram struct {
	payload        []byte
	at, head, tail int   // offset in the arena, and lengths in bytes
	next           int32 // next datagram of the batch, or none
}

// batch is sent to the kernel as one message.
type batch struct {
	flow
	segment     int // bytes of each datagram; the last one may be shorter
	bytes       int // total
	count       int // number of datagrams
	first, last int32
	next        int32 // next batch of the same source port, or none
	closed      bool  // accepts no more datagrams
}

// portQueue holds the batches of one source port.
type portQueue struct {
	port        uint16
	first, last int32
}

const none = -1

// queue holds the datagrams since the last flush, in batches, by source port. Interleaved flows each fill their own
// batch; order is only kept within a flow.
type queue struct {
	whole     bool // no batches: every datagram is sent separately
	max       int  // maximum bytes of a batch
	datagrams []datagram
	batches   []batch
	ports     []portQueue
	arena     []byte
	open      map[flow]int32   // newest batch of each flow
	byPort    map[uint16]int32 // index in ports
	// The most recent flow and its newest batch, or none. They avoid the map lookup in the most common case.
	recent      flow
	recentBatch int32
}

func newQueue(max int, whole bool) *queue {
	return &queue{
		whole: whole, max: max,
		datagrams: make([]datagram, 0, maxQueued),
		batches:   make([]batch, 0, maxQueued),
		ports:     make([]portQueue, 0, maxQueued),
		arena:     make([]byte, 0, 128*maxQueued),
		open:      make(map[flow]int32),
		byPort:    make(map[uint16]int32),

		recentBatch: none,
	}
}

// joins returns the batch that would include a datagram, or none if the datagram would start a new batch.
func (q *queue) joins(f flow, length int) int32 {
	i := q.recentBatch
	if i == none || f != q.recent {
		var ok bool
		if i, ok = q.open[f]; !ok {
			return none
		}
	}
	b := &q.batches[i]
	if q.whole || b.closed || length == 0 || length > b.segment || b.count == maxSegments || b.bytes+length > q.max {
		return none
	}
	return i
}

// position returns the index that a datagram would have in its batch if it were the next one sent.
func (q *queue) position(f flow, length int) int {
	if i := q.joins(f, length); i != none {
		return q.batches[i].count
	}
	return 0
}

// add queues a datagram of at most max bytes.
func (q *queue) add(f flow, head, payload, tail []byte) {
	length := len(head) + len(payload) + len(tail)
	d := int32(len(q.datagrams))
	q.datagrams = append(q.datagrams, datagram{payload: payload, at: len(q.arena), head: len(head), tail: len(tail), next: none})
	q.arena = append(append(q.arena, head...), tail...)
	i := q.joins(f, length)
	if i == none {
		i = q.begin(f, length, d)
	} else {
		q.datagrams[q.batches[i].last].next = d
	}
	b := &q.batches[i]
	b.last = d
	b.count++
	b.bytes += length
	b.closed = length < b.segment
	q.recent, q.recentBatch = f, i
}

// begin starts a batch and appends it to the queue of its port.
func (q *queue) begin(f flow, length int, d int32) int32 {
	i := int32(len(q.batches))
	q.batches = append(q.batches, batch{flow: f, segment: length, first: d, next: none})
	q.open[f] = i
	at, ok := q.byPort[f.port]
	if !ok {
		q.byPort[f.port] = int32(len(q.ports))
		q.ports = append(q.ports, portQueue{port: f.port, first: i, last: i})
		return i
	}
	l := &q.ports[at]
	q.batches[l.last].next = i
	l.last = i
	return i
}

// full reports whether the queue must be flushed.
func (q *queue) full() bool { return len(q.datagrams) >= maxQueued || len(q.arena) >= maxArena }

// reset empties the queue, including references to payloads, which are memory of the application.
func (q *queue) reset() {
	for i := range q.batches {
		delete(q.open, q.batches[i].flow)
	}
	for i := range q.ports {
		delete(q.byPort, q.ports[i].port)
	}
	clear(q.datagrams)
	q.datagrams, q.batches, q.ports, q.arena = q.datagrams[:0], q.batches[:0], q.ports[:0], q.arena[:0]
	q.recent, q.recentBatch = flow{}, none
}
