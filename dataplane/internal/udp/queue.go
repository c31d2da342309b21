package udp

import "net/netip"

const (
	// maxSegments is how many datagrams Linux cuts out of one batch: UDP_MAX_SEGMENTS was 64 until 6.9.
	maxSegments = 64
	// maxPayload4 is the longest UDP payload in IPv4 (and so of a batch): 65,535 - 20 - 8 bytes.
	maxPayload4 = 65507
	// maxPayload6 leaves out the IPv6 header too, so that a batch stays below a device's gso_max_size of 65,536 bytes.
	maxPayload6 = 65535 - 40 - 8
	// maxQueued datagrams and maxArena bytes of heads and tails are queued at most, then they are sent without waiting for Flush.
	maxQueued = 1024
	maxArena  = 1 << 20
)

// flow is what the datagrams of a batch have in common.
type flow struct {
	to   netip.AddrPort
	port uint16
}

// datagram is one that waits: its head and tail are copies, one after the other, in the queue's arena.
type datagram struct {
	payload        []byte
	at, head, tail int   // where in the arena, and how many bytes each
	next           int32 // the next datagram of the batch, or none
}

// batch is what goes to the kernel as one message.
type batch struct {
	flow
	segment     int // bytes of each datagram, but that the last may have fewer
	bytes       int // of all of them
	count       int // datagrams
	first, last int32
	next        int32 // the next batch of the same source port, or none
	closed      bool  // takes no more
}

// lane is the batches of one source port.
type lane struct {
	port        uint16
	first, last int32
}

const none = -1

// queue is the datagrams since the last flush, in batches, by source port. Flows that take turns still fill a batch each: order
// is kept inside a flow only.
type queue struct {
	whole     bool // no batches: every datagram is sent by itself
	max       int  // bytes of a batch
	datagrams []datagram
	batches   []batch
	lanes     []lane
	arena     []byte
	open      map[flow]int32   // the newest batch of each flow
	byPort    map[uint16]int32 // index in lanes
	// The flow that came last and its newest batch, or none: the map need not be asked for what comes most often.
	recent      flow
	recentBatch int32
}

func newQueue(max int, whole bool) *queue {
	return &queue{
		whole: whole, max: max,
		datagrams: make([]datagram, 0, maxQueued),
		batches:   make([]batch, 0, maxQueued),
		lanes:     make([]lane, 0, maxQueued),
		arena:     make([]byte, 0, 128*maxQueued),
		open:      make(map[flow]int32),
		byPort:    make(map[uint16]int32),

		recentBatch: none,
	}
}

// joins returns the batch that a datagram would go out with, or none when it begins one.
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

// position is the datagram's place in its batch, were it the next to be sent.
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

// begin makes a batch, and hangs it on the lane of its port.
func (q *queue) begin(f flow, length int, d int32) int32 {
	i := int32(len(q.batches))
	q.batches = append(q.batches, batch{flow: f, segment: length, first: d, next: none})
	q.open[f] = i
	at, ok := q.byPort[f.port]
	if !ok {
		q.byPort[f.port] = int32(len(q.lanes))
		q.lanes = append(q.lanes, lane{port: f.port, first: i, last: i})
		return i
	}
	l := &q.lanes[at]
	q.batches[l.last].next = i
	l.last = i
	return i
}

// full says that it is time to send.
func (q *queue) full() bool { return len(q.datagrams) >= maxQueued || len(q.arena) >= maxArena }

// reset forgets everything, payloads too: they are the application's memory.
func (q *queue) reset() {
	for i := range q.batches {
		delete(q.open, q.batches[i].flow)
	}
	for i := range q.lanes {
		delete(q.byPort, q.lanes[i].port)
	}
	clear(q.datagrams)
	q.datagrams, q.batches, q.lanes, q.arena = q.datagrams[:0], q.batches[:0], q.lanes[:0], q.arena[:0]
	q.recent, q.recentBatch = flow{}, none
}
