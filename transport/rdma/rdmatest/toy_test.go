package rdmatest

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"net/netip"
	"time"
	"unsafe"

	"github.com/fared/fared/transport/internal/wire"
	"github.com/fared/fared/transport/rdma"
)

// toy is a stop-and-wait transport, small enough to be obviously correct: one datagram per operation, one for its
// acknowledgement, one operation of a channel in flight. Each of its faults is one error, which the rig has to detect.
type toy struct {
	fault    toyFault
	holds    bool // keeps a message that was not admitted until Ready, instead of requesting a retransmission
	out      wire.Out
	host     rdma.Host
	channels []*toyChannel
	executed uint64
}

type toyFault int

const (
	sound           toyFault = iota
	loses                    // every 20th operation is acknowledged and not executed
	executesTwice            // a duplicate is executed again
	completesEarly           // completes once sent
	completesTwice           // every 20th operation
	neverCompletes           // the 20th operation
	swaps                    // posted operations overtake each other
	believesAll              // no checksum
	ignoresNotReady          // delivers messages that were not admitted
	staysOnPath              // ignores SetPaths
	swallowsSends            // admits SENDs and does not deliver them
	writesBeyond             // a READ writes a byte behind Local
	writesShort              // WRITEs lack their last byte
	forgetsRoom              // does not call Room
	storms                   // calls Room all the time
	leaksOnClose             // Close completes nothing
	keepsBytes               // reads a datagram after Receive
	countsWrong              // Path.Sent counts retransmissions
	fails                    // the 20th operation completes with an error
	toyFaults
)

var toyFaultNames = [...]string{"sound", "loses", "executes twice", "completes early", "completes twice", "never completes",
	"swaps", "believes all", "ignores not ready", "stays on path", "swallows sends", "writes beyond", "writes short",
	"forgets room", "storms", "leaks on close", "keeps bytes", "counts wrong", "fails"}

func (f toyFault) String() string { return toyFaultNames[f] }

// A datagram: crc u32 · channel u16 · kind u8 · flags u8 · seq u64 · key u32 · remote u64 · compare u64 · swap u64 ·
// length u32 · head 20 · payload. An acknowledgement has kind 0xff and, as payload, the answer.
const (
	toyHeader = 4 + 2 + 1 + 1 + 8 + 4 + 8 + 8 + 8 + 4 + 20
	toyAck    = 0xff
	toyQueue  = 8
	toyRetry  = 2 * time.Millisecond
	maxReady  = 100 // at one time
)

type toyChannel struct {
	t      *toy
	number uint16
	remote netip.AddrPort
	paths  []rdma.Path
	queue  []*rdma.Op
	seq    uint64 // number of queue[0]
	sent   bool
	again  time.Duration // time of the retransmission; 0: it has not been sent
	full   bool
	closed bool
	done   uint64

	expected uint64
	answer   []byte // answer to expected-1
	stash    []byte // keepsBytes
	held     []byte // not admitted yet
	at       time.Duration
	readies  int // calls of Ready at that time
}

func newToy(fault toyFault) Constructor {
	return func(out wire.Out) Core { return &toy{fault: fault, out: out} }
}

func newHoldingToy(out wire.Out) Core { return &toy{holds: true, out: out} }

func (t *toy) Name() string            { return "toy" }
func (t *toy) Limits() rdma.Limits     { return rdma.Limits{MaxOp: 32 << 10, Ordered: true} }
func (t *toy) Start(h rdma.Host) error { t.host = h; return nil }
func (t *toy) Flush()                  {}
func (t *toy) Stop()                   {}

func (t *toy) Counters() map[string]uint64 {
	counters := map[string]uint64{"executed": t.executed}
	for _, c := range t.channels {
		counters["ready_in_vain"] += uint64(max(0, c.readies-maxReady))
	}
	return counters
}

func (t *toy) Channel(c rdma.ChannelConfig) (rdma.Channel, error) {
	ch := &toyChannel{t: t, number: uint16(len(t.channels)), remote: netip.AddrPortFrom(c.Remote, 1)}
	t.channels = append(t.channels, ch)
	return ch, nil
}

func (c *toyChannel) Local() []byte { return binary.BigEndian.AppendUint16(nil, c.number) }

func (c *toyChannel) Connect(remote []byte, paths []rdma.Path) error {
	if len(remote) != 2 || binary.BigEndian.Uint16(remote) != c.number {
		return fmt.Errorf("channel %d with %x", c.number, remote)
	}
	c.paths = paths
	return nil
}

func (c *toyChannel) SetPaths(paths []rdma.Path) {
	if c.t.fault == staysOnPath {
		return
	}
	c.paths = paths
	if c.sent {
		c.send(true)
	}
}

func (c *toyChannel) Post(op *rdma.Op) bool {
	if len(c.queue) == toyQueue {
		c.full = true
		return false
	}
	c.queue = append(c.queue, op)
	if n := len(c.queue); c.t.fault == swaps && n > 2 && n%2 == 0 {
		c.queue[n-1], c.queue[n-2] = c.queue[n-2], c.queue[n-1]
	}
	if !c.sent {
		c.send(false)
	}
	return true
}

func (c *toyChannel) Ready() {
	if now := c.t.host.Now(); now != c.at {
		c.at, c.readies = now, 0
	}
	if c.readies++; c.readies > maxReady {
		return // Ready is called again and again without effect
	}
	if c.held != nil && !c.closed && c.execute(c.held) {
		c.held = nil
		c.expected++
		c.acknowledge(c.expected - 1)
	}
}

func (c *toyChannel) Close() {
	c.closed = true
	for _, op := range c.queue {
		if c.t.fault != leaksOnClose {
			c.t.host.Complete(op, rdma.ErrFlushed)
		}
	}
	c.queue = nil
}

// send sends the first operation of the queue.
func (c *toyChannel) send(again bool) {
	op := c.queue[0]
	head := make([]byte, toyHeader)
	binary.BigEndian.PutUint16(head[4:], c.number)
	head[6] = byte(op.Kind)
	binary.BigEndian.PutUint64(head[8:], c.seq)
	binary.BigEndian.PutUint32(head[16:], op.Key)
	binary.BigEndian.PutUint64(head[20:], op.Remote)
	binary.BigEndian.PutUint64(head[28:], op.Compare)
	binary.BigEndian.PutUint64(head[36:], op.Swap)
	binary.BigEndian.PutUint32(head[44:], uint32(len(op.Local)))
	copy(head[48:], op.Head)
	var payload []byte
	if op.Kind == rdma.OpSend || op.Kind == rdma.OpWrite {
		payload = op.Local
	}
	count := c.paths[0].Sent
	if again && c.t.fault != countsWrong {
		count = c.paths[0].Again
	}
	count.Add(uint64(len(payload)))
	c.transmit(head, payload)
	c.sent, c.again = true, c.t.host.Now()+toyRetry
	c.t.arm()
	if c.t.fault == completesEarly && !again && op.Kind == rdma.OpWrite {
		op := *op
		op.Local = append([]byte(nil), op.Local...)
		c.t.host.Complete(c.queue[0], nil)
		c.queue[0] = &op
		c.done = c.seq + 1
	}
}

func (c *toyChannel) transmit(head, payload []byte) {
	sum := crc32.Update(crc32.ChecksumIEEE(head[4:]), crc32.IEEETable, payload)
	binary.BigEndian.PutUint32(head, sum)
	c.t.out.Send(c.remote, c.paths[0].Port, head, payload, nil)
}

func (t *toy) arm() {
	first := time.Duration(0)
	for _, c := range t.channels {
		if c.sent && !c.closed && (first == 0 || c.again < first) {
			first = c.again
		}
	}
	t.out.WakeAt(first)
}

func (t *toy) Tick() {
	for _, c := range t.channels {
		if c.sent && !c.closed && c.again <= t.host.Now() {
			c.send(true)
		}
	}
	t.arm()
}

func (t *toy) Receive(from netip.AddrPort, p []byte) {
	if len(p) < toyHeader || t.fault != believesAll && crc32.ChecksumIEEE(p[4:]) != binary.BigEndian.Uint32(p) {
		return
	}
	number := binary.BigEndian.Uint16(p[4:])
	if int(number) >= len(t.channels) || t.channels[number].remote.Addr() != from.Addr() || t.channels[number].closed {
		return
	}
	c := t.channels[number]
	seq := binary.BigEndian.Uint64(p[8:])
	if p[6] == toyAck {
		c.acknowledged(seq, p[toyHeader:])
		return
	}
	switch {
	case c.held != nil && seq == c.expected:
		return
	case seq == c.expected:
		if !c.execute(p) {
			if c.t.holds {
				c.held = append([]byte(nil), p...)
			}
			return
		}
		c.expected++
	case t.fault == executesTwice && seq+1 == c.expected:
		c.execute(p)
	case seq+1 != c.expected:
		return
	}
	c.acknowledge(seq)
}

func (c *toyChannel) acknowledge(seq uint64) {
	head := make([]byte, toyHeader)
	binary.BigEndian.PutUint16(head[4:], c.number)
	head[6] = toyAck
	binary.BigEndian.PutUint64(head[8:], seq)
	c.transmit(head, c.answer)
}

// execute executes a request and keeps the answer. It returns false if the message is not admitted yet.
func (c *toyChannel) execute(p []byte) bool {
	kind, payload, n := rdma.OpKind(p[6]), p[toyHeader:], int(binary.BigEndian.Uint32(p[44:]))
	key, remote := binary.BigEndian.Uint32(p[16:]), binary.BigEndian.Uint64(p[20:])
	h, fault := c.t.host, c.t.fault
	c.t.executed++
	every20th := c.t.executed%20 == 0
	c.answer = c.answer[:0]
	if fault == loses && every20th && kind != rdma.OpRead {
		c.answer = append(c.answer, make([]byte, 8)...)
		return true
	}
	var err error
	switch kind {
	case rdma.OpSend:
		body, v := h.Admit(c, p[48:68], len(payload))
		if v == rdma.NotReady && fault == ignoresNotReady {
			h.Deliver(c, p[48:68])
			return true
		}
		if v != rdma.Accepted {
			return false
		}
		copy(body, payload)
		if fault != swallowsSends || !every20th {
			h.Deliver(c, p[48:68])
		}
	case rdma.OpWrite:
		var b []byte
		if fault == keepsBytes {
			if c.stash == nil {
				c.stash = payload
			} else {
				payload, c.stash = append(c.stash, payload...)[:0], nil
			}
		}
		if b, err = h.Memory(c, key, remote, n, rdma.RemoteWrite); err == nil {
			if fault == writesShort && n > 0 {
				payload = payload[:n-1]
			}
			copy(b, payload)
		}
	case rdma.OpRead:
		var b []byte
		if b, err = h.Memory(c, key, remote, n, rdma.RemoteRead); err == nil {
			c.answer = append(c.answer, b...)
		}
	default:
		var was uint64
		if was, err = h.Atomic(c, kind, key, remote, binary.BigEndian.Uint64(p[28:]), binary.BigEndian.Uint64(p[36:])); err == nil {
			c.answer = binary.NativeEndian.AppendUint64(c.answer, was)
		}
	}
	return err == nil
}

// acknowledged completes the first operation of the queue.
func (c *toyChannel) acknowledged(seq uint64, answer []byte) {
	if !c.sent || seq != c.seq {
		return
	}
	op := c.queue[0]
	fault := c.t.fault
	if fault == neverCompletes && seq == 20 {
		return
	}
	if op.Kind != rdma.OpSend && op.Kind != rdma.OpWrite {
		copy(op.Local, answer)
		if fault == writesBeyond && len(op.Local) > 0 {
			unsafe.Slice(unsafe.SliceData(op.Local), len(op.Local)+1)[len(op.Local)]++
		}
	}
	c.queue = append(c.queue[:0], c.queue[1:]...)
	c.seq++
	c.sent = false
	var err error
	if fault == fails && seq == 20 {
		err = rdma.ErrRemoteOperation
	}
	if seq >= c.done {
		c.t.host.Complete(op, err)
	}
	if fault == completesTwice && seq%20 == 0 {
		c.t.host.Complete(op, nil)
	}
	if len(c.queue) > 0 {
		c.send(false)
	}
	if c.full && fault != forgetsRoom {
		c.full = false
		c.t.host.Room(c)
	}
	for i := 0; fault == storms && i < maxVain; i++ {
		c.t.host.Room(c)
	}
	c.t.arm()
}
