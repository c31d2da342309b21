package bfd

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/netnstest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const within = time.Minute

var hosts byte

// host is an address of 127.0.0.0/8 that no other test has.
func host() netip.Addr {
	hosts++
	return netip.AddrFrom4([4]byte{127, 22, 0, hosts})
}

// told is what a session's owner was told.
type told struct {
	mu      sync.Mutex
	changes []Change
}

func (o *told) take(c Change) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.changes = append(o.changes, c)
}

func (o *told) all() []Change {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.Clone(o.changes)
}

// failures counts those changes that are failures.
func (o *told) failures() (n int) {
	for _, c := range o.all() {
		if c.Failed() {
			n++
		}
	}
	return n
}

// start starts a session that ends with the test.
func start(t *testing.T, r *Responder, c Config) (*Session, *told) {
	t.Helper()
	o := &told{}
	c.Changed = o.take
	if c.Interval == 0 {
		c.Interval, c.Multiplier = 100*time.Millisecond, 3
	}
	s, err := r.Start(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s, o
}

func until(t *testing.T, s *Session, want State) {
	t.Helper()
	netnstest.Eventually(t, within, func() error {
		if st := s.Status(); st.State != want {
			return fmt.Errorf("%+v, want %s", st, want)
		}
		return nil
	})
}

// patient has a detection time that no busy machine exceeds.
var patient = Config{Interval: 200 * time.Millisecond, Multiplier: 255}

func (c Config) between(local, remote netip.Addr) Config {
	c.Local, c.Remote = local, remote
	return c
}

// Both ends come up, agree on the detection time, and the one that goes says so: no failure.
func TestUpAndClosed(t *testing.T) {
	r, here, there := NewResponder(nil), host(), host()
	a, fromA := start(t, r, patient.between(here, there))
	b, fromB := start(t, r, Config{Interval: 300 * time.Millisecond, Multiplier: 100}.between(there, here))
	until(t, a, Up)
	until(t, b, Up)
	netnstest.Eventually(t, within, func() error {
		if x, y := a.Status().DetectionTime, b.Status().DetectionTime; x != 30*time.Second || y != 255*300*time.Millisecond {
			return fmt.Errorf("detection times %v and %v", x, y)
		}
		return nil
	})
	a.Close()
	until(t, b, Down)
	if st := b.Status(); st.RemoteState != AdminDown || st.Diagnostic != NeighborDown || st.RemoteDiagnostic != AdministrativelyDown {
		t.Errorf("b shows %+v", st)
	}
	b.Close()
	if fromA.failures() != 0 || fromB.failures() != 0 {
		t.Errorf("failures: a %v, b %v", fromA.all(), fromB.all())
	}
	for name, o := range map[string]*told{"a": fromA, "b": fromB} {
		state := Down
		for _, c := range o.all() {
			if c.Before != state || c.State == state {
				t.Errorf("%s was told %v", name, o.all())
			}
			state = c.State
		}
	}
	if len(r.receivers) != 0 {
		t.Errorf("%d receivers are left", len(r.receivers))
	}
}

// Who is silent is noticed; who then comes back as another process is found again.
func TestSilence(t *testing.T) {
	r, here, there := NewResponder(nil), host(), host()
	a, fromA := start(t, r, Config{}.between(here, there))
	b, _ := start(t, r, Config{}.between(there, here))
	until(t, a, Up)
	until(t, b, Up)
	b.conn.Close() // its packets do not leave any more
	netnstest.Eventually(t, within, func() error {
		for _, c := range fromA.all() {
			if c.Failed() && c.Diagnostic == DetectionTimeExpired && c.Silence > 0 {
				return nil
			}
		}
		return fmt.Errorf("a was told %v", fromA.all())
	})
	b.Close()
	b, _ = start(t, r, Config{}.between(there, here))
	until(t, a, Up)
	until(t, b, Up)
}

// A process that did not listen does not take that for silence, however late it is: what came meanwhile counts.
func TestLateTimer(t *testing.T) {
	r, here, there := NewResponder(nil), host(), host()
	a, fromA := start(t, r, Config{Interval: 100 * time.Millisecond, Multiplier: 255}.between(here, there))
	b, _ := start(t, r, Config{Interval: 100 * time.Millisecond, Multiplier: 15}.between(there, here)) // 1.5 s of silence is too much
	until(t, a, Up)
	until(t, b, Up)
	before := fromA.failures()
	for range 3 {
		var heard time.Time
		func() { // nobody reads, for longer than the detection time; packets come on
			a.receiver.mu.Lock()
			defer a.receiver.mu.Unlock()
			netnstest.Eventually(t, within, func() error {
				a.mu.Lock()
				defer a.mu.Unlock()
				heard = a.machine.heard
				if late := time.Since(heard) - a.machine.DetectionTime(); late < 100*time.Millisecond {
					return fmt.Errorf("%v late", late)
				}
				return nil
			})
		}()
		netnstest.Eventually(t, within, func() error {
			a.mu.Lock()
			defer a.mu.Unlock()
			if !a.machine.heard.After(heard) {
				return fmt.Errorf("nothing was heard since")
			}
			return nil
		})
	}
	if got := fromA.failures() - before; got != 0 {
		t.Errorf("%d failures: %v", got, fromA.all())
	}
}

// TestStrangers: only packets of the neighbour that have crossed no router count.
func TestStrangers(t *testing.T) {
	here, there, elsewhere := host(), host(), host()
	s, _ := start(t, NewResponder(nil), patient.between(here, there))
	good := Packet{State: Down, Multiplier: 255, MyDiscr: 7, DesiredMinTx: time.Second, RequiredMinRx: time.Second}
	say := func(from netip.Addr, ttl int, b []byte) {
		t.Helper()
		c, err := net.DialUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(from, 0)), net.UDPAddrFromAddrPort(netip.AddrPortFrom(here, port)))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		raw, err := c.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		if err := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_TTL, ttl) }); err != nil {
			t.Fatal(err)
		}
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Write(b); err != nil {
			t.Fatal(err)
		}
		s.receiver.drain()
	}
	other := good
	other.YourDiscr = s.machine.c.Discriminator ^ 1
	for name, f := range map[string]func(){
		"one hop too many":      func() { say(there, 254, good.AppendTo(nil)) },
		"another address":       func() { say(elsewhere, 255, good.AppendTo(nil)) },
		"not a packet":          func() { say(there, 255, good.AppendTo(nil)[:23]) },
		"nothing":               func() { say(there, 255, nil) },
		"longer than is read":   func() { say(there, 255, make([]byte, 1000)) },
		"another discriminator": func() { say(there, 255, other.AppendTo(nil)) },
	} {
		if f(); s.Status().State != Down {
			t.Fatalf("%s: %+v", name, s.Status())
		}
	}
	if say(there, 255, good.AppendTo(nil)); s.Status().State != Init {
		t.Fatalf("the neighbour: %+v", s.Status())
	}
}

// Sessions of one address of ours share its port, and do not meet.
func TestOneAddressManyNeighbours(t *testing.T) {
	r, here := NewResponder(nil), host()
	var mine, theirs []*Session
	for range 5 {
		there := host()
		a, _ := start(t, r, patient.between(here, there))
		b, _ := start(t, NewResponder(nil), patient.between(there, here))
		mine, theirs = append(mine, a), append(theirs, b)
	}
	for i := range mine {
		until(t, mine[i], Up)
		until(t, theirs[i], Up)
	}
	if _, err := r.Start(patient.between(here, mine[0].c.Remote)); err == nil {
		t.Error("a second session between two addresses was started")
	}
	theirs[0].Close()
	until(t, mine[0], Down)
	mine[1].Close()
	until(t, theirs[1], Down)
	for i := 2; i < len(mine); i++ {
		if a, b := mine[i].Status().State, theirs[i].Status().State; a != Up || b != Up {
			t.Errorf("session %d is %s and %s", i, a, b)
		}
	}
}

// TestStartRefused: what cannot be started says why and leaves nothing.
func TestStartRefused(t *testing.T) {
	r := NewResponder(nil)
	here, there := host(), host()
	taken, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(there, port)))
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	linkLocal := netip.MustParseAddr("fe80::1")
	for name, c := range map[string]Config{
		"an address of others":    patient.between(netip.MustParseAddr("192.0.2.1"), here),
		"the port is taken":       patient.between(there, here),
		"link-local, no device":   patient.between(linkLocal, linkLocal.Next()),
		"link-local, device gone": Config{Interval: time.Second, Multiplier: 3, Device: "fared-none"}.between(linkLocal, linkLocal.Next()),
		"no interval":             Config{Multiplier: 3}.between(here, there),
		"multiplier 256":          Config{Interval: time.Second, Multiplier: 256}.between(here, there),
	} {
		if s, err := r.Start(c); err == nil {
			s.Close()
			t.Errorf("%s: started", name)
		} else {
			t.Logf("%s: %v", name, err)
		}
	}
	if len(r.receivers) != 0 {
		t.Errorf("%d receivers are left", len(r.receivers))
	}
}

// Both families, link-local addresses too, over a cable that is cut in silence: packets vanish, the light stays on.
func TestCable(t *testing.T) {
	netnstest.Require(t, "tc")
	a, b := netnstest.New(t), netnstest.New(t)
	netnstest.Veth(t, a, "eth0", b, "eth0")
	a.Addr("eth0", "192.0.2.0/31", "2001:db8::/127", "fe80::a/64")
	b.Addr("eth0", "192.0.2.1/31", "2001:db8::1/127", "fe80::b/64")
	enter := map[string]*netnstest.Namespace{a.Name: a, b.Name: b}
	r := NewResponder(func(netns string, f func() error) error { return enter[netns].Do(f) })
	var ends []*Session
	var owners []*told
	for _, pair := range [][2]string{{"192.0.2.0", "192.0.2.1"}, {"2001:db8::", "2001:db8::1"}, {"fe80::a", "fe80::b"}} {
		x, y := netip.MustParseAddr(pair[0]), netip.MustParseAddr(pair[1])
		for i, n := range []*netnstest.Namespace{a, b} {
			s, o := start(t, r, Config{Interval: 100 * time.Millisecond, Multiplier: 3, Device: "eth0", Netns: n.Name}.between([2]netip.Addr{x, y}[i], [2]netip.Addr{y, x}[i]))
			ends, owners = append(ends, s), append(owners, o)
		}
	}
	for _, s := range ends {
		until(t, s, Up)
	}
	tc := func(args ...string) {
		t.Helper()
		if out, err := a.Output("tc", args...); err != nil {
			t.Fatalf("tc: %v\n%s", err, out)
		}
	}
	tc("qdisc", "add", "dev", "eth0", "clsact")
	tc("filter", "add", "dev", "eth0", "ingress", "bpf", "da", "bytecode", "1,6 0 0 2,")
	for i, o := range owners {
		netnstest.Eventually(t, within, func() error {
			if o.failures() == 0 {
				return fmt.Errorf("end %d was told %v", i, o.all())
			}
			return nil
		})
	}
	tc("qdisc", "del", "dev", "eth0", "clsact")
	for _, s := range ends {
		until(t, s, Up)
	}
}
