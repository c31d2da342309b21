// Package returning follows the addresses of the devices of sub-ports. A device that was away (in the network namespace
// of a container, or because its driver was loaded again) returns without them, and no session over it can connect.
// The addresses are given back if the control plane wants that; otherwise they are a finding. They are in a file, too,
// because the process may end while a device is away.
package returning

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/hostcheck"
)

const (
	// grace is the time after which an address that was removed from a present device is forgotten. The kernel removes
	// addresses before it removes a device or moves it to another namespace.
	grace = 2 * time.Second
	// retryDelay is the time after which a failed attempt is repeated.
	retryDelay = 200 * time.Millisecond
)

// Keeper follows the devices of a network namespace. Close must follow Open.
type Keeper struct {
	log    *slog.Logger
	path   string // of the file; "" keeps none
	handle *netlink.Handle
	events *nl.NetlinkSocket
	wake   chan struct{} // one slot: an event concerns a sub-port
	quit   chan struct{}
	done   sync.WaitGroup

	mu       sync.Mutex // guards the fields below
	restore  bool
	subPorts map[string]*subPort // by name
	saved    []byte              // content of the file
}

// subPort is a sub-port with the addresses that its device has had.
type subPort struct {
	name     string
	index    int // of the device; 0 while it is absent
	up       bool
	known    []netlink.Addr
	missing  map[string]time.Time // by known address that the present device lacks: since when
	returned bool                 // the device was away, or down, and lacks some of known
	unseen   bool                 // known is from the file, or events were dropped: the device may have been away since
	failure  error                // of the last attempt to give an address back
}

// Open opens a Keeper in the network namespace of the calling thread. It follows no device before Set. The addresses
// are in the file at path, "" for none, which a reboot has to remove. A file that cannot be read counts as none.
func Open(path string, log *slog.Logger) (*Keeper, error) {
	handle, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("netlink: %w", err)
	}
	events, err := nl.Subscribe(unix.NETLINK_ROUTE, unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR)
	if err != nil {
		handle.Close()
		return nil, fmt.Errorf("netlink: %w", err)
	}
	k := &Keeper{log: log, path: path, handle: handle, events: events, wake: make(chan struct{}, 1), quit: make(chan struct{}), subPorts: map[string]*subPort{}}
	k.load()
	k.done.Go(k.receive)
	k.done.Go(k.follow)
	return k, nil
}

// Close ends the Keeper. Addresses stay.
func (k *Keeper) Close() {
	close(k.quit)
	k.events.Close()
	k.done.Wait()
	k.handle.Close()
}

// Set replaces the sub-ports by those of a Hello. Sub-ports in other network namespaces are not followed.
func (k *Keeper) Set(forwarding *farev1.Forwarding) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.restore = forwarding.GetRestoreAddresses()
	before := k.subPorts
	k.subPorts = map[string]*subPort{}
	for _, plane := range forwarding.GetPlanes() {
		for _, sp := range plane.GetSubPorts() {
			if sp.Netns != "" {
				continue
			}
			s := before[sp.Device]
			if s == nil {
				s = &subPort{name: sp.Device, missing: map[string]time.Time{}}
			}
			k.subPorts[sp.Device] = s
		}
	}
	k.lookAll(time.Now())
}

// Findings returns the devices that have returned without their addresses.
func (k *Keeper) Findings() (out []hostcheck.Finding) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, s := range k.subPorts {
		if !s.returned || s.index == 0 {
			continue
		}
		var lost []string
		for i := range s.known {
			if _, ok := s.missing[key(&s.known[i])]; ok {
				lost = append(lost, s.known[i].IPNet.String())
			}
		}
		if len(lost) == 0 {
			continue
		}
		remedy := "ip address add " + lost[0] + " dev " + s.name + ", or set dataplane.restore_addresses: true"
		if s.failure != nil {
			remedy = fmt.Sprintf("the agent cannot add them and tries again: %v", s.failure)
		}
		out = append(out, hostcheck.Finding{Reason: hostcheck.ReasonDevice,
			Text: "sub-port " + s.name + ": its device was away and has returned without " + strings.Join(lost, ", "), Remedy: remedy})
	}
	slices.SortFunc(out, func(a, b hostcheck.Finding) int { return strings.Compare(a.Text, b.Text) })
	return out
}

// receive wakes follow after each event of a device or an address of a sub-port, until Close.
func (k *Keeper) receive() {
	for {
		messages, _, err := k.events.Receive()
		select {
		case <-k.quit:
			return
		default:
		}
		if errors.Is(err, unix.EBADF) {
			return
		}
		concerns := err != nil
		if concerns {
			k.missedEvents()
		}
		for i := range messages {
			concerns = concerns || k.concerns(messages[i].Header.Type, messages[i].Data)
		}
		if concerns {
			select {
			case k.wake <- struct{}{}:
			default:
			}
		}
	}
}

// missedEvents notes that the kernel has dropped events, which may be those of a device that was away.
func (k *Keeper) missedEvents() {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, s := range k.subPorts {
		s.unseen = true
	}
}

// concerns reports whether a message is about a device of a sub-port. It notes that the device left or went down: it
// may be back, with its index, before it is read.
func (k *Keeper) concerns(kind uint16, body []byte) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	has := func(index int) bool {
		for _, s := range k.subPorts {
			if s.index == index {
				return true
			}
		}
		return false
	}
	switch kind {
	case unix.RTM_NEWLINK, unix.RTM_DELLINK:
		if len(body) < unix.SizeofIfInfomsg {
			return false
		}
		link, err := netlink.LinkDeserialize(nil, body)
		if err != nil {
			return true
		}
		a := link.Attrs()
		for _, s := range k.subPorts {
			if s.index == 0 || s.index != a.Index || body[0] != unix.AF_UNSPEC { // a bridge sends messages about its ports
				continue
			}
			if kind == unix.RTM_DELLINK {
				s.index, s.up = 0, false
			} else if a.Flags&unix.IFF_UP == 0 {
				s.up = false
			}
			return true
		}
		return k.subPorts[a.Name] != nil || slices.ContainsFunc(a.AltNames, func(name string) bool { return k.subPorts[name] != nil })
	case unix.RTM_NEWADDR, unix.RTM_DELADDR:
		return len(body) >= unix.SizeofIfAddrmsg && has(int(nl.DeserializeIfAddrmsg(body).Index))
	}
	return false
}

// follow reads the devices after each event that concerns them, until Close.
func (k *Keeper) follow() {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		select {
		case <-k.quit:
			return
		case <-k.wake:
		case <-timer.C:
		}
		k.mu.Lock()
		next := k.lookAll(time.Now())
		k.mu.Unlock()
		timer.Reset(next)
	}
}

// lookAll reads the devices of all sub-ports, writes the file, and returns the time until that is due again. The caller
// holds mu.
func (k *Keeper) lookAll(now time.Time) (next time.Duration) {
	next = time.Hour
	for _, s := range k.subPorts {
		if err := k.look(s, now); err != nil {
			k.log.Debug("cannot read the device of a sub-port", "sub_port", s.name, "error", err)
			next = min(next, retryDelay)
		}
		switch {
		case s.failure != nil:
			next = min(next, retryDelay)
		case len(s.missing) > 0 && !s.returned:
			next = min(next, grace)
		}
	}
	if err := k.save(); err != nil {
		k.log.Warn("addresses of sub-ports are lost with this process", "error", err)
	}
	return next
}

// look reads the device of a sub-port, and gives it its addresses back if it has returned.
func (k *Keeper) look(s *subPort, now time.Time) error {
	link, err := k.handle.LinkByName(s.name)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		s.index, s.up, s.returned = 0, false, false
		clear(s.missing)
		return nil
	}
	if err != nil {
		return err
	}
	list, err := k.handle.AddrList(link, netlink.FAMILY_ALL)
	if err != nil {
		return err
	}
	present := slices.DeleteFunc(list, func(a netlink.Addr) bool { return !kept(&a) })
	a := link.Attrs()
	up := a.Flags&unix.IFF_UP != 0
	// A device that goes down loses its IPv6 addresses.
	if len(s.known) > 0 && (s.index != a.Index || up && !s.up || s.unseen && s.lacksFamily(present)) {
		s.returned = true
	}
	s.unseen = false
	s.index, s.up, s.failure = a.Index, up, nil
	s.compare(present, now)
	if s.returned && k.restore {
		k.giveBack(s, link)
	}
	if len(s.missing) == 0 {
		s.returned = false
	}
	return nil
}

// lacksFamily reports whether the device has no address of the family of a known one. A device that was away unseen
// lacks all, and most often has its index again.
func (s *subPort) lacksFamily(present []netlink.Addr) bool {
	return slices.ContainsFunc(s.known, func(known netlink.Addr) bool {
		return !slices.ContainsFunc(present, func(a netlink.Addr) bool { return family(&a) == family(&known) })
	})
}

// compare updates the known addresses by those of the present device.
func (s *subPort) compare(present []netlink.Addr, now time.Time) {
	lacks := map[string]time.Time{}
	s.known = slices.DeleteFunc(s.known, func(a netlink.Addr) bool {
		if slices.ContainsFunc(present, func(p netlink.Addr) bool { return key(&p) == key(&a) }) {
			return false
		}
		since, ok := s.missing[key(&a)]
		if !ok {
			since = now
		}
		replaced := s.returned && slices.ContainsFunc(present, func(p netlink.Addr) bool { return family(&p) == family(&a) })
		removed := !s.returned && s.up && now.Sub(since) >= grace
		if replaced || removed {
			return true
		}
		lacks[key(&a)] = since
		return false
	})
	for i := range present {
		if !slices.ContainsFunc(s.known, func(a netlink.Addr) bool { return key(&a) == key(&present[i]) }) {
			s.known = append(s.known, present[i])
		}
	}
	s.missing = lacks
}

// giveBack adds the addresses that a returned device lacks.
func (k *Keeper) giveBack(s *subPort, link netlink.Link) {
	for i := range s.known {
		a := s.known[i]
		if _, lacks := s.missing[key(&a)]; !lacks {
			continue
		}
		a.Label, a.LinkIndex = "", 0 // of the former name
		a.Flags &^= unix.IFA_F_TENTATIVE | unix.IFA_F_DADFAILED | unix.IFA_F_PERMANENT
		if err := k.handle.AddrAdd(link, &a); err != nil && !errors.Is(err, unix.EEXIST) {
			s.failure = err
			continue
		}
		delete(s.missing, key(&a))
		k.log.Info("a device that was away has its address again", "sub_port", s.name, "device", link.Attrs().Name, "address", a.IPNet.String())
	}
}

// kept reports whether an address is given back: one that neither the kernel nor a lease has made.
func kept(a *netlink.Addr) bool {
	return a.Flags&unix.IFA_F_PERMANENT != 0 && !(family(a) == unix.AF_INET6 && a.IP.IsLinkLocalUnicast())
}

func family(a *netlink.Addr) int {
	if a.IP.To4() != nil {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

// key identifies an address.
func key(a *netlink.Addr) string {
	if a.Peer != nil {
		return a.IPNet.String() + " peer " + a.Peer.String()
	}
	return a.IPNet.String()
}
