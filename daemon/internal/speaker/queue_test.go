package speaker

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fared/fared/daemon/internal/guard"
	"github.com/fared/fared/fare"
)

func prefix(n int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(n >> 16), byte(n >> 8), byte(n)}), 32)
}

// attrs returns attributes with a path of one AS number, and a community that differs for each number.
func attrs(as uint32) *fare.Attributes {
	return &fare.Attributes{ASPath: []uint32{as}, Communities: []fare.Community{{0, 4, 0, 0, byte(as >> 24), byte(as >> 16), byte(as >> 8), byte(as)}}}
}

// feed is the reader's end of a queue: it keeps the peers' tables, as guards do, and reports only changes of them.
type feed struct {
	*queue
	tables map[[2]uint64]map[netip.Prefix]uint32 // by session and generation
}

func newFeed(sessions int) *feed {
	return &feed{newQueue(sessions), map[[2]uint64]map[netip.Prefix]uint32{}}
}

func (f *feed) table(session int, gen uint64) map[netip.Prefix]uint32 {
	key := [2]uint64{uint64(session), gen}
	if f.tables[key] == nil {
		f.tables[key] = map[netip.Prefix]uint32{}
	}
	return f.tables[key]
}

func (f *feed) announce(session int, gen uint64, p netip.Prefix, as uint32) {
	table := f.table(session, gen)
	if before, ok := table[p]; !ok || before != as {
		f.change(session, gen, []guard.Change{{Prefix: p, Attrs: attrs(as), New: !ok}})
	}
	table[p] = as
}

func (f *feed) withdraw(session int, gen uint64, p netip.Prefix) {
	table := f.table(session, gen)
	if _, ok := table[p]; ok {
		f.change(session, gen, []guard.Change{{Prefix: p}})
	}
	delete(table, p)
}

func (f *feed) endOfRIB(session int, gen uint64, family Family) {
	f.change(session, gen, []guard.Change{{Ended: family}})
}

// texts formats events, and each changed route.
func texts(events []Event) []string {
	var s []string
	for _, e := range events {
		switch e := e.(type) {
		case Routes:
			for _, c := range e.Changes {
				if c.Attrs != nil {
					s = append(s, fmt.Sprintf("%d/%d +%v %v", e.Session, e.Generation, c.Prefix, c.Attrs.ASPath[0]))
				} else {
					s = append(s, fmt.Sprintf("%d/%d -%v", e.Session, e.Generation, c.Prefix))
				}
			}
		case SessionUp:
			s = append(s, fmt.Sprintf("%d/%d up", e.Session, e.Generation))
		case SessionDown:
			s = append(s, fmt.Sprintf("%d/%d down", e.Session, e.Generation))
		case EndOfRIB:
			s = append(s, fmt.Sprintf("%d/%d end %v", e.Session, e.Generation, e.Family))
		case Written:
			s = append(s, fmt.Sprintf("%d/%d written %d", e.Session, e.Generation, e.Mark))
		case Refused:
			s = append(s, fmt.Sprintf("%d/%d refused %d", e.Session, e.Generation, len(e.Routes)))
		case Fault:
			s = append(s, fmt.Sprintf("%d fault %s", e.Session, e.Reason))
		}
	}
	return s
}

func TestQueueCoalesces(t *testing.T) {
	type do = func(f *feed)
	up := func(g uint64) do { return func(f *feed) { f.sessionUp(SessionUp{Generation: g}, 0) } }
	down := func(g uint64) do { return func(f *feed) { f.sessionDown(SessionDown{Generation: g}) } }
	route := func(g uint64, n int, as uint32) do { return func(f *feed) { f.announce(0, g, prefix(n), as) } }
	gone := func(g uint64, n int) do { return func(f *feed) { f.withdraw(0, g, prefix(n)) } }
	end := func(g uint64) do { return func(f *feed) { f.endOfRIB(0, g, IPv4) } }
	written := func(g, mark uint64) do { return func(f *feed) { f.written(Written{Generation: g, Mark: mark}) } }
	refused := func(g uint64, n int) do {
		return func(f *feed) { f.refused(Refused{Generation: g, Routes: make([]guard.Refused, n)}) }
	}
	fault := func(reason string) do { return func(f *feed) { f.fault(Fault{Reason: reason}) } }
	take := do(nil)
	for _, c := range []struct {
		name   string
		script []do
		want   []string
	}{
		{"last value of a prefix", []do{up(1), route(1, 1, 1), route(1, 2, 1), route(1, 1, 2)}, []string{"0/1 up", "0/1 +10.0.0.1/32 2", "0/1 +10.0.0.2/32 1"}},
		{"comes and goes untaken", []do{up(1), route(1, 1, 1), gone(1, 1)}, []string{"0/1 up"}},
		{"comes, goes and comes untaken", []do{up(1), route(1, 1, 1), gone(1, 1), route(1, 1, 2)}, []string{"0/1 up", "0/1 +10.0.0.1/32 2"}},
		{"goes and comes after it was taken", []do{up(1), route(1, 1, 1), take, gone(1, 1), route(1, 1, 2)}, []string{"0/1 up", "0/1 +10.0.0.1/32 1", "0/1 +10.0.0.1/32 2"}},
		{"goes, comes and goes after it was taken", []do{up(1), route(1, 1, 1), take, gone(1, 1), route(1, 1, 2), gone(1, 1)}, []string{"0/1 up", "0/1 +10.0.0.1/32 1", "0/1 -10.0.0.1/32"}},
		{"changes and goes after it was taken", []do{up(1), route(1, 1, 1), take, route(1, 1, 2), gone(1, 1)}, []string{"0/1 up", "0/1 +10.0.0.1/32 1", "0/1 -10.0.0.1/32"}},
		{"withdrawn after it was taken", []do{up(1), route(1, 1, 1), take, gone(1, 1), take, gone(1, 1)}, []string{"0/1 up", "0/1 +10.0.0.1/32 1", "0/1 -10.0.0.1/32"}},
		{"never delivered", []do{up(1), route(1, 1, 1), end(1), down(1)}, nil},
		{"down drops the pending", []do{up(1), take, route(1, 1, 1), down(1)}, []string{"0/1 up", "0/1 down"}},
		{"down and up again", []do{up(1), take, down(1), up(2), route(2, 1, 1)}, []string{"0/1 up", "0/1 down", "0/2 up", "0/2 +10.0.0.1/32 1"}},
		{"flap in between", []do{up(1), take, down(1), up(2), route(2, 1, 1), down(2), up(3)}, []string{"0/1 up", "0/1 down", "0/3 up"}},
		{"old generation", []do{up(1), route(1, 1, 1), take, down(1), up(2), route(1, 1, 2), gone(1, 1), end(1), written(1, 7)},
			[]string{"0/1 up", "0/1 +10.0.0.1/32 1", "0/1 down", "0/2 up"}},
		{"down came first", []do{down(1), up(1), route(1, 1, 1)}, nil},
		{"End-of-RIB keeps its place", []do{up(1), route(1, 1, 1), end(1), route(1, 2, 1), route(1, 1, 2)},
			[]string{"0/1 up", "0/1 +10.0.0.1/32 2", "0/1 end ipv4", "0/1 +10.0.0.2/32 1"}},
		{"End-of-RIB among canceled routes", []do{up(1), route(1, 1, 1), route(1, 2, 1), end(1), route(1, 3, 1), gone(1, 1), gone(1, 3)},
			[]string{"0/1 up", "0/1 +10.0.0.2/32 1", "0/1 end ipv4"}},
		{"latest fault", []do{fault("a"), fault("b"), take, fault("c")}, []string{"0 fault b", "0 fault c"}},
		{"a fault outlives its session", []do{up(1), take, route(1, 1, 1), fault("a"), down(1)}, []string{"0/1 up", "0 fault a", "0/1 down"}},
		{"latest refused routes", []do{up(1), refused(1, 2), end(1), refused(1, 1), take, refused(1, 0)}, []string{"0/1 up", "0/1 refused 1", "0/1 end ipv4", "0/1 refused 0"}},
		{"refused routes end with their session", []do{up(1), take, refused(1, 2), down(1), refused(1, 3), up(2), refused(1, 3)}, []string{"0/1 up", "0/1 down", "0/2 up"}},
		{"latest mark", []do{up(1), written(1, 7), route(1, 1, 1), written(1, 8)}, []string{"0/1 up", "0/1 written 8", "0/1 +10.0.0.1/32 1"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFeed(1)
			var got []string
			for _, step := range c.script {
				if step == nil {
					got = append(got, texts(f.take(nil))...)
					continue
				}
				step(f)
			}
			got = append(got, texts(f.take(nil))...)
			if !slices.Equal(got, c.want) {
				t.Errorf("got  %q\nwant %q", got, c.want)
			}
			if again := f.take(nil); len(again) != 0 {
				t.Errorf("left behind: %q", texts(again))
			}
		})
	}
}

// TestQueueAgainstDumbTwin drives the queue at random: whenever all events are
// taken, the state that the owner derived from them must equal the actual
// state.
func TestQueueAgainstDumbTwin(t *testing.T) {
	const sessions, prefixes = 3, 40
	for seed := range uint64(6) {
		rng := rand.New(rand.NewPCG(seed, 1))
		f := newFeed(sessions)
		type side struct {
			up     bool
			gen    uint64
			routes map[netip.Prefix]uint32
		}
		var truth, owner [sessions]side
		next := uint64(0)
		var buf []Event
		for range 5000 {
			s := rng.IntN(sessions)
			x := &truth[s]
			switch n := rng.IntN(100); {
			case n < 3 && !x.up:
				next++
				*x = side{up: true, gen: next, routes: map[netip.Prefix]uint32{}}
				f.sessionUp(SessionUp{Session: s, Generation: next}, 0)
			case n < 5 && x.up:
				x.up, x.routes = false, nil
				f.sessionDown(SessionDown{Session: s, Generation: x.gen})
			case n < 8:
				f.announce(s, x.gen-min(x.gen, 1), prefix(1), 666)
			case n < 60:
				p, as := prefix(rng.IntN(prefixes)), rng.Uint32N(4)
				if x.up {
					x.routes[p] = as
				}
				f.announce(s, x.gen, p, as)
			case n < 95:
				p := prefix(rng.IntN(prefixes))
				delete(x.routes, p)
				f.withdraw(s, x.gen, p)
			default:
				buf = f.take(buf[:0])
				for _, e := range buf {
					switch e := e.(type) {
					case SessionUp:
						owner[e.Session] = side{up: true, gen: e.Generation, routes: map[netip.Prefix]uint32{}}
					case SessionDown:
						if o := &owner[e.Session]; !o.up || o.gen != e.Generation {
							t.Fatalf("seed %d: %+v after %+v", seed, e, *o)
						}
						owner[e.Session].up, owner[e.Session].routes = false, nil
					case Routes:
						o := &owner[e.Session]
						if !o.up || o.gen != e.Generation || len(e.Changes) == 0 {
							t.Fatalf("seed %d: %+v after %+v", seed, e, *o)
						}
						for _, c := range e.Changes {
							if _, ok := o.routes[c.Prefix]; !ok && c.Attrs == nil {
								t.Fatalf("seed %d: withdrawal of the unknown %v", seed, c.Prefix)
							}
							if delete(o.routes, c.Prefix); c.Attrs != nil {
								o.routes[c.Prefix] = c.Attrs.ASPath[0]
							}
						}
					}
				}
				for i := range truth {
					if !truth[i].up {
						truth[i].gen = owner[i].gen // a generation that the owner never received
					}
					if o, w := owner[i], truth[i]; o.up != w.up || o.gen != w.gen || !maps.Equal(o.routes, w.routes) {
						t.Fatalf("seed %d:\nowner %v\ntruth %v", seed, owner, truth)
					}
					if truth[i].up && f.present(i) != len(truth[i].routes) {
						t.Fatalf("seed %d: %d present, want %d", seed, f.present(i), len(truth[i].routes))
					}
				}
			}
			if n := f.slots(); n > 2*(sessions*(prefixes+4))+2048 {
				t.Fatalf("seed %d: %d slots pending", seed, n)
			}
		}
	}
}

// TestQueueIsBounded flaps sessions without end while the owner never takes.
func TestQueueIsBounded(t *testing.T) {
	f := newFeed(2)
	f.sessionUp(SessionUp{Session: 1, Generation: 1}, 0)
	for g := uint64(1); g <= 700; g++ {
		f.sessionUp(SessionUp{Generation: g}, 0)
		for i := range 100 {
			f.announce(0, g, prefix(i), 1)
			f.announce(1, 1, prefix(int(g)*100+i), 1)
			f.withdraw(1, 1, prefix(int(g)*100+i))
		}
		f.endOfRIB(0, g, IPv6)
		f.fault(Fault{Reason: "again"})
		f.sessionDown(SessionDown{Generation: g})
		delete(f.tables, [2]uint64{0, g})
		if n := f.slots(); n > 4096 {
			t.Fatalf("%d slots after %d flaps", n, g)
		}
	}
	if got := texts(f.take(nil)); !slices.Equal(got, []string{"0 fault again", "1/1 up"}) {
		t.Errorf("got %q", got)
	}
}

// TestChangesDoNotAllocate checks that the way of changes through the queue allocates nothing for a route, and one
// event for a session.
func TestChangesDoNotAllocate(t *testing.T) {
	q := newQueue(1)
	q.sessionUp(SessionUp{Generation: 1}, 0)
	const n = 100
	var sets [2][]guard.Change
	for i := range n {
		for k := range sets {
			sets[k] = append(sets[k], guard.Change{Prefix: prefix(i), Attrs: attrs(uint32(k)), New: false})
		}
	}
	events := make([]Event, 0, 4)
	round, taken := 0, 0
	allocs := testing.AllocsPerRun(100, func() {
		q.change(0, 1, sets[round%2])
		round++
		if events = q.take(events[:0]); len(events) > 0 {
			taken += len(events[len(events)-1].(Routes).Changes)
		}
	})
	if taken != n*round || allocs > 1 {
		t.Errorf("%d routes of %d taken, %.0f allocations for %d", taken, n*round, allocs, n)
	}
}

// slots returns the number of places in the queue, including canceled ones.
func (q *queue) slots() (n int) {
	for i := range q.sessions {
		n += len(q.sessions[i].changes) + len(q.sessions[i].events)
	}
	return n
}

// TestTakenChangesStay checks that taken changes keep their content until the next call, whatever arrives meanwhile.
func TestTakenChangesStay(t *testing.T) {
	f := newFeed(1)
	f.sessionUp(SessionUp{Generation: 1}, 0)
	for round := range uint32(20) {
		for i := range 50 * (1 + int(round)%3*10) {
			f.announce(0, 1, prefix(i), 2*round)
		}
		events := f.take(nil)
		before := texts(events)
		for i := range 2000 {
			f.announce(0, 1, prefix(i), 2*round+1)
		}
		if after := texts(events); !slices.Equal(before, after) {
			t.Fatalf("round %d: taken changes were overwritten", round)
		}
	}
}

// TestTakeIsFair checks that a session with thousands of changes leaves room for other sessions in every call, keeps
// its own order, and is fully taken in the end.
func TestTakeIsFair(t *testing.T) {
	const most = quota / distinct // distinct routes in a turn
	const routes = 5*most + 7
	f := newFeed(3)
	for s := range 3 {
		f.sessionUp(SessionUp{Session: s, Generation: 1}, 0)
	}
	for i := range routes {
		f.announce(1, 1, prefix(i), uint32(i))
	}
	f.endOfRIB(1, 1, IPv4)
	f.announce(1, 1, prefix(routes), routes)
	next, turns, ended := 0, 0, -1
	for next < routes {
		select {
		case <-f.ready:
		default:
			t.Fatalf("no ready although %d of %d routes were taken", next, routes)
		}
		turns++
		late := prefix(1<<20 + turns)
		f.announce(2, 1, late, 2)
		if turns == 1 {
			f.withdraw(1, 1, prefix(routes-1)) // canceled before its turn
		}
		if i := next + most; i < routes-1 {
			f.announce(1, 1, prefix(i), uint32(1<<20+turns)) // changed before its turn
		}
		count, sawLate := 0, false
		for _, e := range f.take(nil) {
			switch e := e.(type) {
			case Routes:
				if e.Session == 2 {
					sawLate = len(e.Changes) == 1 && e.Changes[0].Prefix == late
					continue
				}
				for _, c := range e.Changes {
					if want := prefix(next); c.Prefix != want && (next != routes-1 || c.Prefix != prefix(routes)) {
						t.Fatalf("turn %d: %v, want %v", turns, c.Prefix, want)
					}
					next++
					count++
				}
			case EndOfRIB:
				ended = next
			}
		}
		if count > most || !sawLate {
			t.Fatalf("turn %d: %d routes of the busy session, the other's seen: %v", turns, count, sawLate)
		}
	}
	if turns != 6 || ended != routes-1 {
		t.Errorf("%d routes in %d turns, End-of-RIB behind %d; want %d in 6, behind %d", next, turns, ended, routes, routes-1)
	}
}

// TestTakeIsGenerousToEqualRoutes checks that a table of equal bandwidths is taken in one call, whatever the paths, and
// so are withdrawals. The same routes with bandwidths that alternate are not.
func TestTakeIsGenerousToEqualRoutes(t *testing.T) {
	const routes = 16384
	equal, other := attrs(1), attrs(2)
	longer := &fare.Attributes{ASPath: []uint32{1, 2, 3}, Communities: equal.Communities}
	for _, c := range []struct {
		name  string
		attrs [2]*fare.Attributes
		most  int
	}{
		{"equal", [2]*fare.Attributes{equal, equal}, routes},
		{"equal, with different paths", [2]*fare.Attributes{equal, longer}, routes},
		{"different", [2]*fare.Attributes{equal, other}, quota / distinct},
	} {
		q := newQueue(1)
		q.sessionUp(SessionUp{Generation: 1}, 0)
		q.take(nil)
		take := func(what string, want int) {
			t.Helper()
			if got := len(q.take(nil)[0].(Routes).Changes); got != want {
				t.Errorf("%s, %s: %d of %d routes in a call, want %d", c.name, what, got, routes, want)
			}
		}
		var changes []guard.Change
		for i := range routes {
			changes = append(changes, guard.Change{Prefix: prefix(i), Attrs: c.attrs[i%2], New: true})
		}
		q.change(0, 1, changes)
		take("announced", c.most)
		for len(q.sessions[0].changes) > 0 {
			q.take(nil)
		}
		for i := range changes {
			changes[i] = guard.Change{Prefix: changes[i].Prefix}
		}
		q.change(0, 1, changes)
		take("withdrawn", routes)
	}
}

// TestNews checks which changes of the queue the owner has to be notified of.
func TestNews(t *testing.T) {
	q := newQueue(1)
	q.sessionUp(SessionUp{Generation: 1}, 0)
	q.take(nil)
	route := []guard.Change{{Prefix: prefix(0), Attrs: attrs(1), New: true}}
	gone := []guard.Change{{Prefix: prefix(0)}}
	expect := func(what string, got, want bool) {
		t.Helper()
		if got != want {
			t.Errorf("%s: news %v, want %v", what, got, want)
		}
	}
	expect("no change", q.change(0, 1, nil), false)
	expect("a route of an earlier generation", q.change(0, 0, route), false)
	expect("a route", q.change(0, 1, route), true)
	expect("the end of a burst with a route", q.change(0, 1, nil), true)
	expect("its withdrawal before the owner has seen it", q.change(0, 1, gone), false)
	expect("End-of-RIB", q.change(0, 1, []guard.Change{{Ended: IPv4}}), true)
	expect("the end of the session", q.sessionDown(SessionDown{Generation: 1}), true)
	expect("its end a second time", q.sessionDown(SessionDown{Generation: 1}), false)
	q.sessionUp(SessionUp{Generation: 2}, 0)
	expect("the end of a session that the owner has not seen", q.sessionDown(SessionDown{Generation: 2}), false)
}

// TestTakeBeginsElsewhere checks that no session always comes last.
func TestTakeBeginsElsewhere(t *testing.T) {
	f := newFeed(3)
	for s := range 3 {
		f.sessionUp(SessionUp{Session: s, Generation: 1}, 0)
	}
	f.take(nil)
	var firsts []int
	for i := range 6 {
		for s := range 3 {
			f.announce(s, 1, prefix(1), uint32(i))
		}
		firsts = append(firsts, f.take(nil)[0].(Routes).Session)
	}
	if want := []int{1, 2, 0, 1, 2, 0}; !slices.Equal(firsts, want) {
		t.Errorf("sessions that came first: %v, want %v", firsts, want)
	}
}

// TestReaderWaitsForOwner checks that a reader waits once pending changes that all differ have reached backlog, until
// the owner has taken some of them; that changes that are alike do not make it wait; and that no wait is left over when
// nothing is pending.
func TestReaderWaitsForOwner(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFeed(2)
		var buf []Event
		for s := range 2 {
			f.sessionUp(SessionUp{Session: s, Generation: 1}, 0)
		}
		waits := func() time.Duration {
			began := time.Now()
			f.await(t.Context(), 0, time.Second)
			return time.Since(began)
		}
		const n = backlog / distinct
		for i := range n - 1 {
			f.announce(0, 1, prefix(i), uint32(i))
		}
		if d := waits(); d != 0 {
			t.Errorf("%d pending changes: waits for %v", n-1, d)
		}
		f.announce(0, 1, prefix(n), n)
		f.announce(0, 1, prefix(0), 2*n) // replaces a pending one
		if d := waits(); d != time.Second {
			t.Errorf("%d pending changes: waits for %v, want the limit", n, d)
		}
		began := time.Now()
		f.await(t.Context(), 1, time.Second)
		if d := time.Since(began); d != 0 {
			t.Errorf("another session waits for %v", d)
		}
		time.AfterFunc(time.Millisecond, func() { f.take(nil) })
		if d := waits(); d != time.Millisecond {
			t.Errorf("the owner takes changes after 1ms: waits for %v", d)
		}
		for buf = f.take(nil); len(buf) > 0; {
			buf = f.take(buf[:0])
		}
		if cost := f.sessions[0].cost; cost != 0 {
			t.Errorf("cost %d without pending changes", cost)
		}
		for i := range 2 * n {
			f.announce(0, 1, prefix(n+1+i), 1)
		}
		if d := waits(); d != 0 {
			t.Errorf("%d pending changes that are alike: waits for %v", 2*n, d)
		}
		for i := range 2 * n { // routes that the owner never sees
			f.announce(0, 1, prefix(10*n+i), uint32(i))
		}
		for i := range 2 * n {
			f.withdraw(0, 1, prefix(10*n+i))
			f.withdraw(0, 1, prefix(n+1+i))
		}
		if d := waits(); d != 0 {
			t.Errorf("only canceled changes: waits for %v", d)
		}
		for i := range 2 * n {
			f.announce(0, 1, prefix(20*n+i), uint32(i))
		}
		f.sessionDown(SessionDown{Session: 0, Generation: 1})
		if d := waits(); d != 0 {
			t.Errorf("the session has ended: waits for %v", d)
		}
	})
}
