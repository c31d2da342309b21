package discover

import (
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"
)

// planes are the sub-ports of each plane.
type planes struct {
	members [][]*subPort
	guess   string // the criterion of a guess, after "by"; empty: the planes are certain
}

// group divides sub-ports into n planes; 0 derives the planes from the first of these that distinguishes them: the
// leaves' names of LLDP, the subnets, the names.
func group(ports []*subPort, n int) (planes, error) {
	if n > 0 {
		if len(ports)%n != 0 {
			return planes{}, &OptionError{fmt.Sprintf("--planes %d does not divide the number of sub-ports, %d", n, len(ports)),
				"use another number, or choose the sub-ports with --device"}
		}
		size := len(ports) / n
		return planes{partition(ports, func(i int) string { return fmt.Sprint(i / size) }), "the order of the devices"}, nil
	}
	if len(ports) == 1 {
		return planes{members: [][]*subPort{ports}}, nil
	}
	if known(ports) {
		return planes{members: partition(ports, func(i int) string { return ports[i].Neighbor.System })}, nil
	}
	if members := bySubnet(ports); members != nil {
		return planes{members, "the subnets of the leaves"}, nil
	}
	return byName(ports), nil
}

// name sets the devices of the file: their names or, with a match, p0s0 and so on, which stay when the devices are
// renamed.
func (p *planes) name(m *Machine, o *Options) error {
	taken := func(pattern string) bool {
		return slices.ContainsFunc(m.Netdevs, func(d Netdev) bool {
			var plane, sub int
			_, err := fmt.Sscanf(d.Name, pattern, &plane, &sub)
			return err == nil
		})
	}
	pattern := "p%ds%d"
	if taken(pattern) {
		pattern = "plane%dsub%d"
	}
	var without []string
	for i, members := range p.members {
		for j, s := range members {
			var ok bool
			if s.match, ok = o.selects(s.Netdev); !ok {
				without = append(without, s.Name)
			}
			s.device = s.Name
			if s.match != "" {
				s.device = fmt.Sprintf(pattern, i, j)
			}
		}
	}
	if len(without) > 0 {
		return &OptionError{fmt.Sprintf("--match %s: no such match selects one device alone, of %s", o.Match, strings.Join(without, ", ")),
			"use another value: name, pci, mac or rdma"}
	}
	return nil
}

// known reports whether LLDP names the leaf of every sub-port.
func known(ports []*subPort) bool {
	for _, s := range ports {
		if s.Neighbor.System == "" {
			return false
		}
	}
	return true
}

// partition groups sub-ports with equal keys, in the order of their first members.
func partition(ports []*subPort, key func(i int) string) (out [][]*subPort) {
	index := map[string]int{}
	for i, s := range ports {
		k := key(i)
		at, ok := index[k]
		if !ok {
			at = len(out)
			index[k] = at
			out = append(out, nil)
		}
		out[at] = append(out[at], s)
	}
	return out
}

// even reports whether there are several groups, all of one size.
func even(groups [][]*subPort) bool {
	for _, g := range groups {
		if len(g) != len(groups[0]) {
			return false
		}
	}
	return len(groups) > 1
}

// leastRange is the number of prefix lengths that must give the same groups before subnets count as a plan of
// addresses: numbers that merely follow one another give other groups at every length.
const leastRange = 4

// bySubnet groups sub-ports whose peers share a prefix. Of all prefix lengths it uses those that give the same number
// of groups over the widest range. It returns nil if no such range is wide, or if the groups differ in size.
func bySubnet(ports []*subPort) (best [][]*subPort) {
	bits := 0
	for _, s := range ports {
		if len(s.links) == 0 || bits != 0 && s.links[0].peer.BitLen() != bits {
			return nil
		}
		bits = s.links[0].peer.BitLen()
	}
	widest, run, previous := leastRange-1, 0, 0
	for length := 1; length < bits; length++ {
		groups := partition(ports, func(i int) string {
			return netip.PrefixFrom(ports[i].links[0].peer, length).Masked().String()
		})
		if len(groups) != previous {
			run, previous = 0, len(groups)
		}
		if run++; run > widest && even(groups) {
			widest, best = run, groups
		}
	}
	return best
}

var (
	portSuffix = regexp.MustCompile(`np\d+$`) // the number of the physical port, which systemd appends
	twoNumbers = regexp.MustCompile(`^(.*\d.*\D)\d+$`)
)

// byName groups names with two numbers by everything before the last one, such as p0s0 and p0s1. Others are pairs of
// consecutive devices, the two sub-ports of a Y-cable, or planes of one sub-port if there are less than two pairs.
func byName(ports []*subPort) planes {
	groups := partition(ports, func(i int) string {
		name := portSuffix.ReplaceAllString(ports[i].Name, "")
		if m := twoNumbers.FindStringSubmatch(name); m != nil {
			return m[1]
		}
		return ""
	})
	if even(groups) {
		return planes{groups, "the names of the devices up to the last number"}
	}
	if len(ports)%2 == 0 && len(ports) >= 4 {
		return planes{partition(ports, func(i int) string { return fmt.Sprint(i / 2) }), "pairs of consecutive devices, as of a Y-cable"}
	}
	return planes{partition(ports, func(i int) string { return fmt.Sprint(i) }), "devices"}
}
