package linux

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/dataplane/internal/rtnl"
	"github.com/fared/fared/wecmp"
)

var (
	_ contract.Forwarder = (*Plane)(nil)
	_ contract.Recoverer = (*Plane)(nil)
	_ contract.Lander    = (*Plane)(nil)
)

// family indexes what exists once for IPv4 and once for IPv6.
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

// Plane forwards by the kernel of the network namespace in which Open was called, wherever its methods are called. They
// may be called from any goroutine. Close it.
type Plane struct {
	config  Config
	log     *slog.Logger
	space   namespace
	watch   *rtnl.Watch
	ipv6    bool
	stop    chan struct{}
	once    sync.Once // of Close
	closed  error
	working sync.WaitGroup

	mu     sync.Mutex // guards everything below
	conn   *rtnl.Conn
	handle *netlink.Handle // for neighbours
	stats  Stats
	repair *time.Timer // rings when a repair is due

	// What is wanted.
	forwarding   *farev1.Forwarding
	subPorts     []*subPort
	byDevice     map[string]*subPort
	layout       layout
	generation   uint64 // of everything that the owners of buckets follow from, other than weights
	wanted       map[uint32]*farev1.Group
	destinations map[netip.Prefix]uint32 // to wanted
	capabilities *farev1.Capabilities
	hash         wecmp.LinuxL4
	misplace     func(hash uint32) uint32 // of tests: disagrees with the kernel

	// What the kernel has.
	scaling scaling
	links   map[int]rtnl.Link
	names   map[string]int
	// linkNews counts what happened to links that nexthops depend on.
	linkNews uint64
	// dark are devices without a carrier on which packets may wait for a next hop.
	dark   map[int]bool
	used   map[uint32]bool // ids of nexthop objects, whoever's
	next   uint32          // id to try next
	owners map[uint32]*pool
	drop   [2]*pool // packets end here while the kernel has taken every other member away
	hole   [2]*pool // packets end here when no member is left
	groups map[groupKey]*group
	routes map[netip.Prefix]uint32 // to the id of a group
	// Found with the mark and not claimed by anything wanted; Settle removes it.
	strays       map[uint32]stray
	loose        map[uint32]rtnl.Nexthop
	strangeRoute []rtnl.Route
	retired      []uint32 // nexthops to delete once no group has them
	changed      []*pool  // with objects that have another next hop by now
	settled      bool
	// What may differ between wanted and kernel.
	staleGroups map[groupKey]bool
	staleRoutes map[netip.Prefix]bool
}

// Stats count since Open; Objects are of now.
type Stats struct {
	// Nexthops, Groups, Routes, Rules are changes sent to the kernel, Errors how many of them it refused.
	Nexthops, Groups, Routes, Rules uint64
	Errors                          uint64
	// Retries are batches planned again after something was refused.
	Retries uint64
	// MovedByKernel are groups that lost members with a carrier, Repairs those that the control plane did not set within the
	// repair delay, so that they were divided anew by the weights of before.
	MovedByKernel, Repairs uint64
	// Audits are comparisons with the kernel, Differences what they found and repaired.
	Audits, Differences uint64
	// Overruns are times when news of links were lost; each led to reading everything again, as other Resyncs do.
	Overruns, Resyncs uint64
	// HashMismatches are source ports that the kernel placed elsewhere than computed, in checks at Hello.
	HashMismatches uint64

	// NexthopObjects, GroupObjects, RouteObjects are the Plane's in the kernel.
	NexthopObjects, GroupObjects, RouteObjects int
	// Broken sub-ports have a device with carrier, and a next hop that the kernel does not take.
	Broken int
}

// Open takes the calling thread's network namespace: it sets what forwarding depends on (net.ipv4.nexthop_compat_mode=0,
// fib_multipath_hash_policy=1 for both families where it is not 3 with the fields 0x37, a fib_multipath_hash_seed when none is
// set), reads back what an earlier run left, and listens to links. Nothing of what it found is changed until Settle.
//
// A Forwarding without loopbacks is that of a node which only forwards for others, a leaf: then net.ipv4.ip_forward and, where
// a next hop is IPv6, net.ipv6.conf.all.forwarding are set to 1, and the seed is left alone, so that the node's choice does not
// follow from the senders' by the same hash.
func Open(config Config) (*Plane, error) {
	config, err := config.withDefaults()
	if err != nil {
		return nil, fmt.Errorf("linux data plane: %w", err)
	}
	p := &Plane{
		config: config, log: config.Logger, stop: make(chan struct{}), repair: time.NewTimer(time.Hour),
		byDevice: map[string]*subPort{}, wanted: map[uint32]*farev1.Group{}, destinations: map[netip.Prefix]uint32{},
		links: map[int]rtnl.Link{}, names: map[string]int{}, used: map[uint32]bool{}, next: config.FirstID,
		owners: map[uint32]*pool{}, groups: map[groupKey]*group{}, routes: map[netip.Prefix]uint32{},
		strays: map[uint32]stray{}, loose: map[uint32]rtnl.Nexthop{},
		staleGroups: map[groupKey]bool{}, staleRoutes: map[netip.Prefix]bool{}, dark: map[int]bool{},
	}
	for f := range p.drop {
		p.drop[f], p.hole[f] = &pool{family: family(f), loopback: true}, &pool{family: family(f), blackhole: true}
	}
	if err := p.open(); err != nil {
		return nil, errors.Join(fmt.Errorf("linux data plane: %w", err), p.release())
	}
	p.working.Go(p.listen)
	p.working.Go(p.keep)
	return p, nil
}

// open is Open without the goroutines.
func (p *Plane) open() (err error) {
	if p.space, err = openNamespace(); err != nil {
		return err
	}
	if _, err = setUp(); err != nil {
		return err
	}
	p.ipv6 = hasIPv6()
	if p.conn, err = rtnl.Dial(); err != nil {
		return err
	}
	if p.handle, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
		return err
	}
	// Before links are read: what changes in between is heard.
	if p.watch, err = rtnl.WatchLinks(p.config.watchBuffer); err != nil {
		return err
	}
	p.capabilities = &farev1.Capabilities{
		MaxWeight: 65535, MaxWeightSum: uint32(p.config.Buckets), Ipv6: p.ipv6, ConfirmsInEffect: true,
	}
	if err := p.reread(false); err != nil {
		return err
	}
	if err := p.findMaxWeight(); err != nil {
		return err
	}
	return p.setUpRules()
}

// release closes what open opened.
func (p *Plane) release() error {
	var errs []error
	if p.watch != nil {
		errs = append(errs, p.watch.Close())
	}
	if p.conn != nil {
		errs = append(errs, p.conn.Close())
	}
	if p.handle != nil {
		p.handle.Close()
	}
	if p.space.file != nil {
		errs = append(errs, p.space.Close())
	}
	return errors.Join(errs...)
}

// Close stops listening. The kernel forwards on; Open finds everything again, Flush removes it.
func (p *Plane) Close() error {
	p.once.Do(func() {
		close(p.stop)
		err := p.watch.Close()
		p.working.Wait()
		p.handle.Close()
		p.closed = errors.Join(err, p.conn.Close(), p.space.Close())
	})
	return p.closed
}

// Capabilities implements contract.Forwarder. FlowHash is there after the first SetForwarding.
func (p *Plane) Capabilities() *farev1.Capabilities {
	p.mu.Lock()
	defer p.mu.Unlock()
	return proto.CloneOf(p.capabilities)
}

// Stats returns the counters as they are now.
func (p *Plane) Stats() Stats {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.stats
	s.RouteObjects = len(p.routes)
	s.GroupObjects = len(p.strays)
	for _, g := range p.groups {
		if g.exists {
			s.GroupObjects++
		}
	}
	s.NexthopObjects = len(p.owners) + len(p.loose)
	for _, sp := range p.subPorts {
		for _, pool := range sp.pools {
			if pool != nil && pool.broken != nil {
				s.Broken++
				break
			}
		}
	}
	return s
}

// kernelStatus turns what the kernel said into the status of an operation: RESOURCE_EXHAUSTED when it is out of something,
// UNAVAILABLE when another may have better luck.
func kernelStatus(err error) error {
	if exhausted(err) {
		return status.Errorf(codes.ResourceExhausted, "the kernel has no room: %v", err)
	}
	return status.Errorf(codes.Unavailable, "the kernel refused: %v", err)
}
