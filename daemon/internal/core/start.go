package core

import (
	"cmp"
	"fmt"
	"math/bits"
	"net/netip"
	"slices"

	"github.com/fared/fared/fare"
	"github.com/fared/fared/wecmp"
)

// The start of a process whose data plane forwards already is that of a restarting speaker (RFC 4724, Section 4.1). A
// plane with a session that has not sent all its routes is kept: of each destination that the data plane already has,
// the plane keeps the share of the traffic that it has there. The other planes divide the rest by their path bandwidth.
// So a withdrawal counts at once, no traffic moves to a plane whose state is unknown, and without a change of the
// fabric nothing changes.

// Held is a vector that the data plane has when it connects for the first time, with its destinations.
type Held struct {
	Source       int            `json:"source,omitempty"` // index of the source group
	Members      []HeldMember   `json:"members"`
	Destinations []netip.Prefix `json:"destinations"`
}

// HeldMember is the weight of a sub-port in a Held vector, at least 1. Sub-ports that are absent carry nothing.
type HeldMember struct {
	SubPort int    `json:"sub_port"`
	Weight  uint32 `json:"weight"`
}

// start is the state of a source group between the first connection of a data plane and the end of the start.
type start struct {
	vectors [][][]uint64 // of the data plane: weights by plane and sub-port
	of      map[netip.Prefix]int
	kept    [2][]bool // by family and plane: a session has not sent all its routes
	// classes are the pairs of path bandwidth and vector that destinations have had, by group; byNumber has the same
	// ones.
	classes  map[fare.GroupID][]uint32
	numbers  map[heldClass]uint32
	byNumber []heldClass
}

// heldClass is the input of weights during the start: a group of the table (0 if no session has a route), a vector of
// the data plane (-1 for a destination that it does not have), and the family, whose sessions count.
type heldClass struct {
	group  fare.GroupID
	vector int
	ipv6   bool
}

// The engine's groups: even numbers are the table's groups, odd ones classes.

func tableGroup(id fare.GroupID) uint32 { return 2 * uint32(id) }

func classGroup(number uint32) uint32 { return 2*number + 1 }

// adopt begins to keep the state of a data plane that connects for the first time.
func (c *Core) adopt(ev DataplaneReady) {
	for _, i := range ev.Down {
		c.subPorts[i].idle = true
	}
	c.checkConverged()
	if c.converged || len(ev.Held) == 0 {
		return
	}
	for i := range c.sessions {
		s, p := &c.sessions[i], &c.subPorts[c.sessions[i].subPort]
		failed := p.known && !p.link || !s.up && (p.idle || s.generation > 0 && !s.closed)
		for family := range s.keeps {
			s.keeps[family] = !failed && c.layout.Sessions[i].FamilySet[family] && !s.eor[family]
		}
	}
	for i := range c.sources {
		s, l := &c.sources[i], &c.layout.Sources[i]
		if s.engine == nil {
			return
		}
		s.start = &start{of: map[netip.Prefix]int{}, classes: map[fare.GroupID][]uint32{}, numbers: map[heldClass]uint32{}}
		for family := range s.start.kept {
			s.start.kept[family] = make([]bool, len(l.Planes))
		}
		c.keptPlanes(i)
	}
	for _, held := range ev.Held {
		st := c.sources[held.Source].start
		vector, ok := c.layout.Sources[held.Source].heldVector(held.Members)
		if !ok {
			continue
		}
		st.vectors = append(st.vectors, vector)
		for _, prefix := range held.Destinations {
			if !slices.Contains(c.cfg.Loopbacks, prefix) {
				st.of[prefix] = len(st.vectors) - 1
			}
		}
	}
	for i := range c.sources {
		s, l := &c.sources[i], &c.layout.Sources[i]
		for prefix, id := range s.table.Destinations {
			c.fault("weight engine", s.assign(l, prefix, id))
		}
		for _, prefix := range s.start.destinations() {
			if _, known := s.table.Destination(prefix); !known {
				c.fault("weight engine", s.assign(l, prefix, 0))
			}
		}
		for id := range s.table.Groups {
			c.fault("weight engine", s.engine.DeleteGroup(tableGroup(id)))
		}
	}
}

// heldVector converts a vector of the data plane, or returns false if no sub-port of the source group is in it.
func (l *SourceLayout) heldVector(members []HeldMember) (out [][]uint64, ok bool) {
	for _, subPorts := range l.OfPlane {
		out = append(out, make([]uint64, len(subPorts)))
	}
	for _, m := range members {
		if at := l.at.subPorts[m.SubPort]; at >= 0 && m.Weight > 0 {
			sp := &l.SubPorts[at]
			out[sp.Plane][sp.inPlane], ok = uint64(m.Weight), true
		}
	}
	return out, ok
}

// destinations returns the destinations that the data plane has, sorted.
func (st *start) destinations() []netip.Prefix {
	out := make([]netip.Prefix, 0, len(st.of))
	for prefix := range st.of {
		out = append(out, prefix)
	}
	slices.SortFunc(out, func(p, q netip.Prefix) int {
		return cmp.Or(p.Addr().Compare(q.Addr()), cmp.Compare(p.Bits(), q.Bits()))
	})
	return out
}

// keptPlanes updates the planes that a source group keeps, and reports whether any has ended.
func (c *Core) keptPlanes(source int) (ended bool) {
	l, st := &c.layout.Sources[source], c.sources[source].start
	for family := range st.kept {
		before := slices.Clone(st.kept[family])
		clear(st.kept[family])
		for i := range c.sessions {
			if at := l.at.sessions[i]; at >= 0 && c.sessions[i].keeps[family] {
				st.kept[family][l.Sessions[at].Plane] = true
			}
		}
		ended = ended || !slices.Equal(before, st.kept[family])
	}
	return ended
}

// release ends the keeping of the data plane's state for a session: in the families of which it has sent all routes, or
// in both.
func (c *Core) release(session int, families ...int) {
	s, released := &c.sessions[session], false
	if len(families) == 0 {
		families = []int{0, 1}
	}
	for _, family := range families {
		released = released || s.keeps[family]
		s.keeps[family] = false
	}
	if !released {
		return
	}
	for i := range c.sources {
		if c.sources[i].start != nil && c.keptPlanes(i) {
			c.reweigh(i)
		}
	}
}

// reweigh recomputes the weights of all classes of a source group.
func (c *Core) reweigh(source int) {
	s := &c.sources[source]
	if s.start == nil {
		return
	}
	for number := range s.start.byNumber {
		c.fault("weight engine", s.setClass(&c.layout.Sources[source], uint32(number)))
	}
}

// applyStarting is apply during the start.
func (s *sourceGroup) applyStarting(l *SourceLayout, ch fare.Change) error {
	switch ch.Kind {
	case fare.GroupSet:
		for _, number := range s.start.classes[ch.Group] {
			if err := s.setClass(l, number); err != nil {
				return err
			}
		}
	case fare.DestinationSet:
		return s.assign(l, ch.Destination, ch.Group)
	case fare.DestinationDelete:
		return s.assign(l, ch.Destination, 0)
	}
	return nil // the classes of a deleted group remain: its number may be assigned again
}

// assign gives a destination the weights of its class during the start.
func (s *sourceGroup) assign(l *SourceLayout, prefix netip.Prefix, group fare.GroupID) error {
	class := heldClass{group: group, vector: -1}
	if at, held := s.start.of[prefix]; held {
		class.vector, class.ipv6 = at, prefix.Addr().Is6()
	} else if group == 0 {
		s.engine.DeleteDestination(prefix)
		return nil
	}
	number, ok := s.start.numbers[class]
	if !ok {
		number = uint32(len(s.start.byNumber))
		s.start.numbers[class] = number
		s.start.byNumber = append(s.start.byNumber, class)
		s.start.classes[group] = append(s.start.classes[group], number)
		if err := s.setClass(l, number); err != nil {
			return err
		}
	}
	return s.engine.SetDestination(prefix, classGroup(number))
}

// setClass passes the weights of a class to the engine.
func (s *sourceGroup) setClass(l *SourceLayout, number uint32) error {
	class := s.start.byNumber[number]
	s.capacities(l, class.group)
	if class.vector >= 0 {
		s.keep(l, s.start.vectors[class.vector], s.start.keptBy(class), class.group)
	}
	return s.engine.SetGroup(classGroup(number), s.planes)
}

// keptBy returns by plane whether a class keeps the data plane's share.
func (st *start) keptBy(class heldClass) []bool {
	if class.ipv6 {
		return st.kept[1]
	}
	return st.kept[0]
}

// heldWeight returns the weight of sub-port k of plane p in a vector of the data plane, 0 if it is drained, or if the
// plane is avoided toward a group of the table, which takes a route by the plane and one by another.
func (s *sourceGroup) heldWeight(l *SourceLayout, held [][]uint64, p, k int, group fare.GroupID) uint64 {
	if s.table.SubPort(l.OfPlane[p][k]).Reason == fare.ReasonDrained {
		return 0
	}
	if planes := s.table.Group(group).Planes; planes != nil && planes[p].Reason == fare.ReasonAvoided {
		return 0
	}
	return held[p][k]
}

// keep replaces the capacities of kept planes in s.planes by those that leave them their share of a held vector. With
// h(p) the weight of plane p in the vector, H the sum of all, K the sum of the kept ones, and b(p) the path bandwidth,
// B the sum over the planes that are not kept:
//
//	capacity(p) = h(p) * B for a kept plane, b(p) * (H - K) for another
//
// A drain or avoidance counts at once, so their sub-ports have weight 0. If B is 0, the kept planes carry everything.
func (s *sourceGroup) keep(l *SourceLayout, held [][]uint64, kept []bool, group fare.GroupID) {
	weights, all, keeping, rest := make([]uint64, len(held)), uint64(0), uint64(0), uint64(0) // h, H, K, B
	keeps := func(p int) bool { return kept[p] && weights[p] > 0 }
	for p := range held {
		for k := range held[p] {
			weights[p] += s.heldWeight(l, held, p, k, group)
		}
		all += weights[p]
		if keeps(p) {
			keeping += weights[p]
		} else {
			rest += s.planes[p].Capacity
		}
	}
	if keeping == 0 {
		return
	}
	// A product has at most 97 bits: a plane's weight 38, the sum of 64 capacities 59.
	high, low, length := make([]uint64, len(held)), make([]uint64, len(held)), 0
	for p := range held {
		if keeps(p) {
			high[p], low[p] = bits.Mul64(weights[p], max(rest, 1))
			for k := range held[p] {
				s.planes[p].SubPorts[k] = s.heldWeight(l, held, p, k, group)
			}
		} else {
			high[p], low[p] = bits.Mul64(s.planes[p].Capacity, all-keeping)
		}
		length = max(length, bits.Len64(low[p]))
		if high[p] > 0 {
			length = max(length, 64+bits.Len64(high[p]))
		}
	}
	shift := max(0, length-bits.Len64(wecmp.MaxCapacity-1))
	for p := range held {
		s.planes[p].Capacity = max(low[p]>>shift|high[p]<<(64-shift), min(1, high[p]|low[p]))
	}
}

// endStart ends the keeping of the data plane's state: routes alone decide.
func (c *Core) endStart() {
	c.converged, c.held = true, DataplaneReady{}
	for i := range c.sessions {
		c.sessions[i].keeps = [2]bool{}
	}
	for i := range c.sources {
		s, l := &c.sources[i], &c.layout.Sources[i]
		st := s.start
		if st == nil {
			continue
		}
		s.start = nil
		for id := range s.table.Groups {
			c.fault("weight engine", s.setGroup(l, id))
		}
		for prefix, id := range s.table.Destinations {
			c.fault("weight engine", s.engine.SetDestination(prefix, tableGroup(id)))
		}
		for _, prefix := range st.destinations() {
			if _, known := s.table.Destination(prefix); !known {
				s.engine.DeleteDestination(prefix)
			}
		}
		for number := range st.byNumber {
			c.fault("weight engine", s.engine.DeleteGroup(classGroup(uint32(number))))
		}
	}
}

// disown drops a destination that the data plane has, because it now is a loopback of this node.
func (c *Core) disown(prefix netip.Prefix) {
	for i := range c.sources {
		s := &c.sources[i]
		if s.start == nil {
			continue
		}
		delete(s.start.of, prefix)
		if _, known := s.table.Destination(prefix); !known {
			s.engine.DeleteDestination(prefix)
		}
	}
}

// checkHeld returns an error for the state of a data plane that refers to an index outside the configuration.
func (c *Core) checkHeld(ev DataplaneReady) error {
	if err := c.checkSlots(ev.Slots); err != nil {
		return err
	}
	subPort := func(i int) error {
		if i < 0 || i >= len(c.subPorts) {
			return fmt.Errorf("sub-port %d: the configuration has %d", i, len(c.subPorts))
		}
		return nil
	}
	for _, i := range ev.Down {
		if err := subPort(i); err != nil {
			return err
		}
	}
	for _, held := range ev.Held {
		if held.Source < 0 || held.Source >= len(c.sources) {
			return fmt.Errorf("source group %d: the configuration has %d", held.Source, len(c.sources))
		}
		for _, m := range held.Members {
			if err := subPort(m.SubPort); err != nil {
				return err
			}
		}
	}
	return nil
}
