package judge

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/fared/fared/topo"
)

// Model holds the state of the fabric's cables, nodes and drains, and computes the weights that follow. It is a few
// lines of arithmetic that share nothing with BGP, communities or the daemon's groups, and so can verify them. Weights
// are between source groups, numbered from 0: servers, or GPUs that own their ports.
type Model struct {
	*topo.Fabric
	// By cable: Cut means down, Lossy means that every packet is dropped silently, Drained that its server has drained
	// it.
	Cut, Lossy, Drained []bool
	// Dark nodes have no power, and all their cables are down; Asleep nodes do not respond but forward.
	Dark, Asleep map[*topo.Node]bool
	// Dead holds the crashed processes of each server.
	Dead []Parts
	// waiting is true for a server whose control plane has come back before its data plane; it has no sessions until
	// that is back.
	waiting []bool
	// frozen holds, for each source group of a server with a dead process, its vectors toward every source group when
	// the first process died; nil if all processes are alive.
	frozen [][]Vector
	// silent is true for a cable whose leaf has removed the server's routes and cannot learn them again while a process
	// of the server is dead.
	silent []bool
	// lastAdvertised is the bandwidth, in bit/s, that a crashed control plane last advertised over a cable for its own
	// server. A leaf that does not sum passes it on as long as it keeps the route.
	lastAdvertised []uint64
}

// NewModel returns the model of a fabric without failures.
func NewModel(f *topo.Fabric) *Model {
	n := len(f.Cables)
	return &Model{Fabric: f, Cut: make([]bool, n), Lossy: make([]bool, n), Drained: make([]bool, n), silent: make([]bool, n), lastAdvertised: make([]uint64, n),
		Dark: map[*topo.Node]bool{}, Asleep: map[*topo.Node]bool{},
		Dead: make([]Parts, f.Servers), waiting: make([]bool, f.Servers), frozen: make([][]Vector, len(f.Groups()))}
}

// Up reports whether a cable is connected to a node with power at either end.
func (m *Model) Up(c *topo.Cable) bool {
	return !m.Cut[c.Index] && !m.Dark[c.Down.Node] && !m.Dark[c.Up.Node]
}

// Session reports whether a cable's two ends can have a session.
func (m *Model) Session(c *topo.Cable) bool {
	return m.Up(c) && !m.Lossy[c.Index] && !m.Asleep[c.Down.Node] && !m.Asleep[c.Up.Node]
}

// sends reports whether a server uses a cable; announces reports whether its leaf has routes over it.
func (m *Model) sends(c *topo.Cable) bool     { return m.Session(c) && !m.Drained[c.Index] }
func (m *Model) announces(c *topo.Cable) bool { return m.sends(c) && !m.silent[c.Index] }

// lanes returns the rate at which a source group can send to a leaf, in bit/s.
func (m *Model) lanes(group int, leaf *topo.Node) (speed uint64) {
	for _, c := range m.Groups()[group].Cables {
		if c.Up.Node == leaf && m.sends(c) {
			speed += uint64(c.Speed)
		}
	}
	return speed
}

// direct returns the rate at which a leaf can send to a source group over its own cables, in bit/s.
func (m *Model) direct(leaf *topo.Node, group int) (speed uint64) {
	for _, c := range m.Groups()[group].Cables {
		if c.Up.Node == leaf && m.announces(c) {
			if m.Software(leaf) == topo.BIRD && m.Absent(m.Host(group)) {
				return m.lastAdvertised[c.Index]
			}
			speed += uint64(c.Speed)
		}
	}
	return speed
}

// paths returns the number of uplinks that a leaf is built with, at least 1. A leaf's announcements are counted in
// 1/paths bit/s, so that the share of each of its equally fast uplinks is a whole number.
func (m *Model) paths() uint64 { return uint64(max(m.Spines, 1)) }

// announced returns the bandwidth toward a source group that a leaf announces, in 1/paths bit/s: that of its own
// cables, or over each spine the minimum along the way. A leaf with fared announces to each spine its share, whether
// the other spines are up or not; FRR and BIRD announce the whole to every spine. FRR ignores the speed of its own
// uplinks and sums the received values. BIRD passes on the value of its best path, that of the spine with the lowest
// identifier.
func (m *Model) announced(leaf *topo.Node, group int) uint64 {
	if n := m.direct(leaf, group); n > 0 {
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
		if !near.Uplink() || !m.Session(near) {
			continue
		}
		spine := near.Up.Node
		for _, far := range m.At(spine) {
			if far == near || !m.Session(far) {
				continue
			}
			told := m.direct(far.Down.Node, group)
			if m.Software(far.Down.Node) != topo.Fared {
				told *= m.paths()
			}
			speed += through(leaf, near, through(spine, far, told))
		}
		if speed > 0 && m.Software(leaf) == topo.BIRD {
			break
		}
	}
	return speed
}

// Reaches reports whether a leaf or a spine has a path to a source group.
func (m *Model) Reaches(n *topo.Node, group int) bool {
	if n.Kind == topo.KindLeaf {
		return m.announced(n, group) > 0
	}
	for _, c := range m.At(n) {
		if m.Session(c) && m.direct(c.Down.Node, group) > 0 {
			return true
		}
	}
	return false
}

// Vector describes how a source group forwards toward another: the planes' weights in lowest terms, and for each of its
// cables, in the order of topo.Group.Cables, its fraction of the traffic, 0 to 1.
type Vector struct {
	Planes []uint32
	Lanes  []float64
}

func (v Vector) equal(w Vector) bool {
	return slices.Equal(v.Planes, w.Planes) && slices.EqualFunc(v.Lanes, w.Lanes, func(a, b float64) bool { return math.Abs(a-b) < 1e-9 })
}

// Vector returns the model's vector between two source groups. Traffic to a leaf is divided over the cables there by
// speed.
func (m *Model) vector(src, dst int) Vector {
	g := m.Groups()[src]
	v := Vector{m.weights(src, dst), make([]float64, len(g.Cables))}
	var all float64
	for i, c := range g.Cables {
		if m.sends(c) {
			n := float64(m.lanes(src, c.Up.Node))
			v.Lanes[i] = min(n*float64(m.paths()), float64(m.announced(c.Up.Node, dst))) * float64(c.Speed) / n
			all += v.Lanes[i]
		}
	}
	for i := range v.Lanes {
		if all > 0 {
			v.Lanes[i] /= all
		}
	}
	return v
}

// weights returns the model's weights between two source groups: in each plane, over each leaf, the lesser of the
// source's capacity and the leaf's announcement; in lowest terms.
func (m *Model) weights(src, dst int) []uint32 {
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
		g = GCD(g, uint64(n))
	}
	w := make([]uint32, len(v))
	for i, n := range v {
		w[i] = uint32(uint64(n) / max(g, 1))
	}
	return w
}

// ServerNamed finds a server by its name in a script.
func (m *Model) ServerNamed(name string) (int, error) {
	if n := m.Node(name); n != nil && n.Kind == topo.KindServer {
		return n.Index, nil
	}
	return 0, fmt.Errorf("no server %q: there are %s to %s", name, m.Server[0].Name, m.Server[m.Servers-1].Name)
}

// GroupsNamed finds source groups by the name of a group or of its server, or all by "*".
func (m *Model) GroupsNamed(name string) (found []int, err error) {
	if g := m.Group(name); g != nil && strings.Contains(name, "/") {
		return []int{g.Index}, nil
	}
	servers, err := m.ServersNamed(name)
	if err != nil && m.GroupsEach() > 1 {
		err = fmt.Errorf("no server or GPU %q: there are %s to %s", name, m.Groups()[0].Name, m.Groups()[len(m.Groups())-1].Name)
	}
	for _, s := range servers {
		for i := range m.GroupsEach() {
			found = append(found, s*m.GroupsEach()+i)
		}
	}
	return found, err
}

// ServersNamed finds a server by its name, or all by "*".
func (m *Model) ServersNamed(name string) ([]int, error) {
	if name != "*" {
		s, err := m.ServerNamed(name)
		if err != nil {
			return nil, err
		}
		return []int{s}, nil
	}
	all := make([]int, m.Servers)
	for s := range all {
		all[s] = s
	}
	return all, nil
}

// LeafNamed finds a leaf or a spine by its name.
func (m *Model) LeafNamed(name string) (*topo.Node, error) {
	if n := m.Node(name); n != nil && n.Kind != topo.KindServer {
		return n, nil
	}
	text := fmt.Sprintf("no leaf %q: there are %s to %s", name, m.Leaf[0].Name, m.Leaf[len(m.Leaf)-1].Name)
	if n := len(m.Spine); n > 0 {
		text += fmt.Sprintf(", and spines %s to %s", m.Spine[0].Name, m.Spine[n-1].Name)
	}
	return nil, fmt.Errorf("%s", text)
}

// CablesNamed returns a node's cables by name: "p2" (all cables of a server in the plane), "g1" or "g1p2" (those of a
// GPU that owns its ports), or a device such as "p2.0".
func (m *Model) CablesNamed(node, name string) ([]*topo.Cable, error) {
	n := m.Node(node)
	if n == nil {
		_, err := m.ServerNamed(node)
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
	own := m.At(n)
	return nil, fmt.Errorf("no plane or sub-port %q: planes are %s to %s, sub-ports %s to %s", name,
		m.PlaneName(0), m.PlaneName(m.Planes-1), own[0].Down.Device, own[len(own)-1].Down.Device)
}

// GCD returns the greatest common divisor of two numbers; that of 0 and n is n.
func GCD(a, b uint64) uint64 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}
