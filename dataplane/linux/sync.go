package linux

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/rtnl"
)

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

// sync brings the kernel in line with the desired state, wherever the two may differ, and returns the ops that the kernel
// refused in the last round. The caller holds mu.
func (d *Driver) sync() []failure {
	var failures []failure
	news := false // links have changed since the plan was made
	d.pollLinks()
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
		d.pollLinks()
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

// await marks as stale the groups and routes of refused ops, in addition to groups that have to change later, and clears all other
// marks. It returns when the next sync is due, or the zero time if nothing is stale.
func (d *Driver) await(failures []failure) (due time.Time) {
	clear(d.staleRoutes)
	for key := range d.staleGroups {
		g := d.have.groups[key]
		if g.settled() {
			delete(d.staleGroups, key)
		} else if at := g.dealtAt.Add(d.config.witnessTime); due.IsZero() || at.Before(due) {
			due = at
		}
	}
	for _, f := range failures {
		if f.op.key.wanted != 0 {
			d.staleGroups[f.op.key] = true
		}
		if f.op.at.prefix.IsValid() {
			d.staleRoutes[f.op.at] = true
		}
		due = time.Now().Add(retryDelay)
	}
	return due
}

// settled reports whether a group needs no change while the desired state and links stay the same.
func (g *group) settled() bool { return g == nil || !g.moved && len(g.witnesses) == 0 }

// plan computes and adopts a plan for the stale groups and routes.
func (d *Driver) plan() *plan {
	pl := newPlan(&d.want, &d.have, d.scope())
	d.adoptPlan(pl)
	return pl
}

// scope returns the scope of a plan at this time.
func (d *Driver) scope() scope {
	return scope{groups: d.staleGroups, routes: d.staleRoutes, now: time.Now(), witnessTime: d.config.witnessTime}
}

// adoptPlan records the part of a plan that needs no message: claimed groups, and the ids of new objects. An op that is
// refused later releases its id.
func (d *Driver) adoptPlan(pl *plan) {
	d.have.changed, d.have.next = nil, pl.next
	for _, o := range pl.nexthopOps {
		if o.kind == makeNexthop {
			o.pool.ids = append(o.pool.ids, o.id)
			d.have.owners[o.id], d.have.used[o.id] = o.pool, true
		}
	}
	for key, g := range pl.groups {
		*d.have.groups[key] = *g
		delete(d.have.strays, g.id)
		d.have.used[g.id] = true
	}
	for _, key := range pl.unused {
		delete(d.have.groups, key)
	}
	for key := range pl.incomplete {
		d.staleGroups[key] = true
	}
}

func (d *Driver) route(at routeKey, id uint32) rtnl.Route {
	return rtnl.Route{Prefix: at.prefix, Table: at.table, Protocol: d.config.Protocol, Metric: d.config.Metric, Nexthop: id}
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
		used := d.have.routes[f.op.at].nexthop
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
	for i, err := range d.exchange(ops) {
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

// exchangeNetlink implements exchange over the Driver's socket.
func (d *Driver) exchangeNetlink(ops []op) []error {
	b := d.conn.Begin()
	for i := range ops {
		d.put(b, &ops[i])
	}
	return d.conn.Do(b)
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
		n := rtnl.Nexthop{ID: o.id, Protocol: d.config.Protocol, Members: o.members, Resilient: true}
		if o.flags == rtnl.Create { // otherwise the kernel would allocate a second table, and free it
			n.Buckets = uint16(d.want.size)
		}
		b.SetNexthop(n, o.flags)
		d.stats.Groups++
	case setRoute:
		b.SetRoute(d.routeOf(o), o.flags)
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
	switch g := d.have.groups[o.key]; o.kind {
	case setGroup:
		g.exists, g.moved, g.dropping = true, false, o.segments == nil
		g.members, g.segments, g.weights, g.generation = o.members, o.segments, o.weights, d.want.generation
		g.witnesses, g.dealtAt = o.witnesses, time.Now()
		g.rejecting = g.rejecting || g.dropping && g.key.family == v6
	case setRoute:
		d.have.routes[o.at] = routeState{o.id, o.source}
	case deleteRoute:
		delete(d.have.routes, o.at)
	case deleteGroup:
		delete(d.have.strays, o.id)
		delete(d.have.groups, o.key)
	case deleteNexthop:
		delete(d.have.loose, o.id)
		d.have.retired = slices.DeleteFunc(d.have.retired, func(id uint32) bool { return id == o.id })
	}
}

// undone records the state after a refused op.
func (d *Driver) undone(o *op, err error, again bool) {
	switch o.kind {
	case setRoute:
		g := d.have.groups[o.key]
		if g == nil {
			return
		}
		if o.source.IsValid() && errors.Is(err, unix.EINVAL) && g.exists { // without a group the kernel refuses any route to it
			// The address is no longer an address of the host, or belongs to another VRF.
			d.have.unfit[o.source] = true
		}
		g.rejecting = g.rejecting || o.flags == rtnl.Change && o.key.family == v6
		return
	case makeNexthop, changeNexthop:
	default:
		return
	}
	q := o.pool
	if o.kind == makeNexthop {
		d.have.forget(q, func(id uint32) bool { return id == o.id })
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
	d.have.retire(q)
	d.stale(q.subPort)
}

// stale marks the groups that have a sub-port as a member, and returns their keys.
func (d *Driver) stale(sp *subPort) (keys []groupKey) {
	for key := range d.have.groups {
		for _, m := range d.want.vectors[key.wanted].GetMembers() {
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
