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
	"sync/atomic"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/carrier"
	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/internal/netns"
	"github.com/fared/fared/internal/prefixmap"
	"github.com/fared/fared/internal/rtnl"
)

// Limits of weights: a member's fraction of 2^32 flows must never round to 0.
const (
	maxWeight    = 1 << 24
	maxWeightSum = 1 << 30
)

// Steering steers in one network namespace. Its methods are safe for concurrent use from any thread.
type Steering struct {
	cfg   Config
	ipv6  bool
	netns netns.Namespace
	// cookie is the number of the network namespace in the kernel.
	cookie uint64
	watch  *carrier.Watch
	// objects reports changes of rules and routes by other programs.
	objects *rtnl.ObjectWatch
	// private is the reason why pins end with the process, "" if they outlive it.
	private string
	changes atomic.Uint64 // Stats.CarrierChanges
	done    sync.WaitGroup
	quit    chan struct{}

	mu     sync.Mutex // guards all below
	closed bool
	guard  guard
	// unmended is set from the beginning of a repair of the anchor to its success.
	unmended bool
	pinned   *pinned
	handle   *netlink.Handle
	routes   *routes
	links    map[int]rtnl.Link // by index

	// Wanted state.
	forwarding *farev1.Forwarding // nil before the first
	layout     layout
	hops       map[string]*farev1.ForwardingSubPort // by device
	down       map[string]bool                      // devices that the control plane has set down
	inherited  map[string]bool                      // devices that it had set down for an earlier process; until Settle
	groups     map[uint32]*farev1.Vector
	carrying   map[string]int                                    // number of weights and slots of groups, by device
	dests      prefixmap.Map[netip.Prefix, contract.Destination] // by contract.DestinationKey
	settled    bool

	// Kernel state.
	settings   cells[steerSettings]
	ports      cells[uint64]
	names      cells[steerSource]
	live       cells[steerLive]
	places     cells[steerPlace]
	planes     cells[steerPlane]
	haveDevice mirror[steerDevice, steerDevicePlaces]
	haveSource mirror[steerAddress, uint32]
	haveGroup  mirror[uint32, steerGroup]
	haveDest   mirror[steerTarget, steerDestination]
	havePins   mirror[steerPair, steerPins]
	haveTable  mirror[steerPair, steerTable]
	slots      *slotCounters
	prefer     [2]netip.Addr // sources of IPv4 and IPv6
	neighbors  *neighbors    // nil without SUNH
}

// Open attaches the program in the network namespace of the calling thread, or adopts the state of an earlier process. It
// removes nothing before Settle. An error leaves existing state unchanged.
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
		groups: map[uint32]*farev1.Vector{}, carrying: map[string]int{}, guard: guard{log: cfg.Log},
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.release())
		}
	}()
	if s.netns, err = netns.Current(); err != nil {
		return nil, fmt.Errorf("bpf: %w", err)
	}
	if s.cookie, err = netns.Cookie(); err != nil {
		return nil, fmt.Errorf("bpf: the number of the network namespace: %w", err)
	}
	_, noIPv6 := os.Stat("/proc/sys/net/ipv6")
	s.ipv6 = noIPv6 == nil
	if s.handle, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
		return nil, fmt.Errorf("bpf: netlink: %w", err)
	}
	// The watch starts before the devices are read, so that no event is missed.
	if s.watch, err = carrier.Open(0); err != nil {
		return nil, fmt.Errorf("bpf: %w", err)
	}
	if s.routes, err = openRoutes(cfg); err != nil {
		return nil, err
	}
	own, err := s.routes.ids()
	if err != nil {
		return nil, err
	}
	if s.objects, err = rtnl.WatchObjects(0, cfg.Protocol, own...); err != nil {
		return nil, fmt.Errorf("bpf: %w", err)
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
	if cfg.SUNH.IsValid() {
		if s.neighbors, err = openNeighbors(s.handle, s.netns, cfg.Log); err != nil {
			return nil, err
		}
		s.done.Go(func() { s.neighbors.follow(s.takeNeighbor, s.resolve) })
	}
	s.private = outlives(cfg.PinDir)
	if s.pinned.unhooked != "" {
		cfg.Log.Warn("steering: this kernel does not run programs where carriers change; packets to a failed link are diverted when the agent receives the event",
			"reason", s.pinned.unhooked)
	}
	if s.pinned.carriers != nil {
		s.watch.Cover(true)
		s.done.Add(1)
		go s.notice(s.pinned.carriers)
	}
	s.done.Add(3)
	go s.follow()
	go s.attend()
	go s.keep()
	return s, nil
}

// attach ensures that the anchor exists with the program attached, and reads the routes. The thread is in the network
// namespace.
func (s *Steering) attach() error {
	anchor, err := ensureAnchor(s.handle, s.cfg.Device)
	if err != nil {
		return err // the former index stays, so that comparisons see the loss
	}
	s.routes.anchor = anchor
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
		_ = s.pinned.link.Close() // its device was deleted
		if err := s.pinned.attach(s.cfg.PinDir, s.routes.anchor); err != nil {
			return err
		}
	}
	_, err = s.routes.read()
	return err
}

// readMaps reads the state written by an earlier process.
func (s *Steering) readMaps() error {
	o := &s.pinned.objects
	s.settings.kernel, s.ports.kernel, s.live.kernel = o.FaredSettings, o.FaredPorts, o.FaredLive
	s.places.kernel, s.planes.kernel, s.names.kernel = o.FaredPlaces, o.FaredPlanes, o.FaredNames
	s.haveDevice.kernel = o.FaredDevices
	s.haveSource.kernel, s.haveGroup.kernel, s.haveDest.kernel, s.havePins.kernel, s.haveTable.kernel = o.FaredSources, o.FaredGroups, o.FaredDests, o.FaredPins, o.FaredTables
	err := errors.Join(s.settings.read(), s.ports.read(), s.live.read(), s.places.read(), s.planes.read(), s.names.read(),
		s.haveDevice.read(), s.haveSource.read(), s.haveGroup.read(), s.haveDest.read(), s.havePins.read(), s.haveTable.read())
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

// Private returns the reason why forwarding ends with the process, or "" if it continues without the process.
func (s *Steering) Private() string { return s.private }

// Capabilities implements contract.Forwarder.
func (s *Steering) Capabilities() *farev1.Capabilities {
	return &farev1.Capabilities{
		MaxVectors: uint32(s.cfg.MaxGroups), MaxDestinations: uint32(s.cfg.MaxDestinations),
		MaxWeight: maxWeight, MaxWeightSum: maxWeightSum,
		PerPacket: true, Ipv6: s.ipv6, FlowPins: true, ConfirmsInEffect: true, CarriersAnnounced: s.watch.Announced(),
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
	gone := func(device string, _ bool) bool { return s.hops[device] == nil }
	maps.DeleteFunc(s.down, gone)
	maps.DeleteFunc(s.inherited, gone)
	return nil
}

// judge validates the requirements of this data plane on a forwarding.
func (s *Steering) judge(f *farev1.Forwarding) error {
	if slices.Contains(f.UdpPorts, 65535) || slices.Contains(f.TcpPorts, 65535) {
		// fib_rule_port_range_valid, include/net/fib_rules.h
		return status.Error(codes.InvalidArgument, "port 65535: the kernel's routing rules allow only lower ports; use 1 to 65534")
	}
	for _, plane := range f.Planes {
		for _, subPort := range plane.SubPorts {
			switch {
			case subPort.Netns != "":
				return status.Errorf(codes.InvalidArgument, "sub-port %s: packets cannot be redirected into another network namespace (%s); run the agent there", subPort.Device, subPort.Netns)
			case !deviceName(subPort.Device):
				return status.Errorf(codes.InvalidArgument, "sub-port %q: not a valid device name; use 1 to 15 letters", subPort.Device)
			case subPort.Device == s.cfg.Device:
				return status.Errorf(codes.InvalidArgument, "sub-port %s is the anchor of the steering; set another anchor in the agent's configuration", subPort.Device)
			}
		}
	}
	groups := contract.SourceGroups(f)
	if n := len(groups); n > maxSources {
		return status.Errorf(codes.ResourceExhausted, "%d source groups: steering allows at most %d; use fewer", n, maxSources)
	}
	for _, g := range groups {
		if n := len(g.Devices); n > maxPlaces {
			return status.Errorf(codes.ResourceExhausted, "%d sub-ports of the loopback %v: steering allows at most %d for each source group; use fewer", n, g.Name, maxPlaces)
		}
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
	s.beforeRise(changes)
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
		s.cfg.Log.Error("steering: cannot undo a failed change", "err", undone)
	}
	s.guard.occupied = s.guard.occupied || errors.Is(err, unix.EEXIST)
	code := codes.Internal
	if errors.Is(err, unix.E2BIG) || errors.Is(err, unix.ENOMEM) || errors.Is(err, unix.ENOSPC) {
		code = codes.ResourceExhausted
	}
	return status.Error(code, err.Error())
}

// fits refuses changes that exceed the shape of the maps; the kernel enforces their number of entries.
func (s *Steering) fits(changes []contract.Change) error {
	for _, c := range changes {
		for _, slot := range c.After.GetSlots() {
			if slot.Slot >= maxSlots {
				return status.Errorf(codes.OutOfRange, "group %d: slot %d: steering has slots 0 to %d; use fewer", c.Group, slot.Slot, maxSlots-1)
			}
		}
		for _, pair := range c.To.Pairs {
			if n := len(pair.SourcePorts); n > maxSlots {
				return status.Errorf(codes.OutOfRange, "destination %v: source %s has %d slots, steering allows at most %d; use fewer", c.Prefix, pair.Source, n, maxSlots)
			}
		}
	}
	return nil
}

// Settle ends the adoption of earlier state. It is called when all previously acknowledged state has been committed again.
// State that was not committed again is removed, and a program of another layout is replaced. Before the first
// SetForwarding the acknowledged state is unknown, and Settle does nothing.
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
	s.touchAll(&t)
	return errors.Join(s.adopt(s.forwarding, s.layout), s.sync(&t))
}

// Close releases all resources. Forwarding continues. A second call does nothing.
func (s *Steering) Close() error {
	if !s.end() {
		return nil
	}
	return s.release()
}

// release closes the resources that Open has acquired so far.
func (s *Steering) release() (err error) {
	close(s.quit)
	if s.watch != nil {
		err = s.watch.Close()
	}
	if s.objects != nil {
		err = errors.Join(err, s.objects.Close())
	}
	if s.pinned != nil && s.pinned.carriers != nil {
		err = errors.Join(err, s.pinned.carriers.Close())
	}
	s.neighbors.close()
	s.done.Wait()
	if s.watch != nil {
		err = errors.Join(err, s.watch.Release())
	}
	if s.pinned != nil {
		err = errors.Join(err, s.pinned.close())
	}
	if s.routes != nil {
		err = errors.Join(err, s.routes.close())
	}
	if s.handle != nil {
		s.handle.Close()
	}
	s.netns.Close()
	return err
}

// Detach closes and removes all state in the kernel: steered packets then take the remaining routes.
func (s *Steering) Detach() error {
	if !s.end() {
		return nil
	}
	return errors.Join(s.netns.Do(func() error { return Flush(s.cfg) }), s.release())
}

// whileOpen calls work with mu held, or returns false if Steering is closed.
func (s *Steering) whileOpen(work func()) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	work()
	return true
}

// end marks Steering as closed; it returns false if it already was.
func (s *Steering) end() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	was := s.closed
	s.closed = true
	return !was
}

// Flush removes, in the network namespace of the calling thread, the objects that Open and Commit create for a
// configuration: rules, routes, program, maps and anchor, and nothing else. Missing objects are not an error. No process
// may be steering with that configuration: it would recreate the anchor.
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
	// Rules are removed first, so that packets take other routes before the program is removed.
	err = r.rules(nil, cfg.Priority, []uint8{unix.AF_INET, unix.AF_INET6}, func(string, ...any) {})
	r.anchor = -1 // an invalid device, so that read removes all routes
	_, unread := r.read()
	return errors.Join(err, unread, r.close(), unpin(cfg.PinDir), removeAnchor(h, cfg.Device))
}
