package linux

import (
	"maps"
	"net/netip"

	"github.com/fared/fared/internal/rtnl"
)

// routeOf returns the route that a setRoute op sets. If it has no source address because a loopback is not an address of the
// host, routeOf logs a warning, once for each loopback.
func (d *Driver) routeOf(o *op) rtnl.Route {
	r := d.route(o.at, o.id)
	if r.Source = o.source; r.Source.IsValid() {
		return r
	}
	if _, first := d.want.loopbackFor(o.at, &d.have); first.IsValid() && !d.missing[first] {
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
	d.have.addresses = addresses
	maps.DeleteFunc(d.missing, func(a netip.Addr, _ bool) bool { return addresses[a] && !d.have.unfit[a] })
	return nil
}

// concernsAddress reports whether an added, removed or changed address is a loopback of a source group.
func (d *Driver) concernsAddress(e rtnl.ObjectEvent) bool {
	if !d.want.isLoopback(e.Address.Addr) || !e.Gone && e.Address.Usable == d.have.addresses[e.Address.Addr] && !d.have.unfit[e.Address.Addr] {
		return false
	}
	delete(d.have.unfit, e.Address.Addr)
	return true
}

// staleSources marks the routes whose source address is not the preferred one.
func (d *Driver) staleSources() {
	for at, r := range d.have.routes {
		if _, ok := d.want.programmedAt(at); ok && r.source != d.want.preferred(at, &d.have) {
			d.staleRoutes[at] = true
		}
	}
}
