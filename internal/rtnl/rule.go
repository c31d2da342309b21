package rtnl

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

const (
	ruleHeader  = 12 // struct fib_rule_hdr
	actionTable = 1  // FR_ACT_TO_TBL
	// Actions of rules that refuse packets: FR_ACT_BLACKHOLE, FR_ACT_UNREACHABLE, FR_ACT_PROHIBIT.
	firstRefusal, lastRefusal = 6, 8
)

// Rule directs matching packets to a table. Zero fields match everything.
type Rule struct {
	// Family is AF_INET or AF_INET6.
	Family uint8
	// Priority is the order of evaluation; the lowest is first.
	Priority, Table uint32
	// Protocol marks the program that created the rule (FRA_PROTOCOL).
	Protocol            uint8
	Source, Destination netip.Prefix
	// Iif is the name of the ingress device; "lo" matches packets of this host. Oif is the name of the egress device
	// that the socket has chosen.
	Iif, Oif     string
	Mark, Mask   uint32
	IPProto      uint8
	Sport, Dport [2]uint16 // first and last
	// Foreign is set when reading rules with parts that this package does not write.
	Foreign bool
	// Refuses is set when reading rules that refuse packets instead of leading to a table; they are Foreign too.
	Refuses bool
}

// String describes the object.
func (r Rule) String() string { return fmt.Sprintf("rule %d to table %d", r.Priority, r.Table) }

func (w *writer) rule(kind, flags uint16, r Rule) {
	at := w.begin(kind, flags, r.Family, ruleHeader)
	h := w.buf[at+headerSize:]
	h[7] = actionTable
	prefix := func(attr uint16, bits *byte, p netip.Prefix) {
		if p.IsValid() {
			*bits = byte(p.Bits())
			w.addr(attr, p.Masked().Addr())
		}
	}
	source, destination := byte(0), byte(0)
	prefix(unix.FRA_DST, &destination, r.Destination)
	prefix(unix.FRA_SRC, &source, r.Source)
	h = w.buf[at+headerSize:]
	h[1], h[2] = destination, source
	w.u32(unix.FRA_PRIORITY, r.Priority)
	w.u32(unix.FRA_TABLE, r.Table)
	if r.Protocol != 0 {
		w.attr(unix.FRA_PROTOCOL, r.Protocol)
	}
	if r.Iif != "" {
		w.attr(unix.FRA_IIFNAME, append([]byte(r.Iif), 0)...)
	}
	if r.Oif != "" {
		w.attr(unix.FRA_OIFNAME, append([]byte(r.Oif), 0)...)
	}
	if r.Mark != 0 {
		w.u32(unix.FRA_FWMARK, r.Mark)
		mask := r.Mask
		if mask == 0 {
			mask = ^uint32(0)
		}
		w.u32(unix.FRA_FWMASK, mask)
	}
	if r.IPProto != 0 {
		w.attr(unix.FRA_IP_PROTO, r.IPProto)
	}
	w.ports(unix.FRA_SPORT_RANGE, r.Sport)
	w.ports(unix.FRA_DPORT_RANGE, r.Dport)
	w.end(at)
}

// ports writes a range in host byte order, as required for rules.
func (w *writer) ports(kind uint16, ports [2]uint16) {
	if ports == [2]uint16{} {
		return
	}
	w.attr(kind, 0, 0, 0, 0)
	b := w.buf[len(w.buf)-4:]
	binary.NativeEndian.PutUint16(b, ports[0])
	binary.NativeEndian.PutUint16(b[2:], max(ports[0], ports[1]))
}

func readPorts(b []byte) [2]uint16 {
	if len(b) < 4 {
		return [2]uint16{}
	}
	return [2]uint16{readU16(b), readU16(b[2:])}
}

// parseRule parses the body of RTM_NEWRULE.
func parseRule(b []byte) (r Rule, ok bool) {
	if len(b) < ruleHeader {
		return r, false
	}
	r.Family, r.Table = b[0], uint32(b[4])
	r.Foreign = b[7] != actionTable || b[3] != 0 || binary.NativeEndian.Uint32(b[8:])&unix.FIB_RULE_INVERT != 0
	r.Refuses = b[7] >= firstRefusal && b[7] <= lastRefusal
	for kind, v := range Attributes(b[ruleHeader:]) {
		switch kind {
		case unix.FRA_DST:
			r.Destination = readPrefix(r.Family, v, b[1])
		case unix.FRA_SRC:
			r.Source = readPrefix(r.Family, v, b[2])
		case unix.FRA_PRIORITY:
			r.Priority = readU32(v)
		case unix.FRA_TABLE:
			r.Table = readU32(v)
		case unix.FRA_PROTOCOL:
			r.Protocol = readU8(v)
		case unix.FRA_IIFNAME:
			r.Iif = Text(v)
		case unix.FRA_OIFNAME:
			r.Oif = Text(v)
		case unix.FRA_FWMARK:
			r.Mark = readU32(v)
		case unix.FRA_FWMASK:
			r.Mask = readU32(v)
		case unix.FRA_IP_PROTO:
			r.IPProto = readU8(v)
		case unix.FRA_SPORT_RANGE:
			r.Sport = readPorts(v)
		case unix.FRA_DPORT_RANGE:
			r.Dport = readPorts(v)
		case unix.FRA_SUPPRESS_PREFIXLEN, unix.FRA_SUPPRESS_IFGROUP:
			r.Foreign = r.Foreign || readU32(v) != ^uint32(0)
		case unix.FRA_GOTO, unix.FRA_L3MDEV, unix.FRA_TUN_ID, unix.FRA_UID_RANGE:
			r.Foreign = true
		}
	}
	return r, true
}

// Rules returns the rules of a family (AF_INET, AF_INET6), of all programs, in the order of evaluation.
func (c *Conn) Rules(family uint8) ([]Rule, error) {
	var w writer
	at := w.begin(unix.RTM_GETRULE, unix.NLM_F_DUMP, family, ruleHeader)
	w.end(at)
	var all []Rule
	err := c.dump("dump rules", w.buf, func() { all = all[:0] }, func(m Message) {
		if r, ok := parseRule(m.Body); ok && m.Kind == unix.RTM_NEWRULE && r.Family == family {
			all = append(all, r)
		}
	})
	return all, err
}
