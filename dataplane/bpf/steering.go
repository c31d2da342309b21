package bpf

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"sync"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/dataplane/internal/rtnl"
)

// The limits of weights: a member's part of 2^32 flows must never round to none.
const (
	maxWeight    = 1 << 24
	maxWeightSum = 1 << 30
)

// Steering steers in one network namespace. Its methods may be called from any goroutine and thread.
type Steering struct {
	cfg   Config
	ipv6  bool
	netns *os.File
	watch *rtnl.Watch
	done  sync.WaitGroup
	quit  chan struct{}

	mu     sync.Mutex // guards all below
	closed bool
	pinned *pinned
	handle *netlink.Handle
	routes *routes
	links  map[int]rtnl.Link // by index

	// What is wanted.
	forwarding *farev1.Forwarding // nil: not told yet
	layout     layout
	down       map[string]bool // devices that the control plane holds down
	inherited  map[string]bool // and that it did, to an earlier process; until Settle
	groups     map[uint32]*farev1.Group
	dests      map[netip.Prefix]contract.Destination
	settled    bool

	// What the kernel has.
	settings  cells[steerSettings]
	ports     cells[uint64]
	live      cells[steerLive]
	places    cells[steerPlace]
	planes    cells[steerPlane]
	haveGroup mirror[uint32, steerGroup]
	haveDest  mirror[steerAddress, steerDestination]
	havePins  mirror[steerPair, steerPins]
	haveTable mirror[steerPair, steerTable]
	slots     *slotCounters
	mtu       int
	prefer    [2]netip.Addr // source of IPv4, of IPv6
	neighbour neighbours
}

// Open attaches the program in the network namespace of the calling thread, or adopts what an earlier process left there.
// Nothing is removed before Settle. An error leaves what was there.
func Open(config Config) (_ *Steering, err error) {
	cfg, err := config.resolve()
	if err != nil {
		return nil, err
	}
	if err := Supported(); err != nil {
		return nil, err
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	s := &Steering{
		cfg: cfg, quit: make(chan struct{}), links: map[int]rtnl.Link{}, down: map[string]bool{}, inherited: map[string]bool{},
		groups: map[uint32]*farev1.Group{}, dests: map[netip.Prefix]contract.Destination{},
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.release())
		}
	}()
	if s.netns, err = os.Open("/proc/thread-self/ns/net"); err != nil {
		return nil, fmt.Errorf("bpf: %w", err)
	}
	_, noIPv6 := os.Stat("/proc/sys/net/ipv6")
	s.ipv6 = noIPv6 == nil
	if s.handle, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
		return nil, fmt.Errorf("bpf: netlink: %w", err)
	}
	// Before the devices are read, so that nothing is missed in between.
	if s.watch, err = rtnl.WatchLinks(0); err != nil {
		return nil, fmt.Errorf("bpf: %w", err)
	}
	if s.routes, err = openRoutes(cfg); err != nil {
		return nil, err
	}
	if err := s.attach(); err != nil {
		return nil, err
	}
	if err := s.readMaps(); err != nil {
		return nil, err
	}
	if err := s.readLinks(); err != nil {
		return nil, err
	}
	if err := s.neighbour.open(s); err != nil {
		return nil, err
	}
	s.done.Add(1)
	go s.follow()
	return s, nil
}

// attach makes sure of the anchor and the program on it, and reads the routes. The thread is in the network namespace.
func (s *Steering) attach() (err error) {
	if s.routes.anchor, err = ensureAnchor(s.handle, s.cfg.Device); err != nil {
		return err
	}
	if s.pinned == nil {
		if s.pinned, err = openPinned(s.cfg, s.routes.anchor); err != nil {
			return err
		}
	} else if old, err := oldLink(s.cfg.PinDir, s.routes.anchor); err != nil {
		return err
	} else if old != nil {
		if err := old.Close(); err != nil {
			return fmt.Errorf("bpf: %w", err)
		}
	} else {
		_ = s.pinned.link.Close() // of a device that is gone
		if err := s.pinned.attach(s.cfg.PinDir, s.routes.anchor); err != nil {
			return err
		}
	}
	s.mtu = 0
	return s.routes.read()
}

// readMaps learns what an earlier process has written.
func (s *Steering) readMaps() error {
	o := &s.pinned.objects
	s.settings.kernel, s.ports.kernel, s.live.kernel = o.FaredSettings, o.FaredPorts, o.FaredLive
	s.places.kernel, s.planes.kernel = o.FaredPlaces, o.FaredPlanes
	s.haveGroup.kernel, s.haveDest.kernel, s.havePins.kernel, s.haveTable.kernel = o.FaredGroups, o.FaredDests, o.FaredPins, o.FaredTables
	err := errors.Join(s.settings.read(), s.ports.read(), s.live.read(), s.places.read(), s.planes.read(),
		s.haveGroup.read(), s.haveDest.read(), s.havePins.read(), s.haveTable.read())
	if err != nil {
		return err
	}
	var used []span
	for _, p := range s.havePins.have {
		if p.Counters != notCounted {
			used = append(used, span{p.Counters, p.Slots})
		}
	}
	s.slots = newSlotCounters(o.FaredSlots, s.pinned.adopted, used)
	for _, p := range s.places.have {
		if p.Flags&placeDown != 0 {
			s.inherited[text(p.Device[:])] = true
		}
	}
	s.settled = !s.pinned.adopted && s.pinned.switched
	return nil
}

// Capabilities implements contract.Forwarder.
func (s *Steering) Capabilities() *farev1.Capabilities {
	return &farev1.Capabilities{
		MaxGroups: uint32(s.cfg.MaxGroups), MaxDestinations: uint32(s.cfg.MaxDestinations),
		MaxWeight: maxWeight, MaxWeightSum: maxWeightSum,
		PerPacket: true, Ipv6: s.ipv6, FlowPins: true, ConfirmsInEffect: true,
	}
}

// SetForwarding implements contract.Forwarder.
func (s *Steering) SetForwarding(forwarding *farev1.Forwarding) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.judge(forwarding); err != nil {
		return err
	}
	next, err := s.number(forwarding)
	if err != nil {
		return err
	}
	oldForwarding, oldLayout := s.forwarding, s.layout
	if err := s.adopt(forwarding, next); err != nil {
		if oldForwarding != nil {
			err = errors.Join(err, s.adopt(oldForwarding, oldLayout))
		}
		return status.Error(codes.Internal, err.Error())
	}
	gone := func(device string, _ bool) bool {
		_, ok := next.place[device]
		return !ok
	}
	maps.DeleteFunc(s.down, gone)
	maps.DeleteFunc(s.inherited, gone)
	return nil
}

// judge says what of a forwarding cannot be done here.
func (s *Steering) judge(f *farev1.Forwarding) error {
	if slices.Contains(f.UdpPorts, 65535) || slices.Contains(f.TcpPorts, 65535) {
		// fib_rule_port_range_valid, include/net/fib_rules.h
		return status.Error(codes.InvalidArgument, "port 65535: the kernel's routing rules take ports below it alone; use 1 to 65534")
	}
	n := 0
	for _, plane := range f.Planes {
		for _, subPort := range plane.SubPorts {
			n++
			switch {
			case subPort.Netns != "":
				return status.Errorf(codes.InvalidArgument, "sub-port %s: a packet cannot be redirected into another network namespace (%s); run the agent there", subPort.Device, subPort.Netns)
			case !deviceName(subPort.Device):
				return status.Errorf(codes.InvalidArgument, "sub-port %q: no name that a device can have; use 1 to 15 letters", subPort.Device)
			case subPort.Device == s.cfg.Device:
				return status.Errorf(codes.InvalidArgument, "sub-port %s is the anchor of the steering; name another anchor in the agent's configuration", subPort.Device)
			}
		}
	}
	if n > maxPlaces || len(f.Planes) > maxPlanes {
		return status.Errorf(codes.ResourceExhausted, "%d planes with %d sub-ports: steering has room for %d and %d; use fewer", len(f.Planes), n, maxPlanes, maxPlaces)
	}
	return nil
}

// Commit implements contract.Forwarder.
func (s *Steering) Commit(changes []contract.Change) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.fits(changes); err != nil {
		return err
	}
	var t touched
	for _, c := range changes {
		s.do(c, &t)
	}
	err := s.sync(&t)
	if err == nil {
		return nil
	}
	for i := len(changes) - 1; i >= 0; i-- {
		s.do(changes[i].Inverse(), &t)
	}
	if undone := s.sync(&t); undone != nil {
		s.cfg.Log.Error("steering: what failed could not be undone", "err", undone)
	}
	code := codes.Internal
	if errors.Is(err, unix.E2BIG) || errors.Is(err, unix.ENOMEM) || errors.Is(err, unix.ENOSPC) {
		code = codes.ResourceExhausted
	}
	return status.Error(code, err.Error())
}

// fits refuses what the maps have no room for in shape; their number of entries the kernel watches.
func (s *Steering) fits(changes []contract.Change) error {
	for _, c := range changes {
		for _, slot := range c.After.GetSlots() {
			if slot.Slot >= maxSlots {
				return status.Errorf(codes.OutOfRange, "group %d: slot %d: steering has slots 0 to %d; use fewer", c.Group, slot.Slot, maxSlots-1)
			}
		}
		for _, pair := range c.To.Pairs {
			if n := len(pair.UdpSourcePorts); n > maxSlots {
				return status.Errorf(codes.OutOfRange, "destination %v: source %s has %d slots, steering at most %d; use fewer", c.Prefix, pair.Source, n, maxSlots)
			}
		}
	}
	return nil
}

// Settle ends the taking over: it is called when everything that was promised before has been committed again. What was
// found and has not been is removed, and the program of another layout replaced. Before the first SetForwarding nothing is
// known to be promised, and Settle does nothing.
func (s *Steering) Settle() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.settled || s.forwarding == nil {
		return nil
	}
	if !s.pinned.switched {
		if err := s.pinned.switchOver(); err != nil {
			return err
		}
	}
	s.settled = true
	clear(s.inherited)
	var t touched
	for id := range s.haveGroup.have {
		t.group(id)
	}
	for key := range s.haveDest.have {
		t.dest(key.prefix())
	}
	for prefix := range s.routes.have {
		t.dest(prefix)
	}
	for prefix := range s.dests {
		t.dest(prefix)
	}
	for key := range s.havePins.have {
		t.pair(key)
	}
	for key := range s.haveTable.have {
		t.pair(key)
	}
	return errors.Join(s.adopt(s.forwarding, s.layout), s.sync(&t))
}

// Close lets go. What is forwarded goes on being forwarded. A second call does nothing.
func (s *Steering) Close() error {
	if !s.end() {
		return nil
	}
	return s.release()
}

// release ends what Open began, as far as it came.
func (s *Steering) release() (err error) {
	close(s.quit)
	if s.watch != nil {
		err = s.watch.Close()
	}
	err = errors.Join(err, s.neighbour.close())
	s.done.Wait()
	if s.pinned != nil {
		err = errors.Join(err, s.pinned.close())
	}
	if s.routes != nil {
		err = errors.Join(err, s.routes.close())
	}
	if s.handle != nil {
		s.handle.Close()
	}
	if s.netns != nil {
		err = errors.Join(err, s.netns.Close())
	}
	return err
}

// Detach closes and removes everything of ours: steered packets take the routes that are below.
func (s *Steering) Detach() error {
	if !s.end() {
		return nil
	}
	return errors.Join(s.inNamespace(func() error { return Flush(s.cfg) }), s.release())
}

// end makes all goroutines stop acting; false: somebody else did.
func (s *Steering) end() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	was := s.closed
	s.closed = true
	return !was
}

// Flush removes, in the network namespace of the calling thread, what Open and Commit made under the names of a
// configuration: rules, routes, program, maps and anchor, and nothing else. Nothing there is no error. No process may be
// steering by that configuration: it would make the anchor anew.
func Flush(config Config) error {
	cfg, err := config.resolve()
	if err != nil {
		return err
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("bpf: netlink: %w", err)
	}
	defer h.Close()
	r, err := openRoutes(cfg)
	if err != nil {
		return err
	}
	// Rules first: packets take other routes before the program goes.
	err = r.rules(nil, cfg.Priority, []uint8{unix.AF_INET, unix.AF_INET6})
	r.anchor = -1 // no device: all routes lead elsewhere
	return errors.Join(err, r.read(), r.close(), unpin(cfg.PinDir), removeAnchor(h, cfg.Device))
}

// inNamespace calls f on a thread of its own in the network namespace.
func (s *Steering) inNamespace(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		if err := unix.Setns(int(s.netns.Fd()), unix.CLONE_NEWNET); err != nil {
			done <- fmt.Errorf("bpf: enter the network namespace: %w", err)
			return
		}
		done <- f()
	}()
	return <-done
}
