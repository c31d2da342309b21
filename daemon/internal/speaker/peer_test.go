package speaker

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	api "github.com/osrg/gobgp/v3/api"
	"github.com/osrg/gobgp/v3/pkg/server"
	"golang.org/x/sys/unix"

	"github.com/fared/fared/daemon/internal/guard"
	"github.com/fared/fared/fare"
)

// rawPeer is a leaf that writes raw octets: it listens and runs a script on every connection on which the other end
// sends an OPEN. A session of a busy machine may give up an attempt after the kernel has established the connection;
// such connections have no number.
type rawPeer struct {
	ln *net.TCPListener
	wg sync.WaitGroup
}

func newRawPeer(t testing.TB, at netip.Addr, script func(n int, conn *net.TCPConn)) *rawPeer {
	t.Helper()
	ln, err := net.ListenTCP("tcp4", net.TCPAddrFromAddrPort(netip.AddrPortFrom(at, 0)))
	if err != nil {
		t.Fatal(err)
	}
	p := &rawPeer{ln: ln}
	var opened atomic.Int64
	p.wg.Go(func() {
		for {
			conn, err := ln.AcceptTCP()
			if err != nil {
				return
			}
			p.wg.Go(func() {
				defer conn.Close()
				if sends(conn) {
					script(int(opened.Add(1)-1), conn)
				}
			})
		}
	})
	t.Cleanup(func() { ln.Close(); p.wg.Wait() })
	return p
}

// sends waits until octets of the other end can be read, or reports false if the connection ends before.
func sends(conn *net.TCPConn) (sent bool) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return false
	}
	err = raw.Read(func(fd uintptr) bool {
		n, _, err := unix.Recvfrom(int(fd), make([]byte, 1), unix.MSG_PEEK|unix.MSG_DONTWAIT)
		sent = n > 0
		return !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR)
	})
	return err == nil && sent
}

func message(kind byte, body ...byte) []byte {
	b := append([]byte(nil), keepalive[:16]...)
	b = binary.BigEndian.AppendUint16(b, uint16(19+len(body)))
	return append(append(b, kind), body...)
}

// endOfRIB is an End-of-RIB of IPv4 unicast (RFC 4724, Section 2).
var endOfRIB = message(2, 0, 0, 0, 0)

func rawOpen(as uint16, hold uint16, id netip.Addr) []byte {
	body := []byte{4}
	body = binary.BigEndian.AppendUint16(body, as)
	body = binary.BigEndian.AppendUint16(body, hold)
	body = append(body, id.AsSlice()...)
	caps := []byte{1, 4, 0, 1, 0, 1, 65, 4, 0, 0}
	caps = binary.BigEndian.AppendUint16(caps, as)
	body = append(body, byte(2+len(caps)), 2, byte(len(caps)))
	return message(1, append(body, caps...)...)
}

// rawUpdate returns an UPDATE that announces host routes with one community.
func rawUpdate(as uint16, hop netip.Addr, c fare.Community, prefixes ...netip.Prefix) []byte {
	attrs := []byte{0x40, 1, 1, 0, 0x40, 2, 6, 2, 1, 0, 0}
	attrs = binary.BigEndian.AppendUint16(attrs, as)
	attrs = append(attrs, 0x40, 3, 4)
	attrs = append(attrs, hop.AsSlice()...)
	attrs = append(attrs, 0xc0, 16, 8)
	attrs = append(attrs, c[:]...)
	body := []byte{0, 0}
	body = binary.BigEndian.AppendUint16(body, uint16(len(attrs)))
	body = append(body, attrs...)
	for _, p := range prefixes {
		body = append(append(body, 32), p.Addr().AsSlice()...)
	}
	return message(2, body...)
}

// shake exchanges OPEN and KEEPALIVE and returns when the other end has
// confirmed.
func shake(conn net.Conn, open []byte) error {
	if _, err := conn.Write(append(slices.Clone(open), message(4)...)); err != nil {
		return err
	}
	var buf [guard.MaxMessage]byte
	for _, want := range []byte{1, 4} {
		msg, err := guard.ReadMessage(conn, &buf)
		if err != nil {
			return err
		}
		if msg[18] != want {
			return errors.New("unexpected message")
		}
	}
	return nil
}

// keep answers every message of the other end with a KEEPALIVE.
func keep(conn net.Conn) {
	var buf [guard.MaxMessage]byte
	for {
		if _, err := guard.ReadMessage(conn, &buf); err != nil {
			return
		}
		if _, err := conn.Write(message(4)); err != nil {
			return
		}
	}
}

var leafID = netip.MustParseAddr("10.255.1.1")

func rawConfig(t testing.TB, peers ...*rawPeer) Config {
	c := Config{AS: 65001, RouterID: netip.MustParseAddr("10.255.0.1"), Accept: acceptAll, ConnectRetry: 50 * time.Millisecond}
	for i, p := range peers {
		at := addrPort(p.ln.Addr())
		c.Sessions = append(c.Sessions, Session{Name: string(rune('a' + i)), Peer: at.Addr(), Port: at.Port(), Local: hosts(1)[0]})
	}
	return c
}

// TestTransitiveOnTheWire compares the UPDATE that a leaf receives, octet by octet.
func TestTransitiveOnTheWire(t *testing.T) {
	at := hosts(1)[0]
	updates, lost := make(chan []byte, 16), make(chan error, 16)
	p := newRawPeer(t, at, func(_ int, conn *net.TCPConn) {
		if err := shake(conn, rawOpen(65100, 90, leafID)); err != nil {
			lost <- err
			return
		}
		var buf [guard.MaxMessage]byte
		for {
			msg, err := guard.ReadMessage(conn, &buf)
			if err != nil {
				return
			}
			if msg[18] == 2 {
				updates <- slices.Clone(msg)
			}
		}
	})
	r := start(t, create(t, rawConfig(t, p)))
	c := bandwidth(t, "400G", 65001)
	r.Advertise(0, []Advertisement{{Prefix: prefix(7), Communities: []fare.Community{c}}})
	r.until("up", func() bool { return r.state(0).up })
	next := func() []byte {
		select {
		case u := <-updates:
			return u
		case err := <-lost:
			t.Fatal(err)
		case <-time.After(deadline):
			t.Fatal("no UPDATE")
		}
		return nil
	}
	u := next()
	for len(u) == len(endOfRIB) { // the set may follow an empty first table
		u = next()
	}
	want := rawUpdate(65001, r.conf.Sessions[0].Local, c, prefix(7))
	if !slices.Equal(u, want) {
		t.Errorf("UPDATE\n% x, want\n% x", u, want)
	}
}

func TestFullSetThenEndOfRIB(t *testing.T) {
	at := hosts(1)[0]
	updates, done := make(chan []byte, 64), make(chan struct{})
	p := newRawPeer(t, at, func(_ int, conn *net.TCPConn) {
		defer func() { <-done }()
		if shake(conn, rawOpen(65100, 90, leafID)) != nil {
			return
		}
		var buf [guard.MaxMessage]byte
		for {
			msg, err := guard.ReadMessage(conn, &buf)
			if err != nil {
				return
			}
			if msg[18] == 2 {
				updates <- slices.Clone(msg)
			}
			if len(msg) == len(endOfRIB) {
				return
			}
		}
	})
	s := create(t, rawConfig(t, p))
	s.SetAdminState(0, false, "first the routes")
	r := start(t, s)
	var set []Advertisement
	for i := range 8 {
		set = append(set, Advertisement{Prefix: prefix(i), ASPath: []uint32{uint32(65200 + i)}})
	}
	r.Advertise(0, set)
	r.until("originated", func() bool { return r.Status(0).Advertised == 8 })
	r.SetAdminState(0, true, "")
	seen := 0
	for {
		select {
		case u := <-updates:
			if len(u) != len(endOfRIB) {
				seen++
				continue
			}
		case <-time.After(deadline):
			t.Fatal("no End-of-RIB")
		}
		break
	}
	close(done)
	if seen != 8 {
		t.Errorf("%d UPDATEs before End-of-RIB, want 8", seen)
	}
}

// TestRoutesAreReread withholds a route until the peer is asked for its routes a second time, as FRR does at times, and
// then has it in effect. A peer without the capability is not asked.
func TestRoutesAreReread(t *testing.T) {
	refresh := message(5, 0, 1, 0, 1) // RFC 2918, Section 3
	for _, able := range []bool{true, false} {
		t.Run(fmt.Sprintf("capability %v", able), func(t *testing.T) {
			at, asked := hosts(1)[0], make(chan []byte, 4)
			open := rawOpen(65100, 90, leafID)
			if able {
				open = withCapability(open, 2) // RFC 2918, Section 2
			}
			p := newRawPeer(t, at, func(_ int, conn *net.TCPConn) {
				if shake(conn, open) != nil {
					return
				}
				_, _ = conn.Write(slices.Concat(rawUpdate(65100, at, bandwidth(t, "400G", 65100), prefix(1)), endOfRIB))
				var buf [guard.MaxMessage]byte
				for {
					msg, err := guard.ReadMessage(conn, &buf)
					if err != nil {
						return
					}
					if msg[18] == 5 || msg[18] == 2 && !able {
						asked <- slices.Clone(msg)
					}
					if msg[18] == 5 {
						_, _ = conn.Write(rawUpdate(65100, at, bandwidth(t, "400G", 65100), prefix(1), prefix(2)))
					}
				}
			})
			s := create(t, rawConfig(t, p))
			s.rereadAfter = time.Nanosecond
			r := start(t, s)
			if !able {
				// A request would precede the UPDATE with a route that is advertised later.
				r.until("loaded", func() bool { return len(r.state(0).routes) == 1 })
				r.Advertise(0, []Advertisement{{Prefix: prefix(3)}})
				for m := range asked {
					if m[18] == 5 {
						t.Fatalf("% x", m)
					}
					if len(m) > len(endOfRIB) {
						return
					}
				}
			}
			r.until("both routes", func() bool { return len(r.state(0).routes) == 2 })
			if m := <-asked; !slices.Equal(m, refresh) {
				t.Errorf("ROUTE-REFRESH % x, want % x", m, refresh)
			}
		})
	}
}

// withCapability adds a capability without a value to the OPEN of rawOpen.
func withCapability(open []byte, code byte) []byte {
	open = append(slices.Clone(open), code, 0)
	binary.BigEndian.PutUint16(open[16:], uint16(len(open)))
	open[28] += 2 // optional parameters' length
	open[30] += 2 // capabilities' length
	return open
}

// TestClosedByThePeer checks that a connection that the peer closes or resets once the session is up, without a
// NOTIFICATION, is reported as closed, and the next one makes a session.
func TestClosedByThePeer(t *testing.T) {
	for _, linger := range []int{-1, 0} { // FIN, RST
		seen := make(chan struct{})
		p := newRawPeer(t, hosts(1)[0], func(n int, conn *net.TCPConn) {
			if shake(conn, rawOpen(65100, 90, leafID)) != nil || n > 0 {
				keep(conn)
				return
			}
			<-seen
			_ = conn.SetLinger(linger)
		})
		r := start(t, create(t, rawConfig(t, p)))
		r.until("up", func() bool { return r.state(0).up })
		close(seen)
		r.until("up again", func() bool { return r.state(0).ups > 1 })
		for _, e := range r.events {
			if d, ok := e.(SessionDown); ok && !d.Closed {
				t.Errorf("linger %d: %+v, want it closed", linger, d)
			}
		}
	}
}

// TestSilentPeer checks that the silence of a leaf ends the session after the hold time that the leaf has proposed, 3
// s, not before, and not only after ours, which is longer than this test waits. A slow machine only makes the session
// end later.
func TestSilentPeer(t *testing.T) {
	at := hosts(1)[0]
	last := make(chan time.Time, 1) // before the last message of the first connection
	p := newRawPeer(t, at, func(n int, conn *net.TCPConn) {
		if n == 0 {
			last <- time.Now()
		}
		if shake(conn, rawOpen(65100, 3, leafID)) == nil {
			if n > 0 {
				keep(conn)
			}
			_, _ = io.Copy(io.Discard, conn) // sends nothing
		}
	})
	c := rawConfig(t, p)
	c.HoldTime = 10 * deadline
	r := start(t, create(t, c))
	r.until("up", func() bool { return r.state(0).up })
	r.until("noticed", func() bool { return r.state(0).downs > 0 })
	if d := time.Since(<-last); d < 3*time.Second {
		t.Errorf("noticed %v after the last message, hold time is 3 s", d)
	}
	var down SessionDown
	for _, e := range r.events {
		if d, ok := e.(SessionDown); ok {
			down = d
		}
	}
	if want := "hold timer expired: the peer was silent"; down.Reason != want || down.Closed {
		t.Errorf("reason %q, closed %t, want %q", down.Reason, down.Closed, want)
	}
	r.until("up again", func() bool { return r.state(0).ups > 1 })
}

// TestShorterHoldTime checks that a session whose leaf proposes a much shorter hold time than ours lasts while the leaf
// sends KEEPALIVEs: GoBGP, whose hold timer has the leaf's hold time, receives a KEEPALIVE for them several times
// within it. A thirtieth of our hold time is longer than this test waits.
func TestShorterHoldTime(t *testing.T) {
	const hold, ours = deadline, 18 * time.Hour
	conns := make(chan *net.TCPConn, 100)
	p := newRawPeer(t, hosts(1)[0], func(_ int, conn *net.TCPConn) {
		if shake(conn, rawOpen(65100, uint16(hold/time.Second), leafID)) == nil {
			conns <- conn
			_, _ = io.Copy(io.Discard, conn)
		}
	})
	c := rawConfig(t, p)
	c.HoldTime = ours
	r := start(t, create(t, c))
	r.until("up", func() bool { return r.state(0).up })
	conn, gobgp := <-conns, r.sessions[0].server.Load()
	var received, negotiated uint64
	r.until("GoBGP has received KEEPALIVEs after that of its handshake", func() bool {
		if _, err := conn.Write(message(4)); err != nil {
			t.Fatal(err)
		}
		err := gobgp.call(func(b *server.BgpServer) error {
			return b.ListPeer(t.Context(), &api.ListPeerRequest{}, func(p *api.Peer) {
				received, negotiated = p.State.Messages.Received.Keepalive, p.Timers.State.NegotiatedHoldTime
			})
		})
		if err != nil {
			t.Fatal(err)
		}
		return received > 2
	})
	if negotiated != uint64(hold/time.Second) {
		t.Errorf("GoBGP's hold time is %d s, want %v", negotiated, hold)
	}
	if s := r.state(0); s.ups != 1 || s.downs != 0 {
		t.Errorf("%+v", s)
	}
}

func TestNoHoldTimerIsRefused(t *testing.T) {
	at := hosts(1)[0]
	got := make(chan []byte, 100)
	p := newRawPeer(t, at, func(_ int, conn *net.TCPConn) {
		if _, err := conn.Write(rawOpen(65100, 0, leafID)); err != nil {
			return
		}
		var buf [guard.MaxMessage]byte
		for {
			msg, err := guard.ReadMessage(conn, &buf)
			if err != nil {
				return
			}
			if msg[18] == 3 {
				got <- slices.Clone(msg[19:])
			}
		}
	})
	r := start(t, create(t, rawConfig(t, p)))
	select {
	case n := <-got:
		if !slices.Equal(n, []byte{2, 6}) {
			t.Errorf("NOTIFICATION % x, want 2/6", n)
		}
	case <-time.After(deadline):
		t.Fatal("no NOTIFICATION")
	}
	if r.events = r.Take(r.events); r.state(0).ups != 0 {
		t.Error("session came up")
	}
}

// TestGarbage connects a leaf that breaks the protocol at every stage, next to
// a correct leaf.
func TestGarbage(t *testing.T) {
	at := hosts(2)
	good := newRawPeer(t, at[1], func(_ int, conn *net.TCPConn) {
		if shake(conn, rawOpen(65100, 90, netip.MustParseAddr("10.255.1.2"))) != nil {
			return
		}
		if _, err := conn.Write(rawUpdate(65100, at[1], bandwidth(t, "400G", 1), prefix(1))); err == nil {
			keep(conn)
		}
	})
	open := rawOpen(65100, 90, leafID)
	hello := append(slices.Clone(open), message(4)...)
	update := rawUpdate(65100, at[0], fare.Community{0, 4, 1, 2, 3, 4, 5, 6}, prefix(2))
	noise := make([]byte, 4096)
	x := uint32(12345)
	for i := range noise {
		x = x*1664525 + 1013904223
		noise[i] = byte(x >> 24)
	}
	badAttr := slices.Clone(update)
	badAttr[23+3] = 9 // the value of ORIGIN
	stages := [][]byte{
		noise,
		message(4, 0),          // a KEEPALIVE with a body
		message(2, 0, 0, 0, 0), // UPDATE before OPEN
		append(slices.Clone(open), noise...),
		append(slices.Clone(open), update...), // before KEEPALIVE
		append(slices.Clone(hello), noise...),
		append(slices.Clone(hello), update[:30]...),
		append(slices.Clone(hello), message(2, noise[:64]...)...),
		append(slices.Clone(hello), badAttr...),
		append(append(slices.Clone(hello), update...), message(4, 0)...),
		append(slices.Clone(hello), message(2, 0, 0, 0, 7, 0xc0, 14, 4, 0, 1, 1, 0)...), // short MP_REACH
		append(slices.Clone(hello), message(2, 0, 0, 0, 5, 0xc0, 99, 2, 1, 1)...),       // unknown
		append(slices.Clone(hello), message(5, 0, 99, 0, 99)...),
		append(slices.Clone(hello), message(3, 6, 4, 200, 1)...),
		rawOpen(65001, 90, leafID), // our AS
		rawOpen(65100, 1, leafID),
	}
	for i := range len(hello) {
		stages = append(stages, hello[:i])
	}
	served := make(chan int, len(stages))
	bad := newRawPeer(t, at[0], func(n int, conn *net.TCPConn) {
		if _, err := conn.Write(stages[n%len(stages)]); err == nil {
			_ = conn.CloseWrite()
			_, _ = io.Copy(io.Discard, conn)
		}
		if n < len(stages) {
			served <- n
		}
	})
	r := start(t, create(t, rawConfig(t, good, bad)))
	r.until("the good session is up", func() bool { return r.state(0).routes[prefix(1)] != nil })
	count := 0
	r.until("every stage was tried", func() bool {
		for {
			select {
			case <-served:
				count++
				continue
			default:
			}
			return count == len(stages)
		}
	})
	if s := r.state(0); !s.up || s.downs != 0 || len(s.routes) != 1 {
		t.Errorf("the good session suffered: %+v", s)
	}
	r.state(1) // checks the order of its events
}

// TestFlood checks that far more UPDATEs than the owner takes leave only the
// session's routes in memory.
func TestFlood(t *testing.T) {
	at := hosts(1)[0]
	const rounds, n = 200, 100
	last := bandwidth(t, "1G", 1)
	p := newRawPeer(t, at, func(_ int, conn *net.TCPConn) {
		if shake(conn, rawOpen(65100, 90, leafID)) != nil {
			return
		}
		var all []netip.Prefix
		for i := range n {
			all = append(all, prefix(i))
		}
		for i := range rounds {
			c := last
			if i < rounds-1 {
				c = fare.Community{0, 4, 0, 1, 0x51, byte(i), 1, 1}
			}
			if _, err := conn.Write(rawUpdate(65100, at, c, all...)); err != nil {
				return
			}
		}
		keep(conn)
	})
	r := start(t, create(t, rawConfig(t, p)))
	r.until("the last value of all", func() bool {
		s := r.state(0)
		if len(s.routes) != n {
			return false
		}
		for _, a := range s.routes {
			if a.Communities[0] != last {
				return false
			}
		}
		return true
	})
	if r.flaps() != 0 {
		t.Error("the session flapped")
	}
}

type fixedResolver netip.Addr

func (f fixedResolver) Peer(ctx context.Context, device, netns string) (netip.Addr, error) {
	if device != "lo" || netns != "" {
		return netip.Addr{}, errors.New("not that device")
	}
	return netip.Addr(f), nil
}

func TestUnnumbered(t *testing.T) {
	at := hosts(1)[0]
	p := newRawPeer(t, at, func(_ int, conn *net.TCPConn) {
		if shake(conn, rawOpen(65100, 90, leafID)) == nil {
			keep(conn)
		}
	})
	c := rawConfig(t, p)
	c.Sessions[0].Peer, c.Sessions[0].Unnumbered, c.Sessions[0].Device = netip.Addr{}, true, "lo"
	if _, err := New(c, testDeps(t)); err == nil {
		t.Fatal("unnumbered without a resolver is not refused")
	}
	d := testDeps(t)
	d.Resolver = fixedResolver(at)
	s, err := New(c, d)
	if err != nil {
		t.Fatal(err)
	}
	r := start(t, s)
	r.until("up over the device", func() bool { return r.state(0).up })
}

// newRawPeerOnce runs a script of whole messages on the first connection; read
// returns nil at its end.
func newRawPeerOnce(t testing.TB, at netip.Addr, script func(read func() []byte, write func([]byte)), buf *[guard.MaxMessage]byte) *rawPeer {
	return newRawPeer(t, at, func(n int, conn *net.TCPConn) {
		if n > 0 {
			return
		}
		script(func() []byte {
			msg, err := guard.ReadMessage(conn, buf)
			if err != nil {
				return nil
			}
			return slices.Clone(msg)
		}, func(b []byte) {
			if _, err := conn.Write(b); err != nil {
				t.Error(err)
			}
		})
	})
}
