package fare

import (
	"hash/maphash"
	"net/netip"
	"slices"
)

// GroupID identifies a group of destinations. Numbers are small: they start at 1, and the lowest
// free number is assigned first. 0 means no group.
type GroupID uint32

// Rule is the rule that determined a group's capacities.
type Rule uint8

// The rules. The zero value is the rule of a group without a usable path.
const (
	RuleNoPath             Rule = iota // no usable path
	RuleAdvertised                     // every usable path carries a value: b(n) counts
	RuleLocalSpeed                     // no usable path carries a value: local link speed counts
	RuleAllMissingEqual                // no usable path carries a value: every plane with a usable path gets the same share
	RuleMissingEqual                   // some carry a value: every plane with a usable path gets the same share
	RuleMissingLocal                   // some carry a value: the others count with local link speed
	RuleMissingSkip                    // some carry a value: the others are not used
	RuleAllZeroEqual                   // every usable value is zero: every plane with a usable path gets the same share
	RuleAllZeroUnreachable             // every usable value is zero: unreachable
)

var ruleNames = []string{
	"no-path", "advertised", "local-speed", "all-missing-equal", "missing-equal", "missing-local", "missing-skip",
	"all-zero-equal", "all-zero-unreachable",
}

var ruleSentences = []string{
	"no path is usable",
	"every usable path carries a bandwidth: a node counts with the lower of its bandwidth and the speed of the local links toward it",
	"no usable path carries a bandwidth: local link speed counts",
	"no usable path carries a bandwidth, policy equal: every plane with a usable path gets an equal share",
	"some usable paths carry no bandwidth, policy equal: every plane with a usable path gets an equal share",
	"some usable paths carry no bandwidth, policy local: these paths count with local link speed",
	"some usable paths carry no bandwidth, policy skip: these paths are not used",
	"every usable path advertises zero, policy equal: every plane with a usable path gets an equal share",
	"every usable path advertises zero, policy unreachable: the destination is unreachable",
}

// String returns the word used in status output.
func (r Rule) String() string { return enumName(ruleNames, r) }

// Sentence returns a description of the rule.
func (r Rule) Sentence() string { return enumName(ruleSentences, r) }

// GroupView is the result for a group of destinations. Its slices belong to the table and are valid
// until the next [Table.Step].
type GroupView struct {
	Planes    []PlaneBandwidth // one per configured plane
	Reachable bool             // some plane has a capacity
	Reason    Reason           // why it is not reachable; ReasonUsed if it is
	Rule      Rule
	// Origins is the number of different origins that announce the destinations, as far as AS paths
	// show them (see [OriginOf]). More than one is a conflict.
	Origins int
	// Ignored lists, by session, the usable routes whose bandwidth does not affect the weights: see
	// [IgnoredBandwidth]. It is empty if no route is usable or none carries a bandwidth.
	Ignored []IgnoredBandwidth
}

// IgnoredBandwidth is a usable route whose bandwidth does not count. Reason is the reason of the invalid community
// ([ReasonNotANumber], [ReasonNegative], [ReasonInfinite], [ReasonBelowMinimum], [ReasonAboveMaximum], [ReasonWrapped],
// [ReasonOtherScale]), or [ReasonMissingBandwidth] for a route without a bandwidth if another usable route to the
// destination carries one. An invalid Link Bandwidth next to a valid FARE community is not listed, because it would not
// count if it were valid.
type IgnoredBandwidth struct {
	Session int
	Reason  Reason
}

// PlaneBandwidth is one plane's bandwidth toward a group of destinations.
type PlaneBandwidth struct {
	Bandwidth Bandwidth // B(p, destination): sum of b(n) over the used nodes
	// Capacity is the basis of the weights. It is Bandwidth in bit/s, adjusted by less than a
	// millionth where that brings the planes to a simpler ratio, or 1 where a policy makes planes
	// equal. 0 means that the plane carries nothing.
	Capacity uint64
	SubPorts []SubPortWeight // sub-ports with a weight, by index
	Reason   Reason          // why Capacity is 0; ReasonUsed if it is not
}

// SubPortWeight is a sub-port's part of its plane's traffic, in lowest terms within the plane. It
// is at least 1, and the weights of one plane sum to less than 2^63.
type SubPortWeight struct {
	SubPort int
	Weight  uint64
}

// entry is the content of one session's route as a group's destinations share it. A group's entries
// are its signature.
type entry struct {
	generation uint64
	value      Bandwidth
	rank       uint16 // rank of the session; entries are sorted by it
	hops       uint16 // role leaf: number of AS numbers in the path; otherwise 0
	origin     uint16 // position of its origin among the destination's origins, from 1; 0: not visible
	ignored    Reason // reason of an invalid bandwidth community; ReasonUsed if there is none
	known      bool   // the route carries a value
	kind       Kind   // of the community that counts
	originated bool   // by the neighbor itself
	avoided    bool   // its plane is avoided toward the destination
	signals    Signals
}

// hashOf returns a hash of entries under a seed, which is secret so that a neighbor that chooses values cannot make
// chains long.
func hashOf(seed maphash.Seed, es []entry) uint64 {
	var h maphash.Hash
	h.SetSeed(seed)
	for i := range es {
		maphash.WriteComparable(&h, es[i])
	}
	return h.Sum64()
}

// group is a set of destinations with equal entries. Invariant: it has at least one member, and no
// other group has the same entries.
type group struct {
	link[group]
	id      GroupID
	entries []entry
	reasons []Reason // why each entry does not count
	members *destination
	size    int
	view    GroupView
	// lastResort: only routes with signals of [Config.LeastPreferred], or of avoided planes, can carry packets.
	lastResort bool
	subPorts   []SubPortWeight    // backs view.Planes[].SubPorts
	ignored    []IgnoredBandwidth // backs view.Ignored
}

func (g *group) chain() *link[group] { return &g.link }

// find returns the index of a session's rank among entries, which are sorted by it, and true, or its insertion index
// and false.
func find(es []entry, rank uint16) (int, bool) {
	lo, hi := 0, len(es)
	for lo < hi {
		mid := int(uint(lo+hi) >> 1)
		if es[mid].rank < rank {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return lo, lo < len(es) && es[lo].rank == rank
}

// touches reports whether the group has an entry in r.
func (g *group) touches(r rankRange) bool {
	i, _ := find(g.entries, r.lo)
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

// destination is one prefix to which a session has a route, or had one that is not yet forgotten.
type destination struct {
	prefix       netip.Prefix
	group        *group
	sets         []*attributeSet // one per entry of the group
	prev, next   *destination    // list of the group's members
	readvertised *readvertised   // nil: none, as always at a server
}

// groups indexes every group by number and by entries.
type groups struct {
	byID []*group // by GroupID-1; nil marks a free number
	used []uint64 // one bit per element of byID
	hint int      // every number below the word used[hint] is in use
	set  internSet[group, *group]
	free []*group
}

func (gs *groups) lookup(seed maphash.Seed, es []entry) *group {
	hash := hashOf(seed, es)
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

// add creates a group without members under the lowest free number.
func (gs *groups) add(seed maphash.Seed, es []entry) *group {
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
	gs.sign(seed, g, es)
	return g
}

// sign sets the entries of g, which must not be in the set, and inserts g.
func (gs *groups) sign(seed maphash.Seed, g *group, es []entry) {
	g.entries = append(g.entries[:0], es...)
	gs.set.insert(g, hashOf(seed, g.entries))
}

// remove deletes g, which has no members.
func (gs *groups) remove(g *group) {
	index := int(g.id - 1)
	gs.set.remove(g)
	gs.byID[index] = nil
	gs.used[index/64] &^= 1 << (index % 64)
	gs.hint = min(gs.hint, index/64)
	g.id = 0
	g.view = GroupView{Planes: g.view.Planes[:0]}
	gs.free = recycle(gs.free, g)
}
