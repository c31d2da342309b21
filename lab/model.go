package lab

import (
	"fmt"
	"strings"

	"github.com/fared/fared/topo"
)

// model is what the fabric's cables, nodes and drains are, and what weights follow: a few lines of arithmetic that know nothing
// of BGP, communities or groups, so that they can judge them.
type model struct {
	*plan
	// By cable: cut has no light, lossy drops every packet in silence, drained is so by its server.
	cut, lossy, drained []bool
	// Nodes that are dark are without power, all their cables with them; those that sleep do not answer but forward.
	dark, asleep map[*topo.Node]bool
	// dead are the processes of each server that have crashed.
	dead []parts
	// waiting: a server's control plane has returned without its data plane, and has no sessions until that is back.
	waiting []bool
	// frozen are, of a server any of whose processes is dead, its weights toward every server when the first one died.
	frozen [][][]uint32
	// silent says of a cable that the leaf has lost its routes and cannot learn them again, for a process of the server is dead.
	silent []bool
	// told is what a server whose control plane has crashed had told the leaf of a cable about itself, in bit/s: a leaf that does not
	// add up passes it on for as long as it keeps the route.
	told []uint64
}

func newModel(p *plan) *model {
	n := len(p.Cables)
	return &model{plan: p, cut: make([]bool, n), lossy: make([]bool, n), drained: make([]bool, n), silent: make([]bool, n), told: make([]uint64, n),
		dark: map[*topo.Node]bool{}, asleep: map[*topo.Node]bool{},
		dead: make([]parts, p.Servers), waiting: make([]bool, p.Servers), frozen: make([][][]uint32, p.Servers)}
}

// cable is a cable as it should be.
type cable struct {
	*topo.Cable
	up bool
}

func (m *model) cable(c *topo.Cable) cable {
	return cable{c, !m.cut[c.Index] && !m.dark[c.Down.Node] && !m.dark[c.Up.Node]}
}

// session says whether the two ends of a cable hear each other.
func (m *model) session(c *topo.Cable) bool {
	return m.cable(c).up && !m.lossy[c.Index] && !m.asleep[c.Down.Node] && !m.asleep[c.Up.Node]
}

// sends says whether a server uses a cable; announces whether its leaf has routes over it.
func (m *model) sends(c *topo.Cable) bool     { return m.session(c) && !m.drained[c.Index] }
func (m *model) announces(c *topo.Cable) bool { return m.sends(c) && !m.silent[c.Index] }

// lanes is what a server can send to a leaf, in bit/s.
func (m *model) lanes(server int, leaf *topo.Node) (speed uint64) {
	for _, c := range m.At(m.Server[server]) {
		if c.Up.Node == leaf && m.sends(c) {
			speed += uint64(c.Speed)
		}
	}
	return speed
}

// direct is what a leaf can send to a server over its own cables, in bit/s.
func (m *model) direct(leaf *topo.Node, server int) (speed uint64) {
	for _, c := range m.At(m.Server[server]) {
		if c.Up.Node == leaf && m.announces(c) {
			if m.Software(leaf) == topo.BIRD && m.absent(server) {
				return m.told[c.Index]
			}
			speed += uint64(c.Speed)
		}
	}
	return speed
}

// paths is how many uplinks a leaf is built with, at least 1. What a leaf announces is counted in so many parts of a bit/s, so that
// the share of an uplink, all of which are equally fast, is a whole number.
func (m *model) paths() uint64 { return uint64(max(m.Spines, 1)) }

// announced is what a leaf says that it can send to a server, in parts of a bit/s: directly, or over each spine the least of all
// that is on the way. A leaf with fared tells each spine its share of what it has, whether the others live or not; FRR and BIRD
// tell every one all of it. FRR does not look at its own uplinks, it adds up what it is told.
func (m *model) announced(leaf *topo.Node, server int) uint64 {
	if n := m.direct(leaf, server); n > 0 {
		return n * m.paths()
	}
	through := func(n *topo.Node, c *topo.Cable, told uint64) uint64 {
		if m.Software(n) == topo.Fared {
			return min(told, uint64(c.Speed)*m.paths())
		}
		return told
	}
	var speed uint64
	for _, near := range m.At(leaf) {
		if !near.Uplink() || !m.session(near) {
			continue
		}
		spine := near.Up.Node
		for _, far := range m.At(spine) {
			if far == near || !m.session(far) {
				continue
			}
			told := m.direct(far.Down.Node, server)
			if m.Software(far.Down.Node) != topo.Fared {
				told *= m.paths()
			}
			speed += through(leaf, near, through(spine, far, told))
		}
	}
	return speed
}

// reaches says whether a leaf or a spine has a way to a server.
func (m *model) reaches(n *topo.Node, server int) bool {
	if n.Kind == topo.KindLeaf {
		return m.announced(n, server) > 0
	}
	for _, c := range m.At(n) {
		if m.session(c) && m.direct(c.Down.Node, server) > 0 {
			return true
		}
	}
	return false
}

// weights is what holds between two servers: in each plane, over each leaf, the lesser of what the source can send and the leaf
// announces; in lowest terms.
func (m *model) weights(src, dst int) []uint32 {
	speed := make([]uint64, m.Planes)
	for _, leaf := range m.Leaf {
		if n := m.lanes(src, leaf); n > 0 {
			speed[leaf.Plane] += min(n*m.paths(), m.announced(leaf, dst))
		}
	}
	return lowestTerms(speed)
}

func lowestTerms[V uint32 | uint64](v []V) []uint32 {
	var g uint64
	for _, n := range v {
		g = gcd(g, uint64(n))
	}
	w := make([]uint32, len(v))
	for i, n := range v {
		w[i] = uint32(uint64(n) / max(g, 1))
	}
	return w
}

// server finds a server by its name in a script.
func (m *model) server(name string) (int, error) {
	if n := m.Node(name); n != nil && n.Kind == topo.KindServer {
		return n.Index, nil
	}
	return 0, fmt.Errorf("no server %q: there are %s to %s", name, m.Server[0].Name, m.Server[m.Servers-1].Name)
}

// servers finds a server by its name, or all by "*".
func (m *model) servers(name string) ([]int, error) {
	if name != "*" {
		s, err := m.server(name)
		return []int{s}, err
	}
	all := make([]int, m.Servers)
	for s := range all {
		all[s] = s
	}
	return all, nil
}

// leaf finds a leaf or a spine by its name.
func (m *model) leaf(name string) (*topo.Node, error) {
	if n := m.Node(name); n != nil && n.Kind != topo.KindServer {
		return n, nil
	}
	text := fmt.Sprintf("no leaf %q: there are %s to %s", name, m.Leaf[0].Name, m.Leaf[len(m.Leaf)-1].Name)
	if n := len(m.Spine); n > 0 {
		text += fmt.Sprintf(", and spines %s to %s", m.Spine[0].Name, m.Spine[n-1].Name)
	}
	return nil, fmt.Errorf("%s", text)
}

// cablesOf returns the cables of a node that "p2" (all of the plane's, of a server) or a device such as "p2.0" names.
func (m *model) cablesOf(node, name string) ([]*topo.Cable, error) {
	n := m.Node(node)
	if n == nil {
		_, err := m.server(node)
		return nil, err
	}
	found, err := m.Find(node + "/" + name)
	if err == nil && !strings.Contains(name, "/") {
		return found, nil
	}
	if n.Kind != topo.KindServer {
		ports := m.At(n)
		first, _ := ports[0].At(n)
		last, _ := ports[len(ports)-1].At(n)
		return nil, fmt.Errorf("%s has no port %q: its ports are %s to %s", node, name, first.Device, last.Device)
	}
	return nil, fmt.Errorf("no plane or sub-port %q: planes are %s to %s, sub-ports %s to %s", name,
		m.PlaneName(0), m.PlaneName(m.Planes-1), m.Device(0, 0), m.Device(m.Planes-1, m.SubPorts-1))
}
