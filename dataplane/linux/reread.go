package linux

import (
	"errors"
	"maps"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/internal/hostcheck"
	"github.com/fared/fared/internal/rtnl"
)

// reader reads the kernel back, and marks the parts that differ from the state.
type reader struct {
	state     *state
	kernel    *kernel
	links     *links
	integrity *integrity
	strange   []rtnl.Route // marked routes that a Driver cannot have set; removeStrays removes them
}

// reread reads back the kernel state and marks the parts that differ from the desired state. If buckets is set, it also
// compares the owner of every bucket. The caller holds mu.
func (rd *reader) reread(buckets bool) error {
	rd.state.stats.Resyncs++
	rd.integrity.unread = true // until everything is read
	links, err := rd.kernel.conn.Links()
	if err != nil {
		return err
	}
	nexthops, err := rd.kernel.conn.Nexthops()
	if err != nil {
		return err
	}
	routes, err := rd.readRoutes()
	if err != nil {
		return err
	}
	if err := rd.rereadAddresses(); err != nil {
		return err
	}
	rd.rereadLinks(links)
	ours := map[uint32]rtnl.Nexthop{}
	clear(rd.state.have.used)
	for _, n := range nexthops {
		rd.state.have.used[n.ID] = true
		if n.Protocol == rd.state.config.Protocol {
			ours[n.ID] = n
		}
	}
	for key, g := range rd.state.have.groups {
		if g.id == 0 {
			continue
		}
		if _, mine := ours[g.id]; rd.state.have.used[g.id] && !mine {
			rd.integrity.differs("group %d now belongs to another program", g.id)
			g.exists, g.segments, g.members, g.weights, g.moved, g.id = false, nil, nil, nil, false, 0
			rd.state.staleGroups[key] = true
			continue
		}
		rd.state.have.used[g.id] = true
		if err := rd.rereadGroup(g, ours, buckets); err != nil {
			return err
		}
		if g.moved { // the routes of a group that is gone are gone with it, so that they mark it
			rd.state.staleGroups[key] = true
		}
		delete(ours, g.id)
	}
	rd.rereadReady(ours)
	clear(rd.state.have.strays)
	for id, n := range ours {
		if len(n.Members) == 0 {
			continue
		}
		s := stray{Nexthop: n}
		if n.Resilient && !rd.state.settled {
			table, err := rd.kernel.conn.Buckets(id)
			if err != nil && !errors.Is(err, unix.ENOENT) {
				return err
			}
			s.segments = segmentsOf(table)
		}
		rd.state.have.strays[id] = s
		delete(ours, id)
	}
	for _, q := range rd.state.pools() {
		rd.state.have.forget(q, func(id uint32) bool {
			n, ok := ours[id]
			return !ok || !q.is(rd.state, n)
		})
		for _, id := range q.ids {
			delete(ours, id)
		}
	}
	rd.state.have.retired = slices.DeleteFunc(rd.state.have.retired, func(id uint32) bool {
		_, there := ours[id]
		delete(ours, id)
		return !there
	})
	rd.state.have.loose = ours
	for _, q := range rd.state.pools() {
		rd.state.adopt(q)
	}
	rd.rereadRoutes(routes)
	if rd.state.settled {
		rd.removeStrays()
	}
	rd.integrity.unread = false
	return nil
}

// found has the marked routes of the Driver's tables: those that a Driver can have set, anchors, and strange ones.
type found struct {
	routes  *routeStates
	anchors map[routeKey]routeState
	strange []rtnl.Route
}

// add adds a route, with the metric of the Driver's routes.
func (x *found) add(r rtnl.Route, metric uint32) {
	r = byNexthop(r)
	at, to := routeKey{r.Prefix, r.Table}, routeState{r.Nexthop, r.Source}
	switch {
	case r.Nexthop == 0 || r.Metric != metric || !r.Prefix.IsSingleIP():
		x.strange = append(x.strange, r)
	case isAnchor(at):
		x.anchors[at] = to
	default:
		x.routes.set(at, to)
	}
}

// addAll adds the routes of another family.
func (x *found) addAll(y found) {
	if x.routes.len() == 0 {
		x.routes = y.routes
	} else {
		for at, to := range y.routes.all() {
			x.routes.set(at, to)
		}
	}
	maps.Copy(x.anchors, y.anchors)
	x.strange = append(x.strange, y.strange...)
}

func (rd *reader) readRoutes() (found, error) {
	nothing := func() found { return found{routes: &routeStates{}, anchors: map[routeKey]routeState{}} }
	all := nothing()
	for _, f := range families(rd.state.ipv6) {
		var one found
		err := rd.kernel.conn.EachRoute(f, 0, rd.state.config.Protocol, func() { one = nothing() }, func(r rtnl.Route) {
			if r.Table == rd.state.config.Table || rd.state.config.ofSource(r.Table) { // otherwise of another data plane with the same mark
				one.add(r, rd.state.config.Metric)
			}
		})
		if err != nil {
			return found{}, err
		}
		all.addAll(one)
	}
	return all, nil
}

// byNexthop clears the type of a route that uses a nexthop id. The kernel reports the type of the nexthop, and would
// not find the route to delete by that type.
func byNexthop(r rtnl.Route) rtnl.Route {
	if r.Nexthop != 0 {
		r.Type = 0
	}
	return r
}

func families(ipv6 bool) []uint8 {
	if ipv6 {
		return []uint8{unix.AF_INET, unix.AF_INET6}
	}
	return []uint8{unix.AF_INET}
}

// hasIPv6 reports whether the kernel supports IPv6. The caller runs inside the namespace.
func hasIPv6() bool {
	_, err := hostcheck.ReadSysctl(hashPolicyV6)
	return err == nil
}

func (rd *reader) rereadLinks(links []rtnl.Link) {
	now := map[int]rtnl.Link{}
	for _, l := range links {
		now[l.Index] = l
	}
	var events []rtnl.LinkEvent
	for index, l := range rd.state.have.links {
		if _, ok := now[index]; !ok {
			events = append(events, rtnl.LinkEvent{Link: l, Gone: true})
		}
	}
	for _, l := range links {
		if rd.state.have.links[l.Index] != l {
			events = append(events, rtnl.LinkEvent{Link: l})
		}
	}
	rd.links.takeLinks(events)
}

// rereadReady forgets the ready groups that the kernel does not have as they are recorded; they become strays.
func (rd *reader) rereadReady(ours map[uint32]rtnl.Nexthop) {
	rd.state.have.ready = slices.DeleteFunc(rd.state.have.ready, func(r *group) bool {
		n, ok := ours[r.id]
		return !ok || r.moved || !n.Resilient || int(n.Buckets) != rd.state.want.size || n.IdleTimer != 0 ||
			!maps.Equal(weightsOf(n.Members), weightsOf(r.members)) || !rd.lead(r.members, ours)
	})
	for _, r := range rd.state.have.ready {
		delete(ours, r.id)
	}
}

// rereadGroup compares the recorded state of a group with the kernel.
func (rd *reader) rereadGroup(g *group, ours map[uint32]rtnl.Nexthop, buckets bool) error {
	n, ok := ours[g.id]
	if !ok || len(n.Members) == 0 || !n.Resilient || int(n.Buckets) != rd.state.want.size || n.IdleTimer != 0 {
		if g.exists {
			rd.integrity.differs("group %d is gone, or was changed", g.id)
		}
		g.exists, g.segments, g.members, g.weights, g.moved = false, nil, nil, nil, false
		if ok {
			// The group has the mark but not the expected form: it is removed as a stray, and a new group replaces it.
			rd.state.staleGroups[g.key] = true
			g.id = 0
		}
		return nil
	}
	if !g.exists {
		// The group was created by a batch whose answers were lost.
		g.exists, g.members, g.moved = true, n.Members, true
	}
	same := maps.Equal(weightsOf(n.Members), weightsOf(g.members)) && rd.lead(g.members, ours)
	if same && buckets {
		var err error
		if same, err = rd.sameBuckets(g); err != nil {
			return err
		}
	}
	if !same {
		if !g.moved {
			rd.integrity.differs("group %d has other members or buckets", g.id)
			// The weights behind the members are unknown, so the group is redistributed immediately.
			g.weights = nil
		}
		g.moved, g.segments, g.members, g.dropping = true, nil, n.Members, false
		if first, ok := ours[n.Members[0].ID]; g.key.family == v6 && (!ok || !first.Gateway.IsValid()) {
			g.rejecting = true
		}
	}
	return nil
}

// sameBuckets compares the owner of every bucket of a group with the kernel.
func (rd *reader) sameBuckets(g *group) (bool, error) {
	if g.moved || g.dropping {
		return true, nil // the owners are unknown, or one nexthop owns all
	}
	table, err := rd.kernel.conn.Buckets(g.id)
	return slices.Equal(segmentsOf(table), g.segments), err
}

// lead reports whether members have the next hops that the Driver gave them.
func (rd *reader) lead(members []rtnl.Member, ours map[uint32]rtnl.Nexthop) bool {
	return !slices.ContainsFunc(members, func(m rtnl.Member) bool {
		n, ok := ours[m.ID]
		q := rd.state.have.owners[m.ID]
		return !ok || q != nil && !q.is(rd.state, n)
	})
}

func weightsOf(members []rtnl.Member) map[uint32]uint32 {
	weights := make(map[uint32]uint32, len(members))
	for _, m := range members {
		weights[m.ID] = m.Weight
	}
	return weights
}

func (rd *reader) rereadRoutes(x found) {
	rd.strange = x.strange
	before, routes := rd.state.have.routes, x.routes
	rd.state.have.replaceRoutes(routes, x.anchors)
	rd.state.staleAnchors()
	for k := range rd.state.want.destinations.All() {
		key := contract.DestinationKey{Source: k.Group, Prefix: k.Prefix}
		at, ok := rd.state.want.place(key)
		if !ok || rd.state.staleRoutes[at] {
			continue
		}
		wanted, _ := rd.state.want.wantedAt(at)
		g := rd.state.have.groups[groupKey{wanted, familyOf(key.Prefix.Addr())}]
		switch r, there := routes.get(at); {
		case !there || r.nexthop != g.id:
			if g.exists {
				rd.integrity.differs("the route to %v is gone, or leads elsewhere", key)
			}
			rd.state.staleRoutes[at] = true
		case r.source != rd.state.want.preferred(at, &rd.state.have):
			if old, _ := before.get(at); r.source != old.source { // otherwise the host's addresses have changed, not the route
				rd.integrity.differs("the route to %v has another source address", key)
			}
			rd.state.staleRoutes[at] = true
		}
	}
	for _, at := range rd.state.want.closedRoutes() {
		if r, _ := routes.get(at); rd.state.have.owners[r.nexthop] != rd.state.have.hole[familyOf(at.prefix.Addr())] && !rd.state.staleRoutes[at] {
			rd.integrity.differs("the route that makes %v unreachable in table %d is gone, or leads elsewhere", at.prefix, at.table)
			rd.state.staleRoutes[at] = true
		}
	}
	if !rd.state.settled {
		return
	}
	for at := range routes.all() {
		if _, ok := rd.state.want.wantedAt(at); !ok && !rd.state.staleRoutes[at] {
			rd.integrity.differs("an unexpected route to %v exists", at.prefix)
			rd.state.staleRoutes[at] = true
		}
	}
}

// Settle removes the leftovers of an earlier run that no desired state has claimed: marked routes, groups and nexthop
// objects in the tables of this Driver. Call it once, when the whole desired state has been programmed: after
// contract.Server.Restore or, without a journal, after the first Hello, for which Recover has restored the forwarding
// that was found. Until then the leftovers keep forwarding. Afterwards, any other object that appears with the mark is
// removed as soon as it is noticed.
func (d *Driver) Settle() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.state.settled = true
	for at := range d.state.have.routes.all() {
		if _, ok := d.state.want.wantedAt(at); !ok {
			d.state.staleRoutes[at] = true
		}
	}
	failures := d.sync()
	d.reader.removeStrays()
	failures = append(failures, d.sync()...)
	var errs []error
	for _, f := range failures {
		errs = append(errs, f.err)
	}
	return errors.Join(errs...)
}

// removeStrays removes the leftovers of Settle except for routes in mirror.routes.
func (rd *reader) removeStrays() {
	pl := &plan{}
	regular := map[routeKey]routeState{} // with the same prefix as a strange route
	for _, r := range rd.strange {
		at := routeKey{r.Prefix, r.Table}
		pl.lastOps = append(pl.lastOps, op{kind: deleteRoute, at: at, route: &r})
		if r, there := rd.state.have.routes.get(at); there {
			regular[at] = r
		}
	}
	rd.strange = nil
	inUse := map[uint32]bool{}
	for _, r := range rd.state.have.routes.all() {
		inUse[r.nexthop] = true
	}
	wanted := rd.state.wantedAnchors()
	for at, r := range rd.state.have.anchors {
		if !wanted[at] {
			pl.lastOps = append(pl.lastOps, op{kind: deleteRoute, at: at, id: r.nexthop})
		}
	}
	for id := range rd.state.have.strays {
		if !inUse[id] {
			pl.lastOps = append(pl.lastOps, op{kind: deleteGroup, id: id})
		}
	}
	for id := range rd.state.have.loose {
		pl.lastOps = append(pl.lastOps, op{kind: deleteNexthop, id: id})
	}
	for _, f := range rd.kernel.execute(pl, false) {
		rd.state.log.Error("linux data plane: cannot remove the objects of an earlier run", "error", f.err)
	}
	for at, r := range regular { // which is still there
		rd.state.have.setRoute(at, r)
	}
}
