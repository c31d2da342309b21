package rdma

import (
	"cmp"
	"slices"

	"github.com/fared/fared/wecmp"
)

// Limits on operations that are cut before a channel accepts them. Without order the limit is low, so that every channel's turn comes
// according to its share. With order the key chooses the channel, and operations of other keys must be able to pass a full channel.
const (
	backlogWeak  = 1
	backlogKeyed = 64
	maxMade      = 1 << 14 // operations of a set, except those held back by a lane without a share
)

// pump cuts work requests into operations and posts them on channels until the channels are full.
func (s *Set) pump() {
	if !s.peerReady {
		return
	}
	s.useCredit()
	for len(s.notifying) > 0 {
		w := s.notifying[0]
		s.notifying = s.notifying[1:]
		s.place(s.announcement(w))
	}
	for len(s.loose) > 0 {
		key := s.loose[0]
		s.loose = s.loose[1:]
		if st := s.streams[key]; st != nil {
			s.let(key, st)
		}
	}
	s.grant()
	for _, l := range s.lanes {
		s.offer(l)
	}
	for s.next < len(s.work) {
		w := s.work[s.next]
		if w.Fence && s.next > 0 {
			return // work[0] is the oldest incomplete work request
		}
		for !w.cut {
			if !s.cutOne(w) {
				return
			}
		}
		s.next++
		if w.complete {
			s.release() // the work request completed inside Post
		}
	}
}

// offer posts a lane's backlog on its channel.
func (s *Set) offer(l *lane) {
	for len(l.backlog) > 0 && l.share > 0 {
		op := l.backlog[0]
		n := len(op.Local)
		if op.work == nil {
			n = 0 // operation of a tunnel: its bytes belong to no message
		}
		if !l.Post(op) {
			return
		}
		// The operation may have completed already: shared memory completes inside Post.
		l.backlog = slices.Delete(l.backlog, 0, 1)
		s.booked(n)
	}
}

// cutOne cuts the next operation off a work request and places it. It returns false if there is no room for the operation.
func (s *Set) cutOne(w *work) bool {
	if s.made-s.held >= maxMade {
		return false
	}
	n := min(len(w.local)-w.cursor, s.cfg.SegmentSize)
	key := w.OrderKey
	if s.cfg.Ordering == wecmp.Strong {
		address := w.RemoteAddress + uint64(w.cursor)
		key = address &^ s.addressing
		if w.Opcode != Send && w.Opcode != SendImmediate {
			n = min(n, s.cfg.Granule-int(address&s.addressing))
		} else {
			key = ^uint64(0) // sends have no address: they share one stream
		}
	}
	lane := -1
	if s.keyed {
		lane = s.laneOf(key)
	} else {
		lane = s.stripe.pick(n)
	}
	if lane < 0 {
		return false // no slot is live
	}
	limit := backlogWeak
	if s.keyed {
		limit = backlogKeyed
	}
	if len(s.lanes[lane].backlog) >= limit {
		return false
	}
	op := s.newOp(w, key)
	op.Local = w.local[w.cursor : w.cursor+n]
	op.Key, op.Remote = w.RemoteKey, w.RemoteAddress+uint64(w.cursor)
	switch w.Opcode {
	case Send, SendImmediate:
		h := header{kind: kindSend, length: uint32(n), message: w.message, offset: uint32(w.cursor), total: uint32(len(w.local))}
		if w.Opcode == SendImmediate {
			h.kind, h.immediate = kindSendImmediate, w.Immediate
		}
		h.marshal(&op.head)
		op.Kind, op.Head = OpSend, op.head[:]
	case Write, WriteImmediate:
		op.Kind = OpWrite
	case Read:
		op.Kind = OpRead
	case CompareSwap:
		op.Kind, op.Compare, op.Swap = OpCompareSwap, w.Compare, w.Swap
	case FetchAdd:
		op.Kind, op.Swap = OpFetchAdd, w.Add
	}
	w.cursor += n
	w.cut = w.cursor == len(w.local)
	s.place(op)
	// With w.out == 1 the outstanding operation may be an earlier piece: the last piece may have completed and op may have been reused.
	if w.announce && w.cut && w.out == 1 && op.work == w {
		s.announceAtOnce(w, op)
	}
	return true
}

// announceAtOnce posts the announcement of a WRITE with immediate directly behind its only piece, if the channel keeps their order and has
// both posted. Otherwise the announcement waits until the WRITE is complete.
func (s *Set) announceAtOnce(w *work, op *Op) {
	if op.lane < 0 {
		return
	}
	l := s.lanes[op.lane]
	if !l.ordered || len(l.backlog) > 0 || int32(w.message-s.credit) >= 0 {
		return
	}
	if s.keyed && s.streams[op.key] != nil && len(s.streams[op.key].waiting) > 0 {
		return
	}
	follow := s.announcement(w)
	follow.lane, follow.key = op.lane, op.key // the lane of the WRITE's last piece
	if s.keyed {
		s.streams[op.key].out++
	}
	if l.Post(follow) {
		return
	}
	s.made--
	w.out--
	w.announce = true
	if s.keyed {
		s.streams[op.key].out--
	}
	s.spareOps = append(s.spareOps, follow)
}

// announcement returns the operation that announces to the peer that a WRITE with immediate is in place.
func (s *Set) announcement(w *work) *Op {
	key := w.OrderKey
	if s.cfg.Ordering == wecmp.Strong {
		key = w.RemoteAddress &^ s.addressing
	}
	w.announce = false
	last := w.last
	op := s.newOp(w, key)
	h := header{kind: kindWrite, message: w.message, immediate: w.Immediate, total: uint32(len(w.local))}
	h.marshal(&op.head)
	op.Kind, op.Head = OpSend, op.head[:]
	// Its place in a stream is directly behind the WRITE, before all later operations: those may wait for credit that this one triggers.
	op.number = last
	return op
}

func (s *Set) newOp(w *work, key uint64) *Op {
	var op *Op
	if n := len(s.spareOps); n > 0 {
		op = s.spareOps[n-1]
		s.spareOps = s.spareOps[:n-1]
		*op = Op{}
	} else {
		op = new(Op)
	}
	op.Set, op.work, op.key, op.number, op.lane = s, w, key, s.number, -1
	w.last = s.number
	s.number++
	s.made++
	w.out++
	return op
}

// place assigns an operation to a lane, or queues it until a lane is available.
func (s *Set) place(op *Op) {
	if s.keyed {
		st := s.streams[op.key]
		if st == nil {
			st = &stream{lane: -1}
			s.streams[op.key] = st
		}
		at := len(st.waiting)
		for at > 0 && st.waiting[at-1].number > op.number {
			at--
		}
		st.waiting = slices.Insert(st.waiting, at, op)
		s.let(op.key, st)
		return
	}
	if !s.credited(op) {
		s.gated[op.work.message] = append(s.gated[op.work.message], op)
		return
	}
	lane := s.stripe.pick(len(op.Local))
	if lane < 0 {
		s.waitForLife(op)
		return
	}
	s.stripe.take(lane, len(op.Local))
	s.enqueue(lane, op)
}

// let assigns waiting operations of a stream to a lane, in order, while credit lasts, and only once everything on the stream's previous
// lane has completed.
func (s *Set) let(key uint64, st *stream) {
	if s.displaced {
		return // replace follows
	}
	defer s.hold(st)
	lane := s.laneOf(key)
	n := 0
	for n < len(st.waiting) && lane >= 0 && (st.out == 0 || st.lane == lane) {
		op := st.waiting[n]
		if !s.credited(op) {
			if !st.uncredited {
				st.uncredited = true
				s.uncredited = append(s.uncredited, key)
			}
			break
		}
		n++
		st.lane = lane
		st.out++
		op.lane = lane
		s.lanes[lane].backlog = append(s.lanes[lane].backlog, op)
	}
	st.waiting = slices.Delete(st.waiting, 0, n)
	if n > 0 {
		s.offer(s.lanes[lane])
	}
}

// hold counts the operations of a stream that wait for others on a lane without a share, stalled or parked. maxMade does not include them:
// otherwise the operations for the keys of one dead slot would use up the limit and stop all other keys.
func (s *Set) hold(st *stream) {
	n := 0
	if st.out > 0 && s.lanes[st.lane].share == 0 {
		n = len(st.waiting)
	}
	s.held += n - st.held
	st.held = n
}

// waitForLife keeps an operation until a slot is live.
func (s *Set) waitForLife(op *Op) {
	st := s.streams[0]
	if st == nil {
		st = &stream{lane: -1}
		s.streams[0] = st
	}
	st.waiting = append(st.waiting, op)
}

func (s *Set) enqueue(lane int, op *Op) {
	l := s.lanes[lane]
	op.lane = lane
	l.backlog = append(l.backlog, op)
	s.offer(l)
}

// replace reassigns all operations that no channel has accepted yet, after a change of the slots. It does so in the order of segmentation,
// which preserves the order of each stream.
func (s *Set) replace() {
	var all []*Op
	for message, ops := range s.gated {
		all = append(all, ops...)
		delete(s.gated, message)
	}
	for _, l := range s.lanes {
		for _, op := range l.backlog {
			switch {
			case op.work == nil:
				s.spent(op)
				continue
			case s.keyed:
				s.streams[op.key].out--
			}
			all = append(all, op)
		}
		l.backlog = l.backlog[:0]
	}
	for key, st := range s.streams {
		all = append(all, st.waiting...)
		st.waiting = nil
		s.hold(st)
		if st.out == 0 {
			delete(s.streams, key)
		}
	}
	slices.SortStableFunc(all, func(a, b *Op) int { return cmp.Compare(a.number, b.number) })
	for _, op := range all {
		s.place(op)
	}
}

// returned requeues an operation that a channel has not executed and never will.
func (s *Set) returned(op *Op) {
	l := s.lanes[op.lane]
	if op.work == nil {
		s.spent(op)
		s.device.stir(s)
		return
	}
	if s.keyed {
		// The lane also returns, or still has waiting, all later operations of the stream: op is the first of its stream.
		st := s.streams[op.key]
		st.out--
		st.waiting = append(st.waiting, op)
		s.hold(st)
	} else if w := op.work; w.Opcode == WriteImmediate && op.Kind == OpSend && w.out > 1 {
		// The WRITE may use another lane now: its announcement follows once the WRITE is complete.
		w.announce = true
		w.out--
		s.made--
		s.spareOps = append(s.spareOps, op)
	} else {
		l.backlog = append(l.backlog, op)
	}
	s.displaced = true
	s.device.stir(s)
}

// spent handles an internal operation that will not be executed. A datagram of a tunnel is dropped, as on a network; a credit is sent
// again.
func (s *Set) spent(op *Op) {
	if op == s.credits.op {
		s.credits.op, s.credits.sentAny = nil, false
	}
	s.tunnels.spare(op)
}

// completed handles an operation that has been executed or has failed.
func (s *Set) completed(op *Op, err error) {
	w := op.work
	if w == nil {
		if op == s.credits.op {
			s.credits.op = nil
		}
		s.tunnels.spare(op)
		s.device.stir(s)
		return
	}
	w.out--
	s.made--
	if s.keyed {
		s.advance(op.key)
	}
	*op = Op{}
	s.spareOps = append(s.spareOps, op)
	if s.state >= failing {
		return
	}
	switch {
	case err != nil:
		w.err = err
		s.fail(err)
		return
	case w.out > 0 || !w.cut:
	case w.announce:
		s.notifying = append(s.notifying, w)
	default:
		w.complete = true
		s.release()
	}
	s.device.stir(s)
}

// advance updates a stream after one of its operations has completed.
func (s *Set) advance(key uint64) {
	st := s.streams[key]
	st.out--
	s.hold(st)
	if st.out == 0 && len(st.waiting) == 0 {
		delete(s.streams, key)
		return
	}
	if len(st.waiting) > 0 && s.state == connected {
		s.loose = append(s.loose, key)
	}
}

// release reports completed work requests, in the order of posting.
func (s *Set) release() {
	n := 0
	for n < s.next && s.work[n].complete {
		w := s.work[n]
		s.report(w, nil)
		*w = work{}
		s.spareWork = append(s.spareWork, w)
		n++
	}
	s.work = slices.Delete(s.work, 0, n)
	s.next -= n
}

// laneOf returns the lane of a key, -1 if no slot is live.
func (s *Set) laneOf(key uint64) int {
	if i := wecmp.Rendezvous(s.keyShares, key); i >= 0 {
		return i
	}
	return -1
}
