package discover

import (
	"net/netip"
	"slices"

	"github.com/fared/fared/fare"
)

// Machine is the state of a machine, as far as a configuration depends on it.
type Machine struct {
	// Host is the host name, for the header of the file.
	Host string `yaml:"host"`
	// Loopbacks are the host addresses on lo outside 127.0.0.0/8 and ::1, in the kernel's order, except those of
	// Virtual.
	Loopbacks []netip.Prefix `yaml:"loopbacks"`
	// Virtual are the host addresses on lo that bear the marks of a virtual IP address.
	Virtual []Virtual `yaml:"virtual"`
	// Netdevs are all devices, in any order.
	Netdevs []Netdev `yaml:"netdevs"`
	// Unheard explains why routers could not advertise themselves to this process; empty if they could.
	Unheard string `yaml:"unheard"`
}

// Virtual is an address on lo that a program has probably added to serve a virtual IP address, such as kube-vip, which
// sets host scope and a preferred lifetime of 0.
type Virtual struct {
	Prefix netip.Prefix `yaml:"prefix"`
	// Mark is the difference from an address that an administrator adds, such as "its scope is host".
	Mark string `yaml:"mark"`
}

// Netdev is a device of the machine.
type Netdev struct {
	// Name is the name of the device, or the alternative name by which the options name it.
	Name string `yaml:"name"`
	// Kind is "device" for a physical device, else the kernel's name of the kind (IFLA_INFO_KIND).
	Kind string `yaml:"kind"`
	// PCI, MAC and ByRDMA are the matches (devmatch) that select this device alone; empty where there is none.
	PCI    string `yaml:"pci"`
	MAC    string `yaml:"mac"`
	ByRDMA string `yaml:"by_rdma"`
	// Ethernet is false for other link layers, such as InfiniBand.
	Ethernet bool `yaml:"ethernet"`
	// Up reports whether the device is administratively up.
	Up bool `yaml:"up"`
	// Carrier reports whether packets can leave.
	Carrier bool `yaml:"carrier"`
	// Master is the bridge, bond or VRF of which the device is a member; empty means none.
	Master string `yaml:"master"`
	// Default reports whether a default route that no router advertisement has set leads to the device.
	Default bool `yaml:"default"`
	// Speed is the device's speed, 0 if it is unknown, and SpeedSource its source: tbf, ethtool or pcie.
	Speed       fare.Bandwidth `yaml:"speed"`
	SpeedSource string         `yaml:"speed_source"`
	// Addresses are the addresses of the device except link-local ones.
	Addresses []Address `yaml:"addresses"`
	// Gateways are the gateways of routes over the device, in any order.
	Gateways []netip.Addr `yaml:"gateways"`
	// Neighbors are the hosts on the device whose link-layer addresses the kernel knows; of IPv6 hosts the routers
	// alone (RFC 4861, Section 4.4).
	Neighbors []netip.Addr `yaml:"neighbors"`
	// Router is true if a router advertises itself on the device (RFC 4861, Section 4.2).
	Router bool `yaml:"router"`
	// Neighbor is the far end by LLDP; its zero value means unknown.
	Neighbor Neighbor `yaml:"neighbor"`
	// RDMA is the port of an RDMA device that serves the netdev, such as mlx5_0/1; empty means none.
	RDMA string `yaml:"rdma"`
}

// Address is an address of a device.
type Address struct {
	Prefix netip.Prefix `yaml:"prefix"`
	// Peer is the far end of a point-to-point address, as in `ip address add LOCAL peer PEER`; the zero value means
	// none.
	Peer netip.Addr `yaml:"peer"`
}

// Neighbor is the far end of a cable by LLDP.
type Neighbor struct {
	System string `yaml:"system"`
	Port   string `yaml:"port"`
}

// peer returns the only other host on the subnet of the address: the other address of a /31 (RFC 3021) or /127 (RFC
// 6164), or the other host of a /30 or /126. It returns the zero Addr if the subnet has more hosts, or if the address
// is not one of its hosts.
func (a Address) peer() netip.Addr {
	if a.Peer.IsValid() {
		return a.Peer
	}
	local, spare := a.Prefix.Addr(), a.Prefix.Addr().BitLen()-a.Prefix.Bits()
	last := local.AsSlice()
	n := len(last) - 1
	switch position := last[n] & 3; {
	case spare == 1:
		last[n] ^= 1
	case spare == 2 && (position == 1 || position == 2):
		last[n] ^= 3
	default:
		return netip.Addr{}
	}
	peer, _ := netip.AddrFromSlice(last)
	return peer
}

// ends are the two addresses of a numbered session.
type ends struct {
	local, peer netip.Addr
	shared      bool   // their subnet has more than two hosts
	guess       string // the origin of peer if it is a guess, after "the leaf is"
}

// links returns the addresses of the device with their leaf: at most one pair of each family, IPv4 first. The leaf is
// that of the operator, else the only other host of a subnet. Without such a leaf in either family it is the only
// gateway in a larger subnet, else the only neighbor there.
func (d *Netdev) links(o *Options) []ends {
	known := d.find(
		func(a Address) ends { return d.only(a, o.peers(d.Name), "") },
		func(a Address) ends { return ends{local: a.Prefix.Addr(), peer: a.peer()} })
	if len(known) > 0 {
		return known
	}
	return d.find(
		func(a Address) ends { return d.only(a, d.Gateways, "the gateway of a route over the device") },
		func(a Address) ends {
			return d.only(a, d.Neighbors, "the only neighbor that the kernel knows in the subnet")
		})
}

// find returns for each family, IPv4 first, the result of the first function that has a peer for an address of the
// device.
func (d *Netdev) find(leaves ...func(Address) ends) (out []ends) {
	for _, v4 := range []bool{true, false} {
		for _, leaf := range leaves {
			var found ends
			for _, a := range d.Addresses {
				if a.Prefix.Addr().Is4() == v4 && !found.peer.IsValid() {
					found = leaf(a)
				}
			}
			if found.peer.IsValid() {
				out = append(out, found)
				break
			}
		}
	}
	return out
}

// only returns the address with the only one of some hosts that is another host of its subnet, or is its peer.
func (d *Netdev) only(a Address, hosts []netip.Addr, guess string) (found ends) {
	for _, h := range hosts {
		own := slices.ContainsFunc(d.Addresses, func(a Address) bool { return a.Prefix.Addr() == h })
		switch {
		case own || h == found.peer || h != a.peer() && !a.Prefix.Contains(h):
		case found.peer.IsValid():
			return ends{}
		default:
			found = ends{a.Prefix.Addr(), h, !a.peer().IsValid(), guess}
		}
	}
	return found
}

// unfit returns why the device cannot be a sub-port, or "". Quiet is true for devices that never are sub-ports, such as
// bridges. A device that the operator names is judged by its addresses alone.
func (d *Netdev) unfit(o *Options) (why string, quiet bool) {
	named := len(o.Devices) > 0 || len(o.peers(d.Name)) > 0
	switch {
	case d.Kind == "loopback":
		return "it is the loopback device", true
	case !named && d.Kind != "device" && d.Kind != "veth":
		return "its kind is " + d.Kind, true
	case !named && d.Master != "":
		return "it is a member of " + d.Master, false
	case !named && d.Default:
		return "the default route leads to it", false
	case !named && !d.Ethernet:
		return "its link layer is not Ethernet", false
	case !d.Up:
		return "it is down: ip link set DEVICE up", false
	}
	if len(d.links(o)) > 0 {
		return "", false
	}
	for _, a := range d.Addresses {
		if !a.Prefix.IsSingleIP() {
			return "its subnet has more than two hosts, and no gateway or single neighbor in it shows the leaf: use --peer DEVICE=ADDRESS", false
		}
	}
	return "", false
}

// Silent returns the devices whose leaf can be found only by its router advertisements: possible sub-ports without the
// address of a peer.
func (m *Machine) Silent(o *Options) (names []string) {
	for i := range m.Netdevs {
		d := &m.Netdevs[i]
		if !o.considers(d.Name) {
			continue
		}
		if why, _ := d.unfit(o); why == "" && len(d.links(o)) == 0 && d.Carrier {
			names = append(names, d.Name)
		}
	}
	return names
}
