package topo

import (
	"slices"
	"strings"
)

// Double is a double failure, and the number of double failures like it.
type Double struct {
	Failed [2]string
	Count  int
}

// Doubles returns the pairs of single failures (see [Fabric.Single]) that can happen in addition to the present ones.
// Of pairs that servers alike can swap, the first one represents all. A failure that would change no cable is omitted.
func (s *Simulation) Doubles() (all []Double) {
	class := s.classes(s.state)
	size, second := map[int]int{}, map[int]int{} // by class: members, and the second one
	first := map[int]int{}
	for i, c := range class {
		switch size[c]++; size[c] {
		case 1:
			first[c] = i
		case 2:
			second[c] = i
		}
	}
	items := s.singles()
	for i, x := range items {
		if x.server >= 0 && first[class[x.server]] != x.server {
			continue
		}
		weight := 1
		if x.server >= 0 {
			weight = size[class[x.server]]
		}
		for j, y := range items {
			switch {
			case y.server >= 0 && y.server != x.server && first[class[y.server]] != y.server:
			case j > i && (y.server < 0 || y.server == x.server):
				all = append(all, Double{[2]string{x.name, y.name}, weight})
			case j > i && x.server < 0:
				all = append(all, Double{[2]string{x.name, y.name}, size[class[y.server]]})
			case j > i:
				all = append(all, Double{[2]string{x.name, y.name}, weight * size[class[y.server]]})
			}
			// The second failure may also be that of the next server of the same class.
			if j < i || x.server < 0 || y.server != x.server || weight < 2 {
				continue
			}
			count := weight * (weight - 1)
			if i == j {
				count /= 2
			}
			other := s.fabric.Server[second[class[x.server]]].Name + strings.TrimPrefix(y.name, s.fabric.Server[x.server].Name)
			all = append(all, Double{[2]string{x.name, other}, count})
		}
	}
	return all
}

// single is a single failure with its server, -1 without one.
type single struct {
	name   string
	server int
}

// singles returns the single failures that change a cable.
func (s *Simulation) singles() (all []single) {
	for _, name := range s.fabric.Single() {
		found, _ := s.fabric.Find(name) // Single returns names that exist
		if !slices.ContainsFunc(found, func(c *Cable) bool { return s.state[c.Index]&dark == 0 }) {
			continue
		}
		x := single{name, -1}
		node, _, _ := strings.Cut(name, "/")
		if n := s.fabric.Node(node); n != nil && n.Kind == KindServer {
			x.server = n.Index
		}
		all = append(all, x)
	}
	return all
}
