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
	items := s.singles()
	k := alike{class: s.classes(s.state)}
	k.members = make([][]int, len(k.class))
	for i, c := range k.class {
		k.members[c] = append(k.members[c], i)
	}
	for i, x := range items {
		if !k.first(x.server) {
			continue
		}
		for j, y := range items[i:] {
			if j > 0 && (k.first(y.server) || y.server == x.server) {
				count := k.size(x.server)
				if y.server != x.server {
					count *= k.size(y.server)
				}
				all = append(all, Double{[2]string{x.name, y.name}, count})
			}
			// The second failure may also be that of the next server of the same class.
			if n := k.size(x.server); x.server >= 0 && y.server == x.server && n > 1 {
				count := n * (n - 1)
				if j == 0 {
					count /= 2
				}
				next := s.fabric.Server[k.members[k.class[x.server]][1]].Name + strings.TrimPrefix(y.name, s.fabric.Server[x.server].Name)
				all = append(all, Double{[2]string{x.name, next}, count})
			}
		}
	}
	return all
}

// alike has the classes of servers alike.
type alike struct {
	class   []int   // by server
	members [][]int // by class
}

// first reports whether a server is the first of its class; no server, -1, is.
func (k alike) first(server int) bool { return server < 0 || k.members[k.class[server]][0] == server }

// size returns the number of servers alike, 1 for no server.
func (k alike) size(server int) int {
	if server < 0 {
		return 1
	}
	return len(k.members[k.class[server]])
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
