package speaker

import (
	"net/netip"
	"slices"
	"sync"

	"github.com/fared/fared/fare"
)

// queue keeps what the owner has not yet taken: for every session the last
// state per (generation, prefix), in the order in which the prefix first became
// pending. Session events keep their place relative to the routes of their
// session.
//
// Its memory is bounded by what the sessions hold, whatever they send: a route
// that comes and goes before it was taken leaves nothing, and so does an
// incarnation.
type queue struct {
	knock chan struct{} // one slot

	mu       sync.Mutex // guards all below
	pending  []slot
	dead     int // slots of pending that hold nothing to deliver
	sessions []sessionQueue
}

// slot is one pending event. known is set for Route and Withdraw.
type slot struct {
	event   Event // nil: dead
	known   *known
	gen     uint64 // generation a route or end-of-RIB belongs to, 0 for others
	session int
}

// known is what is known of one prefix of the current incarnation.
type known struct {
	attrs *fare.Attributes // nil: a withdraw is pending
	slot  int              // index into pending, -1 if nothing is
	taken bool             // the owner has been given a Route for it
}

type sessionQueue struct {
	gen     uint64 // newest generation that was up
	closed  uint64 // generations up to this one are over
	up      bool
	upSlot  int    // pending SessionUp, -1 if none
	fault   int    // pending Fault, -1 if none
	eor     [2]int // pending EndOfRIB by family, -1 if none
	queued  int    // pending routes and end-of-RIBs of gen
	routes  map[netip.Prefix]*known
	present int // entries of routes with attributes
}

func newQueue(sessions int) *queue {
	q := &queue{knock: make(chan struct{}, 1), sessions: make([]sessionQueue, sessions)}
	for i := range q.sessions {
		q.sessions[i] = sessionQueue{upSlot: -1, fault: -1, eor: [2]int{-1, -1}}
	}
	return q
}

// wake leaves a knock, unless one is there already.
func (q *queue) wake() {
	select {
	case q.knock <- struct{}{}:
	default:
	}
}

// push appends a pending event and returns its index. The caller holds mu.
func (q *queue) push(s slot) int {
	if q.dead > 1024 && q.dead > len(q.pending)/2 {
		q.compact()
	}
	q.pending = append(q.pending, s)
	return len(q.pending) - 1
}

// alive says if the slot is to be delivered: its event was not cancelled and
// its incarnation is not over.
func (q *queue) alive(s *slot) bool {
	if s.event == nil {
		return false
	}
	sq := &q.sessions[s.session]
	return s.gen == 0 || sq.up && s.gen == sq.gen
}

// compact removes dead slots, keeping the order of the others.
func (q *queue) compact() {
	n := 0
	for i := range q.pending {
		s := &q.pending[i]
		if !q.alive(s) {
			continue
		}
		sq := &q.sessions[s.session]
		switch {
		case s.known != nil:
			s.known.slot = n
		case sq.upSlot == i:
			sq.upSlot = n
		case sq.fault == i:
			sq.fault = n
		default:
			sq.moveEOR(i, n)
		}
		q.pending[n] = *s
		n++
	}
	clear(q.pending[n:])
	q.pending = q.pending[:n]
	q.dead = 0
}

// kill cancels a pending slot.
func (q *queue) kill(i int) {
	q.pending[i] = slot{session: q.pending[i].session}
	q.dead++
}

// sessionUp starts a generation. It reports false for one that is over already.
func (q *queue) sessionUp(e SessionUp) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	sq := &q.sessions[e.Session]
	if e.Generation <= sq.closed || e.Generation <= sq.gen {
		return false
	}
	sq.gen, sq.up = e.Generation, true
	sq.reset()
	sq.routes = make(map[netip.Prefix]*known)
	sq.upSlot = q.push(slot{event: e, session: e.Session})
	q.wake()
	return true
}

// sessionDown ends a generation and reports whether it was up. What it still
// had pending is forgotten, in constant time. If not even its SessionUp was
// taken, the owner never hears of it.
func (q *queue) sessionDown(e SessionDown) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	sq := &q.sessions[e.Session]
	sq.closed = max(sq.closed, e.Generation)
	if !sq.up || sq.gen != e.Generation {
		return false
	}
	sq.up = false
	q.dead += sq.queued
	sq.reset()
	if sq.upSlot >= 0 {
		q.kill(sq.upSlot)
		sq.upSlot = -1
		return true
	}
	q.push(slot{event: e, session: e.Session})
	q.wake()
	return true
}

// reset forgets the routes of a generation in constant time: their slots are
// no longer alive, and the map is left to the collector.
func (sq *sessionQueue) reset() {
	sq.routes, sq.present, sq.queued, sq.eor = nil, 0, 0, [2]int{-1, -1}
}

// route records what the peer announces. It reports false if the incarnation
// is not the current one.
func (q *queue) route(e Route) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	sq := &q.sessions[e.Session]
	if !sq.up || sq.gen != e.Generation {
		return false
	}
	q.setRoute(sq, e)
	return true
}

func (q *queue) setRoute(sq *sessionQueue, e Route) {
	k := sq.routes[e.Prefix]
	switch {
	case k == nil:
		k = &known{slot: -1}
		sq.routes[e.Prefix] = k
	case k.attrs != nil && equalAttributes(k.attrs, e.Attrs):
		return // said already, or about to be
	}
	if k.attrs == nil {
		sq.present++
	}
	k.attrs = e.Attrs
	q.put(sq, k, e, e.Session)
}

// withdraw records that the peer no longer announces the prefix.
func (q *queue) withdraw(e Withdraw) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	sq := &q.sessions[e.Session]
	if !sq.up || sq.gen != e.Generation {
		return false
	}
	q.setWithdraw(sq, e)
	return true
}

func (q *queue) setWithdraw(sq *sessionQueue, e Withdraw) {
	k := sq.routes[e.Prefix]
	if k == nil || k.attrs == nil {
		return // never said, or withdrawn already
	}
	k.attrs = nil
	sq.present--
	if !k.taken {
		q.kill(k.slot)
		sq.queued--
		delete(sq.routes, e.Prefix)
		return
	}
	q.put(sq, k, e, e.Session)
}

// put makes e the pending event of a prefix, in place of what was pending.
func (q *queue) put(sq *sessionQueue, k *known, e Event, session int) {
	if k.slot >= 0 {
		q.pending[k.slot].event = e
		return
	}
	k.slot = q.push(slot{event: e, known: k, gen: sq.gen, session: session})
	sq.queued++
	q.wake()
}

func (q *queue) endOfRIB(e EndOfRIB) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	sq := &q.sessions[e.Session]
	if !sq.up || sq.gen != e.Generation {
		return false
	}
	at := &sq.eor[eorIndex(e.Family)]
	if *at >= 0 {
		q.kill(*at) // the later one stands behind more routes
		sq.queued--
	}
	*at = q.push(slot{event: e, gen: e.Generation, session: e.Session})
	sq.queued++
	q.wake()
	return true
}

func eorIndex(f Family) int {
	if f == IPv6 {
		return 1
	}
	return 0
}

// moveEOR follows an end-of-RIB from one slot to another (-1: taken).
func (sq *sessionQueue) moveEOR(from, to int) {
	for i := range sq.eor {
		if sq.eor[i] == from {
			sq.eor[i] = to
		}
	}
}

func (q *queue) fault(e Fault) {
	q.mu.Lock()
	defer q.mu.Unlock()
	sq := &q.sessions[e.Session]
	if sq.fault >= 0 {
		q.pending[sq.fault].event = e
		return
	}
	sq.fault = q.push(slot{event: e, session: e.Session})
	q.wake()
}

// take appends all that is pending to buf.
func (q *queue) take(buf []Event) []Event {
	q.mu.Lock()
	defer q.mu.Unlock()
	for i := range q.pending {
		s := &q.pending[i]
		if !q.alive(s) {
			continue
		}
		buf = append(buf, s.event)
		sq := &q.sessions[s.session]
		switch {
		case s.known != nil:
			s.known.slot, s.known.taken = -1, true
			if s.known.attrs == nil {
				delete(sq.routes, s.event.(Withdraw).Prefix)
			}
		case sq.upSlot == i:
			sq.upSlot = -1
		case sq.fault == i:
			sq.fault = -1
		default:
			sq.moveEOR(i, -1)
		}
		if s.gen != 0 {
			sq.queued--
		}
	}
	clear(q.pending)
	q.pending, q.dead = q.pending[:0], 0
	return buf
}

// present is the number of routes held from a session's peer.
func (q *queue) present(session int) int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.sessions[session].present
}

// difference compares what was recorded with what is, and returns the prefixes
// that differ, in order. It reports false if the incarnation is over.
func (q *queue) difference(session int, gen uint64, is map[netip.Prefix]*fare.Attributes) ([]netip.Prefix, bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	sq := &q.sessions[session]
	if !sq.up || sq.gen != gen {
		return nil, false
	}
	var d []netip.Prefix
	for p, attrs := range is {
		if k := sq.routes[p]; k == nil || k.attrs == nil || !equalAttributes(k.attrs, attrs) {
			d = append(d, p)
		}
	}
	for p, k := range sq.routes {
		if _, ok := is[p]; !ok && k.attrs != nil {
			d = append(d, p)
		}
	}
	slices.SortFunc(d, netip.Prefix.Compare)
	return d, true
}

func equalAttributes(a, b *fare.Attributes) bool {
	return a == b || slices.Equal(a.Communities, b.Communities) && slices.Equal(a.ASPath, b.ASPath)
}
