package speaker

import (
	"errors"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/daemon/internal/bfd"
)

// bfdPair returns a pair whose server has BFD; the leaf has BFD if both is set.
func bfdPair(t *testing.T, both bool) (server, leaf *running, c Config) {
	t.Helper()
	c, l := pairConfig(t, 1)
	c.BFD = BFD{Interval: 200 * time.Millisecond, Multiplier: 255}
	c.HoldTime, l.HoldTime = 90*time.Second, 90*time.Second
	if both {
		l.BFD = c.BFD
	}
	server, leaf = startPair(t, c, l)
	for _, r := range []*running{server, leaf} {
		r.until("established", func() bool { return r.state(0).up })
	}
	return server, leaf, c
}

func TestBFDUp(t *testing.T) {
	server, leaf, c := bfdPair(t, true)
	want := BFDStatus{State: "up", DetectionTime: time.Duration(c.BFD.Multiplier) * c.BFD.Interval}
	for _, r := range []*running{server, leaf} {
		r.until("BFD up", func() bool { return r.Status(0).BFD == want })
	}
	// A deliberate end is not a path failure, and the next incarnation has BFD again.
	server.SetAdminState(0, false, "maintenance")
	leaf.until("down", func() bool { return leaf.state(0).downs == 1 })
	if reason := leaf.Status(0).Reason; strings.Contains(reason, "BFD") {
		t.Errorf("the leaf's reason is %q", reason)
	}
	server.until("no BFD", func() bool { return server.Status(0).BFD == BFDStatus{} })
	server.SetAdminState(0, false, "damped until noon")
	server.until("held for another reason", func() bool {
		got := server.Status(0)
		return got.State == Held && got.Reason == "held down: damped until noon"
	})
	server.SetAdminState(0, true, "")
	for _, r := range []*running{server, leaf} {
		r.until("BFD up again", func() bool { return r.state(0).ups == 2 && r.Status(0).BFD == want })
	}
}

// TestBFDOnOneEnd checks that a session with a leaf without BFD comes up and stays up.
func TestBFDOnOneEnd(t *testing.T) {
	server, leaf, _ := bfdPair(t, false)
	p := netip.MustParsePrefix("10.0.0.1/32")
	leaf.Advertise(0, []Advertisement{{Prefix: p}})
	server.until("a route", func() bool { return server.state(0).routes[p] != nil })
	if st := server.Status(0).BFD; st != (BFDStatus{State: "down"}) || server.state(0).downs != 0 {
		t.Errorf("BFD %+v, %d times down", st, server.state(0).downs)
	}
	if st := leaf.Status(0).BFD; st != (BFDStatus{}) {
		t.Errorf("the leaf shows %+v", st)
	}
}

// TestBFDKeys checks that BFD stays down with different keys, while the session is up; that replaced keys count at once
// and for the next incarnation; and that invalid keys change nothing.
func TestBFDKeys(t *testing.T) {
	keys := func(secrets ...string) (out []bfd.Key) {
		for i, s := range secrets {
			out = append(out, bfd.Key{ID: uint8(i), Secret: s})
		}
		return out
	}
	c, l := pairConfig(t, 1)
	c.BFD, c.HoldTime, l.HoldTime = BFD{Interval: 200 * time.Millisecond, Multiplier: 255}, 90*time.Second, 90*time.Second
	l.BFD = c.BFD
	c.Sessions[0].BFDAuth = bfd.Auth{Type: bfd.MeticulousSHA1, Keys: keys("one")}
	l.Sessions[0].BFDAuth = bfd.Auth{Type: bfd.MeticulousSHA1, Keys: keys("two")}
	server, leaf := startPair(t, c, l)
	for _, r := range []*running{server, leaf} {
		r.until("established", func() bool { return r.state(0).up })
		r.until("discarded", func() bool {
			return slices.ContainsFunc(r.Status(0).Counters, func(c Counter) bool { return c.Name == "bfd_dropped_auth_digest" && c.Value >= 2 })
		})
		if st := r.Status(0).BFD.State; st != "down" {
			t.Errorf("BFD is %s with different keys", st)
		}
	}
	for _, bad := range [][]bfd.Key{nil, keys(""), keys("longer than twenty octets")} {
		if err := leaf.SetBFDKeys(0, bad); err == nil {
			t.Errorf("%v was accepted", bad)
		}
	}
	if err := leaf.SetBFDKeys(0, keys("one")); err != nil {
		t.Fatal(err)
	}
	for _, r := range []*running{server, leaf} {
		r.until("BFD up", func() bool { return r.Status(0).BFD.State == "up" })
		if st := r.Status(0); st.Generation != 1 {
			t.Errorf("generation %d", st.Generation)
		}
	}
	server.SetAdminState(0, false, "maintenance")
	leaf.until("down", func() bool { return leaf.state(0).downs == 1 })
	if err := errors.Join(server.SetBFDKeys(0, keys("three")), leaf.SetBFDKeys(0, keys("three"))); err != nil { // without a BFD session
		t.Fatal(err)
	}
	server.SetAdminState(0, true, "")
	for _, r := range []*running{server, leaf} {
		r.until("BFD up again", func() bool { return r.state(0).ups == 2 && r.Status(0).BFD.State == "up" })
	}
}

// TestBFDPortTaken checks that BGP continues, with a Fault, on an address where BFD cannot listen.
func TestBFDPortTaken(t *testing.T) {
	c, l := pairConfig(t, 1)
	taken, err := net.ListenUDP("udp4", &net.UDPAddr{IP: c.Sessions[0].Local.AsSlice(), Port: 3784})
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	c.BFD = BFD{Interval: time.Second, Multiplier: 3}
	server, leaf := startPair(t, c, l)
	for _, r := range []*running{server, leaf} { // both, because GoBGP races with itself when it is stopped in state OpenSent
		r.until("established", func() bool { return r.state(0).up })
	}
	server.until("BFD has failed, with a Fault", func() bool {
		return server.Status(0).BFD == (BFDStatus{State: "failed"}) && slices.ContainsFunc(server.events, func(e Event) bool {
			f, ok := e.(Fault)
			return ok && strings.Contains(f.Reason, "bfd: ") && strings.Contains(f.Reason, "address already in use")
		})
	})
}

// bfdPeer simulates a neighbor's BFD.
type bfdPeer struct {
	t    *testing.T
	in   *net.UDPConn
	out  *net.UDPConn
	last bfd.Packet // from the server
}

func newBFDPeer(t *testing.T, s *Session) *bfdPeer {
	t.Helper()
	p := &bfdPeer{t: t}
	var err error
	if p.in, err = net.ListenUDP("udp4", &net.UDPAddr{IP: s.Peer.AsSlice(), Port: 3784}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.in.Close() })
	if p.out, err = net.DialUDP("udp4", &net.UDPAddr{IP: s.Peer.AsSlice()}, &net.UDPAddr{IP: s.Local.AsSlice(), Port: 3784}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.out.Close() })
	raw, err := p.out.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := controlRaw(raw, func(fd int) error { return unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_TTL, 255) }); err != nil {
		t.Fatal(err)
	}
	return p
}

// receive waits for a packet of the server in a state.
func (p *bfdPeer) receive(want bfd.State) {
	p.t.Helper()
	if err := p.in.SetReadDeadline(time.Now().Add(deadline)); err != nil {
		p.t.Fatal(err)
	}
	var b [100]byte
	for {
		n, from, err := p.in.ReadFromUDPAddrPort(b[:])
		if err != nil {
			p.t.Fatalf("no packet in state %s, last %+v: %v", want, p.last, err)
		}
		if p.last, err = bfd.ParsePacket(b[:n]); err != nil || from.Port() < 49152 {
			p.t.Fatalf("from %v: % x: %v", from, b[:n], err)
		}
		if p.last.State == want {
			return
		}
	}
}

func (p *bfdPeer) say(s bfd.State, d bfd.Diagnostic, minTx time.Duration) {
	p.t.Helper()
	m := bfd.Packet{State: s, Diagnostic: d, Multiplier: 3, MyDiscr: 5, YourDiscr: p.last.MyDiscr, DesiredMinTx: minTx, RequiredMinRx: 100 * time.Millisecond}
	if _, err := p.out.Write(m.AppendTo(nil)); err != nil {
		p.t.Fatal(err)
	}
}

// TestBFDDown checks that BFD that goes down after it was up ends the session, however long the hold time is, with a
// reason for the leaf; AdminDown does not.
func TestBFDDown(t *testing.T) {
	for name, c := range map[string]struct {
		end   func(*bfdPeer)
		lost  string
		state bfd.State // of the server's BFD
	}{
		"silence":   {func(*bfdPeer) {}, "BFD down: the peer was silent for 600ms", bfd.Down},
		"coming up": {func(*bfdPeer) {}, "BFD down: the peer was silent for 600ms", bfd.Down},
		"signaled":  {func(p *bfdPeer) { p.say(bfd.Down, bfd.DetectionTimeExpired, time.Second) }, "BFD down: the peer reports down, control detection time expired", bfd.Down},
		"adminDown": {func(p *bfdPeer) { p.say(bfd.AdminDown, bfd.AdministrativelyDown, time.Second) }, "", bfd.Down},
	} {
		t.Run(name, func(t *testing.T) {
			server, leaf, conf := bfdPair(t, false)
			p := newBFDPeer(t, &conf.Sessions[0])
			p.receive(bfd.Down)
			minTx := 10 * time.Second // longer than any silence in this test
			if name == "silence" || name == "coming up" {
				minTx = time.Millisecond // three times the server's 200 ms applies
			}
			if name == "coming up" {
				p.say(bfd.Down, 0, minTx) // the server's BFD is Init, until nothing follows
			} else {
				p.say(bfd.Init, 0, minTx)
				p.receive(bfd.Up)
				c.end(p)
				p.receive(c.state)
			}
			if c.lost == "" {
				// The session is still the same one after BFD has come up again: no SessionDown is pending.
				p.say(bfd.Down, 0, minTx)
				p.receive(bfd.Init)
				p.say(bfd.Up, 0, minTx)
				server.until("BFD up again", func() bool { return server.Status(0).BFD.State == "up" })
				if st := server.state(0); st.downs != 0 || st.ups != 1 || server.Status(0).Generation != 1 {
					t.Errorf("%d times down, %d times up, %+v", st.downs, st.ups, server.Status(0))
				}
				return
			}
			server.until("lost", func() bool { return server.state(0).downs == 1 })
			for _, e := range server.events {
				if d, ok := e.(SessionDown); ok && d.Reason != c.lost {
					t.Errorf("reason %q, want %q", d.Reason, c.lost)
				}
			}
			leaf.until("Cease", func() bool { return strings.Contains(leaf.Status(0).Reason, "NOTIFICATION 6/10") }) // RFC 9384
			// BGP does not wait for BFD.
			server.until("established again", func() bool { return server.state(0).ups == 2 })
		})
	}
}

// refusing returns a server with BFD whose leaf closes every connection until accept is set, as FRR 10.3 does until BFD
// is up, and the leaf's BFD.
func refusing(t *testing.T, takeover time.Duration) (r *running, b *bfdPeer, accept *atomic.Bool) {
	t.Helper()
	accept = new(atomic.Bool)
	p := newRawPeer(t, hosts(1)[0], func(_ int, conn *net.TCPConn) {
		if accept.Load() && shake(conn, rawOpen(65100, 90, leafID)) == nil {
			keep(conn)
		}
	})
	c := rawConfig(t, p)
	c.BFD, c.HoldTime = BFD{Interval: 200 * time.Millisecond, Multiplier: 255}, 90*time.Second
	b = newBFDPeer(t, &c.Sessions[0])
	speaker := create(t, c)
	speaker.takeover = takeover
	return start(t, speaker), b, accept
}

// TestBFDBeforeBGP checks that BFD comes up with a leaf that refuses BGP until then, and that the session comes up
// then, and again.
func TestBFDBeforeBGP(t *testing.T) {
	r, b, accept := refusing(t, takeover)
	const closed = "connection to the peer: closed by the other end before its OPEN"
	r.until("refused, with the reason", func() bool {
		s := r.Status(0)
		return s.Reason == closed+"; it may wait for BFD, which is not up" && s.BFD == BFDStatus{State: "down"}
	})
	b.receive(bfd.Down)
	b.say(bfd.Init, 0, 10*time.Second)
	b.receive(bfd.Up)
	accept.Store(true)
	r.until("established", func() bool { return r.state(0).up })
	if s := r.Status(0); s.BFD.State != "up" || s.Reason != "" {
		t.Errorf("%+v", s)
	}
	accept.Store(false)
	r.sessions[0].mu.Lock()
	r.sessions[0].current.conn.Close()
	r.sessions[0].mu.Unlock()
	b.receive(bfd.AdminDown)
	b.receive(bfd.Down) // of the next session
	b.say(bfd.Init, 0, 10*time.Second)
	b.receive(bfd.Up)
	accept.Store(true)
	r.until("established again", func() bool { return r.state(0).ups == 2 })
}

// TestBFDHastens checks that a session connects at once when BFD comes up, but not again within a pause, and not when
// BFD goes down.
func TestBFDHastens(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &session{conf: &Session{}, log: testDeps(t).Log, changed: make(chan struct{})}
		for i, c := range []struct {
			after   time.Duration
			now     bfd.State
			hastens bool
		}{{0, bfd.Init, false}, {0, bfd.Up, true}, {0, bfd.Down, false}, {hastenPause - 1, bfd.Up, false}, {1, bfd.Up, true}} {
			s.hastened = s.hastened.Add(-c.after)
			changed := s.changed
			s.bfdChanged(bfd.Change{Status: bfd.Status{State: c.now}})
			select {
			case <-changed:
				if !c.hastens {
					t.Errorf("step %d connects", i)
				}
			default:
				if c.hastens {
					t.Errorf("step %d does not connect", i)
				}
			}
		}
	})
}

// TestRetry checks that a session connects at once when it is asked to, unless it is held or has a connection.
func TestRetry(t *testing.T) {
	for name, c := range map[string]struct {
		session  *session
		connects bool
	}{
		"waits": {&session{}, true}, "is held": {&session{held: &heldError{}}, false}, "has a connection": {&session{current: &incarnation{}}, false},
	} {
		t.Run(name, func(t *testing.T) {
			s, stopped := c.session, false
			s.changed, s.stopDial = make(chan struct{}), func() { stopped = true }
			changed := s.changed
			s.retry()
			select {
			case <-changed:
			default:
				changed = nil
			}
			if stopped != c.connects || (changed != nil) != c.connects {
				t.Errorf("dial stopped: %v, connects: %v, want %v", stopped, changed != nil, c.connects)
			}
		})
	}
}

// TestBFDUpBeforeBGPGoesDown checks what BFD that came up before BGP does to it: silence ends the session. So does a
// leaf that signals that BFD is down, except at first, when the leaf begins BFD again because BGP has come up.
func TestBFDUpBeforeBGPGoesDown(t *testing.T) {
	for name, c := range map[string]struct {
		takeover time.Duration
		end      func(*bfdPeer)
		ends     bool
	}{
		"silence":          {24 * time.Hour, func(p *bfdPeer) { p.say(bfd.Up, 0, time.Millisecond) }, true}, // three times the server's 200 ms
		"signaled":         {time.Nanosecond, func(p *bfdPeer) { p.say(bfd.Down, bfd.DetectionTimeExpired, time.Second) }, true},
		"signaled at once": {24 * time.Hour, func(p *bfdPeer) { p.say(bfd.Down, bfd.NeighborDown, time.Second) }, false},
	} {
		t.Run(name, func(t *testing.T) {
			r, b, accept := refusing(t, c.takeover)
			b.receive(bfd.Down)
			b.say(bfd.Init, 0, 10*time.Second)
			b.receive(bfd.Up)
			accept.Store(true)
			r.until("established", func() bool { return r.state(0).ups == 1 })
			c.end(b)
			if c.ends {
				r.until("lost", func() bool { return r.state(0).downs == 1 })
				return
			}
			// The session is still the same one after BFD has come up again, and BFD protects it then.
			b.receive(bfd.Down)
			b.say(bfd.Down, 0, 10*time.Second)
			b.receive(bfd.Init)
			b.say(bfd.Up, 0, 10*time.Second)
			r.until("BFD up again", func() bool { return r.Status(0).BFD.State == "up" })
			if st := r.state(0); st.downs != 0 || st.ups != 1 {
				t.Errorf("%d times down, %d times up, %+v", st.downs, st.ups, r.Status(0))
			}
			b.say(bfd.Down, bfd.DetectionTimeExpired, time.Second)
			r.until("lost", func() bool { return r.state(0).downs == 1 })
		})
	}
}
