package superp

import (
	"encoding/binary"
	"time"

	"github.com/fared/fared/transport/rdma"
)

// initiator is the state of the local transactions.
type initiator struct {
	*common
	tx         *sender
	deliveries acker // receives the packets that a reply proves to have arrived

	queue       fifo[*rdma.Op]
	out         []transaction // by xid; its length is a power of two
	outUna      uint16        // oldest that ack_xid does not cover
	outNext     uint16
	head        uint16 // ordered: oldest not completely reported to the host
	outstanding int
	current     *transaction  // partly sent
	lastAcked   bool          // ack_xid covers Last NULL
	oldest      uint16        // no transaction before it is incomplete
	lastSent    time.Duration // time of Last NULL; 0: not sent
	packets     int           // SUPERp-lite: of incomplete transactions, with those of their replies
	late        time.Duration // by which all timeouts of transactions are put off
	done        fifo[completion]
}

// completion is the result of an operation that the host has not received yet.
type completion struct {
	op  *rdma.Op
	err error
}

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
	begun      time.Duration
	cost       int // SUPERp-lite: part of initiator.packets
	replies    seqnos
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
	case OpcodeRead, OpcodeCompareSwap, OpcodeFetchAdd:
		return true
	}
	return false
}

func opcodeOf(op *rdma.Op) Opcode {
	switch op.Kind {
	case rdma.OpWrite:
		return OpcodeWrite
	case rdma.OpRead:
		return OpcodeRead
	case rdma.OpCompareSwap:
		return OpcodeCompareSwap
	case rdma.OpFetchAdd:
		return OpcodeFetchAdd
	}
	return OpcodeSend
}

// full reports whether the queue has reached the limit of outstanding transactions.
func (ini *initiator) full() bool { return ini.queue.n >= ini.transactions }

// idle reports whether no operation is incomplete.
func (ini *initiator) idle() bool { return ini.outstanding == 0 && ini.queue.n == 0 }

func (ini *initiator) complete(op *rdma.Op, err error) { ini.done.push(completion{op, err}) }

// pending returns the number of incomplete operations.
func (ini *initiator) pending() int {
	n := ini.queue.n
	for i := range ini.out {
		if ini.out[i].active {
			n += ini.out[i].unreported
		}
	}
	return n
}

// nextRequest returns the next packet of a transaction, or false if none is queued or tal_trans_window is full.
func (ini *initiator) nextRequest(now time.Duration) (content, bool) {
	t := ini.current
	if t == nil {
		if t = ini.begin(now); t == nil {
			return content{}, false
		}
	}
	n := t.next
	t.next++
	t.flying++
	if ini.current = t; t.next == t.packets {
		ini.current = nil
	}
	return content{kind: request, tx: t, seqno: n}, true
}

// begin starts the next transaction from queued operations. It returns nil if the queue is empty or tal_trans_window is
// full.
func (ini *initiator) begin(now time.Duration) *transaction {
	// The last eighth of the window is reserved for No-ops, so that acknowledgements need no XID that has been used
	// already.
	if ini.queue.n == 0 || int(ini.outNext-ini.outUna) >= ini.transactions-ini.transactions/8 {
		return nil
	}
	t := &ini.out[int(ini.outNext)&(len(ini.out)-1)]
	if t.active {
		return nil // complete at the target, but some of its replies are missing
	}
	if ini.lite && ini.packets > 0 && ini.packets+ini.cost(*ini.queue.at(0)) > ini.cfg.Parameters.Window {
		return nil
	}
	first := ini.queue.pop()
	*t = transaction{xid: ini.outNext, active: true, opcode: opcodeOf(first), n: 1, packets: 1, begun: now - ini.late, replies: t.replies.reset()}
	t.ops[0].op = first
	ini.outNext++
	ini.outstanding++
	switch size := len(first.Local); t.opcode {
	case OpcodeSend:
		size += len(first.Head)
		if t.packets = max(1, (size+ini.payload-1)/ini.payload); t.packets == 1 {
			t.opcode = OpcodeSendQP // a whole message; longer ones are Sends, which have offsets
		}
	case OpcodeWrite:
		if t.packets = max(1, (size+ini.payload-1)/ini.payload); t.packets == 1 {
			ini.gather(t, size)
		}
	default:
		ini.gather(t, 0)
	}
	t.left, t.unreported = t.n, t.n
	for i := range t.n {
		t.cost += ini.cost(t.ops[i].op)
	}
	ini.packets += t.cost
	return t
}

// cost returns the number of packets that an operation alone needs in both directions.
func (ini *initiator) cost(op *rdma.Op) int { return 2 + (len(op.Head)+len(op.Local))/ini.payload }

// nextNull assigns the XID of a No-op or Last NULL: a transaction without operations, which the peer acknowledges by
// ack_xid like every other. If tal_trans_window is full, it returns false and the latest acknowledged XID.
func (ini *initiator) nextNull(o Opcode) (xid uint16, ok bool) {
	if !ini.mayNull() {
		return ini.outUna - 1, false
	}
	t := &ini.out[int(ini.outNext)&(len(ini.out)-1)]
	if ini.head == ini.outNext {
		ini.head++
	}
	*t = transaction{xid: ini.outNext, opcode: o, packets: 1, next: 1, replies: t.replies.reset()}
	ini.outNext++
	return t.xid, true
}

// mayNull reports whether an XID is free.
func (ini *initiator) mayNull() bool {
	return !ini.out[int(ini.outNext)&(len(ini.out)-1)].active && int(ini.outNext-ini.outUna) < ini.transactions
}

// gather adds queued operations to a transaction's packet. They must be next in the queue, have the same opcode, and
// WRITEs the same size, since the blocks of a packet have equal lengths.
func (ini *initiator) gather(t *transaction, block int) {
	form, _ := t.opcode.form()
	for ini.queue.n > 0 && t.n < ini.opsPerPacket && (t.n+1)*(block+form.header) <= ini.payload {
		op := *ini.queue.at(0)
		if opcodeOf(op) != t.opcode || block > 0 && len(op.Local) != block || form.data && len(op.Local) != block {
			return
		}
		t.ops[t.n].op = ini.queue.pop()
		t.n++
	}
}

// buildRequest appends a request's operation headers to b, and returns the data that follows them.
func (ini *initiator) buildRequest(b []byte, t *transaction, seqno int) (head, payload []byte) {
	op := t.ops[0].op
	switch t.opcode {
	case OpcodeSendQP:
		o := SendQPOp{QP: uint32(ini.remoteCID)}
		return append(o.append(b), op.Head...), op.Local
	case OpcodeSend:
		from, to := ini.cut(len(op.Head)+len(op.Local), seqno)
		o := SendOp{Key: ini.remoteKey, Offset: uint32(from)}
		b = o.append(b)
		if seqno == 0 {
			return append(b, op.Head...), op.Local[:to-len(op.Head)]
		}
		return b, op.Local[from-len(op.Head) : to-len(op.Head)]
	case OpcodeWrite:
		if ini.numOps(t) == 1 {
			from, to := ini.cut(len(op.Local), seqno)
			o := WriteOp{Address: rdma.FlatAddress(op.Key, op.Remote+uint64(from))}
			return o.append(b), op.Local[from:to]
		}
		if t.n == 1 {
			o := WriteOp{Address: rdma.FlatAddress(op.Key, op.Remote)}
			b = o.append(o.append(b))
			return append(append(b, op.Local...), op.Local...), nil
		}
		for i := range t.n {
			o := WriteOp{Address: rdma.FlatAddress(t.ops[i].op.Key, t.ops[i].op.Remote)}
			b = o.append(b)
		}
		for i := range t.n {
			b = append(b, t.ops[i].op.Local...)
		}
		return b, nil
	}
	for i := range t.n {
		op := t.ops[i].op
		switch t.opcode {
		case OpcodeRead:
			o := ReadOp{Address: rdma.FlatAddress(op.Key, op.Remote), Length: uint32(len(op.Local))}
			b = o.append(b)
		default:
			o := AtomicOp{Address: op.Remote, Key: op.Key, Compare: op.Compare, Swap: op.Swap}
			b = o.append(b, t.opcode == OpcodeCompareSwap)
		}
	}
	return b, nil
}

// dataBytes returns the number of bytes of operations' data in a request's packet.
func (ini *initiator) dataBytes(t *transaction, seqno int) int {
	size := 0
	switch t.opcode {
	case OpcodeSend, OpcodeSendQP:
		size = len(t.ops[0].op.Head) + len(t.ops[0].op.Local)
	case OpcodeWrite:
		size = t.n * len(t.ops[0].op.Local)
	}
	if t.packets == 1 {
		return size
	}
	from, to := ini.cut(size, seqno)
	return to - from
}

// numOps returns the number of operations in a transaction's packets. Ethernet would pad a WRITE of a few bytes in a
// SUNH frame, and the peer would write the padding, too; so its packet contains the WRITE twice.
func (ini *initiator) numOps(t *transaction) int {
	if t.opcode == OpcodeWrite && t.n == 1 && t.packets == 1 && len(t.ops[0].op.Local) < ini.tail {
		return 2
	}
	return t.n
}

// acknowledged handles the ack_xid of a packet. It reports whether the ack_xid newly covers a transaction other than a
// No-op.
func (ini *initiator) acknowledged(p *Packet) (news bool) {
	xid := p.TAL.AckXID
	n := xid + 1 - ini.outUna
	if n == 0 || int(n) > int(ini.outNext-ini.outUna) {
		if int16(xid-ini.outNext) >= 0 {
			ini.violation(ViolationAckXID, p)
		}
		return false
	}
	for ; n > 0; n-- {
		t := &ini.out[int(ini.outUna)&(len(ini.out)-1)]
		if t.active && t.xid == ini.outUna && t.next < t.packets {
			ini.violation(ViolationAckXID, p)
			return true
		}
		if t.xid == ini.outUna {
			news = news || t.opcode != OpcodeNoOp
			ini.lastAcked = ini.lastAcked || t.opcode == OpcodeLast
		}
		ini.outUna++
		if !t.active || t.opcode.answered() {
			continue
		}
		for i := range t.n {
			ini.finish(t, i, t.ops[i].err)
		}
	}
	return news
}

// finish completes a local operation, once. On an ordered connection operations are reported in the order of posting,
// since an ack_xid may overtake the reply to an earlier read.
func (ini *initiator) finish(t *transaction, i int, err error) {
	x := &t.ops[i]
	if x.op == nil || x.finished {
		return
	}
	x.finished, x.err = true, err
	if t.left--; t.left == 0 {
		ini.packets -= t.cost
		ini.landed(t)
	}
	if !ini.ordered {
		ini.report(t, i)
		return
	}
	for ini.head != ini.outNext {
		t := &ini.out[int(ini.head)&(len(ini.out)-1)]
		for i := range t.n {
			switch x := &t.ops[i]; {
			case x.op == nil:
			case x.finished:
				ini.report(t, i)
			default:
				return
			}
		}
		ini.head++
	}
}

// report reports an operation to the host, and frees the transaction after its last operation.
func (ini *initiator) report(t *transaction, i int) {
	x := t.ops[i]
	t.ops[i] = outgoing{}
	if t.unreported--; t.unreported == 0 {
		t.active = false
		ini.outstanding--
	}
	ini.complete(x.op, x.err)
}

// landed marks all packets of a transaction as received by the target, so that they are not retransmitted. The packet
// delivery layer may not know this yet (its bitmap has 32 bits).
func (ini *initiator) landed(t *transaction) {
	for psn := ini.tx.una; t.flying > 0 && psn != ini.tx.nxt; psn++ {
		if r := ini.tx.at(psn); !r.acked && r.content.tx == t {
			ini.tx.arrived(r, ini.deliveries)
		}
	}
	ini.tx.advance()
}

// reply handles a packet that answers a local transaction.
func (ini *initiator) reply(p *Packet) {
	t := &ini.out[int(p.TAL.XID)&(len(ini.out)-1)]
	switch {
	case t.xid != p.TAL.XID || t.packets == 0 || t.opcode == OpcodeNoOp || t.opcode == OpcodeLast:
		ini.violation(ViolationReplyXID, p)
		return
	case t.next < t.packets:
		ini.violation(ViolationEarly, p)
		ini.spoil(t)
		return
	}
	if p.short(ini.lite) {
		ini.violation(ViolationBlock, p)
		return
	}
	if v := t.replies.take(p); v != 0 {
		ini.violation(v, p)
		return
	}
	if !t.active {
		return // its operations have completed: with the first error of a read of several packets, or by Close
	}
	if t.opcode.answered() {
		ini.landed(t) // operations may complete one by one, after which the request must not be rebuilt
	}
	for i := range int(p.TAL.NumOps) {
		if !ini.replyOp(t, p, i) {
			ini.violation(ViolationReply, p)
		}
		if !t.active {
			return
		}
	}
}

// spoil makes the operations of a transaction fail if ack_xid completes them: a dropped reply may have had their
// errors.
func (ini *initiator) spoil(t *transaction) {
	for i := range t.n {
		if x := &t.ops[i]; t.active && x.err == nil && !x.finished {
			x.err = rdma.ErrRemoteOperation
		}
	}
}

// timeoutAt returns the time at which the oldest incomplete transaction has taken too long; 0 means never.
func (ini *initiator) timeoutAt() time.Duration {
	limit := ini.cfg.Parameters.TransactionTimeout
	if limit == 0 {
		return 0
	}
	if t := ini.incomplete(); t != nil {
		return t.begun + ini.late + limit
	}
	if ini.lite && ini.lastSent != 0 && !ini.lastAcked {
		return ini.lastSent + ini.late + limit
	}
	return 0
}

// incomplete returns the oldest incomplete transaction, or nil.
func (ini *initiator) incomplete() *transaction {
	for ; ini.oldest != ini.outNext; ini.oldest++ {
		if t := &ini.out[int(ini.oldest)&(len(ini.out)-1)]; t.active && t.xid == ini.oldest && t.left > 0 {
			return t
		}
	}
	return nil
}

// timedOut reports the transaction of timeoutAt.
func (ini *initiator) timedOut() {
	e := ProtocolError{Kind: ViolationTimeout, Opcode: OpcodeLast, XID: ini.outNext - 1}
	if t := ini.incomplete(); t != nil {
		e.Opcode, e.XID = t.opcode, t.xid
	}
	ini.reportError(e)
}

// seqnos are the packets of a transaction's reply.
type seqnos struct {
	seen  []uint64 // bitmap
	top   int      // highest
	total int      // 0 until the packet with eom has arrived
}

// reset returns an empty set with the same memory.
func (s *seqnos) reset() seqnos { return seqnos{seen: s.seen[:0]} }

// take records a packet of the reply, or returns its protocol error.
func (s *seqnos) take(p *Packet) Violation {
	n := int(p.TAL.Seqno)
	for len(s.seen) <= n/64 {
		s.seen = append(s.seen, 0)
	}
	switch {
	case s.seen[n/64]>>(n%64)&1 != 0:
		return ViolationReplySeqno
	case s.total > 0 && p.TAL.EOM:
		return ViolationReplyEOM
	case s.total > 0 && n >= s.total || p.TAL.EOM && n < s.top:
		return ViolationReplySeqno
	}
	s.seen[n/64] |= 1 << (n % 64)
	s.top = max(s.top, n)
	if p.TAL.EOM {
		s.total = n + 1
	}
	return 0
}

// replyOp handles one operation of a reply. It returns false if the operation is invalid.
func (ini *initiator) replyOp(t *transaction, p *Packet, i int) bool {
	switch p.TAL.Opcode {
	case OpcodeError:
		e := p.Error(i)
		n := int(e.Op)
		if n == 1 && t.n == 1 && t.opcode == OpcodeWrite && ini.tail > 0 {
			n = 0 // of a WRITE that its packet contains twice
		}
		if int(e.Seqno) >= t.next || n >= t.n {
			return false
		}
		if t.opcode.answered() {
			ini.finish(t, n, remoteError(e.Major, e.Minor))
		} else if t.ops[n].err == nil {
			t.ops[n].err = remoteError(e.Major, e.Minor)
		}
	case OpcodeReadResponse:
		o := p.ReadResponse(i)
		n, block := int(o.Op), p.Block(i)
		if t.opcode != OpcodeRead || o.Seqno != 0 || t.next == 0 || n >= t.n {
			return false
		}
		x := &t.ops[n]
		if x.op == nil || x.finished {
			return true // already failed or complete
		}
		if rest := len(x.op.Local) - int(min(o.Offset, uint32(len(x.op.Local)))); (p.padded || ini.lite) && len(block) > rest {
			block = block[:rest]
		}
		if uint64(o.Offset)+uint64(len(block)) > uint64(len(x.op.Local)) {
			return false
		}
		copy(x.op.Local[o.Offset:], block)
		if x.got += len(block); x.got >= len(x.op.Local) {
			ini.finish(t, n, nil)
		}
	case OpcodeAtomicResponse:
		o := p.AtomicResponse(i)
		n := int(o.Op)
		if t.opcode != OpcodeCompareSwap && t.opcode != OpcodeFetchAdd || o.Seqno != 0 || t.next == 0 || n >= t.n {
			return false
		}
		if op := t.ops[n].op; op != nil && !t.ops[n].finished {
			binary.NativeEndian.PutUint64(op.Local, o.Was)
			ini.finish(t, n, nil)
		}
	}
	return true
}

// abandon completes all incomplete operations: sent ones with err, the others with ErrFlushed.
func (ini *initiator) abandon(err error) {
	for xid := ini.outNext - uint16(len(ini.out)); xid != ini.outNext; xid++ {
		t := &ini.out[int(xid)&(len(ini.out)-1)]
		if !t.active || t.xid != xid {
			continue
		}
		for i := range t.n {
			if x := t.ops[i]; x.op != nil {
				if !x.finished {
					x.err = err
				}
				ini.complete(x.op, x.err)
			}
			t.ops[i] = outgoing{}
		}
		t.active = false
	}
	ini.outstanding, ini.packets, ini.current = 0, 0, nil
	for ini.queue.n > 0 {
		ini.complete(ini.queue.pop(), rdma.ErrFlushed)
	}
	ini.outUna, ini.head, ini.oldest = ini.outNext, ini.outNext, ini.outNext
	// Packets in flight must not be rebuilt from memory that has been returned to its owners: No-ops take their psns
	// and xids.
	for psn := ini.tx.una; psn != ini.tx.nxt; psn++ {
		if x := &ini.tx.at(psn).content; x.tx != nil {
			*x = content{kind: noOp, xid: x.tx.xid, seqno: x.seqno, partial: x.seqno != x.tx.packets-1, carried: x.carried}
		}
	}
}
