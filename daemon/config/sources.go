package config

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/fared/fared/fare"
)

// SourceGroup is a maximal set of local loopbacks that exactly the same sub-ports serve. These loopbacks share weights;
// other source groups have separate weights.
type SourceGroup struct {
	// Loopbacks are in the order of Config.Loopbacks; a leaf has none.
	Loopbacks []netip.Prefix
	// SubPorts are indexes over the sub-ports of all planes, in configuration order, ascending.
	SubPorts []int
}

// SourceGroups returns the source groups in the order of their first loopbacks. A leaf, and a server without sub-port
// loopbacks, has one group with all sub-ports. The configuration must be valid; loopbacks without a sub-port are
// omitted.
func (c *Config) SourceGroups() []SourceGroup {
	var subPorts []*SubPort
	for i := range c.Planes {
		for j := range c.Planes[i].SubPorts {
			subPorts = append(subPorts, &c.Planes[i].SubPorts[j])
		}
	}
	if c.Role == fare.RoleLeaf {
		all := SourceGroup{}
		for i := range subPorts {
			all.SubPorts = append(all.SubPorts, i)
		}
		return []SourceGroup{all}
	}
	var groups []SourceGroup
	for _, lo := range c.Loopbacks {
		var serving []int
		for i, sp := range subPorts {
			if sp.Serves(lo) {
				serving = append(serving, i)
			}
		}
		at := slices.IndexFunc(groups, func(g SourceGroup) bool { return slices.Equal(g.SubPorts, serving) })
		switch {
		case at >= 0:
			groups[at].Loopbacks = append(groups[at].Loopbacks, lo)
		case len(serving) > 0:
			groups = append(groups, SourceGroup{[]netip.Prefix{lo}, serving})
		}
	}
	return groups
}

// Serves reports whether the sub-port carries the traffic of a local loopback.
func (sp *SubPort) Serves(loopback netip.Prefix) bool {
	return len(sp.Loopbacks) == 0 || slices.Contains(sp.Loopbacks, loopback)
}

// subPortLoopbacks checks the loopbacks that a sub-port serves.
func (p *problems) subPortLoopbacks(c *Config, sp *SubPort, path string) {
	sessions := path + ".sessions"
	path += ".loopbacks"
	if p.written(path) && len(sp.Loopbacks) == 0 {
		p.add(path, "is an empty list, so no packets would use this sub-port", "list the loopbacks of this sub-port's GPUs, or remove the key to serve all loopbacks")
		return
	}
	if len(sp.Loopbacks) > 0 && c.Role == fare.RoleLeaf {
		p.add(path, "a leaf has no GPU", "remove the key, or use role: server")
		return
	}
	for i, lo := range sp.Loopbacks {
		at := item(path, i)
		family := IPv6
		if lo.Addr().Is4() {
			family = IPv4
		}
		switch {
		case !lo.IsValid():
		case !slices.Contains(c.Loopbacks, lo):
			if p.partial("loopbacks") {
				continue
			}
			p.add(at, lo.String()+" is not one of the server's loopbacks", "use an element of loopbacks, or add it there")
		case slices.Contains(sp.Loopbacks[:i], lo):
			p.add(at, lo.String()+" is listed twice", "list it once")
		case p.partial(sessions) || slices.ContainsFunc(sp.Sessions, func(s Session) bool { return !s.Unnumbered && !s.Peer.IsValid() }):
		case !slices.ContainsFunc(sp.Sessions, func(s Session) bool { return s.carries(family) }):
			p.add(at, fmt.Sprintf("is %s, and no session of %s carries its routes", family, sp.Device), "add a session of that family, or remove the loopback here")
		}
	}
}

// served checks that every loopback has a sub-port.
func (p *problems) served(c *Config) {
	if p.partial("planes") || slices.ContainsFunc(c.Planes, func(plane Plane) bool { return len(plane.SubPorts) == 0 }) {
		return
	}
	for i, lo := range c.Loopbacks {
		found := false
		for _, plane := range c.Planes {
			found = found || slices.ContainsFunc(plane.SubPorts, func(sp SubPort) bool { return sp.Serves(lo) })
		}
		if !found && lo.IsValid() && c.Role == fare.RoleServer && len(c.Planes) > 0 {
			p.add(item("loopbacks", i), lo.String()+" is served by no sub-port", "add it to the loopbacks of its GPU's sub-ports")
		}
	}
}

// groups checks the number of source groups: the data plane has tables for so many.
func (p *problems) groups(c *Config) {
	if n := len(c.SourceGroups()); n > MaxSourceGroups {
		p.add("loopbacks", fmt.Sprintf("are %d source groups", n), fmt.Sprintf("let loopbacks share sub-ports, so that there are at most %d source groups", MaxSourceGroups))
	}
}

// uncarried returns a warning for each loopback whose family no session of its sub-ports carries. Such a configuration
// is valid: a loopback may be in it before the fabric has its family.
func (c *Config) uncarried() (out []string) {
	for i, lo := range c.Loopbacks {
		family := IPv6
		if lo.Addr().Is4() {
			family = IPv4
		}
		carried := false
		for _, plane := range c.Planes {
			for _, sp := range plane.SubPorts {
				carried = carried || sp.Serves(lo) && slices.ContainsFunc(sp.Sessions, func(s Session) bool { return s.carries(family) })
			}
		}
		if !carried {
			out = append(out, fmt.Sprintf("%s: %s: no session of its sub-ports carries %s, so no other server learns it; add sessions to the leaves' %[3]s addresses, or the family where a session can carry it",
				item("loopbacks", i), lo, family))
		}
	}
	return out
}

// largestSource returns the largest number of sub-ports, and the largest number of planes, of any source group.
func (c *Config) largestSource() (subPorts, planes int) {
	var planeOf []int
	for i := range c.Planes {
		for range c.Planes[i].SubPorts {
			planeOf = append(planeOf, i)
		}
	}
	for _, g := range c.SourceGroups() {
		seen := map[int]bool{}
		for _, i := range g.SubPorts {
			seen[planeOf[i]] = true
		}
		subPorts, planes = max(subPorts, len(g.SubPorts)), max(planes, len(seen))
	}
	return subPorts, planes
}
