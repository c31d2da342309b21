package superp

import "github.com/fared/fared/transport/rdma"

// answer is a packet of replies to operations of one of the peer's transactions.
type answer struct {
	slot   *incoming
	opcode Opcode
	xid    uint16
	seqno  uint16
	eom    bool
	n      int
	ops    [MaxOps]answerOp
}

// answerOp is one reply.
type answerOp struct {
	seqno     uint16
	op        uint8
	major     uint16 // of a Transaction error
	was       uint64 // of an atomic response: the previous value
	address   uint64 // of a read response: the source, looked up at each transmission because the region may be deregistered by then
	offset, n int
}

// lateReply is a reply of an incomplete request.
type lateReply struct {
	opcode Opcode
	op     answerOp
}

// answer replies to an operation, once the request is complete: an initiator expects no reply earlier, and one eom.
func (tgt *target) answer(s *incoming, o Opcode, op answerOp) {
	if s.total == 0 || s.got < s.total || s.msg.waiting || len(s.late) > 0 {
		s.late = append(s.late, lateReply{o, op})
		return
	}
	tgt.queueReply(s, o, op)
}

// queueReplies queues the replies of a complete request.
func (tgt *target) queueReplies(s *incoming) {
	for _, x := range s.late {
		tgt.queueReply(s, x.opcode, x.op)
	}
	for _, r := range s.reads {
		tgt.reads.push(r)
	}
	s.late, s.reads = s.late[:0], s.reads[:0]
}

func (tgt *target) queueReply(s *incoming, o Opcode, op answerOp) {
	if tgt.answers.n > 0 {
		if a := *tgt.answers.at(tgt.answers.n - 1); a.slot == s && a.opcode == o && a.n < tgt.opsPerPacket {
			a.ops[a.n] = op
			a.n++
			return
		}
	}
	tgt.answers.push(tgt.newAnswer(s, o, op))
	s.unsent++
	if o == OpcodeError {
		s.errors++
	} else {
		s.jobs++ // the transaction is not complete before the answer is sent
	}
}

func (tgt *target) newAnswer(s *incoming, o Opcode, op answerOp) *answer {
	var a *answer
	if n := len(tgt.core.answers); n > 0 {
		a = tgt.core.answers[n-1]
		tgt.core.answers = tgt.core.answers[:n-1]
	} else {
		a = new(answer)
	}
	a.slot, a.opcode, a.xid, a.seqno, a.eom, a.n = s, o, s.xid, s.seqno, false, 1
	a.ops[0] = op
	s.seqno++
	return a
}

// replies reports whether replies are queued.
func (tgt *target) replies() bool { return tgt.answers.n > 0 || tgt.reads.n > 0 }

// nextAnswer returns the next packet of replies, or nil.
func (tgt *target) nextAnswer() *answer {
	if tgt.answers.n > 0 {
		a := tgt.answers.pop()
		a.slot.unsent--
		if a.opcode != OpcodeError {
			a.slot.jobs--
		}
		tgt.sending(a)
		return a
	}
	if tgt.reads.n == 0 {
		return nil
	}
	r := tgt.reads.at(0)
	s := &tgt.in[int(r.xid)&(len(tgt.in)-1)]
	n := min(tgt.payload, r.n-r.offset)
	if rest := r.n - r.offset - n; rest > 0 && rest < tgt.tail {
		n -= tgt.tail - rest // the next packet, the last, has no less than tail bytes
	}
	a := tgt.newAnswer(s, OpcodeReadResponse, answerOp{seqno: r.seqno, op: r.op, address: r.address, offset: r.offset, n: n})
	if r.offset += n; r.offset < r.n {
		tgt.reading++
		return a
	}
	first := tgt.reads.pop()
	s.jobs--
	// Small reads of the same packet share a response if their blocks have equal lengths.
	for first.n == n && tgt.reads.n > 0 && a.n < tgt.opsPerPacket && (a.n+1)*(n+8) <= tgt.payload {
		r := tgt.reads.at(0)
		if r.xid != first.xid || r.seqno != first.seqno || r.n != n {
			break
		}
		a.ops[a.n] = answerOp{seqno: r.seqno, op: r.op, address: r.address, n: n}
		a.n++
		s.jobs--
		tgt.reading--
		tgt.reads.pop()
	}
	tgt.sending(a)
	return a
}

// sending marks the last reply to a transaction, and ends the transaction if no other work is left: the reply then
// carries the ack_xid that covers it.
func (tgt *target) sending(a *answer) {
	s := a.slot
	a.eom = s.total > 0 && s.got == s.total && s.jobs == 0 && s.unsent == 0
	tgt.settle(s)
}

// releaseAnswer records that the peer has received a reply.
func (tgt *target) releaseAnswer(a *answer) {
	switch a.opcode {
	case OpcodeError:
		if a.slot.errors--; a.slot.errors == 0 {
			tgt.settle(a.slot)
		}
	case OpcodeReadResponse:
		tgt.reading--
	}
	a.slot = nil
	tgt.core.answers = append(tgt.core.answers, a)
}

// buildAnswer appends a reply's TAL header and operations to b. It returns the data that follows them, and the number
// of data bytes. A read whose memory is no longer accessible becomes a Transaction error.
func (tgt *target) buildAnswer(b []byte, t TAL, a *answer) (head, payload []byte, data int) {
	t.Opcode, t.XID, t.Seqno, t.NumOps, t.EOM = a.opcode, a.xid, a.seqno, uint8(a.n), a.eom
	start := len(b)
	b = t.append(b)
	for i := range a.n {
		switch o := &a.ops[i]; a.opcode {
		case OpcodeError:
			e := ErrorOp{Seqno: o.seqno, Op: o.op, Major: o.major}
			b = e.append(b)
		case OpcodeAtomicResponse:
			w := AtomicResponseOp{Seqno: o.seqno, Op: o.op, Was: o.was}
			b = w.append(b)
		case OpcodeReadResponse:
			w := ReadResponseOp{Seqno: o.seqno, Op: o.op, Offset: uint32(o.offset)}
			b = w.append(b)
		}
	}
	if a.opcode != OpcodeReadResponse {
		return b, nil, 0
	}
	for i := range a.n {
		o := &a.ops[i]
		block, err := []byte(nil), error(rdma.ErrFlushed)
		if !tgt.closed {
			block, err = tgt.core.host.FlatMemory(tgt.channel, o.address+uint64(o.offset), o.n, rdma.RemoteRead)
		}
		if err != nil {
			t.Opcode = OpcodeError
			b = t.append(b[:start])
			for i := range a.n {
				e := ErrorOp{Seqno: a.ops[i].seqno, Op: a.ops[i].op, Major: majorOf(err)}
				b = e.append(b)
			}
			return b, nil, 0
		}
		short := tgt.lite && len(block) < minBlock
		if a.n == 1 && !short {
			return b, block, len(block)
		}
		b = append(b, block...)
		if short { // the initiator knows the length
			b = append(b, make([]byte, minBlock-len(block))...)
		}
		data += len(block)
	}
	return b, nil, data
}
