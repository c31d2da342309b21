package superp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/fared/fared/dataplane/rdma"
)

// Connection is a SUPERp connection, an rdma.Channel: <local address, remote address, local cid, remote cid>. Its methods are
// called with the device's lock held.
type Connection struct {
	core      *Core
	cfg       *Config // the core's, not the peer's
	remote    netip.Addr
	cid       uint16
	remoteCID uint16
	ordered   bool
	connected bool
	held      bool   // by an agent: configured, not started
	observe   func() // an agent's: the state has changed
	failed    error  // why it ended
	closed    bool   // by Close: the host is not called any more
	removed   bool
	broken    error // to be ended for this

	// What both ends can do; ours until the peer's is known.
	payload      int
	transactions int
	opsPerPacket int

	paths paths
	tx    sender
	rx    receiver
	early [][]byte // ordered: packets that came before one that is missing, by psn

	// Our transactions.
	queue       fifo[*rdma.Op]
	out         []transaction // by xid, a power of two
	outUna      uint16        // oldest that ack_xid has not covered
	outNext     uint16
	head        uint16 // ordered: oldest of which the host has not been told
	outstanding int
	current     *transaction // sent in part
	full        bool         // Post has said no: Room is owed

	// The peer's transactions.
	in        []incoming
	inNext    uint16 // oldest that is not complete: ack_xid is the one before
	told      uint16 // ack_xid that was sent last, by a new packet
	confirmed uint16 // ack_xid that the peer is known to have
	open      int
	waiters   int    // messages that wait for Ready
	waiter    uint16 // the last of them
	ready     bool   // Ready was called
	reading   int    // read responses not acknowledged, and reads not answered
	reads     fifo[read]
	answers   fifo[*answer]
	blocked   fifo[[]byte] // ordered: packets that wait for what comes before
	turn      int

	ackAt  time.Duration // when a delayed acknowledgement is due; 0: none is
	ackNow bool

	// A transaction may wait at the peer with every packet acknowledged: whether the peer lives, a probe tells.
	heard time.Duration // when a packet came last, or a probe was sent
	probe bool

	// Shutdown.
	draining  bool          // nothing new is taken
	lastSent  bool          // our Last NULL
	lastAcked bool          // the peer has it
	peerLast  bool          // the peer's has come
	why       error         // what Host.Failed is told when everything has drained; nil: it was told, or needs not be
	until     time.Duration // when a closed connection is forgotten

	done  fifo[completion]
	dirty bool
	wake  time.Duration // when the core looks at it again; 0: never
	index int           // in the core's timers
}

type completion struct {
	op  *rdma.Op
	err error
}

func newConnection(core *Core, remote netip.Addr, cid uint16, ordered bool) *Connection {
	p := &core.cfg.Parameters
	n := ceilPow2(p.Transactions)
	c := &Connection{core: core, cfg: &core.cfg, remote: remote, cid: cid, ordered: ordered, payload: core.cfg.Payload,
		transactions: p.Transactions, opsPerPacket: p.OpsPerPacket, tx: newSender(*p), rx: newReceiver(p.ReceiveWindow),
		out: make([]transaction, n), in: make([]incoming, n), told: 0xffff, confirmed: 0xffff, index: -1}
	words := (p.PacketsPerTransaction + 63) / 64
	seen := make([]uint64, n*words)
	for i := range c.in {
		c.in[i].seen = seen[i*words : (i+1)*words : (i+1)*words]
	}
	if ordered {
		c.early = make([][]byte, ceilPow2(p.ReceiveWindow))
	}
	return c
}

// The bytes of Local: version, flags (bit 0: ordered), cid u16, head size u8, operations per packet u8, payload u16,
// tal_trans_window u16, packets per transaction u16, pdl_receive_win u16, little endian. SUPERp leaves connection management to
// others, so this is ours; an Agent takes its own parameters for the peer's.
const (
	localLen     = 14
	localVersion = 1
)

// Local is what the peer's Connect wants.
func (c *Connection) Local() []byte { return c.describe(c.cid) }

// describe is Local of an end with our parameters and a cid.
func (c *Connection) describe(cid uint16) []byte {
	le, p := binary.LittleEndian, &c.cfg.Parameters
	b := []byte{localVersion, 0}
	if c.ordered {
		b[1] = 1
	}
	b = append(le.AppendUint16(b, cid), byte(c.cfg.HeadSize), byte(p.OpsPerPacket))
	b = le.AppendUint16(b, uint16(c.cfg.Payload))
	b = le.AppendUint16(b, uint16(p.Transactions))
	b = le.AppendUint16(b, uint16(p.PacketsPerTransaction))
	return le.AppendUint16(b, uint16(p.ReceiveWindow))
}

// Connect gives the peer's Local and the paths.
func (c *Connection) Connect(remote []byte, paths []rdma.Path) error {
	if len(remote) != localLen || remote[0] != localVersion {
		return fmt.Errorf("superp: peer's connection data %x is not of version %d", remote, localVersion)
	}
	le, p := binary.LittleEndian, &c.cfg.Parameters
	payload, transactions := int(le.Uint16(remote[6:])), int(le.Uint16(remote[8:]))
	packets, ops := int(le.Uint16(remote[10:])), int(remote[5])
	window := le.Uint16(remote[12:])
	switch {
	case c.connected || c.removed:
		return errors.New("superp: connected or closed already")
	case remote[1]&1 != 0 != c.ordered:
		return fmt.Errorf("superp: one end is ordered, the other is not")
	case int(remote[4]) != c.cfg.HeadSize:
		return fmt.Errorf("superp: heads of %d bytes here, of %d there", c.cfg.HeadSize, remote[4])
	case payload < 64 || transactions < 1 || transactions > 1024 || ops < 1 || ops > MaxOps || packets < 1 || window < 1:
		return fmt.Errorf("superp: peer's connection data %x makes no sense", remote)
	case min(packets, p.PacketsPerTransaction)*min(payload, c.payload) < c.cfg.maxOp()+c.cfg.HeadSize:
		return fmt.Errorf("superp: peer takes transactions of %d packets of %d bytes, operations here have up to %d", packets, payload,
			c.cfg.maxOp())
	case len(paths) == 0:
		return errors.New("superp: no path")
	}
	c.remoteCID = le.Uint16(remote[2:])
	c.payload, c.transactions, c.opsPerPacket = min(payload, c.payload), min(transactions, p.Transactions), min(ops, p.OpsPerPacket)
	c.tx.offered = uint32(window)
	c.paths.set(paths)
	c.connected = true
	c.touch()
	return nil
}

// CID is the connection's identifier here: what the peer puts into dcid.
func (c *Connection) CID() uint16 { return c.cid }

// SetPaths replaces the paths; what is in flight by one that does not live any more is sent again by others.
func (c *Connection) SetPaths(paths []rdma.Path) {
	if len(paths) == 0 {
		panic("superp: no path")
	}
	if c.removed {
		return
	}
	if c.paths.set(paths) {
		c.tx.strand()
	}
	c.touch()
}

// Post takes an operation; false when as many wait as may be outstanding.
func (c *Connection) Post(op *rdma.Op) bool {
	if len(op.Local) > c.cfg.maxOp() {
		panic(fmt.Sprintf("superp: operation of %d bytes, the longest has %d", len(op.Local), c.cfg.maxOp()))
	}
	if op.Kind == rdma.OpSend && len(op.Head) != c.cfg.HeadSize {
		panic(fmt.Sprintf("superp: head of %d bytes, configured are %d", len(op.Head), c.cfg.HeadSize))
	}
	if c.draining || c.removed {
		c.complete(op, rdma.ErrFlushed)
		c.touch()
		return true
	}
	if c.held || c.queue.n >= c.transactions {
		c.full = true
		return false
	}
	c.queue.push(op)
	c.touch()
	return true
}

// Ready says that a message may be admitted now for which Host.Admit had NotReady.
func (c *Connection) Ready() {
	c.ready = true
	c.touch()
}

func (c *Connection) complete(op *rdma.Op, err error) { c.done.push(completion{op, err}) }

// drain tells the host what has completed. It may be called within itself: the host may close the connection meanwhile.
func (c *Connection) drain() {
	for c.done.n > 0 {
		x := c.done.pop()
		c.core.host.Complete(x.op, x.err)
	}
}

// touch has the core look at the connection at the next Flush.
func (c *Connection) touch() {
	if !c.dirty {
		c.dirty = true
		c.core.dirty = append(c.core.dirty, c)
	}
}

// receive takes a packet that was decoded.
func (c *Connection) receive(p *Packet, raw []byte, now time.Duration) {
	c.heard = now
	if !c.tx.ack(&p.PDL, now, c) {
		c.core.count.badAcks++
		return // psns are not to be believed either
	}
	news := c.acknowledged(p.TAL.AckXID)
	switch c.rx.judge(p.PDL.PSN) {
	case outside:
		c.core.count.outside++
		return
	case duplicate:
		c.core.count.duplicates++
		c.ackNow, c.rx.plain = true, true // the peer does not know that it came
		return
	}
	gap := c.rx.holes()
	inOrder := c.rx.take(p.PDL.PSN)
	if p.TAL.Opcode != OpcodeNoOp || news {
		c.rx.pending++
		if c.ackAt == 0 {
			c.ackAt = now + c.cfg.Timing.AckDelay
		}
		// A new hole is shown at once, old ones every few packets.
		if c.rx.pending >= c.cfg.Parameters.Stretch || c.rx.holes() && (!gap || c.rx.pending >= 4) {
			c.ackNow = true
		}
	}
	switch o := p.TAL.Opcode; {
	case !c.ordered:
		c.packet(p, raw)
	case !inOrder && (o.reply() || o == OpcodeNoOp):
		// Nothing waits for a No-op, and a reply must not wait: it is acknowledged by now, so an ack_xid that relies on that may
		// come in any packet.
		c.packet(p, raw)
	case !inOrder:
		c.early[p.PDL.PSN&uint32(len(c.early)-1)] = c.core.copyOf(raw)
	default:
		c.packet(p, raw)
		for psn := p.PDL.PSN + 1; psn != c.rx.next && c.broken == nil && !c.removed; psn++ {
			slot := &c.early[psn&uint32(len(c.early)-1)]
			kept := *slot
			if kept == nil {
				continue
			}
			*slot = nil
			q, _ := Decode(kept) // it was decoded when it came
			c.packet(&q, kept)
			c.core.release(kept)
		}
	}
}

// packet takes what the packet delivery layer delivers: each packet once; in the order of psns if the connection is ordered.
func (c *Connection) packet(p *Packet, raw []byte) {
	switch {
	case p.TAL.Opcode == OpcodeNoOp:
	case p.TAL.Opcode == OpcodeLast:
		c.peerLast, c.ackNow = true, true // it may be the last thing that is said here
		c.shut(fmt.Errorf("%w by the peer", ErrShutdown))
		c.noticed()
	case p.TAL.Opcode.reply():
		c.reply(p)
	case c.ordered && (c.blocked.n > 0 || c.mustWait(p)):
		c.block(p, raw)
	default:
		c.request(p)
	}
}

// flush does what is to be done now: it sends, and tells the host.
func (c *Connection) flush(now time.Duration) {
	if c.ready && !c.closed && !c.removed {
		c.ready = false
		c.retry()
	}
	if !c.closed {
		c.unblock()
	}
	c.drain()
	if c.broken != nil && !c.removed {
		if c.connected && c.answers.n > 0 && c.tx.room(true) {
			c.send(content{kind: reply, answer: c.nextAnswer()}, now) // the peer learns why, if this one arrives
		}
		err := rdma.ErrFlushed
		if errors.Is(c.broken, rdma.ErrRetryExceeded) {
			err = c.broken
		}
		c.end(err, c.broken)
	}
	if !c.connected || c.removed {
		return
	}
	c.again(now)
	if c.broken != nil {
		c.touch()
		return
	}
	c.transmitNew(now)
	c.acknowledge(now)
	if c.full && c.queue.n < c.transactions && !c.draining && !c.held {
		c.full = false
		c.core.host.Room(c)
	}
	c.drained(now)
}
