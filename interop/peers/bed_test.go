package peers

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
)

// bed is one contestant and its leaves.
type bed struct {
	t            testing.TB
	name         string // of the contestant
	contestant   contestant
	destinations int
	variant
	server    *netnstest.Namespace
	far       *netnstest.Namespace // of all leaves
	dir       string               // for files, in base
	leaves    []*leaf
	gate      barrier
	judge     *judge
	traffic   *traffic
	watched   map[string]watched
	state     [2]weights // of the first destination, and of all others
	control   [2]int     // sockets for requests to devices, of the server's namespace and of the leaves'
	processes []*netnstest.Process
	idle      time.Duration // before an event
	limit     time.Duration // of an event
	out       error         // why the contestant takes no further part at this size; nil while it does
}

func device(link int) string { return fmt.Sprintf("p%d", link) }

// newBed wires a contestant, starts its leaves and its processes.
func newBed(t testing.TB, c contestant, destinations int, v variant) *bed {
	t.Helper()
	netnstest.Require(t, c.tools()...)
	dir, err := os.MkdirTemp(base, "")
	if err == nil {
		err = os.Chmod(dir, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	b := &bed{t: t, name: c.name(), contestant: c, destinations: destinations, variant: v, server: netnstest.New(t), far: netnstest.New(t), dir: dir,
		limit: eventLimit, watched: map[string]watched{}}
	// The same for all: flows are placed by their ports, and routes avoid a sub-port without a carrier at once.
	b.server.Sysctl("net.ipv4.fib_multipath_hash_policy=1", "net.ipv4.conf.all.ignore_routes_with_linkdown=1", "net.ipv4.conf.default.ignore_routes_with_linkdown=1")
	b.server.Addr("lo", loopback.String()+"/32")
	for _, i := range cables() {
		netnstest.Cable(t, b.server, device(i), serverAddress(i).String()+"/31", b.far, device(i), leafAddress(i).String()+"/31")
	}
	index := map[int32]int{}
	for _, i := range cables() {
		index[int32(b.server.Device(device(i)).Index)] = i % mostPlanes
	}
	b.server.Must(func() (err error) { b.judge, err = newJudge(index, destinations); return err })
	t.Cleanup(b.judge.close)
	if b.traffic, err = newTraffic(b); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.traffic.close)
	for i, ns := range []*netnstest.Namespace{b.server, b.far} {
		ns.Must(func() (err error) {
			b.control[i], err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
			return err
		})
		t.Cleanup(func() { unix.Close(b.control[i]) })
	}
	for p := range planes {
		var l *leaf
		for s := subPorts - 1; s >= 0; s-- {
			first := newLeaf(b.far, p+s*mostPlanes, destinations, &b.gate)
			first.next, l = l, first
		}
		b.leaves = append(b.leaves, l)
		if err := b.leaves[p].start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(b.leaves[p].stop)
		if v.bfd > 0 {
			if err := b.leaves[p].startBFD(v.bfd); err != nil {
				t.Fatal(err)
			}
		}
	}
	c.start(b)
	return b
}

// run starts a process of the contestant.
func (b *bed) run(name string, args ...string) *netnstest.Process {
	b.t.Helper()
	p := b.server.StartOnHost(b.t, name, args...)
	b.processes = append(b.processes, p)
	return p
}

// runUntil starts a process and waits for a file that it makes.
func (b *bed) runUntil(file, name string, args ...string) {
	b.t.Helper()
	testbed.Until(b.t, file, b.run(name, args...))
}

// file writes a file of the contestant and returns its path.
func (b *bed) file(name, content string) string {
	b.t.Helper()
	path := filepath.Join(b.dir, name)
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		b.t.Fatal(err)
	}
	return path
}

func (b *bed) pids() (all []int) {
	for _, p := range b.processes {
		all = append(all, p.Pid())
	}
	return all
}

// running returns the result of a process that has ended.
func (b *bed) running() error {
	var errs []error
	for _, p := range b.processes {
		errs = append(errs, p.Running())
	}
	return errors.Join(errs...)
}

// even are the weights when all leaves advertise the full speed.
var even = weights{1, 1, 1, 1, 1, 1, 1, 1}

// settle waits until all destinations have even weights, and keep them.
func (b *bed) settle() error { return b.settleWithin(settleLimit) }

func (b *bed) settleWithin(limit time.Duration) error {
	if !b.contestant.inKernel() {
		if err := b.awaitPackets(b.every(), even, nil, limit); err != nil {
			return err
		}
	} else if err := b.judge.want(even, even); err != nil {
		return err
	} else if _, err := b.judge.await(limit, quiet); err != nil {
		return errors.Join(err, b.running())
	}
	b.state = [2]weights{even, even}
	if b.bfd > 0 {
		if err := b.bfdUp(); err != nil {
			return err
		}
	}
	return b.running()
}

// every returns the numbers of all destinations.
func (b *bed) every() []int {
	all := make([]int, b.destinations)
	for i := range all {
		all[i] = i
	}
	return all
}

// link sets the own ends of the first plane's sub-ports, or the leaf's ends, up or down, and returns the time before.
func (b *bed) link(far, up bool) (moment, error) {
	control := b.control[0]
	if far {
		control = b.control[1]
	}
	var all []*unix.Ifreq
	for s := range subPorts {
		r, err := unix.NewIfreq(device(s * mostPlanes))
		if err != nil {
			return 0, err
		}
		if err := unix.IoctlIfreq(control, unix.SIOCGIFFLAGS, r); err != nil {
			return 0, err
		}
		r.SetUint16(r.Uint16() &^ unix.IFF_UP)
		if up {
			r.SetUint16(r.Uint16() | unix.IFF_UP)
		}
		all = append(all, r)
	}
	began := now()
	for _, r := range all {
		if err := unix.IoctlIfreq(control, unix.SIOCSIFFLAGS, r); err != nil {
			return began, err
		}
	}
	return began, nil
}
