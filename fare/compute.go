package fare

import (
	"math"
	"math/bits"
	"slices"
)

// computation computes one group's view. It is scratch memory, reused for each group; after run, nodes and
// links hold the intermediate results.
type computation struct {
	nodes   []nodeSum
	links   []nodeLink // by plane and sub-port
	of      []int32    // link of each entry, or one of the negative constants below
	origins int        // number of different origins
	// unwanted is the set of signals of which a route is not used; waived reports that such routes exist; lastResort
	// that they, or those of avoided planes, are used because no others can be.
	unwanted   Signals
	waived     bool
	avoids     bool // avoided planes are not used
	spared     bool // usable routes of avoided planes exist
	lastResort bool
	view       GroupView
	weights    []SubPortWeight    // backs view.Planes[].SubPorts
	ignored    []IgnoredBandwidth // backs view.Ignored
	ratio      []uint64           // argument of simplify
}

// Values of computation.of for an entry without a link.
const (
	notUsable   = -1
	tooLong     = -2 // usable, but another route is shorter
	otherOrigin = -3 // usable, but another origin is preferred
	conflicted  = -4 // usable, but origins conflict and the policy drops all routes
	signaled    = -5 // usable, but it has a signal, and another route has none
	avoided     = -6 // usable, but its plane is avoided toward the destination
)

// nodeSum is b(n), the bandwidth of one node on one plane.
type nodeSum struct {
	plane      int
	leader     int       // session that represents the node
	local      Bandwidth // sum of the usable sub-ports toward it
	value      Bandwidth // lowest advertised; meaningful when known
	known      bool      // a route of the node carries a value
	originated bool      // the neighbor itself originated every route of the node
	bandwidth  Bandwidth // b(n); local when no value is known
	share      uint64    // share of the traffic, in the group's unit; 0: not used
	reason     Reason    // why the node is not used
	amounts    uint64    // sum of its links' amounts
}

// nodeLink is one sub-port toward one node.
type nodeLink struct {
	node    int
	subPort int
	speed   Bandwidth
	value   Bandwidth // lowest value advertised over it; meaningful when known
	known   bool
	amount  uint64 // its part of the node, relative to the node's other links
}

// run computes g.reasons and g.view and reports whether the view changed.
func (c *computation) run(t *Table, g *group) bool {
	c.settle(t, g)
	g.lastResort = c.lastResort
	c.view.Origins = c.origins
	c.unbelieved(t, g)
	c.reasons(t, g)
	c.split()
	return c.publish(g)
}

// settle decides which nodes are used: those of avoided planes only as the last resort. A route with signals still
// carries packets, so it comes before them.
func (c *computation) settle(t *Table, g *group) {
	c.avoids = t.config.Unproved == UnprovedAvoid
	c.prefer(t, g)
	if c.avoids && c.spared && !c.view.Reachable {
		c.avoids = false
		c.prefer(t, g)
		c.lastResort = true
	}
}

// prefer decides which nodes are used: those of routes with signals only as the last resort.
func (c *computation) prefer(t *Table, g *group) {
	c.unwanted, c.lastResort = t.config.LeastPreferred, false
	c.choose(t, g)
	if c.waived && (!c.view.Reachable || c.view.Rule == RuleAllZeroEqual) { // only routes with signals can carry packets
		c.unwanted, c.lastResort = 0, true
		c.choose(t, g)
	}
}

// choose decides which nodes are used.
func (c *computation) choose(t *Table, g *group) {
	c.gather(t, g)
	c.judge()
	c.decide(t)
}

// gather sorts the usable entries into nodes and links.
func (c *computation) gather(t *Table, g *group) {
	c.nodes, c.links, c.of = c.nodes[:0], c.links[:0], c.of[:0]
	plane, first := -1, 0 // first node of the plane
	allowed := t.allowedOrigins(g)
	c.origins = allowed.seen
	c.waived, c.spared = false, false
	shortest := c.shortest(t, g, allowed)
	for i := range g.entries {
		e := &g.entries[i]
		s := &t.sessions[t.order[e.rank]]
		if !s.usable(e) {
			c.of = append(c.of, notUsable)
			continue
		}
		if refused := allowed.refuses(e); refused != 0 {
			c.of = append(c.of, refused)
			continue
		}
		if e.avoided && c.avoids {
			c.of, c.spared = append(c.of, avoided), true
			continue
		}
		if e.signals&c.unwanted != 0 {
			c.of, c.waived = append(c.of, signaled), true
			continue
		}
		if e.hops > shortest {
			c.of = append(c.of, tooLong)
			continue
		}
		sp := &t.subPorts[s.subPort]
		if sp.plane != plane {
			plane, first = sp.plane, len(c.nodes)
		}
		n := first
		for n < len(c.nodes) && c.nodes[n].leader != s.leader {
			n++
		}
		if n == len(c.nodes) {
			c.nodes = append(c.nodes, nodeSum{plane: plane, leader: s.leader, originated: true})
		}
		node := &c.nodes[n]
		node.originated = node.originated && e.originated
		known := e.known && t.suspect(e) == ReasonUsed
		if known && (!node.known || e.value < node.value) {
			node.known, node.value = true, e.value
		}
		l := len(c.links) // entries of one sub-port are adjacent
		for l > 0 && c.links[l-1].subPort == s.subPort && c.links[l-1].node != n {
			l--
		}
		if l == 0 || c.links[l-1].subPort != s.subPort {
			node.local = node.local.Add(sp.speed)
			c.links = append(c.links, nodeLink{node: n, subPort: s.subPort, speed: sp.speed})
			l = len(c.links)
		}
		link := &c.links[l-1]
		if known && (!link.known || e.value < link.value) {
			link.known, link.value = true, e.value
		}
		c.of = append(c.of, int32(l-1))
	}
}

// usable reports whether the route behind e can carry packets.
func (s *session) usable(e *entry) bool {
	return s.reason == ReasonUsed && s.generation == e.generation
}

// shortest returns the length of the shortest AS path among g's usable routes, or 0 at a server. A leaf uses
// no longer path (RFC 4271, Section 9.1.2.2 a): a longer one could lead back to the leaf through a neighbor
// that has the same choice. A server may use every path, because it forwards no transit traffic.
func (c *computation) shortest(t *Table, g *group, allowed origins) uint16 {
	if t.config.Role != RoleLeaf {
		return 0
	}
	least := uint16(math.MaxUint16)
	for i := range g.entries {
		if e := &g.entries[i]; t.sessions[t.order[e.rank]].usable(e) && allowed.refuses(e) == 0 && e.signals&c.unwanted == 0 && !(e.avoided && c.avoids) {
			least = min(least, e.hops)
		}
	}
	return least
}

// judge computes b(n) of every node and how its links divide it.
func (c *computation) judge() {
	for i := range c.links {
		link := &c.links[i]
		node := &c.nodes[link.node]
		link.amount = uint64(link.speed)
		if node.originated {
			if link.known { // the value describes this sub-port alone
				link.amount = uint64(min(link.speed, link.value))
			}
			node.bandwidth = node.bandwidth.Add(Bandwidth(link.amount))
		}
	}
	for i := range c.nodes {
		node := &c.nodes[i]
		switch {
		case !node.known:
			node.bandwidth = node.local
		case !node.originated:
			node.bandwidth = min(node.local, node.value)
		}
	}
	for i := range c.links {
		link := &c.links[i]
		node := &c.nodes[link.node]
		if node.bandwidth == 0 {
			link.amount = uint64(link.speed) // counts if all nodes are zero and get equal shares
		}
	}
}

// decide applies the policies: it selects the nodes that are used and their shares.
func (c *computation) decide(t *Table) {
	missing, positive := 0, 0
	for i := range c.nodes {
		if !c.nodes[i].known {
			missing++
		} else if c.nodes[i].bandwidth > 0 {
			positive++
		}
	}
	v := &c.view
	*v = GroupView{Planes: slices.Grow(v.Planes[:0], len(t.planes))[:len(t.planes)]}
	clear(v.Planes)

	known := len(c.nodes) - missing
	switch {
	case len(c.nodes) == 0:
		v.Rule = RuleNoPath
	case known == 0 && t.config.AllMissing == AllMissingEqual:
		v.Rule = RuleAllMissingEqual
	case known == 0:
		v.Rule = RuleLocalSpeed
	case missing > 0 && t.config.Missing == MissingEqual:
		v.Rule = RuleMissingEqual // RFC 10005, Section 4: equal shares unless local policy differs
	case missing > 0 && t.config.Missing == MissingLocal:
		v.Rule = RuleMissingLocal
	case positive == 0 && t.config.AllZero == ZeroEqual:
		v.Rule = RuleAllZeroEqual
	case positive == 0:
		v.Rule = RuleAllZeroUnreachable
	case missing > 0:
		v.Rule = RuleMissingSkip
	default:
		v.Rule = RuleAdvertised
	}
	equal := v.Rule == RuleMissingEqual || v.Rule == RuleAllMissingEqual || v.Rule == RuleAllZeroEqual
	for i := range c.nodes {
		node := &c.nodes[i]
		switch {
		case !node.known && known > 0 && t.config.Missing == MissingSkip:
			node.reason = ReasonMissingBandwidth
			continue
		case node.bandwidth == 0 && v.Rule != RuleAllZeroEqual:
			// RFC 10005, Section 3.2, leaves zero to local policy: a path with zero carries nothing while
			// another path can.
			node.reason = ReasonZeroBandwidth
			continue
		}
		p := &v.Planes[node.plane]
		p.Bandwidth = p.Bandwidth.Add(node.bandwidth)
		node.share, p.Capacity = uint64(node.bandwidth), uint64(p.Bandwidth)
		if equal {
			node.share, p.Capacity = 1, 1
		}
		v.Reachable = true
	}
	c.ratio = c.ratio[:0]
	for i := range v.Planes {
		c.ratio = append(c.ratio, v.Planes[i].Capacity)
	}
	simplify(c.ratio)
	for i := range v.Planes {
		v.Planes[i].Capacity = c.ratio[i]
	}
}

// reasons sets the reason why each entry, each plane and the whole group does not count.
func (c *computation) reasons(t *Table, g *group) {
	v := &c.view
	g.reasons = slices.Grow(g.reasons[:0], len(g.entries))[:len(g.entries)]
	for i := range g.entries {
		s := &t.sessions[t.order[g.entries[i].rank]]
		p := &v.Planes[t.subPorts[s.subPort].plane]
		var reason Reason
		switch {
		case c.of[i] == tooLong:
			reason = ReasonLongerPath
		case c.of[i] == signaled:
			reason = (g.entries[i].signals & c.unwanted).reason()
		case c.of[i] == avoided:
			reason = ReasonAvoided
		case c.of[i] == otherOrigin:
			reason = ReasonOtherOrigin
		case c.of[i] == conflicted:
			reason = ReasonConflict
		case c.of[i] == notUsable:
			reason = s.reason
			if reason == ReasonUsed {
				reason = ReasonSessionDown // the route belongs to an earlier incarnation of the session
			}
		default:
			link := &c.links[c.of[i]]
			node := &c.nodes[link.node]
			reason = node.reason
			if reason == ReasonUsed && link.amount == 0 {
				reason = ReasonZeroBandwidth // one half of a Y-cable in maintenance
			}
		}
		g.reasons[i] = reason
		if p.Capacity == 0 && (p.Reason == ReasonUsed || reason < p.Reason) {
			p.Reason = reason
		}
	}
	least := ReasonNoRoute
	for i := range v.Planes {
		p := &v.Planes[i]
		if p.Capacity == 0 && p.Reason == ReasonUsed {
			p.Reason = ReasonNoRoute
		}
		least = min(least, p.Reason)
	}
	switch {
	case v.Reachable:
	case v.Rule == RuleAllZeroUnreachable:
		v.Reason = ReasonZeroBandwidth
	default:
		v.Reason = least
	}
}

// unbelieved lists the usable routes whose bandwidth does not count.
func (c *computation) unbelieved(t *Table, g *group) {
	c.ignored = c.ignored[:0]
	carried := false // a usable route carries a bandwidth, valid or not
	for i := range g.entries {
		carried = carried || c.of[i] >= 0 && (g.entries[i].known || g.entries[i].ignored != ReasonUsed)
	}
	for i := range g.entries {
		e := &g.entries[i]
		reason := e.ignored
		if reason == ReasonUsed {
			reason = t.suspect(e)
		}
		if reason == ReasonUsed && !e.known && carried {
			reason = ReasonMissingBandwidth
		}
		if c.of[i] >= 0 && reason != ReasonUsed {
			c.ignored = append(c.ignored, IgnoredBandwidth{t.order[e.rank], reason})
		}
	}
	c.view.Ignored = c.ignored
}

// split divides each plane over its sub-ports.
func (c *computation) split() {
	c.weights = c.weights[:0]
	if cap(c.weights) < len(c.links) {
		c.weights = make([]SubPortWeight, 0, 2*len(c.links)) // so that appending below never moves the array
	}
	for node, link := 0, 0; node < len(c.nodes); {
		plane, nodes, links := c.nodes[node].plane, node, link
		for node < len(c.nodes) && c.nodes[node].plane == plane {
			node++
		}
		for link < len(c.links) && c.links[link].node < node {
			link++
		}
		from := len(c.weights)
		if !c.splitExactly(c.nodes[nodes:node], c.links[links:link]) {
			c.weights = c.weights[:from]
			c.splitNearly(c.nodes[nodes:node], c.links[links:link])
		}
		c.view.Planes[plane].SubPorts = c.lowestTerms(c.weights[from:])
	}
}

// splitExactly appends the weights of one plane's links: each node's share, divided in proportion to its
// links' amounts, over a common denominator. It returns false if the sum of the weights does not fit 63 bits.
func (c *computation) splitExactly(nodes []nodeSum, links []nodeLink) bool {
	var shares uint64 // greatest common divisor
	for i := range nodes {
		shares = gcd(shares, nodes[i].share)
		nodes[i].amounts = 0
	}
	if shares == 0 {
		return true
	}
	for i := range links {
		node := &c.nodes[links[i].node]
		node.amounts = gcd(node.amounts, links[i].amount)
	}
	for i := range links {
		links[i].amount /= max(c.nodes[links[i].node].amounts, 1)
	}
	for i := range nodes {
		nodes[i].amounts = 0
	}
	for i := range links {
		c.nodes[links[i].node].amounts += links[i].amount // at most 4096 * 2^53
	}
	common := uint64(1)
	for i := range nodes {
		if nodes[i].share == 0 {
			continue
		}
		hi, lo := bits.Mul64(common/gcd(common, nodes[i].amounts), nodes[i].amounts)
		if hi != 0 {
			return false
		}
		common = lo
	}
	total := uint64(0)
	for i := range links {
		node := &c.nodes[links[i].node]
		if node.share == 0 || links[i].amount == 0 {
			continue
		}
		hi, weight := bits.Mul64(node.share/shares, links[i].amount)
		if hi != 0 {
			return false
		}
		hi, weight = bits.Mul64(weight, common/node.amounts)
		if total += weight; hi != 0 || weight>>63 != 0 || total>>63 != 0 {
			return false
		}
		c.weigh(links[i].subPort, weight)
	}
	return true
}

// splitNearly is splitExactly in fixed point, for shares and speeds without a small common denominator. The
// error of each link is below 2^-50 of its plane.
func (c *computation) splitNearly(nodes []nodeSum, links []nodeLink) {
	var most uint64
	for i := range nodes {
		most = max(most, nodes[i].share)
	}
	shift := 50 - bits.Len64(most) // the sum of 4096 links of 2^50 fits
	for i := range links {
		node := &c.nodes[links[i].node]
		if node.share == 0 || links[i].amount == 0 {
			continue
		}
		share := node.share >> max(-shift, 0) << max(shift, 0)
		hi, lo := bits.Mul64(share, links[i].amount)
		weight, _ := bits.Div64(hi, lo, node.amounts) // amount <= amounts, so it fits
		c.weigh(links[i].subPort, max(weight, 1))
	}
}

// weigh adds weight to subPort, which is either the last sub-port of c.weights or a new one behind it.
func (c *computation) weigh(subPort int, weight uint64) {
	if n := len(c.weights); n > 0 && c.weights[n-1].SubPort == subPort {
		c.weights[n-1].Weight += weight
		return
	}
	c.weights = append(c.weights, SubPortWeight{SubPort: subPort, Weight: weight})
}

// lowestTerms divides the weights of one plane's sub-ports by their common unit.
func (c *computation) lowestTerms(weights []SubPortWeight) []SubPortWeight {
	c.ratio = c.ratio[:0]
	for i := range weights {
		c.ratio = append(c.ratio, weights[i].Weight)
	}
	common := simplify(c.ratio)
	for i := range weights {
		weights[i].Weight = c.ratio[i] / common
	}
	return weights
}

// publish copies the scratch view to g and reports whether it differs from the previous one.
func (c *computation) publish(g *group) bool {
	v := &c.view
	if g.view.Reachable == v.Reachable && g.view.Reason == v.Reason && g.view.Rule == v.Rule && g.view.Origins == v.Origins &&
		slices.Equal(g.view.Ignored, v.Ignored) &&
		slices.EqualFunc(g.view.Planes, v.Planes, PlaneBandwidth.equal) {
		return false
	}
	planes := append(g.view.Planes[:0], v.Planes...)
	g.view = *v
	g.view.Planes = planes
	g.ignored = append(g.ignored[:0], v.Ignored...)
	g.view.Ignored = g.ignored
	g.subPorts = slices.Grow(g.subPorts[:0], len(c.weights))
	for i := range planes {
		from := len(g.subPorts)
		g.subPorts = append(g.subPorts, planes[i].SubPorts...)
		planes[i].SubPorts = g.subPorts[from:len(g.subPorts):len(g.subPorts)]
	}
	return true
}

func (p PlaneBandwidth) equal(q PlaneBandwidth) bool {
	return p.Bandwidth == q.Bandwidth && p.Capacity == q.Capacity && p.Reason == q.Reason &&
		slices.Equal(p.SubPorts, q.SubPorts)
}
