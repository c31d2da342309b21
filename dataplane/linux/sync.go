package linux

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/dataplane/internal/rtnl"
)

// groupKey names a kernel group: what a group of the contract is for one family.
type groupKey struct {
	wanted uint32
	family family
}

// group is a resilient group of the kernel, shared by all destinations of one family that have the same wanted group.
type group struct {
	key    groupKey
	id     uint32
	users  int // destinations that want it
	exists bool
	// members are what the kernel was told, segments what came of it; nil: not known, or no member carries anything.
	members  []rtnl.Member
	segments []segment
	// weights and generation are what the members follow from; nil: not known.
	weights    []uint32
	generation uint64
	// witnesses are members without a bucket that the last change needed (deal), at the time dealtAt.
	witnesses []uint32
	dealtAt   time.Time
	// dropping: its one member is a blackhole.
	dropping bool
	// moved: the kernel took members away, at the time. Their buckets went to others.
	moved   bool
	movedAt time.Time
	// rejecting: an IPv6 route that was set while the first member was the loopback rejects packets for ever, whatever
	// becomes of the group (fib6_is_reject). Such routes are set again when the group carries something.
	rejecting bool
}

type opKind uint8

const (
	makeNexthop opKind = iota
	changeNexthop
	setGroup
	setRoute
	deleteRoute
	deleteGroup
	deleteNexthop
)

// op is one message to the kernel, and what is true when it has carried it out.
type op struct {
	kind   opKind
	pool   *pool
	id     uint32
	group  *group
	prefix netip.Prefix
	route  *rtnl.Route // of deleteRoute: other than the Plane sets them

	members   []rtnl.Member
	witnesses []uint32
	segments  []segment
	weights   []uint32
	flags     uint16
	repair    bool
}

// plan is what brings the kernel from what it has to what is wanted, in order.
type plan struct {
	*Plane
	nexthopOps, groupOps, routeOps, lastOps []op
}

// failure is an op that the kernel refused.
type failure struct {
	op  op
	err error
}

// tries is how often a refused plan is made again, from what the kernel then says it has.
const tries = 3

// passes bound one sync while links change without end; what is left waits for their next news.
const passes = 16

// retryDelay is how long after the last of them the next attempt comes.
const retryDelay = time.Second

// sync makes the kernel obey, where something may differ. It returns what it refused in the end. The caller holds mu.
func (p *Plane) sync() []failure {
	var failures []failure
	news := false // of links, since the plan was made
	p.hear()
	for try, pass := 0, 0; try < tries && pass < passes; pass++ {
		again := len(failures) > 0 && !news
		if len(failures) > 0 {
			p.stats.Retries++
		}
		if again {
			if err := p.reread(false); err != nil {
				p.log.Error("linux data plane: cannot read back what the kernel has", "error", err)
			}
		}
		pl := p.plan()
		if pl.empty() {
			failures = nil
			break
		}
		generation := p.linkNews
		failures = p.execute(pl, again)
		p.hear()
		news = p.linkNews != generation
		switch {
		case len(failures) == 0 && len(p.retired) == 0 && !news:
			try = tries
		case len(failures) > 0 && !news: // news of links explain a refusal
			try++
		}
	}
	clear(p.staleRoutes)
	due := time.Duration(-1)
	for key := range p.staleGroups {
		at, waits := p.groups[key].since()
		if !waits {
			delete(p.staleGroups, key)
		} else if left := max(0, time.Until(at.Add(p.config.RepairDelay))); due < 0 || left < due {
			due = left
		}
	}
	for _, f := range failures {
		if f.op.group != nil {
			p.staleGroups[f.op.group.key] = true
		}
		if f.op.prefix.IsValid() {
			p.staleRoutes[f.op.prefix] = true
		}
		due = retryDelay
	}
	if due >= 0 {
		p.repair.Reset(due)
	}
	p.abandon()
	return failures
}

// since says whether the group waits for the control plane, and since when.
func (g *group) since() (at time.Time, waits bool) {
	switch {
	case g == nil:
		return at, false
	case g.moved:
		return g.movedAt, true
	default:
		return g.dealtAt, len(g.witnesses) > 0
	}
}

func (pl *plan) empty() bool {
	return len(pl.nexthopOps)+len(pl.groupOps)+len(pl.routeOps)+len(pl.lastOps) == 0
}

func (p *Plane) plan() *plan {
	pl := &plan{Plane: p}
	for _, q := range p.changed {
		for _, id := range q.ids {
			pl.nexthopOps = append(pl.nexthopOps, op{kind: changeNexthop, pool: q, id: id})
		}
	}
	p.changed = nil
	pl.routeOps = make([]op, 0, len(p.staleRoutes))
	for prefix := range p.staleRoutes {
		wanted, ok := p.destinations[prefix]
		if !ok {
			if id, ok := p.routes[prefix]; ok {
				pl.lastOps = append(pl.lastOps, op{kind: deleteRoute, prefix: prefix, id: id})
			}
			continue
		}
		g := p.claim(groupKey{wanted, familyOf(prefix.Addr())}, prefix)
		if !g.exists {
			p.staleGroups[g.key] = true
		}
		switch id, ok := p.routes[prefix]; {
		case !ok:
			pl.routeOps = append(pl.routeOps, op{kind: setRoute, prefix: prefix, id: g.id, group: g, flags: rtnl.Create})
		case id != g.id:
			pl.routeOps = append(pl.routeOps, op{kind: setRoute, prefix: prefix, id: g.id, group: g, flags: rtnl.Change})
		}
	}
	var unused []op
	for key := range p.staleGroups {
		switch g := p.groups[key]; {
		case g == nil:
		case g.users == 0 && g.exists:
			unused = append(unused, op{kind: deleteGroup, id: g.id, group: g})
		case g.users == 0:
			delete(p.used, g.id)
			delete(p.groups, key)
		default:
			pl.planGroup(g)
		}
	}
	pl.lastOps = append(pl.lastOps, unused...)
	if len(p.retired) > 0 {
		inUse := map[uint32]bool{}
		for _, g := range p.groups {
			for _, m := range g.members {
				inUse[m.ID] = inUse[m.ID] || g.exists
			}
		}
		for _, id := range p.retired {
			if !inUse[id] {
				pl.lastOps = append(pl.lastOps, op{kind: deleteNexthop, id: id})
			}
		}
	}
	return pl
}

func (p *Plane) route(prefix netip.Prefix, id uint32) rtnl.Route {
	return rtnl.Route{Prefix: prefix, Table: p.config.Table, Protocol: p.config.Protocol, Metric: p.config.Metric, Nexthop: id}
}

// claim returns a kernel group, and takes what an earlier run left for the destination for it where there is some.
func (p *Plane) claim(key groupKey, prefix netip.Prefix) *group {
	g := p.groups[key]
	if g.id != 0 {
		return g
	}
	if s, ok := p.strays[p.routes[prefix]]; ok && int(s.Buckets) == p.layout.buckets && s.Resilient && s.IdleTimer == 0 {
		delete(p.strays, s.ID)
		g.id, g.exists, g.members, g.segments = s.ID, true, s.Members, s.segments
		g.dropping = len(s.Members) == 1 && p.owners[s.Members[0].ID] == p.hole[key.family]
		if !g.dropping && !p.asDealt(g) {
			g.moved, g.segments = true, nil
		}
		g.rejecting = key.family == v6 && (g.dropping || g.moved)
		p.staleGroups[key] = true
		return g
	}
	g.id = p.newID()
	return g
}

// asDealt says whether the weights of a group's members are those that its segments were dealt by.
func (p *Plane) asDealt(g *group) bool {
	size := map[uint32]int{}
	for _, s := range g.segments {
		size[s.id] += s.size
	}
	drops := 0
	for _, m := range g.members {
		switch {
		case size[m.ID] == 0 && m.Weight == 1:
			if p.owners[m.ID] == p.drop[g.key.family] {
				drops++
			}
		case size[m.ID] == 0 || int(m.Weight) != size[m.ID]*p.scaling.scale:
			return false
		}
		delete(size, m.ID)
	}
	return drops == 1 && len(size) == 0
}

// planGroup plans one group that destinations want.
func (pl *plan) planGroup(g *group) {
	weights := pl.live(pl.wanted[g.key.wanted], g.key.family)
	target := pl.layout.runs(weights)
	same := g.exists && g.generation == pl.generation && slices.Equal(weights, g.weights)
	if same {
		switch {
		case !g.moved:
			pl.dismiss(g)
			pl.unreject(g, target != nil)
			return
		case target != nil && time.Since(g.movedAt) < pl.config.RepairDelay:
			return // the kernel has moved the flows; the control plane says in a moment what the weights are now
		}
	}
	next := op{kind: setGroup, id: g.id, group: g, weights: weights, repair: same, flags: rtnl.Change}
	if !g.exists {
		next.flags = rtnl.Create
	}
	current := g.segments
	if !g.exists || g.moved || g.dropping {
		current = nil
	}
	if target == nil {
		if g.exists && g.dropping && !g.moved {
			g.weights, g.generation = weights, pl.generation
			return
		}
		next.members = []rtnl.Member{{ID: pl.take(pl.hole[g.key.family], map[uint32]bool{}), Weight: 1}}
		pl.groupOps = append(pl.groupOps, next)
		return
	}
	taken := map[uint32]bool{}
	for _, m := range g.members {
		taken[m.ID] = true
	}
	owner := func(id uint32) int {
		q := pl.owners[id]
		if q == nil || q.subPort == nil || q.subPort.pool(g.key.family) != q {
			return -1
		}
		return q.subPort.index
	}
	device := func(id uint32) int {
		if q := pl.owners[id]; q != nil && q.subPort != nil {
			return q.device
		}
		return 0
	}
	fresh := func(subPort int) uint32 { return pl.take(pl.subPorts[subPort].pool(g.key.family), taken) }
	d := pl.scaling.deal(current, target, owner, device, fresh)
	if current != nil && d.moved == 0 {
		g.weights, g.generation = weights, pl.generation
		pl.unreject(g, true)
		return
	}
	if current != nil && len(d.members) > 2*len(target)+2*pl.layout.subPorts {
		d = pl.scaling.dealAll(target, fresh) // too many small pieces by now
	}
	drop := pl.take(pl.drop[g.key.family], map[uint32]bool{})
	next.members, next.witnesses, next.segments = append(d.members, rtnl.Member{ID: drop, Weight: 1}), d.witnesses, d.segments
	pl.groupOps = append(pl.groupOps, next)
	pl.unreject(g, true)
}

// dismiss plans to take the witnesses out of a group, when the control plane has had time to change it again. Should every
// other sub-port be lost, they would get its packets.
func (pl *plan) dismiss(g *group) {
	if len(g.witnesses) == 0 || time.Since(g.dealtAt) < pl.config.RepairDelay {
		return
	}
	members := slices.DeleteFunc(slices.Clone(g.members), func(m rtnl.Member) bool { return slices.Contains(g.witnesses, m.ID) })
	pl.groupOps = append(pl.groupOps, op{
		kind: setGroup, id: g.id, group: g, members: members, segments: g.segments, weights: g.weights, flags: rtnl.Change,
	})
}

// unreject sets routes again that may reject although their group carries something.
func (pl *plan) unreject(g *group, live bool) {
	if !g.rejecting || !live {
		return
	}
	for prefix, id := range pl.routes {
		if id == g.id && familyOf(prefix.Addr()) == g.key.family && pl.destinations[prefix] == g.key.wanted {
			pl.routeOps = append(pl.routeOps, op{kind: setRoute, prefix: prefix, id: id, group: g, flags: rtnl.Change})
		}
	}
	g.rejecting = false
}

// execute sends a plan and keeps what the kernel has carried out. again: the plan was made from what it said it has.
func (p *Plane) execute(pl *plan, again bool) (failures []failure) {
	b := p.conn.Begin()
	ops := slices.Concat(pl.nexthopOps, pl.groupOps, pl.routeOps, pl.lastOps)
	for i := range ops {
		p.put(b, &ops[i])
	}
	for i, err := range p.conn.Do(b) {
		o := &ops[i]
		if err == nil || o.kind >= deleteRoute && (errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESRCH)) {
			p.done(o)
			continue
		}
		p.stats.Errors++
		p.undone(o, err, again)
		failures = append(failures, failure{*o, err})
	}
	return failures
}

func (p *Plane) put(b *rtnl.Batch, o *op) {
	switch o.kind {
	case makeNexthop, changeNexthop:
		flags := uint16(rtnl.Create)
		if o.kind == changeNexthop {
			flags = rtnl.Change
		}
		b.SetNexthop(o.pool.nexthop(p, o.id), flags)
		p.stats.Nexthops++
	case setGroup:
		b.SetNexthop(rtnl.Nexthop{
			ID: o.id, Protocol: p.config.Protocol, Members: o.members, Resilient: true, Buckets: uint16(p.layout.buckets),
		}, o.flags)
		p.stats.Groups++
	case setRoute:
		b.SetRoute(p.route(o.prefix, o.id), o.flags)
		p.stats.Routes++
	case deleteRoute:
		if o.route != nil {
			b.DelRoute(*o.route)
		} else {
			b.DelRoute(p.route(o.prefix, o.id))
		}
		p.stats.Routes++
	case deleteGroup:
		b.DelNexthop(o.id)
		p.stats.Groups++
	case deleteNexthop:
		b.DelNexthop(o.id)
		p.stats.Nexthops++
	}
}

// done keeps what an op has made true.
func (p *Plane) done(o *op) {
	switch g := o.group; o.kind {
	case setGroup:
		if o.repair {
			p.stats.Repairs++
		}
		g.exists, g.moved, g.dropping = true, false, o.segments == nil
		g.members, g.segments, g.weights, g.generation = o.members, o.segments, o.weights, p.generation
		g.witnesses, g.dealtAt = o.witnesses, time.Now()
		g.rejecting = g.rejecting || g.dropping && g.key.family == v6
	case setRoute:
		p.routes[o.prefix] = o.id
	case deleteRoute:
		delete(p.routes, o.prefix)
	case deleteGroup:
		delete(p.used, o.id)
		delete(p.strays, o.id)
		if g != nil {
			g.exists = false
			delete(p.groups, g.key)
		}
	case deleteNexthop:
		delete(p.used, o.id)
		delete(p.loose, o.id)
		p.retired = slices.DeleteFunc(p.retired, func(id uint32) bool { return id == o.id })
	}
}

// undone keeps what an op has not made true.
func (p *Plane) undone(o *op, err error, again bool) {
	switch o.kind {
	case setGroup:
		if o.flags == rtnl.Create && errors.Is(err, unix.EEXIST) {
			o.group.id = 0 // somebody else's
		}
		return
	case setRoute:
		o.group.rejecting = o.group.rejecting || o.flags == rtnl.Change && o.group.key.family == v6
		return
	case makeNexthop, changeNexthop:
	default:
		return
	}
	q := o.pool
	if o.kind == makeNexthop {
		p.forget(q, func(id uint32) bool { return id == o.id })
		if errors.Is(err, unix.EEXIST) {
			p.used[o.id] = true // somebody else's
			return
		}
	}
	if !again || exhausted(err) || q.subPort == nil || q.broken != nil {
		return
	}
	// The link is as we think, and the kernel does not want this next hop. Its traffic goes over the others.
	q.broken = err
	p.log.Error("linux data plane: the kernel does not take a next hop; its traffic goes over the other sub-ports until that changes",
		"device", q.subPort.device, "next_hop", q.gateway, "error", err)
	p.retire(q)
	p.stale(q.subPort)
}

// stale marks the groups that a sub-port is a member of.
func (p *Plane) stale(sp *subPort) {
	for key := range p.groups {
		for _, m := range p.wanted[key.wanted].GetMembers() {
			if m.Device == sp.device {
				p.staleGroups[key] = true
			}
		}
	}
}

// refusal describes a failure for whoever asked for it.
func (f failure) refusal() error {
	if f.op.kind == setRoute && errors.Is(f.err, unix.EEXIST) {
		return kernelStatus(fmt.Errorf("%w; a route of somebody else's to %v is there, and is left alone: remove it, or set another metric",
			f.err, f.op.prefix))
	}
	return kernelStatus(f.err)
}
