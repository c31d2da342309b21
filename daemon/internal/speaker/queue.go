package speaker

import (
	"context"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/fared/fared/daemon/internal/guard"
	"github.com/fared/fared/fare"
)

// quota bounds the cost of the changed routes of one session that take returns
// per call: a session whose peer changes more routes at once delays the events
// of other sessions by at most this much. A route with other communities than the
// route before it costs distinct, because the owner computes and programs other
// weights for it; a route with equal ones costs 1. So take returns up to 16
// routes that all differ, and up to 30,721 that change alike.
const (
	quota    = 32768
	distinct = 2048
)

// backlog is the cost of a session's pending changes from which on its reader waits for the owner: 128 routes that all
// differ, or 262,144 that change alike. Reading faster than the owner decides only costs the processor time that other
// sessions need, because later states replace earlier ones.
const backlog = 8 * quota

// keptChanges is the number of changes up to which a session's memory for them
// is reused: a table of thousands of routes arrives once.
const keptChanges = 256

// queue holds the events that the owner has not taken yet: for every session
// the last state per prefix of the current generation, in the order in which
// the prefix first became pending. Session events keep their place relative to
// the routes of their session.
//
// The number of routes that the sessions hold bounds its memory, whatever the
// peers send: a route that is announced and withdrawn before the owner takes it
// leaves nothing behind, and neither does an incarnation.
type queue struct {
	ready chan struct{} // one slot

	mu       sync.Mutex      // guards the fields below
	sessions []*sessionQueue // by id
	owned    []int           // by id: the owner's index of the session; -1 if the owner has removed it
	first    int             // the session with which take begins
}

// sessionQueue holds the pending events of one session.
type sessionQueue struct {
	events  []placed
	changes []Change // a canceled change has no prefix
	base    int      // number of changes taken from the front of changes since it was empty
	taken   []Change // returned by the latest take
	pending map[netip.Addr]pending
	dead    int           // canceled changes
	cost    int           // of changes, when they became pending
	room    chan struct{} // one slot: cost has fallen below backlog

	gen     uint64 // newest generation that was established
	closed  uint64 // generations up to this one have ended
	up      bool
	present int // number of routes that the peer announces
}

// placed is a session event and its place.
type placed struct {
	event Event
	at    int // number of changes that precede it, including base
}

// pending is the pending change of an address.
type pending struct {
	at    int  // index into changes, plus base
	owned bool // the owner has taken a route for the address, and no withdrawal since
}

func newQueue(sessions int) *queue {
	q := &queue{ready: make(chan struct{}, 1)}
	for i := range sessions {
		q.own(q.add(), i)
	}
	return q
}

// add adds a session without an owner, and returns its id.
func (q *queue) add() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.sessions = append(q.sessions, &sessionQueue{room: make(chan struct{}, 1)})
	q.owned = append(q.owned, -1)
	return len(q.sessions) - 1
}

// own changes the owner's index of a session. -1 drops its events, pending and future ones.
func (q *queue) own(id, index int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.owned[id] = index
}

// wake fills the channel of Ready unless it is full.
func (q *queue) wake() {
	select {
	case q.ready <- struct{}{}:
	default:
	}
}

// push appends a session event behind the pending changes.
func (sq *sessionQueue) push(e Event) {
	sq.events = append(sq.events, placed{e, sq.base + len(sq.changes)})
}

// replace puts e in the place of the pending event of its type, if there is one.
func replace[E Event](sq *sessionQueue, e E) bool {
	for i := range sq.events {
		if _, ok := sq.events[i].event.(E); ok {
			sq.events[i].event = e
			return true
		}
	}
	return false
}

// sessionUp starts a generation. If silent is not 0, a Written with this mark follows immediately. It reports false for
// a generation that has already ended.
func (q *queue) sessionUp(e SessionUp, silent uint64) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	sq := q.sessions[e.Session]
	if e.Generation <= sq.closed || e.Generation <= sq.gen {
		return false
	}
	sq.gen, sq.up = e.Generation, true
	sq.push(e)
	if silent != 0 {
		sq.push(Written{Session: e.Session, Generation: e.Generation, Mark: silent})
	}
	q.wake()
	return true
}

// sessionDown ends a generation, and drops its pending events. If the owner has not yet taken its SessionUp, the owner
// receives neither event. It reports whether the caller has to notify the owner.
func (q *queue) sessionDown(e SessionDown) (news bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	sq := q.sessions[e.Session]
	sq.closed = max(sq.closed, e.Generation)
	if !sq.up || sq.gen != e.Generation {
		return false
	}
	sq.up, sq.present = false, 0
	sq.changes, sq.base, sq.pending, sq.dead = nil, 0, nil, 0
	sq.spend(sq.cost)
	untaken := false
	// A Fault, and the SessionDown of the previous generation, belong to no generation and stay.
	sq.events = slices.DeleteFunc(sq.events, func(p placed) bool {
		switch p.event.(type) {
		case Fault, SessionDown:
			return false
		case SessionUp:
			untaken = true
		}
		return true
	})
	for i := range sq.events {
		sq.events[i].at = 0
	}
	if untaken {
		return false
	}
	sq.push(e)
	return true
}

// change records the changes of the peer's routes, and its End-of-RIBs, if the incarnation is the current one. It
// reports whether the caller has to notify the owner, unless more changes follow soon.
func (q *queue) change(session int, gen uint64, changes []guard.Change) (news bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	sq := q.sessions[session]
	if !sq.up || sq.gen != gen {
		return false
	}
	for i := range changes {
		c := &changes[i]
		switch {
		case c.Ended != 0:
			sq.push(EndOfRIB{Session: session, Generation: gen, Family: c.Ended})
		case c.Attrs != nil:
			sq.announce(c)
		default:
			sq.withdraw(c.Prefix)
		}
	}
	return len(sq.changes) > sq.dead || len(sq.events) > 0
}

// announce records an announcement that changes the peer's table.
func (sq *sessionQueue) announce(c *guard.Change) {
	if c.New {
		sq.present++
	}
	if p, ok := sq.pending[c.Prefix.Addr()]; ok {
		sq.changes[p.at-sq.base].Attrs = c.Attrs
		return
	}
	sq.put(Change{c.Prefix, c.Attrs}, !c.New)
}

// withdraw records the withdrawal of a prefix that the peer had announced.
func (sq *sessionQueue) withdraw(prefix netip.Prefix) {
	sq.present--
	p, ok := sq.pending[prefix.Addr()]
	switch {
	case !ok:
		sq.put(Change{Prefix: prefix}, true)
	case p.owned:
		sq.changes[p.at-sq.base].Attrs = nil
	default: // the owner never saw the route
		sq.changes[p.at-sq.base] = Change{}
		sq.dead++
		delete(sq.pending, prefix.Addr())
		if sq.dead == len(sq.changes) { // the owner is not notified, and takes nothing
			sq.spend(sq.cost)
		}
	}
}

// put appends a change of an address without a pending one.
func (sq *sessionQueue) put(c Change, owned bool) {
	if sq.dead > 1024 && sq.dead > len(sq.changes)/2 {
		sq.compact()
	}
	if sq.pending == nil {
		sq.pending = make(map[netip.Addr]pending)
	}
	sq.pending[c.Prefix.Addr()] = pending{sq.base + len(sq.changes), owned}
	sq.changes = append(sq.changes, c)
	sq.cost += sq.costOf(len(sq.changes) - 1)
}

// costOf returns the cost of a pending change behind the one before it.
func (sq *sessionQueue) costOf(i int) int {
	if i > 0 && alike(sq.changes[i].Attrs, sq.changes[i-1].Attrs) {
		return 1
	}
	return distinct
}

// spend reduces the cost of the pending changes, and lets a waiting reader continue.
func (sq *sessionQueue) spend(cost int) {
	if sq.cost = max(0, sq.cost-cost); sq.cost < backlog {
		select {
		case sq.room <- struct{}{}:
		default:
		}
	}
}

// full reports whether the pending changes of a session have reached backlog.
func (q *queue) full(session int) bool {
	full, _ := q.fullness(session)
	return full
}

// fullness is full, with the channel that await uses.
func (q *queue) fullness(session int) (full bool, room <-chan struct{}) {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.sessions[session].cost >= backlog, q.sessions[session].room
}

// await waits while the pending changes of a session have reached backlog, at most for a time.
func (q *queue) await(ctx context.Context, session int, limit time.Duration) {
	full, room := q.fullness(session)
	if !full {
		return
	}
	timer := time.NewTimer(limit)
	defer timer.Stop()
	for q.full(session) {
		select {
		case <-room:
		case <-timer.C:
			return
		case <-ctx.Done():
			return
		}
	}
}

// compact removes canceled changes and keeps the order of the others.
func (sq *sessionQueue) compact() {
	n, event := 0, 0
	for i, c := range sq.changes {
		for ; event < len(sq.events) && sq.events[event].at <= sq.base+i; event++ {
			sq.events[event].at = sq.base + n
		}
		if !c.Prefix.IsValid() {
			continue
		}
		p := sq.pending[c.Prefix.Addr()]
		p.at = sq.base + n
		sq.pending[c.Prefix.Addr()] = p
		sq.changes[n] = c
		n++
	}
	for ; event < len(sq.events); event++ {
		sq.events[event].at = sq.base + n
	}
	clear(sq.changes[n:])
	sq.changes, sq.dead = sq.changes[:n], 0
	cost := 0
	for i := range sq.changes {
		cost += sq.costOf(i)
	}
	sq.spend(sq.cost - cost)
}

// written records that the connection has carried everything up to a mark.
func (q *queue) written(e Written) { latest(q, e.Session, e.Generation, e) }

// refused records the refused routes of a generation.
func (q *queue) refused(e Refused) { latest(q, e.Session, e.Generation, e) }

// latest records an event of a generation that is up. Only the latest pending event of its type is kept.
func latest[E Event](q *queue, session int, generation uint64, e E) {
	q.mu.Lock()
	defer q.mu.Unlock()
	sq := q.sessions[session]
	if !sq.up || sq.gen != generation {
		return
	}
	if !replace(sq, e) {
		sq.push(e)
	}
	q.wake()
}

func (q *queue) fault(e Fault) {
	q.mu.Lock()
	defer q.mu.Unlock()
	sq := q.sessions[e.Session]
	if !replace(sq, e) {
		sq.push(e)
	}
	q.wake()
}

// take appends the pending events to buf, of each session changed routes of a cost up to quota. The session that comes
// first changes from call to call. If events remain, take refills the channel of Ready. The changes of the previous
// call become invalid.
func (q *queue) take(buf []Event) []Event {
	q.mu.Lock()
	defer q.mu.Unlock()
	more := false
	for i := range q.sessions {
		at := (q.first + i) % len(q.sessions)
		sq, kept := q.sessions[at], len(buf)
		buf = sq.take(buf, q.owned[at])
		if q.owned[at] < 0 {
			clear(buf[kept:])
			buf = buf[:kept]
		}
		more = more || len(sq.events) > 0 || len(sq.changes) > 0
	}
	q.first = (q.first + 1) % len(q.sessions)
	if more {
		q.wake()
	}
	return buf
}

func (sq *sessionQueue) take(buf []Event, session int) []Event {
	clear(sq.taken) // release the attributes
	if sq.taken = sq.taken[:0]; cap(sq.taken) > keptChanges {
		sq.taken = nil
	}
	if len(sq.events) == 0 && len(sq.changes) == 0 {
		return buf
	}
	if sq.dead > 0 {
		sq.compact()
	}
	n, cost := sq.affordable()
	defer func() { sq.spend(cost) }()
	from, events := 0, 0
	emit := func(to int) {
		if to > from {
			buf = append(buf, Routes{Session: session, Generation: sq.gen, Changes: sq.changes[from:to:to]})
			from = to
		}
	}
	for ; events < len(sq.events) && sq.events[events].at-sq.base <= n; events++ {
		emit(sq.events[events].at - sq.base)
		buf = append(buf, ownedBy(sq.events[events].event, session))
	}
	emit(n)
	sq.events = slices.Delete(sq.events, 0, events)
	if n == len(sq.changes) {
		cost = sq.cost // estimates included
		if sq.base+n > keptChanges {
			sq.pending = nil
		}
		clear(sq.pending)
		sq.changes, sq.taken, sq.base = sq.taken[:0], sq.changes, 0
		return buf
	}
	for _, c := range sq.changes[:n] {
		delete(sq.pending, c.Prefix.Addr())
	}
	sq.taken, sq.changes, sq.base = nil, sq.changes[n:], sq.base+n
	return buf
}

// ownedBy returns an event with the owner's index of its session.
func ownedBy(e Event, index int) Event {
	switch e := e.(type) {
	case SessionUp:
		e.Session = index
		return e
	case SessionDown:
		e.Session = index
		return e
	case EndOfRIB:
		e.Session = index
		return e
	case Refused:
		e.Session = index
		return e
	case Written:
		e.Session = index
		return e
	case Fault:
		e.Session = index
		return e
	}
	return e // routes are created with the index
}

// affordable returns the number of pending changes, from the first, whose cost is within quota, and this cost.
func (sq *sessionQueue) affordable() (n, cost int) {
	for i := range sq.changes {
		next := sq.costOf(i)
		if cost+next > quota {
			return i, cost
		}
		cost += next
	}
	return len(sq.changes), cost
}

// alike reports whether routes have equal communities and signals, or are both withdrawn.
func alike(a, b *fare.Attributes) bool {
	return a == b || a != nil && b != nil && slices.Equal(a.Communities, b.Communities) && a.Signals == b.Signals && a.Extended == b.Extended
}

// present returns the number of routes held from a session's peer.
func (q *queue) present(session int) int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.sessions[session].present
}
