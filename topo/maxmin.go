package topo

import (
	"fmt"
	"math"
	"math/big"
	"slices"
	"strings"

	"github.com/fared/fared/fare"
)

// Fairness is how elastic traffic from every server to every other one fares. Rates are in bit/s.
//
// The actual rates are max-min fair (Bertsekas and Gallager, Data Networks, Section 6.5.2) under the splits that the fabric
// has: each server splits what it sends to another by its weights of planes and sub-ports, each leaf and spine by its own
// weights, and no queue moves any of it. The ideal rates are max-min fair where every pair may split its traffic over all
// paths as it likes, and anew at any time. Both give each pair of servers the same claim. What is split onto a cable that leads
// nowhere makes its pair's rate zero: a transport that is not told waits for what was lost.
type Fairness struct {
	// Receivers are kinds of servers, by what they receive; those that nobody can reach are not among them.
	Receivers []Receiver `json:"receivers"`
	// Worst is the one with the least ratio; nil: nobody can reach anybody.
	Worst *Receiver `json:"worst,omitempty"`
	// Slowest is the pair with the least ratio, which is never above 1: the ideal makes the least rate as great as it can be. Its
	// ratio is below Worst's where a receiver gets from one server what it should have from another. nil as for Worst.
	Slowest *Pair `json:"slowest,omitempty"`
}

// Pair is the rate from one server to another.
type Pair struct {
	From   string  `json:"from"`
	To     string  `json:"to"`
	Pairs  int     `json:"pairs"` // how many are like it
	Actual float64 `json:"actual_bps"`
	Ideal  float64 `json:"ideal_bps"`
	Ratio  float64 `json:"ratio"`
}

// Receiver is what servers of one kind receive, each.
type Receiver struct {
	Server  string  `json:"server"`  // one of them
	Servers int     `json:"servers"` // how many there are
	Actual  float64 `json:"actual_bps"`
	Ideal   float64 `json:"ideal_bps"`
	// Ratio is Actual/Ideal. One receiver's may be above 1, where others get less than they should.
	Ratio float64 `json:"ratio"`
}

// orbits are what symmetry makes alike, so that few numbers say what happens to many. Four kinds of swaps leave the fabric as it
// is: of two planes in the same state; of two racks; of two servers of a rack in the same state; of two spines of a plane whose
// cables are in the same states. Max-min fair rates are unique, so they are the same after a swap, and flows can be averaged
// over all swaps. A rack is the servers of one leaf number with its leaves in all planes; two can be swapped when the states of
// their servers and of their uplinks are the same. With split cabling all servers are one rack.
type orbits struct {
	sim     *Simulation
	planes  orbit
	racks   orbit
	spines  []orbit // by plane; those of planes alike are the same
	servers orbit
	rack    []int // by server
	pairs   []pairKind
}

// orbit is things that are alike, in groups that are numbered from 0.
type orbit struct {
	of    []int // the group of each thing
	first []int // of each group
	size  []int
}

// orbit groups things with equal keys, in the order of their first ones.
func (o *orbits) orbit(keys []string) (g orbit) {
	number := map[string]int{}
	for i, k := range keys {
		n, known := number[k]
		if !known || o.sim.full { // then nothing counts as alike
			n = len(g.first)
			number[k] = n
			g.first, g.size = append(g.first, i), append(g.size, 0)
		}
		g.size[n]++
		g.of = append(g.of, n)
	}
	return g
}

// pairKind is pairs of servers alike.
type pairKind struct {
	src, dst int  // groups of servers
	same     bool // one rack
	from, to int  // two such servers
	count    int

	// Rates of each pair, in the unit of Spec.Speed.
	actual, ideal float64
}

func (s *Simulation) orbits() *orbits {
	f := s.fabric
	o := &orbits{sim: s, rack: make([]int, f.Servers)}
	planes, racks, servers := make([]string, f.Planes), make([]string, f.Leaves), make([]string, f.Servers)
	members, spines := make([][]string, f.Leaves), make([]string, f.Planes*f.Spines)
	for _, c := range f.Cables {
		state := string('0' + rune(s.state[c.Index]))
		planes[c.Plane] += state
		if c.Uplink() {
			racks[c.Down.Node.Index%f.Leaves] += state
			spines[c.Up.Node.Index] += state
		} else {
			servers[c.Down.Node.Index] += state
		}
	}
	for i := range servers {
		if f.Cabling == Block {
			o.rack[i] = f.leafOf(i, 0)
		}
		members[o.rack[i]] = append(members[o.rack[i]], servers[i])
	}
	for i := range racks {
		slices.Sort(members[i])
		racks[i] += "/" + strings.Join(members[i], "/")
	}
	o.planes, o.racks = o.orbit(planes), o.orbit(racks)
	for p := range f.Planes {
		o.spines = append(o.spines, o.orbit(spines[p*f.Spines:(p+1)*f.Spines]))
	}
	for i := range servers {
		servers[i] = fmt.Sprint(o.racks.of[o.rack[i]], servers[i])
	}
	o.servers = o.orbit(servers)
	for a, from := range o.servers.first {
		kinds := map[[2]int]int{} // by group and rack, 1 for the same: index of pairs
		for to, b := range o.servers.of {
			if to == from {
				continue
			}
			p := pairKind{src: a, dst: b, same: o.rack[from] == o.rack[to], from: from, to: to}
			key := [2]int{b, 0}
			if p.same {
				key[1] = 1
			}
			i, known := kinds[key]
			if !known {
				i = len(o.pairs)
				kinds[key] = i
				o.pairs = append(o.pairs, p)
			}
			o.pairs[i].count += o.servers.size[a]
		}
	}
	return o
}

// Fairness works out the rates of all-to-all traffic in the present state.
func (s *Simulation) Fairness() Fairness {
	o := s.orbits()
	o.fill()
	o.share()
	f := Fairness{Receivers: []Receiver{}}
	for k, size := range o.servers.size {
		r := Receiver{Server: s.fabric.Server[o.servers.first[k]].Name, Servers: size}
		for i := range o.pairs {
			if p := &o.pairs[i]; p.dst == k {
				each := float64(p.count) / float64(size) * float64(s.fabric.Speed)
				r.Actual += p.actual * each
				r.Ideal += p.ideal * each
			}
		}
		if r.Ideal == 0 {
			continue
		}
		r.Ratio = r.Actual / r.Ideal
		f.Receivers = append(f.Receivers, r)
	}
	for i := range o.pairs {
		p, unit := &o.pairs[i], float64(s.fabric.Speed)
		if ratio := p.actual / p.ideal; p.ideal > 0 && (f.Slowest == nil || ratio < f.Slowest.Ratio) {
			f.Slowest = &Pair{s.fabric.Server[p.from].Name, s.fabric.Server[p.to].Name, p.count, p.actual * unit, p.ideal * unit, ratio}
		}
	}
	for i := range f.Receivers {
		if f.Worst == nil || f.Receivers[i].Ratio < f.Worst.Ratio {
			f.Worst = &f.Receivers[i]
		}
	}
	return f
}

// way is one direction of cables that are alike.
type way struct {
	uplink bool
	down   bool
	plane  int // group of planes
	node   int // group of servers; of an uplink of racks
	lane   int // sub-port; of an uplink group of spines
}

// way is that of a cable; a simulated cable stands for those of its kind.
func (o *orbits) way(c *Cable, down bool) way {
	w := way{uplink: c.Uplink(), down: down, plane: o.planes.of[c.Plane]}
	if w.uplink {
		w.node, w.lane = o.racks.of[c.Down.Node.Index%o.sim.fabric.Leaves], o.spines[c.Plane].of[c.Sub]
	} else {
		w.node, w.lane = o.servers.of[c.Down.Node.Index], c.Sub
	}
	return w
}

// size is how many cables a way is.
func (o *orbits) size(w way) int {
	n := o.planes.size[w.plane]
	if w.uplink {
		return n * o.racks.size[w.node] * o.spines[o.planes.first[w.plane]].size[w.lane]
	}
	return n * o.servers.size[w.node]
}

// rounding is what little counts as nothing, as a part of the whole.
const rounding = 1e-9

// fill works out the actual rates by progressive filling: all grow alike until a cable is full; the pairs that use it keep what
// they have, the others go on.
func (o *orbits) fill() {
	type row struct {
		capacity, used float64
		uses           map[int]float64 // by pair kind, of its rate
	}
	var rows []row
	number := map[way]int{}
	growing := make([]bool, len(o.pairs))
	for i := range o.pairs {
		p := &o.pairs[i]
		from, to := o.sim.net.rep(p.from, p.to)
		type use struct {
			way
			part float64
		}
		var uses []use
		growing[i] = o.sim.net.follow(from, to, func(c *Cable, down bool, part float64) {
			w := o.way(c, down)
			uses = append(uses, use{w, part * float64(p.count)})
			if _, known := number[w]; !known {
				number[w] = len(rows)
				rows = append(rows, row{capacity: float64(c.Speed) / float64(o.sim.fabric.Speed) * float64(o.size(w)), uses: map[int]float64{}})
			}
		})
		for _, u := range uses {
			if growing[i] {
				rows[number[u.way]].uses[i] += u.part
			}
		}
	}
	for slices.Contains(growing, true) {
		step := math.Inf(1)
		grows := make([]float64, len(rows))
		for r := range rows {
			for i := range o.pairs { // in this order, so that sums come out the same each time
				if growing[i] {
					grows[r] += rows[r].uses[i]
				}
			}
			if grows[r] > 0 {
				step = min(step, (rows[r].capacity-rows[r].used)/grows[r])
			}
		}
		for i := range o.pairs {
			if growing[i] {
				o.pairs[i].actual += step
			}
		}
		for r := range rows {
			if rows[r].used += grows[r] * step; grows[r] > 0 && rows[r].capacity-rows[r].used <= rounding*rows[r].capacity {
				for i := range rows[r].uses {
					growing[i] = false
				}
			}
		}
	}
}

// follow yields the cables that packets from one server to another use, in which direction, and which part of them, and says
// whether all of them arrive.
func (n *network) follow(from, to *dest, yield func(c *Cable, down bool, part float64)) bool {
	planes, subPorts := n.weights(from.node.Index, to.node.Index)
	target := n.destOf[to.prefix]
	var walk func(sn *simNode, shares []share, part float64, hops int) bool
	walk = func(sn *simNode, shares []share, part float64, hops int) bool {
		if sn == to.node {
			return true
		}
		sum := 0.0
		for _, s := range shares {
			sum += s.weight
		}
		all := sum > 0 && hops > 0
		for _, s := range shares {
			if !all {
				return false
			}
			c, next := sn.sessions[s.session].cable, sn.sessions[s.session].peer.node
			yield(c, c.Up.Node == sn.Node, part*s.weight/sum)
			var onward []share
			if next.dest < 0 {
				onward = next.forward(n, target)
			}
			all = walk(next, onward, part*s.weight/sum, hops-1)
		}
		return all
	}
	var shares []share
	for p, w := range planes {
		sum := 0.0
		for _, sw := range subPorts[p] {
			sum += float64(sw)
		}
		for sub, sw := range subPorts[p] {
			if sw > 0 {
				shares = append(shares, share{p*n.fabric.SubPorts + sub, float64(w) * float64(sw) / sum})
			}
		}
	}
	const most = 4 // server, leaf, spine, leaf, server
	return walk(from.node, shares, 1, most)
}

// share works out the ideal rates, level by level. At each level the least rate is made as great as it can be, while pairs of
// lower levels keep theirs; those that cannot have more are settled with it.
//
// The least rate t of a level is the greatest for which flows z of the paths exist with
//
//	sum of z over a pair's paths  >= t, or the rate of a settled pair
//	sum of z over a cable's paths <= its capacity
//
// Its dual in u = z/t asks for a price of each cable: 1/t is the greatest sum of prices w of unsettled pairs, where a pair's price
// is no more than that of each of its paths, and all cables cost no more than 1 and what settled pairs pay for their rates. It has
// the advantage that all prices zero is a solution to start from, and that a pair with a price above zero is one that cannot have
// more (complementary slackness).
func (o *orbits) share() {
	paths, capacities := o.paths()
	settled := make([]bool, len(o.pairs))
	for i := range o.pairs {
		settled[i] = !slices.ContainsFunc(paths, func(p route) bool { return p.pair == i })
	}
	one := big.NewRat(1, 1)
	ideal := make([]*big.Rat, len(o.pairs))
	for slices.Contains(settled, false) {
		// Variables: a price of each pair, then of each capacity.
		n := len(o.pairs)
		objective, last := make([]*big.Rat, n+len(capacities)), make([]*big.Rat, n+len(capacities))
		for i := range o.pairs {
			if !settled[i] {
				objective[i] = one
			} else if ideal[i] != nil {
				last[i] = new(big.Rat).Neg(ideal[i])
			}
		}
		for c := range capacities {
			last[n+c] = one
		}
		var rows [][]*big.Rat
		for _, p := range paths {
			row := make([]*big.Rat, n+len(capacities))
			row[p.pair] = one
			for _, c := range p.capacities {
				row[n+c] = new(big.Rat).Quo(big.NewRat(-int64(o.pairs[p.pair].count), 1), capacities[c])
			}
			rows = append(rows, row)
		}
		bounds := make([]*big.Rat, len(rows)+1)
		bounds[len(rows)] = one
		prices := simplex(append(rows, last), bounds, objective)
		sum := new(big.Rat)
		for i := range o.pairs {
			if !settled[i] {
				sum.Add(sum, prices[i])
			}
		}
		sum.Inv(sum)
		for i := range o.pairs {
			if !settled[i] && prices[i].Sign() > 0 {
				settled[i], ideal[i] = true, sum
				o.pairs[i].ideal, _ = sum.Float64()
			}
		}
	}
}

// route is a way that packets of a pair may go: a group of planes, and in it a leaf or a group of spines.
type route struct {
	pair       int
	capacities []int
}

// paths are all paths of all pairs, and what capacities they need, in the unit of rates. Sub-ports of a server that go to
// one leaf are one capacity, for traffic can be split over them as one likes.
func (o *orbits) paths() (paths []route, capacities []*big.Rat) {
	f := o.sim.fabric
	number := map[way]int{}
	// capacity is the index of a way's, lane of a server being the leaf's number in the plane; -1: there is none.
	capacity := func(w way, speed fare.Bandwidth) int {
		if speed == 0 {
			return -1
		}
		i, known := number[w]
		if !known {
			i = len(capacities)
			number[w] = i
			capacities = append(capacities, new(big.Rat).Mul(big.NewRat(int64(speed), int64(f.Speed)), big.NewRat(int64(o.size(w)), 1)))
		}
		return i
	}
	server := func(server, plane, leaf int, down bool) int {
		var speed fare.Bandwidth
		for sub := range f.SubPorts {
			if f.leafOf(server, sub) == leaf {
				speed = speed.Add(o.sim.speedOf(f.Cable(plane, server, sub)))
			}
		}
		return capacity(way{plane: o.planes.of[plane], node: o.servers.of[server], lane: leaf, down: down}, speed)
	}
	uplink := func(rack, plane, spine int, down bool) int {
		at := f.At(f.Leaf[plane*f.Leaves+rack])
		c := at[len(at)-f.Spines+spine]
		return capacity(o.way(c, down), o.sim.speedOf(c))
	}
	for i, p := range o.pairs {
		add := func(needs ...int) {
			if !slices.Contains(needs, -1) {
				paths = append(paths, route{i, needs})
			}
		}
		for _, plane := range o.planes.first {
			switch {
			case f.Cabling == Split:
				for leaf := range f.Leaves {
					add(server(p.from, plane, leaf, false), server(p.to, plane, leaf, true))
				}
			case p.same:
				add(server(p.from, plane, o.rack[p.from], false), server(p.to, plane, o.rack[p.to], true))
			default:
				for _, spine := range o.spines[plane].first {
					add(server(p.from, plane, o.rack[p.from], false), uplink(o.rack[p.from], plane, spine, false),
						uplink(o.rack[p.to], plane, spine, true), server(p.to, plane, o.rack[p.to], true))
				}
			}
		}
	}
	return paths, capacities
}
