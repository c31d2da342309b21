// Package netsetup sets the addresses of a configuration's devices in containers and labs, which have no other program
// for it.
package netsetup

import (
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/fare"
)

// Options are what Apply does in addition to addresses. The zero value adds nothing.
type Options struct {
	// Limit makes each sub-port with a configured speed send no faster than that, by a tbf qdisc.
	Limit bool
	// MatchIndex holds shell patterns (path.Match). Each device of a sub-port that matches one must be an end of a veth
	// pair and gets the interface index of its far end. A device whose index changes loses its addresses first. It
	// needs CAP_SYS_ADMIN.
	MatchIndex []string
}

// Apply sets up the network namespace of the calling thread. It adds loopbacks to lo and the local address of its
// sessions to each sub-port's device, point to point toward the peer, and sets all of them up. Existing settings stay.
// Apply continues after errors, and returns all of them joined.
func Apply(c *config.Config, o Options) error {
	var errs []error
	note := func(path string, err error) {
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", path, err))
		}
	}
	devices, err := matching(c, o.MatchIndex)
	note("match-index", err)
	note("match-index", matchIndexes(devices)) // first: a device that leaves the namespace loses its addresses
	lo, err := up("lo")
	note("lo", err)
	for i, l := range c.Loopbacks {
		if lo != nil {
			note(fmt.Sprintf("loopbacks[%d]", i), add(lo, l, netip.Addr{}))
		}
	}
	for p := range c.Planes {
		for k := range c.Planes[p].SubPorts {
			note(fmt.Sprintf("planes[%d].sub_ports[%d]", p, k), subPort(&c.Planes[p].SubPorts[k], o.Limit))
		}
	}
	return errors.Join(errs...)
}

func subPort(sp *config.SubPort, limit bool) error {
	if sp.Netns != "" {
		return fmt.Errorf("%s is in the network namespace %s; only devices of this namespace can be set up", sp.Device, sp.Netns)
	}
	link, err := up(sp.Device)
	if err != nil {
		return err
	}
	var errs []error
	for i, s := range sp.Sessions {
		if s.Unnumbered || s.Peer.IsLinkLocalUnicast() {
			continue // the kernel's link-local address suffices
		}
		if !s.Local.IsValid() {
			errs = append(errs, fmt.Errorf("sessions[%d] has no local address: add local", i))
			continue
		}
		errs = append(errs, add(link, netip.PrefixFrom(s.Local, s.Local.BitLen()), s.Peer))
	}
	if limit && sp.Speed > 0 {
		errs = append(errs, shape(link, sp.Speed))
	}
	return errors.Join(errs...)
}

// up sets a device up and returns it.
func up(device string) (netlink.Link, error) {
	link, err := netlink.LinkByName(device)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", device, err)
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return nil, fmt.Errorf("set %s up: %w", device, err)
	}
	return link, nil
}

// add adds an address to a device. An address with a peer has a host route to the peer (ip address add LOCAL peer
// PEER), whatever the prefix at the other end.
func add(link netlink.Link, local netip.Prefix, peer netip.Addr) error {
	a := &netlink.Addr{IPNet: ipNet(local)}
	if local.Addr().Is6() {
		// The fabric's plan gives each address once, so duplicate address detection (RFC 4862) and its delay of a
		// second are unnecessary.
		a.Flags = unix.IFA_F_NODAD
	}
	if peer.IsValid() {
		a.Peer = ipNet(netip.PrefixFrom(peer, peer.BitLen()))
	}
	if err := netlink.AddrReplace(link, a); err != nil {
		return fmt.Errorf("address %s on %s: %w", local, link.Attrs().Name, err)
	}
	return nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// A token bucket holds 10 ms of the rate, so that the kernel's timer tick does not slow the device down, and at least a
// large packet; packets may wait for 50 ms.
const (
	leastBurst    = 64 << 10 // bytes
	burstsASecond = 100
	queuesASecond = 20
)

// shape limits a device to a speed.
func shape(link netlink.Link, speed fare.Bandwidth) error {
	rate := uint64(speed) / 8
	burst := max(rate/burstsASecond, leastBurst)
	queue := rate/queuesASecond + burst
	if queue > math.MaxUint32 {
		return fmt.Errorf("%s: %s exceeds the range of a tbf qdisc; use no limit", link.Attrs().Name, speed)
	}
	err := netlink.QdiscReplace(&netlink.Tbf{
		QdiscAttrs: netlink.QdiscAttrs{LinkIndex: link.Attrs().Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT},
		Rate:       rate, Buffer: netlink.Xmittime(rate, uint32(burst)), Limit: uint32(queue),
	})
	if err != nil {
		return fmt.Errorf("limit %s to %s: %w", link.Attrs().Name, speed, err)
	}
	return nil
}
