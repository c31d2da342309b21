package roce

import (
	"cmp"
	"fmt"
	"net/netip"

	"github.com/fared/fared/transport/internal/wire"
)

// defaultMTU is the path MTU in bytes where the routes are not known: the highest that an Ethernet of 1,500 bytes
// carries.
const defaultMTU = 1024

// overhead returns the bytes that a packet with the longest headers adds to its payload: IP, UDP, BTH, RETH, ImmDt and
// ICRC.
func overhead(a netip.Addr) int {
	ip := 20
	if a.Is6() {
		ip = 40
	}
	return ip + 8 + bthSize + rethSize + immSize + icrcSize
}

// pathMTU returns the path MTU toward a peer: the highest that Config.MTU and the route allow.
func (c *Core) pathMTU(remote netip.Addr) (int, error) {
	routes, ok := c.out.(wire.Routes)
	carried, err := 0, error(nil)
	if ok {
		carried, err = routes.PathMTU(remote)
	}
	if !ok || err != nil { // without a route yet, a later one may have any MTU
		return cmp.Or(c.cfg.MTU, defaultMTU), nil
	}
	room, most := carried-overhead(remote), cmp.Or(c.cfg.MTU, mtus[0])
	for _, mtu := range mtus {
		if mtu <= min(room, most) {
			if mtu < c.cfg.MTU {
				c.mtuLimited++
			}
			return mtu, nil
		}
	}
	return 0, fmt.Errorf("roce: the route from %v to %v carries IP packets of %d bytes, and the smallest path MTU of RoCEv2 needs %d",
		c.address, remote, carried, mtus[len(mtus)-1]+overhead(remote))
}

// shrunk explains a path whose packets no longer fit its route; "" if they fit.
func (q *queuePair) shrunk() string {
	routes, ok := q.core.out.(wire.Routes)
	if !ok {
		return ""
	}
	carried, err := routes.PathMTU(q.remote)
	if err != nil || q.mtu+overhead(q.remote) <= carried {
		return ""
	}
	return fmt.Sprintf("; the route carries IP packets of %d bytes, and those of the path MTU %d have up to %d", carried, q.mtu, q.mtu+overhead(q.remote))
}
