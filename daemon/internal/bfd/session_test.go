package bfd

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/testkit/netnstest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const within = time.Minute

var hosts byte

// host returns an address of 127.0.0.0/8 that no other test uses.
func host() netip.Addr {
	hosts++
	return netip.AddrFrom4([4]byte{127, 22, 0, hosts})
}

// notified records the changes that a session reported to its owner.
type notified struct {
	mu      sync.Mutex
	changes []Change
}

func (o *notified) take(c Change) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.changes = append(o.changes, c)
}

func (o *notified) all() []Change {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.Clone(o.changes)
}

// failures counts the changes that are failures.
func (o *notified) failures() (n int) {
	for _, c := range o.all() {
		if c.Failed() {
			n++
		}
	}
	return n
}

// start starts a session that ends with the test.
func start(t *testing.T, r *Responder, c Config) (*Session, *notified) {
	t.Helper()
	o := &notified{}
	c.Changed = o.take
	if c.Interval == 0 {
		c.Interval, c.Multiplier = 100*time.Millisecond, 3
	}
	s, err := r.Start(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Close)
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

// TestUpAndClosed checks that both ends come up and agree on the detection time, and that the end that closes signals
// it: no failure.
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
	for name, o := range map[string]*notified{"a": fromA, "b": fromB} {
		state := Down
		for _, c := range o.all() {
			if c.Before != state || c.State == state {
				t.Errorf("%s was notified %v", name, o.all())
			}
			state = c.State
		}
	}
	if len(r.receivers) != 0 {
		t.Errorf("%d receivers are left", len(r.receivers))
	}
}

// TestSilence checks that silence is detected, and that a neighbor that returns as another process is found again.
func TestSilence(t *testing.T) {
	r, here, there := NewResponder(nil), host(), host()
	a, fromA := start(t, r, Config{}.between(here, there))
	b, _ := start(t, r, Config{}.between(there, here))
	until(t, a, Up)
	until(t, b, Up)
	b.conn.Close() // its packets are no longer sent
	netnstest.Eventually(t, within, func() error {
		for _, c := range fromA.all() {
			if c.Failed() && c.Diagnostic == DetectionTimeExpired && c.Silence > 0 {
				return nil
			}
		}
		return fmt.Errorf("a was notified %v", fromA.all())
	})
	b.Close()
	b, _ = start(t, r, Config{}.between(there, here))
	until(t, a, Up)
	until(t, b, Up)
}

// TestLateTimer checks that a process that did not read does not mistake that for silence, however late it is: the
// packets that arrived in the meantime count.
func TestLateTimer(t *testing.T) {
	r, here, there := NewResponder(nil), host(), host()
	a, fromA := start(t, r, patient.between(here, there))
	b, _ := start(t, r, patient.between(there, here))
	until(t, a, Up)
	until(t, b, Up)
	for range 3 {
		var late time.Time
		func() { // no goroutine reads, as if for twice the detection time
			a.receiver.mu.Lock()
			defer a.receiver.mu.Unlock()
			netnstest.Eventually(t, within, func() error {
				waiting := 0
				if err := a.receiver.raw.Control(func(fd uintptr) { waiting, _ = unix.IoctlGetInt(int(fd), unix.TIOCINQ) }); err != nil || waiting == 0 {
					return fmt.Errorf("%d octets wait in the socket, %v", waiting, err)
				}
				return nil
			})
			a.mu.Lock()
			late = time.Now().Add(-2 * a.machine.DetectionTime())
			a.machine.lastReceived = late
			a.mu.Unlock()
			select {
			case a.wake <- struct{}{}:
			default: // it is due to be awake
			}
			netnstest.Eventually(t, within, func() error {
				if fromA.failures() == 0 && !drains() {
					return errors.New("the session does not look at the time")
				}
				return nil
			})
		}()
		netnstest.Eventually(t, within, func() error {
			a.mu.Lock()
			defer a.mu.Unlock()
			if !a.machine.lastReceived.After(late) {
				return errors.New("no packet has been received since")
			}
			return nil
		})
	}
	if got := fromA.failures(); got != 0 {
		t.Errorf("%d failures: %v", got, fromA.all())
	}
}

// drains reports whether a session waits until it can read the packets that wait in its socket.
func drains() bool {
	b := make([]byte, 1<<20)
	for g := range strings.SplitSeq(string(b[:runtime.Stack(b, true)]), "\n\n") {
		if strings.Contains(g, " [sync.Mutex.Lock") && strings.Contains(g, "bfd.(*receiver).drain(") {
			return true
		}
	}
	return false
}

// TestStrangers checks that only packets of the neighbor that have crossed no router count.
func TestStrangers(t *testing.T) {
	here, there, elsewhere := host(), host(), host()
	counters := new(Counters)
	conf := patient.between(here, there)
	conf.Counters = counters
	s, _ := start(t, NewResponder(nil), conf)
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
	for name, c := range map[string]struct {
		f    func()
		drop Drop
	}{
		"one hop too many":      {func() { say(there, 254, good.AppendTo(nil)) }, HopLimit},
		"another address":       {func() { say(elsewhere, 255, good.AppendTo(nil)) }, UnknownSource},
		"not a packet":          {func() { say(there, 255, good.AppendTo(nil)[:23]) }, Malformed},
		"nothing":               {func() { say(there, 255, nil) }, Malformed},
		"longer than is read":   {func() { say(there, 255, make([]byte, 1000)) }, Malformed},
		"another discriminator": {func() { say(there, 255, other.AppendTo(nil)) }, UnknownSession},
	} {
		var want, got [numDrops]uint64
		for _, d := range Drops() {
			want[d] = counters.Dropped(d)
		}
		want[c.drop]++
		if c.f(); s.Status().State != Down {
			t.Fatalf("%s: %+v", name, s.Status())
		}
		for _, d := range Drops() {
			got[d] = counters.Dropped(d)
		}
		if got != want {
			t.Errorf("%s: dropped %v, want %v", name, got, want)
		}
	}
	if say(there, 255, good.AppendTo(nil)); s.Status().State != Init {
		t.Fatalf("the neighbor: %+v", s.Status())
	}
}

// TestOtherUserOfNeighbor checks that packets from the neighbor's address and from another port, as any user of its
// host can send them, leave both ends of a session up, count by reason, and do not prevent that both ends come up.
func TestOtherUserOfNeighbor(t *testing.T) {
	here, there := host(), host()
	counters := new(Counters)
	conf := patient.between(here, there)
	conf.Counters = counters
	a, fromA := start(t, NewResponder(nil), conf)
	other, err := open(netip.AddrPortFrom(there, 0), "")
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	p := Packet{State: Down, Multiplier: 255, MyDiscr: 7, DesiredMinTx: time.Hour, RequiredMinRx: time.Hour}
	attack := func() {
		t.Helper()
		if _, err := other.WriteToUDPAddrPort(p.AppendTo(nil), netip.AddrPortFrom(here, port)); err != nil {
			t.Fatal(err)
		}
	}
	stop, stopped := make(chan struct{}), make(chan struct{})
	attack()
	until(t, a, Init)
	go func() { // packets arrive while the session comes up, too
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			case <-time.After(time.Millisecond):
				_, _ = other.WriteToUDPAddrPort(p.AppendTo(nil), netip.AddrPortFrom(here, port))
			}
		}
	}()
	b, fromB := start(t, NewResponder(nil), patient.between(there, here))
	until(t, a, Up)
	until(t, b, Up)
	close(stop)
	<-stopped
	a.receiver.drain()
	before := counters.Dropped(OtherPort)
	for _, s := range []State{Down, AdminDown} {
		p.State = s
		attack()
	}
	netnstest.Eventually(t, within, func() error {
		if got := counters.Dropped(OtherPort); got != before+2 {
			return fmt.Errorf("%d packets dropped because of their port, want %d", got, before+2)
		}
		return nil
	})
	p.MyDiscr = b.machine.c.Discriminator // even a sender that knows it
	attack()
	a.receiver.drain()
	if x, y := a.Status(), b.Status(); x.State != Up || y.State != Up || fromA.failures() != 0 || fromB.failures() != 0 {
		t.Errorf("a %+v %v, b %+v %v", x, fromA.all(), y, fromB.all())
	}
}

// TestOneAddressManyNeighbors checks that sessions of one local address share its port, and do not interfere.
func TestOneAddressManyNeighbors(t *testing.T) {
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
	in := mine[1].receiver
	mine[1].Close()
	in.mu.Lock()
	if len(in.sessions) != 4 || len(in.numbered) != 4 {
		t.Errorf("%d and %d of 4 sessions are left", len(in.sessions), len(in.numbered))
	}
	in.mu.Unlock()
	until(t, theirs[1], Down)
	for i := 2; i < len(mine); i++ {
		if a, b := mine[i].Status().State, theirs[i].Status().State; a != Up || b != Up {
			t.Errorf("session %d is %s and %s", i, a, b)
		}
	}
}

// TestStartRefused checks that a failed start returns the reason and leaves nothing behind.
func TestStartRefused(t *testing.T) {
	r := NewResponder(nil)
	here, there := host(), host()
	taken, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(there, port)))
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	linkLocal := netip.MustParseAddr("fe80::1")
	before := sockets(t)
	for name, c := range map[string]Config{
		"an address of others":    patient.between(netip.MustParseAddr("192.0.2.1"), here),
		"the port is taken":       patient.between(there, here),
		"link-local, no device":   patient.between(linkLocal, linkLocal.Next()),
		"link-local, device gone": Config{Interval: time.Second, Multiplier: 3, Device: "fared-none"}.between(linkLocal, linkLocal.Next()),
		"no interval":             Config{Multiplier: 3}.between(here, there),
		"interval under 1µs":      Config{Interval: time.Microsecond - 1, Multiplier: 3}.between(here, there),
		"multiplier 0":            Config{Interval: time.Second}.between(here, there),
		"multiplier 256":          Config{Interval: time.Second, Multiplier: 256}.between(here, there),
	} {
		if s, err := r.Start(c); err == nil {
			s.Close()
			t.Errorf("%s: started", name)
		} else if t.Logf("%s: %v", name, err); name == "link-local, device gone" && !errors.Is(err, unix.ENODEV) {
			t.Errorf("%s: %v, want that there is no such device", name, err)
		}
	}
	if len(r.receivers) != 0 {
		t.Errorf("%d receivers are left", len(r.receivers))
	}
	if after := sockets(t); after != before {
		t.Errorf("%d sockets before, %d after", before, after)
	}
}

// TestNamespaceRefused checks that a namespace that cannot be entered is the error, and that nothing is started.
func TestNamespaceRefused(t *testing.T) {
	gone := errors.New("no such namespace")
	r := NewResponder(func(string, func() error) error { return gone })
	c := patient.between(host(), host())
	c.Netns = "gone"
	if s, err := r.Start(c); !errors.Is(err, gone) || s != nil || len(r.receivers) != 0 || len(r.discriminators) != 0 {
		t.Errorf("%v, %v, %d receivers, %d discriminators", s, err, len(r.receivers), len(r.discriminators))
	}
}

// sockets counts the sockets of this process.
func sockets(t *testing.T) (n int) {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range fds {
		if to, err := os.Readlink("/proc/self/fd/" + fd.Name()); err == nil && strings.HasPrefix(to, "socket:") {
			n++
		}
	}
	return n
}

// TestBounds checks that the shortest interval, and the least and greatest multiplier that its octet holds (RFC 5880,
// Section 4.1), are sent unchanged.
func TestBounds(t *testing.T) {
	for _, c := range []Config{{Interval: time.Microsecond, Multiplier: 1}, {Interval: time.Microsecond, Multiplier: 255}} {
		here, there := host(), host()
		in := listenRaw(t, there)
		start(t, NewResponder(nil), c.between(here, there))
		var b [100]byte
		n, from, err := in.ReadFromUDPAddrPort(b[:])
		if err != nil {
			t.Fatal(err)
		}
		p, err := ParsePacket(b[:n])
		if err != nil || int(p.Multiplier) != c.Multiplier || p.RequiredMinRx != time.Microsecond || p.DesiredMinTx != time.Second {
			t.Errorf("%+v, %v", p, err)
		}
		if from.Addr() != here || from.Port() < 49152 {
			t.Errorf("from %v, want a port of 49152 to 65535 (RFC 5881, Section 4)", from)
		}
	}
}

// TestHopLimit checks that, of the kernel's control messages, the TTL of IPv4 and the hop limit of IPv6 count, and no
// message of another kind.
func TestHopLimit(t *testing.T) {
	message := func(level, kind int, data ...byte) []byte {
		b := make([]byte, unix.CmsgSpace(len(data)))
		binary.NativeEndian.PutUint64(b, uint64(unix.CmsgLen(len(data))))
		binary.NativeEndian.PutUint32(b[8:], uint32(level))
		binary.NativeEndian.PutUint32(b[12:], uint32(kind))
		copy(b[16:], data)
		return b
	}
	limit := binary.NativeEndian.AppendUint32(nil, 255)
	for _, tt := range []struct {
		name    string
		control []byte
		want    int
	}{
		{"IPv4", message(unix.IPPROTO_IP, unix.IP_TTL, limit...), 255},
		{"IPv6", message(unix.IPPROTO_IPV6, unix.IPV6_HOPLIMIT, limit...), 255},
		{"behind another", append(message(unix.IPPROTO_IP, unix.IP_TOS, 1), message(unix.IPPROTO_IP, unix.IP_TTL, limit...)...), 255},
		{"another type of IPv4", message(unix.IPPROTO_IP, unix.IP_TOS, limit...), 0},
		{"another type of IPv6", message(unix.IPPROTO_IPV6, unix.IPV6_TCLASS, limit...), 0},
		{"type of IPv6, level of IPv4", message(unix.IPPROTO_IP, unix.IPV6_HOPLIMIT, limit...), 0},
		{"type of IPv4, level of IPv6", message(unix.IPPROTO_IPV6, unix.IP_TTL, limit...), 0},
		{"three octets", message(unix.IPPROTO_IP, unix.IP_TTL, limit[:3]...), 0},
		{"cut off", message(unix.IPPROTO_IP, unix.IP_TTL, limit...)[:18], 0},
		{"nothing", nil, 0},
	} {
		if got := hopLimit(tt.control); got != tt.want {
			t.Errorf("%s: %d, want %d", tt.name, got, tt.want)
		}
	}
}

// TestSourcePorts checks that every port of 49152 to 65535 is tried exactly once, from any start (RFC 5881, Section 4).
func TestSourcePorts(t *testing.T) {
	for _, begin := range []int{0, 1, 5000, sourcePorts - 1} {
		seen := map[uint16]bool{}
		for i := range sourcePorts {
			if p := sourcePort(begin, i); p < 49152 || seen[p] {
				t.Fatalf("from %d on, number %d is port %d", begin, i, p)
			} else {
				seen[p] = true
			}
		}
		if len(seen) != 65536-49152 {
			t.Errorf("from %d on: %d ports", begin, len(seen))
		}
	}
}

// TestCloseGivesBack checks that a closed session has no socket and no discriminator, whether or not the neighbor sent
// packets; and that its first signal has been sent when Close returns.
func TestCloseGivesBack(t *testing.T) {
	for range 5 {
		for _, lastReceived := range []bool{false, true} {
			before := sockets(t)
			r, here, there := NewResponder(nil), host(), host()
			in, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(there, port)))
			if err != nil {
				t.Fatal(err)
			}
			s, _ := start(t, r, patient.between(here, there))
			if lastReceived {
				sayRaw(t, there, here, Packet{State: Down, Multiplier: 255, MyDiscr: 9, DesiredMinTx: time.Second, RequiredMinRx: time.Second})
				until(t, s, Init)
			}
			s.Close()
			var b [100]byte
			signaled := false
			raw, err := in.SyscallConn()
			if err != nil {
				t.Fatal(err)
			}
			err = raw.Read(func(fd uintptr) bool {
				for {
					n, _, err := unix.Recvfrom(int(fd), b[:], unix.MSG_DONTWAIT)
					if err != nil {
						return true
					}
					p, err := ParsePacket(b[:n])
					signaled = signaled || err == nil && p.State == AdminDown
				}
			})
			if err != nil || signaled != lastReceived {
				t.Errorf("lastReceived %v, signaled %v, %v", lastReceived, signaled, err)
			}
			select {
			case <-s.gone:
				if lastReceived {
					t.Error("the signaling of AdminDown is over at once")
				}
			default:
				if !lastReceived {
					t.Error("a session that has nothing to signal is not over")
				}
			}
			r.Close()
			<-s.gone
			in.Close()
			if after := sockets(t); after != before || len(r.discriminators) != 0 || len(r.parting) != 0 {
				t.Errorf("lastReceived %v: %d sockets before, %d after, discriminators %v", lastReceived, before, after, r.discriminators)
			}
		}
	}
}

// TestCable covers both families, including link-local addresses, over a cable that drops packets silently while the
// carrier stays on.
func TestCable(t *testing.T) {
	netnstest.Require(t, "tc")
	a, b := netnstest.Pair(t, "eth0", "192.0.2.0/31 2001:db8::/127 fe80::a/64", "192.0.2.1/31 2001:db8::1/127 fe80::b/64")
	enter := map[string]*netnstest.Namespace{a.Name: a, b.Name: b}
	r := NewResponder(func(netns string, f func() error) error { return enter[netns].Do(f) })
	var ends []*Session
	var owners []*notified
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
		a.Run("tc", args...)
	}
	tc("qdisc", "add", "dev", "eth0", "clsact")
	tc("filter", "add", "dev", "eth0", "ingress", "bpf", "da", "bytecode", "1,6 0 0 2,")
	for i, o := range owners {
		netnstest.Eventually(t, within, func() error {
			if o.failures() == 0 {
				return fmt.Errorf("end %d was notified %v", i, o.all())
			}
			return nil
		})
	}
	tc("qdisc", "del", "dev", "eth0", "clsact")
	for _, s := range ends {
		until(t, s, Up)
	}
}

// listenRaw opens the receiving socket of a neighbor that the test simulates.
func listenRaw(t *testing.T, at netip.Addr) *net.UDPConn {
	t.Helper()
	c, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(at, port)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// sayRaw sends a packet to a session, from any address and with TTL 255.
func sayRaw(t *testing.T, from, to netip.Addr, p Packet) {
	t.Helper()
	c, err := open(netip.AddrPortFrom(from, 0), "")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.WriteToUDPAddrPort(p.AppendTo(nil), netip.AddrPortFrom(to, port)); err != nil {
		t.Fatal(err)
	}
}
