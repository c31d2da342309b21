package rtnl

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"
)

const (
	routeHeader = 12 // struct rtmsg
	rtaNexthop  = 30 // RTA_NH_ID
)

// Route is a route by nexthop id, by device, or of a type that needs neither.
type Route struct {
	// Prefix is masked on write; its address determines the family.
	Prefix netip.Prefix
	// Table is the routing table; 0 selects main (254).
	Table uint32
	// Protocol marks the program that created the route (rtm_protocol). DelRoute only deletes routes with this mark,
	// unless it is 0.
	Protocol uint8
	// Metric ranks routes to the same prefix in a table; the lowest wins. For IPv6 the kernel replaces 0 by 1024.
	Metric uint32
	// Nexthop is the id of a nexthop object. DelRoute only deletes a route with this id, unless it is 0.
	Nexthop uint32
	// Device is an interface index; not used with Nexthop.
	Device int
	// Source is the preferred source address for packets of unbound sockets.
	Source netip.Addr
	// Type is the route type; 0 selects RTN_UNICAST.
	Type uint8
	// Scope is the scope of an IPv4 route: 0 is global, RT_SCOPE_LINK is for a route to a device.
	Scope uint8
	// Gateways is set when reading a route that has gateways itself instead of a nexthop id.
	Gateways bool
}

// String describes the object.
func (r Route) String() string {
	return fmt.Sprintf("route %v table %d metric %d nexthop %d", r.Prefix, r.table(), r.Metric, r.Nexthop)
}

func (r Route) table() uint32 {
	if r.Table == 0 {
		return unix.RT_TABLE_MAIN
	}
	return r.Table
}

func (w *writer) route(kind, flags uint16, r Route, through ...Nexthop) {
	family := familyOf(r.Prefix.Addr())
	at := w.begin(kind, flags, family, routeHeader)
	h := w.buf[at+headerSize:]
	h[1] = byte(max(r.Prefix.Bits(), 0))
	if r.table() <= 255 {
		h[4] = byte(r.table())
	}
	h[5], h[6], h[7] = r.Protocol, r.Scope, r.Type
	if kind == unix.RTM_DELROUTE {
		h[6] = unix.RT_SCOPE_NOWHERE // any
	} else if r.Type == 0 {
		h[7] = unix.RTN_UNICAST
	}
	w.addr(unix.RTA_DST, r.Prefix.Masked().Addr())
	w.u32(unix.RTA_TABLE, r.table())
	if r.Metric != 0 {
		w.u32(unix.RTA_PRIORITY, r.Metric)
	}
	if r.Nexthop != 0 {
		w.u32(rtaNexthop, r.Nexthop)
	} else if r.Device != 0 {
		w.u32(unix.RTA_OIF, uint32(r.Device))
	}
	w.addr(unix.RTA_PREFSRC, r.Source)
	w.paths(family, through)
	w.end(at)
}

// paths writes next hops, each a struct rtnexthop with its gateway.
func (w *writer) paths(family uint8, through []Nexthop) {
	if len(through) == 0 {
		return
	}
	all := w.nest(unix.RTA_MULTIPATH)
	for _, n := range through {
		at := len(w.buf)
		w.buf = append(w.buf, 0, 0, 0, 0)
		if n.OnLink {
			w.buf[at+2] = unix.RTNH_F_ONLINK
		}
		w.buf = binary.NativeEndian.AppendUint32(w.buf, uint32(n.Device))
		if of := familyOf(n.Gateway); of == family {
			w.addr(unix.RTA_GATEWAY, n.Gateway)
		} else {
			w.attr(unix.RTA_VIA, append(binary.NativeEndian.AppendUint16(nil, uint16(of)), n.Gateway.AsSlice()...)...)
		}
		binary.NativeEndian.PutUint16(w.buf[at:], uint16(len(w.buf)-at))
	}
	w.endNest(all)
}

// parseRoute parses the body of RTM_NEWROUTE.
func parseRoute(b []byte) (r Route, ok bool) {
	if len(b) < routeHeader {
		return r, false
	}
	r.Table, r.Protocol, r.Scope, r.Type = uint32(b[4]), b[5], b[6], b[7]
	r.Prefix = readPrefix(b[0], nil, b[1])
	for kind, v := range Attributes(b[routeHeader:]) {
		switch kind {
		case unix.RTA_DST:
			r.Prefix = readPrefix(b[0], v, b[1])
		case unix.RTA_TABLE:
			r.Table = readU32(v)
		case unix.RTA_PRIORITY:
			r.Metric = readU32(v)
		case rtaNexthop:
			r.Nexthop = readU32(v)
		case unix.RTA_OIF:
			r.Device = int(readU32(v))
		case unix.RTA_PREFSRC:
			r.Source = readAddr(v)
		case unix.RTA_GATEWAY, unix.RTA_VIA, unix.RTA_MULTIPATH:
			r.Gateways = true
		}
	}
	if r.Nexthop != 0 {
		// The kernel repeats the attributes of the nexthop; they are not part of the route.
		r.Gateways, r.Device = false, 0
	}
	return r, r.Prefix.IsValid()
}

// Routes returns the routes of a family (AF_INET, AF_INET6) in a table, of all programs; table 0 selects all tables.
func (c *Conn) Routes(family uint8, table uint32) ([]Route, error) {
	return c.RoutesBy(family, table, 0)
}

// RoutesBy returns the routes of one protocol; the kernel filters the others.
func (c *Conn) RoutesBy(family uint8, table uint32, protocol uint8) ([]Route, error) {
	var all []Route
	err := c.EachRoute(family, table, protocol, func() { all = all[:0] }, func(r Route) { all = append(all, r) })
	return all, err
}

// EachRoute calls f for what RoutesBy returns. It calls again first, and whenever it begins anew because routes have
// changed meanwhile.
func (c *Conn) EachRoute(family uint8, table uint32, protocol uint8, again func(), f func(Route)) error {
	return c.dumpRoutes(fmt.Sprintf("dump routes of table %d", table), family, table, protocol, again, func(r Route, _ Message) { f(r) })
}

// dumpRoutes calls f for the routes of a family, a table and a protocol; 0 selects all of the latter two. It calls
// again before each attempt.
func (c *Conn) dumpRoutes(what string, family uint8, table uint32, protocol uint8, again func(), f func(Route, Message)) error {
	var w writer
	at := w.begin(unix.RTM_GETROUTE, unix.NLM_F_DUMP, family, routeHeader)
	w.buf[at+headerSize+5] = protocol
	if table != 0 {
		w.u32(unix.RTA_TABLE, table)
	}
	w.end(at)
	err := c.dump(what, w.buf, again, func(m Message) {
		r, ok := parseRoute(m.Body)
		if ok && m.Kind == unix.RTM_NEWROUTE && m.Body[0] == family &&
			(table == 0 || r.Table == table) && (protocol == 0 || r.Protocol == protocol) {
			f(r, m)
		}
	})
	if errors.Is(err, unix.ENOENT) {
		return nil // the table was never used
	}
	return err
}

// Query is a flow to look up.
type Query struct {
	// Source must be an address of this host for IPv4. If it is not valid, the source is unknown and hashed as zeros.
	Source, Destination netip.Addr
	IPProto             uint8
	Sport, Dport        uint16
	// Mark selects rules.
	Mark uint32
}

// Path is the egress of a flow.
type Path struct {
	// Device is an interface index, 0 if the flow does not leave.
	Device uint32
	// Gateway is not valid if the destination is on the link.
	Gateway netip.Addr
	// Errno is the reason why the flow does not leave, e.g. ENETUNREACH; EINVAL for a blackhole.
	Errno unix.Errno
}

// query writes a request for the path of a flow, or for the route that the flow matches.
func (w *writer) query(q Query, route bool) {
	family := familyOf(q.Destination)
	at := w.begin(unix.RTM_GETROUTE, 0, family, routeHeader)
	h := w.buf[at+headerSize:]
	if route {
		flags := uint32(unix.RTM_F_FIB_MATCH)
		if family == unix.AF_INET { // otherwise the kernel answers with the main table; with IPv6 it refuses the flag
			flags |= unix.RTM_F_LOOKUP_TABLE
		}
		binary.NativeEndian.PutUint32(h[8:], flags)
	}
	h[1] = byte(q.Destination.BitLen())
	if q.Source.IsValid() {
		h[2] = byte(q.Source.BitLen())
	}
	w.addr(unix.RTA_DST, q.Destination)
	w.addr(unix.RTA_SRC, q.Source)
	if q.IPProto != 0 {
		w.attr(unix.RTA_IP_PROTO, q.IPProto)
	}
	if q.Sport != 0 {
		w.port(unix.RTA_SPORT, q.Sport)
	}
	if q.Dport != 0 {
		w.port(unix.RTA_DPORT, q.Dport)
	}
	if q.Mark != 0 {
		w.u32(unix.RTA_MARK, q.Mark)
	}
	w.end(at)
}

// parsePath parses the body of the RTM_NEWROUTE that answers a query.
func parsePath(b []byte) (p Path, ok bool) {
	if len(b) < routeHeader {
		return p, false
	}
	if kind := b[7]; kind == unix.RTN_BLACKHOLE || kind == unix.RTN_UNREACHABLE || kind == unix.RTN_PROHIBIT {
		return Path{Errno: unix.EHOSTUNREACH}, true // IPv6 answers with the refusing route
	}
	for kind, v := range Attributes(b[routeHeader:]) {
		switch kind {
		case unix.RTA_OIF:
			p.Device = readU32(v)
		case unix.RTA_GATEWAY:
			p.Gateway = readAddr(v)
		case unix.RTA_VIA: // struct rtvia: a gateway of another family
			if len(v) > 2 {
				p.Gateway = readAddr(v[2:])
			}
		}
	}
	return p, true
}

// Paths queries the kernel for the egress of flows, as it would send them now.
func (c *Conn) Paths(queries []Query) ([]Path, error) {
	paths, err := c.paths(queries)
	for i := range paths {
		// While routes change, an answer for IPv6 may come from a cached route that was released before the kernel read
		// its device (rt6_get_pcpu_route).
		for try := 0; err == nil && paths[i].Device == 0 && paths[i].Errno == 0; try++ {
			var again []Path
			if again, err = c.paths(queries[i : i+1]); err == nil {
				paths[i] = again[0]
			}
			if try == pathTries {
				paths[i].Errno = unix.EHOSTUNREACH
			}
		}
	}
	return paths, err
}

// pathTries is the number of retries of a query.
const pathTries = 3

func (c *Conn) paths(queries []Query) ([]Path, error) {
	paths := make([]Path, len(queries))
	return paths, c.ask(queries, false, func(i int, m Message) {
		if m.Kind == unix.RTM_NEWROUTE {
			paths[i], _ = parsePath(m.Body)
		} else {
			paths[i].Errno, _ = parseError(m)
		}
	})
}

// Match is the route that a flow matches.
type Match struct {
	// Route is valid if Errno is 0.
	Route
	// Errno is the reason why the flow does not leave, see Path. The kernel then does not report the route.
	Errno unix.Errno
}

// Matches queries the kernel for the routes that it selects for flows, by rules, tables, prefixes and metrics, as it
// would send the flows now.
func (c *Conn) Matches(queries []Query) ([]Match, error) {
	matches := make([]Match, len(queries))
	return matches, c.ask(queries, true, func(i int, m Message) {
		if m.Kind == unix.RTM_NEWROUTE {
			matches[i].Route, _ = parseRoute(m.Body)
		} else {
			matches[i].Errno, _ = parseError(m)
		}
	})
}

// ask sends queries and calls f with the number of each and its answer, an RTM_NEWROUTE or an NLMSG_ERROR.
func (c *Conn) ask(queries []Query, route bool, f func(int, Message)) error {
	var w writer
	for first := 0; first < len(queries); {
		w.buf = w.buf[:0]
		n := 0
		base := c.sequence
		for ; n < c.window && first+n < len(queries); n++ {
			at := len(w.buf)
			w.query(queries[first+n], route)
			c.sequence++
			binary.NativeEndian.PutUint32(w.buf[at+8:], c.sequence)
		}
		if err := c.send(w.buf); err != nil {
			return fmt.Errorf("ask for paths: %w", err)
		}
		for left := n; left > 0; {
			err := c.receive(func(m Message) bool {
				i := m.Sequence - base - 1
				if i >= uint32(n) {
					return true
				}
				if m.Kind == unix.RTM_NEWROUTE || m.Kind == unix.NLMSG_ERROR {
					f(first+int(i), m)
					left--
				}
				return true
			})
			if err != nil {
				return fmt.Errorf("ask for paths: %w", err)
			}
		}
		first += n
	}
	return nil
}

// Landing returns the interface indexes of Paths, 0 for a flow that does not leave.
func (c *Conn) Landing(queries []Query) ([]uint32, error) {
	paths, err := c.Paths(queries)
	if err != nil {
		return nil, err
	}
	devices := make([]uint32, len(paths))
	for i := range paths {
		devices[i] = paths[i].Device
	}
	return devices, nil
}

// Hop is a next hop of a route.
type Hop struct {
	Prefix   netip.Prefix
	Table    uint32
	Protocol uint8
	Type     uint8 // RTN_UNICAST etc.
	// Device is an interface index, 0 if the route needs none, as a blackhole.
	Device int
	// Gateway is not valid if the destinations are on the link.
	Gateway netip.Addr
	// Dead is set if the kernel does not use the next hop, because its device is down.
	Dead    bool
	nexthop uint32 // the id of an object whose next hops replace this one
}

// Hops returns the next hops of the routes of a family (AF_INET, AF_INET6) and a protocol in all tables; protocol 0
// selects all. Nexthop ids are resolved: with net.ipv4.nexthop_compat_mode 0 the kernel reports them without devices
// and gateways.
func (c *Conn) Hops(family, protocol uint8) ([]Hop, error) { return c.HopsIn(family, 0, protocol) }

// HopsIn is Hops for one table; table 0 selects all.
func (c *Conn) HopsIn(family uint8, table uint32, protocol uint8) ([]Hop, error) {
	var all []Hop
	err := c.dumpRoutes("dump next hops", family, table, protocol, func() { all = all[:0] }, func(r Route, m Message) {
		h := Hop{Prefix: r.Prefix, Table: r.Table, Protocol: r.Protocol, Type: r.Type, nexthop: r.Nexthop}
		h.Dead = binary.NativeEndian.Uint32(m.Body[8:])&unix.RTNH_F_DEAD != 0
		if r.Nexthop != 0 {
			all = append(all, h)
			return
		}
		all = appendHops(all, h, m.Body[routeHeader:])
	})
	if err != nil || !slices.ContainsFunc(all, func(h Hop) bool { return h.nexthop != 0 }) {
		return all, err
	}
	objects, err := c.Nexthops()
	if err != nil {
		return nil, err
	}
	return resolve(all, objects), nil
}

// appendHops appends the next hops among the attributes of a route, each as a copy of h.
func appendHops(all []Hop, h Hop, attrs []byte) []Hop {
	several := false
	for kind, v := range Attributes(attrs) {
		switch kind {
		case unix.RTA_OIF:
			h.Device = int(readU32(v))
		case unix.RTA_GATEWAY:
			h.Gateway = readAddr(v)
		case unix.RTA_VIA: // struct rtvia: a gateway of another family
			if len(v) > 2 {
				h.Gateway = readAddr(v[2:])
			}
		case unix.RTA_MULTIPATH: // a sequence of struct rtnexthop, each with attributes
			several = true
			const header = 8
			for len(v) >= header {
				size := int(binary.NativeEndian.Uint16(v))
				if size < header || size > len(v) {
					break
				}
				one := h
				one.Device, one.Dead = int(readU32(v[4:])), v[2]&unix.RTNH_F_DEAD != 0
				all = appendHops(all, one, v[header:size])
				v = v[min(align(size), len(v)):]
			}
		}
	}
	if several {
		return all
	}
	return append(all, h)
}

// resolve replaces the hops with a nexthop id by those of the object, or of the members of a group. An object that is
// gone has none.
func resolve(all []Hop, objects []Nexthop) (out []Hop) {
	byID := make(map[uint32]*Nexthop, len(objects))
	for i := range objects {
		byID[objects[i].ID] = &objects[i]
	}
	for _, h := range all {
		object := byID[h.nexthop]
		switch {
		case h.nexthop == 0:
			out = append(out, h)
		case object != nil:
			members := object.Members
			if len(members) == 0 {
				members = []Member{{ID: h.nexthop}}
			}
			for _, m := range members {
				if o := byID[m.ID]; o != nil {
					out = append(out, Hop{h.Prefix, h.Table, h.Protocol, h.Type, o.Device, o.Gateway, o.Dead, 0})
				}
			}
		}
	}
	return out
}
