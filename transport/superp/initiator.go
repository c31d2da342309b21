package superp

import (
	"encoding/binary"

	"github.com/fared/fared/transport/rdma"
)

// transaction is a local transaction: one operation, or several small ones in a single packet.
type transaction struct {
	xid        uint16
	active     bool
	opcode     Opcode
	n          int // number of operations
	left       int // of them, number of incomplete ones
	unreported int // of them, number not reported to the host
	packets    int
	next       int // next packet to be sent for the first time
	flying     int // packets in flight
	ops        [MaxOps]outgoing
}

// outgoing is an operation of a local transaction.
type outgoing struct {
	op       *rdma.Op // nil once reported to the host
	got      int      // bytes read
	finished bool
	err      error // the target's error; a WRITE or SEND completes when ack_xid covers its transaction
}

// answered reports whether operations complete by replies, rather than by ack_xid.
func (o Opcode) answered() bool {
	switch o {
	case OpcodeRead, OpcodeKeyedRead, OpcodeCompareSwap, OpcodeFetchAdd:
		return true
	}
	return false
}

func opcodeOf(op *rdma.Op) Opcode {
	switch op.Kind {
	case rdma.OpWrite:
		if op.Key != 0 {
			return OpcodeKeyedWrite
		}
		return OpcodeWrite
	case rdma.OpRead:
		if op.Key != 0 {
			return OpcodeKeyedRead
		}
		return OpcodeRead
	case rdma.OpCompareSwap:
		return OpcodeCompareSwap
	case rdma.OpFetchAdd:
		return OpcodeFetchAdd
	}
	return OpcodeSend
}

// begin starts the next transaction from queued operations. It returns nil if the queue is empty or tal_trans_window is full.
func (c *Connection) begin() *transaction {
	if c.queue.n == 0 || int(c.outNext-c.outUna) >= c.transactions {
		return nil
	}
	t := &c.out[int(c.outNext)&(len(c.out)-1)]
	if t.active {
		return nil // complete at the target, but some of its replies are missing
	}
	first := c.queue.pop()
	*t = transaction{xid: c.outNext, active: true, opcode: opcodeOf(first), n: 1, packets: 1}
	t.ops[0].op = first
	c.outNext++
	c.outstanding++
	switch size := len(first.Local); t.opcode {
	case OpcodeSend:
		size += len(first.Head)
		if t.packets = max(1, (size+c.payload-1)/c.payload); t.packets == 1 {
			t.opcode = OpcodeSendQP // a whole message; longer ones are Sends, which have offsets
		}
	case OpcodeWrite, OpcodeKeyedWrite:
		if t.packets = max(1, (size+c.payload-1)/c.payload); t.packets == 1 {
			c.gather(t, size)
		}
	default:
		c.gather(t, 0)
	}
	t.left, t.unreported = t.n, t.n
	return t
}

// gather adds queued operations to a transaction's packet. They must be next in the queue, have the same opcode, and WRITEs the same size,
// since the blocks of a packet have equal lengths.
func (c *Connection) gather(t *transaction, block int) {
	form, _ := t.opcode.form()
	for c.queue.n > 0 && t.n < c.opsPerPacket && (t.n+1)*(block+form.header) <= c.payload {
		op := *c.queue.at(0)
		if opcodeOf(op) != t.opcode || block > 0 && len(op.Local) != block || form.data && len(op.Local) != block {
			return
		}
		t.ops[t.n].op = c.queue.pop()
		t.n++
	}
}

// buildRequest appends a request's operation headers to b, and returns the data that follows them.
func (c *Connection) buildRequest(b []byte, t *transaction, seqno int) (head, payload []byte) {
	keyed := t.opcode&0x40 != 0
	op := t.ops[0].op
	switch t.opcode {
	case OpcodeSendQP:
		o := SendQPOp{QP: uint32(c.remoteCID)}
		return append(o.append(b), op.Head...), op.Local
	case OpcodeSend:
		start := seqno * c.payload
		o := SendOp{Offset: uint32(start)}
		b = o.append(b)
		from, to := start-len(op.Head), min(start-len(op.Head)+c.payload, len(op.Local))
		if seqno == 0 {
			b, from = append(b, op.Head...), 0
		}
		return b, op.Local[from:to]
	case OpcodeWrite, OpcodeKeyedWrite:
		if t.n == 1 {
			from := seqno * c.payload
			o := WriteOp{Address: op.Remote + uint64(from), Key: op.Key}
			return o.append(b, keyed), op.Local[from:min(from+c.payload, len(op.Local))]
		}
		for i := range t.n {
			o := WriteOp{Address: t.ops[i].op.Remote, Key: t.ops[i].op.Key}
			b = o.append(b, keyed)
		}
		for i := range t.n {
			b = append(b, t.ops[i].op.Local...)
		}
		return b, nil
	}
	for i := range t.n {
		op := t.ops[i].op
		switch t.opcode {
		case OpcodeRead, OpcodeKeyedRead:
			o := ReadOp{Address: op.Remote, Length: uint32(len(op.Local)), Key: op.Key}
			b = o.append(b, keyed)
		default:
			o := AtomicOp{Address: op.Remote, Key: op.Key, Compare: op.Compare, Swap: op.Swap}
			b = o.append(b, t.opcode == OpcodeCompareSwap)
		}
	}
	return b, nil
}

// dataBytes returns the number of bytes of operations' data in a request's packet.
func (c *Connection) dataBytes(t *transaction, seqno int) int {
	size := 0
	switch t.opcode {
	case OpcodeSend, OpcodeSendQP:
		size = len(t.ops[0].op.Head) + len(t.ops[0].op.Local)
	case OpcodeWrite, OpcodeKeyedWrite:
		size = t.n * len(t.ops[0].op.Local)
	}
	if t.packets == 1 {
		return size
	}
	return min(c.payload, size-seqno*c.payload)
}

// acknowledged handles an ack_xid of the peer. It reports whether the ack_xid is new.
func (c *Connection) acknowledged(xid uint16) (news bool) {
	n := xid + 1 - c.outUna
	if n == 0 || int(n) > int(c.outNext-c.outUna) {
		return false // old, or for a transaction that was never sent
	}
	for ; n > 0; n-- {
		t := &c.out[int(c.outUna)&(len(c.out)-1)]
		if t.active && t.xid == c.outUna && t.next < t.packets {
			c.core.count.stale++ // acknowledged before it was sent: a protocol violation
			return true
		}
		c.outUna++
		if !t.active || t.opcode.answered() {
			continue
		}
		for i := range t.n {
			c.finish(t, i, t.ops[i].err)
		}
	}
	return true
}

// finish completes a local operation, once. On an ordered connection operations are reported in the order of posting, since an ack_xid may
// overtake the reply to an earlier read.
func (c *Connection) finish(t *transaction, i int, err error) {
	x := &t.ops[i]
	if x.op == nil || x.finished {
		return
	}
	x.finished, x.err = true, err
	if t.left--; t.left == 0 {
		c.landed(t)
	}
	if !c.ordered {
		c.report(t, i)
		return
	}
	for c.head != c.outNext {
		t := &c.out[int(c.head)&(len(c.out)-1)]
		for i := range t.n {
			switch x := &t.ops[i]; {
			case x.op == nil:
			case x.finished:
				c.report(t, i)
			default:
				return
			}
		}
		c.head++
	}
}

// report reports an operation to the host, and frees the transaction after its last operation.
func (c *Connection) report(t *transaction, i int) {
	x := t.ops[i]
	t.ops[i] = outgoing{}
	if t.unreported--; t.unreported == 0 {
		t.active = false
		c.outstanding--
	}
	c.complete(x.op, x.err)
}

// landed marks all packets of a transaction as received by the target, so that they are not retransmitted. The packet delivery layer may
// not know this yet (its bitmap has 32 bits).
func (c *Connection) landed(t *transaction) {
	for psn := c.tx.una; t.flying > 0 && psn != c.tx.nxt; psn++ {
		if r := c.tx.at(psn); !r.acked && r.content.tx == t {
			c.tx.arrived(r, c)
		}
	}
	c.tx.advance()
}

// reply handles a packet that answers a local transaction.
func (c *Connection) reply(p *Packet) {
	t := &c.out[int(p.TAL.XID)&(len(c.out)-1)]
	if !t.active || t.xid != p.TAL.XID {
		c.core.count.stale++
		return
	}
	if t.opcode.answered() && t.next > 0 {
		c.landed(t) // operations may complete one by one, after which the request must not be rebuilt
	}
	for i := range int(p.TAL.NumOps) {
		if !c.replyOp(t, p, i) {
			c.core.count.malformed++
		}
		if !t.active {
			return
		}
	}
}

// replyOp handles one operation of a reply. It returns false if the operation is invalid.
func (c *Connection) replyOp(t *transaction, p *Packet, i int) bool {
	switch p.TAL.Opcode {
	case OpcodeError:
		e := p.Error(i)
		n := int(e.Op)
		if int(e.Seqno) >= t.next || n >= t.n {
			return false
		}
		if t.opcode.answered() {
			c.finish(t, n, remoteError(e.Major, e.Minor))
		} else if t.ops[n].err == nil {
			t.ops[n].err = remoteError(e.Major, e.Minor)
		}
	case OpcodeReadResponse:
		o := p.ReadResponse(i)
		n, block := int(o.Op), p.Block(i)
		if t.opcode&^0x40 != OpcodeRead || o.Seqno != 0 || t.next == 0 || n >= t.n {
			return false
		}
		x := &t.ops[n]
		if x.op == nil || x.finished {
			return true // already failed or complete
		}
		if uint64(o.Offset)+uint64(len(block)) > uint64(len(x.op.Local)) {
			return false
		}
		copy(x.op.Local[o.Offset:], block)
		if x.got += len(block); x.got >= len(x.op.Local) {
			c.finish(t, n, nil)
		}
	case OpcodeAtomicResponse:
		o := p.AtomicResponse(i)
		n := int(o.Op)
		if t.opcode != OpcodeCompareSwap && t.opcode != OpcodeFetchAdd || o.Seqno != 0 || t.next == 0 || n >= t.n {
			return false
		}
		if op := t.ops[n].op; op != nil && !t.ops[n].finished {
			binary.NativeEndian.PutUint64(op.Local, o.Was)
			c.finish(t, n, nil)
		}
	}
	return true
}

// abandon completes all incomplete operations: sent ones with err, the others with ErrFlushed.
func (c *Connection) abandon(err error) {
	for xid := c.outNext - uint16(len(c.out)); xid != c.outNext; xid++ {
		t := &c.out[int(xid)&(len(c.out)-1)]
		if !t.active || t.xid != xid {
			continue
		}
		for i := range t.n {
			if x := t.ops[i]; x.op != nil {
				if !x.finished {
					x.err = err
				}
				c.complete(x.op, x.err)
			}
			t.ops[i] = outgoing{}
		}
		t.active = false
	}
	c.outstanding, c.current = 0, nil
	for c.queue.n > 0 {
		c.complete(c.queue.pop(), rdma.ErrFlushed)
	}
	c.outUna, c.head = c.outNext, c.outNext
	// Packets in flight must not be rebuilt from memory that has been returned to its owners: No-ops take their psns.
	for psn := c.tx.una; psn != c.tx.nxt; psn++ {
		if r := c.tx.at(psn); r.content.tx != nil {
			r.content.tx, r.content.kind = nil, noOp
		}
	}
}
