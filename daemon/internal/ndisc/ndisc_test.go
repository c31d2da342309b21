package ndisc

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/mdlayher/ndp"
	"go.uber.org/goleak"

	"github.com/fared/fared/internal/netnstest"
)

func TestMain(m *testing.M) {
	if os.Getenv(unprivileged) != "" {
		askUnprivileged()
		return
	}
	goleak.VerifyTestMain(m)
}

func pair(t *testing.T) (server, leaf *netnstest.Namespace) {
	t.Helper()
	netnstest.Require(t)
	server, leaf = netnstest.New(t), netnstest.New(t)
	netnstest.Veth(t, server, "eth0", leaf, "swp0")
	server.IP("link", "set", "eth0", "up")
	leaf.IP("link", "set", "swp0", "up")
	return server, leaf
}

func resolver(t *testing.T) *Resolver {
	r := New(Config{Interval: 4 * time.Second})
	t.Cleanup(r.Close)
	return r
}

// linkLocal returns the device's own address and index.
func linkLocal(t *testing.T, n *netnstest.Namespace, name string) (addr netip.Addr, index int) {
	t.Helper()
	netnstest.Eventually(t, 5*time.Second, func() error {
		return n.Do(func() error {
			f, err := (&device{key: key{name: name}}).look()
			addr, index = f.local, f.index
			return err
		})
	})
	return addr, index
}

func peer(t *testing.T, r *Resolver, device string, n *netnstest.Namespace) netip.Addr {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	a, err := r.Peer(ctx, device, n.Name)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func TestTwoEndsFindEachOther(t *testing.T) {
	server, leaf := pair(t)
	// Same device name, other index, in each namespace: zones must not be mixed up.
	leaf.IP("link", "set", "swp0", "down")
	leaf.IP("link", "set", "swp0", "name", "eth0")
	leaf.IP("link", "set", "eth0", "up")
	r, s := resolver(t), resolver(t)
	type answer struct {
		addr netip.Addr
		err  error
	}
	got := make(chan answer, 1)
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		a, err := s.Peer(ctx, "eth0", leaf.Name)
		got <- answer{a, err}
	}()
	theirs, _ := linkLocal(t, leaf, "eth0")
	ours, _ := linkLocal(t, server, "eth0")
	if a := peer(t, r, "eth0", server); a.WithZone("") != theirs {
		t.Errorf("server found %v, want %v", a, theirs)
	}
	if a := <-got; a.err != nil || a.addr.WithZone("") != ours {
		t.Errorf("leaf found %v, %v, want %v", a.addr, a.err, ours)
	}
	// Known by now: at once, and usable as it is to dial.
	a := peer(t, r, "eth0", server)
	if err := leaf.Do(func() error {
		l, err := net.ListenTCP("tcp6", &net.TCPAddr{Port: 1179})
		if err == nil {
			t.Cleanup(func() { l.Close() })
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if err := server.Do(func() error {
		c, err := net.DialTimeout("tcp", netip.AddrPortFrom(a, 1179).String(), 5*time.Second)
		if err == nil {
			c.Close()
		}
		return err
	}); err != nil {
		t.Errorf("dial %v: %v", a, err)
	}
}

// A leaf's view: what arrives is an advertisement with lifetime 0 and hop limit 255,
// unasked and in answer to a solicitation.
func TestWhatTheLeafHears(t *testing.T) {
	server, leaf := pair(t)
	_, index := linkLocal(t, leaf, "swp0")
	ours, _ := linkLocal(t, server, "eth0")
	var conn *ndp.Conn
	netnstest.Eventually(t, 5*time.Second, func() error {
		return leaf.Do(func() (err error) {
			conn, _, err = ndp.Listen(&net.Interface{Index: index, MTU: 1500, Name: strconv.Itoa(index)}, ndp.LinkLocal)
			return err
		})
	})
	defer conn.Close()
	if err := conn.JoinGroup(allNodes); err != nil {
		t.Fatal(err)
	}
	r := resolver(t)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := r.Peer(ctx, "eth0", server.Name); !errors.Is(err, context.Canceled) {
		t.Errorf("Peer with a cancelled context: %v", err)
	}
	hear := func() *ndp.RouterAdvertisement {
		t.Helper()
		for {
			conn.SetReadDeadline(time.Now().Add(5 * time.Second))
			m, _, from, err := conn.ReadFrom()
			if err != nil {
				t.Fatal(err)
			}
			if ra, ok := m.(*ndp.RouterAdvertisement); ok {
				if from.WithZone("") != ours {
					t.Errorf("from %v, want %v", from, ours)
				}
				return ra
			}
		}
	}
	for range initialAdvertisements {
		ra := hear()
		if ra.RouterLifetime != 0 || ra.ManagedConfiguration || ra.OtherConfiguration || len(ra.Options) != 1 {
			t.Errorf("advertised %+v", ra)
		}
	}
	start := time.Now()
	if err := conn.WriteTo(&ndp.RouterSolicitation{}, nil, allRouters); err != nil {
		t.Fatal(err)
	}
	hear()
	if took := time.Since(start); took > 500*time.Millisecond { // the interval is a second
		t.Errorf("a solicitation was answered after %v", took)
	}
	// Once we are known, the interval is four seconds, but a session that is about to
	// connect has us advertised again: at once if we speak, within a second or so if not.
	announce := func() {
		t.Helper()
		if err := conn.WriteTo(&ndp.RouterAdvertisement{}, nil, allNodes); err != nil {
			t.Fatal(err)
		}
	}
	announce()
	peer(t, r, "eth0", server) // waits until we are known
	start = time.Now()
	hear()
	if took := time.Since(start); took > 3*time.Second {
		t.Errorf("advertised %v after a session began to connect", took)
	}
	peer(t, r, "eth0", server)
	start = time.Now()
	announce()
	hear()
	if took := time.Since(start); took > 500*time.Millisecond {
		t.Errorf("advertised %v after we spoke", took)
	}
	// No router was advertised, so the kernel of the leaf knows none either.
	if routes := leaf.IP("-6", "route", "show", "default"); strings.TrimSpace(routes) != "" {
		t.Errorf("the leaf took us for a default router: %s", routes)
	}
}

// The kernel gives a new raw socket the messages of every device until it is bound to one.
func TestOtherDevicesAreNotHeard(t *testing.T) {
	server, leaf := pair(t)
	netnstest.Veth(t, server, "eth1", leaf, "swp1")
	server.IP("link", "set", "eth1", "up")
	leaf.IP("link", "set", "swp1", "up")
	linkLocal(t, server, "eth0")
	linkLocal(t, server, "eth1")
	_, index := linkLocal(t, leaf, "swp1")
	var conn *ndp.Conn
	netnstest.Eventually(t, 5*time.Second, func() error {
		return leaf.Do(func() (err error) {
			conn, _, err = ndp.Listen(&net.Interface{Index: index, MTU: 1500, Name: strconv.Itoa(index)}, ndp.LinkLocal)
			return err
		})
	})
	stop, done := make(chan struct{}), make(chan int)
	go func() {
		sent := 0
		for {
			select {
			case <-stop:
				done <- sent
				return
			default:
				if conn.WriteTo(&ndp.RouterAdvertisement{}, nil, allNodes) == nil {
					sent++
				}
			}
		}
	}()
	for range 50 {
		r := New(Config{})
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
		if a, err := r.Peer(ctx, "eth0", server.Name); err == nil {
			t.Errorf("heard %v, which is on eth1", a)
		}
		cancel()
		r.Close()
	}
	close(stop)
	if sent := <-done; sent == 0 {
		t.Error("nothing was sent on eth1")
	}
	conn.Close()
}

func TestDeviceIsWaitedFor(t *testing.T) {
	netnstest.Require(t)
	server, leaf := netnstest.New(t), netnstest.New(t)
	r, s := resolver(t), resolver(t)
	ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
	defer cancel()
	_, err := r.Peer(ctx, "eth0", server.Name)
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "eth0") {
		t.Errorf("a device that is missing: %v", err)
	}
	for range 2 { // the second pair has other addresses
		netnstest.Veth(t, server, "eth0", leaf, "swp0")
		server.IP("link", "set", "eth0", "up")
		leaf.IP("link", "set", "swp0", "up")
		want, _ := linkLocal(t, leaf, "swp0")
		go s.Peer(context.Background(), "swp0", leaf.Name) // ends with Close
		netnstest.Eventually(t, 10*time.Second, func() error {
			if a := peer(t, r, "eth0", server); a.WithZone("") != want {
				return errors.New("found " + a.String() + ", want " + want.String())
			}
			return nil
		})
		server.IP("link", "del", "eth0")
	}
}

func TestClosedResolver(t *testing.T) {
	netnstest.Require(t)
	n := netnstest.New(t)
	r := New(Config{})
	got := make(chan error, 1)
	go func() {
		_, err := r.Peer(context.Background(), "eth0", n.Name)
		got <- err
	}()
	netnstest.Eventually(t, 5*time.Second, func() error {
		r.mu.Lock()
		defer r.mu.Unlock()
		if len(r.devices) == 0 {
			return errors.New("Peer has not begun")
		}
		return nil
	})
	r.Close()
	if err := <-got; !errors.Is(err, ErrClosed) {
		t.Errorf("waiting: %v", err)
	}
	if _, err := r.Peer(context.Background(), "eth0", n.Name); !errors.Is(err, ErrClosed) {
		t.Errorf("afterwards: %v", err)
	}
}

// unprivileged is set in the process that TestWithoutPrivilege starts.
const unprivileged = "FARED_TEST_UNPRIVILEGED"

func askUnprivileged() {
	r := New(Config{})
	defer r.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_, err := r.Peer(ctx, "eth0", "")
	if errors.Is(err, os.ErrPermission) {
		os.Stdout.WriteString("permission: ")
	}
	if err != nil {
		os.Stdout.WriteString(err.Error())
	}
}

func TestWithoutPrivilege(t *testing.T) {
	server, _ := pair(t)
	linkLocal(t, server, "eth0")
	const nobody = 65534
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = []string{unprivileged + "=1"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := server.Do(cmd.Start); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatalf("%v\n%s", err, out.String())
	}
	for _, want := range []string{"permission: ", "on eth0", "CAP_NET_RAW", "static peer"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("said %q, want %q in it", out.String(), want)
		}
	}
}
