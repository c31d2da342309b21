package speaker

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/fared/fared/fare"
)

func prefix(n int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(n >> 16), byte(n >> 8), byte(n)}), 32)
}

func attrs(as uint32) *fare.Attributes { return &fare.Attributes{ASPath: []uint32{as}} }

func TestQueueCoalesces(t *testing.T) {
	p, r := prefix(1), prefix(2)
	up := func(g uint64) SessionUp { return SessionUp{Generation: g} }
	down := func(g uint64) SessionDown { return SessionDown{Generation: g} }
	route := func(g uint64, p netip.Prefix, as uint32) Route {
		return Route{Generation: g, Prefix: p, Attrs: attrs(as)}
	}
	gone := func(g uint64, p netip.Prefix) Withdraw { return Withdraw{Generation: g, Prefix: p} }
	eor := func(g uint64) EndOfRIB { return EndOfRIB{Generation: g, Family: IPv4} }
	take := Event(nil) // a marker in a script: take here
	for _, c := range []struct {
		name   string
		script []Event
		want   []Event
	}{
		{"last value of a prefix", []Event{up(1), route(1, p, 1), route(1, r, 1), route(1, p, 2)}, []Event{up(1), route(1, p, 2), route(1, r, 1)}},
		{"comes and goes untaken", []Event{up(1), route(1, p, 1), gone(1, p)}, []Event{up(1)}},
		{"goes and comes after it was taken", []Event{up(1), route(1, p, 1), take, gone(1, p), route(1, p, 2)}, []Event{up(1), route(1, p, 1), route(1, p, 2)}},
		{"withdrawn after it was taken", []Event{up(1), route(1, p, 1), take, gone(1, p), take, gone(1, p)}, []Event{up(1), route(1, p, 1), gone(1, p)}},
		{"equal again", []Event{up(1), route(1, p, 1), take, route(1, p, 1)}, []Event{up(1), route(1, p, 1)}},
		{"withdraw of the unknown", []Event{up(1), gone(1, p)}, []Event{up(1)}},
		{"never delivered", []Event{up(1), route(1, p, 1), eor(1), down(1)}, nil},
		{"down drops what was pending", []Event{up(1), take, route(1, p, 1), down(1)}, []Event{up(1), down(1)}},
		{"down and up again", []Event{up(1), take, down(1), up(2), route(2, p, 1)}, []Event{up(1), down(1), up(2), route(2, p, 1)}},
		{"flap in between", []Event{up(1), take, down(1), up(2), route(2, p, 1), down(2), up(3)}, []Event{up(1), down(1), up(3)}},
		{"old generation", []Event{up(1), take, down(1), up(2), route(1, p, 1), gone(1, p), eor(1)}, []Event{up(1), down(1), up(2)}},
		{"down came first", []Event{down(1), up(1), route(1, p, 1)}, nil},
		{"end-of-RIB stands behind", []Event{up(1), route(1, p, 1), eor(1), route(1, r, 1), eor(1)}, []Event{up(1), route(1, p, 1), route(1, r, 1), eor(1)}},
		{"latest fault", []Event{Fault{Reason: "a"}, Fault{Reason: "b"}, take, Fault{Reason: "c"}}, []Event{Fault{Reason: "b"}, Fault{Reason: "c"}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			q := newQueue(1)
			var got []Event
			for _, e := range c.script {
				if e == nil {
					got = q.take(got)
					continue
				}
				q.add(e)
			}
			got = q.take(got)
			if g, w := fmt.Sprintf("%+v", plainEvents(got)), fmt.Sprintf("%+v", plainEvents(c.want)); g != w {
				t.Errorf("got  %s\nwant %s", g, w)
			}
			if again := q.take(nil); len(again) != 0 {
				t.Errorf("left behind: %v", again)
			}
		})
	}
}

// add enqueues any event.
func (q *queue) add(e Event) {
	switch e := e.(type) {
	case SessionUp:
		q.sessionUp(e, 0)
	case SessionDown:
		q.sessionDown(e)
	case Route:
		q.route(e)
	case Withdraw:
		q.withdraw(e)
	case EndOfRIB:
		q.endOfRIB(e)
	case Fault:
		q.fault(e)
	}
}

// plainEvents formats events with their attributes instead of pointers.
func plainEvents(events []Event) []string {
	var s []string
	for _, e := range events {
		if r, ok := e.(Route); ok {
			s = append(s, fmt.Sprintf("route %d/%d %v %v", r.Session, r.Generation, r.Prefix, r.Attrs.ASPath))
		} else {
			s = append(s, fmt.Sprintf("%T %+v", e, e))
		}
	}
	return s
}

// TestQueueAgainstDumbTwin drives the queue at random: whenever all events are
// taken, the state that the owner derived from them must equal the actual
// state.
func TestQueueAgainstDumbTwin(t *testing.T) {
	const sessions, prefixes = 3, 40
	for seed := range uint64(6) {
		rng := rand.New(rand.NewPCG(seed, 1))
		q := newQueue(sessions)
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
				q.add(SessionUp{Session: s, Generation: next})
			case n < 5 && x.up:
				x.up, x.routes = false, nil
				q.add(SessionDown{Session: s, Generation: x.gen})
			case n < 8:
				q.add(Route{Session: s, Generation: x.gen - min(x.gen, 1), Prefix: prefix(1), Attrs: attrs(666)})
			case n < 60:
				p, as := prefix(rng.IntN(prefixes)), rng.Uint32N(4)
				if x.up {
					x.routes[p] = as
				}
				q.add(Route{Session: s, Generation: x.gen, Prefix: p, Attrs: attrs(as)})
			case n < 95:
				p := prefix(rng.IntN(prefixes))
				delete(x.routes, p)
				q.add(Withdraw{Session: s, Generation: x.gen, Prefix: p})
			default:
				buf = q.take(buf[:0])
				for _, e := range buf {
					switch e := e.(type) {
					case SessionUp:
						owner[e.Session] = side{up: true, gen: e.Generation, routes: map[netip.Prefix]uint32{}}
					case SessionDown:
						if o := &owner[e.Session]; !o.up || o.gen != e.Generation {
							t.Fatalf("seed %d: %+v after %+v", seed, e, *o)
						}
						owner[e.Session].up, owner[e.Session].routes = false, nil
					case Route:
						if o := &owner[e.Session]; !o.up || o.gen != e.Generation {
							t.Fatalf("seed %d: %+v after %+v", seed, e, *o)
						}
						owner[e.Session].routes[e.Prefix] = e.Attrs.ASPath[0]
					case Withdraw:
						if _, ok := owner[e.Session].routes[e.Prefix]; !ok {
							t.Fatalf("seed %d: withdraw of the unknown %v", seed, e.Prefix)
						}
						delete(owner[e.Session].routes, e.Prefix)
					}
				}
				if g, w := fmt.Sprint(owner), fmt.Sprint(truth); g != w {
					for i := range truth {
						if !truth[i].up {
							truth[i].gen = owner[i].gen // a generation that the owner never received
						}
					}
					if g, w := fmt.Sprint(owner), fmt.Sprint(truth); g != w {
						t.Fatalf("seed %d:\nowner %s\ntruth %s", seed, g, w)
					}
				}
				for i := range truth {
					if truth[i].up && q.present(i) != len(truth[i].routes) {
						t.Fatalf("seed %d: %d present, want %d", seed, q.present(i), len(truth[i].routes))
					}
				}
			}
			if n := q.slots(); n > 2*(sessions*(prefixes+4))+2048 {
				t.Fatalf("seed %d: %d slots pending", seed, n)
			}
		}
	}
}

// TestQueueIsBounded flaps sessions without end while the owner never takes.
func TestQueueIsBounded(t *testing.T) {
	q := newQueue(2)
	q.sessionUp(SessionUp{Session: 1, Generation: 1}, 0)
	for g := uint64(1); g <= 2000; g++ {
		q.sessionUp(SessionUp{Generation: g}, 0)
		for i := range 100 {
			q.route(Route{Generation: g, Prefix: prefix(i), Attrs: attrs(1)})
			q.route(Route{Session: 1, Generation: 1, Prefix: prefix(int(g)*100 + i), Attrs: attrs(1)})
			q.withdraw(Withdraw{Session: 1, Generation: 1, Prefix: prefix(int(g)*100 + i)})
		}
		q.endOfRIB(EndOfRIB{Generation: g, Family: IPv6})
		q.sessionDown(SessionDown{Generation: g})
		if n := q.slots(); n > 4096 {
			t.Fatalf("%d slots after %d flaps", n, g)
		}
	}
	if got := q.take(nil); !slices.Equal(got, []Event{SessionUp{Session: 1, Generation: 1}}) {
		t.Errorf("got %v", got)
	}
}

func TestTakeDoesNotAllocate(t *testing.T) {
	q := newQueue(1)
	q.sessionUp(SessionUp{Generation: 1}, 0)
	events := make([][2]Route, 100)
	for i := range events {
		events[i] = [2]Route{{Generation: 1, Prefix: prefix(i), Attrs: attrs(1)}, {Generation: 1, Prefix: prefix(i), Attrs: attrs(2)}}
	}
	boxed := make([]Event, 0, 256)
	round := 0
	fill := func() {
		for i := range events {
			q.route(events[i][round%2])
		}
		round++
	}
	fill()
	boxed = q.take(boxed[:0])
	taken, runs := 0, 0
	both := testing.AllocsPerRun(100, func() { fill(); boxed = q.take(boxed[:0]); taken += len(boxed); runs++ })
	alone := testing.AllocsPerRun(100, func() { fill(); q.discard() })
	if taken != 100*runs {
		t.Fatalf("%d events taken in %d runs", taken, runs)
	}
	if both > alone {
		t.Errorf("Take allocates %.1f times for 100 events", both-alone)
	}
}

// slots returns the number of slots in the queue, including taken and canceled ones.
func (q *queue) slots() (n int) {
	for i := range q.sessions {
		n += len(q.sessions[i].pending)
	}
	return n
}

// discard empties the queue as take does, without returning events.
func (q *queue) discard() {
	q.mu.Lock()
	defer q.mu.Unlock()
	sq := &q.sessions[0]
	for i := range sq.pending {
		if k := sq.pending[i].known; k != nil {
			k.slot, k.taken = -1, true
		}
	}
	clear(sq.pending)
	sq.pending, sq.head = sq.pending[:0], 0
}

// TestTakeIsFair checks that a session with thousands of changes leaves room for other sessions in every call, keeps its own order, and is fully
// taken in the end.
func TestTakeIsFair(t *testing.T) {
	const routes = 5*quota + 7
	q := newQueue(3)
	for s := range 3 {
		q.sessionUp(SessionUp{Session: s, Generation: 1}, 0)
	}
	for i := range routes {
		q.route(Route{Session: 1, Generation: 1, Prefix: prefix(i), Attrs: attrs(1)})
	}
	q.endOfRIB(EndOfRIB{Session: 1, Generation: 1, Family: IPv4})
	next, turns, ended := 0, 0, false
	for !ended {
		select {
		case <-q.ready:
		default:
			t.Fatalf("no ready although %d of %d routes were taken", next, routes)
		}
		turns++
		late := prefix(100000 + turns)
		q.route(Route{Session: 2, Generation: 1, Prefix: late, Attrs: attrs(2)})
		q.withdraw(Withdraw{Session: 1, Generation: 1, Prefix: prefix(routes - 1)}) // canceled before its turn
		events := q.take(nil)
		count, sawLate := 0, false
		for _, e := range events {
			switch e := e.(type) {
			case Route:
				if e.Session == 2 {
					sawLate = sawLate || e.Prefix == late
					continue
				}
				if e.Prefix != prefix(next) {
					t.Fatalf("turn %d: %v, want %v", turns, e.Prefix, prefix(next))
				}
				next++
				count++
			case EndOfRIB:
				ended = true
			}
		}
		if count > quota || !sawLate {
			t.Fatalf("turn %d: %d routes of the busy session, the other's seen: %v", turns, count, sawLate)
		}
	}
	if next != routes-1 || turns != 6 {
		t.Errorf("%d routes in %d turns, want %d in 6", next, turns, routes-1)
	}
}

// TestTakeBeginsElsewhere checks that no session always comes last.
func TestTakeBeginsElsewhere(t *testing.T) {
	q := newQueue(3)
	for s := range 3 {
		q.sessionUp(SessionUp{Session: s, Generation: 1}, 0)
	}
	q.take(nil)
	var firsts []int
	for i := range 6 {
		for s := range 3 {
			q.route(Route{Session: s, Generation: 1, Prefix: prefix(1), Attrs: attrs(uint32(i))})
		}
		firsts = append(firsts, q.take(nil)[0].(Route).Session)
	}
	if want := []int{1, 2, 0, 1, 2, 0}; !slices.Equal(firsts, want) {
		t.Errorf("sessions that came first: %v, want %v", firsts, want)
	}
}
