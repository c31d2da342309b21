package topo

import (
	"fmt"
	"slices"

	"github.com/fared/fared/fare"
)

// Rule is a rule that a Violation breaks.
type Rule string

// The rules of conservation, over the cables that carry traffic now. The bandwidth toward a server is the maximum flow
// over a plane's cables. A pair's capacity in a plane is less if there are spines, because other pairs need them too:
// on each uplink, the server's leaf counts with the uplink's part, relative to all configured uplinks, of the bandwidth
// that the leaf can send to the server (see [Simulation.capacity]).
const (
	// RuleAdvertise: no node advertises more bandwidth toward a server than there is.
	RuleAdvertise Rule = "advertise"
	// RuleNoPath: a plane without a path has no weight.
	RuleNoPath Rule = "no-path"
	// RuleUnused: a plane with a path has a weight.
	RuleUnused Rule = "unused"
	// RulePlane: no plane is assigned more than its part of the pair's capacity over all planes; that is, weights are
	// in the ratio of capacities.
	RulePlane Rule = "plane"
	// RuleSubPort: no sub-port, and no leaf of sub-ports, is assigned more than it carries when the plane is used up to
	// its capacity; a sub-port that carries nothing has no weight.
	RuleSubPort Rule = "sub-port"
)

// Violation is a broken rule in one plane.
type Violation struct {
	Rule  Rule   `json:"rule"`
	Plane string `json:"plane"`
	// From is a source group, or for RuleAdvertise a leaf or spine; To is a source group. Pairs is the number of
	// equivalent pairs affected.
	From  string `json:"from"`
	To    string `json:"to"`
	Pairs int    `json:"pairs"`
	Text  string `json:"text"`
}

// String returns the violation in one line.
func (v Violation) String() string {
	others := ""
	if v.Pairs > 1 {
		others = fmt.Sprintf(" (and %d pairs like it)", v.Pairs-1)
	}
	return fmt.Sprintf("%s: %s to %s in %s: %s%s", v.Rule, v.From, v.To, v.Plane, v.Text, others)
}

// Check compares the present state, both the nodes' advertisements and every server's weights, with the cables. It
// shares no code with the speakers. Leaves and spines come first, then pairs, each in the order of the fabric.
func (s *Simulation) Check() []Violation {
	var all []Violation
	for _, sn := range s.net.nodes {
		for d, what := range sn.adverts {
			if what.attrs == nil {
				continue
			}
			dest := &s.net.dests[d]
			has := s.flow(s.vertex(sn.Node), dest.group, sn.Plane)
			if more(float64(what.bandwidth()), float64(has)) {
				all = append(all, Violation{RuleAdvertise, s.fabric.PlaneName(sn.Plane), sn.Name, dest.group.Name, dest.stands,
					fmt.Sprintf("advertises %s, has %s", what.bandwidth(), has)})
			}
		}
	}
	s.net.pairs(func(src, dst, count int) {
		from, to := s.fabric.groups[src], s.fabric.groups[dst]
		weights, subPorts := s.net.weights(src, dst)
		capacity := make([]fare.Bandwidth, len(weights))
		var sum, asked float64
		for p := range weights {
			capacity[p] = s.capacity(vertex{from.Server, from.Cables}, to, p)
			sum += float64(capacity[p])
			asked += float64(weights[p])
		}
		for p, w := range weights {
			add := func(rule Rule, format string, args ...any) {
				all = append(all, Violation{rule, s.fabric.PlaneName(p), from.Name, to.Name, count, fmt.Sprintf(format, args...)})
			}
			switch {
			case w > 0 && capacity[p] == 0:
				add(RuleNoPath, "weight %d of %v, but no path", w, weights)
			case w == 0 && capacity[p] > 0:
				add(RuleUnused, "no weight of %v, but a path of %s", weights, capacity[p])
			case more(float64(w)*sum, float64(capacity[p])*asked):
				add(RulePlane, "weight %d of %v, for %s of %s", w, weights, capacity[p], fare.Bandwidth(sum))
			}
			if text := s.checkSubPorts(from, to, p, subPorts[p], capacity[p]); text != "" {
				add(RuleSubPort, "%s", text)
			}
		}
	})
	return all
}

// checkSubPorts compares a plane's sub-port weights with the sub-ports and their leaves; "" means no violation.
func (s *Simulation) checkSubPorts(from, to *Group, plane int, weights []uint32, capacity fare.Bandwidth) string {
	var sum float64
	leaves := map[*Node]float64{}
	for sub, w := range weights {
		sum += float64(w)
		leaves[from.Planes[plane][sub].Up.Node] += float64(w)
	}
	for sub, w := range weights {
		c := from.Planes[plane][sub]
		if speed := s.speedOf(c); more(float64(w)*float64(capacity), float64(speed)*sum) || w > 0 && speed == 0 {
			return fmt.Sprintf("weight %d of %v for %s of %s", w, weights, c.Down.Device, speed)
		}
		leaf := c.Up.Node
		if len(leaves) == 1 {
			continue // its capacity equals the plane's
		}
		if has := s.capacity(s.vertex(leaf), to, plane); more(leaves[leaf]*float64(capacity), float64(has)*sum) {
			return fmt.Sprintf("weight %.0f of %v for %s, which has %s", leaves[leaf], weights, leaf.Name, has)
		}
	}
	return ""
}

// more reports whether a exceeds b by more than the error of sums of float32 shares.
func more(a, b float64) bool { return a > b*(1+1e-6) }

// capacity returns a node's bandwidth toward a server in a plane. For a leaf that is wired to the server it is that of
// those cables. For another leaf it is, over each spine, the least of three: its own cable to the spine, the cable from
// the spine to the server's leaf, and that cable's part of the leaf's cables to the server, by speed among all
// configured uplinks, including failed ones. For a server it is, over each of its leaves, the lesser of its cables and
// the leaf's capacity. The capacity never exceeds flow. It is less if a leaf's other uplinks have room that the servers
// behind that leaf do not need.
func (s *Simulation) capacity(from vertex, to *Group, plane int) (sum fare.Bandwidth) {
	cables := func(all []*Cable, leaf *Node) (sum fare.Bandwidth) {
		for _, c := range all {
			if c.Up.Node == leaf {
				sum = sum.Add(s.speedOf(c))
			}
		}
		return sum
	}
	leaves := func(cables []*Cable) (all []*Node) {
		for _, c := range cables {
			if c.Plane == plane && !slices.Contains(all, c.Up.Node) {
				all = append(all, c.Up.Node)
			}
		}
		return all
	}
	switch from.Kind {
	case KindServer:
		for _, leaf := range leaves(from.cables) {
			sum = sum.Add(min(cables(from.cables, leaf), s.capacity(s.vertex(leaf), to, plane)))
		}
	case KindLeaf:
		if direct := cables(to.Cables, from.Node); direct > 0 {
			return direct
		}
		for _, c := range from.cables {
			if c.Uplink() {
				sum = sum.Add(min(s.speedOf(c), s.capacity(s.vertex(c.Up.Node), to, plane)))
			}
		}
	case KindSpine:
		for _, leaf := range leaves(to.Cables) {
			var speed, live, all fare.Bandwidth
			for _, c := range s.fabric.At(leaf) {
				if !c.Uplink() {
					continue
				}
				if all = all.Add(c.Speed); c.Up.Node == from.Node {
					speed, live = c.Speed, s.speedOf(c)
				}
			}
			part := float64(cables(to.Cables, leaf)) * float64(speed) / float64(all)
			sum = sum.Add(min(live, fare.Bandwidth(part)))
		}
	}
	return sum
}

// vertex is the start of packets: a leaf or spine with its cables, or a server with those of a source group.
type vertex struct {
	*Node
	cables []*Cable
}

// vertex returns the vertex of a leaf or spine.
func (s *Simulation) vertex(n *Node) vertex { return vertex{n, s.fabric.At(n)} }

// flow returns the maximum flow over cables from a node to a server in a plane, where each path goes up before it goes
// down. It is Ford and Fulkerson's algorithm with shortest paths, on the two or three layers of a plane.
func (s *Simulation) flow(from vertex, target *Group, plane int) fare.Bandwidth {
	to := target.Server
	type arc struct {
		node *Node // far end
		room fare.Bandwidth
		back int // index of the opposite arc
	}
	arcs := map[*Node][]arc{}
	add := func(a, b *Node, room fare.Bandwidth) {
		arcs[a] = append(arcs[a], arc{b, room, len(arcs[b])})
		arcs[b] = append(arcs[b], arc{a, 0, len(arcs[a]) - 1})
	}
	// Down to the server: its leaves, and the spines above them. Up from the node: its leaves and their spines, or its
	// spines.
	lower := map[*Node]bool{} // leaves of the server
	for _, c := range target.Cables {
		if c.Plane == plane {
			lower[c.Up.Node] = true
			add(c.Up.Node, to, s.speedOf(c))
		}
	}
	spines := map[*Node]bool{}
	down := func(spine *Node) {
		if spines[spine] {
			return
		}
		spines[spine] = true
		for _, c := range s.fabric.At(spine) {
			if lower[c.Down.Node] {
				add(spine, c.Down.Node, s.speedOf(c))
			}
		}
	}
	up := func(leaf *Node) {
		if lower[leaf] {
			return // the path goes down from here
		}
		for _, c := range s.fabric.At(leaf) {
			if c.Uplink() {
				add(leaf, c.Up.Node, s.speedOf(c))
				down(c.Up.Node)
			}
		}
	}
	switch from.Kind {
	case KindSpine:
		down(from.Node)
	case KindLeaf:
		up(from.Node)
	default:
		climbed := map[*Node]bool{}
		for _, c := range from.cables {
			if c.Plane == plane {
				add(from.Node, c.Up.Node, s.speedOf(c))
				if !climbed[c.Up.Node] {
					climbed[c.Up.Node] = true
					up(c.Up.Node)
				}
			}
		}
	}
	type step struct {
		node *Node
		arc  int
	}
	var flow fare.Bandwidth
	for {
		came := map[*Node]step{from.Node: {}}
		for queue := []*Node{from.Node}; len(queue) > 0; queue = queue[1:] {
			for i, a := range arcs[queue[0]] {
				if _, seen := came[a.node]; !seen && a.room > 0 {
					came[a.node] = step{queue[0], i}
					queue = append(queue, a.node)
				}
			}
		}
		if _, reached := came[to]; !reached {
			return flow
		}
		var path []step
		room := fare.MaxBandwidth
		for n := to; n != from.Node; n = came[n].node {
			path = append(path, came[n])
			room = min(room, arcs[came[n].node][came[n].arc].room)
		}
		for _, st := range slices.Backward(path) {
			a := &arcs[st.node][st.arc]
			a.room -= room
			arcs[a.node][a.back].room += room
		}
		flow = flow.Add(room)
	}
}
