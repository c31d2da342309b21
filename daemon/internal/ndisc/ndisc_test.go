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
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/mdlayher/ndp"
	"go.uber.org/goleak"

	"github.com/fared/fared/internal/testkit/netnstest"
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
	netnstest.Cable(t, server, "eth0", "", leaf, "swp0", "")
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
	netnstest.Eventually(t, time.Minute, func() error {
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
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
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
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
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
	leaf.Must(func() error {
		l, err := net.ListenTCP("tcp6", &net.TCPAddr{Port: 1179})
		if err == nil {
			t.Cleanup(func() { l.Close() })
		}
		return err
	})
	if err := server.Do(func() error {
		c, err := net.DialTimeout("tcp", netip.AddrPortFrom(a, 1179).String(), patience)
		if err == nil {
			c.Close()
		}
		return err
	}); err != nil {
		t.Errorf("dial %v: %v", a, err)
	}
}

// ear is a leaf's view of a device.
type ear struct {
	*testing.T
	conn *ndp.Conn
	from netip.Addr // whom it expects
}

func listen(t *testing.T, server, leaf *netnstest.Namespace) *ear {
	_, index := linkLocal(t, leaf, "swp0")
	e := &ear{T: t}
	e.from, _ = linkLocal(t, server, "eth0")
	netnstest.Eventually(t, time.Minute, func() error {
		return leaf.Do(func() (err error) {
			e.conn, _, err = ndp.Listen(&net.Interface{Index: index, MTU: 1500, Name: strconv.Itoa(index)}, ndp.LinkLocal)
			return err
		})
	})
	t.Cleanup(func() { e.conn.Close() })
	if err := e.conn.JoinGroup(allNodes); err != nil {
		t.Fatal(err)
	}
	return e
}

// patience is below every interval that a test makes long on purpose.
const patience = time.Minute

// receive returns the next advertisement.
func (e *ear) receive() *ndp.RouterAdvertisement {
	e.Helper()
	ra := e.hearWithin(patience)
	if ra == nil {
		e.Fatal("nothing was advertised")
	}
	return ra
}

// hearWithin returns the next advertisement, or nil when there is none for a while.
func (e *ear) hearWithin(limit time.Duration) *ndp.RouterAdvertisement {
	e.Helper()
	e.conn.SetReadDeadline(time.Now().Add(limit))
	for {
		m, _, from, err := e.conn.ReadFrom()
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return nil
		}
		if err != nil {
			e.Fatal(err)
		}
		if ra, ok := m.(*ndp.RouterAdvertisement); ok {
			if from.WithZone("") != e.from {
				e.Errorf("from %v, want %v", from, e.from)
			}
			return ra
		}
	}
}

// drain forgets what has been heard.
func (e *ear) drain() {
	for e.hearWithin(2*time.Millisecond) != nil {
	}
}

func (e *ear) say(m ndp.Message, to netip.Addr) {
	e.Helper()
	if err := e.conn.WriteTo(m, nil, to); err != nil {
		e.Fatal(err)
	}
}

func (e *ear) advertise() {
	e.Helper()
	e.say(&ndp.RouterAdvertisement{}, allNodes)
}

// A leaf's view: what arrives is an advertisement with lifetime 0 and hop limit 255.
func TestWhatTheLeafHears(t *testing.T) {
	server, leaf := pair(t)
	e := listen(t, server, leaf)
	r := New(Config{Interval: time.Hour})
	defer r.Close()
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := r.Peer(ctx, "eth0", server.Name); !errors.Is(err, context.Canceled) {
		t.Errorf("Peer with a canceled context: %v", err)
	}
	for range initialAdvertisements + 1 { // also after these, while no neighbor is known
		ra := e.receive()
		if ra.RouterLifetime != 0 || ra.ManagedConfiguration || ra.OtherConfiguration || len(ra.Options) != 1 {
			t.Errorf("advertised %+v", ra)
		}
	}
	// Once we are known, the interval is an hour, but a session that is about to connect has us advertised again,
	// though we do not speak.
	e.advertise()
	peer(t, r, "eth0", server)
	e.drain()
	peer(t, r, "eth0", server)
	e.receive()
	// No router was advertised, so the kernel of the leaf knows none either.
	if routes := leaf.IP("-6", "route", "show", "default"); strings.TrimSpace(routes) != "" {
		t.Errorf("the leaf took us for a default router: %s", routes)
	}
}

// A leaf that asks is answered, and one that speaks while a session is about to connect is told of us: at once, for
// nothing else would make us speak before the test's patience is at its end.
func TestLeafIsAnswered(t *testing.T) {
	server, leaf := pair(t)
	e := listen(t, server, leaf)
	r := New(Config{Interval: time.Hour})
	r.unheard = time.Hour
	defer r.Close()
	go r.Peer(context.Background(), "eth0", server.Name) // ends with Close
	for range initialAdvertisements {
		e.receive()
	}
	e.advertise()
	peer(t, r, "eth0", server)
	e.drain()
	// Again, for the leaf's kernel solicits too, and who has just been answered is not.
	for end := time.Now().Add(patience); ; {
		e.say(&ndp.RouterSolicitation{}, allRouters)
		if e.hearWithin(10*answerInterval) != nil {
			break
		}
		if time.Now().After(end) {
			t.Fatal("solicitations are not answered")
		}
	}
	// Many times, for the leaf may speak while the other end is still being told of the session.
	for range 200 {
		e.drain()
		peer(t, r, "eth0", server)
		e.advertise()
		e.receive()
	}
}

// The kernel gives a new raw socket the messages of every device until it is bound to one.
func TestOtherDevicesAreNotHeard(t *testing.T) {
	server, leaf := pair(t)
	netnstest.Cable(t, server, "eth1", "", leaf, "swp1", "")
	linkLocal(t, server, "eth0")
	linkLocal(t, server, "eth1")
	_, index := linkLocal(t, leaf, "swp1")
	var conn *ndp.Conn
	netnstest.Eventually(t, time.Minute, func() error {
		return leaf.Do(func() (err error) {
			conn, _, err = ndp.Listen(&net.Interface{Index: index, MTU: 1500, Name: strconv.Itoa(index)}, ndp.LinkLocal)
			return err
		})
	})
	netnstest.Eventually(t, time.Minute, func() error { return conn.WriteTo(&ndp.RouterAdvertisement{}, nil, allNodes) })
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-stop:
				return
			default:
				conn.WriteTo(&ndp.RouterAdvertisement{}, nil, allNodes)
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
	<-done
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
		netnstest.Cable(t, server, "eth0", "", leaf, "swp0", "")
		want, _ := linkLocal(t, leaf, "swp0")
		go s.Peer(context.Background(), "swp0", leaf.Name) // ends with Close
		netnstest.Eventually(t, time.Minute, func() error {
			if a := peer(t, r, "eth0", server); a.WithZone("") != want {
				return errors.New("found " + a.String() + ", want " + want.String())
			}
			return nil
		})
		server.IP("link", "del", "eth0")
	}
}

// TestKeep checks that a device which is not kept is not advertised on any more, and that a later call begins again.
func TestKeep(t *testing.T) {
	server, leaf := pair(t)
	here, there := resolver(t), resolver(t)
	var running sync.WaitGroup
	both := func() {
		running.Go(func() { peer(t, there, "swp0", leaf) })
		peer(t, here, "eth0", server)
		running.Wait()
	}
	both()
	here.Keep([]Device{{server.Name, "eth0"}, {"", "other"}})
	if len(here.devices) != 1 {
		t.Errorf("devices %v", here.devices)
	}
	here.Keep(nil)
	here.wg.Wait() // its goroutine has ended
	both()
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
	netnstest.Eventually(t, time.Minute, func() error {
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
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
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
