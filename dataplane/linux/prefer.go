package linux

import (
	"maps"
	"net/netip"

	"github.com/fared/fared/internal/rtnl"
)

// routeState is the state of a route in the kernel: the id of its nexthop group and the source address of packets from
// unbound sockets (RTA_PREFSRC), not valid if the route has none.
type routeState struct {
	nexthop uint32
	source  netip.Addr
}

// preferred returns the source address for a route: the first loopback of its family, in the source group of its
// destination, that the kernel accepts. It is not valid for a route that drops packets, and if the host has no such
// loopback. Without a source address the kernel chooses the address of a sub-port, to which other servers may have no
// route.
func (d *Driver) preferred(at routeKey) netip.Addr {
	address, _ := d.loopbackFor(at)
	return address
}

// loopbackFor returns the preferred address and the first candidate loopback, whether the kernel accepts that one or not.
func (d *Driver) loopbackFor(at routeKey) (address, first netip.Addr) {
	name, _, ok := d.claimant(at)
	if !ok {
		return address, first
	}
	for _, l := range d.sourceOf(name).loopbacks {
		a := l.Addr()
		if a.Is4() != at.prefix.Addr().Is4() {
			continue
		}
		if !first.IsValid() {
			first = a
		}
		if d.addresses[a] && !d.unfit[a] {
			return a, first
		}
	}
	return netip.Addr{}, first
}

// wantedRoute returns a route as it has to be in the kernel. It warns once about a loopback that is not an address of the
// host.
func (d *Driver) wantedRoute(at routeKey, id uint32) rtnl.Route {
	r := d.route(at, id)
	var first netip.Addr
	if r.Source, first = d.loopbackFor(at); !r.Source.IsValid() && first.IsValid() && !d.missing[first] {
		d.missing[first] = true
		d.log.Warn("linux data plane: a loopback is not an address of the host; packets of unbound sockets leave "+
			"with the address of a sub-port until the loopback is one", "loopback", first)
	}
	return r
}

// rereadAddresses reads the addresses of the host.
func (d *Driver) rereadAddresses() error {
	addresses := map[netip.Addr]bool{}
	for _, f := range families(d.ipv6) {
		all, err := d.conn.Addresses(f)
		if err != nil {
			return err
		}
		for _, a := range all {
			addresses[a.Addr] = addresses[a.Addr] || a.Usable
		}
	}
	d.addresses = addresses
	maps.DeleteFunc(d.missing, func(a netip.Addr, _ bool) bool { return addresses[a] && !d.unfit[a] })
	return nil
}

// concernsAddress reports whether an added, removed or changed address is a loopback of a source group.
func (d *Driver) concernsAddress(e rtnl.ObjectEvent) bool {
	if !d.isLoopback(e.Address.Addr) || !e.Gone && e.Address.Usable == d.addresses[e.Address.Addr] && !d.unfit[e.Address.Addr] {
		return false
	}
	delete(d.unfit, e.Address.Addr)
	return true
}

func (d *Driver) isLoopback(a netip.Addr) bool {
	for _, s := range d.sources {
		for _, l := range s.loopbacks {
			if l.Addr() == a {
				return true
			}
		}
	}
	return false
}

// staleSources marks the routes whose source address is not the preferred one.
func (d *Driver) staleSources() {
	for at, r := range d.routes {
		if _, ok := d.programmedAt(at); ok && r.source != d.preferred(at) {
			d.staleRoutes[at] = true
		}
	}
}
