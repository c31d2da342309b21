package speaker

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	api "github.com/osrg/gobgp/v3/api"
	"golang.org/x/sys/unix"

	tier "github.com/fared/fared/internal/testkit/gate"
)

// fillDescriptors lowers the limit of open files to little more than the number
// of open ones. fill takes all remaining descriptors except spare; release
// closes them.
func fillDescriptors(t *testing.T) (fill func(spare int), release func()) {
	t.Helper()
	open, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	var before unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &before); err != nil {
		t.Fatal(err)
	}
	limit := before
	limit.Cur = uint64(len(open) + 32)
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	var held []int
	fill = func(spare int) {
		for {
			fd, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
			if err != nil {
				break
			}
			held = append(held, fd)
		}
		for range min(spare, len(held)) {
			unix.Close(held[len(held)-1])
			held = held[:len(held)-1]
		}
	}
	release = func() {
		for _, fd := range held {
			unix.Close(fd)
		}
		held = nil
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &before); err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(release)
	return fill, release
}

func counter(r *running, session int, name string) uint64 {
	for _, c := range r.Status(session).Counters {
		if c.Name == name {
			return c.Value
		}
	}
	return 0
}

// TestNoDescriptorsLeft ends GoBGP's listener by one EMFILE. The established session continues; once it must be opened
// again, the reason names this host and the remedy, and after descriptors are free it comes back with its routes.
func TestNoDescriptorsLeft(t *testing.T) {
	server, leaf := pairConfig(t, 2)
	server.ConnectRetry = 50 * time.Millisecond
	a, b := startPair(t, server, leaf)
	p := netip.MustParsePrefix("10.0.0.1/32")
	for i := range 2 {
		a.Advertise(i, []Advertisement{{Prefix: prefix(40)}})
		b.Advertise(i, []Advertisement{{Prefix: p}})
	}
	a.until("up with routes", func() bool { return a.state(0).routes[p] != nil && a.state(1).routes[p] != nil })
	b.until("our routes, which GoBGP sends", func() bool { return b.state(0).routes[prefix(40)] != nil && b.state(1).routes[prefix(40)] != nil })
	broken := a.sessions[0].server.Load()

	fill, release := fillDescriptors(t)
	fill(1)
	conn, err := net.Dial("tcp4", netip.AddrPortFrom(loopback, broken.port).String())
	if err != nil {
		t.Fatal(err)
	}
	<-broken.failed
	conn.Close()
	if err := broken.failure(); !errors.Is(err, syscall.EMFILE) || !strings.Contains(err.Error(), "LimitNOFILE") {
		t.Errorf("cause %v", err)
	}
	if a.events = a.Take(a.events); a.flaps() != 0 {
		t.Error("a session that is up needs no listener, but was lost")
	}
	a.SetAdminState(0, false, "reopened")
	a.until("down", func() bool { return !a.state(0).up })
	fill(0)
	a.SetAdminState(0, true, "")
	a.until("the reason is this host's", func() bool {
		fill(0)
		reason := a.Status(0).Reason
		return strings.Contains(reason, "fault of this host") && strings.Contains(reason, "too many open files; raise the limit")
	})
	release()
	a.until("back with its routes", func() bool { return a.state(0).routes[p] != nil })
	b.until("our routes are back too", func() bool { return b.state(0).routes[prefix(40)] != nil })
	if a.sessions[0].server.Load() == broken || counter(a, 0, "speaker_replaced") == 0 {
		t.Error("the speaker was not replaced")
	}
	if s := a.state(1); !s.up || s.downs != 0 || counter(a, 1, "speaker_replaced") != 0 {
		t.Errorf("the other session suffered: %+v", s)
	}
	for _, e := range a.events {
		if f, ok := e.(Fault); ok && f.Session == 0 && strings.Contains(f.Reason, "gobgp's listener ended: ") {
			return
		}
	}
	t.Error("no fault names the cause")
}

// TestServerGoroutineHangs blocks GoBGP's server goroutine forever. The call that an idle session makes does not
// return, and only that session gets another GoBGP.
func TestServerGoroutineHangs(t *testing.T) {
	tier.Slow(t, tier.Interop, "waits for the patience with a hung server")
	server, leaf := pairConfig(t, 2)
	server.KeepaliveInterval = time.Second
	for i := range 2 {
		server.Sessions[i].Families, leaf.Sessions[i].Families = []Family{IPv6}, []Family{IPv6}
	}
	s := create(t, server)
	s.sessions[0].server.Load().patience = time.Second
	a, b := start(t, s), start(t, create(t, leaf))
	p := netip.MustParsePrefix("fd00::1/128")
	for i := range 2 {
		b.Advertise(i, []Advertisement{{Prefix: p}})
	}
	a.until("up with routes", func() bool { return a.state(0).routes[p] != nil && a.state(1).routes[p] != nil })
	hung := s.sessions[0].server.Load()
	h := &halt{arrived: make(chan struct{}), open: make(chan struct{})}
	hung.gate.closed.Store(h)
	t.Cleanup(func() {
		hung.gate.closed.Store(nil)
		close(h.open)
		// Pending calls must finish before the next test starts a server: StartBgp writes globals that they read.
		for range 2 {
			_, _ = hung.bgp.GetBgp(context.Background(), &api.GetBgpRequest{})
		}
	})
	a.until("noticed, and back with its route", func() bool {
		s := a.state(0)
		return s.downs > 0 && s.up && s.routes[p] != nil
	})
	if counter(a, 0, "speaker_replaced") == 0 { // more often if the next one needs more than the short patience, too
		t.Error("the speaker was not replaced")
	}
	if s := a.state(1); !s.up || s.downs != 0 || counter(a, 1, "speaker_replaced") != 0 {
		t.Errorf("the other session suffered: %+v", s)
	}
	for _, e := range a.events {
		if d, ok := e.(SessionDown); ok && d.Session == 0 {
			if !strings.Contains(d.Reason, "fault of this host") {
				t.Errorf("reason %q", d.Reason)
			}
			break
		}
	}
}

// TestQuietSessionStaysUp checks that the calls of an idle session return, in either family.
func TestQuietSessionStaysUp(t *testing.T) {
	server, leaf := pairConfig(t, 2)
	server.Sessions[1].Families, leaf.Sessions[1].Families = []Family{IPv6}, []Family{IPv6}
	a, b := startPair(t, server, leaf)
	for i := range 2 {
		a.until("up, with End-of-RIB", func() bool { s := a.state(i); return s.up && s.eor > 0 })
		b.until("up, with End-of-RIB", func() bool { s := b.state(i); return s.up && s.eor > 0 })
		for _, r := range []*running{a, b} {
			for range 10 {
				r.sessions[i].server.Load().probe()
			}
			if err := r.sessions[i].server.Load().failure(); err != nil {
				t.Errorf("session %d: %v", i, err)
			}
			if s := r.state(i); !s.up || s.downs != 0 || counter(r, i, "speaker_replaced") != 0 {
				t.Errorf("session %d: %+v", i, s)
			}
		}
	}
}

// TestGoBGPFallsSilent simulates a sender of GoBGP that does not even send KEEPALIVEs.
func TestGoBGPFallsSilent(t *testing.T) {
	ln, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: loopback.AsSlice()})
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	conn, err := net.DialTCP("tcp4", nil, ln.Addr().(*net.TCPAddr))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	in := &incarnation{local: conn, server: &bgpServer{patience: 20 * time.Millisecond, failed: make(chan struct{})}}
	if _, err := in.readLocal(make([]byte, 1), 30*time.Millisecond); err == nil || err.Error() != in.server.failure().Error() {
		t.Errorf("error %v, server's %v", err, in.server.failure())
	}
	want := "fault of this host, not of the peer: gobgp has sent nothing for 50ms"
	if got := in.server.failure(); got == nil || got.Error() != want {
		t.Errorf("server failed with %v, want %q", got, want)
	}
}
