package fare

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Description lists each input and rule that led to one destination's capacities. It is a copy and does not change
// later.
type Description struct {
	Destination netip.Prefix
	Known       bool // a session has a route, or had one that is not yet forgotten
	Group       GroupID
	Reachable   bool
	Reason      Reason // why it is not reachable
	Rule        Rule
	Origins     int                // number of origins, as far as AS paths show them; more than one is a conflict
	Conflict    ConflictPolicy     // policy for a conflict
	Routes      []RouteDescription // by plane, sub-port and session
	Planes      []PlaneDescription // every configured plane
	// The readvertisement; role leaf only.
	Readvertised bool
	Bandwidth    Bandwidth
	ASPath       []uint32
}

// RouteDescription is one session's route.
type RouteDescription struct {
	Session     int
	Name        string
	Plane       string
	Device      string
	Node        netip.Addr
	Communities []CommunityDescription
	Advertised  Advertised
	ASPath      []uint32
	Origin      uint32 // AS that announces the destination; 0: the path does not show it
	Originated  bool   // by the neighbor itself: the value describes the sub-port
	Signals     Signals
	Avoided     bool   // its plane is avoided toward the destination, unless no other is left
	Reason      Reason // why the route does not count
}

// CommunityDescription is one extended community and its verdict.
type CommunityDescription struct {
	Raw []byte // as received: 8 bytes, or 20 (RFC 5701)
	Verdict
}

// PlaneDescription is one plane's nodes and their sum.
type PlaneDescription struct {
	Plane string
	Nodes []NodeDescription // by address
	PlaneBandwidth
	Devices []string // of PlaneBandwidth.SubPorts
}

// NodeDescription is b(n) of one node.
type NodeDescription struct {
	Node       netip.Addr
	Devices    []string   // usable local sub-ports toward it
	Local      Bandwidth  // sum of their speeds
	Advertised Advertised // the lowest value; for an originating node, the sum of its values
	Originated bool
	Bandwidth  Bandwidth // b(n)
	Reason     Reason    // why it is not used
}

// Describe explains one destination. It recomputes the destination's group, which changes nothing.
func (t *Table) Describe(prefix netip.Prefix) Description {
	d, _ := t.byPrefix.get(prefix)
	if d == nil {
		return Description{Destination: prefix, Reason: ReasonNoRoute}
	}
	g := d.group
	c := &t.work
	c.run(t, g)
	out := Description{
		Destination: prefix, Known: true, Group: g.id,
		Reachable: g.view.Reachable, Reason: g.view.Reason, Rule: g.view.Rule,
		Origins: g.view.Origins, Conflict: t.config.Conflict,
	}
	if r := d.readvertised; r != nil {
		out.Readvertised, out.Bandwidth, out.ASPath = true, r.bandwidth, slices.Clone(r.path)
	}
	for i := range g.entries {
		e := &g.entries[i]
		index := t.order[e.rank]
		s := &t.sessions[index]
		sp := t.config.SubPorts[s.subPort]
		r := RouteDescription{
			Session: index, Name: t.config.Sessions[index].Name, Plane: t.config.Planes[sp.Plane], Device: sp.Device,
			Node: s.node, Advertised: Advertised{e.known && t.suspect(e) == ReasonUsed, e.value}, ASPath: slices.Clone(d.sets[i].attrs.ASPath),
			Originated: e.originated, Signals: e.signals, Reason: g.reasons[i],
			Avoided: e.avoided && t.config.Unproved == UnprovedAvoid,
		}
		if e.origin != 0 {
			r.Origin = r.ASPath[len(r.ASPath)-1]
		}
		attrs := d.sets[i].attrs
		_, verdicts := s.codec.JudgeRoute(attrs, nil)
		for k, v := range verdicts {
			if v.Reason == ReasonUsed {
				v.Reason = t.suspect(e)
			}
			raw := slices.Clone(attrs.Extended[:])
			if k < len(attrs.Communities) {
				raw = slices.Clone(attrs.Communities[k][:])
			}
			r.Communities = append(r.Communities, CommunityDescription{Raw: raw, Verdict: v})
		}
		out.Routes = append(out.Routes, r)
	}
	for i, name := range t.config.Planes {
		p := PlaneDescription{Plane: name, PlaneBandwidth: g.view.Planes[i]}
		p.SubPorts = slices.Clone(p.SubPorts)
		for _, w := range p.SubPorts {
			p.Devices = append(p.Devices, t.config.SubPorts[w.SubPort].Device)
		}
		for n := range c.nodes {
			if c.nodes[n].plane == i {
				p.Nodes = append(p.Nodes, t.describeNode(n))
			}
		}
		slices.SortFunc(p.Nodes, func(a, b NodeDescription) int { return a.Node.Compare(b.Node) })
		out.Planes = append(out.Planes, p)
	}
	return out
}

// Route returns the attributes of a session's current route to a destination, or nil if the session has none. The
// caller must not modify them.
func (t *Table) Route(session int, prefix netip.Prefix) *Attributes {
	if d, _ := t.byPrefix.get(prefix); d != nil {
		if i, ok := t.routeOf(d, session); ok {
			return d.sets[i].attrs
		}
	}
	return nil
}

func (t *Table) describeNode(n int) NodeDescription {
	node := &t.work.nodes[n]
	out := NodeDescription{
		Node: t.sessions[node.leader].node, Local: node.local,
		Advertised: Advertised{node.known, node.value}, Originated: node.originated,
		Bandwidth: node.bandwidth, Reason: node.reason,
	}
	var sum Bandwidth
	for i := range t.work.links {
		if link := &t.work.links[i]; link.node == n {
			out.Devices = append(out.Devices, t.config.SubPorts[link.subPort].Device)
			sum = sum.Add(link.value)
		}
	}
	if node.known && node.originated {
		out.Advertised.Bandwidth = sum
	}
	return out
}

// String renders the description, a few lines per plane.
func (d Description) String() string {
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	switch {
	case !d.Known:
		line("%s unknown: no session has a route", d.Destination)
		return b.String()
	case d.Reachable:
		line("%s group %d reachable", d.Destination, d.Group)
	default:
		line("%s group %d unreachable: %s", d.Destination, d.Group, d.Reason)
	}
	line("rule %s: %s", d.Rule, d.Rule.Sentence())
	if d.Origins > 1 {
		line("conflict: %d origins announce it, policy %s", d.Origins, d.Conflict)
	}
	for _, p := range d.Planes {
		if p.Capacity == 0 {
			line("plane %s: no bandwidth: %s", p.Plane, p.Reason)
		} else {
			text := fmt.Sprintf("plane %s: bandwidth %s, capacity %d, sub-ports", p.Plane, p.Bandwidth, p.Capacity)
			for i, w := range p.SubPorts {
				text += fmt.Sprintf(" %s=%d", p.Devices[i], w.Weight)
			}
			line("%s", text)
		}
		for _, n := range p.Nodes {
			line("  %s", n)
		}
		for _, r := range d.Routes {
			if r.Plane == p.Plane {
				line("  %s", r)
				for _, c := range r.Communities {
					line("    %s", c)
				}
			}
		}
	}
	if d.Readvertised {
		line("readvertised: %s, path %v", d.Bandwidth, d.ASPath)
	}
	return b.String()
}

// String renders the node in one line.
func (n NodeDescription) String() string {
	links := strings.Join(n.Devices, "+")
	text := fmt.Sprintf("node %s: min(%s=%s, advertised %s) = %s", n.Node, links, n.Local, n.Advertised, n.Bandwidth)
	if n.Originated {
		text = fmt.Sprintf("node %s: sum over %s=%s of min(sub-port, advertised), advertised %s = %s",
			n.Node, links, n.Local, n.Advertised, n.Bandwidth)
	}
	return text + because(n.Reason)
}

// String renders the route in one line.
func (r RouteDescription) String() string {
	text := fmt.Sprintf("route %s over %s from %s: advertised %s, path %v", r.Name, r.Device, r.Node, r.Advertised, r.ASPath)
	if r.Originated {
		text += ", originated by the node"
	}
	if r.Signals != 0 {
		text += ", " + r.Signals.String()
	}
	if r.Avoided && r.Reason == ReasonUsed {
		text += ", probes by this plane are lost, but no other plane is left"
	}
	return text + because(r.Reason)
}

// String renders the community in one line.
func (c CommunityDescription) String() string {
	text := fmt.Sprintf("community %x: %s", c.Raw, c.Kind)
	switch c.Reason {
	case ReasonUsed, ReasonBelowMinimum, ReasonAboveMaximum, ReasonWrapped, ReasonOtherScale, ReasonNotLowest, ReasonOverridden:
		text += " " + c.Bandwidth.String()
	}
	return text + because(c.Reason)
}

// String returns the value, or "nothing" if none is known.
func (a Advertised) String() string {
	if !a.Known {
		return "nothing"
	}
	return a.Bandwidth.String()
}

func because(r Reason) string {
	if r == ReasonUsed {
		return ""
	}
	if r == ReasonAvoided {
		return " (not used: avoided: probes by this plane are lost)"
	}
	return " (not used: " + r.String() + ")"
}
