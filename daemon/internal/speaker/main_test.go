package speaker

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"slices"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/fared/fared/fare"
	"github.com/fared/fared/internal/testkit/netnstest"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m,
		// GoBGP's server goroutine cannot be ended (doc.go).
		goleak.IgnoreAnyFunction("github.com/osrg/gobgp/v3/pkg/server.(*BgpServer).Serve"))
}

const deadline = time.Minute

// host returns addresses in 127.0.0.0/8; every test has its own.
func host(n int) netip.Addr { return netip.AddrFrom4([4]byte{127, 20, byte(n >> 8), byte(n)}) }

var nextHost = 1

func hosts(n int) []netip.Addr {
	list := make([]netip.Addr, n)
	for i := range list {
		list[i] = host(nextHost)
		nextHost++
	}
	return list
}

// running is a Speaker that runs, with the events that it reported.
type running struct {
	*Speaker
	t      testing.TB
	events []Event
	stop   func()
}

func testDeps(t testing.TB) Deps {
	return Deps{
		Log:   slog.New(slog.NewTextHandler(io.Discard, nil)),
		Fatal: func(err error) { t.Error(err) },
	}
}

func create(t testing.TB, c Config) *Speaker {
	t.Helper()
	s, err := New(c, testDeps(t))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func start(t testing.TB, s *Speaker) *running {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	stopped := false
	r := &running{Speaker: s, t: t}
	r.stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		select {
		case err := <-done:
			if err != nil {
				t.Errorf("Run: %v", err)
			}
		case <-time.After(deadline):
			t.Error("Run does not return")
		}
	}
	t.Cleanup(r.stop)
	return r
}

// Take is Speaker.Take, but its events remain valid.
func (r *running) Take(buf []Event) []Event {
	before := len(buf)
	buf = r.Speaker.Take(buf)
	for i, e := range buf[before:] {
		if routes, ok := e.(Routes); ok {
			routes.Changes = slices.Clone(routes.Changes)
			buf[before+i] = routes
		}
	}
	return buf
}

// until takes events until ok returns true, and fails after the deadline.
func (r *running) until(what string, ok func() bool) {
	r.t.Helper()
	r.within(deadline, what, ok)
}

func (r *running) within(d time.Duration, what string, ok func() bool) {
	r.t.Helper()
	timeout := time.NewTimer(d)
	defer timeout.Stop()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		r.events = r.Take(r.events)
		if ok() {
			return
		}
		select {
		case <-r.Ready():
		case <-tick.C:
		case <-timeout.C:
			r.t.Fatalf("not within %v: %s\nstatus %+v\nevents %v", d, what, r.Status(0), r.events)
		}
	}
}

// state is the state that a correct owner derives from the events, which are checked on the way.
type state struct {
	up     bool
	gen    uint64
	node   netip.Addr
	as     uint32
	routes map[netip.Prefix]*fare.Attributes
	eor    int
	downs  int
	ups    int
}

func (r *running) state(session int) state {
	r.t.Helper()
	var s state
	wrong := func(e Event) { r.t.Fatalf("event out of order: %#v", e) }
	for _, e := range r.events {
		switch e := e.(type) {
		case SessionUp:
			if e.Session != session {
				continue
			}
			if s.up || e.Generation <= s.gen {
				wrong(e)
			}
			s.up, s.gen, s.node, s.as, s.eor = true, e.Generation, e.Node, e.PeerAS, 0
			s.routes = make(map[netip.Prefix]*fare.Attributes)
			s.ups++
		case SessionDown:
			if e.Session != session {
				continue
			}
			if !s.up || e.Generation != s.gen {
				wrong(e)
			}
			s.up, s.routes = false, nil
			s.downs++
		case Routes:
			if e.Session != session {
				continue
			}
			if !s.up || e.Generation != s.gen || len(e.Changes) == 0 {
				wrong(e)
			}
			for _, c := range e.Changes {
				if c.Attrs == nil && s.routes[c.Prefix] == nil {
					wrong(e)
				}
				if delete(s.routes, c.Prefix); c.Attrs != nil {
					s.routes[c.Prefix] = c.Attrs
				}
			}
		case EndOfRIB:
			if e.Session != session {
				continue
			}
			if !s.up || e.Generation != s.gen {
				wrong(e)
			}
			s.eor++
		}
	}
	return s
}

func (r *running) flaps() int {
	n := 0
	for _, e := range r.events {
		if _, ok := e.(SessionDown); ok {
			n++
		}
	}
	return n
}

var acceptAll = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00::/16")}

// pairConfig configures a server and a leaf with n sessions between them, over IPv4.
func pairConfig(t testing.TB, n int) (server, leaf Config) {
	t.Helper()
	server = Config{AS: 65001, RouterID: netip.MustParseAddr("10.255.0.1"), Accept: acceptAll}
	leaf = Config{AS: 4200000100, RouterID: netip.MustParseAddr("10.255.0.100"), Accept: acceptAll}
	at := hosts(1)[0]
	port := uint16(netnstest.FreePort(t))
	for i := range n {
		own := hosts(1)[0]
		server.Sessions = append(server.Sessions, Session{
			Name: fmt.Sprintf("p%d", i), Peer: at, Port: port, Local: own, Families: []Family{IPv4, IPv6},
			NextHop6: netip.MustParseAddr("fd00:1::1"), PeerNextHops: []netip.Addr{netip.MustParseAddr("fd00:1::2")},
		})
		leaf.Sessions = append(leaf.Sessions, Session{
			Name: fmt.Sprintf("s%d", i), Peer: own, Port: port, Local: at, Passive: true, Families: []Family{IPv4, IPv6},
			NextHop6: netip.MustParseAddr("fd00:1::2"), PeerNextHops: []netip.Addr{netip.MustParseAddr("fd00:1::1")},
		})
	}
	return server, leaf
}

func startPair(t testing.TB, server, leaf Config) (*running, *running) {
	t.Helper()
	a, b := create(t, server), create(t, leaf)
	return start(t, a), start(t, b)
}

func bandwidth(t testing.TB, s string, as uint32) fare.Community {
	t.Helper()
	b, err := fare.ParseBandwidth(s)
	if err != nil {
		t.Fatal(err)
	}
	return fare.Codec{AS: as}.Encode(b, netip.Addr{})
}
