package wecmp

import (
	"fmt"
	"math"
	"math/bits"
)

// Capacity is the capacity of one plane toward the destinations of a group.
type Capacity struct {
	Capacity  uint64 // basis of the weights, 0..MaxCapacity; 0: the plane carries nothing
	Bandwidth uint64 // bit/s, for display: copied to VectorView.Bandwidths
	// SubPorts holds the weight of each of the plane's sub-ports, in the configuration's order; 0 means that the
	// sub-port carries nothing. If all are 0 the plane carries nothing.
	SubPorts []uint64
}

// Member is a sub-port's weight within a whole vector.
type Member struct {
	Plane, SubPort int    // indexes of Config.Planes and Plane.SubPorts
	Weight         uint32 // at least 1
}

// group is the part of a vector that does not depend on history.
type group struct {
	known bool
	// Inputs.
	given     []uint64 // capacity per plane
	bandwidth []uint64 // per plane
	givenSub  []uint64 // weight per sub-port, plane by plane

	// Outputs.
	reachable bool
	exact     bool     // weights and members equal the ratios of the inputs exactly
	capacity  []uint64 // given, or 0 if no sub-port of the plane carries anything
	shares    []uint32 // parts per plane
	// placeShares holds the parts per place, which sum to shares in each plane. rate is proportional to the capacities
	// of the places.
	placeShares []uint32
	rate        []uint64
	weights     []uint32   // per plane, lowest terms
	subWeights  []uint32   // per sub-port, lowest terms within the plane
	perPlane    [][]uint32 // subWeights by plane
	members     []Member
	live        []bool   // per place: its slots carry traffic
	quota       []uint16 // Remap: number of slots per place

	first        uint32 // head of the group's vectors, linked by vector.next; 0: none
	destinations int
}

func (e *Engine) newGroup() *group {
	planes, ports := len(e.cfg.Planes), len(e.ports)
	// Two allocations serve many slices, because 16,384 groups at start multiply the number of allocations.
	wide, narrow := make([]uint64, 3*planes+ports+e.places), make([]uint32, 2*planes+ports+e.places)
	g := &group{
		given: cut(&wide, planes), bandwidth: cut(&wide, planes), capacity: cut(&wide, planes), givenSub: cut(&wide, ports), rate: wide,
		shares: cut(&narrow, planes), weights: cut(&narrow, planes), subWeights: cut(&narrow, ports), placeShares: narrow,
		perPlane: make([][]uint32, planes), members: make([]Member, 0, ports), live: make([]bool, e.places),
	}
	if e.cfg.Policy == Remap {
		g.quota = make([]uint16, e.places)
	}
	for p := range planes {
		g.perPlane[p] = g.subWeights[e.start[p]:e.start[p+1]:e.start[p+1]]
	}
	return g
}

// cut removes the first n elements of a slice and returns them.
func cut[T any](s *[]T, n int) []T {
	head := (*s)[:n:n]
	*s = (*s)[n:]
	return head
}

// take stores the inputs and reports whether they differ from the previous ones.
func (e *Engine) take(g *group, planes []Capacity) (differs bool, err error) {
	if len(planes) != len(e.cfg.Planes) {
		return false, fmt.Errorf("%d capacities given: the configuration has %d planes", len(planes), len(e.cfg.Planes))
	}
	for p := range planes {
		c := &planes[p]
		if c.Capacity > MaxCapacity {
			return false, fmt.Errorf("plane %q: capacity %d exceeds %d", e.cfg.Planes[p].Name, c.Capacity, uint64(MaxCapacity))
		}
		if want := e.start[p+1] - e.start[p]; len(c.SubPorts) != want {
			return false, fmt.Errorf("plane %q: %d sub-port weights given: the configuration has %d sub-ports",
				e.cfg.Planes[p].Name, len(c.SubPorts), want)
		}
	}
	differs = !g.known
	for p := range planes {
		c := &planes[p]
		differs = differs || g.given[p] != c.Capacity || g.bandwidth[p] != c.Bandwidth
		g.given[p], g.bandwidth[p] = c.Capacity, c.Bandwidth
		sub := g.givenSub[e.start[p]:e.start[p+1]]
		for s, w := range c.SubPorts {
			differs = differs || sub[s] != w
			sub[s] = w
		}
	}
	g.known = true
	return differs, nil
}

// weigh computes a group's outputs from its inputs.
func (e *Engine) weigh(g *group) {
	g.reachable, g.exact = false, true
	sub := e.subScratch
	copy(sub, g.givenSub)
	for p := range g.given {
		sums := &e.sums[p]
		*sums = 0
		g.capacity[p] = 0
		if g.given[p] != 0 {
			*sums = e.lowest(sub[e.start[p]:e.start[p+1]], g)
		}
		if *sums != 0 {
			g.capacity[p] = g.given[p]
			g.reachable = true
		}
		for i := e.start[p]; i < e.start[p+1]; i++ {
			if *sums == 0 {
				sub[i] = 0
			}
			if e.cfg.Mode == PerFlow {
				g.live[i] = sub[i] != 0
			}
		}
		if e.cfg.Mode == PerPacket {
			g.live[p] = *sums != 0
		}
	}
	divide(g.shares, g.capacity, Parts, e.restScratch)
	e.placeParts(g, sub)

	planes := e.planeScratch
	copy(planes, g.capacity)
	LowestTerms(planes)
	exactMembers := e.memberWeights(planes, sub)
	if e.cfg.Policy == Remap && g.reachable {
		e.quotas(g, planes, sub, exactMembers)
	}
	if e.cfg.Mode == PerPacket {
		copy(g.rate, g.capacity)
	} else {
		copy(g.rate, e.memberScratch)
	}
	e.fit(g, planes)
	for p, w := range planes {
		g.weights[p] = uint32(w)
	}
	e.fit(g, e.memberScratch)
	g.members = g.members[:0]
	for i, w := range e.memberScratch {
		if w != 0 {
			g.members = append(g.members, Member{int(e.ports[i].plane), int(e.ports[i].sub), uint32(w)})
		}
	}
	for i, w := range sub {
		g.subWeights[i] = uint32(w)
	}
}

// placeParts divides each plane's parts among its places by the sub-ports' weights.
func (e *Engine) placeParts(g *group, sub []uint64) {
	if e.cfg.Mode == PerPacket {
		copy(g.placeShares, g.shares)
		return
	}
	for p, parts := range g.shares {
		from, to := e.start[p], e.start[p+1]
		divide(g.placeShares[from:to], sub[from:to], parts, e.restScratch)
	}
}

// lowest reduces one plane's sub-port weights to lowest terms that fit 32 bits each, and returns their sum.
func (e *Engine) lowest(sub []uint64, g *group) (sum uint64) {
	LowestTerms(sub)
	var most uint64
	for _, w := range sub {
		most = max(most, w)
	}
	if most > math.MaxUint32 {
		// Ratios that need more than 32 bits are halved until they fit, with an error below one part in 2^31 of the
		// largest.
		g.exact = false
		shift := bits.Len64(most) - 32
		for i, w := range sub {
			if w != 0 {
				sub[i] = max(w>>shift, 1)
			}
		}
		LowestTerms(sub)
	}
	for _, w := range sub {
		sum += w
	}
	return sum
}

// memberWeights fills memberScratch with integer weights per sub-port over the whole group, in lowest terms:
// capacity(plane)·weight(sub-port)/Σweights(plane), times the least factor that makes all of them integers. If that
// exceeds 64 bits, it rounds the weights, each by less than one part in 2^51 of the group's largest plane, and returns
// false.
func (e *Engine) memberWeights(planes, sub []uint64) (exact bool) {
	var factor, denominator [MaxPlanes]uint64
	common, overflow := uint64(1), uint64(0)
	for p, c := range planes {
		if c == 0 {
			continue
		}
		// c/sum in lowest terms is factor/denominator; common becomes the least common multiple of the denominators.
		d := gcd(c, e.sums[p])
		factor[p], denominator[p] = c/d, e.sums[p]/d
		if denominator[p] != common {
			hi, lo := bits.Mul64(common, denominator[p]/gcd(common, denominator[p]))
			overflow |= hi
			common = max(lo, 1)
		}
	}
	// The planes' capacities have no common divisor, so the factors have none: the weights are in lowest terms.
	var total, carry uint64
	for p, c := range planes {
		if c == 0 || overflow != 0 {
			continue
		}
		if overflow, factor[p] = bits.Mul64(factor[p], common/denominator[p]); overflow != 0 {
			break
		}
		hi, lo := bits.Mul64(factor[p], e.sums[p])
		total, carry = bits.Add64(total, lo, 0)
		overflow = hi | carry
	}
	if overflow == 0 {
		for i := range sub {
			e.memberScratch[i] = factor[e.ports[i].plane] * sub[i]
		}
		return true
	}
	var most uint64
	for _, c := range planes {
		most = max(most, c)
	}
	shift := 53 - bits.Len64(most) // sums stay below MaxPlanes·2^53
	for i, w := range sub {
		e.memberScratch[i] = 0
		if p := e.ports[i].plane; w != 0 {
			q, _ := mul64(planes[p]<<max(shift, 0), w).div(e.sums[p])
			e.memberScratch[i] = max(q, 1)
		}
	}
	return false
}

// fit fits weights to the table; their sum always fits uint32.
func (e *Engine) fit(g *group, weights []uint64) {
	maxWeight, size := uint64(math.MaxUint32), uint64(math.MaxUint32)
	if e.cfg.MaxWeight != 0 {
		maxWeight = uint64(e.cfg.MaxWeight)
	}
	if e.cfg.MaxWeightSum != 0 {
		size = uint64(e.cfg.MaxWeightSum)
	}
	var sum, most uint64
	for _, w := range weights {
		sum += w
		most = max(most, w)
	}
	if most <= maxWeight && sum <= size {
		return
	}
	g.exact = false
	e.fitScratch = Fit(e.fitScratch, weights, maxWeight, size)
	copy(weights, e.fitScratch)
}
