package topo

import (
	"fmt"
	"math"
	"math/big"
	"slices"
	"strings"

	"github.com/fared/fared/fare"
)

// Fairness holds the rates of elastic traffic from every source group to all source groups of the other servers. Rates
// are in bit/s.
//
// The actual rates are max-min fair (Bertsekas and Gallager, Data Networks, Section 6.5.2) under the splits of the
// fabric: each source group splits its traffic to another by its weights of planes and sub-ports, each leaf and spine
// by its own weights, and no queue moves traffic. The ideal rates are max-min fair if every pair may split its traffic
// over all paths in any proportion, at any time. In both cases all pairs of source groups have equal claims. If a part
// of a pair's traffic is split onto a cable that leads nowhere, the pair's rate is zero: a transport that is not
// notified keeps waiting for the lost part.
type Fairness struct {
	// Receivers lists the kinds of source groups by their received rate, without those that are unreachable.
	Receivers []Receiver `json:"receivers"`
	// Worst is the receiver with the least ratio; nil if no pair is connected.
	Worst *Receiver `json:"worst,omitempty"`
	// Slowest is the pair with the least ratio, which is at most 1, because the ideal maximizes the least rate. Its
	// ratio is below Worst's if a receiver gets from one server the rate that it should get from another. nil as for
	// Worst.
	Slowest *Pair `json:"slowest,omitempty"`
	// TooMany is the number of kinds of paths if it exceeds MaxPaths, in which case no rates were computed; 0 means
	// that they were.
	TooMany int `json:"too_many_paths,omitempty"`
}

// MaxPaths limits the number of kinds of paths for which rates are computed. The time of the exact linear program grows
// faster than its cube, and is about 3 s for 94. Fabrics whose ports are mostly alike have a few dozen.
const MaxPaths = 120

// Pair is the rate from one source group to another.
type Pair struct {
	From   string  `json:"from"`
	To     string  `json:"to"`
	Pairs  int     `json:"pairs"` // number of equivalent pairs
	Actual float64 `json:"actual_bps"`
	Ideal  float64 `json:"ideal_bps"`
	Ratio  float64 `json:"ratio"`
}

// Receiver is the rate that each source group of one kind receives.
type Receiver struct {
	Server  string  `json:"server"`  // one of them: a server, or a GPU that owns its ports
	Servers int     `json:"servers"` // number of source groups of the kind
	Actual  float64 `json:"actual_bps"`
	Ideal   float64 `json:"ideal_bps"`
	// Ratio is Actual/Ideal. A receiver's ratio may exceed 1 if others get less than they should.
	Ratio float64 `json:"ratio"`
}

// orbits are classes of objects that are equivalent by symmetry, so that few numbers describe many. Five kinds of swaps
// leave the fabric unchanged: of two planes in the same state; of two racks; of two servers of a rack in the same
// state; of two GPUs of a server that own ports in the same state; of two spines of a plane whose cables are in the
// same states. Max-min fair rates are unique, so they are the same after a swap, and flows can be averaged over all
// swaps. A rack is the servers of one leaf number with its leaves in all planes; two racks can be swapped if the states
// of their servers and of their uplinks are equal. With split cabling all servers form one rack.
type orbits struct {
	sim     *Simulation
	planes  orbit
	racks   orbit
	spines  []orbit // by plane; equivalent planes have the same
	servers orbit
	hosts   orbit // source groups
	rack    []int // rack of each server
	pairs   []pairKind
}

// orbit partitions objects into groups of equivalent ones, numbered from 0.
type orbit struct {
	of    []int // group of each object
	first []int // first object of each group
	size  []int
}

// orbit groups objects with equal keys, in the order of their first members.
func (o *orbits) orbit(keys []string) (g orbit) {
	number := map[string]int{}
	for i, k := range keys {
		n, known := number[k]
		if !known || o.sim.full { // with full no two objects are equivalent
			n = len(g.first)
			number[k] = n
			g.first, g.size = append(g.first, i), append(g.size, 0)
		}
		g.size[n]++
		g.of = append(g.of, n)
	}
	return g
}

// pairKind is a kind of equivalent pairs of source groups.
type pairKind struct {
	src, dst int  // groups of the source groups
	same     bool // in one rack
	from, to int  // two source groups that represent the kind
	count    int

	// rates of each pair, in the unit of Spec.Speed
	actual, ideal float64
}

func (s *Simulation) orbits() *orbits {
	f := s.fabric
	each := f.owners()
	o := &orbits{sim: s, rack: make([]int, f.Servers)}
	planes, racks := make([][]byte, f.Planes), make([][]byte, f.Leaves)
	hosts, spines := make([][]byte, len(f.groups)), make([][]byte, f.Planes*f.Spines)
	for _, c := range f.Cables {
		state := '0' + byte(s.state[c.Index])
		if c.Uplink() {
			planes[c.Plane] = append(planes[c.Plane], state)
			racks[c.Down.Node.Index%f.Leaves] = append(racks[c.Down.Node.Index%f.Leaves], state)
			spines[c.Up.Node.Index] = append(spines[c.Up.Node.Index], state)
			continue
		}
		// Ports differ in number and speed of their sub-ports, so these are part of the keys.
		port := fmt.Appendf(nil, "%d*%d", len(c.Group.Planes[c.Plane]), c.Speed)
		planes[c.Plane] = append(fmt.Appendf(planes[c.Plane], "%d:%s", c.Group.Index, port), state)
		hosts[c.Group.Index] = append(fmt.Appendf(hosts[c.Group.Index], "%d:%s", c.Plane, port), state)
	}
	servers := make([]string, f.Servers)
	members := make([][]string, f.Leaves)
	for i := range servers {
		own := make([]string, each)
		for k := range own {
			own[k] = string(hosts[i*each+k])
		}
		slices.Sort(own)
		servers[i] = strings.Join(own, "+")
		if f.Cabling == Block {
			o.rack[i] = f.leafOf(i, 0)
		}
		members[o.rack[i]] = append(members[o.rack[i]], servers[i])
	}
	for i := range racks {
		slices.Sort(members[i])
		racks[i] = append(append(racks[i], '/'), strings.Join(members[i], "/")...)
	}
	o.planes, o.racks = o.orbit(words(planes)), o.orbit(words(racks))
	for p := range f.Planes {
		o.spines = append(o.spines, o.orbit(words(spines[p*f.Spines:(p+1)*f.Spines])))
	}
	for i := range servers {
		servers[i] = fmt.Sprintf("%d/%s", o.racks.of[o.rack[i]], servers[i])
	}
	o.servers = o.orbit(servers)
	for i := range hosts {
		hosts[i] = fmt.Appendf(nil, "%d/%s", o.servers.of[i/each], hosts[i])
	}
	o.hosts = o.orbit(words(hosts))
	o.pair()
	return o
}

// words converts the keys of an orbit to strings.
func words(keys [][]byte) []string {
	all := make([]string, len(keys))
	for i := range keys {
		all[i] = string(keys[i])
	}
	return all
}

// pair finds the kinds of pairs: by their source groups, and by whether these are in one rack.
func (o *orbits) pair() {
	each := o.sim.fabric.owners()
	for a, from := range o.hosts.first {
		kinds := map[[2]int]int{} // by group and rack (1 means the same rack): index of pairs
		for to, b := range o.hosts.of {
			if to/each == from/each {
				continue
			}
			p := pairKind{src: a, dst: b, same: o.rack[from/each] == o.rack[to/each], from: from, to: to}
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
			o.pairs[i].count += o.hosts.size[a]
		}
	}
}

// Fairness computes the rates of all-to-all traffic in the present state.
func (s *Simulation) Fairness() Fairness {
	o := s.orbits()
	f := Fairness{Receivers: []Receiver{}}
	paths, capacities := o.paths()
	if len(paths) > MaxPaths {
		f.TooMany = len(paths)
		return f
	}
	o.fill()
	o.share(paths, capacities)
	for k, size := range o.hosts.size {
		r := Receiver{Server: s.fabric.groups[o.hosts.first[k]].Name, Servers: size}
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
			f.Slowest = &Pair{s.fabric.groups[p.from].Name, s.fabric.groups[p.to].Name, p.count, p.actual * unit, p.ideal * unit, ratio}
		}
	}
	for i := range f.Receivers {
		if f.Worst == nil || f.Receivers[i].Ratio < f.Worst.Ratio {
			f.Worst = &f.Receivers[i]
		}
	}
	return f
}

// way is one direction of a kind of equivalent cables.
type way struct {
	uplink bool
	down   bool
	plane  int // group of planes
	node   int // group of source groups; for an uplink, of racks
	lane   int // sub-port; for an uplink, group of spines
}

// way returns the way of a cable; a simulated cable represents all of its kind.
func (o *orbits) way(c *Cable, down bool) way {
	w := way{uplink: c.Uplink(), down: down, plane: o.planes.of[c.Plane]}
	if w.uplink {
		w.node, w.lane = o.racks.of[c.Down.Node.Index%o.sim.fabric.Leaves], o.spines[c.Plane].of[c.Sub]
	} else {
		w.node, w.lane = o.hosts.of[c.Group.Index], c.Sub
	}
	return w
}

// size returns the number of cables of a way.
func (o *orbits) size(w way) int {
	n := o.planes.size[w.plane]
	if w.uplink {
		return n * o.racks.size[w.node] * o.spines[o.planes.first[w.plane]].size[w.lane]
	}
	return n * o.hosts.size[w.node]
}

// rounding is the fraction of the whole below which a difference counts as zero.
const rounding = 1e-9

// fill computes the actual rates by progressive filling: all rates grow alike until a cable is full; the pairs that use
// it keep their rates, and the others continue.
func (o *orbits) fill() {
	type row struct {
		capacity, used float64
		uses           map[int]float64 // by pair kind: the part of its rate that uses the cable
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
			for i := range o.pairs { // in a fixed order, so that sums are reproducible
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

// follow yields the cables that packets between two source groups use, with the direction and the part of the packets,
// and reports whether all of them arrive.
func (n *network) follow(from, to *dest, yield func(c *Cable, down bool, part float64)) bool {
	planes, subPorts := n.weights(from.group.Index, to.group.Index)
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
				shares = append(shares, share{from.node.lanes[p][sub], float64(w) * float64(sw) / sum})
			}
		}
	}
	const most = 4 // server, leaf, spine, leaf, server
	return walk(from.node, shares, 1, most)
}

// share computes the ideal rates, level by level. Each level maximizes the least rate while pairs of lower levels keep
// theirs; the pairs that cannot have more are settled at that rate.
//
// The least rate t of a level is the greatest for which flows z of the paths exist with
//
//	sum of z over a pair's paths  >= t, or the rate of a settled pair
//	sum of z over a cable's paths <= its capacity
//
// Its dual in u = z/t has a price of each cable: 1/t is the greatest sum of prices w of unsettled pairs, where a pair's
// price is at most that of each of its paths, and all cables together cost at most 1 plus the payments of settled pairs
// for their rates. The dual has two advantages: all prices zero is a solution to start from, and a pair with a price
// above zero cannot have more (complementary slackness).
func (o *orbits) share(paths []route, capacities []*big.Rat) {
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

// route is a path of a pair's packets: a group of planes, and in it a leaf or a group of spines.
type route struct {
	pair       int
	capacities []int
}

// paths returns all paths of all pairs, and the capacities that they need, in the unit of rates. The sub-ports of a
// server toward one leaf are one capacity, because traffic can be split over them in any proportion.
func (o *orbits) paths() (paths []route, capacities []*big.Rat) {
	f := o.sim.fabric
	number := map[way]int{}
	// capacity returns the index of a way's capacity, or -1 if the speed is 0. The lane of a server's way is the leaf's
	// number in the plane.
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
	host := func(host, plane, leaf int, down bool) int {
		var speed fare.Bandwidth
		for _, c := range f.groups[host].Planes[plane] {
			if c.Up.Node.Index%f.Leaves == leaf {
				speed = speed.Add(o.sim.speedOf(c))
			}
		}
		return capacity(way{plane: o.planes.of[plane], node: o.hosts.of[host], lane: leaf, down: down}, speed)
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
		from, to := o.rack[p.from/f.owners()], o.rack[p.to/f.owners()]
		for _, plane := range o.planes.first {
			switch {
			case f.Cabling == Split:
				for leaf := range f.Leaves {
					add(host(p.from, plane, leaf, false), host(p.to, plane, leaf, true))
				}
			case p.same:
				add(host(p.from, plane, from, false), host(p.to, plane, to, true))
			default:
				for _, spine := range o.spines[plane].first {
					add(host(p.from, plane, from, false), uplink(from, plane, spine, false),
						uplink(to, plane, spine, true), host(p.to, plane, to, true))
				}
			}
		}
	}
	return paths, capacities
}
