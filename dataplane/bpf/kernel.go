package bpf

import (
	"errors"
	"fmt"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fared/fared/dataplane/internal/carrier"
	"github.com/fared/fared/internal/netns"
)

// kernel executes ops in one network namespace and records their results in the mirror.
type kernel struct {
	cfg    Config
	have   *mirror
	netns  netns.Namespace
	handle *netlink.Handle
	watch  *carrier.Watch
	ipv6   bool // the kernel has IPv6
	// run executes one op; tests replace it.
	run func(o op) error
}

func newKernel(cfg Config, have *mirror) *kernel {
	k := &kernel{cfg: cfg, have: have}
	k.run = func(o op) error { return o.do(k) }
	return k
}

// open opens the sockets. The thread is in the network namespace.
func (k *kernel) open() (err error) {
	m := k.have
	if k.netns, err = netns.Current(); err != nil {
		return fmt.Errorf("bpf: %w", err)
	}
	if m.cookie, err = netns.Cookie(); err != nil {
		return fmt.Errorf("bpf: the number of the network namespace: %w", err)
	}
	_, noIPv6 := os.Stat("/proc/sys/net/ipv6")
	k.ipv6 = noIPv6 == nil
	if k.handle, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
		return fmt.Errorf("bpf: netlink: %w", err)
	}
	// The watch starts before the devices are read, so that no event is missed.
	if k.watch, err = carrier.Open(0); err != nil {
		return fmt.Errorf("bpf: %w", err)
	}
	if m.routes, err = openRoutes(k.cfg); err == nil && !k.ipv6 {
		m.routes.families = []uint8{unix.AF_INET}
	}
	return err
}

// stop ends the waits for events of the opened resources.
func (k *kernel) stop() (err error) {
	if k.watch != nil {
		err = k.watch.Close()
	}
	if p := k.have.pinned; p != nil && p.carriers != nil {
		err = errors.Join(err, p.carriers.Close())
	}
	k.have.neighbors.close()
	return err
}

// close closes the opened resources, after stop and the end of all waits.
func (k *kernel) close() (err error) {
	if k.watch != nil {
		err = k.watch.Release()
	}
	if k.have.pinned != nil {
		err = errors.Join(err, k.have.pinned.close())
	}
	if k.have.routes != nil {
		err = errors.Join(err, k.have.routes.close())
	}
	if k.handle != nil {
		k.handle.Close()
	}
	k.netns.Close()
	return err
}

// op is one change of the kernel. do executes it and records the result in the mirror.
type op interface{ do(k *kernel) error }

// execute executes a plan. It returns the errors of the first stage with a failed op; later stages are not executed.
func (k *kernel) execute(p *plan) error {
	for _, stage := range p.stages {
		var err error
		for _, o := range stage {
			err = errors.Join(err, k.run(o))
		}
		if err != nil {
			k.have.recount(p.slots)
			return err
		}
	}
	if p.slots != nil {
		k.have.slots = p.slots
	}
	return nil
}

// recount derives the free counters from the pairs after a partial failure of a plan that allocates; planned is nil for
// other plans.
func (m *mirror) recount(planned *slotCounters) {
	if planned != nil {
		m.slots = newSlotCounters(m.slots.kernel, false, m.usedCounters())
		m.slots.clean = planned.clean
	}
}

// setWord writes a word of an array.
type setWord[V comparable] struct {
	array *arrayMap[V]
	index int
	value V
}

func (o setWord[V]) do(*kernel) error { return o.array.set(o.index, o.value) }

// putEntries writes entries of a hash map.
type putEntries[K, V comparable] struct {
	entries *hashMap[K, V]
	keys    []K
	values  []V
}

func (o putEntries[K, V]) do(*kernel) error { return o.entries.put(o.keys, o.values) }

// removeEntries deletes entries of a hash map.
type removeEntries[K, V comparable] struct {
	entries *hashMap[K, V]
	keys    []K
}

func (o removeEntries[K, V]) do(*kernel) error { return o.entries.remove(o.keys) }

// putPins writes pairs, after their new counters up to zero (by pair) are zeroed. A pair whose counters cannot be
// zeroed is not counted.
type putPins struct {
	putEntries[steerPair, steerPins]
	zero  map[steerPair]uint32
	slots *slotCounters // after the plan
}

func (o putPins) do(k *kernel) error {
	for i, key := range o.keys {
		upto, ok := o.zero[key]
		if pins := &o.values[i]; ok && o.slots.zero(pins.Counters, upto) != nil {
			o.slots.give(span{pins.Counters, pins.Slots})
			pins.Counters, pins.Slots = notCounted, 0
		}
	}
	return o.putEntries.do(k)
}

// zeroSent clears the counters of a place before another sub-port uses it.
type zeroSent int

func (place zeroSent) do(k *kernel) error { return k.zeroSent(int(place)) }

// relight removes the marks of dark places that are usable otherwise, see light.
type relight [maxSources]steerLive

func (live relight) do(k *kernel) error { return k.light((*[maxSources]steerLive)(&live)) }

// requestCarriers requests the carriers of all sub-ports soon.
type requestCarriers struct{}

func (requestCarriers) do(k *kernel) error {
	k.watch.Start()
	return nil
}

// addRoutes adds routes with their preferred sources, or replaces those with other ones.
type addRoutes map[netip.Prefix]netip.Addr

func (routes addRoutes) do(k *kernel) error { return k.have.routes.add(routes) }

// removeRoutes removes routes.
type removeRoutes map[netip.Prefix]netip.Addr

func (routes removeRoutes) do(k *kernel) error { return k.have.routes.remove(routes) }

// setRules makes the rules of the agent lead exactly these ports to the anchor.
type setRules []port

func (ports setRules) do(k *kernel) error {
	return k.have.routes.rules(ports, func(string, ...any) {})
}

// setMTU sets the MTU of the anchor.
type setMTU uint32

func (mtu setMTU) do(k *kernel) error {
	anchor := k.have.links[k.have.routes.anchor]
	if err := k.handle.LinkSetMTU(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: anchor.Index}}, int(mtu)); err != nil {
		return fmt.Errorf("bpf: give anchor %s the MTU %d: %w", k.cfg.Device, mtu, err)
	}
	anchor.MTU = uint32(mtu)
	k.have.links[anchor.Index] = anchor
	return nil
}

// readLinks reads all devices.
func (k *kernel) readLinks() error {
	all, err := k.have.routes.conn.Links()
	if err != nil {
		return fmt.Errorf("bpf: %w", err)
	}
	clear(k.have.links)
	for _, l := range all {
		k.have.links[l.Index] = l
	}
	return nil
}

// learn reads the missing MAC addresses of the devices of sub-ports.
func (k *kernel) learn(want *desired) {
	if k.have.neighbors != nil {
		for _, l := range k.have.subPortLinks(want) {
			k.have.neighbors.learn(l.Index)
		}
	}
}

// attach ensures that the anchor exists with the program attached, and reads the routes. The thread is in the network
// namespace.
func (k *kernel) attach() error {
	anchor, err := ensureAnchor(k.handle, k.cfg.Device)
	if err != nil {
		return err // the former index stays, so that comparisons see the loss
	}
	k.have.routes.anchor = anchor
	p, dir := k.have.pinned, k.cfg.PinDir
	if p == nil {
		if k.have.pinned, err = openPinned(k.cfg, anchor); err != nil {
			return err
		}
		if program := k.have.pinned.announced; program != nil {
			if err := k.watch.Filter(program.FD()); err != nil {
				return fmt.Errorf("bpf: %w", err)
			}
		}
	} else if old, err := oldLink(dir, anchor); err != nil {
		return err
	} else if old != nil {
		if err := old.Close(); err != nil {
			return fmt.Errorf("bpf: %w", err)
		}
	} else {
		_ = p.link.Close() // its device was deleted
		if err := p.attach(dir, anchor); err != nil {
			return err
		}
	}
	_, err = k.have.routes.read()
	return err
}
