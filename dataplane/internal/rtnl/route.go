package rtnl

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

const (
	routeHeader = 12 // struct rtmsg
	rtaNexthop  = 30 // RTA_NH_ID
)

// Route is a route by nexthop id, by device, or of a type that needs neither.
type Route struct {
	// Prefix is masked; its address says the family.
	Prefix netip.Prefix
	// Table, 0: main (254).
	Table uint32
	// Protocol marks who made it (rtm_protocol). DelRoute removes only routes with this mark, unless it is 0.
	Protocol uint8
	// Metric of several routes to one prefix in a table, the lowest wins. 0: for IPv6 the kernel makes it 1024.
	Metric uint32
	// Nexthop is the id of a nexthop object. DelRoute removes only a route with this id, unless it is 0.
	Nexthop uint32
	// Device is an interface index; not with Nexthop.
	Device int
	// Source is the preferred source address of what is sent without one.
	Source netip.Addr
	// Type, 0: RTN_UNICAST.
	Type uint8
	// Scope of an IPv4 route: 0 is global; RT_SCOPE_LINK for a route to a device.
	Scope uint8
	// Gateways is set on what was read and has gateways of its own: a route not by nexthop id.
	Gateways bool
}

// String names the object.
func (r Route) String() string {
	return fmt.Sprintf("route %v table %d metric %d nexthop %d", r.Prefix, r.table(), r.Metric, r.Nexthop)
}

func (r Route) table() uint32 {
	if r.Table == 0 {
		return unix.RT_TABLE_MAIN
	}
	return r.Table
}

func (w *writer) route(kind, flags uint16, r Route) {
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
	w.end(at)
}

// parseRoute reads the body of RTM_NEWROUTE.
func parseRoute(b []byte) (r Route, ok bool) {
	if len(b) < routeHeader {
		return r, false
	}
	r.Table, r.Protocol, r.Scope, r.Type = uint32(b[4]), b[5], b[6], b[7]
	r.Prefix = readPrefix(b[0], nil, b[1])
	eachAttr(b[routeHeader:], func(kind uint16, v []byte) {
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
	})
	if r.Nexthop != 0 {
		// The kernel repeats what the nexthop is; it is not the route's own.
		r.Gateways, r.Device = false, 0
	}
	return r, r.Prefix.IsValid()
}

// Routes returns the routes of a family (AF_INET, AF_INET6) in a table, whoever made them; 0: of all tables.
func (c *Conn) Routes(family uint8, table uint32) ([]Route, error) {
	return c.RoutesBy(family, table, 0)
}

// RoutesBy is Routes of one protocol; the kernel leaves the others out.
func (c *Conn) RoutesBy(family uint8, table uint32, protocol uint8) ([]Route, error) {
	var w writer
	at := w.begin(unix.RTM_GETROUTE, unix.NLM_F_DUMP, family, routeHeader)
	w.buf[at+headerSize+5] = protocol
	if table != 0 {
		w.u32(unix.RTA_TABLE, table)
	}
	w.end(at)
	var all []Route
	err := c.dump(fmt.Sprintf("dump routes of table %d", table), w.buf, func() { all = all[:0] }, func(m message) {
		r, ok := parseRoute(m.body)
		if ok && m.kind == unix.RTM_NEWROUTE && m.body[0] == family &&
			(table == 0 || r.Table == table) && (protocol == 0 || r.Protocol == protocol) {
			all = append(all, r)
		}
	})
	if errors.Is(err, unix.ENOENT) {
		return nil, nil // the table was never used
	}
	return all, err
}

// Query is a flow.
type Query struct {
	// Source must be an address of this host for IPv4; not valid: not known, which hashes as all zeros.
	Source, Destination netip.Addr
	IPProto             uint8
	Sport, Dport        uint16
	// Mark selects rules.
	Mark uint32
}

// Path is where a flow leaves.
type Path struct {
	// Device is an interface index, 0 when the flow does not leave.
	Device uint32
	// Gateway is not valid when the destination is on the link.
	Gateway netip.Addr
	// Errno is why the flow does not leave, e.g. ENETUNREACH; a blackhole says EINVAL.
	Errno unix.Errno
}

func (w *writer) query(q Query) {
	family := familyOf(q.Destination)
	at := w.begin(unix.RTM_GETROUTE, 0, family, routeHeader)
	h := w.buf[at+headerSize:]
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

// parsePath reads the body of the RTM_NEWROUTE that answers a query.
func parsePath(b []byte) (p Path, ok bool) {
	if len(b) < routeHeader {
		return p, false
	}
	if kind := b[7]; kind == unix.RTN_BLACKHOLE || kind == unix.RTN_UNREACHABLE || kind == unix.RTN_PROHIBIT {
		return Path{Errno: unix.EHOSTUNREACH}, true // IPv6 answers with the route that refuses
	}
	eachAttr(b[routeHeader:], func(kind uint16, v []byte) {
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
	})
	return p, true
}

// Paths asks the kernel where flows leave, as it would send them now.
func (c *Conn) Paths(queries []Query) ([]Path, error) {
	paths, err := c.paths(queries)
	for i := range paths {
		// While routes change, an answer for IPv6 may be from a cached route that was thrown away before the kernel came to
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

// pathTries is how often a question is asked again.
const pathTries = 3

func (c *Conn) paths(queries []Query) ([]Path, error) {
	paths := make([]Path, len(queries))
	var w writer
	for first := 0; first < len(queries); {
		w.buf = w.buf[:0]
		n := 0
		base := c.sequence
		for ; n < c.window && first+n < len(queries); n++ {
			at := len(w.buf)
			w.query(queries[first+n])
			c.sequence++
			binary.NativeEndian.PutUint32(w.buf[at+8:], c.sequence)
		}
		if err := c.send(w.buf); err != nil {
			return nil, fmt.Errorf("ask for paths: %w", err)
		}
		for left := n; left > 0; {
			err := c.receive(func(m message) bool {
				i := m.sequence - base - 1
				if i >= uint32(n) {
					return true
				}
				p := &paths[first+int(i)]
				switch m.kind {
				case unix.RTM_NEWROUTE:
					*p, _ = parsePath(m.body)
				case unix.NLMSG_ERROR:
					p.Errno, _ = parseError(m)
				default:
					return true
				}
				left--
				return true
			})
			if err != nil {
				return nil, fmt.Errorf("ask for paths: %w", err)
			}
		}
		first += n
	}
	return paths, nil
}

// Landing is Paths reduced to interface indexes, 0 for a flow that does not leave.
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
