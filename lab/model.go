package lab

import "fmt"

// model is what the fabric's cables and drains are, and what weights follow: a few lines of arithmetic that know nothing
// of BGP, communities or groups, so that they can judge them.
type model struct {
	*plan
	// cut[plane][server][sub] says that a cable is cut; dark[plane] that the leaf is; drained as cut, by the server's drain.
	cut, drained [][][]bool
	dark         []bool
	// dead are the processes of each server that have crashed.
	dead []parts
	// waiting: a server's control plane has returned without its data plane, and has no sessions until that is back.
	waiting []bool
	// frozen are, of a server any of whose processes is dead, its weights toward every server when the first one died.
	frozen [][][]uint32
	// silent[plane][server][sub] says that the leaf has lost the routes of a cable and cannot learn them again, for a process of
	// the server is dead.
	silent [][][]bool
}

func newModel(p *plan) *model {
	cube := func() [][][]bool {
		c := make([][][]bool, p.Planes)
		for i := range c {
			c[i] = make([][]bool, p.Servers)
			for k := range c[i] {
				c[i][k] = make([]bool, p.SubPorts)
			}
		}
		return c
	}
	return &model{plan: p, cut: cube(), drained: cube(), silent: cube(), dark: make([]bool, p.Planes),
		dead: make([]parts, p.Servers), waiting: make([]bool, p.Servers), frozen: make([][][]uint32, p.Servers)}
}

// cable is a cable as it should be.
func (m *model) cable(plane, server, sub int) cable {
	return cable{server, sub, !m.cut[plane][server][sub] && !m.dark[plane]}
}

// lanes is how many sub-ports of a server still carry traffic in a plane.
func (m *model) lanes(plane, server int) uint32 {
	return m.count(plane, server, func(int) bool { return true })
}

// announced is how many of them the leaf has routes over, which the other servers learn.
func (m *model) announced(plane, server int) uint32 {
	return m.count(plane, server, func(sub int) bool { return !m.silent[plane][server][sub] })
}

func (m *model) count(plane, server int, too func(sub int) bool) (n uint32) {
	for sub := range m.SubPorts {
		if m.cable(plane, server, sub).up && !m.drained[plane][server][sub] && too(sub) {
			n++
		}
	}
	return n
}

// weights is what holds between two servers: in each plane the lesser of what the two ends have, in lowest terms.
func (m *model) weights(src, dst int) []uint32 {
	w := make([]uint32, m.Planes)
	for plane := range w {
		w[plane] = min(m.lanes(plane, src), m.announced(plane, dst))
	}
	return lowestTerms(w)
}

func lowestTerms(w []uint32) []uint32 {
	var g uint32
	for _, v := range w {
		for a, b := g, v; ; {
			if b == 0 {
				g = a
				break
			}
			a, b = b, a%b
		}
	}
	if g > 1 {
		for i := range w {
			w[i] /= g
		}
	}
	return w
}

// place finds a server, leaf, plane or sub-port by its name in a script.
func (m *model) server(name string) (int, error) {
	for s := range m.Servers {
		if m.serverName(s) == name {
			return s, nil
		}
	}
	return 0, fmt.Errorf("no server %q: there are %s to %s", name, m.serverName(0), m.serverName(m.Servers-1))
}

func (m *model) leaf(name string) (int, error) {
	for p := range m.Planes {
		if m.leafName(p) == name {
			return p, nil
		}
	}
	return 0, fmt.Errorf("no leaf %q: there are %s to %s", name, m.leafName(0), m.leafName(m.Planes-1))
}

// lanesOf returns the plane and the sub-ports that "p2" (all of the plane's) or "p2.0" names.
func (m *model) lanesOf(name string) (plane int, subs []int, err error) {
	for p := range m.Planes {
		if m.planeName(p) == name {
			for sub := range m.SubPorts {
				subs = append(subs, sub)
			}
			return p, subs, nil
		}
		for sub := range m.SubPorts {
			if m.device(p, sub) == name {
				return p, []int{sub}, nil
			}
		}
	}
	return 0, nil, fmt.Errorf("no plane or sub-port %q: planes are %s to %s, sub-ports %s to %s", name,
		m.planeName(0), m.planeName(m.Planes-1), m.device(0, 0), m.device(m.Planes-1, m.SubPorts-1))
}
