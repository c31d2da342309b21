package superp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/fared/fared/transport/rdma"
)

// Connection is a SUPERp connection, an rdma.Channel. It is identified by local address, remote address, local cid and
// remote cid. The caller holds the device's lock in all methods.
//
// Its parts are the two halves of the packet delivery layer (sender and receiver), the two roles of the transaction
// layer (initiator and target), the paths, the schedule of acknowledgements and the state of a shutdown. The connection
// builds and sends packets for them.
type Connection struct {
	common
	connected bool
	held      bool   // configured by an agent, not started yet
	observe   func() // notifies the agent of a change of state
	failed    error  // the error that ended it

	paths     paths
	tx        sender
	rx        receiver
	early     [][]byte // orderedIn: packets received ahead of a missing one, by psn
	initiator initiator
	target    target
	acks      acks
	shutdown  shutdown

	full bool // Post has returned false: a call of Room is due
	turn int  // consecutive packets of replies, then of requests

	// A transaction may wait at the peer although every packet is acknowledged: a probe then checks that the peer is
	// alive.
	lastActivity time.Duration // time of the latest received packet or sent probe
	probe        bool

	marked bool // a packet has arrived with "congestion experienced" since the latest one was sent
	echoes bool // both ends use echo

	dirty bool
	wake  time.Duration // time of its timer in the core; 0: none
	index int           // in the core's timers; -1: not there
}

// common is the state that the parts of a connection share.
type common struct {
	core      *Core
	cfg       *Config // the core's, without the peer's limits
	cid       uint16
	remoteCID uint16
	remote    netip.Addr
	class     uint8 // traffic class, without ECN
	// Send keys: the peer's Sends carry sendKey, this end's remoteKey. 0 on connections of an agent, which knows none.
	sendKey, remoteKey uint32
	ordered            bool // this end's packets are delivered, and its transactions executed, in order
	orderedIn          bool // the same of the peer's
	closed             bool // by Close: no further calls to the host
	removed            bool
	broken             error // the error with which the next flush ends the connection
	kept               int   // received packets, or pieces of them, that wait in buffers
	violations         uint64

	// tail is the minimum of data bytes in the last one of a transaction's packets. Ethernet pads shorter ones in SUNH
	// frames, and the padding would be data.
	tail int
	lite bool // SUPERp-lite: packets without PDL

	// Negotiated limits: the minimum of both ends; the local values until Connect.
	payload      int
	transactions int
	opsPerPacket int
}

// keep copies bytes of a packet that must wait; free releases the copy.
func (c *common) keep(b []byte) []byte {
	c.kept++
	c.core.pools.keep(c.class, 1)
	return c.core.copyOf(b)
}

func (c *common) free(b []byte) {
	c.kept--
	c.core.pools.keep(c.class, -1)
	c.core.release(b)
}

// receiveWindow returns the window to offer to the peer: Parameters.ReceiveWindow less the packets that wait, since
// they occupy buffers, and at most the buffers that the connections of its class together have left; but at least one
// packet.
func (c *common) receiveWindow() int {
	p := &c.cfg.Parameters
	return max(1, min(p.ReceiveWindow-c.kept, c.core.pools.left(c.class, p.Buffers)))
}

// cut returns the part of size bytes that packet seqno of a transaction carries.
func (c *common) cut(size, seqno int) (from, to int) {
	begin := func(seqno int) int {
		at := min(seqno*c.payload, size)
		if rest := size - at; seqno > 0 && rest > 0 && rest < c.tail {
			at = size - c.tail
		}
		return at
	}
	return begin(seqno), begin(seqno + 1)
}

// maxReplies is the maximum number of reply packets of a transaction for which memory is reserved: with default
// parameters, it suffices for all.
const maxReplies = 1024

func newConnection(core *Core, remote netip.Addr, cid uint16, class uint8, out, in bool) *Connection {
	p := &core.cfg.Parameters
	n := ceilPow2(p.Transactions)
	c := &Connection{
		common: common{core: core, cfg: &core.cfg, cid: cid, remote: remote, class: class, ordered: out, orderedIn: in, payload: core.cfg.Payload, transactions: p.Transactions,
			opsPerPacket: p.OpsPerPacket},
		tx: newSender(*p, core.join(remote, class), &core.count.windowCuts), rx: newReceiver(p.ReceiveWindow), acks: acks{lastXID: 0xffff, confirmed: 0xffff}, index: -1,
	}
	c.tail, c.lite = core.cfg.SUNH.least(8), core.cfg.SUNH.Lite
	c.tx.begin(core.cfg.FirstPSN)
	c.rx.next, c.rx.high = core.cfg.FirstPSN, core.cfg.FirstPSN
	c.initiator = initiator{common: &c.common, tx: &c.tx, deliveries: c, out: make([]transaction, n)}
	c.target = target{common: &c.common, channel: c, in: make([]incoming, n), due: 0xffff}
	words := (p.PacketsPerTransaction + 63) / 64
	replies := (min(p.PacketsPerTransaction*p.OpsPerPacket, maxReplies) + 63) / 64
	seen := make([]uint64, n*(words+replies))
	for i := range n {
		c.target.in[i].seen, seen = seen[:words:words], seen[words:]
		c.initiator.out[i].replies.seen, seen = seen[:0:replies], seen[replies:]
	}
	if in {
		c.early = make([][]byte, ceilPow2(p.ReceiveWindow))
	}
	return c
}

// Local is encoded as version, flags (bit 0: ordered, bit 1: orderedIn, bit 2: echoes congestion marks), cid u16, head
// size u8, operations per packet u8, payload u16, tal_trans_window u16, packets per transaction u16, pdl_receive_win
// u16, key of Sends to this end u32, little endian. SUPERp does not define connection management, so this encoding is
// private; an Agent assumes that the peer has its own parameters.
const (
	localLen     = 18
	localVersion = 2 // 1: keys in private opcodes, XIDs of requests only
)

// Local returns the parameters for the peer's Connect.
func (c *Connection) Local() []byte {
	b := c.describe(c.cid, c.ordered, c.orderedIn)
	b[1] |= 4
	return b
}

// describe returns the Local of an end with this end's parameters, and a given cid and order of both directions.
func (c *Connection) describe(cid uint16, out, in bool) []byte {
	le, p := binary.LittleEndian, &c.cfg.Parameters
	b := []byte{localVersion, 0}
	if out {
		b[1] = 1
	}
	if in {
		b[1] |= 2
	}
	b = append(le.AppendUint16(b, cid), byte(c.cfg.HeadSize), byte(p.OpsPerPacket))
	b = le.AppendUint16(b, uint16(c.cfg.Payload))
	b = le.AppendUint16(b, uint16(p.Transactions))
	b = le.AppendUint16(b, uint16(p.PacketsPerTransaction))
	return le.AppendUint32(le.AppendUint16(b, uint16(p.ReceiveWindow)), c.sendKey)
}

// Connect sets the peer's Local and the paths.
func (c *Connection) Connect(remote []byte, paths []rdma.Path) error {
	if len(remote) > 0 && remote[0] != localVersion {
		return fmt.Errorf("superp: peer's connection data is of version %d, this end has version %d: run the same release at both ends", remote[0], localVersion)
	}
	if len(remote) != localLen {
		return fmt.Errorf("superp: peer's connection data %x has %d bytes instead of %d", remote, len(remote), localLen)
	}
	le, p := binary.LittleEndian, &c.cfg.Parameters
	payload, transactions := int(le.Uint16(remote[6:])), int(le.Uint16(remote[8:]))
	packets, ops := int(le.Uint16(remote[10:])), int(remote[5])
	window := le.Uint16(remote[12:])
	switch {
	case c.connected || c.removed:
		return errors.New("superp: connected or closed already")
	case remote[1]&1 != 0 != c.orderedIn || remote[1]&2 != 0 != c.ordered:
		return errors.New("superp: one end orders a direction of the connection, the other does not; configure each direction alike at both ends")
	case int(remote[4]) != c.cfg.HeadSize:
		return fmt.Errorf("superp: heads have %d bytes at this end, %d at the peer", c.cfg.HeadSize, remote[4])
	case payload < 64 || transactions < 1 || transactions > 1024 || ops < 1 || ops > MaxOps || packets < 1 || window < 1:
		return fmt.Errorf("superp: peer's connection data %x is invalid", remote)
	case min(packets, p.PacketsPerTransaction)*min(payload, c.payload) < c.cfg.maxOp()+c.cfg.HeadSize:
		return fmt.Errorf("superp: peer takes transactions of %d packets of %d bytes, operations here have up to %d", packets, payload,
			c.cfg.maxOp())
	case len(paths) == 0:
		return errors.New("superp: no path")
	case c.tail > 0 && min(ops, p.OpsPerPacket) < 2:
		return errors.New("superp: SUNH needs two operations in a packet, for short WRITEs; the peer takes one")
	}
	if s := &c.cfg.SUNH; s.enabled() && s.Device == "" {
		for _, p := range paths {
			if p.Device == "" {
				return fmt.Errorf("superp: slot %d of plane %q names no device, by which SUNH frames would leave; use planes that do not spray, or a device that steers SUNH", p.Slot, p.Plane)
			}
		}
	}
	c.echoes = remote[1]&4 != 0
	c.remoteCID, c.remoteKey = le.Uint16(remote[2:]), le.Uint32(remote[14:])
	c.payload, c.transactions, c.opsPerPacket = min(payload, c.payload), min(transactions, p.Transactions), min(ops, p.OpsPerPacket)
	c.tx.offered = uint32(window)
	c.paths.set(paths)
	c.connected = true
	c.touch()
	return nil
}

// CID returns the local connection identifier, which the peer puts into dcid.
func (c *Connection) CID() uint16 { return c.cid }

// Remote returns the peer's address.
func (c *Connection) Remote() netip.Addr { return c.remote }

// Ordered reports whether this end's transactions are executed in order.
func (c *Connection) Ordered() bool { return c.ordered }

// TrafficClass returns the traffic class of the connection's packets, without ECN.
func (c *Connection) TrafficClass() uint8 { return c.class }

// Err returns the error that has ended the connection, or nil.
func (c *Connection) Err() error { return c.failed }

// SetPaths replaces the paths. Packets in flight on paths that are no longer live are retransmitted on other paths.
func (c *Connection) SetPaths(paths []rdma.Path) {
	if len(paths) == 0 {
		panic("superp: no path")
	}
	if c.removed {
		return
	}
	if c.paths.set(paths) {
		c.tx.strand(c.paths.usable)
	}
	c.touch()
}

// Post accepts an operation. It returns false if the queue has reached the limit of outstanding transactions.
func (c *Connection) Post(op *rdma.Op) bool {
	if len(op.Local) > c.cfg.maxOp() {
		panic(fmt.Sprintf("superp: operation of %d bytes, above the limit of %d", len(op.Local), c.cfg.maxOp()))
	}
	if op.Kind == rdma.OpSend && len(op.Head) != c.cfg.HeadSize {
		panic(fmt.Sprintf("superp: head of %d bytes instead of the configured %d", len(op.Head), c.cfg.HeadSize))
	}
	if least := c.cfg.SUNH.MinMessage(); op.Kind == rdma.OpSend && len(op.Head)+len(op.Local) < least {
		panic(fmt.Sprintf("superp: message of %d bytes, less than %d, in SUNH", len(op.Head)+len(op.Local), least))
	}
	if op.Kind == rdma.OpWrite && len(op.Local) < c.cfg.SUNH.MinWrite() {
		c.initiator.complete(op, ErrShort)
		c.touch()
		return true
	}
	if c.shutdown.draining || c.removed {
		c.initiator.complete(op, rdma.ErrFlushed)
		c.touch()
		return true
	}
	if c.held || c.initiator.full() {
		c.full = true
		return false
	}
	c.initiator.queue.push(op)
	c.touch()
	return true
}

// Ready notifies the connection that a message for which Host.Admit returned NotReady may be admitted now.
func (c *Connection) Ready() {
	c.target.ready = true
	c.touch()
}

// drain reports completions to the host. It may be reentered, since the host may close the connection meanwhile.
func (c *Connection) drain() {
	for c.initiator.done.n > 0 {
		x := c.initiator.done.pop()
		c.core.host.Complete(x.op, x.err)
	}
}

// touch schedules the connection for the next Flush.
func (c *Connection) touch() {
	if !c.dirty {
		c.dirty = true
		c.core.dirty = append(c.core.dirty, c)
	}
}

// receive handles a decoded packet.
func (c *Connection) receive(p *Packet, raw []byte, now time.Duration) {
	c.lastActivity = now
	if c.lite {
		c.receiveLite(p, raw)
		return
	}
	if !c.tx.ack(&p.PDL, now, c) {
		c.violation(ViolationAckPSN, p)
		return // its psn cannot be trusted either
	}
	if c.echoes && p.TAL.Reserved&echo != 0 {
		c.core.count.echoes++
		c.tx.flight.Marked(now-c.tx.rtt.Smooth(), now)
	}
	// A No-op is acknowledged if its ack_xid is new, or if it acknowledges nothing new although nothing is outstanding:
	// then it is a probe.
	news := c.initiator.acknowledged(p) || !c.tx.news && c.tx.una == c.tx.nxt
	c.noticeLast()
	switch c.rx.judge(p.PDL.PSN) {
	case outside:
		c.violation(ViolationPSN, p)
		return
	case duplicate:
		c.core.count.duplicates++
		c.acks.now, c.rx.plain = true, true // the peer does not know that the packet has arrived
		return
	}
	gap := c.rx.holes()
	inOrder := c.rx.take(p.PDL.PSN)
	if p.TAL.Opcode != OpcodeNoOp || news {
		c.rx.pending++
		c.acks.schedule(now + c.cfg.Timing.AckDelay)
		// A new hole is reported at once, older ones every few packets.
		if c.rx.pending >= c.cfg.Parameters.Stretch || c.rx.holes() && (!gap || c.rx.pending >= 4) {
			c.acks.now = true
		}
	}
	switch o := p.TAL.Opcode; {
	case !c.orderedIn:
		c.packet(p, raw)
	case !inOrder && (o.reply() || o == OpcodeNoOp):
		// A No-op has no effect on order, and a reply must not wait: its psn is acknowledged at once, so any later
		// packet may carry an ack_xid that depends on it.
		c.packet(p, raw)
	case !inOrder:
		c.early[p.PDL.PSN&uint32(len(c.early)-1)] = c.keep(raw)
	default:
		c.packet(p, raw)
		for psn := p.PDL.PSN + 1; psn != c.rx.next && c.broken == nil && !c.removed; psn++ {
			slot := &c.early[psn&uint32(len(c.early)-1)]
			kept := *slot
			if kept == nil {
				continue
			}
			*slot = nil
			q, _ := Decode(kept) // cannot fail: decoded on arrival
			c.packet(&q, kept)
			c.free(kept)
		}
	}
}

// receiveLite handles a packet of SUPERp-lite. A No-op that acknowledges no operation may be one whose sender waits, so
// it is acknowledged at once; but not more than maxAnswers in a row, since the peer might do the same.
func (c *Connection) receiveLite(p *Packet, raw []byte) {
	news := c.initiator.acknowledged(p)
	c.noticeLast()
	switch {
	case p.TAL.Opcode != OpcodeNoOp:
		c.acks.answers = 0
	case !news && c.acks.answers < maxAnswers && int16(p.TAL.XID-c.target.inNext) >= 0:
		c.acks.answers++
		c.acks.now = true
	}
	c.packet(p, raw)
}

// noticeLast notices that ack_xid covers Last NULL.
func (c *Connection) noticeLast() {
	if c.initiator.lastAcked && !c.shutdown.lastAcked {
		c.shutdown.lastAcked = true
		c.noticed()
	}
}

// packet handles a packet from the packet delivery layer, which delivers each packet once, and on an ordered connection
// in the order of psns.
func (c *Connection) packet(p *Packet, raw []byte) {
	switch {
	case p.TAL.Opcode == OpcodeNoOp:
		c.target.null(p)
	case p.TAL.Opcode == OpcodeLast:
		if !c.target.null(p) {
			return
		}
		c.shutdown.peerLast, c.acks.now = true, true // this may be the last packet that this end sends
		c.shut(fmt.Errorf("%w by the peer", ErrShutdown))
		c.noticed()
	case p.TAL.Opcode.reply():
		c.initiator.reply(p)
	default:
		c.target.receive(p, raw)
	}
}

// flush sends all that is due, and reports to the host.
func (c *Connection) flush(now time.Duration) {
	if c.target.ready && !c.closed && !c.removed {
		c.target.ready = false
		c.target.retry()
	}
	if !c.closed {
		c.target.unblock()
	}
	c.reportStalls()
	c.drain()
	if c.broken != nil && !c.removed {
		if c.connected && c.target.answers.n > 0 && c.tx.room(true) && c.tx.reuse.allows(now) {
			c.send(content{kind: reply, answer: c.target.nextAnswer()}, now) // if this packet arrives, the peer learns the reason
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
	if c.full && !c.initiator.full() && !c.shutdown.draining && !c.held {
		c.full = false
		c.core.host.Room(c)
	}
	c.drained(now)
}
