package linux

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/rtnl"
)

// groupKey identifies a kernel group: the part of a group of the contract for one family.
type groupKey struct {
	wanted uint32
	family family
}

// group is a resilient kernel group, shared by all destinations of one family that have the same wanted group.
type group struct {
	key    groupKey
	source netip.Prefix
	id     uint32
	users  int // number of destinations that want it
	exists bool
	// members is the last member list sent to the kernel, segments the resulting bucket layout, or nil if it is unknown or
	// no member carries packets.
	members  []rtnl.Member
	segments []segment
	// weights and generation are the inputs that the members were computed from; nil weights are unknown.
	weights    []uint32
	generation uint64
	// witnesses are members without a bucket that the last change (at dealtAt) needed, see deal.
	witnesses []uint32
	dealtAt   time.Time
	// dropping is true if the only member is a blackhole.
	dropping bool
	// moved is true if the kernel has removed members, at movedAt, and given their buckets to other members.
	moved   bool
	movedAt time.Time // zero unless a lost carrier was the reason
	// answered is true if the control plane has set the group since the move, even to the same weights.
	answered bool
	// rejecting is true if routes of the group may reject packets: an IPv6 route that was set while the first member was on
	// the loopback device rejects packets permanently, whatever the group becomes (fib6_is_reject). Such routes are set
	// again when the group carries packets.
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

// op is one message to the kernel, together with the state that holds once the kernel has acknowledged it.
type op struct {
	kind  opKind
	pool  *pool
	id    uint32
	group *group
	at    routeKey
	route *rtnl.Route // for deleteRoute: a route that differs from those of the Driver
	// source is the address in the message of setRoute.
	source netip.Addr

	members   []rtnl.Member
	witnesses []uint32
	segments  []segment
	weights   []uint32
	flags     uint16
	repair    bool
}

// plan holds the ops that turn the kernel state into the wanted state, in order.
type plan struct {
	*Driver
	nexthopOps, groupOps, routeOps, lastOps []op
	// closeOps set routes that drop packets of other source groups; they run before the ops for routes that these packets
	// would take. openOps remove such routes, after those ops.
	closeOps, openOps []op
}

// failure is a refused op.
type failure struct {
	op  op
	err error
}

// tries is the number of attempts of a plan; each retry is planned from the state read back from the kernel.
const tries = 3

// passes bounds the rounds of one sync while links keep changing; the remaining work waits for the next link event.
const passes = 16

// retryDelay is the pause before the next sync after the last refused attempt.
const retryDelay = time.Second

// sync brings the kernel in line with the wanted state, wherever the two may differ, and returns the ops that the kernel
// refused in the last round. The caller holds mu.
func (d *Driver) sync() []failure {
	var failures []failure
	news := false // links have changed since the plan was made
	d.hear()
	for try, pass := 0, 0; try < tries && pass < passes; pass++ {
		again := len(failures) > 0 && !news
		if len(failures) > 0 {
			d.stats.Retries++
		}
		if again {
			if err := d.reread(false); err != nil {
				d.log.Error("linux data plane: cannot read the kernel's objects back", "error", err)
			}
		}
		pl := d.plan()
		if pl.empty() {
			failures = nil
			break
		}
		generation := d.linkNews
		failures = d.execute(pl, again)
		d.hear()
		if news = d.linkNews != generation; len(failures) > 0 && !news { // link changes explain a refusal
			try++
		}
	}
	if at := d.await(failures); !at.IsZero() {
		d.repair.Reset(time.Until(at))
	}
	d.abandon()
	d.mended(failures)
	return failures
}

// await marks as stale the groups and routes of refused ops, in addition to groups that wait for the control plane, and clears all
// other marks. It returns when the next sync is due, or the zero time if nothing is stale.
func (d *Driver) await(failures []failure) (due time.Time) {
	clear(d.staleRoutes)
	for key := range d.staleGroups {
		since, waits := d.groups[key].since()
		if !waits {
			delete(d.staleGroups, key)
		} else if at := since.Add(d.config.RepairDelay); due.IsZero() || at.Before(due) {
			due = at
		}
	}
	for _, f := range failures {
		if f.op.group != nil {
			d.staleGroups[f.op.group.key] = true
		}
		if f.op.at.prefix.IsValid() {
			d.staleRoutes[f.op.at] = true
		}
		due = time.Now().Add(retryDelay)
	}
	return due
}

// since reports whether the group waits for the control plane, and since when.
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
	return len(pl.nexthopOps)+len(pl.groupOps)+len(pl.closeOps)+len(pl.routeOps)+len(pl.lastOps)+len(pl.openOps) == 0
}

func (d *Driver) plan() *plan {
	pl := &plan{Driver: d, routeOps: make([]op, 0, len(d.staleRoutes))}
	for _, q := range d.changed {
		for _, id := range q.ids {
			pl.nexthopOps = append(pl.nexthopOps, op{kind: changeNexthop, pool: q, id: id})
		}
	}
	d.changed = nil
	for at := range d.staleRoutes {
		wanted, ok := d.wantedAt(at)
		standing, there := d.routes[at]
		id := standing.nexthop
		flags := uint16(rtnl.Create)
		if there {
			flags = rtnl.Change
		}
		hole := d.hole[familyOf(at.prefix.Addr())]
		closed := there && d.owners[id] == hole
		switch {
		case !ok && closed:
			pl.openOps = append(pl.openOps, op{kind: deleteRoute, at: at, id: id})
		case !ok && there:
			pl.lastOps = append(pl.lastOps, op{kind: deleteRoute, at: at, id: id})
		case ok && wanted == 0 && !closed:
			pl.closeOps = append(pl.closeOps, op{kind: setRoute, at: at, id: pl.take(hole, map[uint32]bool{}), flags: flags})
		}
		if wanted == 0 {
			continue
		}
		g := d.claim(groupKey{wanted, familyOf(at.prefix.Addr())}, at)
		if !g.exists {
			d.staleGroups[g.key] = true
		}
		if !there || id != g.id || standing.source != d.preferred(at) {
			pl.routeOps = append(pl.routeOps, op{kind: setRoute, at: at, id: g.id, group: g, flags: flags})
		}
	}
	var unused []op
	for key := range d.staleGroups {
		switch g := d.groups[key]; {
		case g == nil:
		case g.users == 0 && g.exists:
			unused = append(unused, op{kind: deleteGroup, id: g.id, group: g})
		case g.users == 0:
			delete(d.groups, key)
		default:
			pl.planGroup(g)
		}
	}
	pl.lastOps = append(pl.lastOps, unused...)
	if len(d.retired) > 0 {
		inUse := map[uint32]bool{}
		for _, g := range d.groups {
			for _, m := range g.members {
				inUse[m.ID] = true
			}
		}
		for _, id := range d.retired {
			if !inUse[id] {
				pl.lastOps = append(pl.lastOps, op{kind: deleteNexthop, id: id})
			}
		}
	}
	return pl
}

func (d *Driver) route(at routeKey, id uint32) rtnl.Route {
	return rtnl.Route{Prefix: at.prefix, Table: at.table, Protocol: d.config.Protocol, Metric: d.config.Metric, Nexthop: id}
}

// claim returns the group for a key. A group without an id adopts the kernel group that an earlier run left for the
// destination or, if there is none, gets a new id.
func (d *Driver) claim(key groupKey, at routeKey) *group {
	g := d.groups[key]
	if g.id != 0 {
		return g
	}
	if s, ok := d.strays[d.routes[at].nexthop]; ok && int(s.Buckets) == d.size && s.Resilient && s.IdleTimer == 0 {
		delete(d.strays, s.ID)
		g.id, g.exists, g.members, g.segments = s.ID, true, s.Members, s.segments
		g.dropping = len(s.Members) == 1 && d.owners[s.Members[0].ID] == d.hole[key.family]
		if g.dropping {
			g.segments = nil
		} else if !d.asDealt(g) {
			g.moved, g.segments = true, nil
		}
		g.rejecting = key.family == v6 && (g.dropping || g.moved)
		d.staleGroups[key] = true
		return g
	}
	g.id = d.newID()
	return g
}

// asDealt reports whether the weights of a group's members match the segments.
func (d *Driver) asDealt(g *group) bool {
	size := map[uint32]int{}
	for _, s := range g.segments {
		size[s.id] += s.size
	}
	drops := 0
	for _, m := range g.members {
		switch {
		case size[m.ID] == 0 && m.Weight == 1:
			if d.owners[m.ID] == d.drop[g.key.family] {
				drops++
			}
		case size[m.ID] == 0 || int(m.Weight) != size[m.ID]*d.scaling.scale:
			return false
		}
		delete(size, m.ID)
	}
	return drops == 1 && len(size) == 0
}

// planGroup plans one group that destinations use.
func (pl *plan) planGroup(g *group) {
	s := pl.sourceOf(g.source)
	weights := pl.live(s, pl.wanted[g.key.wanted], g.key.family)
	target := s.layout.runs(weights)
	same := g.exists && g.generation == pl.generation && slices.Equal(weights, g.weights)
	if same {
		switch {
		case !g.moved:
			pl.dismiss(g)
			pl.unreject(g, target != nil)
			return
		case target != nil && !g.answered && time.Since(g.movedAt) < pl.config.RepairDelay:
			return // the kernel has moved the flows; new weights from the control plane are due shortly
		}
	}
	next := op{kind: setGroup, id: g.id, group: g, weights: weights, flags: rtnl.Change}
	next.repair = same && target != nil && !g.answered && !g.movedAt.IsZero()
	if !g.exists {
		next.flags = rtnl.Create
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
		return s.index(q.subPort)
	}
	device := func(id uint32) int {
		if q := pl.owners[id]; q != nil && q.subPort != nil {
			return q.device
		}
		return 0
	}
	fresh := func(subPort int) uint32 { return pl.take(s.subPorts[subPort].pool(g.key.family), taken) }
	current := g.segments // nil unless the division in the kernel is known
	d := pl.scaling.deal(current, target, owner, device, fresh)
	if d.moved == 0 {
		g.weights, g.generation = weights, pl.generation
		pl.unreject(g, true)
		return
	}
	if current != nil && (len(d.members) > 2*pl.scaling.pieces(target)+2*s.layout.subPorts || !s.layout.firm(d.segments, target)) {
		d = pl.scaling.dealAll(target, fresh) // too many pieces, or too small ones
	}
	drop := pl.take(pl.drop[g.key.family], map[uint32]bool{})
	next.members, next.witnesses, next.segments = append(d.members, rtnl.Member{ID: drop, Weight: 1}), d.witnesses, d.segments
	pl.groupOps = append(pl.groupOps, next)
	pl.unreject(g, true)
}

// dismiss plans the removal of witnesses from a group once the control plane has had time to change the group. If all other
// sub-ports failed, witnesses would receive their packets.
func (pl *plan) dismiss(g *group) {
	if len(g.witnesses) == 0 || time.Since(g.dealtAt) < pl.config.RepairDelay {
		return
	}
	members := slices.DeleteFunc(slices.Clone(g.members), func(m rtnl.Member) bool { return slices.Contains(g.witnesses, m.ID) })
	pl.groupOps = append(pl.groupOps, op{
		kind: setGroup, id: g.id, group: g, members: members, segments: g.segments, weights: g.weights, flags: rtnl.Change,
	})
}

// unreject plans to set routes again that may reject packets although their group carries packets.
func (pl *plan) unreject(g *group, live bool) {
	if !g.rejecting || !live {
		return
	}
	for at, r := range pl.routes {
		if wanted, _ := pl.wantedAt(at); r.nexthop == g.id && familyOf(at.prefix.Addr()) == g.key.family && wanted == g.key.wanted {
			pl.routeOps = append(pl.routeOps, op{kind: setRoute, at: at, id: g.id, group: g, flags: rtnl.Change})
		}
	}
	g.rejecting = false
}

// execute sends a plan and records the acknowledged ops. again is true if the plan was made from state that was read back.
func (d *Driver) execute(pl *plan, again bool) (failures []failure) {
	failures = d.send(slices.Concat(pl.nexthopOps, pl.groupOps, pl.closeOps, pl.routeOps), again)
	last := slices.Concat(pl.lastOps, pl.openOps)
	// A route that the kernel refuses to move still uses its previous group. To delete that group would delete the route.
	for _, f := range failures {
		if f.op.kind != setRoute {
			continue
		}
		used := d.routes[f.op.at].nexthop
		if i := slices.IndexFunc(last, func(o op) bool { return o.kind == deleteGroup && o.id == used }); i >= 0 {
			failures = append(failures, failure{last[i], f.err})
			last = slices.Delete(last, i, i+1)
		}
	}
	return append(failures, d.send(last, again)...)
}

// send sends ops in one batch, records the acknowledged ones and returns the others.
func (d *Driver) send(ops []op, again bool) (failures []failure) {
	if len(ops) == 0 {
		return nil
	}
	b := d.conn.Begin()
	for i := range ops {
		d.put(b, &ops[i])
	}
	for i, err := range d.conn.Do(b) {
		o := &ops[i]
		if err == nil || o.kind >= deleteRoute && (errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESRCH)) {
			d.done(o)
			continue
		}
		d.stats.Errors++
		d.undone(o, err, again)
		failures = append(failures, failure{*o, err})
	}
	return failures
}

func (d *Driver) put(b *rtnl.Batch, o *op) {
	switch o.kind {
	case makeNexthop, changeNexthop:
		flags := uint16(rtnl.Create)
		if o.kind == changeNexthop {
			flags = rtnl.Change
		}
		b.SetNexthop(o.pool.nexthop(d, o.id), flags)
		d.stats.Nexthops++
	case setGroup:
		b.SetNexthop(rtnl.Nexthop{
			ID: o.id, Protocol: d.config.Protocol, Members: o.members, Resilient: true, Buckets: uint16(d.size),
		}, o.flags)
		d.stats.Groups++
	case setRoute:
		r := d.wantedRoute(o.at, o.id)
		o.source = r.Source
		b.SetRoute(r, o.flags)
		d.stats.Routes++
	case deleteRoute:
		if o.route != nil {
			b.DelRoute(*o.route)
		} else {
			b.DelRoute(d.route(o.at, o.id))
		}
		d.stats.Routes++
	case deleteGroup:
		b.DelNexthop(o.id)
		d.stats.Groups++
	case deleteNexthop:
		b.DelNexthop(o.id)
		d.stats.Nexthops++
	}
}

// done records the state after an acknowledged op.
func (d *Driver) done(o *op) {
	switch g := o.group; o.kind {
	case setGroup:
		if o.repair {
			d.stats.Repairs++
		}
		g.exists, g.moved, g.movedAt, g.answered, g.dropping = true, false, time.Time{}, false, o.segments == nil
		g.members, g.segments, g.weights, g.generation = o.members, o.segments, o.weights, d.generation
		g.witnesses, g.dealtAt = o.witnesses, time.Now()
		g.rejecting = g.rejecting || g.dropping && g.key.family == v6
	case setRoute:
		d.routes[o.at] = routeState{o.id, o.source}
	case deleteRoute:
		delete(d.routes, o.at)
	case deleteGroup:
		delete(d.strays, o.id)
		if g != nil {
			delete(d.groups, g.key)
		}
	case deleteNexthop:
		delete(d.loose, o.id)
		d.retired = slices.DeleteFunc(d.retired, func(id uint32) bool { return id == o.id })
	}
}

// undone records the state after a refused op.
func (d *Driver) undone(o *op, err error, again bool) {
	switch o.kind {
	case setRoute:
		if o.group == nil {
			return
		}
		if o.source.IsValid() && errors.Is(err, unix.EINVAL) {
			// The address is no longer an address of the host, or belongs to another VRF.
			d.unfit[o.source] = true
		}
		o.group.rejecting = o.group.rejecting || o.flags == rtnl.Change && o.group.key.family == v6
		return
	case makeNexthop, changeNexthop:
	default:
		return
	}
	q := o.pool
	if o.kind == makeNexthop {
		d.forget(q, func(id uint32) bool { return id == o.id })
		if errors.Is(err, unix.EEXIST) {
			return // the id belongs to another program; newID counts it as used
		}
	}
	if !again || exhausted(err) || q.subPort == nil || q.broken != nil {
		return
	}
	// The link is as the Driver assumes, so the kernel refuses this next hop itself. The other sub-ports take over its
	// traffic.
	q.broken = err
	d.log.Error("linux data plane: the kernel refuses a next hop; its traffic goes over the other sub-ports until the kernel accepts it",
		"device", q.subPort.device, "next_hop", q.gateway, "error", err)
	d.retire(q)
	d.stale(q.subPort)
}

// stale marks the groups that have a sub-port as a member, and returns their keys.
func (d *Driver) stale(sp *subPort) (keys []groupKey) {
	for key := range d.groups {
		for _, m := range d.wanted[key.wanted].GetMembers() {
			if m.Device == sp.device {
				d.staleGroups[key] = true
				keys = append(keys, key)
			}
		}
	}
	return keys
}

// refusal describes a failure for the caller of the operation.
func (f failure) refusal() error {
	if f.op.kind == setRoute && errors.Is(f.err, unix.EEXIST) {
		return kernelStatus(fmt.Errorf("%w; another program's route to %v exists, and is kept: remove it, or set another metric",
			f.err, f.op.at.prefix))
	}
	return kernelStatus(f.err)
}
