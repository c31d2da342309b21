package tcpslots

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/client/slots"
	"github.com/fared/fared/internal/slotfile/slotfiletest"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// bed is a namespace whose loopback device has the addresses of a server and of its peers, a slot table, and a placer
// on a new cgroup.
type bed struct {
	ns     *netnstest.Namespace
	source netip.Addr
	far    []netip.Addr
	table  *slotfiletest.Table
	placer *Placer
	cgroup string
}

var cgroups atomic.Int32

func newBed(t *testing.T, source string, peers int) *bed {
	t.Helper()
	netnstest.Require(t, "python3")
	b := &bed{ns: netnstest.New(t), source: netip.MustParseAddr(source)}
	b.ns.Addr("lo", netip.PrefixFrom(b.source, b.source.BitLen()).String())
	a := b.source
	for range peers {
		a = a.Next()
		b.far = append(b.far, a)
		b.ns.Addr("lo", netip.PrefixFrom(a, a.BitLen()).String())
	}
	b.table = slotfiletest.New(t, b.source, b.far...)
	b.table.Set(t, 1, 1, 1, 1)
	own, err := OwnCgroup()
	if err != nil {
		netnstest.Lacks(t, err.Error())
	}
	b.cgroup = filepath.Join(own, fmt.Sprintf("tcpslots-test-%d-%d", os.Getpid(), cgroups.Add(1)))
	if err := os.Mkdir(b.cgroup, 0o755); err != nil {
		netnstest.Lacks(t, err.Error())
	}
	t.Cleanup(func() { // the kernel removes a process from its cgroup soon after its end
		netnstest.Eventually(t, time.Minute, func() error { return syscall.Rmdir(b.cgroup) })
	})
	table, err := slots.Open(b.table.Path)
	if err != nil {
		t.Fatal(err)
	}
	if b.placer, err = Attach(b.cgroup, table); err != nil {
		t.Fatalf("%+v", err)
	}
	t.Cleanup(func() { b.placer.Close() })
	return b
}

// set changes the weights.
func (b *bed) set(t *testing.T, weights ...int) {
	t.Helper()
	b.table.Set(t, weights...)
	if err := b.placer.Sync(); err != nil {
		t.Fatal(err)
	}
}

// listener accepts connections, and holds them.
type listener struct {
	port   string
	remote chan string // the addresses of the connections
}

func (b *bed) listen(t *testing.T, address netip.Addr) *listener {
	t.Helper()
	var l net.Listener
	b.ns.Must(func() (err error) { l, err = net.Listen("tcp", netip.AddrPortFrom(address, 0).String()); return err })
	t.Cleanup(func() { l.Close() })
	_, port, _ := net.SplitHostPort(l.Addr().String())
	out := &listener{port, make(chan string, 1000)}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			a := c.RemoteAddr().(*net.TCPAddr).AddrPort()
			out.remote <- fmt.Sprintf("%s %d", a.Addr().Unmap(), a.Port())
			t.Cleanup(func() { c.Close() })
		}
	}()
	return out
}

// connections is a running program with its connections.
type connections struct {
	local []string // ADDRESS PORT, or an error, in the order in which they were opened
	close func()
}

// connect runs testdata/connect.py in the cgroup.
func (b *bed) connect(t *testing.T, args ...string) *connections {
	t.Helper()
	group, err := os.Open(b.cgroup)
	if err != nil {
		t.Fatal(err)
	}
	defer group.Close()
	cmd := exec.Command(netnstest.Python(t), append([]string{"testdata/connect.py"}, args...)...)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(group.Fd())}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := b.ns.Do(cmd.Start); err != nil {
		t.Fatal(err)
	}
	c := &connections{close: func() {
		in.Close()
		cmd.Wait()
	}}
	t.Cleanup(c.close)
	for lines := bufio.NewScanner(out); lines.Scan() && lines.Text() != "done"; {
		c.local = append(c.local, strings.TrimPrefix(lines.Text(), "::ffff:"))
	}
	return c
}

// placed checks that every connection has the source and a slot's port, and returns the number of connections of each
// plane.
func (b *bed) placed(t *testing.T, local []string) (n [slotfiletest.Planes]int) {
	t.Helper()
	for _, text := range local {
		plane := b.planeOf(text)
		if plane < 0 {
			t.Fatalf("a connection from %q, want one from a slot of %s", text, b.source)
		}
		n[plane]++
	}
	return n
}

// planeOf returns the plane of a local address, or -1 if it is not that of a slot.
func (b *bed) planeOf(local string) int {
	var address string
	var port int
	fmt.Sscan(local, &address, &port)
	slot := port - slotfiletest.FirstPort
	if address != b.source.String() || slot < 0 || slot >= slotfiletest.Planes*slotfiletest.SlotsOfAPlane {
		return -1
	}
	return slot / slotfiletest.SlotsOfAPlane
}

func (b *bed) counts(t *testing.T) Counts {
	t.Helper()
	c, err := b.placer.Counts()
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// targets repeats the addresses of listeners.
func targets(address netip.Addr, n int, listeners ...*listener) (args []string) {
	for range n {
		for _, l := range listeners {
			args = append(args, address.String(), l.port)
		}
	}
	return args
}

// families runs a test with IPv4, IPv6, and IPv4 over IPv6 sockets.
func families(t *testing.T, test func(t *testing.T, source string, options ...string)) {
	t.Run("v4", func(t *testing.T) { test(t, "10.255.0.1") })
	t.Run("v6", func(t *testing.T) { test(t, "fd00:255::1") })
	t.Run("mapped", func(t *testing.T) { test(t, "10.255.0.1", "--six") })
}

// TestDealtByWeight opens ten periods of connections to a peer: the far end sees exactly the weights, and after a
// change exactly the new ones, without the parked plane.
func TestDealtByWeight(t *testing.T) {
	gate.WithoutRaceDetector(t, "TestAllAtOnce and TestFollow have the same goroutines")
	families(t, func(t *testing.T, source string, options ...string) {
		b := newBed(t, source, 1)
		to := b.far[0]
		for _, weights := range [][]int{{2, 2, 1, 2}, {1, 0, 1, 1}, {0, 0, 0, 1}, {3, 1, 0, 0}} {
			b.set(t, weights...)
			// At most two connections to a port: a plane has two slots.
			var listeners []*listener
			var args []string
			n := 10 * (weights[0] + weights[1] + weights[2] + weights[3])
			for i := range n {
				if i < n/2 {
					listeners = append(listeners, b.listen(t, to))
				}
				args = append(args, mapped(to, options), listeners[i%(n/2)].port)
			}
			c := b.connect(t, append(args, options...)...)
			got := b.placed(t, c.local)
			for p, w := range weights {
				if got[p] != 10*w {
					t.Errorf("weights %v: connections %v, want 10 times the weights", weights, got)
					break
				}
			}
			var far []string
			for i := range n {
				far = append(far, <-listeners[i%len(listeners)].remote)
			}
			slices.Sort(far)
			near := slices.Sorted(slices.Values(c.local))
			if !slices.Equal(near, far) {
				t.Errorf("the far end has accepted %v, the program has %v", far, near)
			}
			c.close()
		}
	})
}

func mapped(a netip.Addr, options []string) string {
	if len(options) > 0 {
		return "::ffff:" + a.String()
	}
	return a.String()
}

// TestFirstConnections opens one connection to each of 28 peers: all of them together have the weights.
func TestFirstConnections(t *testing.T) {
	b := newBed(t, "10.255.0.1", 28)
	b.set(t, 2, 2, 1, 2)
	var args []string
	for _, to := range b.far {
		args = append(args, targets(to, 1, b.listen(t, to))...)
	}
	if got := b.placed(t, b.connect(t, args...).local); got != [4]int{8, 8, 4, 8} {
		t.Errorf("connections %v, want 8, 8, 4, 8", got)
	}
}

// TestPortsOfAPlane opens more connections to a port than there are slots: each slot carries one, and the others
// connect from other ports.
func TestPortsOfAPlane(t *testing.T) {
	gate.WithoutRaceDetector(t, "TestAllAtOnce and TestFollow have the same goroutines")
	families(t, func(t *testing.T, source string, options ...string) {
		b := newBed(t, source, 2)
		l := b.listen(t, b.far[0])
		c := b.connect(t, append(targets(netip.MustParseAddr(mapped(b.far[0], options)), 12, l), options...)...)
		seen := map[string]bool{}
		for _, local := range c.local {
			if b.planeOf(local) >= 0 {
				seen[local] = true
			} else if strings.HasPrefix(local, "error") {
				t.Error(local)
			}
		}
		if n := b.counts(t); len(seen) != 8 || n.Taken != 4 || n.Planes[0] != 2 {
			t.Errorf("%d slots have a connection, want 8: %v\n%+v", len(seen), c.local, n)
		}
		// Another peer, and another port of the same peer, have all slots again.
		for _, to := range []netip.Addr{b.far[1], b.far[0]} {
			if got := b.placed(t, b.connect(t, append(targets(netip.MustParseAddr(mapped(to, options)), 8, b.listen(t, to)), options...)...).local); got != [4]int{2, 2, 2, 2} {
				t.Errorf("connections %v to %s, want 2 of each plane", got, to)
			}
		}
		// Ports of ended connections are in TIME_WAIT: connections do not fail because of them.
		c.close()
		for _, local := range b.connect(t, append(targets(netip.MustParseAddr(mapped(b.far[0], options)), 8, l), options...)...).local {
			if strings.HasPrefix(local, "error") {
				t.Error(local)
			}
		}
	})
}

// TestAllAtOnce connects 64 threads at the same moment, to 8 ports with 8 slots each, again and again: none fails, and
// all of them have slots.
func TestAllAtOnce(t *testing.T) {
	b := newBed(t, "10.255.0.1", 1)
	rounds := gate.Count(t, gate.Models, 3, 8)
	for range rounds {
		var listeners []*listener
		for range 8 {
			listeners = append(listeners, b.listen(t, b.far[0]))
		}
		c := b.connect(t, append(targets(b.far[0], 8, listeners...), "--threads")...)
		for _, local := range c.local {
			if strings.HasPrefix(local, "error") {
				t.Fatal(local)
			}
		}
		if len(c.local) != 64 {
			t.Fatalf("%d connections", len(c.local))
		}
		c.close()
	}
	if n := b.counts(t); n.Planes[0]+n.Planes[1]+n.Planes[2]+n.Planes[3]+n.Taken != uint64(rounds)*64 {
		t.Errorf("%+v, want %d connections", n, rounds*64)
	}
}

// TestClaims checks that no connection takes the port of one that another processor is about to open, that claims
// expire, and that a port in use is skipped after its claim has expired.
func TestClaims(t *testing.T) {
	b := newBed(t, "10.255.0.1", 1)
	l := b.listen(t, b.far[0])
	port, err := strconv.Atoi(l.port)
	if err != nil {
		t.Fatal(err)
	}
	claim := func(slot int, age time.Duration) {
		var now unix.Timespec
		if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
			t.Error(err)
		}
		c := connectClaim{Pair: pairOf(key{b.source, b.far[0]}), SourcePort: uint16(slotfiletest.FirstPort + slot), DestinationPort: uint16(port)}
		if err := b.placer.objects.FaredClaims.Put(c, uint64(now.Nano()-int64(age))); err != nil {
			t.Error(err)
		}
	}
	b.set(t, 0, 0, 1, 0) // slots 4 and 5
	stop, stopped := make(chan struct{}), make(chan struct{})
	claim(4, 0)
	go func() { // a claim lasts a second; a program can take longer to start
		defer close(stopped)
		runtime.LockOSThread() // and ends with its thread, which precedes those of other programs of a busy machine
		_ = unix.Setpriority(unix.PRIO_PROCESS, unix.Gettid(), -20)
		for {
			select {
			case <-stop:
				return
			case <-time.After(50 * time.Millisecond):
				claim(4, 0)
			}
		}
	}()
	first := b.connect(t, targets(b.far[0], 2, l)...)
	close(stop)
	<-stopped
	if first.local[0] != "10.255.0.1 61005" || b.planeOf(first.local[1]) >= 0 || b.counts(t).Taken != 1 {
		t.Errorf("while slot 4 is claimed: %q, want port 61005, and one of no slot", first.local)
	}
	claim(4, time.Minute)
	claim(5, time.Minute)
	second := b.connect(t, targets(b.far[0], 2, l)...)
	if second.local[0] != "10.255.0.1 61004" || b.planeOf(second.local[1]) >= 0 || b.counts(t).Taken != 2 {
		t.Errorf("after the claims have expired: %q, want port 61004, because 61005 is in use, and one of no slot", second.local)
	}
}

// TestSockets checks which sockets get a slot, and that the others keep what the program has chosen.
func TestSockets(t *testing.T) {
	gate.WithoutRaceDetector(t, "TestAllAtOnce and TestFollow have the same goroutines")
	b := newBed(t, "10.255.0.1", 1)
	other := netip.MustParseAddr("10.9.9.9")
	b.ns.Addr("lo", "10.9.9.9/32")
	to := b.far[0]
	for _, test := range []struct {
		name   string
		to     netip.Addr
		args   []string
		slot   bool
		prefix string // of the local address
		count  func(c Counts) uint64
	}{
		{"unbound", to, nil, true, "10.255.0.1 ", nil},
		{"nonblocking", to, []string{"--nonblocking"}, true, "10.255.0.1 ", nil},
		{"bound to the loopback without a port", to, []string{"--bind", "10.255.0.1", "--no-port"}, true, "10.255.0.1 ", nil},
		{"bound to a port", to, []string{"--bind", "10.255.0.1", "--port", "40001"}, false, "10.255.0.1 40001", func(c Counts) uint64 { return c.Bound }},
		{"bound to the loopback and any port", to, []string{"--bind", "10.255.0.1"}, false, "10.255.0.1 ", func(c Counts) uint64 { return c.Bound }},
		{"bound to a device", to, []string{"--device", "lo"}, false, "10.255.0.1 ", func(c Counts) uint64 { return c.Bound }},
		{"bound to another address", to, []string{"--bind", "10.9.9.9", "--no-port"}, false, "10.9.9.9 ", func(c Counts) uint64 { return c.Unknown }},
		{"to an unknown destination", other, nil, false, "10.9.9.9 ", func(c Counts) uint64 { return c.Unknown }},
	} {
		before := b.counts(t)
		args := append(targets(test.to, 1, b.listen(t, test.to)), test.args...)
		if test.name == "bound to a device" { // so that the kernel's choice is the loopback, too
			args = append(args, "--bind", "10.255.0.1", "--no-port")
		}
		local := b.connect(t, args...).local
		if len(local) != 1 || (b.planeOf(local[0]) >= 0) != test.slot || !strings.HasPrefix(local[0], test.prefix) {
			t.Errorf("%s: %q, want %s..., of a slot: %v", test.name, local, test.prefix, test.slot)
		}
		if after := b.counts(t); test.count != nil && test.count(after) != test.count(before)+1 {
			t.Errorf("%s: not counted: %+v", test.name, after)
		}
	}
	// Sockets without SO_REUSEADDR have all ports: the kernel refuses them, and the program's address stays.
	var holders []*connections
	for i := range slotfiletest.Planes * slotfiletest.SlotsOfAPlane {
		holders = append(holders, b.connect(t, append(targets(other, 1, b.listen(t, other)), "--bind", "10.255.0.1", "--port", fmt.Sprint(slotfiletest.FirstPort+i))...))
	}
	before := b.counts(t)
	local := b.connect(t, append(targets(to, 1, b.listen(t, to)), "--bind", "10.255.0.1", "--no-port")...).local[0]
	if b.planeOf(local) >= 0 || !strings.HasPrefix(local, "10.255.0.1 ") || b.counts(t).Taken != before.Taken+1 {
		t.Errorf("bound to 10.255.0.1, connected from %q: %+v", local, b.counts(t))
	}
	for _, h := range holders {
		h.close()
	}
	// Without the loopback connections leave from another address.
	b.ns.IP("addr", "del", "10.255.0.1/32", "dev", "lo")
	if local := b.connect(t, targets(to, 1, b.listen(t, to))...).local[0]; strings.HasPrefix(local, "error") || b.counts(t).Address != 1 {
		t.Errorf("without the loopback: %q, %+v", local, b.counts(t))
	}
	if err := b.placer.Close(); err != nil {
		t.Fatal(err)
	}
	b.ns.Addr("lo", "10.255.0.1/32")
	if local := b.connect(t, targets(to, 1, b.listen(t, to))...).local[0]; b.planeOf(local) >= 0 {
		t.Errorf("after Close: %q is a slot's", local)
	}
}

// TestFollow checks that a running Follow applies changes of the table, also those of another file in its place, and
// removes pairs that are gone.
func TestFollow(t *testing.T) {
	b := newBed(t, "10.255.0.1", 2)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		b.placer.Follow(ctx, func(err error) { t.Error(err) })
		close(ended)
	}()
	defer func() {
		cancel()
		<-ended
	}()
	await := func(to netip.Addr, want [4]int) {
		t.Helper()
		netnstest.Eventually(t, time.Minute, func() error {
			b.table.Beat(t) // Follow reports a table without heartbeats
			var args []string
			for range 8 {
				args = append(args, targets(to, 1, b.listen(t, to))...)
			}
			c := b.connect(t, args...)
			defer c.close()
			var got [4]int
			for _, local := range c.local {
				if p := b.planeOf(local); p >= 0 {
					got[p]++
				}
			}
			if got != want {
				return fmt.Errorf("connections %v, want %v", got, want)
			}
			return nil
		})
	}
	await(b.far[0], [4]int{2, 2, 2, 2})
	b.table.Set(t, 0, 1, 0, 1)
	await(b.far[0], [4]int{0, 4, 0, 4})
	// The next run of fared knows one peer.
	next := slotfiletest.New(t, b.source, b.far[1])
	next.Set(t, 1, 0, 1, 0)
	if err := os.Rename(next.Path, b.table.Path); err != nil {
		t.Fatal(err)
	}
	await(b.far[1], [4]int{4, 0, 4, 0})
	await(b.far[0], [4]int{})
}

// TestAttachFails checks the errors for a missing cgroup, and for a directory that is not one.
func TestAttachFails(t *testing.T) {
	b := newBed(t, "10.255.0.1", 1)
	for _, dir := range []string{"/no/such/cgroup", t.TempDir()} {
		p, err := Attach(dir, b.placer.table)
		if err == nil || !strings.Contains(err.Error(), dir) || errors.Is(err, ErrPrivileges) {
			t.Errorf("%s: %v, %v", dir, p, err)
		}
	}
}
