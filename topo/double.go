package topo

import (
	"slices"
	"strings"
)

// Failures are parts that fail together, and the number of failures like them.
type Failures struct {
	Parts []string
	Count int
}

// Singles returns the single failures (see [Fabric.Single]) that can happen in addition to the present ones. Of those
// that a symmetry of the fabric in its present state exchanges (see orbits), the first one represents all. A failure
// that would change no cable is omitted.
func (s *Simulation) Singles() []Failures {
	items, first := s.singles()
	all := make([]Failures, len(first))
	for k, i := range first {
		all[k].Parts = []string{items[i].name}
	}
	for _, x := range items {
		all[x.orbit].Count++
	}
	return all
}

// Doubles returns the pairs of single failures, as Singles does. Each permutation of planes, racks, servers, GPUs or
// spines that keeps the state is a symmetry, so two pairs are alike if their parts are, and share the same of these.
func (s *Simulation) Doubles() (all []Failures) {
	items, first := s.singles()
	size := make([]int, len(first))
	for _, x := range items {
		size[x.orbit]++
	}
	for a, i := range first {
		number := map[shared]int{}
		for j := range items {
			if y := &items[j]; y.orbit >= a && i != j {
				k := items[i].shared(y)
				n, known := number[k]
				if !known {
					n = len(all)
					number[k] = n
					all = append(all, Failures{Parts: []string{items[i].name, y.name}})
				}
				all[n].Count++
			}
		}
		for k, n := range number {
			if all[n].Count *= size[a]; k.orbit == a {
				all[n].Count /= 2 // every pair has two first parts
			}
		}
	}
	return all
}

// single is a single failure.
type single struct {
	name  string
	orbit int // number of the failures like it
	place
}

// place has the indexes that all cables of a failure share, or -1. For failures alike it has the numbers of orbits.
type place struct{ plane, rack, server, group, spine, sub int }

// shared tells the indexes that two failures share, and has the orbit of the second one.
type shared struct {
	orbit                             int
	plane, rack, server, group, spine bool
}

func (x *single) shared(y *single) shared {
	same := func(a, b int) bool { return a >= 0 && a == b }
	plane := same(x.plane, y.plane)
	return shared{y.orbit, plane, same(x.rack, y.rack), same(x.server, y.server), same(x.group, y.group), plane && same(x.spine, y.spine)}
}

// singles returns the single failures that change a cable, and of each orbit the index of the first.
func (s *Simulation) singles() (all []single, first []int) {
	o := s.orbits()
	type kind struct {
		node   Kind
		inside bool // a part of a node
		place
	}
	number := map[kind]int{}
	for _, name := range s.fabric.Single() {
		found, _ := s.fabric.Find(name) // Single returns names that exist
		if !slices.ContainsFunc(found, func(c *Cable) bool { return s.state[c.Index]&dark == 0 }) {
			continue
		}
		owner, _, inside := strings.Cut(name, "/")
		k := kind{node: 3, inside: inside} // a plane
		x := single{name: name}
		if n := s.fabric.Node(owner); n != nil {
			k.node = n.Kind
		}
		x.place = o.place(k.node, found)
		k.place = o.alike(x.place)
		n, known := number[k]
		if !known {
			n = len(first)
			number[k] = n
			first = append(first, len(all))
		}
		x.orbit = n
		all = append(all, x)
	}
	return all, first
}

// place returns the place of cables at a node of a kind.
func (o *orbits) place(node Kind, cables []*Cable) place {
	each := func(index func(*Cable) int) int {
		first := index(cables[0])
		if slices.ContainsFunc(cables, func(c *Cable) bool { return index(c) != first }) {
			return -1
		}
		return first
	}
	p := place{each(func(c *Cable) int { return c.Plane }), -1, -1, -1, -1, -1}
	f := o.sim.fabric
	switch node {
	case KindServer:
		p.server = cables[0].Group.Server.Index
		p.rack = o.rack[p.server]
		p.group, p.sub = each(func(c *Cable) int { return c.Group.Index }), each(func(c *Cable) int { return c.Sub })
	case KindLeaf:
		p.rack = each(func(c *Cable) int {
			if c.Uplink() {
				return c.Down.Node.Index % f.Leaves
			}
			return c.Up.Node.Index % f.Leaves
		})
		p.spine = each(func(c *Cable) int {
			if c.Uplink() {
				return c.Sub
			}
			return -1
		})
	case KindSpine:
		p.spine = cables[0].Sub
	}
	return p
}

// alike returns the numbers of orbits at a place.
func (o *orbits) alike(p place) place {
	if p.spine >= 0 {
		p.spine = o.spines[p.plane].of[p.spine]
	}
	for _, x := range []struct {
		index *int
		orbit orbit
	}{{&p.plane, o.planes}, {&p.server, o.servers}, {&p.group, o.hosts}} {
		if *x.index >= 0 {
			*x.index = x.orbit.of[*x.index]
		}
	}
	if p.rack >= 0 && o.sim.fabric.Cabling == Block { // a leaf of the others has a sub-port of every server
		p.rack = o.racks.of[p.rack]
	}
	return p
}
