package linux

import (
	"maps"
	"net/netip"

	"github.com/fared/fared/internal/rtnl"
)

// routeOf returns the route that a setRoute op sets. If it has no source address because a loopback is not an address
// of the host, routeOf logs a warning, once for each loopback.
func (st *state) routeOf(o *op) rtnl.Route {
	r := st.route(o.at, o.id)
	if r.Source = o.source; r.Source.IsValid() {
		return r
	}
	if _, first := st.want.loopbackFor(o.at, &st.have); first.IsValid() && !st.missing[first] {
		st.missing[first] = true
		st.log.Warn("linux data plane: a loopback is not an address of the host; packets of unbound sockets leave "+
			"with the address of a sub-port until the loopback is one", "loopback", first)
	}
	return r
}

// rereadAddresses reads the addresses of the host.
func (rd *reader) rereadAddresses() error {
	addresses := map[netip.Addr]bool{}
	for _, f := range families(rd.state.ipv6) {
		all, err := rd.kernel.conn.Addresses(f)
		if err != nil {
			return err
		}
		for _, a := range all {
			addresses[a.Addr] = addresses[a.Addr] || a.Usable
		}
	}
	rd.state.have.addresses = addresses
	maps.DeleteFunc(rd.state.missing, func(a netip.Addr, _ bool) bool { return addresses[a] && !rd.state.have.unfit[a] })
	return nil
}

// concernsAddress reports whether an added, removed or changed address is a loopback of a source group.
func (o *others) concernsAddress(e rtnl.ObjectEvent) bool {
	if !o.state.want.isLoopback(e.Address.Addr) || !e.Gone && e.Address.Usable == o.state.have.addresses[e.Address.Addr] && !o.state.have.unfit[e.Address.Addr] {
		return false
	}
	delete(o.state.have.unfit, e.Address.Addr)
	return true
}

// staleSources marks the routes whose source address is not the preferred one.
func (st *state) staleSources() {
	for at, r := range st.have.routes.all() {
		if _, ok := st.want.programmedAt(at); ok && r.source != st.want.preferred(at, &st.have) {
			st.staleRoutes[at] = true
		}
	}
	st.staleAnchors()
}
