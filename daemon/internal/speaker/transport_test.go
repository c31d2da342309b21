package speaker

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/fared/fared/daemon/internal/guard"
	"github.com/fared/fared/fare"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// TestIPv4OverIPv6 carries both families over an IPv6 session, IPv4 routes with
// IPv6 next hops.
func TestIPv4OverIPv6(t *testing.T) {
	at := netip.IPv6Loopback()
	port := uint16(netnstest.FreePort(t))
	server := Config{AS: 65001, RouterID: netip.MustParseAddr("10.255.0.1"), Accept: acceptAll}
	leaf := Config{AS: 65100, RouterID: leafID, Accept: acceptAll}
	x := Session{Name: "v6", Peer: at, Local: at, Port: port, Families: []Family{IPv4, IPv6}, ExtendedNextHop: true, GTSMHops: 1, Password: "secret"}
	server.Sessions = []Session{x}
	x.Passive = true
	leaf.Sessions = []Session{x}
	a, b := startPair(t, server, leaf)
	p4, p6 := prefix(1), netip.MustParsePrefix("fd00::9/128")
	c := []fare.Community{bandwidth(t, "1.6T", 65100)}
	b.Advertise(0, []Advertisement{{Prefix: p4, Communities: c}, {Prefix: p6, Communities: c}})
	a.until("both routes", func() bool {
		s := a.state(0)
		return len(s.routes) == 2 && s.routes[p4] != nil && s.routes[p6] != nil &&
			slices.Equal(s.routes[p4].Communities, c) && slices.Equal(s.routes[p6].Communities, c)
	})
	for _, e := range a.events {
		if up, ok := e.(SessionUp); ok && !(up.Families.Has(IPv4) && up.Families.Has(IPv6)) {
			t.Errorf("families %v", up.Families)
		}
	}
}

// TestRestart checks the capability and the NOTIFICATION that a leaf receives, with and without graceful restart.
func TestRestart(t *testing.T) {
	for _, test := range []struct {
		restart  time.Duration
		families []Family
		want     []byte // the capability
	}{
		{0, []Family{IPv4}, []byte{0, 0}}, // no family: End-of-RIB only
		{120 * time.Second, []Family{IPv4}, []byte{0x80, 120, 0, 1, 1, 0x80}},
		{120 * time.Second, []Family{IPv4, IPv6}, []byte{0x80, 120, 0, 1, 1, 0x80, 0, 2, 1, 0x80}},
	} {
		t.Run(fmt.Sprint(test.restart, " ", test.families), func(t *testing.T) {
			at := hosts(1)[0]
			opens, ends := make(chan []byte, 4), make(chan []byte, 4)
			var buf [guard.MaxMessage]byte
			p := newRawPeerOnce(t, at, func(read func() []byte, write func([]byte)) {
				write(append(rawOpen(65100, 90, leafID), keepalive...))
				opens <- read()
				for {
					msg := read()
					if msg == nil {
						ends <- nil
						return
					}
					if msg[18] == 3 {
						ends <- slices.Clone(msg[19:21])
						return
					}
				}
			}, &buf)
			c := rawConfig(t, p)
			c.RestartTime, c.Sessions[0].Families = test.restart, test.families
			r := start(t, create(t, c))
			r.until("up", func() bool { return r.state(0).up })
			open := <-opens
			var capability []byte
			for caps := open[31:]; len(caps) >= 2; caps = caps[2+int(caps[1]):] {
				if caps[0] == 64 {
					capability = caps[2 : 2+int(caps[1])]
				}
			}
			r.stop()
			var end []byte
			select {
			case end = <-ends:
			case <-time.After(deadline):
				t.Fatal("the leaf was not told")
			}
			// RFC 4724, Section 3: R and 120 s, each family with F.
			wantEnd := []byte{6, 2}
			if test.restart > 0 {
				wantEnd = nil
			}
			if !slices.Equal(capability, test.want) || !slices.Equal(end, wantEnd) {
				t.Errorf("capability % x, end % x; want % x, % x", capability, end, test.want, wantEnd)
			}
		})
	}
}

// TestRestartBitSurvivesFailedConnections checks that R is set until the session is established, then clear (RFC 4724,
// Section 3).
func TestRestartBitSurvivesFailedConnections(t *testing.T) {
	at := hosts(1)[0]
	opens := make(chan []byte, 64)
	var lost atomic.Bool      // the session that has been up has ended
	up := make(chan struct{}) // closed when the owner has the first SessionUp: with an untaken one it would receive neither that nor SessionDown
	p := newRawPeer(t, at, func(n int, conn *net.TCPConn) {
		var buf [guard.MaxMessage]byte
		open, err := guard.ReadMessage(conn, &buf)
		if err != nil {
			return
		}
		opens <- slices.Clone(open)
		if n < 2 {
			return // closed before any answer, like a leaf that is still starting
		}
		if _, err := conn.Write(append(rawOpen(65100, 90, leafID), keepalive...)); err != nil {
			return
		}
		// Closed only when both ends have confirmed and GoBGP has sent its first table; on a busy machine a connection
		// may end before.
		for !lost.Load() {
			msg, err := guard.ReadMessage(conn, &buf)
			if err != nil {
				return
			}
			if len(msg) == len(endOfRIB) {
				<-up
				lost.Store(true)
				return
			}
		}
		keep(conn)
	})
	c := rawConfig(t, p)
	c.RestartTime = 120 * time.Second
	r := start(t, create(t, c))
	r.until("up", func() bool { return r.state(0).ups == 1 })
	close(up)
	r.until("up after the loss", func() bool { return r.state(0).ups == 2 })
	n := len(opens)
	if n < 4 {
		t.Fatalf("%d connections", n)
	}
	for i := range n {
		want := uint16(0x8078)
		if i == n-1 {
			want = 0x0078
		}
		if got := restartFlags(t, <-opens); got != want {
			t.Errorf("connection %d of %d: restart flags and time %#04x, want %#04x", i, n, got, want)
		}
	}
}

// restartFlags returns the first two octets of the graceful restart capability of an OPEN with one optional parameter.
func restartFlags(t *testing.T, open []byte) uint16 {
	t.Helper()
	for caps := open[31:]; len(caps) >= 2; caps = caps[2+int(caps[1]):] {
		if caps[0] == 64 {
			return binary.BigEndian.Uint16(caps[2:])
		}
	}
	t.Fatalf("OPEN % x has no graceful restart capability", open)
	return 0
}

// TestNetns keeps a session inside another network namespace; a Speaker outside
// it opens both ends there.
func TestNetns(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("network namespaces need root")
	}
	path, ready, end := make(chan string, 1), make(chan error, 1), make(chan struct{})
	gone := make(chan struct{})
	go func() { // this thread is in the namespace, which ends with the goroutine
		defer close(gone)
		runtime.LockOSThread()
		ns, err := netns.New()
		if err == nil {
			defer ns.Close()
			err = upLoopback()
		}
		path <- fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid())
		ready <- err
		<-end
	}()
	t.Cleanup(func() { close(end); <-gone })
	name := <-path
	if err := <-ready; err != nil {
		t.Skipf("network namespace: %v", err)
	}
	server, leaf := pairConfig(t, 1)
	server.Sessions[0].Netns, leaf.Sessions[0].Netns = name, name
	a, b := startPair(t, server, leaf)
	b.Advertise(0, []Advertisement{{Prefix: prefix(1)}})
	a.until("the route", func() bool { return a.state(0).routes[prefix(1)] != nil })
	// Outside the namespace there is no listener.
	conn, err := (&session{speaker: a.Speaker, conf: &Session{Name: "out", Port: server.Sessions[0].Port}}).
		dial(context.Background(), server.Sessions[0].Peer, time.Minute)
	if err == nil {
		conn.Close()
		t.Error("the session is not in its namespace")
	}
}

// TestUnansweredSYN checks that an attempt whose SYN is dropped ends by its limit, not by its context, and that the
// limit, at first below the second after which TCP repeats a SYN, grows with each failure, because a slow answer must
// arrive in the end.
func TestUnansweredSYN(t *testing.T) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := errors.Join(unix.Bind(fd, &unix.SockaddrInet4{Addr: loopback.As4()}), unix.Listen(fd, 0)); err != nil {
		t.Fatal(err)
	}
	name, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	s := &session{speaker: &Speaker{}, conf: &Session{Name: "full", Port: uint16(name.(*unix.SockaddrInet4).Port)}}
	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	defer cancel()
	for err == nil { // a queue that no program empties holds one or two connections; the kernel drops further SYNs
		var conn *net.TCPConn
		if conn, err = s.dial(ctx, loopback, patienceToConnect(0)); err == nil {
			defer conn.Close()
		}
	}
	if ctx.Err() != nil || !os.IsTimeout(err) {
		t.Errorf("the attempt ended with %v, its context: %v", err, ctx.Err())
	}
	for n, limit := 0, 10*time.Millisecond; n < 100; n, limit = n+1, min(2*limit, 3*time.Second) {
		if got := patienceToConnect(n); got != limit {
			t.Errorf("after %d failures: %v, want %v", n, got, limit)
		}
	}
}

// TestAbsentLocal checks that a session whose local address is on no device, of either direction, says so with the
// remedy.
func TestAbsentLocal(t *testing.T) {
	for _, local := range []string{"192.0.2.77", "2001:db8::77"} {
		at := netip.MustParseAddr(local)
		s := &session{speaker: &Speaker{}, conf: &Session{Name: "p0", Local: at, Port: 179}}
		_, dialed := s.dial(t.Context(), at.Next(), time.Minute)
		_, listened := listen(t.Context(), listenAddr{addr: at})
		for what, err := range map[string]error{"active": dialed, "passive": listened} {
			if want := "local " + local + " is on no device of this server; add the address to the sub-port, or correct local"; err == nil || !strings.Contains(plain(err).Error(), want) {
				t.Errorf("%s: %v, want %q", what, err, want)
			}
		}
	}
}

func upLoopback() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	return netlink.LinkSetUp(lo)
}
