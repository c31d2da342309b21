package topo

import (
	"fmt"
	"slices"

	"github.com/fared/fared/fare"
)

// Rule is what a Violation is a violation of.
type Rule string

// The rules of conservation, of cables that carry something now. What there is toward a server is the maximum flow of a plane's
// cables. A pair's capacity in a plane is less where there are spines: other pairs need them too, so a server's leaf has for it on
// each uplink the uplink's part, of all that it is wired with, of what it can send to the server (see [Simulation.capacity]).
const (
	// RuleAdvertise: nobody says more bandwidth toward a server than there is.
	RuleAdvertise Rule = "advertise"
	// RuleNoPath: a plane without a path has no weight.
	RuleNoPath Rule = "no-path"
	// RuleUnused: a plane with a path has a weight.
	RuleUnused Rule = "unused"
	// RulePlane: no plane is asked for more than its part of the pair's capacity over all planes; that is, weights are in the
	// ratio of capacities.
	RulePlane Rule = "plane"
	// RuleSubPort: no sub-port, and no leaf that sub-ports go to, is asked for more than it carries when the plane is used as
	// far as its capacity goes; a sub-port that carries nothing has no weight.
	RuleSubPort Rule = "sub-port"
)

// Violation is a rule broken, in one plane.
type Violation struct {
	Rule  Rule   `json:"rule"`
	Plane string `json:"plane"`
	// From is a server, or for RuleAdvertise a leaf or spine; To a server. Pairs is of how many pairs that are like it it is true.
	From  string `json:"from"`
	To    string `json:"to"`
	Pairs int    `json:"pairs"`
	Text  string `json:"text"`
}

// String is one line.
func (v Violation) String() string {
	others := ""
	if v.Pairs > 1 {
		others = fmt.Sprintf(" (and %d pairs like it)", v.Pairs-1)
	}
	return fmt.Sprintf("%s: %s to %s in %s: %s%s", v.Rule, v.From, v.To, v.Plane, v.Text, others)
}

// Check holds the present state against the cables: what is said by whom, and every server's weights. It uses nothing of what
// the speakers use. Leaves and spines come first, then pairs, each in the order of the fabric.
func (s *Simulation) Check() []Violation {
	var all []Violation
	for _, sn := range s.net.nodes {
		for d, what := range sn.told {
			if what.attrs == nil {
				continue
			}
			dest := &s.net.dests[d]
			has := s.flow(sn.Node, dest.node.Node, sn.Plane)
			if more(float64(what.bandwidth()), float64(has)) {
				all = append(all, Violation{RuleAdvertise, s.fabric.PlaneName(sn.Plane), sn.Name, dest.node.Name, dest.stands,
					fmt.Sprintf("says %s, has %s", what.bandwidth(), has)})
			}
		}
	}
	s.net.pairs(func(src, dst, count int) {
		from, to := s.fabric.Server[src], s.fabric.Server[dst]
		weights, subPorts := s.net.weights(src, dst)
		capacity := make([]fare.Bandwidth, len(weights))
		var sum, asked float64
		for p := range weights {
			capacity[p] = s.capacity(from, to, p)
			sum += float64(capacity[p])
			asked += float64(weights[p])
		}
		for p, w := range weights {
			add := func(rule Rule, format string, args ...any) {
				all = append(all, Violation{rule, s.fabric.PlaneName(p), from.Name, to.Name, count, fmt.Sprintf(format, args...)})
			}
			switch {
			case w > 0 && capacity[p] == 0:
				add(RuleNoPath, "weight %d of %v, and no path", w, weights)
			case w == 0 && capacity[p] > 0:
				add(RuleUnused, "no weight of %v, and a path of %s", weights, capacity[p])
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

// checkSubPorts holds a plane's sub-port weights against the sub-ports and the leaves they go to; "" is all right.
func (s *Simulation) checkSubPorts(from, to *Node, plane int, weights []uint32, capacity fare.Bandwidth) string {
	var sum float64
	leaves := map[*Node]float64{}
	for sub, w := range weights {
		sum += float64(w)
		leaves[s.fabric.Cable(plane, from.Index, sub).Up.Node] += float64(w)
	}
	for sub, w := range weights {
		c := s.fabric.Cable(plane, from.Index, sub)
		if speed := s.speedOf(c); more(float64(w)*float64(capacity), float64(speed)*sum) || w > 0 && speed == 0 {
			return fmt.Sprintf("weight %d of %v for %s of %s", w, weights, c.Down.Device, speed)
		}
		leaf := c.Up.Node
		if len(leaves) == 1 {
			continue // it has what the plane has
		}
		if has := s.capacity(leaf, to, plane); more(leaves[leaf]*float64(capacity), float64(has)*sum) {
			return fmt.Sprintf("weight %.0f of %v for %s, which has %s", leaves[leaf], weights, leaf.Name, has)
		}
	}
	return ""
}

// more says whether a is more than b, and not only by what the sums of shares in float32 are off.
func more(a, b float64) bool { return a > b*(1+1e-6) }

// capacity is what a node has for a server in a plane. A leaf that is wired to the server has those cables. Another one has, over
// each spine, the least of its own cable there, the cable from there to the server's leaf, and that one's part of the leaf's
// cables to the server: the part by speed of all uplinks that the leaf is wired with, live or not. A server has over each of its
// leaves the lesser of its cables and of what the leaf has. It is never more than flow, and less when a leaf's other uplinks have
// room that servers behind it could do without.
func (s *Simulation) capacity(from, to *Node, plane int) (sum fare.Bandwidth) {
	cables := func(server, leaf *Node) (sum fare.Bandwidth) {
		for _, c := range s.fabric.At(server) {
			if c.Up.Node == leaf {
				sum = sum.Add(s.speedOf(c))
			}
		}
		return sum
	}
	leaves := func(server *Node) (all []*Node) {
		for _, c := range s.fabric.At(server) {
			if c.Plane == plane && !slices.Contains(all, c.Up.Node) {
				all = append(all, c.Up.Node)
			}
		}
		return all
	}
	switch from.Kind {
	case KindServer:
		for _, leaf := range leaves(from) {
			sum = sum.Add(min(cables(from, leaf), s.capacity(leaf, to, plane)))
		}
	case KindLeaf:
		if direct := cables(to, from); direct > 0 {
			return direct
		}
		for _, c := range s.fabric.At(from) {
			if c.Uplink() {
				sum = sum.Add(min(s.speedOf(c), s.capacity(c.Up.Node, to, plane)))
			}
		}
	case KindSpine:
		for _, leaf := range leaves(to) {
			var speed, live, all fare.Bandwidth
			for _, c := range s.fabric.At(leaf) {
				if !c.Uplink() {
					continue
				}
				if all = all.Add(c.Speed); c.Up.Node == from {
					speed, live = c.Speed, s.speedOf(c)
				}
			}
			part := float64(cables(to, leaf)) * float64(speed) / float64(all)
			sum = sum.Add(min(live, fare.Bandwidth(part)))
		}
	}
	return sum
}

// flow is what there is from a node to a server in a plane: the maximum flow over cables, each path going up before it goes
// down. It is Ford's and Fulkerson's algorithm with shortest paths, on the two or three layers there are.
func (s *Simulation) flow(from, to *Node, plane int) fare.Bandwidth {
	type arc struct {
		node *Node // where it leads
		room fare.Bandwidth
		back int // of the opposite arc
	}
	arcs := map[*Node][]arc{}
	add := func(a, b *Node, room fare.Bandwidth) {
		arcs[a] = append(arcs[a], arc{b, room, len(arcs[b])})
		arcs[b] = append(arcs[b], arc{a, 0, len(arcs[a]) - 1})
	}
	// Down to the server: its leaves, and the spines above them. Up from the node: its leaves and their spines, or its spines.
	lower := map[*Node]bool{} // leaves of the server
	for _, c := range s.fabric.At(to) {
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
			return // no reason to go up
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
		down(from)
	case KindLeaf:
		up(from)
	default:
		climbed := map[*Node]bool{}
		for _, c := range s.fabric.At(from) {
			if c.Plane == plane {
				add(from, c.Up.Node, s.speedOf(c))
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
		came := map[*Node]step{from: {}}
		for queue := []*Node{from}; len(queue) > 0; queue = queue[1:] {
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
		for n := to; n != from; n = came[n].node {
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
