package lab

import (
	"fmt"

	"github.com/fared/fared/topo"
)

// parts selects processes of a server: its control plane and its data plane's agent.
type parts struct{ fared, dataplane bool }

var bothParts = parts{true, true}

func partsOf(name string) (parts, error) {
	switch name {
	case "fared":
		return parts{fared: true}, nil
	case "dataplane":
		return parts{dataplane: true}, nil
	case "both":
		return bothParts, nil
	}
	return parts{}, fmt.Errorf("%q cannot crash: name fared, dataplane or both", name)
}

func (p parts) any() bool           { return p.fared || p.dataplane }
func (p parts) and(q parts) parts   { return parts{p.fared && q.fared, p.dataplane && q.dataplane} }
func (p parts) or(q parts) parts    { return parts{p.fared || q.fared, p.dataplane || q.dataplane} }
func (p parts) minus(q parts) parts { return parts{p.fared && !q.fared, p.dataplane && !q.dataplane} }

func (p parts) String() string {
	switch p {
	case parts{fared: true}:
		return "fared"
	case parts{dataplane: true}:
		return "dataplane"
	}
	return "fared and dataplane"
}

// absent reports whether a server's control plane has no sessions: it has crashed, or it waits for its data plane.
func (m *model) absent(server int) bool { return m.dead[server].fared || m.waiting[server] }

// keepsRoutes reports whether a leaf keeps the routes of a server whose control plane has crashed (RFC 4724, Section
// 4.2). FRR and BIRD do so by default if the server requests it, which it does not by default; fared leaf never does.
func (m *model) keepsRoutes(leaf *topo.Node) bool {
	return m.Software(leaf) != topo.Fared && m.RestartTime > 0
}

// crashed applies a crash: the server's forwarding stays as it is, and a leaf that does not keep its routes removes
// them.
func (m *model) crashed(server int, p parts) {
	type place struct {
		leaf  *topo.Node
		group int
	}
	told := map[place]uint64{}
	for _, g := range m.GroupsAt(server) {
		if !m.dead[server].any() {
			m.frozen[g] = make([]vector, len(m.Groups()))
			for dst := range m.Groups() {
				m.frozen[g][dst] = m.vector(g, dst)
			}
		}
		for _, leaf := range m.Leaf {
			told[place{leaf, g}] = m.direct(leaf, g)
		}
	}
	m.dead[server] = m.dead[server].or(p)
	m.waiting[server] = m.waiting[server] && !p.fared
	for _, c := range m.At(m.Server[server]) {
		m.told[c.Index] = told[place{c.Up.Node, c.Group.Index}]
		if p.fared && !m.keepsRoutes(c.Up.Node) {
			m.silent[c.Index] = true
		}
	}
}

// darkened applies cables that are down: a leaf removes the routes that it has kept for a server, on each of these
// cables.
func (m *model) darkened(set []*topo.Cable) {
	for _, c := range set {
		if n := c.Down.Node; !m.up(c) && n.Kind == topo.KindServer && m.absent(n.Index) {
			m.silent[c.Index] = true
		}
	}
}

// revived applies the return of processes. Sessions wait for the data plane, and a leaf that keeps routes keeps them
// until then; drains are discarded.
func (m *model) revived(server int, p parts) {
	m.dead[server] = m.dead[server].minus(p)
	m.waiting[server] = m.dead[server].dataplane && (p.fared || m.waiting[server])
	all := !m.dead[server].any()
	if all {
		for _, g := range m.GroupsAt(server) {
			m.frozen[g] = nil
		}
	}
	for _, c := range m.At(m.Server[server]) {
		m.silent[c.Index] = m.silent[c.Index] && !all
		if p.fared {
			m.drained[c.Index] = false
		}
	}
}

// force returns the vector by which a source group forwards toward another: the one from before a crash of a process of
// its server, or the model's.
func (m *model) force(src, dst int) vector {
	if m.frozen[src] != nil {
		return m.frozen[src][dst]
	}
	return m.vector(src, dst)
}

// inForce returns the weights of force.
func (m *model) inForce(src, dst int) []uint32 { return m.force(src, dst).planes }

// moved reports whether the model's vector between two source groups has changed since the source's forwarding state
// froze.
func (m *model) moved(src, dst int) bool {
	return !m.force(src, dst).equal(m.vector(src, dst))
}

// carries reports whether every plane that a source group still uses toward another leads there. The source's kernel
// avoids its own cables that are down, but does not learn of those at the far end.
func (m *model) carries(src, dst int) bool {
	for plane, w := range m.inForce(src, dst) {
		used, reached := false, false
		for _, c := range m.Groups()[src].Planes[plane] {
			used = used || m.sends(c)
		}
		for _, c := range m.Groups()[dst].Planes[plane] {
			// A leaf that keeps routes keeps forwarding by them.
			reached = reached || m.up(c) && (m.keepsRoutes(c.Up.Node) || m.announces(c))
		}
		if w > 0 && used && !reached {
			return false
		}
	}
	return true
}

// changes records the source groups between which an action changes weights or takes down a cable on which their
// packets arrive. In the second case the packets are lost that the leaf sent to the cable before its kernel saw the
// carrier go down, whatever the weights.
type changes struct {
	*model
	before  [][]vector
	light   map[*topo.Cable]bool
	changed [][]bool
}

func newChanges(m *model) *changes {
	c := &changes{model: m, light: map[*topo.Cable]bool{}}
	for src, g := range m.Groups() {
		c.before = append(c.before, make([]vector, len(m.Groups())))
		c.changed = append(c.changed, make([]bool, len(m.Groups())))
		for dst := range m.Groups() {
			c.before[src][dst] = m.vector(src, dst)
		}
		for _, cable := range g.Cables {
			c.light[cable] = m.up(cable)
		}
	}
	return c
}

// note records the effects of an action; call it after each one.
func (c *changes) note() {
	for src, all := range c.before {
		for dst, before := range all {
			if !c.vector(src, dst).equal(before) || c.darkens(src, dst) {
				c.changed[src][dst] = true
			}
		}
	}
}

// darkens reports whether a cable of the destination went down in a plane that the source uses.
func (c *changes) darkens(src, dst int) bool {
	for plane, w := range c.inForce(src, dst) {
		for _, cable := range c.Groups()[dst].Planes[plane] {
			if w > 0 && c.light[cable] && !c.up(cable) {
				return true
			}
		}
	}
	return false
}
