package fare

import (
	"math"
	"math/big"
	"net/netip"
	"slices"
)

// twin is the table done again without any cleverness: it keeps what each
// session said in maps and works out one destination from scratch, in exact
// fractions.
type twin struct {
	config   Config
	up       map[int]SessionUp
	last     map[int]uint64
	routes   map[int]map[netip.Prefix]*Attributes
	links    map[int]LinkState
	drainedP map[int]bool
	drainedS map[int]bool
	drainedN map[netip.Addr]bool
}

func newTwin(c Config) *twin {
	w := &twin{config: c, up: map[int]SessionUp{}, last: map[int]uint64{}, routes: map[int]map[netip.Prefix]*Attributes{},
		links: map[int]LinkState{}, drainedP: map[int]bool{}, drainedS: map[int]bool{}, drainedN: map[netip.Addr]bool{}}
	for i, sp := range c.SubPorts {
		w.links[i] = LinkState{SubPort: i, Speed: sp.Speed}
	}
	return w
}

func (w *twin) is(session int, generation uint64) bool {
	up, ok := w.up[session]
	return ok && up.Generation == generation
}

func (w *twin) step(e Event) {
	switch e := e.(type) {
	case SessionUp:
		if e.Generation > w.last[e.Session] {
			w.up[e.Session], w.last[e.Session], w.routes[e.Session] = e, e.Generation, map[netip.Prefix]*Attributes{}
		}
	case SessionDown:
		if w.is(e.Session, e.Generation) {
			delete(w.up, e.Session)
			delete(w.routes, e.Session)
		}
	case RouteUpdate:
		if w.is(e.Session, e.Generation) {
			if e.Attrs == nil {
				delete(w.routes[e.Session], e.Prefix)
			} else {
				w.routes[e.Session][e.Prefix] = e.Attrs
			}
		}
	case RouteWithdraw:
		if w.is(e.Session, e.Generation) {
			delete(w.routes[e.Session], e.Prefix)
		}
	case LinkState:
		if e.Speed == 0 {
			e.Speed = w.links[e.SubPort].Speed
		}
		w.links[e.SubPort] = e
	case Drain:
		switch e.Scope {
		case DrainPlane:
			w.drainedP[e.Index] = e.On
		case DrainSubPort:
			w.drainedS[e.Index] = e.On
		case DrainNode:
			w.drainedN[e.Node] = e.On
		}
	case PolicyChange:
		w.config.Missing, w.config.AllZero = e.Missing, e.AllZero
	}
}

type twinPath struct {
	session, subPort, plane int
	speed                   *big.Rat
	value                   *big.Rat // nil: none
	own                     bool
	node                    netip.Addr
	path                    []uint32
}

type twinView struct {
	exists, reachable bool
	rule              Rule
	bandwidth         []*big.Rat
	capacity          []*big.Rat
	subPorts          []map[int]*big.Rat // parts of the plane, summing to 1
	total             *big.Rat
	path              []uint32
}

func (w *twin) view(prefix netip.Prefix) twinView {
	v := twinView{total: new(big.Rat)}
	for range w.config.Planes {
		v.bandwidth, v.capacity = append(v.bandwidth, new(big.Rat)), append(v.capacity, new(big.Rat))
		v.subPorts = append(v.subPorts, map[int]*big.Rat{})
	}
	type key struct {
		plane int
		node  netip.Addr
	}
	nodes := map[key][]twinPath{}
	var usable []twinPath
	shortest := math.MaxInt
	for i, s := range w.config.Sessions {
		attrs := w.routes[i][prefix]
		up, isUp := w.up[i]
		if attrs == nil || !isUp {
			continue
		}
		v.exists = true
		link, plane := w.links[s.SubPort], w.config.SubPorts[s.SubPort].Plane
		if !link.Up || link.Speed == 0 || w.drainedP[plane] || w.drainedS[s.SubPort] || w.drainedN[up.Node] {
			continue
		}
		p := twinPath{session: i, subPort: s.SubPort, plane: plane, speed: rat(uint64(link.Speed)), node: up.Node, path: attrs.ASPath,
			own: len(attrs.ASPath) > 0 && !slices.ContainsFunc(attrs.ASPath, func(as uint32) bool { return as != up.PeerAS })}
		if a, _ := s.Codec.Judge(attrs.Communities, nil); a.Known {
			p.value = rat(uint64(a.Bandwidth))
		}
		usable, shortest = append(usable, p), min(shortest, len(p.path))
	}
	for _, p := range usable {
		if k := (key{p.plane, p.node}); w.config.Role == RoleServer || len(p.path) == shortest {
			nodes[k] = append(nodes[k], p)
		}
	}

	type node struct {
		plane   int
		b       *big.Rat
		known   bool
		amounts map[int]*big.Rat
		paths   []twinPath
	}
	var all []node
	missing, positive := 0, 0
	for k, paths := range nodes {
		n := node{plane: k.plane, amounts: map[int]*big.Rat{}, paths: paths, b: new(big.Rat)}
		own, local := true, new(big.Rat)
		var value *big.Rat
		speeds, values := map[int]*big.Rat{}, map[int]*big.Rat{}
		for _, p := range paths {
			own = own && p.own
			speeds[p.subPort] = p.speed
			if p.value != nil {
				if values[p.subPort] == nil || p.value.Cmp(values[p.subPort]) < 0 {
					values[p.subPort] = p.value
				}
				if value == nil || p.value.Cmp(value) < 0 {
					value = p.value
				}
			}
		}
		for _, s := range speeds {
			local.Add(local, s)
		}
		n.known = value != nil
		if own {
			for sp, s := range speeds {
				n.amounts[sp] = lower(s, values[sp])
				n.b.Add(n.b, n.amounts[sp])
			}
		} else {
			n.b = lower(local, value)
		}
		if !own || n.b.Sign() == 0 {
			n.amounts = speeds
		}
		if !n.known {
			missing++
		} else if n.b.Sign() > 0 {
			positive++
		}
		all = append(all, n)
	}
	skip, equal := false, false
	switch known := len(all) - missing; {
	case len(all) == 0:
		v.rule = RuleNoPath
	case known == 0:
		v.rule = RuleLocalSpeed
	case missing > 0 && w.config.Missing == MissingEqual:
		v.rule, equal = RuleMissingEqual, true
	case missing > 0 && w.config.Missing == MissingLocal:
		v.rule = RuleMissingLocal
	default:
		skip = true
		switch {
		case positive == 0 && w.config.AllZero == ZeroEqual:
			v.rule, equal = RuleAllZeroEqual, true
		case positive == 0:
			v.rule = RuleAllZeroUnreachable
		case missing > 0:
			v.rule = RuleMissingSkip
		default:
			v.rule = RuleAdvertised
		}
	}
	shares := make([]*big.Rat, len(v.capacity))
	for i := range shares {
		shares[i] = new(big.Rat)
	}
	var best *twinPath
	for _, n := range all {
		if skip && !n.known || n.b.Sign() == 0 && v.rule != RuleAllZeroEqual {
			continue
		}
		v.reachable = true
		share := n.b
		if equal {
			share = rat(1)
		}
		v.bandwidth[n.plane].Add(v.bandwidth[n.plane], n.b)
		v.total.Add(v.total, n.b)
		shares[n.plane].Add(shares[n.plane], share)
		if v.capacity[n.plane].Add(v.capacity[n.plane], share); equal {
			v.capacity[n.plane] = rat(1)
		}
		sum := new(big.Rat)
		for _, a := range n.amounts {
			sum.Add(sum, a)
		}
		for sp, a := range n.amounts {
			if v.subPorts[n.plane][sp] == nil {
				v.subPorts[n.plane][sp] = new(big.Rat)
			}
			part := new(big.Rat).Quo(new(big.Rat).Mul(share, a), sum)
			v.subPorts[n.plane][sp].Add(v.subPorts[n.plane][sp], part)
		}
		for _, p := range n.paths {
			if n.amounts[p.subPort].Sign() == 0 {
				continue
			}
			if best == nil || len(p.path) < len(best.path) || len(p.path) == len(best.path) && (p.node.Less(best.node) ||
				p.node == best.node && (p.plane < best.plane || p.plane == best.plane && (p.subPort < best.subPort || p.subPort == best.subPort && p.session < best.session))) {
				best = &p
			}
		}
	}
	for i, parts := range v.subPorts {
		var list []*big.Rat
		for sp, part := range parts {
			if part.Sign() == 0 {
				delete(parts, sp)
			} else {
				list = append(list, part)
			}
		}
		if simpler(list) > 0 {
			shares[i].SetInt64(0)
			for _, part := range list {
				shares[i].Add(shares[i], part)
			}
		}
		for _, part := range list {
			part.Quo(part, shares[i])
		}
	}
	most := new(big.Rat)
	for _, c := range v.capacity {
		if c.Cmp(most) > 0 {
			most.Set(c)
		}
	}
	if top := simpler(v.capacity); top > 0 {
		unit := rat(new(big.Int).Div(most.Num(), big.NewInt(top)).Uint64())
		for _, c := range v.capacity {
			c.Mul(c, unit)
		}
	}
	if best != nil {
		v.path = best.path
	}
	return v
}

// simpler is simplify done again: numbers that are not in a ratio of whole ones up to 1000, but within half a millionth of
// one, become its smallest. It returns the greatest of these; 0: the numbers are what they were.
func simpler(numbers []*big.Rat) int64 {
	most, common, factor := new(big.Rat), new(big.Int), big.NewInt(1)
	for _, n := range numbers {
		if n.Cmp(most) > 0 {
			most = n
		}
		factor.Mul(factor, new(big.Int).Div(n.Denom(), new(big.Int).GCD(nil, nil, factor, n.Denom())))
	}
	whole := func(n *big.Rat) *big.Int { return new(big.Rat).Mul(n, new(big.Rat).SetInt(factor)).Num() }
	for _, n := range numbers {
		common.GCD(nil, nil, common, whole(n))
	}
	if most.Sign() == 0 || new(big.Int).Div(whole(most), common).Cmp(big.NewInt(1000)) <= 0 {
		return 0
	}
	for top := int64(1); top <= 1000; top++ {
		var found []int64
		for _, n := range numbers {
			ratio, _ := new(big.Rat).Quo(n, most).Float64()
			exact := ratio * float64(top)
			if math.Abs(exact-math.Round(exact)) > exact/2e6 {
				break
			}
			found = append(found, int64(math.Round(exact)))
		}
		if len(found) == len(numbers) {
			for i, n := range numbers {
				n.SetInt64(found[i])
			}
			return top
		}
	}
	return 0
}

func rat(n uint64) *big.Rat { return new(big.Rat).SetInt(new(big.Int).SetUint64(n)) }

func lower(a, b *big.Rat) *big.Rat {
	if b == nil || a.Cmp(b) <= 0 {
		return new(big.Rat).Set(a)
	}
	return new(big.Rat).Set(b)
}
