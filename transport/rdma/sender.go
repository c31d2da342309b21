package rdma

import (
	"cmp"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/fared/fared/wecmp"
)

// Limits on operations that are cut before a channel accepts them. Without order the limit is low, so that every
// channel's turn comes according to its share. With order the key chooses the channel, and operations of other keys
// must be able to pass a full channel.
const (
	backlogWeak  = 1
	backlogKeyed = 64
	maxMade      = 1 << 14 // operations of a set, except those held back by a lane without a share
)

// sender cuts the local work requests into operations, assigns the operations to lanes, and reports the completions.
type sender struct {
	*common
	lanes  *lanes
	posted atomic.Int32 // work requests without a polled completion

	work    []*work // incomplete work requests in the order of posting; all segments of work[:next] have been cut
	next    int
	made    int    // operations that have been cut and not completed
	held    int    // the part of made that waits for operations of the same key on a lane without a share
	number  uint64 // of the next operation
	message uint32 // of the next message that consumes a receive at the peer
	streams map[uint64]*stream
	// credit is the first message for which no operation may be issued yet; allowed is the latest credit from the peer.
	// No piece of message credit or of a later one goes to a channel, so no channel ever waits for a receive and blocks
	// the operations behind it. Without order, such pieces wait in gated; with order, in their stream. uncredited lists
	// the waiting streams.
	credit, allowed uint32
	gated           map[uint32][]*Op
	uncredited      []uint64
	loose           []uint64 // streams with waiting operations of which an earlier operation has completed
	notifying       []*work  // WRITEs with immediate whose payload is in place and whose announcement is due
	spareWork       []*work
	spareOps        []*Op
	addressing      uint64 // Strong: Granule-1; else 0
}

// stream keeps the order of operations with the same key: it uses one lane at a time.
type stream struct {
	lane       int
	out        int   // operations assigned to lane and not complete
	waiting    []*Op // operations without a lane: they wait for credit, or for out to reach 0 so that the stream can change its lane
	uncredited bool  // listed in sender.uncredited
	held       int   // the part of waiting that sender.held counts
}

func (snd *sender) post(wr *SendWR) error {
	if snd.state >= failing {
		return fmt.Errorf("the set has ended: %w", snd.err)
	}
	if int(snd.posted.Load()) >= snd.cfg.SendDepth {
		return ErrQueueFull
	}
	need := Access(0)
	switch wr.Opcode {
	case Read, CompareSwap, FetchAdd:
		need = LocalWrite
		if wr.Inline != nil {
			return fmt.Errorf("%v: Inline is only for operations that send data", wr.Opcode)
		}
	case Send, SendImmediate, Write, WriteImmediate:
	default:
		return fmt.Errorf("opcode %v cannot be posted", wr.Opcode)
	}
	local, err := wr.Local.bytes(snd.cfg.PD, need)
	if err != nil {
		return err
	}
	if wr.Inline != nil {
		local = append([]byte(nil), wr.Inline...)
	}
	if len(local) > maxMessage {
		return fmt.Errorf("%d bytes: a message has at most %d", len(local), maxMessage)
	}
	if atomically := wr.Opcode == CompareSwap || wr.Opcode == FetchAdd; atomically && (len(local) != 8 || wr.RemoteAddress%8 != 0) {
		return fmt.Errorf("%v: use 8 bytes at a multiple of 8 instead of %d at %#x", wr.Opcode, len(local), wr.RemoteAddress)
	}
	w := snd.newWork()
	*w = work{SendWR: *wr, local: local}
	w.Inline = nil
	if wr.Opcode.consumes() {
		w.message = snd.message
		snd.message++
		w.announce = wr.Opcode == WriteImmediate && !snd.plain
	}
	snd.work = append(snd.work, w)
	snd.posted.Add(1)
	return nil
}

func (snd *sender) newWork() *work {
	if n := len(snd.spareWork); n > 0 {
		w := snd.spareWork[n-1]
		snd.spareWork = snd.spareWork[:n-1]
		return w
	}
	return new(work)
}

// resume places the operations that waited for credit, for the end of their WRITE, or for an earlier operation of their
// stream.
func (snd *sender) resume() {
	snd.useCredit()
	for len(snd.notifying) > 0 {
		w := snd.notifying[0]
		snd.notifying = snd.notifying[1:]
		snd.place(snd.announcement(w))
	}
	for len(snd.loose) > 0 {
		key := snd.loose[0]
		snd.loose = snd.loose[1:]
		if st := snd.streams[key]; st != nil {
			snd.let(key, st)
		}
	}
}

// cut cuts work requests into operations until the lanes are full.
func (snd *sender) cut() {
	for snd.next < len(snd.work) {
		w := snd.work[snd.next]
		if w.Fence && snd.next > 0 {
			return // work[0] is the oldest incomplete work request
		}
		for !w.cut {
			if !snd.cutOne(w) {
				return
			}
		}
		snd.next++
		if w.complete {
			snd.release() // the work request completed inside Post
		}
	}
}

// cutOne cuts the next operation off a work request and places it. It returns false if there is no room for the
// operation.
func (snd *sender) cutOne(w *work) bool {
	if snd.made-snd.held >= maxMade {
		return false
	}
	n := min(len(w.local)-w.cursor, snd.cfg.SegmentSize)
	key := w.OrderKey
	if snd.cfg.Ordering == wecmp.Strong {
		address := w.RemoteAddress + uint64(w.cursor)
		key = address &^ snd.addressing
		if w.Opcode != Send && w.Opcode != SendImmediate {
			n = min(n, snd.cfg.Granule-int(address&snd.addressing))
		} else {
			key = ^uint64(0) // sends have no address: they share one stream
		}
	}
	if snd.plain && w.Opcode.consumes() {
		n = len(w.local)
	}
	lane := -1
	if snd.keyed {
		lane = snd.lanes.of(key)
	} else {
		lane = snd.lanes.stripe.pick(n)
	}
	if lane < 0 {
		return false // no slot is live
	}
	limit := backlogWeak
	if snd.keyed {
		limit = backlogKeyed
	}
	if len(snd.lanes.all[lane].backlog) >= limit {
		return false
	}
	op := snd.newOp(w, key)
	op.Local = w.local[w.cursor : w.cursor+n]
	op.Key, op.Remote = w.RemoteKey, w.RemoteAddress+uint64(w.cursor)
	switch w.Opcode {
	case Send, SendImmediate:
		op.Kind = OpSend
		if snd.plain {
			break
		}
		h := header{kind: kindSend, length: uint32(n), message: w.message, offset: uint32(w.cursor), total: uint32(len(w.local))}
		if w.Opcode == SendImmediate {
			h.kind, h.immediate = kindSendImmediate, w.Immediate
			op.HasImmediate, op.Immediate = w.cursor+n == len(w.local), w.Immediate
		}
		h.marshal(&op.head)
		op.Head = op.head[:]
	case Write, WriteImmediate:
		op.Kind = OpWrite
	case Read:
		op.Kind = OpRead
	case CompareSwap:
		op.Kind, op.Compare, op.Swap = OpCompareSwap, w.Compare, w.Swap
	case FetchAdd:
		op.Kind, op.Swap = OpFetchAdd, w.Add
	}
	if snd.plain && (w.Opcode == SendImmediate || w.Opcode == WriteImmediate) {
		op.HasImmediate, op.Immediate = true, w.Immediate
	}
	w.cursor += n
	w.cut = w.cursor == len(w.local)
	snd.place(op)
	// With w.out == 1 the outstanding operation may be an earlier piece: the last piece may have completed and op may
	// have been reused.
	if w.announce && w.cut && w.out == 1 && op.work == w {
		snd.announceAtOnce(w, op)
	}
	return true
}

// announceAtOnce posts the announcement of a WRITE with immediate directly behind its only piece, if the channel keeps
// their order and has both posted. Otherwise the announcement waits until the WRITE is complete.
func (snd *sender) announceAtOnce(w *work, op *Op) {
	if op.lane < 0 {
		return
	}
	l := snd.lanes.all[op.lane]
	if !l.ordered || len(l.backlog) > 0 || int32(w.message-snd.credit) >= 0 {
		return
	}
	if snd.keyed && snd.streams[op.key] != nil && len(snd.streams[op.key].waiting) > 0 {
		return
	}
	follow := snd.announcement(w)
	follow.lane, follow.key = op.lane, op.key // the lane of the WRITE's last piece
	if snd.keyed {
		snd.streams[op.key].out++
	}
	if l.Post(follow) {
		return
	}
	snd.made--
	w.out--
	w.announce = true
	if snd.keyed {
		snd.streams[op.key].out--
	}
	snd.spareOps = append(snd.spareOps, follow)
}

// announcement returns the operation that announces to the peer that a WRITE with immediate is in place.
func (snd *sender) announcement(w *work) *Op {
	key := w.OrderKey
	if snd.cfg.Ordering == wecmp.Strong {
		key = w.RemoteAddress &^ snd.addressing
	}
	w.announce = false
	last := w.last
	op := snd.newOp(w, key)
	h := header{kind: kindWrite, message: w.message, immediate: w.Immediate, total: uint32(len(w.local))}
	h.marshal(&op.head)
	op.Kind, op.Head, op.HasImmediate, op.Immediate = OpSend, op.head[:], true, w.Immediate
	// Its place in a stream is directly behind the WRITE, before all later operations: those may wait for credit that
	// this one triggers.
	op.number = last
	return op
}

func (snd *sender) newOp(w *work, key uint64) *Op {
	var op *Op
	if n := len(snd.spareOps); n > 0 {
		op = snd.spareOps[n-1]
		snd.spareOps = snd.spareOps[:n-1]
		*op = Op{}
	} else {
		op = new(Op)
	}
	op.Set, op.work, op.key, op.number, op.lane = snd.set, w, key, snd.number, -1
	w.last = snd.number
	snd.number++
	snd.made++
	w.out++
	return op
}

// place assigns an operation to a lane, or queues it until a lane is available.
func (snd *sender) place(op *Op) {
	if snd.keyed {
		st := snd.streams[op.key]
		if st == nil {
			st = &stream{lane: -1}
			snd.streams[op.key] = st
		}
		at := len(st.waiting)
		for at > 0 && st.waiting[at-1].number > op.number {
			at--
		}
		st.waiting = slices.Insert(st.waiting, at, op)
		snd.let(op.key, st)
		return
	}
	if !snd.credited(op) {
		snd.gated[op.work.message] = append(snd.gated[op.work.message], op)
		return
	}
	lane := snd.lanes.stripe.pick(len(op.Local))
	if lane < 0 {
		snd.waitForLife(op)
		return
	}
	snd.lanes.stripe.take(lane, len(op.Local))
	snd.lanes.enqueue(lane, op)
}

// let assigns waiting operations of a stream to a lane, in order, while credit lasts, and only once everything on the
// stream's previous lane has completed.
func (snd *sender) let(key uint64, st *stream) {
	if snd.lanes.displaced {
		return // replace follows
	}
	defer snd.hold(st)
	lane := snd.lanes.of(key)
	n := 0
	for n < len(st.waiting) && lane >= 0 && (st.out == 0 || st.lane == lane) {
		op := st.waiting[n]
		if !snd.credited(op) {
			if !st.uncredited {
				st.uncredited = true
				snd.uncredited = append(snd.uncredited, key)
			}
			break
		}
		n++
		st.lane = lane
		st.out++
		op.lane = lane
		snd.lanes.all[lane].backlog = append(snd.lanes.all[lane].backlog, op)
	}
	st.waiting = slices.Delete(st.waiting, 0, n)
	if n > 0 {
		snd.lanes.offer(snd.lanes.all[lane])
	}
}

// hold counts the operations of a stream that wait for others on a lane without a share, stalled or parked. maxMade
// does not include them: otherwise the operations for the keys of one dead slot would use up the limit and stop all
// other keys.
func (snd *sender) hold(st *stream) {
	n := 0
	if st.out > 0 && snd.lanes.all[st.lane].share == 0 {
		n = len(st.waiting)
	}
	snd.held += n - st.held
	st.held = n
}

// waitForLife keeps an operation until a slot is live.
func (snd *sender) waitForLife(op *Op) {
	st := snd.streams[0]
	if st == nil {
		st = &stream{lane: -1}
		snd.streams[0] = st
	}
	st.waiting = append(st.waiting, op)
}

// replace reassigns all operations that no channel has accepted yet, after a change of the slots. It does so in the
// order of segmentation, which preserves the order of each stream.
func (snd *sender) replace() {
	var all []*Op
	for message, ops := range snd.gated {
		all = append(all, ops...)
		delete(snd.gated, message)
	}
	for _, l := range snd.lanes.all {
		for _, op := range l.backlog {
			switch {
			case op.work == nil:
				snd.set.spent(op)
				continue
			case snd.keyed:
				snd.streams[op.key].out--
			}
			all = append(all, op)
		}
		l.backlog = l.backlog[:0]
	}
	for key, st := range snd.streams {
		all = append(all, st.waiting...)
		st.waiting = nil
		snd.hold(st)
		if st.out == 0 {
			delete(snd.streams, key)
		}
	}
	slices.SortStableFunc(all, func(a, b *Op) int { return cmp.Compare(a.number, b.number) })
	for _, op := range all {
		snd.place(op)
	}
}

// returned requeues an operation that a channel has not executed and never will.
func (snd *sender) returned(op *Op) {
	l := snd.lanes.all[op.lane]
	if snd.keyed {
		// The lane also returns, or still has waiting, all later operations of the stream: op is the first of its
		// stream.
		st := snd.streams[op.key]
		st.out--
		st.waiting = append(st.waiting, op)
		snd.hold(st)
	} else if w := op.work; w.Opcode == WriteImmediate && op.Kind == OpSend && w.out > 1 {
		// The WRITE may use another lane now: its announcement follows once the WRITE is complete.
		w.announce = true
		w.out--
		snd.made--
		snd.spareOps = append(snd.spareOps, op)
	} else {
		l.backlog = append(l.backlog, op)
	}
	snd.lanes.displaced = true
}

// completed handles an operation that has been executed or has failed.
func (snd *sender) completed(op *Op, err error) {
	w := op.work
	w.out--
	snd.made--
	if snd.keyed {
		snd.advance(op.key)
	}
	*op = Op{}
	snd.spareOps = append(snd.spareOps, op)
	if snd.state >= failing {
		return
	}
	switch {
	case err != nil:
		w.err = err
		snd.set.fail(err)
		return
	case w.out > 0 || !w.cut:
	case w.announce:
		snd.notifying = append(snd.notifying, w)
	default:
		w.complete = true
		snd.release()
	}
	snd.stir()
}

// advance updates a stream after one of its operations has completed.
func (snd *sender) advance(key uint64) {
	st := snd.streams[key]
	st.out--
	snd.hold(st)
	if st.out == 0 && len(st.waiting) == 0 {
		delete(snd.streams, key)
		return
	}
	if len(st.waiting) > 0 && snd.state == connected {
		snd.loose = append(snd.loose, key)
	}
}

// release reports completed work requests, in the order of posting.
func (snd *sender) release() {
	n := 0
	for n < snd.next && snd.work[n].complete {
		w := snd.work[n]
		snd.report(w, nil)
		*w = work{}
		snd.spareWork = append(snd.spareWork, w)
		n++
	}
	snd.work = slices.Delete(snd.work, 0, n)
	snd.next -= n
}

// report pushes a work request's completion to the application.
func (snd *sender) report(w *work, err error) {
	if w.Silent && err == nil {
		snd.posted.Add(-1)
		return
	}
	snd.cfg.SendCQ.push(queued{Completion{Set: snd.set, ID: w.ID, Opcode: w.Opcode, Err: err, Bytes: len(w.local)}, true})
}

// flush reports every incomplete work request after the end of the set.
func (snd *sender) flush() {
	for _, w := range snd.work {
		err := w.err
		if err == nil {
			err = fmt.Errorf("%w: %w", ErrFlushed, snd.err)
		}
		if w.complete {
			err = nil
		}
		snd.report(w, err)
	}
	snd.work, snd.next = nil, 0
}

// granted handles a credit from the peer.
func (snd *sender) granted(until uint32) {
	if int32(until-snd.allowed) > 0 && until-snd.allowed <= maxDepth { // otherwise a later credit has overtaken it, or it is invalid
		snd.allowed = until
		snd.stir()
	}
}

// useCredit places the operations that have waited for credit.
func (snd *sender) useCredit() {
	if snd.credit == snd.allowed {
		return
	}
	was := snd.credit
	snd.credit = snd.allowed
	for m := was; m != snd.credit; m++ {
		for _, op := range snd.gated[m] {
			snd.place(op)
		}
		delete(snd.gated, m)
	}
	waiting := snd.uncredited
	snd.uncredited = nil
	for _, key := range waiting {
		if st := snd.streams[key]; st != nil {
			st.uncredited = false
			snd.let(key, st)
		}
	}
}

// credited reports whether the credit allows posting an operation on a channel. A plain channel has no credit: the peer
// answers "receiver not ready".
func (snd *sender) credited(op *Op) bool {
	return snd.plain || op.Kind != OpSend || int32(op.work.message-snd.credit) < 0
}
