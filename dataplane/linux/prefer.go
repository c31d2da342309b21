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
func (p *Plane) preferred(at routeKey) netip.Addr {
	address, _ := p.loopbackFor(at)
	return address
}

// loopbackFor returns the preferred address and the first candidate loopback, whether the kernel accepts that one or not.
func (p *Plane) loopbackFor(at routeKey) (address, first netip.Addr) {
	name, _, ok := p.claimant(at)
	if !ok {
		return address, first
	}
	for _, l := range p.sourceOf(name).loopbacks {
		a := l.Addr()
		if a.Is4() != at.prefix.Addr().Is4() {
			continue
		}
		if !first.IsValid() {
			first = a
		}
		if p.addresses[a] && !p.unfit[a] {
			return a, first
		}
	}
	return netip.Addr{}, first
}

// wantedRoute returns a route as it has to be in the kernel. It warns once about a loopback that is not an address of the
// host.
func (p *Plane) wantedRoute(at routeKey, id uint32) rtnl.Route {
	r := p.route(at, id)
	var first netip.Addr
	if r.Source, first = p.loopbackFor(at); !r.Source.IsValid() && first.IsValid() && !p.missing[first] {
		p.missing[first] = true
		p.log.Warn("linux data plane: a loopback is not an address of the host; packets of unbound sockets leave "+
			"with the address of a sub-port until the loopback is one", "loopback", first)
	}
	return r
}

// rereadAddresses reads the addresses of the host.
func (p *Plane) rereadAddresses() error {
	addresses := map[netip.Addr]bool{}
	for _, f := range families(p.ipv6) {
		all, err := p.conn.Addresses(f)
		if err != nil {
			return err
		}
		for _, a := range all {
			addresses[a.Addr] = addresses[a.Addr] || a.Usable
		}
	}
	p.addresses = addresses
	maps.DeleteFunc(p.missing, func(a netip.Addr, _ bool) bool { return addresses[a] && !p.unfit[a] })
	return nil
}

// concernsAddress reports whether an added, removed or changed address is a loopback of a source group.
func (p *Plane) concernsAddress(e rtnl.ObjectEvent) bool {
	if !p.isLoopback(e.Address.Addr) || !e.Gone && e.Address.Usable == p.addresses[e.Address.Addr] && !p.unfit[e.Address.Addr] {
		return false
	}
	delete(p.unfit, e.Address.Addr)
	return true
}

func (p *Plane) isLoopback(a netip.Addr) bool {
	for _, s := range p.sources {
		for _, l := range s.loopbacks {
			if l.Addr() == a {
				return true
			}
		}
	}
	return false
}

// staleSources marks the routes whose source address is not the preferred one.
func (p *Plane) staleSources() {
	for at, r := range p.routes {
		if _, ok := p.programmedAt(at); ok && r.source != p.preferred(at) {
			p.staleRoutes[at] = true
		}
	}
}
