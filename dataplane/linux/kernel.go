package linux

import (
	"errors"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/rtnl"
)

// kernel sends ops to the kernel and records their results in the state.
type kernel struct {
	state *state
	conn  *rtnl.Conn
	// exchange sends ops to the kernel in one batch and returns the results in their order; tests replace it.
	exchange func(ops []op) []error
}

func newKernel(st *state) *kernel {
	k := &kernel{state: st}
	k.exchange = k.exchangeNetlink
	return k
}

// execute sends a plan and records the acknowledged ops. again is true if the plan was made from state that was read
// back.
func (k *kernel) execute(pl *plan, again bool) (failures []failure) {
	failures = k.send(slices.Concat(pl.nexthopOps, pl.groupOps, pl.closeOps, pl.routeOps, pl.anchorOps), again)
	last := slices.Concat(pl.lastOps, pl.openOps)
	// A route that the kernel refuses to move still uses its previous group. To delete that group would delete the
	// route.
	for _, f := range failures {
		if f.op.kind != setRoute {
			continue
		}
		standing, _ := k.state.have.routes.get(f.op.at)
		if i := slices.IndexFunc(last, func(o op) bool { return o.kind == deleteGroup && o.id == standing.nexthop }); i >= 0 {
			k.state.undone(&last[i], f.err, again)
			failures = append(failures, failure{last[i], f.err})
			last = slices.Delete(last, i, i+1)
		}
	}
	return append(failures, k.send(last, again)...)
}

// send sends ops in one batch, records the acknowledged ones and returns the others.
func (k *kernel) send(ops []op, again bool) (failures []failure) {
	if len(ops) == 0 {
		return nil
	}
	for i, err := range k.exchange(ops) {
		o := &ops[i]
		if err == nil || o.kind >= deleteRoute && (errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESRCH)) {
			k.state.done(o)
			continue
		}
		if isAnchor(o.at) && o.kind != deleteGroup {
			k.state.log.Debug("linux data plane: the kernel refused an anchor; the next change of its group is in place", "at", o.at.prefix, "error", err)
			continue
		}
		k.state.stats.Errors++
		k.state.undone(o, err, again)
		failures = append(failures, failure{*o, err})
	}
	return failures
}

// exchangeNetlink implements exchange over the Driver's socket.
func (k *kernel) exchangeNetlink(ops []op) []error {
	b := k.conn.Begin()
	for i := range ops {
		k.put(b, &ops[i])
	}
	return k.do(b)
}

// do sends a batch of changes, and reports its time.
func (k *kernel) do(b *rtnl.Batch) []error {
	began := time.Now()
	errs := k.conn.Do(b)
	if took := k.state.config.Took; took != nil {
		took(time.Since(began))
	}
	return errs
}

func (k *kernel) put(b *rtnl.Batch, o *op) {
	switch o.kind {
	case makeNexthop, changeNexthop:
		flags := uint16(rtnl.Create)
		if o.kind == changeNexthop {
			flags = rtnl.Change
		}
		b.SetNexthop(o.pool.nexthop(k.state, o.id), flags)
		k.state.stats.Nexthops++
	case setGroup:
		n := rtnl.Nexthop{ID: o.id, Protocol: k.state.config.Protocol, Members: o.members, Resilient: true}
		if o.flags == rtnl.Create { // otherwise the kernel would allocate a second table, and free it
			n.Buckets = uint16(k.state.want.size)
		}
		b.SetNexthop(n, o.flags)
		k.state.stats.Groups++
	case setRoute:
		b.SetRoute(k.state.routeOf(o), o.flags)
		k.state.stats.Routes++
	case deleteRoute:
		if o.route != nil {
			b.DelRoute(*o.route)
		} else {
			b.DelRoute(k.state.route(o.at, o.id))
		}
		k.state.stats.Routes++
	case deleteGroup:
		b.DelNexthop(o.id)
		k.state.stats.Groups++
	case deleteNexthop:
		b.DelNexthop(o.id)
		k.state.stats.Nexthops++
	}
}

func (st *state) route(at routeKey, id uint32) rtnl.Route {
	return rtnl.Route{Prefix: at.prefix, Table: at.table, Protocol: st.config.Protocol, Metric: st.config.Metric, Nexthop: id}
}

// remove deletes nexthop objects, as the kernel does when it handles the event of a lost carrier, which may take a
// second. The other members then receive their buckets immediately.
func (k *kernel) remove(nexthops map[uint32]*pool) {
	b := k.conn.Begin()
	for id := range nexthops {
		b.DelNexthop(id)
	}
	for _, err := range k.do(b) {
		if err != nil && !errors.Is(err, unix.ENOENT) { // the kernel has already removed it
			k.state.log.Warn("linux data plane: packets go to a device without a carrier until the kernel processes the lost carrier", "error", err)
		}
	}
}
