package discover

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Prefix lengths of the ranges of loopbacks that a guess assumes.
const (
	acceptBits4 = 16
	acceptBits6 = 48
)

// firstPrivateAS is the first private AS number of four bytes (RFC 6996, Section 5).
const firstPrivateAS = 4200000000

// file is a configuration that is being written.
type file struct {
	bytes.Buffer
	plan *Plan
}

func (f *file) line(format string, args ...any) { fmt.Fprintf(f, format+"\n", args...) }

// guessed writes a comment that marks the next line as a guess, and lists it.
func (f *file) guessed(indent, key, rule, check string) {
	f.line("%s# guessed: %s; check %s", indent, rule, check)
	f.plan.Guesses = append(f.plan.Guesses, fmt.Sprintf("%s: %s; check %s", key, rule, check))
}

func (p *Plan) write(m *Machine, o Options, loopbacks []netip.Prefix, planes planes) {
	f := &file{plan: p}
	f.line("# The configuration of %s, written by fared init. Values marked \"guessed\" follow conventions, not the machine: check them.", m.Host)
	f.line("# The manual of all keys is /usr/share/doc/fared/configuration.md and fared.yaml(5). After a change: fared check, then fared reload.")
	f.line("\nrole: server\n")
	f.identity(o, loopbacks)
	f.loopbacks(o, loopbacks)
	f.line("\n# The loopbacks of all servers. Any other route is dropped and counted.")
	f.accept(loopbacks)
	f.bandwidth(o.Leaf)
	f.line("\n# peer_as is absent from the sessions: a leaf may have any AS number except this server's. gtsm_hops: 1 drops packets of other links; every leaf's packets must then have TTL 255.")
	f.line("# Speeds are queried from the devices.")
	f.planes(planes)
	f.line("\n# While fared restarts, as in an upgrade, leaves keep this server's routes (RFC 4724), so that the others go on sending to it. FRR and BIRD do so by default.")
	f.line("# Price: they also keep the routes of a fared that ended and does not return. Hold time, BFD and carriers end routes as without this.")
	f.line("bgp:\n  restart_time: 60s")
	f.line("\n# BFD detects a silent leaf within interval x multiplier, where bgp.hold_time takes 9 s. Enable it at the leaves too; sessions with others go on without it.")
	f.line("# bfd:\n#   interval: 300ms\n#   multiplier: 3")
	f.line("\n# Prometheus metrics over HTTP.\n# metrics:\n#   listen: 127.0.0.1:9469")
	p.Text = f.Bytes()
}

// identity writes the BGP identifier and the AS number. Both derive from the first loopback of the preferred family,
// IPv4.
func (f *file) identity(o Options, loopbacks []netip.Prefix) {
	first := loopbacks[0].Addr()
	if i := slices.IndexFunc(loopbacks, func(l netip.Prefix) bool { return l.Addr().Is4() }); i >= 0 {
		first = loopbacks[i].Addr()
	}
	raw := first.AsSlice()
	low := binary.BigEndian.Uint32(raw[len(raw)-4:])
	f.line("# The BGP identifier, unique in the fabric.")
	if first.Is4() {
		f.line("router_id: %s", first)
	} else {
		id := max(low, 1)
		f.guessed("", "router_id", fmt.Sprintf("the last 32 bits of %s", first), "that it is unique in the fabric")
		f.line("router_id: %s", netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, id))))
	}
	f.line("\n# This server's AS number. Every session is external.")
	as := o.AS
	if as == 0 {
		as = firstPrivateAS + low&0xffff
		f.guessed("", "as", fmt.Sprintf("the private number %d + the last 16 bits of %s", firstPrivateAS, first), "that no other router has it, or use --as")
	}
	f.line("as: %d", as)
}

// loopbacks writes the loopbacks with their origins. Addresses of lo that are not in the range of most are guesses.
func (f *file) loopbacks(o Options, loopbacks []netip.Prefix) {
	f.line("\n# One address a GPU. They are advertised on every session.\nloopbacks:")
	for _, v4 := range []bool{true, false} {
		var all []netip.Prefix
		for _, l := range loopbacks {
			if l.Addr().Is4() == v4 {
				all = append(all, l)
			}
		}
		usual, members := usualRange(all)
		for i, l := range all {
			origin := "an address of lo"
			switch {
			case len(o.Loopbacks) > 0:
				origin = "named by --loopback"
			case !usual.Contains(l.Addr()):
				f.guessed("  ", "loopback "+l.Addr().String(), fmt.Sprintf("an address of lo outside of %s, which has %d of %d", usual, members, len(all)),
					"that it is a GPU's and no virtual address of another program, or use --loopback")
			}
			f.line("  - %s # GPU %d, %s", yamlText(l.String()), i, origin)
		}
	}
}

// rangeOf returns the range of loopbacks that a guess assumes around one.
func rangeOf(l netip.Prefix) netip.Prefix {
	if l.Addr().Is4() {
		return netip.PrefixFrom(l.Addr(), acceptBits4).Masked()
	}
	return netip.PrefixFrom(l.Addr(), acceptBits6).Masked()
}

// usualRange returns the range with the most loopbacks, the first one among equals, and their number.
func usualRange(all []netip.Prefix) (usual netip.Prefix, members int) {
	count := map[netip.Prefix]int{}
	for _, l := range all {
		count[rangeOf(l)]++
	}
	for _, l := range all {
		if r := rangeOf(l); count[r] > members {
			usual, members = r, count[r]
		}
	}
	return usual, members
}

// usualFirst returns the loopbacks with those of the usual ranges first: BGP identifier and AS number come from the
// first one, and other addresses may be on several servers.
func usualFirst(all []netip.Prefix) []netip.Prefix {
	var v4, v6 []netip.Prefix
	for _, l := range all {
		if l.Addr().Is4() {
			v4 = append(v4, l)
		} else {
			v6 = append(v6, l)
		}
	}
	usual4, _ := usualRange(v4)
	usual6, _ := usualRange(v6)
	out := slices.Clone(all)
	slices.SortStableFunc(out, func(a, b netip.Prefix) int {
		rank := func(l netip.Prefix) int {
			if usual4.Contains(l.Addr()) || usual6.Contains(l.Addr()) {
				return 0
			}
			return 1
		}
		return rank(a) - rank(b)
	})
	return out
}

// bandwidth writes what the leaves' software needs so that a server's bandwidth arrives at the others.
func (f *file) bandwidth(leaf string) {
	switch leaf {
	case LeafFared:
	case LeafBIRD:
		f.line("\n# The leaves pass on the bandwidth of one route to this server: each has that of all its cables to the leaf.\npath_bandwidth:\n  advertise: node")
	default:
		f.line("\n# FRR through 10.7.0 sums bandwidth in 32 bits of bytes a second: thousandths keep sums right up to 34 Tbit/s. All servers and fared leaves need the same.")
		if leaf == "" {
			f.guessed("", "path_bandwidth", "the leaves are FRR or SONiC", "their software, or use --leaf")
		}
		f.line("path_bandwidth:\n  scale: 1000")
	}
}

// accept writes the ranges that cover the loopbacks.
func (f *file) accept(loopbacks []netip.Prefix) {
	var ranges []string
	for _, l := range loopbacks {
		if r := rangeOf(l).String(); !slices.Contains(ranges, r) {
			ranges = append(ranges, r)
		}
	}
	f.guessed("", "accept", "the /16 (IPv4) or /48 (IPv6) of each loopback", "that it has the loopbacks of all servers")
	f.line("accept:")
	for _, r := range ranges {
		f.line("  - %s", yamlText(r))
	}
}

func (f *file) planes(planes planes) {
	if planes.guess != "" {
		each := "1 sub-port"
		if n := len(planes.members[0]); n > 1 {
			each = fmt.Sprintf("%d sub-ports", n)
		}
		f.guessed("", "planes", fmt.Sprintf("%d planes with %s each, by %s", len(planes.members), each, planes.guess), "the cables, or use --planes")
	}
	f.line("planes:")
	for i, members := range planes.members {
		f.line("  - name: p%d\n    sub_ports:", i)
		for _, s := range members {
			f.subPort(s)
		}
	}
}

func (f *file) subPort(s *subPort) {
	var known []string
	if s.match != "" {
		known = append(known, "now "+s.Name)
	}
	if s.Speed != 0 {
		known = append(known, fmt.Sprintf("%s by %s", s.Speed, s.SpeedSource))
	}
	if !s.Carrier {
		known = append(known, "no carrier")
	}
	if s.Neighbor.System != "" {
		known = append(known, strings.TrimSpace(s.Neighbor.System+" "+s.Neighbor.Port)+" by LLDP")
	}
	if s.RDMA != "" {
		known = append(known, "RDMA port "+s.RDMA)
	}
	comment := ""
	if len(known) > 0 {
		comment = " # " + printable(strings.Join(known, ", "))
	}
	f.line("      - device: %s%s", yamlText(s.device), comment)
	if s.match != "" {
		f.line("        match: %s", yamlText(s.match))
	}
	if s.speed != 0 {
		f.guessed("        ", "speed of "+s.Name, "the device reports none", "the cable")
		f.line("        speed: %s", s.speed)
	}
	for _, l := range s.links {
		if l.guess != "" {
			f.guessed("        ", "peer of "+s.Name, "the leaf is "+l.guess, fmt.Sprintf("it, or use --peer %s=ADDRESS", s.Name))
		}
	}
	f.line("        sessions:")
	for _, session := range s.sessions {
		f.line("          - %s", session)
	}
}

// yamlText returns a string as a YAML scalar, quoted where the plain form means something else.
func yamlText(s string) string {
	out, err := yaml.Marshal(s)
	if err != nil {
		return fmt.Sprintf("%q", s)
	}
	return strings.TrimSuffix(string(out), "\n")
}

// printable replaces control characters, which would end a comment, by spaces.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r == 0x85 || r == 0x2028 || r == 0x2029 {
			return ' '
		}
		return r
	}, s)
}
