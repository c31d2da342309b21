package speaker

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fared/fared/fare"
)

func TestRoutesBothWays(t *testing.T) {
	server, leaf := pairConfig(t, 1)
	a, b := startPair(t, server, leaf)
	lo4, lo6 := netip.MustParsePrefix("10.0.0.1/32"), netip.MustParsePrefix("fd00::1/128")
	c400 := bandwidth(t, "400G", server.AS)
	if c400[0] != 0x00 || c400[1] != 0x04 {
		t.Fatalf("% x is not the transitive Link Bandwidth", c400)
	}
	a.Advertise(0, []Advertisement{{Prefix: lo4, Communities: []fare.Community{c400}}, {Prefix: lo6, Communities: []fare.Community{c400}}})
	remote := netip.MustParsePrefix("10.0.0.9/32")
	b.Advertise(0, []Advertisement{
		{Prefix: remote, Communities: []fare.Community{bandwidth(t, "800G", leaf.AS)}, ASPath: []uint32{4200000007, 65009}},
	})

	b.until("the leaf has both loopbacks and their end", func() bool { s := b.state(0); return len(s.routes) == 2 && s.eor >= 2 })
	s := b.state(0)
	if s.node != server.RouterID || s.as != server.AS {
		t.Errorf("node %v as %d", s.node, s.as)
	}
	for _, p := range []netip.Prefix{lo4, lo6} {
		attrs := s.routes[p]
		if attrs == nil || !slices.Equal(attrs.Communities, []fare.Community{c400}) || !slices.Equal(attrs.ASPath, []uint32{65001}) {
			t.Errorf("%v: %+v", p, attrs)
		}
	}
	a.until("the server has the remote loopback", func() bool { return a.state(0).routes[remote] != nil })
	attrs := a.state(0).routes[remote]
	if want := []uint32{4200000100, 4200000007, 65009}; !slices.Equal(attrs.ASPath, want) {
		t.Errorf("AS path %v, want %v", attrs.ASPath, want)
	}
	if len(attrs.Communities) != 1 || attrs.Communities[0] != bandwidth(t, "800G", leaf.AS) {
		t.Errorf("communities % x", attrs.Communities)
	}
	// FARE-in-SUN: the server is a stub and does not send received routes back.
	if st := b.Status(0); st.Received != 2 || st.State != Established || st.PeerAS != server.AS || st.Advertised != 1 {
		t.Errorf("leaf's status %+v", st)
	}

	// Declarative: change one route, drop one; nil changes nothing.
	c200 := bandwidth(t, "200G", server.AS)
	a.Advertise(0, []Advertisement{{Prefix: lo4, Communities: []fare.Community{c200}}})
	a.Advertise(0, nil)
	b.until("the change arrives", func() bool {
		s := b.state(0)
		return len(s.routes) == 1 && s.routes[lo4] != nil && slices.Equal(s.routes[lo4].Communities, []fare.Community{c200})
	})
	a.Advertise(0, []Advertisement{})
	b.until("all is withdrawn", func() bool { return len(b.state(0).routes) == 0 })
	if a.flaps()+b.flaps() != 0 {
		t.Error("a session flapped")
	}
}

// idleTimes collects from the log how many seconds GoBGP was idle before it accepted the connection of each neighbor.
type idleTimes struct {
	slog.Handler
	mu    sync.Mutex
	times []string
}

func (h *idleTimes) Enabled(context.Context, slog.Level) bool { return true }

func (h *idleTimes) WithAttrs([]slog.Attr) slog.Handler { return h }

func (h *idleTimes) Handle(_ context.Context, r slog.Record) error {
	if r.Message == "gobgp: IdleHoldTimer expired" {
		r.Attrs(func(a slog.Attr) bool {
			if a.Key == "Duration" {
				h.mu.Lock()
				defer h.mu.Unlock()
				h.times = append(h.times, a.Value.String())
			}
			return true
		})
	}
	return nil
}

// all returns the times of all neighbors up to now.
func (h *idleTimes) all() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.times)
}

// TestLossAndRecovery checks that a route is back after every loss of the session, and that GoBGP is idle for no time
// before it accepts the connection of an incarnation: its own idle time after a loss, 5 s, would delay every recovery.
func TestLossAndRecovery(t *testing.T) {
	server, leaf := pairConfig(t, 1)
	deps := testDeps(t)
	idle := &idleTimes{Handler: deps.Log.Handler()}
	deps.Log = slog.New(idle)
	s, err := New(server, deps)
	if err != nil {
		t.Fatal(err)
	}
	a, b := start(t, s), start(t, create(t, leaf))
	p := netip.MustParsePrefix("10.0.0.1/32")
	b.Advertise(0, []Advertisement{{Prefix: p}})
	a.until("up with the route", func() bool { return a.state(0).routes[p] != nil })

	lost := func(rounds int, lose func()) {
		t.Helper()
		for range rounds {
			gen, neighbors := a.state(0).gen, len(idle.all())
			lose()
			a.until("recovery", func() bool {
				s := a.state(0)
				return s.gen > gen && s.routes[p] != nil
			})
			a.until("GoBGP accepts the connection of an incarnation", func() bool { return len(idle.all()) > neighbors })
		}
	}
	lost(6, func() {
		gen := a.state(0).gen
		a.SetAdminState(0, false, "carrier lost")
		a.events = a.Take(a.events)
		if a.state(0).up {
			t.Fatal("SessionDown is not there at once")
		}
		if st := a.Status(0); st.Generation != gen {
			t.Errorf("generation %d, want %d", st.Generation, gen)
		}
		a.SetAdminState(0, true, "")
	})
	b.until("the leaf has seen it too", func() bool { s := b.state(0); return s.up && s.gen >= 7 })

	// The leaf closes: the server detects it and reconnects.
	lost(3, func() {
		b.until("the leaf is up", func() bool { return b.state(0).up })
		b.sessions[0].mu.Lock()
		defer b.sessions[0].mu.Unlock()
		if in := b.sessions[0].current; in != nil {
			in.conn.Close()
		}
	})
	if slices.ContainsFunc(idle.all(), func(seconds string) bool { return seconds != "0" }) {
		t.Errorf("GoBGP was idle for %v s before it accepted connections, want 0 s each time", idle.all())
	}
}

func TestHeldSessionDoesNotConnect(t *testing.T) {
	server, leaf := pairConfig(t, 1)
	a, b := create(t, server), create(t, leaf)
	a.SetAdminState(0, false, "drained")
	ra, rb := start(t, a), start(t, b)
	ra.until("held", func() bool { return ra.Status(0).State == Held })
	ra.SetAdminState(0, true, "")
	ra.until("up", func() bool { return ra.state(0).up })
	rb.SetAdminState(0, false, "maintenance")
	ra.until("down", func() bool { return !ra.state(0).up })
	ra.until("a reason", func() bool { return ra.Status(0).Reason != "" })
	before := ra.Status(0).Attempts
	ra.until("refused", func() bool { return ra.Status(0).Attempts > before+1 })
	if ra.state(0).up {
		t.Error("up although the peer is held")
	}
	rb.SetAdminState(0, true, "")
	ra.until("up again", func() bool { return ra.state(0).up })
}

// TestClear clears one of two sessions: its peer receives Cease, Administrative Reset (RFC 4486: 6/4), the owner the
// cause, and it connects again without a pause; the other session stays. A session that is not established is refused
// with its state.
func TestClear(t *testing.T) {
	server, leaf := pairConfig(t, 2)
	a, b := create(t, server), create(t, leaf)
	a.SetAdminState(0, false, "no carrier")
	ra, rb := start(t, a), start(t, b)
	ra.until("held", func() bool { return ra.Status(0).State == Held })
	if err := ra.Clear(0, "by a test"); err == nil || !strings.Contains(err.Error(), "held: held down: no carrier") {
		t.Errorf("a held session: %v", err)
	}
	ra.SetAdminState(0, true, "")
	for i := range 2 {
		ra.until("up", func() bool { return ra.state(i).up && ra.Status(i).State == Established })
		rb.until("up", func() bool { return rb.state(i).up })
	}
	before, other := ra.Status(0), ra.Status(1)
	if err := ra.Clear(0, "by a test"); err != nil {
		t.Fatal(err)
	}
	ra.until("up again", func() bool { s := ra.Status(0); return s.State == Established && s.Generation > before.Generation })
	if s := ra.Status(0); s.Reason != "by a test" || s.Flaps != before.Flaps+1 {
		t.Errorf("reason %q, %d flaps", s.Reason, s.Flaps)
	}
	rb.until("the peer up again", func() bool { return rb.Status(0).State == Established && rb.Status(0).Flaps > 0 })
	if reason := rb.Status(0).Reason; !strings.Contains(reason, "NOTIFICATION 6/4") {
		t.Errorf("the peer's reason is %q", reason)
	}
	if s := ra.Status(1); s.Generation != other.Generation || s.State != Established {
		t.Errorf("the other session is %v in generation %d", s.State, s.Generation)
	}
}

func TestRestartedPeerReplacesItsConnection(t *testing.T) {
	server, leaf := pairConfig(t, 1)
	a, b := startPair(t, server, leaf)
	a.until("up", func() bool { return a.state(0).up })
	b.until("up", func() bool { return b.state(0).up })
	// A second server with the same address connects: for the leaf, the first
	// one has disappeared without a message.
	a.SetAdminState(0, false, "replaced")
	other := start(t, create(t, server))
	other.until("up", func() bool { return other.state(0).up })
	b.until("generation of the second", func() bool { s := b.state(0); return s.up && s.gen >= 2 })
}

func TestPasswords(t *testing.T) {
	server, leaf := pairConfig(t, 2)
	server.Sessions[0].Password, leaf.Sessions[0].Password = "right", "right"
	server.Sessions[1].Password, leaf.Sessions[1].Password = "right", "wrong"
	a, _ := startPair(t, server, leaf)
	a.until("the session with the right password is up", func() bool { return a.state(0).up })
	a.until("the other has tried in vain", func() bool { return strings.Contains(a.Status(1).Reason, "timeout") })
	if a.state(1).ups != 0 {
		t.Error("session is up with the wrong password")
	}
}

// TestLocalHopIsSigned lets another local process connect to GoBGP from the address of a session that is up, as any
// user can: GoBGP's end drops the unsigned SYN.
func TestLocalHopIsSigned(t *testing.T) {
	server, leaf := pairConfig(t, 1)
	a, _ := startPair(t, server, leaf)
	a.until("up", func() bool { return a.state(0).up })
	session := a.sessions[0]
	var from netip.Addr
	a.until("the local hop is connected", func() bool {
		session.mu.Lock()
		defer session.mu.Unlock()
		in := session.current
		if in == nil {
			return false
		}
		in.mu.Lock()
		defer in.mu.Unlock()
		from = in.addr
		return in.local != nil
	})
	to := net.TCPAddrFromAddrPort(netip.AddrPortFrom(loopback, session.server.Load().port))
	d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(from, 0)), Timeout: 300 * time.Millisecond}
	d.SetMultipathTCP(false)
	if conn, err := d.Dial("tcp4", to.String()); err == nil {
		conn.Close()
		t.Error("a connection without a key is established")
	}
	// The port is GoBGP's: an address without a session has no key, and connects.
	conn, err := net.DialTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 9, 9, 9)}, to)
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
	if s := a.state(0); !s.up || s.ups != 1 {
		t.Errorf("the session: up %v, %d times", s.up, s.ups)
	}
}

// TestLocalAddressIsRandom checks that the next address of the local hop cannot be predicted: it is in 127.128.0.0/9,
// never the previous one, and among 1,000 of the 8,388,607 addresses at most a few are equal.
func TestLocalAddressIsRandom(t *testing.T) {
	seen := map[netip.Addr]bool{}
	var last netip.Addr
	for range 1000 {
		addr := localAddr(last)
		if addr == last || !netip.MustParsePrefix("127.128.0.0/9").Contains(addr) {
			t.Fatalf("%s after %s", addr, last)
		}
		last, seen[addr] = addr, true
	}
	if len(seen) < 990 {
		t.Errorf("%d different addresses among 1,000", len(seen))
	}
}

// TestLocalHopFailsClosed checks that no Speaker starts where the local hop could not be signed: GODEBUG makes Go's
// listeners multipath TCP.
func TestLocalHopFailsClosed(t *testing.T) {
	t.Setenv("GODEBUG", "multipathtcp=1")
	saved := localPassword
	localPassword = newLocalPassword
	defer func() { localPassword = saved }()
	server, _ := pairConfig(t, 1)
	s, err := New(server, testDeps(t))
	if err == nil {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_ = s.Run(ctx)
	}
	if err == nil || !strings.Contains(err.Error(), "cannot be signed, so any local user could end sessions") || !strings.Contains(err.Error(), "CONFIG_TCP_MD5SIG") {
		t.Errorf("New: %v, want the reason and the remedy", err)
	}
}

// TestPasswordOnEveryAddress listens without an address, on an IPv6 socket, which represents IPv4 peers by mapped
// addresses.
func TestPasswordOnEveryAddress(t *testing.T) {
	server, leaf := pairConfig(t, 1)
	server.Sessions[0].Password, leaf.Sessions[0].Password = "right", "right"
	leaf.Sessions[0].Local = netip.Addr{}
	a, _ := startPair(t, server, leaf)
	a.until("up", func() bool { return a.state(0).up })
}

func TestTTLSecurity(t *testing.T) {
	for _, checks := range []struct{ server, leaf int }{{1, 1}, {0, 1}, {1, 0}, {0, 0}} {
		server, leaf := pairConfig(t, 1)
		server.Sessions[0].GTSMHops, leaf.Sessions[0].GTSMHops = checks.server, checks.leaf
		a, _ := startPair(t, server, leaf)
		a.until("up, whichever end checks", func() bool { return a.state(0).up })
		// A stranger's packets have TTL 64, as if they had crossed routers. The leaf's end must drop them, or accept
		// them at once.
		limit := deadline
		if checks.leaf > 0 {
			limit = 200 * time.Millisecond
		}
		conn, err := net.DialTimeout("tcp", netip.AddrPortFrom(leaf.Sessions[0].Local, leaf.Sessions[0].Port).String(), limit)
		if err == nil {
			conn.Close()
		}
		if (checks.leaf > 0) == (err == nil) {
			t.Errorf("checks %v: a packet with TTL 64: %v", checks, err)
		}
	}
}

func TestManySessions(t *testing.T) {
	const n = 64
	server, leaf := pairConfig(t, n)
	a, b := startPair(t, server, leaf)
	began := time.Now()
	for i := range n {
		b.Advertise(i, []Advertisement{{Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 1, 0, byte(i)}), 32)}})
	}
	a.until("all up with a route each", func() bool {
		for i := range n {
			if s := a.state(i); !s.up || len(s.routes) != 1 {
				return false
			}
		}
		return true
	})
	t.Logf("%d sessions up with routes in %v", n, time.Since(began))
	if a.flaps() != 0 {
		t.Errorf("%d flaps", a.flaps())
	}
}

func TestSpeakerCreatedWhileOthersRun(t *testing.T) {
	server, leaf := pairConfig(t, 2)
	a, b := startPair(t, server, leaf)
	a.until("up", func() bool { return a.state(0).up && a.state(1).up })
	// Routes keep changing while further servers are started, under the race
	// detector.
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
				b.Advertise(i%2, []Advertisement{{Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 2, byte(i >> 8), byte(i)}), 32)}})
			}
		}
	}()
	for range 3 {
		s2, l2 := pairConfig(t, 2)
		c, d := startPair(t, s2, l2)
		c.until("a later pair is up", func() bool { return c.state(0).up && c.state(1).up })
		c.stop()
		d.stop()
	}
	close(stop)
	<-done
	if a.events = a.Take(a.events); a.flaps() != 0 {
		t.Errorf("%d flaps of the sessions before", a.flaps())
	}
}

func TestMaxPrefixes(t *testing.T) {
	server, leaf := pairConfig(t, 1)
	server.MaxPrefixes, server.ConnectRetry = 10, 50*time.Millisecond // the NOTIFICATION may be lost with the connection; the next one has it again
	a, b := startPair(t, server, leaf)
	var routes []Advertisement
	for i := range 11 {
		routes = append(routes, Advertisement{Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 3, 0, byte(i)}), 32)})
	}
	b.Advertise(0, routes[:10])
	a.until("ten are taken", func() bool { return len(a.state(0).routes) == 10 })
	b.Advertise(0, routes)
	a.until("the eleventh ends the session", func() bool { return a.state(0).downs > 0 })
	b.until("the leaf was told Cease 6/1", func() bool {
		for _, e := range b.events {
			if d, ok := e.(SessionDown); ok && d.Reason == "bgp: peer ended the session with NOTIFICATION 6/1 (cease)" {
				return true
			}
		}
		return false
	})
}

// TestAttend checks that the routes and the end of a session are handled in the session's goroutine while the owner is
// idle, without a notification, and that the owner is notified while it is not.
func TestAttend(t *testing.T) {
	server, leaf := pairConfig(t, 1)
	var mu sync.Mutex // guards everything below
	idle, attended := true, []Event(nil)
	deps := testDeps(t)
	var a *Speaker
	deps.Attend = func() bool {
		mu.Lock()
		defer mu.Unlock()
		if idle {
			attended = a.Take(attended)
		}
		return idle
	}
	var err error
	if a, err = New(server, deps); err != nil {
		t.Fatal(err)
	}
	start(t, a)
	b := start(t, create(t, leaf))
	await := func(what string, ok func(Event) bool) {
		t.Helper()
		for end := time.Now().Add(deadline); ; time.Sleep(time.Millisecond) {
			mu.Lock()
			found := slices.ContainsFunc(attended, ok)
			mu.Unlock()
			if found {
				return
			}
			if time.Now().After(end) {
				t.Fatal(what)
			}
		}
	}
	announced := func(e Event) bool {
		routes, ok := e.(Routes)
		return ok && len(routes.Changes) > 0
	}
	route := func(n int) []Advertisement {
		return []Advertisement{{Prefix: prefix(n), Communities: []fare.Community{bandwidth(t, "400G", leaf.AS)}}}
	}
	b.Advertise(0, route(1))
	await("no session handles the route", announced)
	for len(a.Ready()) > 0 { // of other events
		<-a.Ready()
	}
	mu.Lock()
	idle, attended = false, nil
	mu.Unlock()
	b.Advertise(0, route(2))
	select {
	case <-a.Ready():
	case <-time.After(deadline):
		t.Fatal("the owner is not notified")
	}
	mu.Lock()
	if attended = a.Take(attended); len(attended) == 0 {
		t.Error("the owner has nothing to take")
	}
	idle, attended = true, nil
	mu.Unlock()
	b.stop()
	await("no session handles its end", func(e Event) bool { _, ok := e.(SessionDown); return ok })
}
