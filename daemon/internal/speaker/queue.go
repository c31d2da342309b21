package speaker

import (
	"net/netip"
	"slices"
	"sync"

	"github.com/fared/fared/fare"
)

// quota is the number of routes and withdrawals of one session that take
// returns per call: a session whose peer changes thousands of routes at once
// delays the events of other sessions by at most this many.
const quota = 512

// queue holds the events that the owner has not taken yet: for every session
// the last state per (generation, prefix), in the order in which the prefix
// first became pending. Session events keep their place relative to the routes
// of their session.
//
// The number of routes that the sessions hold bounds its memory, whatever the
// peers send: a route that is announced and withdrawn before the owner takes it
// leaves nothing behind, and neither does an incarnation.
type queue struct {
	ready chan struct{} // one slot

	mu       sync.Mutex // guards the fields below
	sessions []sessionQueue
	first    int // the session with which take begins
}

// slot is one pending event. known is set for Route and Withdraw.
type slot struct {
	event Event // nil if canceled
	known *known
}

// known is the state of one prefix in the current incarnation.
type known struct {
	attrs *fare.Attributes // nil while a withdrawal is pending
	slot  int              // index into pending, -1 if no event is pending
	taken bool             // the owner has taken a Route for the prefix
}

type sessionQueue struct {
	pending []slot // slots before head are taken
	head    int
	dead    int // canceled slots from head on

	gen     uint64 // newest generation that was established
	closed  uint64 // generations up to this one have ended
	up      bool
	upSlot  int    // pending SessionUp, -1 if none
	fault   int    // pending Fault, -1 if none
	eor     [2]int // pending EndOfRIB by family, -1 if none
	mark    int    // pending Written, -1 if none
	routes  map[netip.Prefix]*known
	present int // number of routes with attributes
}

func newQueue(sessions int) *queue {
	q := &queue{ready: make(chan struct{}, 1), sessions: make([]sessionQueue, sessions)}
	for i := range q.sessions {
		q.sessions[i] = sessionQueue{upSlot: -1, fault: -1, eor: [2]int{-1, -1}, mark: -1}
	}
	return q
}

// wake fills the channel of Ready unless it is full.
func (q *queue) wake() {
	select {
	case q.ready <- struct{}{}:
	default:
	}
}

// push appends a pending event and returns its index.
func (sq *sessionQueue) push(s slot) int {
	if gone := sq.head + sq.dead; gone > 1024 && gone > len(sq.pending)/2 {
		sq.compact()
	}
	sq.pending = append(sq.pending, s)
	return len(sq.pending) - 1
}

// compact removes taken and canceled slots and keeps the order of the others.
func (sq *sessionQueue) compact() {
	n := 0
	for i := sq.head; i < len(sq.pending); i++ {
		s := sq.pending[i]
		if s.event == nil {
			continue
		}
		sq.moved(s, i, n)
		sq.pending[n] = s
		n++
	}
	clear(sq.pending[n:])
	sq.pending, sq.head, sq.dead = sq.pending[:n], 0, 0
}

// moved updates the index that refers to a slot after its move (-1 for a taken slot).
func (sq *sessionQueue) moved(s slot, from, to int) {
	switch {
	case s.known != nil:
		s.known.slot = to
	case sq.upSlot == from:
		sq.upSlot = to
	case sq.fault == from:
		sq.fault = to
	case sq.mark == from:
		sq.mark = to
	default:
		for i := range sq.eor {
			if sq.eor[i] == from {
				sq.eor[i] = to
			}
		}
	}
}

// kill cancels a pending slot.
func (sq *sessionQueue) kill(i int) {
	sq.pending[i] = slot{}
	sq.dead++
}

// sessionUp starts a generation. If silent is not 0, a Written with this mark follows immediately. It reports false for a generation that has
// already ended.
func (q *queue) sessionUp(e SessionUp, silent uint64) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	sq := &q.sessions[e.Session]
	if e.Generation <= sq.closed || e.Generation <= sq.gen {
		return false
	}
	sq.gen, sq.up = e.Generation, true
	sq.reset()
	sq.routes = make(map[netip.Prefix]*known)
	sq.upSlot = sq.push(slot{event: e})
	if silent != 0 {
		sq.mark = sq.push(slot{event: Written{Session: e.Session, Generation: e.Generation, Mark: silent}})
	}
	q.wake()
	return true
}

// sessionDown ends a generation, and drops its pending routes. If the owner has not yet taken its SessionUp, the
// owner receives neither event.
func (q *queue) sessionDown(e SessionDown) {
	q.mu.Lock()
	defer q.mu.Unlock()
	sq := &q.sessions[e.Session]
	sq.closed = max(sq.closed, e.Generation)
	if !sq.up || sq.gen != e.Generation {
		return
	}
	sq.up = false
	untaken := sq.upSlot >= 0
	sq.drop()
	sq.reset()
	if !untaken {
		sq.push(slot{event: e})
		q.wake()
	}
}

// drop cancels the pending events of the current generation. Only a Fault and
// the SessionDown of the previous generation belong to no generation and stay.
func (sq *sessionQueue) drop() {
	n := 0
	for i := sq.head; i < len(sq.pending); i++ {
		s := sq.pending[i]
		switch s.event.(type) {
		case Fault:
			sq.fault = n
		case SessionDown:
		default:
			continue
		}
		sq.pending[n] = s
		n++
	}
	clear(sq.pending[n:])
	sq.pending, sq.head, sq.dead, sq.upSlot = sq.pending[:n], 0, 0, -1
}

// reset drops the routes of a generation.
func (sq *sessionQueue) reset() {
	sq.routes, sq.present, sq.eor, sq.mark = nil, 0, [2]int{-1, -1}, -1
}

// route records the peer's announcement, if the incarnation is the current one.
func (q *queue) route(e Route) {
	q.mu.Lock()
	defer q.mu.Unlock()
	sq := &q.sessions[e.Session]
	if !sq.up || sq.gen != e.Generation {
		return
	}
	q.setRoute(sq, e)
}

func (q *queue) setRoute(sq *sessionQueue, e Route) {
	k := sq.routes[e.Prefix]
	switch {
	case k == nil:
		k = &known{slot: -1}
		sq.routes[e.Prefix] = k
	case k.attrs != nil && equalAttributes(k.attrs, e.Attrs):
		return // delivered already, or pending
	}
	if k.attrs == nil {
		sq.present++
	}
	k.attrs = e.Attrs
	q.put(sq, k, e)
}

// withdraw records that the peer no longer announces the prefix, if the incarnation is the current one.
func (q *queue) withdraw(e Withdraw) {
	q.mu.Lock()
	defer q.mu.Unlock()
	sq := &q.sessions[e.Session]
	if !sq.up || sq.gen != e.Generation {
		return
	}
	q.setWithdraw(sq, e)
}

func (q *queue) setWithdraw(sq *sessionQueue, e Withdraw) {
	k := sq.routes[e.Prefix]
	if k == nil || k.attrs == nil {
		return // never announced, or withdrawn already
	}
	k.attrs = nil
	sq.present--
	if !k.taken {
		sq.kill(k.slot)
		delete(sq.routes, e.Prefix)
		return
	}
	q.put(sq, k, e)
}

// put makes e the pending event of a prefix and replaces the previous pending event.
func (q *queue) put(sq *sessionQueue, k *known, e Event) {
	if k.slot >= 0 {
		sq.pending[k.slot].event = e
		return
	}
	k.slot = sq.push(slot{event: e, known: k})
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
		sq.kill(*at) // the later End-of-RIB follows more routes
	}
	*at = sq.push(slot{event: e})
	q.wake()
	return true
}

// written records that the connection has carried everything up to a mark. Only the latest pending Written is kept.
func (q *queue) written(e Written) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	sq := &q.sessions[e.Session]
	if !sq.up || sq.gen != e.Generation {
		return false
	}
	if sq.mark >= 0 {
		sq.pending[sq.mark].event = e
		return true
	}
	sq.mark = sq.push(slot{event: e})
	q.wake()
	return true
}

func eorIndex(f Family) int {
	if f == IPv6 {
		return 1
	}
	return 0
}

func (q *queue) fault(e Fault) {
	q.mu.Lock()
	defer q.mu.Unlock()
	sq := &q.sessions[e.Session]
	if sq.fault >= 0 {
		sq.pending[sq.fault].event = e
		return
	}
	sq.fault = sq.push(slot{event: e})
	q.wake()
}

// take appends the pending events to buf, at most quota routes per session. The
// session that comes first changes from call to call. If events remain, take
// refills the channel of Ready.
func (q *queue) take(buf []Event) []Event {
	q.mu.Lock()
	defer q.mu.Unlock()
	more := false
	for i := range q.sessions {
		sq := &q.sessions[(q.first+i)%len(q.sessions)]
		buf = sq.take(buf)
		more = more || len(sq.pending) > 0
	}
	q.first = (q.first + 1) % len(q.sessions)
	if more {
		q.wake()
	}
	return buf
}

func (sq *sessionQueue) take(buf []Event) []Event {
	routes := 0
	for ; sq.head < len(sq.pending) && routes < quota; sq.head++ {
		s := sq.pending[sq.head]
		if s.event == nil {
			sq.dead--
			continue
		}
		buf = append(buf, s.event)
		sq.moved(s, sq.head, -1)
		sq.pending[sq.head] = slot{}
		if s.known == nil {
			continue
		}
		routes++
		s.known.taken = true
		if s.known.attrs == nil {
			delete(sq.routes, s.event.(Withdraw).Prefix)
		}
	}
	if sq.head == len(sq.pending) {
		sq.pending, sq.head, sq.dead = sq.pending[:0], 0, 0
	}
	return buf
}

// present returns the number of routes held from a session's peer.
func (q *queue) present(session int) int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.sessions[session].present
}

// difference compares the recorded routes with is and returns the prefixes that
// differ, in order. It reports false if the incarnation has ended.
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
