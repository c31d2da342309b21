package bpf

import (
	"errors"
	"fmt"
	"net"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/hostcheck"
)

// AnchorAlias is the alias that marks a device as the agent's anchor.
const AnchorAlias = "fared dataplane anchor"

// ensureAnchor creates the anchor, or adopts the existing one if it is marked, and sets it up. It has no addresses and
// never resolves any, because dummy and ifb devices do not.
func ensureAnchor(h *netlink.Handle, name string) (index int, err error) {
	device, err := h.LinkByName(name)
	var none netlink.LinkNotFoundError
	switch {
	case errors.As(err, &none):
		if device, err = makeAnchor(h, name); err != nil {
			return 0, err
		}
	case err != nil:
		return 0, fmt.Errorf("bpf: anchor %s: %w", name, err)
	case device.Attrs().Alias != AnchorAlias:
		return 0, fmt.Errorf("bpf: device %s exists and belongs to another program (its alias is %q); use another name for the anchor", name, device.Attrs().Alias)
	}
	index = device.Attrs().Index
	if device.Attrs().Flags&net.FlagUp == 0 {
		// Without a link-local address the anchor sends nothing. Errors are ignored, because IPv6 may be disabled.
		_ = h.LinkSetIP6AddrGenMode(device, nl.IN6_ADDR_GEN_MODE_NONE)
		enableIPv6(name)
		if err := h.LinkSetUp(device); err != nil {
			return 0, fmt.Errorf("bpf: set anchor %s up: %w", name, err)
		}
		// Remove the kernel's own multicast route; no packets are sent there.
		_ = h.RouteDel(&netlink.Route{
			LinkIndex: index, Table: unix.RT_TABLE_LOCAL, Type: unix.RTN_MULTICAST,
			Dst: &net.IPNet{IP: net.ParseIP("ff00::"), Mask: net.CIDRMask(8, 128)},
		})
	}
	return index, nil
}

func makeAnchor(h *netlink.Handle, name string) (netlink.Link, error) {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.Alias = name, AnchorAlias
	dummy := h.LinkAdd(&netlink.Dummy{LinkAttrs: attrs})
	if dummy != nil {
		if err := h.LinkAdd(&netlink.Ifb{LinkAttrs: attrs}); err != nil {
			return nil, fmt.Errorf("bpf: make anchor %s: the kernel has neither dummy (%w) nor ifb devices (%w)", name, dummy, err)
		}
	}
	device, err := h.LinkByName(name)
	if err == nil && device.Attrs().Alias != AnchorAlias {
		err = h.LinkSetAlias(device, AnchorAlias)
	}
	if err != nil {
		return nil, fmt.Errorf("bpf: anchor %s: %w", name, err)
	}
	return device, nil
}

// enableIPv6 undoes a default of the namespace that would prevent IPv6 routes through the anchor.
func enableIPv6(device string) {
	name := "net/ipv6/conf/" + device + "/disable_ipv6"
	if off, err := hostcheck.ReadSysctl(name); err == nil && off == 1 {
		_ = hostcheck.WriteSysctl(name, 0) // if it fails, setting routes returns an error
	}
}

// removeAnchor deletes the anchor if it is marked, and with it all routes through it.
func removeAnchor(h *netlink.Handle, name string) error {
	device, err := h.LinkByName(name)
	var none netlink.LinkNotFoundError
	if errors.As(err, &none) || err == nil && device.Attrs().Alias != AnchorAlias {
		return nil
	}
	if err == nil {
		err = h.LinkDel(device)
	}
	if err != nil {
		return fmt.Errorf("bpf: remove anchor %s: %w", name, err)
	}
	return nil
}
