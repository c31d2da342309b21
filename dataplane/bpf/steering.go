package bpf

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/internal/rtnl"
)

// Limits of weights: a member's fraction of 2^32 flows must never round to 0.
const (
	maxWeight    = 1 << 24
	maxWeightSum = 1 << 30
)

// Steering steers in one network namespace. Its methods are safe for concurrent use from any thread.
//
// Steering has the lock, the goroutines and the order of the work; each part of the work has its own type and state.
type Steering struct {
	cfg Config
	// objects reports changes of rules and routes by other programs.
	objects *rtnl.ObjectWatch
	// private is the reason why pins end with the process, "" if they outlive it.
	private string
	changes atomic.Uint64 // Stats.CarrierChanges
	done    sync.WaitGroup
	quit    chan struct{}

	mu     sync.Mutex // guards all below
	closed bool
	// unmended is set from the beginning of a repair of the anchor to its success.
	unmended bool
	guard    guard
	want     desired
	have     mirror
	kernel   *kernel
}

// Open attaches the program in the network namespace of the calling thread, or adopts the state of an earlier process.
// It removes nothing before Settle. An error leaves existing state unchanged.
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
	s := &Steering{cfg: cfg, quit: make(chan struct{}), guard: guard{log: cfg.Log}, want: newDesired(cfg), have: mirror{links: map[int]rtnl.Link{}}}
	s.kernel = newKernel(cfg, &s.have)
	defer func() {
		if err != nil {
			err = errors.Join(err, s.release())
		}
	}()
	if err := s.open(); err != nil {
		return nil, err
	}
	s.private = outlives(cfg.PinDir)
	if s.have.pinned.unhooked != "" {
		cfg.Log.Warn("steering: this kernel does not run programs where carriers change; packets to a failed link are diverted when the kernel announces it, and only while the agent runs",
			"reason", s.have.pinned.unhooked)
	}
	if s.have.pinned.carriers != nil {
		s.kernel.watch.Cover(true)
		s.done.Go(s.notice)
	}
	if s.have.neighbors != nil {
		s.done.Go(s.followNeighbors)
	}
	s.done.Go(s.follow)
	s.done.Go(s.attend)
	s.done.Go(s.keep)
	return s, nil
}

// open does the work of Open in the network namespace except for starting the goroutines.
func (s *Steering) open() error {
	if err := s.kernel.open(); err != nil {
		return err
	}
	own, err := s.have.routes.ids()
	if err != nil {
		return err
	}
	if s.objects, err = rtnl.WatchObjects(0, s.cfg.Protocol, own...); err != nil {
		return fmt.Errorf("bpf: %w", err)
	}
	if err := s.kernel.attach(); err != nil {
		return err
	}
	if err := s.have.readMaps(); err != nil {
		return err
	}
	s.want.inherited, s.want.settled = s.have.setDown(), !s.have.pinned.adopted && s.have.pinned.switched
	if err := s.kernel.readLinks(); err != nil {
		return err
	}
	if s.cfg.SUNH.IsValid() {
		s.have.neighbors, err = openNeighbors(s.kernel.handle, s.kernel.netns, s.cfg.Log)
	}
	return err
}

// Private returns the reason why forwarding ends with the process, or "" if it continues without the process.
func (s *Steering) Private() string { return s.private }

// Capabilities implements contract.Forwarder.
func (s *Steering) Capabilities() *farev1.Capabilities {
	return &farev1.Capabilities{
		MaxVectors: uint32(s.cfg.MaxGroups), MaxDestinations: uint32(s.cfg.MaxDestinations),
		MaxWeight: maxWeight, MaxWeightSum: maxWeightSum,
		PerPacket: true, Ipv6: s.kernel.ipv6, FlowPins: true, ConfirmsInEffect: true, CarriersAnnounced: s.kernel.watch.Announced(),
	}
}

// SetForwarding implements contract.Forwarder.
func (s *Steering) SetForwarding(forwarding *farev1.Forwarding) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.cfg.judge(forwarding); err != nil {
		return err
	}
	next, err := newLayout(forwarding, &s.have, s.want.settled)
	if err != nil {
		return err
	}
	s.want.keepFormer(&next)
	oldForwarding, oldLayout := s.want.forwarding, s.want.layout
	if err := s.adopt(forwarding, next); err != nil {
		if oldForwarding != nil {
			err = errors.Join(err, s.adopt(oldForwarding, oldLayout))
		}
		return status.Error(codes.Internal, err.Error())
	}
	s.want.forgetSubPorts()
	return nil
}

// adopt applies a forwarding, and updates everything in the kernel that depends on it.
func (s *Steering) adopt(f *farev1.Forwarding, l layout) error {
	others := !s.want.layout.sameSources(&l)
	s.want.setForwarding(f, l)
	s.kernel.learn(&s.want)
	err := s.kernel.execute(planForwarding(&s.want, &s.have))
	// Entries follow their source groups: those of a removed source group are deleted, and its number becomes free.
	var t touched
	if others {
		s.want.touchAll(&t)
	}
	if err = errors.Join(err, s.sync(&t)); err == nil {
		err = s.kernel.execute(planFreedNames(&s.want, &s.have))
	}
	before := s.want.prefer
	if s.cfg.PreferSource {
		s.want.prefer = s.have.routes.preferred(f.Loopbacks)
	}
	return errors.Join(err, s.kernel.execute(planPaths(&s.want, &s.have, s.want.prefer != before)))
}

// carryOut brings the kernel in line with changes of groups and destinations. Former source groups give up their
// loopbacks before the first of their entries is removed.
func (s *Steering) carryOut(t *touched) error {
	if s.want.turned {
		if err := s.kernel.execute(planForwarding(&s.want, &s.have)); err != nil {
			return err
		}
		s.want.turned = false
	}
	if err := s.sync(t); err != nil {
		return err
	}
	now := s.want.layout
	next, any := now.abandoned()
	if !any {
		return nil
	}
	if err := s.adopt(s.want.forwarding, next); err != nil { // the next change repeats it
		s.cfg.Log.Error("steering: cannot remove former source groups", "err", errors.Join(err, s.adopt(s.want.forwarding, now)))
	}
	return nil
}

// sync brings the kernel in line with the desired state of touched objects.
func (s *Steering) sync(t *touched) error {
	if t.subPorts {
		s.kernel.learn(&s.want)
	}
	return s.kernel.execute(newPlan(&s.want, &s.have, t))
}

// refresh updates the sub-ports from the state of devices, next hops and control plane.
func (s *Steering) refresh() error { return s.sync(&touched{subPorts: true}) }

// judge validates the requirements of this data plane on a forwarding.
func (c Config) judge(f *farev1.Forwarding) error {
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
			case subPort.Device == c.Device:
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
	if err := fits(changes); err != nil {
		return err
	}
	s.beforeRise(changes)
	var t touched
	for _, c := range changes {
		s.apply(c, &t)
	}
	err := s.carryOut(&t)
	if err == nil {
		return nil
	}
	for i := len(changes) - 1; i >= 0; i-- {
		s.apply(changes[i].Inverse(), &t)
	}
	if undone := s.carryOut(&t); undone != nil {
		s.cfg.Log.Error("steering: cannot undo a failed change", "err", undone)
	}
	s.guard.occupied = s.guard.occupied || errors.Is(err, unix.EEXIST)
	code := codes.Internal
	if errors.Is(err, unix.E2BIG) || errors.Is(err, unix.ENOMEM) || errors.Is(err, unix.ENOSPC) {
		code = codes.ResourceExhausted
	}
	return status.Error(code, err.Error())
}

// apply is desired.apply. A sub-port that is set down makes requests of all carriers due.
func (s *Steering) apply(c contract.Change, t *touched) {
	s.want.apply(c, t)
	if c.Kind == contract.SubPortChange && !c.Up {
		s.kernel.watch.StartAfterChange() // the control plane may learn of a failure before the kernel's event arrives
	}
}

// fits refuses changes that exceed the shape of the maps; the kernel enforces their number of entries.
func fits(changes []contract.Change) error {
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

// Settle ends the adoption of earlier state. It is called when all previously acknowledged state has been committed
// again. State that was not committed again is removed, and a program of another layout is replaced. Before the first
// SetForwarding the acknowledged state is unknown, and Settle does nothing.
func (s *Steering) Settle() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.want.settled || s.want.forwarding == nil {
		return nil
	}
	if !s.have.pinned.switched {
		if err := s.have.pinned.switchOver(); err != nil {
			return err
		}
	}
	s.want.settled = true
	clear(s.want.inherited)
	var t touched
	s.want.touchAll(&t)
	return errors.Join(s.adopt(s.want.forwarding, s.want.layout), s.sync(&t))
}

// Close releases all resources. Forwarding continues. A second call does nothing.
func (s *Steering) Close() error {
	if !s.end() {
		return nil
	}
	return s.release()
}

// release closes the resources that Open has acquired so far.
func (s *Steering) release() error {
	close(s.quit)
	err := s.kernel.stop()
	if s.objects != nil {
		err = errors.Join(err, s.objects.Close())
	}
	s.done.Wait()
	return errors.Join(err, s.kernel.close())
}

// Detach closes and removes all state in the kernel: steered packets then take the remaining routes.
func (s *Steering) Detach() error {
	if !s.end() {
		return nil
	}
	return errors.Join(s.kernel.netns.Do(func() error { return Flush(s.cfg) }), s.release())
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
// configuration: rules, routes, program, maps and anchor, and nothing else. Missing objects are not an error. No
// process may be steering with that configuration: it would recreate the anchor.
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
	err = r.rules(nil, func(string, ...any) {})
	r.anchor = -1 // an invalid device, so that read removes all routes
	_, unread := r.read()
	return errors.Join(err, unread, r.close(), unpin(cfg.PinDir), removeAnchor(h, cfg.Device))
}
