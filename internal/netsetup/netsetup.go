// Package netsetup gives the devices of a configuration their addresses, where nobody else does: in containers and labs.
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

// Apply sets up the network namespace of the calling thread: loopbacks on lo, and on each sub-port's device the local address
// of its sessions, point to point toward the peer; all of them up. With limit, a sub-port whose speed is configured sends no
// faster than that, by a tbf qdisc. What is there already stays. The error joins everything that is wrong; what could be done is
// done.
func Apply(c *config.Config, limit bool) error {
	var errs []error
	note := func(path string, err error) {
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", path, err))
		}
	}
	lo, err := up("lo")
	note("lo", err)
	for i, l := range c.Loopbacks {
		if lo != nil {
			note(fmt.Sprintf("loopbacks[%d]", i), add(lo, l, netip.Addr{}))
		}
	}
	for p := range c.Planes {
		for k := range c.Planes[p].SubPorts {
			note(fmt.Sprintf("planes[%d].sub_ports[%d]", p, k), subPort(&c.Planes[p].SubPorts[k], limit))
		}
	}
	return errors.Join(errs...)
}

func subPort(sp *config.SubPort, limit bool) error {
	if sp.Netns != "" {
		return fmt.Errorf("%s is in the network namespace %s; only those of this one can be set up", sp.Device, sp.Netns)
	}
	link, err := up(sp.Device)
	if err != nil {
		return err
	}
	var errs []error
	for i, s := range sp.Sessions {
		if s.Unnumbered || s.Peer.IsLinkLocalUnicast() {
			continue // the kernel's own link-local address will do
		}
		if !s.Local.IsValid() {
			errs = append(errs, fmt.Errorf("sessions[%d] has no local address: write one", i))
			continue
		}
		errs = append(errs, add(link, netip.PrefixFrom(s.Local, s.Local.BitLen()), s.Peer))
	}
	if limit && sp.Speed > 0 {
		errs = append(errs, shape(link, sp.Speed))
	}
	return errors.Join(errs...)
}

// up returns a device, set up.
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

// add gives a device an address. One with a peer has a host route to it (ip address add LOCAL peer PEER), whatever the prefix is
// that the other end has configured.
func add(link netlink.Link, local netip.Prefix, peer netip.Addr) error {
	a := &netlink.Addr{IPNet: ipNet(local)}
	if local.Addr().Is6() {
		// Nobody else has an address of the fabric's plan: it need not wait a second for duplicate address detection (RFC 4862).
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

// A token bucket holds 10 ms of the rate, so that the kernel's timer tick does not slow the device down, and at least a large
// packet; 50 ms wait for it.
const (
	leastBurst    = 64 << 10 // bytes
	burstsASecond = 100
	queuesASecond = 20
)

// shape has a device send no faster than a speed.
func shape(link netlink.Link, speed fare.Bandwidth) error {
	rate := uint64(speed) / 8
	burst := max(rate/burstsASecond, leastBurst)
	queue := rate/queuesASecond + burst
	if queue > math.MaxUint32 {
		return fmt.Errorf("%s: %s is more than a tbf qdisc can count; leave it without a limit", link.Attrs().Name, speed)
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
