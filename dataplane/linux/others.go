package linux

import (
	"errors"

	"github.com/fared/fared/internal/rtnl"
)

// others watches the changes that other programs make to the objects of the Driver, and to those that packets may
// follow instead.
type others struct {
	state     *state
	integrity *integrity
	occupied  *occupied
	shadows   *shadows
	reach     *reach
	news      *rtnl.ObjectWatch
}

// disturbed drains the pending object events. It reports whether any of them concerns objects of the Driver, and
// whether any may change which routes packets follow. The caller holds mu.
func (o *others) disturbed() (concerned, leads bool) {
	events, err := o.news.Poll()
	if errors.Is(err, rtnl.ErrOverrun) {
		o.state.stats.Overruns++
		o.occupied.freeAll()
		o.reach.soon()
		return true, true
	}
	for _, e := range events {
		concerned = o.concerns(e) || concerned
		if o.reach.concerns(e) {
			o.reach.soon()
		}
		leads = o.shadows.concerns(e) || leads
	}
	return concerned, leads
}

// concerns reports whether an event concerns an object that the Driver depends on, and records what it changes.
func (o *others) concerns(e rtnl.ObjectEvent) bool {
	switch {
	case e.Nexthop != nil:
		return o.touchedNexthop(*e.Nexthop)
	case e.Route != nil:
		if e.Gone { // the notification of the route that occupies the place may arrive after the refusal
			o.occupied.free(routeKey{e.Route.Prefix, e.Route.Table})
		}
		return o.concernsRoute(*e.Route)
	case e.Rule != nil:
		return e.Rule.Table == o.state.config.Table || o.state.config.ofSource(e.Rule.Table)
	default:
		return o.concernsAddress(e)
	}
}

// touchedNexthop reports whether a nexthop object that another program changed is the Driver's. If it is a group, the
// owners of its buckets are unknown afterwards: the kernel deals them again even for equal members.
func (o *others) touchedNexthop(n rtnl.Nexthop) bool {
	ours := n.Protocol == o.state.config.Protocol || o.state.have.owners[n.ID] != nil
	for key, g := range o.state.have.groups {
		if g.id == n.ID && g.exists {
			ours = true
			o.integrity.differs("group %d was changed", g.id)
			g.moved, g.weights, g.segments = true, nil, nil
			o.state.staleGroups[key] = true
		}
	}
	for _, r := range o.state.have.ready {
		if r.id == n.ID {
			ours, r.moved = true, true
		}
	}
	return ours
}

// concernsRoute reports whether a route has the Driver's mark, or occupies the place of one of its routes.
func (o *others) concernsRoute(r rtnl.Route) bool {
	if r.Table != o.state.config.Table && !o.state.config.ofSource(r.Table) {
		return false
	}
	_, wanted := o.state.want.wantedAt(routeKey{r.Prefix, r.Table})
	return r.Protocol == o.state.config.Protocol || wanted && r.Metric == o.state.config.Metric
}
