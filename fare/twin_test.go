package fare

import (
	"fmt"
	"math"
	"math/big"
	"net/netip"
	"slices"
	"strings"
)

// twin is a reference model of the table without optimization: it keeps the routes of each session in maps and computes
// each destination from scratch, in exact fractions.
type twin struct {
	config   Config
	up       map[int]SessionUp
	last     map[int]uint64
	routes   map[int]map[netip.Prefix]*Attributes
	links    map[int]LinkState
	drainedP map[int]bool
	drainedS map[int]bool
	drainedN map[netip.Addr]bool
	origins  map[netip.Prefix][]uint32 // origins of live routes, the oldest first
	avoided  map[Avoid]bool
}

// origin returns the origin of a route, or 0 if the route does not show it.
func (w *twin) origin(session int, attrs *Attributes) uint32 {
	path, foreign := attrs.ASPath, false
	for _, as := range path {
		foreign = foreign || as != w.up[session].PeerAS
	}
	if len(path) == 0 || !foreign && (w.config.Role == RoleServer || w.config.SubPorts[w.config.Sessions[session].SubPort].Uplink) {
		return 0
	}
	return path[len(path)-1]
}

// prune removes origins without a live route after a step.
func (w *twin) prune() {
	for prefix, list := range w.origins {
		w.origins[prefix] = slices.DeleteFunc(list, func(as uint32) bool {
			for i := range w.config.Sessions {
				if attrs := w.routes[i][prefix]; attrs != nil && w.origin(i, attrs) == as {
					return false
				}
			}
			return true
		})
	}
}

func newTwin(c Config) *twin {
	w := &twin{config: c, up: map[int]SessionUp{}, last: map[int]uint64{}, routes: map[int]map[netip.Prefix]*Attributes{},
		links: map[int]LinkState{}, drainedP: map[int]bool{}, drainedS: map[int]bool{}, drainedN: map[netip.Addr]bool{},
		origins: map[netip.Prefix][]uint32{}, avoided: map[Avoid]bool{}}
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
	defer w.prune()
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
				if as := w.origin(e.Session, e.Attrs); as != 0 && !slices.Contains(w.origins[e.Prefix], as) {
					w.origins[e.Prefix] = append(w.origins[e.Prefix], as)
				}
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
	case Avoid:
		w.avoided[Avoid{e.Prefix, e.Plane, true}] = e.On
	case PolicyChange:
		w.config.Missing, w.config.AllMissing, w.config.AllZero = e.Missing, e.AllMissing, e.AllZero
		w.config.Conflict, w.config.LeastPreferred, w.config.Unproved = e.Conflict, e.LeastPreferred, e.Unproved
	}
}

type twinPath struct {
	session, subPort, plane int
	speed                   *big.Rat
	value                   *big.Rat // nil: no value
	own                     bool
	node                    netip.Addr
	path                    []uint32
	communities             []Community
	signals                 Signals // of its communities
	wide                    IPv6Community
	origin                  int // position among the destination's origins; -1: not visible
	suspect                 string
}

type twinView struct {
	exists, reachable bool
	lasting           bool // a path has bandwidth, and is no last resort
	rule              Rule
	bandwidth         []*big.Rat
	capacity          []*big.Rat
	subPorts          []map[int]*big.Rat // parts of the plane, with sum 1
	total             *big.Rat
	path              []uint32
	communities       []Community
	signals           Signals
	wide              IPv6Community
	origins           int
	ignored           []string     // "SESSION REASON", sorted
	spared            map[int]bool // planes with usable routes that are not used because they are avoided
}

// notBelieved is an independent decoder of communities, from their octets. It returns the reason of the first invalid
// bandwidth, or "" if all are valid, and whether the route carries any bandwidth.
func notBelieved(c Codec, communities []Community, wide IPv6Community) (reason string, carried bool) {
	bounds := func(bits float64) string {
		switch {
		case bits != 0 && bits < float64(c.Min):
			return "below-minimum"
		case c.Max != 0 && bits > float64(c.Max):
			return "above-maximum"
		}
		return ""
	}
	judged := func(raw Community) (kind, reason string) {
		var bits float64
		switch {
		case raw[0] == 0x8e && raw[1] == 4:
			kind, bits = "fare", float64(int(raw[6])<<8|int(raw[7]))*1e9
		case raw[0]&^0x40 == 0 && raw[1] == 4:
			f := float64(math.Float32frombits(uint32(raw[4])<<24 | uint32(raw[5])<<16 | uint32(raw[6])<<8 | uint32(raw[7])))
			switch kind, bits = "link", math.Round(f/1e6*8)*1e6; { // the bounds in the tests are whole Mbit/s
			case math.IsNaN(f):
				return kind, "not-a-number"
			case math.IsInf(f, 0):
				return kind, "infinite"
			case f < 0:
				return kind, "negative"
			}
		default:
			return "", ""
		}
		return kind, bounds(bits)
	}
	rank, believed := map[string]int{"link": 1, "wide": 2, "fare": 3}, 0
	for _, raw := range communities {
		kind, why := judged(raw)
		if carried = carried || kind != ""; why == "" {
			believed = max(believed, rank[kind])
		}
	}
	whyWide := ""
	if bits := wideBits(wide); bits != nil {
		f, _ := new(big.Float).SetInt(bits).Float64()
		if whyWide, carried = bounds(f), true; whyWide == "" {
			believed = max(believed, rank["wide"])
		}
	}
	for _, raw := range communities {
		if kind, why := judged(raw); why != "" && rank[kind] >= believed {
			return why, carried
		}
	}
	if rank["wide"] >= believed {
		return whyWide, carried
	}
	return "", carried
}

// wideBits returns the value of an extended Link Bandwidth in bit/s, at most 2^53, or nil if there is none.
func wideBits(wide IPv6Community) *big.Int {
	if wide[0] == 0 {
		return nil
	}
	bits, most := new(big.Int).Lsh(new(big.Int).SetBytes(wide[4:12]), 3), new(big.Int).Lsh(big.NewInt(1), 53)
	if bits.Cmp(most) > 0 {
		return most
	}
	return bits
}

// bandwidth returns the value that counts, or nil, and its kind: "fare", "wide" or "link".
func (w *twin) bandwidth(c Codec, p *twinPath) (*big.Rat, string) {
	var fares, links []Community
	for _, raw := range p.communities {
		if raw[0] == 0x8e && raw[1] == 4 {
			fares = append(fares, raw)
		} else {
			links = append(links, raw)
		}
	}
	if a, _ := c.Judge(fares, nil); a.Known {
		return rat(uint64(a.Bandwidth)), "fare"
	}
	if bits := wideBits(p.wide); bits != nil && (bits.Sign() == 0 || bits.Uint64() >= uint64(c.Min) && (c.Max == 0 || bits.Uint64() <= uint64(c.Max))) {
		return new(big.Rat).SetInt(bits), "wide"
	}
	if a, _ := c.Judge(links, nil); a.Known {
		return rat(uint64(a.Bandwidth)), "link"
	}
	return nil, ""
}

// suspect returns "wrapped" if the Link Bandwidth that counts is a sum of 2 to 64 links as fast as one of the plane, in
// octets a second modulo 2^32, and "other-scale" if it is that of 1 to 8 links in another unit. The first link decides.
// An extended value is wrapped if it is the sum of 1 to 64 links that have lost their upper bits.
func (w *twin) suspect(plane int, value *big.Rat, kind string) string {
	if kind != "link" && kind != "wide" {
		return ""
	}
	bits, _ := value.Float64()
	got := bits / 8
	for i, link := range w.links {
		if w.config.SubPorts[i].Plane != plane || link.Speed == 0 {
			continue
		}
		for _, octets := range []float64{math.Trunc(float64(float32(float64(link.Speed) / 8))), math.Trunc(float64(link.Speed) / 8)} {
			for n := 1.0; n <= 64 && kind == "wide"; n++ {
				if low := n * math.Mod(octets, 1<<32); octets >= 1<<32 && got > 0 && math.Abs(got-low) < got/4e6 {
					return "wrapped"
				}
			}
			for n := 2.0; n <= 64 && kind == "link"; n++ {
				if low := math.Mod(n*octets, 1<<32); low < n*octets && got > 0 && math.Abs(got-low) < got/4e6 { // below 2^53, so this is exact
					return "wrapped"
				}
			}
		}
		for n := 1.0; n <= 8; n++ {
			for _, unit := range []float64{1e-6, 1e-3, 1e3, 1e6} {
				if math.Abs(8*got/(n*unit*float64(link.Speed))-1) < 1e-6 {
					return "other-scale"
				}
			}
		}
	}
	return ""
}

// signaled reports whether a route has one of the signals that have an effect.
func (w *twin) signaled(p twinPath) bool {
	effective, neighbor := w.config.LeastPreferred, fmt.Sprint(w.up[p.session].PeerAS)
	text := strings.Trim(fmt.Sprint(p.path), "[]") + " "
	long := w.config.Role == RoleServer && strings.ReplaceAll(text, neighbor+" ", "") != "" && strings.HasPrefix(text, neighbor+" "+neighbor+" ")
	for _, as := range p.path {
		one := fmt.Sprint(as, " ")
		long = long || w.config.Role == RoleServer && strings.ReplaceAll(text, neighbor+" ", "") != "" && strings.Contains(" "+text, " "+one+one+one)
	}
	return effective&SignalGracefulShutdown&p.signals != 0 || effective&SignalStale&p.signals != 0 || effective&SignalPrepended != 0 && long
}

// view is the result without the avoided planes or, if nothing is reachable then, with them.
func (w *twin) view(prefix netip.Prefix) twinView {
	v := w.viewBy(prefix, w.config.Unproved == UnprovedAvoid)
	if !v.reachable && len(v.spared) > 0 {
		v = w.viewBy(prefix, false)
		v.lasting = false
	}
	return v
}

// viewBy is the result without the routes that have a signal or, if nothing is reachable then, or only by zero
// bandwidth, with them; without the avoided planes if the policy spares them.
func (w *twin) viewBy(prefix netip.Prefix, spare bool) twinView {
	if v, some := w.viewOf(prefix, true, spare); !some || v.reachable && v.rule != RuleAllZeroEqual {
		v.lasting = slices.ContainsFunc(v.bandwidth, func(b *big.Rat) bool { return b.Sign() > 0 })
		return v
	}
	v, _ := w.viewOf(prefix, false, spare)
	return v
}

// viewOf also reports whether it left out usable routes.
func (w *twin) viewOf(prefix netip.Prefix, without, spare bool) (twinView, bool) {
	some := false
	v := twinView{total: new(big.Rat), spared: map[int]bool{}}
	for range w.config.Planes {
		v.bandwidth, v.capacity = append(v.bandwidth, new(big.Rat)), append(v.capacity, new(big.Rat))
		v.subPorts = append(v.subPorts, map[int]*big.Rat{})
	}
	type key struct {
		plane int
		node  netip.Addr
		as    uint32
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
		p := twinPath{session: i, subPort: s.SubPort, plane: plane, speed: rat(uint64(link.Speed)), node: up.Node, path: attrs.ASPath, communities: attrs.Communities, signals: attrs.Signals, wide: attrs.Extended,
			own: w.config.Role == RoleLeaf && !w.config.SubPorts[s.SubPort].Uplink && len(attrs.ASPath) > 0 && !slices.ContainsFunc(attrs.ASPath, func(as uint32) bool { return as != up.PeerAS })}
		p.origin = slices.Index(w.origins[prefix], w.origin(i, attrs))
		value, kind := w.bandwidth(s.Codec, &p)
		if !p.own {
			p.suspect = w.suspect(plane, value, kind)
		}
		if p.suspect == "" {
			p.value = value
		}
		usable, shortest = append(usable, p), min(shortest, len(p.path))
	}
	v.origins = len(w.origins[prefix])
	if v.origins > 1 && w.config.Conflict != ConflictWeigh {
		best := math.MaxInt
		for _, p := range usable {
			if p.origin >= 0 {
				best = min(best, p.origin)
			}
		}
		usable = slices.DeleteFunc(usable, func(p twinPath) bool {
			return w.config.Conflict == ConflictDrop || p.origin >= 0 && p.origin != best
		})
		shortest = math.MaxInt
		for _, p := range usable {
			shortest = min(shortest, len(p.path))
		}
	}
	if spare {
		usable = slices.DeleteFunc(usable, func(p twinPath) bool {
			if w.avoided[Avoid{prefix, p.plane, true}] {
				v.spared[p.plane] = true
			}
			return v.spared[p.plane]
		})
		shortest = math.MaxInt
		for _, p := range usable {
			shortest = min(shortest, len(p.path))
		}
	}
	if without {
		all := len(usable)
		usable = slices.DeleteFunc(usable, w.signaled)
		some = len(usable) < all
		shortest = math.MaxInt
		for _, p := range usable {
			shortest = min(shortest, len(p.path))
		}
	}
	for _, p := range usable {
		if k := (key{p.plane, p.node, w.up[p.session].PeerAS}); w.config.Role == RoleServer || len(p.path) == shortest {
			nodes[k] = append(nodes[k], p)
		}
	}

	carried := false
	for _, paths := range nodes {
		for _, p := range paths {
			_, carries := notBelieved(w.config.Sessions[p.session].Codec, p.communities, p.wide)
			carried = carried || carries
		}
	}
	for _, paths := range nodes {
		for _, p := range paths {
			why, carries := notBelieved(w.config.Sessions[p.session].Codec, p.communities, p.wide)
			if why == "" {
				why = p.suspect
			}
			if why == "" && carried && !carries {
				why = "missing-bandwidth"
			}
			if why != "" {
				v.ignored = append(v.ignored, fmt.Sprint(p.session, " ", why))
			}
		}
	}
	slices.Sort(v.ignored)

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
	case known == 0 && w.config.AllMissing == AllMissingEqual:
		v.rule, equal = RuleAllMissingEqual, true
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
		v.path, v.communities, v.signals, v.wide = best.path, best.communities, best.signals, best.wide
	}
	return v, some
}

// simpler is an independent implementation of simplify. Numbers that are not in a ratio of whole numbers up to 1000,
// but within half a millionth of one, are replaced by the smallest such ratio. It returns the greatest number of the
// ratio, or 0 if the numbers are unchanged.
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
