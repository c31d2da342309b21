package fare

import (
	"net/netip"
	"slices"
)

// GroupID names a group of destinations. Numbers are small, from 1, the lowest
// free first; 0 is no group.
type GroupID uint32

// Rule is how a group's capacities came about.
type Rule uint8

// The rules. The zero value is that of a group without a usable path.
const (
	RuleNoPath             Rule = iota // no usable path
	RuleAdvertised                     // every usable path carries a value: b(n) counts
	RuleLocalSpeed                     // none does: local link speed counts
	RuleMissingEqual                   // some do: every plane with a usable path gets the same
	RuleMissingLocal                   // some do: those without count with local link speed
	RuleMissingSkip                    // some do: those without are not used
	RuleAllZeroEqual                   // every usable value is zero: every plane with a usable path gets the same
	RuleAllZeroUnreachable             // every usable value is zero: unreachable
)

var ruleNames = []string{
	"no-path", "advertised", "local-speed", "missing-equal", "missing-local", "missing-skip",
	"all-zero-equal", "all-zero-unreachable",
}

var ruleSentences = []string{
	"no path is usable",
	"every usable path carries a bandwidth: a node counts with the lower of that and the local links toward it",
	"no usable path carries a bandwidth: local link speed counts",
	"some usable paths carry no bandwidth, policy equal: every plane with a usable path gets the same",
	"some usable paths carry no bandwidth, policy local: those count with local link speed",
	"some usable paths carry no bandwidth, policy skip: those are not used",
	"every usable path advertises zero, policy equal: every plane with a usable path gets the same",
	"every usable path advertises zero, policy unreachable: nothing is sent",
}

// String is a word for status output.
func (r Rule) String() string { return enumName(ruleNames, r) }

// Sentence says the rule in words.
func (r Rule) Sentence() string { return enumName(ruleSentences, r) }

// GroupView is what a group of destinations gets. Its slices belong to the
// table and are valid until the next [Table.Step].
type GroupView struct {
	Planes    []PlaneBandwidth // one per configured plane
	Reachable bool             // some plane has a capacity
	Reason    Reason           // why not reachable; ReasonUsed when it is
	Rule      Rule
}

// PlaneBandwidth is one plane's part.
type PlaneBandwidth struct {
	Bandwidth Bandwidth // B(p, destination): sum of b(n) over the nodes used
	// Capacity is what weights are made of: Bandwidth in bit/s, moved by less
	// than a millionth where that brings the planes to a simpler ratio; or 1
	// where a policy makes planes equal. 0: the plane carries nothing.
	Capacity uint64
	SubPorts []SubPortWeight // those with a weight, by index
	Reason   Reason          // why Capacity is 0; ReasonUsed when it is not
}

// SubPortWeight is a sub-port's part of its plane's traffic, in lowest terms
// within the plane, at least 1; those of one plane sum to less than 2^63.
type SubPortWeight struct {
	SubPort int
	Weight  uint64
}

// entry is what one session's route says to a group. A group's entries are
// its signature.
type entry struct {
	generation uint64
	value      Bandwidth
	rank       uint16 // of the session; entries are sorted by it
	hops       uint16 // role leaf: AS numbers in the path; else 0
	known      bool   // value was advertised
	originated bool   // by the neighbour itself
}

func (h hasher) entries(es []entry) uint64 {
	hash := uint64(len(es))
	for i := range es {
		e := &es[i]
		word := uint64(e.hops)<<32 | uint64(e.rank)<<2
		if e.known {
			word |= 1
		}
		if e.originated {
			word |= 2
		}
		hash = h.mix(hash^e.generation, h.mix(uint64(e.value), word))
	}
	return hash
}

// group is a set of destinations with equal entries. Invariant: it has at
// least one member, and no other group has the same entries.
type group struct {
	link[group]
	id       GroupID
	entries  []entry
	reasons  []Reason // why each entry does not count
	members  *destination
	size     int
	view     GroupView
	subPorts []SubPortWeight // behind view.Planes[].SubPorts
}

func (g *group) chain() *link[group] { return &g.link }

// find is where rank is among the entries, or would be.
func (g *group) find(rank uint16) (int, bool) {
	lo, hi := 0, len(g.entries)
	for lo < hi {
		mid := int(uint(lo+hi) >> 1)
		if g.entries[mid].rank < rank {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return lo, lo < len(g.entries) && g.entries[lo].rank == rank
}

// touches reports whether the group has an entry in r.
func (g *group) touches(r rankRange) bool {
	i, _ := g.find(r.lo)
	return i < len(g.entries) && g.entries[i].rank < r.hi
}

func (g *group) attach(d *destination) {
	d.group, d.prev, d.next = g, nil, g.members
	if g.members != nil {
		g.members.prev = d
	}
	g.members = d
	g.size++
}

func (g *group) detach(d *destination) {
	if d.prev != nil {
		d.prev.next = d.next
	} else {
		g.members = d.next
	}
	if d.next != nil {
		d.next.prev = d.prev
	}
	d.group, d.prev, d.next = nil, nil, nil
	g.size--
}

// destination is one prefix that some session has, or lately had, a route to.
type destination struct {
	prefix     netip.Prefix
	group      *group
	sets       []*attributeSet // one per entry of the group
	prev, next *destination    // in the group
	told       readvertised
}

// groups keeps every group by number and by entries.
type groups struct {
	byID []*group // GroupID-1; nil is free
	used []uint64 // bit per byID
	hint int      // no free number is below the word used[hint]
	set  internSet[group, *group]
	free []*group
}

func (gs *groups) lookup(h hasher, es []entry) *group {
	hash := h.entries(es)
	for g := gs.set.first(hash); g != nil; g = g.next {
		if g.hash == hash && slices.Equal(g.entries, es) {
			return g
		}
	}
	return nil
}

func (gs *groups) get(id GroupID) *group {
	if id == 0 || int(id) > len(gs.byID) {
		return nil
	}
	return gs.byID[id-1]
}

// add makes a group without members under the lowest free number.
func (gs *groups) add(h hasher, es []entry) *group {
	var g *group
	if n := len(gs.free); n > 0 {
		g, gs.free = gs.free[n-1], gs.free[:n-1]
	} else {
		g = new(group)
	}
	for gs.hint < len(gs.used) && gs.used[gs.hint] == ^uint64(0) {
		gs.hint++
	}
	if gs.hint == len(gs.used) {
		gs.used = append(gs.used, 0)
	}
	bit := 0
	for gs.used[gs.hint]>>bit&1 == 1 {
		bit++
	}
	gs.used[gs.hint] |= 1 << bit
	index := gs.hint*64 + bit
	for index >= len(gs.byID) {
		gs.byID = append(gs.byID, nil)
	}
	gs.byID[index] = g
	g.id = GroupID(index + 1)
	gs.sign(h, g, es)
	return g
}

// sign gives g its entries; it must not be in the set.
func (gs *groups) sign(h hasher, g *group, es []entry) {
	g.entries = append(g.entries[:0], es...)
	gs.set.insert(g, h.entries(g.entries))
}

// remove forgets g, which has no members.
func (gs *groups) remove(g *group) {
	index := int(g.id - 1)
	gs.set.remove(g)
	gs.byID[index] = nil
	gs.used[index/64] &^= 1 << (index % 64)
	gs.hint = min(gs.hint, index/64)
	g.id = 0
	g.view = GroupView{Planes: g.view.Planes[:0]}
	gs.free = append(gs.free, g)
}
