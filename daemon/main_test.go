package daemon

import (
	"context"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/daemon/internal/core"
	"github.com/fared/fared/daemon/internal/coretest"
	"github.com/fared/fared/daemon/internal/speaker"
	"github.com/fared/fared/fare"
)

// gobgpServe is the only goroutine that GoBGP never ends (daemon/internal/speaker, doc.go).
var gobgpServe = goleak.IgnoreAnyFunction("github.com/osrg/gobgp/v3/pkg/server.(*BgpServer).Serve")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, gobgpServe) }

// leakChecked holds the tests for which checkLeaks has registered its check.
var leakChecked sync.Map

// checkLeaks fails the test if it leaves a goroutine behind. Call it before any call that registers a cleanup. Only the
// first call of a test counts: GoBGP's goroutines of an earlier daemon of the test may begin after a later call, and
// end after its check.
func checkLeaks(t testing.TB) {
	t.Helper()
	if _, again := leakChecked.LoadOrStore(t, true); again {
		return
	}
	before := goleak.IgnoreCurrent()
	t.Cleanup(func() {
		leakChecked.Delete(t)
		if err := goleak.Find(before, gobgpServe); err != nil {
			t.Error(err)
		}
	})
}

const waitLimit = time.Minute

// eventually waits until ok returns true, and fails the test after a deadline.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	limit := time.NewTimer(waitLimit)
	defer limit.Stop()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-limit.C:
			t.Fatalf("not within %v: %s", waitLimit, what)
		}
	}
}

// The tests' names for coretest.
type shape = coretest.Shape

var (
	do          = coretest.Do[core.Event]
	destination = coretest.Destination
	leafNode    = coretest.LeafNode
	attributes  = coretest.Attributes
)

// oneRoute returns the speaker's event of one announced route.
func oneRoute(session int, generation uint64, prefix netip.Prefix, attrs *fare.Attributes) speaker.Routes {
	return speaker.Routes{Session: session, Generation: generation, Changes: []speaker.Change{{Prefix: prefix, Attrs: attrs}}}
}

// oneWithdrawal returns the speaker's event of one withdrawn route.
func oneWithdrawal(session int, generation uint64, prefix netip.Prefix) speaker.Routes {
	return oneRoute(session, generation, prefix, nil)
}

func up(i int, speed fare.Bandwidth) core.Event {
	return core.Fabric{Event: fare.LinkState{SubPort: i, Up: true, Speed: speed}}
}

// bring brings up every link and session of a server, with one leaf per plane, and announces n destinations on all of
// them.
func bring(t testing.TB, s shape, c *core.Core, n int, value func(destination, subPort int) fare.Bandwidth) {
	t.Helper()
	for i := range s.Planes * s.SubPorts {
		do(t, c, up(i, 400e9), core.Fabric{Event: fare.SessionUp{Session: i, Generation: 1, Node: leafNode(i / s.SubPorts), PeerAS: s.PeerAS(i)}})
		for d := range n {
			do(t, c, core.Fabric{Event: fare.RouteUpdate{Session: i, Generation: 1, Prefix: destination(d), Attrs: attributes(value(d, i), s.PeerAS(i), 65001)}})
		}
		do(t, c, core.EndOfRIB{Session: i, Generation: 1})
	}
}

// testLinks is a LinkSource that the test controls.
type testLinks struct {
	mu     sync.Mutex
	events []LinkEvent
	dirty  []bool
	ready  chan struct{}
	polls  atomic.Int64
	cover  atomic.Value // argument of the last Cover
}

func newTestLinks(n int, speed fare.Bandwidth) *testLinks {
	l := &testLinks{events: make([]LinkEvent, n), dirty: make([]bool, n), ready: make(chan struct{}, 1)}
	for i := range n {
		l.change(i, func(e *LinkEvent) { e.SubPort, e.Up, e.Speed, e.SpeedSource = i, true, speed, "ethtool" })
	}
	return l
}

func (l *testLinks) change(i int, f func(*LinkEvent)) {
	l.mu.Lock()
	was := l.events[i].Up
	f(&l.events[i])
	if l.events[i].Up != was {
		l.events[i].Transitions++
	}
	l.dirty[i] = true
	l.mu.Unlock()
	select {
	case l.ready <- struct{}{}:
	default:
	}
}

func (l *testLinks) Run(ctx context.Context) error { <-ctx.Done(); return nil }
func (l *testLinks) Ready() <-chan struct{}        { return l.ready }
func (l *testLinks) Poll()                         { l.polls.Add(1) }
func (l *testLinks) Cover(netns string)            { l.cover.Store(netns) }
func (l *testLinks) Check(*config.Config) error    { return nil }

// Reconfigure implements ChangingLinks. New sub-ports are up, with the speed of the first one.
func (l *testLinks) Reconfigure(_ *config.Config, at []int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	events, dirty := make([]LinkEvent, len(at)), make([]bool, len(at))
	for i, from := range at {
		events[i], dirty[i] = LinkEvent{Up: true, Speed: 400e9, SpeedSource: "ethtool", Transitions: 1}, true
		if from >= 0 && from < len(l.events) {
			events[i], dirty[i] = l.events[from], l.dirty[from]
		}
		events[i].SubPort = i
	}
	l.events, l.dirty = events, dirty
	ring(l.ready)
}

func (l *testLinks) Take(buf []LinkEvent) []LinkEvent {
	l.mu.Lock()
	defer l.mu.Unlock()
	buf = buf[:0]
	for i, d := range l.dirty {
		if d {
			buf = append(buf, l.events[i])
		}
	}
	clear(l.dirty)
	return buf
}

func coreOf(t testing.TB, text string) *core.Core {
	t.Helper()
	c, err := core.New(coretest.Parse(t, text))
	if err != nil {
		t.Fatal(err)
	}
	return c
}
