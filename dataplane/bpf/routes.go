package bpf

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/prefixmap"
	"github.com/fared/fared/internal/rtnl"
)

// Gateways through the anchor. No host has them; they make the kernel keep one neighbor entry for all destinations
// instead of one per destination, whose number would evict other entries. RFC 7600 calls the first the IPv4 dummy
// address.
var (
	gateway4 = netip.AddrFrom4([4]byte{192, 0, 0, 8})
	gateway6 = netip.MustParseAddr("fe80::1")
)

// routes holds the host routes to the anchor, which use gateways; package rtnl does not write those.
type routes struct {
	conn     *rtnl.Conn // for dumps and rules
	fd       int
	sequence uint32
	table    uint32
	protocol uint8
	priority uint32  // of rules
	families []uint8 // of rules
	anchor   int     // index of the device
	tx, rx   []byte
	have     *prefixmap.Map[struct{}, netip.Addr] // preferred source by prefix
	mine     map[netip.Prefix]netip.Addr          // replaced even if another program has a route there; nil except during a repair
}

// routeBatch limits one sendmsg: a refusal of each message must fit into the socket's buffer.
const routeBatch = 128

func openRoutes(cfg Config) (_ *routes, err error) {
	r := &routes{
		table: cfg.Table, protocol: cfg.Protocol, priority: cfg.Priority, families: []uint8{unix.AF_INET, unix.AF_INET6},
		rx: make([]byte, 64<<10), have: &prefixmap.Map[struct{}, netip.Addr]{},
	}
	if r.conn, err = rtnl.Dial(); err != nil {
		return nil, fmt.Errorf("bpf: %w", err)
	}
	if r.fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE); err != nil {
		return nil, errors.Join(fmt.Errorf("bpf: netlink: %w", err), r.conn.Close())
	}
	err = errors.Join(
		unix.SetsockoptInt(r.fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1),
		unix.SetsockoptTimeval(r.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 10}),
		unix.Connect(r.fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}),
	)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("bpf: netlink: %w", err), r.close())
	}
	return r, nil
}

// ids returns the netlink port ids of the sockets.
func (r *routes) ids() ([]uint32, error) {
	first, err := r.conn.Port()
	if err != nil {
		return nil, fmt.Errorf("bpf: %w", err)
	}
	name, err := unix.Getsockname(r.fd)
	if err != nil {
		return nil, fmt.Errorf("bpf: netlink: %w", err)
	}
	own, ok := name.(*unix.SockaddrNetlink)
	if !ok {
		return nil, fmt.Errorf("bpf: netlink: a socket of another family: %T", name)
	}
	return []uint32{first, own.Pid}, nil
}

func (r *routes) close() error { return errors.Join(r.conn.Close(), unix.Close(r.fd)) }

// read reads the existing routes. Marked routes that do not lead through the anchor are removed, and counted.
func (r *routes) read() (strange int, err error) {
	have := &prefixmap.Map[struct{}, netip.Addr]{}
	batch := r.conn.Begin()
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		all, err := r.conn.RoutesBy(family, r.table, r.protocol)
		if err != nil {
			return 0, fmt.Errorf("bpf: %w", err)
		}
		for _, route := range all {
			if route.Gateways && route.Device == r.anchor && route.Prefix.IsSingleIP() {
				source, _ := have.Add(struct{}{}, route.Prefix)
				*source = route.Source
			} else {
				batch.DelRoute(route)
				strange++
			}
		}
	}
	r.have = have
	return strange, ignore(r.conn.Do(batch), unix.ESRCH)
}

// ignore joins the errors except for those with one code.
func ignore(all []error, code unix.Errno) error {
	var left []error
	for _, err := range all {
		if err != nil && !errors.Is(err, code) {
			left = append(left, err)
		}
	}
	return errors.Join(left...)
}

// add creates the missing routes with their preferred sources; a source that is not valid is omitted.
func (r *routes) add(want map[netip.Prefix]netip.Addr) error {
	return r.each(want, func(prefix netip.Prefix, source netip.Addr) bool {
		was := r.have.Get(struct{}{}, prefix)
		_, mine := r.mine[prefix]
		switch {
		case was == nil && !mine:
			// Do not replace a route of another program in the table.
			r.message(unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_EXCL, prefix, source)
		case was == nil || *was != source:
			r.message(unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, prefix, source)
		default:
			return false
		}
		return true
	}, func(prefix netip.Prefix, source netip.Addr) {
		entry, _ := r.have.Add(struct{}{}, prefix)
		*entry = source
	})
}

// remove deletes the existing routes among gone.
func (r *routes) remove(gone map[netip.Prefix]netip.Addr) error {
	return r.each(gone, func(prefix netip.Prefix, _ netip.Addr) bool {
		if r.have.Get(struct{}{}, prefix) == nil {
			return false
		}
		r.message(unix.RTM_DELROUTE, 0, prefix, netip.Addr{})
		return true
	}, func(prefix netip.Prefix, _ netip.Addr) { r.have.Delete(struct{}{}, prefix) })
}

// preferred returns the first loopbacks of IPv4 and IPv6 that are addresses of this host.
func (r *routes) preferred(loopbacks []string) (prefer [2]netip.Addr) {
	for i, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		all, err := r.conn.Addresses(family)
		if err != nil {
			continue
		}
		for _, text := range loopbacks {
			p, err := netip.ParsePrefix(text)
			if err == nil && p.Addr().Is6() == (i == 1) && slices.ContainsFunc(all, func(a rtnl.Address) bool { return a.Addr == p.Addr() }) {
				prefer[i] = p.Addr()
				break
			}
		}
	}
	return prefer
}

// each sends the messages that write appends, in batches, and calls done for those that the kernel has executed.
func (r *routes) each(all map[netip.Prefix]netip.Addr, write func(netip.Prefix, netip.Addr) bool, done func(netip.Prefix, netip.Addr)) error {
	batch := make([]netip.Prefix, 0, routeBatch)
	var failed []error
	flush := func() error {
		results, err := r.exchange(len(batch))
		if err != nil {
			return err
		}
		for i, code := range results {
			if code != 0 && code != unix.ESRCH {
				why := ""
				if code == unix.EEXIST {
					why = "; another program has a route to it in this table, use another table"
				}
				failed = append(failed, fmt.Errorf("bpf: route to %v in table %d: %w%s", batch[i], r.table, code, why))
				continue
			}
			done(batch[i], all[batch[i]])
		}
		batch = batch[:0]
		return nil
	}
	for prefix, source := range all {
		if !write(prefix, source) {
			continue
		}
		if batch = append(batch, prefix); len(batch) == routeBatch {
			if err := flush(); err != nil {
				return err
			}
		}
	}
	if err := flush(); err != nil {
		return err
	}
	return errors.Join(failed...)
}

// message appends a request.
func (r *routes) message(kind, flags uint16, prefix netip.Prefix, source netip.Addr) {
	at := len(r.tx)
	r.sequence++
	r.tx = append(r.tx, make([]byte, 16+12)...)
	h := r.tx[at:]
	binary.NativeEndian.PutUint16(h[4:], kind)
	binary.NativeEndian.PutUint16(h[6:], flags|unix.NLM_F_REQUEST)
	binary.NativeEndian.PutUint32(h[8:], r.sequence)
	family, gateway, scope := byte(unix.AF_INET), gateway4, byte(unix.RT_SCOPE_UNIVERSE)
	if prefix.Addr().Is6() {
		family, gateway = unix.AF_INET6, gateway6
	}
	if kind == unix.RTM_DELROUTE {
		scope = unix.RT_SCOPE_NOWHERE // any
	}
	h[16], h[17] = family, byte(prefix.Bits())
	h[21], h[22], h[23] = r.protocol, scope, unix.RTN_UNICAST
	binary.NativeEndian.PutUint32(h[24:], unix.RTNH_F_ONLINK)
	attr := func(kind uint16, value []byte) {
		r.tx = binary.NativeEndian.AppendUint16(r.tx, uint16(4+len(value)))
		r.tx = binary.NativeEndian.AppendUint16(r.tx, kind)
		r.tx = append(r.tx, value...)
	}
	attr(unix.RTA_DST, prefix.Addr().AsSlice())
	attr(unix.RTA_TABLE, binary.NativeEndian.AppendUint32(nil, r.table))
	attr(unix.RTA_OIF, binary.NativeEndian.AppendUint32(nil, uint32(r.anchor)))
	attr(unix.RTA_GATEWAY, gateway.AsSlice())
	if source.IsValid() {
		attr(unix.RTA_PREFSRC, source.AsSlice())
	}
	binary.NativeEndian.PutUint32(r.tx[at:], uint32(len(r.tx)-at))
}

// exchange sends the n messages and returns the kernel's answers. Only the last message requests an acknowledgement;
// refusals are always sent.
func (r *routes) exchange(n int) ([]unix.Errno, error) {
	if n == 0 {
		return nil, nil
	}
	at := 0
	for range n - 1 {
		at += int(binary.NativeEndian.Uint32(r.tx[at:]))
	}
	h := r.tx[at:]
	binary.NativeEndian.PutUint16(h[6:], binary.NativeEndian.Uint16(h[6:])|unix.NLM_F_ACK)
	_, err := unix.Write(r.fd, r.tx)
	r.tx = r.tx[:0]
	if err != nil {
		return nil, fmt.Errorf("bpf: netlink: %w", err)
	}
	results := make([]unix.Errno, n)
	for {
		length, err := unix.Read(r.fd, r.rx)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("bpf: netlink: %w", err)
		}
		for b := r.rx[:length]; len(b) >= 20; {
			size := int(binary.NativeEndian.Uint32(b))
			i := binary.NativeEndian.Uint32(b[8:]) - (r.sequence - uint32(n) + 1)
			if size < 20 || size > len(b) {
				break
			}
			if binary.NativeEndian.Uint16(b[4:]) == unix.NLMSG_ERROR && i < uint32(n) {
				results[i] = unix.Errno(-int32(binary.NativeEndian.Uint32(b[16:])))
				if int(i) == n-1 {
					return results, nil
				}
			}
			b = b[min((size+3)&^3, len(b)):]
		}
	}
}

// port is a steered destination port.
type port struct {
	protocol uint8 // IPPROTO_UDP or IPPROTO_TCP
	number   uint16
}

// portRange is a range of steered destination ports, first and last included.
type portRange struct {
	protocol    uint8
	first, last uint16
}

// rangesOf returns the fewest ranges that have exactly these ports: every packet of the host passes every rule.
func rangesOf(ports []port) (out []portRange) {
	ports = slices.Clone(ports)
	slices.SortFunc(ports, func(a, b port) int {
		return cmp.Or(cmp.Compare(a.protocol, b.protocol), cmp.Compare(a.number, b.number))
	})
	for _, p := range ports {
		if n := len(out) - 1; n >= 0 && out[n].protocol == p.protocol && int(p.number) <= int(out[n].last)+1 {
			out[n].last = p.number
			continue
		}
		out = append(out, portRange{p.protocol, p.number, p.number})
	}
	return out
}

// rules updates the rules of families for ports, and calls differs for each missing or superfluous one. Unmarked rules
// stay.
func (r *routes) rules(ports []port, differs func(format string, args ...any)) error {
	batch := r.conn.Begin()
	var late []rtnl.Rule
	ranges := rangesOf(ports)
	for _, family := range r.families {
		all, err := r.conn.Rules(family)
		if err != nil {
			return fmt.Errorf("bpf: %w", err)
		}
		missing := map[portRange]bool{}
		for _, p := range ranges {
			missing[p] = true
		}
		rule := func(p portRange) rtnl.Rule {
			return rtnl.Rule{
				Family: family, Priority: r.priority, Table: r.table, Protocol: r.protocol,
				IPProto: p.protocol, Dport: [2]uint16{p.first, p.last},
			}
		}
		for _, have := range all {
			p := portRange{have.IPProto, have.Dport[0], have.Dport[1]}
			switch {
			case have.Protocol != r.protocol || have.Table != r.table || have.Foreign:
			case missing[p] && have == rule(p):
				delete(missing, p)
			default:
				differs("an unexpected %v of the agent exists", have)
				late = append(late, have)
			}
		}
		for p := range missing {
			differs("the rule for ports %d to %d to table %d is gone", p.first, p.last, r.table)
			batch.SetRule(rule(p))
		}
	}
	for _, old := range late {
		batch.DelRule(old)
	}
	if err := errors.Join(r.conn.Do(batch)...); err != nil {
		return fmt.Errorf("bpf: %w", err)
	}
	return nil
}

// repair reads the routes of the table and restores the wanted ones.
func (r *routes) repair(f *findings) error {
	before := r.have
	strange, err := r.read()
	if err != nil {
		r.have = before
		return err
	}
	if strange > 0 {
		f.differs("a route of table %d does not lead to the anchor", r.table)
	}
	gone := map[netip.Prefix]netip.Addr{}
	for key, source := range r.have.All() {
		if before.Get(struct{}{}, key.Prefix) == nil {
			f.differs("an unexpected route to %v exists in table %d", key.Prefix, r.table)
			gone[key.Prefix] = *source
		}
	}
	had := make(map[netip.Prefix]netip.Addr, before.Len())
	for key, source := range before.All() {
		if now := r.have.Get(struct{}{}, key.Prefix); now == nil || *now != *source {
			f.differs("the route to %v in table %d is gone or was changed", key.Prefix, r.table)
		}
		had[key.Prefix] = *source
	}
	if err := r.remove(gone); err != nil {
		return err
	}
	r.mine = had // replace even a route that another program added
	defer func() { r.mine = nil }()
	return r.add(had)
}
