package linux

import (
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/carrier"
	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/internal/hostcheck"
	"github.com/fared/fared/internal/netns"
	"github.com/fared/fared/internal/rtnl"
)

var (
	_ contract.Forwarder    = (*Driver)(nil)
	_ contract.Recoverer    = (*Driver)(nil)
	_ contract.Lander       = (*Driver)(nil)
	_ contract.Guardian     = (*Driver)(nil)
	_ contract.Retrier      = (*Driver)(nil)
	_ contract.Approximator = (*Driver)(nil)
	_ contract.Explainer    = (*Driver)(nil)
)

// family indexes state that exists once for IPv4 and once for IPv6.
type family int

const (
	v4 family = iota
	v6
)

func familyOf(a netip.Addr) family {
	if a.Is4() {
		return v4
	}
	return v6
}

// Driver forwards with the kernel of the network namespace in which Open was called; callers of its methods may be in
// another namespace. Methods are safe for concurrent use. The owner must call Close.
//
// Driver has the lock, the goroutines and the order of the work; each part of the work has its own type and state.
type Driver struct {
	space   netns.Namespace
	noIPv6  string // why the kernel cannot forward IPv6; "" if it can
	stop    chan struct{}
	once    sync.Once // of Close
	closed  error
	working sync.WaitGroup

	inspecting sync.Mutex // guards inspector; locked before mu, because reading a firewall takes long
	inspector  hostcheck.Inspector

	mu        sync.Mutex // guards everything below
	state     *state
	kernel    *kernel
	links     *links
	reader    *reader
	rules     *rules
	reach     *reach
	prober    *prober
	others    *others
	occupied  *occupied
	shadows   *shadows
	integrity *integrity

	repair       *time.Timer        // fires when a repair is due
	search       *time.Timer        // fires when a look for shadows is due
	forwarding   *farev1.Forwarding // of the last accepted Hello
	capabilities *farev1.Capabilities
	steering     string              // the name of the device by which flows leave above this Driver; "" without
	limitations  []hostcheck.Finding // of this host, at the last look
	unsettled    string              // why settings of the kernel could not be restored; "" if they could
	complaint    string              // the reason of the last logged refusal; "" after a sync without any
}

// Stats holds counters since Open; the *Objects fields and Broken are current values.
type Stats struct {
	// Nexthops, Groups, Routes, Rules count the changes sent to the kernel, Errors the refused ones.
	Nexthops, Groups, Routes, Rules uint64
	Errors                          uint64
	// Retries counts batches that were planned again after a refusal.
	Retries uint64
	// MovedByKernel counts groups that lost members with a carrier.
	MovedByKernel uint64
	// Audits counts periodic comparisons with the kernel, Disturbances comparisons, of any cause, that cover changes of
	// objects by another program, and Differences the deviations that either found and repaired.
	Audits, Disturbances, Differences uint64
	// Overruns counts losses of link notifications; each one caused a complete read-back. Resyncs counts all
	// read-backs.
	Overruns, Resyncs uint64
	// HashMismatches counts source ports that the kernel placed differently from the computed hash, in the checks at
	// Hello.
	HashMismatches uint64

	// NexthopObjects, GroupObjects, RouteObjects count the Driver's objects in the kernel.
	NexthopObjects, GroupObjects, RouteObjects int
	// Broken counts sub-ports whose device has a carrier and whose next hop the kernel refuses.
	Broken int
}

// Open takes over the network namespace of the calling thread. It sets the sysctls that forwarding depends on
// (net.ipv4.nexthop_compat_mode=0; fib_multipath_hash_policy=1 for both families; a
// fib_multipath_hash_seed if none is set), reads back the objects of an earlier run, and watches links and changes that
// other programs make to its objects. It changes none of the objects that it found until Settle.
//
// A Forwarding without loopbacks belongs to a node that only forwards packets of other nodes, such as a leaf. Then
// net.ipv4.ip_forward and, if a next hop is IPv6, net.ipv6.conf.all.forwarding are set to 1. The seed is left
// unchanged, so that the hash of the node does not correlate with the same hash on the senders, and so is a policy of 3
// with the fields 0x37.
func Open(config Config) (*Driver, error) {
	config, err := config.withDefaults()
	if err != nil {
		return nil, fmt.Errorf("linux data plane: %w", err)
	}
	d := newDriver(config)
	if err := d.open(); err != nil {
		d.release()
		return nil, fmt.Errorf("linux data plane: %w", err)
	}
	d.working.Go(d.listen)
	d.working.Go(d.attend)
	d.working.Go(d.keep)
	return d, nil
}

// newDriver returns a Driver with empty state and without resources.
func newDriver(config Config) *Driver {
	st := newState(config)
	in := &integrity{state: st}
	k := newKernel(st)
	re := &reach{state: st, kernel: k, timer: time.NewTimer(time.Hour), made: map[rtnl.Rule]bool{}}
	l := &links{state: st, kernel: k, reach: re, dark: map[int]bool{}, fresh: make(chan struct{}, 1)}
	oc, sh := &occupied{places: map[routeKey]bool{}}, &shadows{state: st, kernel: k}
	return &Driver{
		stop: make(chan struct{}), repair: time.NewTimer(time.Hour), search: time.NewTimer(time.Hour), state: st, kernel: k, links: l, integrity: in,
		reader:   &reader{state: st, kernel: k, links: l, integrity: in},
		rules:    &rules{state: st, kernel: k, integrity: in, made: map[rtnl.Rule]bool{}},
		reach:    re,
		prober:   &prober{state: st, kernel: k},
		occupied: oc, shadows: sh, others: &others{state: st, integrity: in, occupied: oc, shadows: sh, reach: re},
	}
}

// open does the work of Open except for starting the goroutines.
func (d *Driver) open() (err error) {
	if d.space, err = netns.Current(); err != nil {
		return fmt.Errorf("network namespace: %w", err)
	}
	if _, err = setUp(true); err != nil {
		return err
	}
	if d.noIPv6 = lacksIPv6(); d.noIPv6 != "" {
		d.state.log.Warn("linux data plane: IPv6 is disabled; IPv6 destinations are refused, IPv4 is forwarded", "why", d.noIPv6)
	}
	d.state.ipv6 = d.noIPv6 == ""
	if d.kernel.conn, err = rtnl.Dial(); err != nil {
		return err
	}
	if d.links.handle, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
		return err
	}
	// The watch starts before links are read, so that it reports changes in between.
	if d.links.watch, err = carrier.Open(d.state.config.watchBuffer); err != nil {
		return err
	}
	port, err := d.kernel.conn.Port()
	if err != nil {
		return err
	}
	if d.others.news, err = rtnl.WatchObjects(d.state.config.watchBuffer, d.state.config.Protocol, port); err != nil {
		return err
	}
	d.capabilities = &farev1.Capabilities{
		Ipv6: d.state.ipv6, ConfirmsInEffect: true, DirectProbePort: true, CarriersAnnounced: d.links.watch.Announced(),
	}
	if err := d.reader.reread(false); err != nil {
		return err
	}
	d.prober.space = &d.space
	if err := d.prober.findMaxWeight(); err != nil {
		return err
	}
	return d.rules.setUp()
}

// release closes the resources that open acquired before it failed. Errors of closing do not matter: Open returns that
// of open.
func (d *Driver) release() {
	if d.links.watch != nil {
		_, _ = d.links.watch.Close(), d.links.watch.Release()
	}
	if d.others.news != nil {
		_ = d.others.news.Close()
	}
	if d.kernel.conn != nil {
		_ = d.kernel.conn.Close()
	}
	if d.links.handle != nil {
		d.links.handle.Close()
	}
	d.space.Close()
}

// Close stops the goroutines and releases all resources. The kernel continues to forward; Open finds the objects again,
// and Flush removes them.
func (d *Driver) Close() error {
	d.once.Do(func() {
		close(d.stop)
		err := errors.Join(d.links.watch.Close(), d.others.news.Close())
		d.working.Wait()
		d.links.handle.Close()
		d.closed = errors.Join(err, d.links.watch.Release(), d.kernel.conn.Close())
		d.space.Close()
	})
	return d.closed
}

// Capabilities implements contract.Forwarder. FlowHash is set after the first SetForwarding.
func (d *Driver) Capabilities() *farev1.Capabilities {
	d.mu.Lock()
	defer d.mu.Unlock()
	c := proto.CloneOf(d.capabilities)
	c.MaxVectors = d.state.maxVectors()
	return c
}

// CoverCarriers sets whether another driver in this process announces the carriers of the same sub-ports
// (Capabilities.CarriersAnnounced), so that the Driver requests them rarely.
func (d *Driver) CoverCarriers(on bool) { d.links.watch.Cover(on) }

// WithoutIPv6 implements contract.Explainer.
func (d *Driver) WithoutIPv6() string { return d.noIPv6 }

// Stats returns the counters as they are now.
func (d *Driver) Stats() Stats {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := d.state.stats
	s.RouteObjects = d.state.have.routes.len() + len(d.state.have.anchors)
	s.GroupObjects = len(d.state.have.strays) + len(d.state.have.ready)
	for _, g := range d.state.have.groups {
		if g.exists {
			s.GroupObjects++
		}
	}
	s.NexthopObjects = len(d.state.have.owners) + len(d.state.have.loose)
	for _, sp := range d.state.want.subPorts {
		for _, pool := range sp.pools {
			if pool != nil && pool.broken != nil {
				s.Broken++
				break
			}
		}
	}
	return s
}

// kernelStatus converts an error of the kernel into the status of an operation: RESOURCE_EXHAUSTED if a resource of the
// kernel is used up, UNAVAILABLE if a retry may succeed.
func kernelStatus(err error) error {
	if exhausted(err) {
		return status.Errorf(codes.ResourceExhausted, "the kernel has no room: %v", err)
	}
	return status.Errorf(codes.Unavailable, "the kernel refused: %v", err)
}
