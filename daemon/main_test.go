package daemon

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/daemon/internal/core"
	"github.com/fared/fared/fare"
)

// gobgpServe is the only goroutine that GoBGP never ends (daemon/internal/speaker, doc.go).
var gobgpServe = goleak.IgnoreAnyFunction("github.com/osrg/gobgp/v3/pkg/server.(*BgpServer).Serve")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, gobgpServe) }

// checkLeaks fails the test if it leaves a goroutine behind. Call it before any call that registers a cleanup.
func checkLeaks(t testing.TB) {
	t.Helper()
	before := goleak.IgnoreCurrent()
	t.Cleanup(func() {
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

// shape is the size of a test's configuration: one session over every sub-port.
type shape struct {
	planes, subPorts int
	leaf             bool
	uplinks          int    // of a leaf: number of sub-ports of each plane, from the last, that are uplinks
	noSpeed          bool   // the device reports the speed
	extra            string // more top-level keys
	session          string // more keys of every session, each followed by a comma
	loopbacks        []string
	serves           func(i int) string // loopbacks that sub-port i serves; nil means all
	port             int
	net              int // second octet of the sessions' addresses
}

func (s shape) defaults() shape {
	if s.loopbacks == nil {
		s.loopbacks = []string{"10.255.0.1/32"}
	}
	if s.port == 0 {
		s.port = 179
	}
	if s.net == 0 {
		s.net = 99
	}
	return s
}

func (s shape) device(i int) string { return fmt.Sprintf("p%d.%d", i/s.subPorts, i%s.subPorts) }

// here and there return the two ends of sub-port i's cable.
func (s shape) here(i int) netip.Addr {
	return netip.AddrFrom4([4]byte{127, byte(s.net), byte(i), 2})
}
func (s shape) there(i int) netip.Addr { return s.here(i).Next() }
func (s shape) peerAS(i int) uint32    { return uint32(65100 + i/s.subPorts) }

func (s shape) text() string {
	s = s.defaults()
	var b strings.Builder
	if s.leaf {
		b.WriteString("role: leaf\nrouter_id: 10.9.0.1\n")
	} else {
		fmt.Fprintf(&b, "loopbacks: [%s]\nrouter_id: 10.255.0.1\n", strings.Join(s.loopbacks, ", "))
		if !strings.Contains(s.extra, "dataplane:") {
			b.WriteString("dataplane: {address: \"memory:\"}\n")
		}
	}
	b.WriteString("as: 4200001000\naccept: [10.255.0.0/16]\n" + s.extra)
	b.WriteString("planes:\n")
	for i := range s.planes * s.subPorts {
		if i%s.subPorts == 0 {
			fmt.Fprintf(&b, "  - name: p%d\n    sub_ports:\n", i/s.subPorts)
		}
		fmt.Fprintf(&b, "      - device: %s\n", s.device(i))
		if !s.noSpeed {
			b.WriteString("        speed: 400G\n")
		}
		if i%s.subPorts >= s.subPorts-s.uplinks {
			b.WriteString("        uplink: true\n")
		}
		if s.serves != nil {
			fmt.Fprintf(&b, "        loopbacks: [%s]\n", s.serves(i))
		}
		fmt.Fprintf(&b, "        sessions:\n          - {%speer: %s, local: %s, port: %d, peer_as: %d}\n", s.session, s.there(i), s.here(i), s.port, s.peerAS(i))
	}
	return b.String()
}

// leafDataplane is the extra of a leaf that forwards; tests inject the data plane.
const leafDataplane = "dataplane: {address: \"unix:/nowhere\"}\n"

func (s shape) config(t testing.TB) *config.Config {
	t.Helper()
	return parsed(t, s.text())
}

func parsed(t testing.TB, text string) *config.Config {
	t.Helper()
	cfg, err := config.Parse("test.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return cfg
}

func (s shape) core(t testing.TB) *core.Core {
	t.Helper()
	c, err := core.New(s.config(t))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// destination returns the n-th remote loopback.
func destination(n int) netip.Prefix {
	n += 256
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 255, byte(n >> 8), byte(n)}), 32)
}

func leafNode(plane int) netip.Addr { return netip.AddrFrom4([4]byte{10, 1, 0, byte(plane + 1)}) }

// says returns a leaf's attributes for a loopback behind it.
func says(b fare.Bandwidth, path ...uint32) *fare.Attributes {
	return &fare.Attributes{Communities: []fare.Community{fare.Codec{}.Encode(b, netip.Addr{})}, ASPath: path}
}

// do steps the core and fails the test on an error.
func do(t testing.TB, c *core.Core, events ...core.Event) {
	t.Helper()
	for _, ev := range events {
		if err := c.Step(ev); err != nil {
			t.Fatalf("%+v: %v", ev, err)
		}
	}
}

func up(i int, speed fare.Bandwidth) core.Event {
	return core.Fabric{Event: fare.LinkState{SubPort: i, Up: true, Speed: speed}}
}

// bring brings up every link and session of a server, with one leaf per plane, and announces n destinations on all of them.
func bring(t testing.TB, s shape, c *core.Core, n int, value func(destination, subPort int) fare.Bandwidth) {
	t.Helper()
	for i := range s.planes * s.subPorts {
		do(t, c, up(i, 400e9), core.Fabric{Event: fare.SessionUp{Session: i, Generation: 1, Node: leafNode(i / s.subPorts), PeerAS: s.peerAS(i)}})
		for d := range n {
			do(t, c, core.Fabric{Event: fare.RouteUpdate{Session: i, Generation: 1, Prefix: destination(d), Attrs: says(value(d, i), s.peerAS(i), 65001)}})
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

func describe(c *core.Core) string {
	var b bytes.Buffer
	c.Describe(&b)
	return b.String()
}

// weightsOf returns a destination's weights; nil when it is unreachable.
func weightsOf(c *core.Core, d netip.Prefix) []uint32 {
	if v, ok := vectorFrom(c, 0, d); ok {
		return slices.Clone(v.Weights)
	}
	return nil
}

// drainTo returns the events of a drain that has reached stage.
func drainTo(t core.DrainTarget, stage core.DrainStage) []core.Event {
	out := []core.Event{core.DrainRequest{Target: t, On: true}}
	switch stage {
	case core.Drained:
		out = append(out, core.DrainStep{Target: t, Confirmed: true}, core.DrainStep{Target: t, Confirmed: false})
	case core.DrainRoutes:
		out = append(out, core.DrainStep{Target: t, Confirmed: true})
	case core.Undraining:
		out = append(out, core.DrainRequest{Target: t, On: false})
	}
	return out
}

func coreOf(t *testing.T, text string) *core.Core {
	t.Helper()
	cfg, err := config.Parse("test.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	c, err := core.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return c
}
