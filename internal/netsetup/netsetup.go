// Package netsetup gives the devices of a configuration their addresses, where nobody else does: in containers and labs.
package netsetup

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"

	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/fare"
)

// Apply sets up the network namespace of the calling thread: loopbacks on lo, and on each sub-port's device the local address
// of its sessions, point to point toward the peer; all of them up. With a divisor above 0, sub-ports whose speed is configured
// send at most that part of it, by a tbf qdisc. What is there already stays. The error joins everything that is wrong; what
// could be done is done.
func Apply(c *config.Config, divisor uint64) error {
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
			note(fmt.Sprintf("planes[%d].sub_ports[%d]", p, k), subPort(&c.Planes[p].SubPorts[k], divisor))
		}
	}
	return errors.Join(errs...)
}

func subPort(sp *config.SubPort, divisor uint64) error {
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
	if divisor > 0 && sp.Speed > 0 {
		errs = append(errs, limit(link, sp.Speed, divisor))
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

// What a token bucket holds, at least a large packet, and how many bytes wait for it.
const (
	leastBurst = 64 << 10
	burstParts = 100 // of a second
	queueParts = 20
)

// limit has a device send at most a part of a speed.
func limit(link netlink.Link, speed fare.Bandwidth, divisor uint64) error {
	rate := uint64(speed) / 8 / divisor
	if rate == 0 {
		return fmt.Errorf("%s: %s divided by %d is nothing", link.Attrs().Name, speed, divisor)
	}
	burst := max(rate/burstParts, leastBurst)
	err := netlink.QdiscReplace(&netlink.Tbf{
		QdiscAttrs: netlink.QdiscAttrs{LinkIndex: link.Attrs().Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT},
		Rate:       rate, Buffer: uint32(burst), Limit: uint32(rate/queueParts + burst),
	})
	if err != nil {
		return fmt.Errorf("rate of %s: %w", link.Attrs().Name, err)
	}
	return nil
}
