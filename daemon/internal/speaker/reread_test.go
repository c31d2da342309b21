package speaker

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/fared/fared/fare"
)

// The routes of a leaf in tests of rereading, and one that the leaf does not announce.
var (
	lost, changed, intact = netip.MustParsePrefix("10.0.0.1/32"), netip.MustParsePrefix("10.0.0.2/32"), netip.MustParsePrefix("fd00::4/128")
	ghost                 = netip.MustParsePrefix("10.0.0.3/32")
)

// held is a session whose owner holds the routes that its leaf has announced, or altered ones.
type held struct {
	*running
	session int
	before  map[netip.Prefix]*fare.Attributes // as the leaf announced them
}

// announced makes a leaf announce the routes on a session, and returns when the server's owner holds them.
func announced(t *testing.T, server, leaf *running, session int) held {
	t.Helper()
	leaf.Advertise(session, []Advertisement{{Prefix: lost}, {Prefix: changed}, {Prefix: intact}})
	h := held{running: server, session: session}
	server.until("the leaf's routes", h.right)
	h.before = maps.Clone(h.state(session).routes)
	return h
}

// right is the oracle: the owner holds the leaf's announced routes, without communities, and nothing else.
func (h held) right() bool {
	routes := h.state(h.session).routes
	for _, attrs := range routes {
		if len(attrs.Communities) != 0 {
			return false
		}
	}
	return slices.Equal(slices.SortedFunc(maps.Keys(routes), netip.Prefix.Compare), []netip.Prefix{lost, changed, intact})
}

// spoil makes the owner's routes differ from GoBGP's: one missing, one with another value, one that GoBGP does not hold.
func (h held) spoil(which ...netip.Prefix) {
	h.t.Helper()
	gen := h.state(h.session).gen
	for _, p := range which {
		if p == lost {
			h.queue.withdraw(Withdraw{Session: h.session, Generation: gen, Prefix: p})
			continue
		}
		c := []fare.Community{bandwidth(h.t, "1G", 1)}
		h.queue.route(Route{Session: h.session, Generation: gen, Prefix: p, Attrs: &fare.Attributes{Communities: c}})
	}
}

// heal undoes the change of one route, like an event of the watch.
func (h held) heal(p netip.Prefix) {
	gen := h.state(h.session).gen
	if p == ghost {
		h.queue.withdraw(Withdraw{Session: h.session, Generation: gen, Prefix: p})
		return
	}
	h.queue.route(Route{Session: h.session, Generation: gen, Prefix: p, Attrs: h.before[p]})
}

// faults returns the reasons of the Faults reported for a session.
func (h held) faults() (reasons []string) {
	for _, e := range h.events {
		if f, ok := e.(Fault); ok && f.Session == h.session {
			reasons = append(reasons, f.Reason)
		}
	}
	return reasons
}

// reported sums the differences in the Faults. A reading may fall between the steps of spoil.
func (h held) reported() (n int) {
	h.t.Helper()
	for _, reason := range h.faults() {
		var k int
		if _, err := fmt.Sscanf(reason, "rereading found %d routes", &k); err != nil || reason != found(k) {
			h.t.Fatalf("fault %q", reason)
		}
		n += k
	}
	return n
}

// differ checks the session's counter of differences and the reported Faults.
func (h held) differ(want uint64, faults ...string) {
	h.t.Helper()
	h.events = h.Take(h.events)
	if got := counter(h.running, h.session, "reread_differences"); got != want {
		h.t.Errorf("session %d: %d differences counted, want %d", h.session, got, want)
	}
	if got := h.faults(); !slices.Equal(got, faults) {
		h.t.Errorf("session %d: faults %q, want %q", h.session, got, faults)
	}
}

func found(n int) string {
	return fmt.Sprintf("rereading found %d routes that differ from the reported ones", n)
}

// TestRereadRuns checks that a running speaker finds, corrects, counts and reports the differences in its owner's routes, on every session and
// every time; on a session without differences it does none of this.
func TestRereadRuns(t *testing.T) {
	server, leaf := pairConfig(t, 3)
	server.Reread = 10 * time.Millisecond
	a, b := startPair(t, server, leaf)
	var sessions []held
	for i := range 3 {
		sessions = append(sessions, announced(t, a, b, i))
	}
	want := 0
	for round, which := range [][]netip.Prefix{{lost, changed, ghost}, {changed}} {
		sessions[1].spoil(which...)
		sessions[2].spoil(which...)
		want += len(which)
		for _, h := range sessions[1:] {
			a.until(fmt.Sprintf("corrected for the %d. time", round+1), func() bool { return h.right() && h.reported() == want })
		}
	}
	sessions[0].differ(0)
	for _, h := range sessions[1:] {
		h.differ(uint64(want), h.faults()...)
	}
}

// TestRereadTwice checks that only routes that differ in both readings are corrected, counted and reported. An event that the watch still
// carries at the first reading is none of these, and a difference that first appears at the second reading has not been read twice.
func TestRereadTwice(t *testing.T) {
	server, leaf := pairConfig(t, 1)
	server.Reread = -1
	a, b := startPair(t, server, leaf)
	h := announced(t, a, b, 0)
	s, readings := a.sessions[0], 0
	reread := func(between func()) {
		t.Helper()
		if err := s.reread(t.Context(), func(context.Context) error { readings++; between(); return nil }); err != nil {
			t.Fatal(err)
		}
	}
	reread(func() { t.Error("read a second time though nothing differs") })
	h.differ(0)

	h.spoil(lost, changed)
	reread(func() { h.heal(lost); h.heal(changed) })
	h.differ(0)
	if readings != 1 || !h.right() {
		t.Errorf("%d readings, the owner holds %v", readings, h.state(0).routes)
	}

	h.spoil(lost)
	reread(func() { h.heal(lost); h.spoil(ghost) })
	h.differ(0)
	if h.state(0).routes[ghost] == nil {
		t.Error("corrected after one reading")
	}

	h.spoil(lost)
	reread(func() { h.spoil(changed) })
	h.differ(2, found(2)) // lost and ghost
	reread(func() {})
	h.differ(3, found(2), found(1))
	if !h.right() {
		t.Errorf("the owner holds %v", h.state(0).routes)
	}
}

// TestRereadGivesUp checks that a session that ends between the readings, or has not begun, is not corrected, and that the error of an end in
// between is returned.
func TestRereadGivesUp(t *testing.T) {
	server, leaf := pairConfig(t, 1)
	server.Reread = -1
	s := create(t, server)
	never := func(context.Context) error { t.Error("read though not established"); return nil }
	if err := s.sessions[0].reread(t.Context(), never); err != nil {
		t.Error(err)
	}
	a := start(t, s)
	h := announced(t, a, start(t, create(t, leaf)), 0)
	h.spoil(lost)
	end := errors.New("the end")
	if err := s.sessions[0].reread(t.Context(), func(context.Context) error { return end }); err != end {
		t.Errorf("error %v, want that of the wait", err)
	}
	err := s.sessions[0].reread(t.Context(), func(context.Context) error {
		a.SetAdminState(0, false, "test")
		a.until("the session is down", func() bool { return !a.state(0).up })
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	h.differ(0)
}

// TestRereadReportsItsErrors checks that an unreadable server is a Fault of its session.
func TestRereadReportsItsErrors(t *testing.T) {
	broken := &bgpServer{patience: deadline, failed: make(chan struct{}), stuck: true}
	broken.fail(errors.New("no table"))
	s := &Speaker{conf: Config{Reread: time.Millisecond}, queue: newQueue(2)}
	s.sessions = []*session{{speaker: s, index: 0}, {speaker: s, index: 1, state: Established, current: &incarnation{server: broken}}}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); s.reread(ctx) }()
	r := &running{Speaker: s, t: t}
	defer func() { cancel(); <-done }()
	want := Fault{Session: 1, Reason: broken.failure().Error()}
	r.until("a fault", func() bool { return len(r.events) > 0 })
	for _, e := range r.events {
		if e != Event(want) {
			t.Errorf("event %#v, want %#v", e, want)
		}
	}
}
