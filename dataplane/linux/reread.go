package linux

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/rtnl"
)

// reread reads back the kernel state and marks the parts that differ from the desired state. If buckets is set, it also
// compares the owner of every bucket. The caller holds mu.
func (d *Driver) reread(buckets bool) error {
	d.stats.Resyncs++
	d.unread = true // until everything is read
	links, err := d.conn.Links()
	if err != nil {
		return err
	}
	nexthops, err := d.conn.Nexthops()
	if err != nil {
		return err
	}
	routes, strange, err := d.readRoutes()
	if err != nil {
		return err
	}
	if err := d.rereadAddresses(); err != nil {
		return err
	}
	d.rereadLinks(links)
	ours := map[uint32]rtnl.Nexthop{}
	clear(d.have.used)
	for _, n := range nexthops {
		d.have.used[n.ID] = true
		if n.Protocol == d.config.Protocol {
			ours[n.ID] = n
		}
	}
	for key, g := range d.have.groups {
		if g.id == 0 {
			continue
		}
		if _, mine := ours[g.id]; d.have.used[g.id] && !mine {
			d.differs("group %d now belongs to another program", g.id)
			g.exists, g.segments, g.members, g.weights, g.moved, g.id = false, nil, nil, nil, false, 0
			d.staleGroups[key] = true
			continue
		}
		d.have.used[g.id] = true
		if err := d.rereadGroup(g, ours, buckets); err != nil {
			return err
		}
		if g.moved { // the routes of a group that is gone are gone with it, so that they mark it
			d.staleGroups[key] = true
		}
		delete(ours, g.id)
	}
	clear(d.have.strays)
	for id, n := range ours {
		if len(n.Members) == 0 {
			continue
		}
		s := stray{Nexthop: n}
		if n.Resilient && !d.settled {
			table, err := d.conn.Buckets(id)
			if err != nil && !errors.Is(err, unix.ENOENT) {
				return err
			}
			s.segments = segmentsOf(table)
		}
		d.have.strays[id] = s
		delete(ours, id)
	}
	for _, q := range d.pools() {
		d.have.forget(q, func(id uint32) bool {
			n, ok := ours[id]
			return !ok || !q.is(d, n)
		})
		for _, id := range q.ids {
			delete(ours, id)
		}
	}
	d.have.retired = slices.DeleteFunc(d.have.retired, func(id uint32) bool {
		_, there := ours[id]
		delete(ours, id)
		return !there
	})
	d.have.loose = ours
	for _, q := range d.pools() {
		d.adopt(q)
	}
	d.rereadRoutes(routes, strange)
	if d.settled {
		d.removeStrays()
	}
	d.unread = false
	return nil
}

// readRoutes returns the marked routes of the Driver's tables: routes that a Driver can have set, and strange ones.
func (d *Driver) readRoutes() (routes map[routeKey]routeState, strange []rtnl.Route, err error) {
	routes = map[routeKey]routeState{}
	for _, f := range families(d.ipv6) {
		found, err := d.conn.RoutesBy(f, 0, d.config.Protocol)
		if err != nil {
			return nil, nil, err
		}
		for _, r := range found {
			if r.Table != d.config.Table && !d.config.ofSource(r.Table) {
				continue // of another data plane with the same mark
			}
			r = byNexthop(r)
			if r.Nexthop != 0 && r.Metric == d.config.Metric && r.Prefix.IsSingleIP() {
				routes[routeKey{r.Prefix, r.Table}] = routeState{r.Nexthop, r.Source}
			} else {
				strange = append(strange, r)
			}
		}
	}
	return routes, strange, nil
}

// byNexthop clears the type of a route that uses a nexthop id. The kernel reports the type of the nexthop, and would not
// find the route to delete by that type.
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
	_, err := readSysctl(hashPolicyV6)
	return err == nil
}

func (d *Driver) rereadLinks(links []rtnl.Link) {
	now := map[int]rtnl.Link{}
	for _, l := range links {
		now[l.Index] = l
	}
	var events []rtnl.LinkEvent
	for index, l := range d.have.links {
		if _, ok := now[index]; !ok {
			events = append(events, rtnl.LinkEvent{Link: l, Gone: true})
		}
	}
	for _, l := range links {
		if d.have.links[l.Index] != l {
			events = append(events, rtnl.LinkEvent{Link: l})
		}
	}
	d.takeLinks(events)
}

// rereadGroup compares the recorded state of a group with the kernel.
func (d *Driver) rereadGroup(g *group, ours map[uint32]rtnl.Nexthop, buckets bool) error {
	n, ok := ours[g.id]
	if !ok || len(n.Members) == 0 || !n.Resilient || int(n.Buckets) != d.want.size || n.IdleTimer != 0 {
		if g.exists {
			d.differs("group %d is gone, or was changed", g.id)
		}
		g.exists, g.segments, g.members, g.weights, g.moved = false, nil, nil, nil, false
		if ok {
			// The group has the mark but not the expected form: it is removed as a stray, and a new group replaces it.
			d.staleGroups[g.key] = true
			g.id = 0
		}
		return nil
	}
	if !g.exists {
		// The group was created by a batch whose answers were lost.
		g.exists, g.members, g.moved = true, n.Members, true
	}
	same := maps.Equal(weightsOf(n.Members), weightsOf(g.members)) && d.lead(g.members, ours)
	if same && buckets {
		var err error
		if same, err = d.sameBuckets(g); err != nil {
			return err
		}
	}
	if !same {
		if !g.moved {
			d.differs("group %d has other members or buckets", g.id)
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
func (d *Driver) sameBuckets(g *group) (bool, error) {
	if g.moved || g.dropping {
		return true, nil // the owners are unknown, or one nexthop owns all
	}
	table, err := d.conn.Buckets(g.id)
	return slices.Equal(segmentsOf(table), g.segments), err
}

// lead reports whether members have the next hops that the Driver gave them.
func (d *Driver) lead(members []rtnl.Member, ours map[uint32]rtnl.Nexthop) bool {
	return !slices.ContainsFunc(members, func(m rtnl.Member) bool {
		n, ok := ours[m.ID]
		q := d.have.owners[m.ID]
		return !ok || q != nil && !q.is(d, n)
	})
}

func weightsOf(members []rtnl.Member) map[uint32]uint32 {
	weights := make(map[uint32]uint32, len(members))
	for _, m := range members {
		weights[m.ID] = m.Weight
	}
	return weights
}

func (d *Driver) rereadRoutes(routes map[routeKey]routeState, strange []rtnl.Route) {
	d.strangeRoute = strange
	before := d.have.routes
	d.have.routes = routes
	for key := range d.want.destinations {
		at, ok := d.want.place(key)
		if !ok || d.staleRoutes[at] {
			continue
		}
		wanted, _ := d.want.wantedAt(at)
		g := d.have.groups[groupKey{wanted, familyOf(key.Prefix.Addr())}]
		switch r, there := routes[at]; {
		case !there || r.nexthop != g.id:
			if g.exists {
				d.differs("the route to %v is gone, or leads elsewhere", key)
			}
			d.staleRoutes[at] = true
		case r.source != d.want.preferred(at, &d.have):
			if r.source != before[at].source { // otherwise the host's addresses have changed, not the route
				d.differs("the route to %v has another source address", key)
			}
			d.staleRoutes[at] = true
		}
	}
	for _, at := range d.want.closedRoutes() {
		if d.have.owners[routes[at].nexthop] != d.have.hole[familyOf(at.prefix.Addr())] && !d.staleRoutes[at] {
			d.differs("the route that makes %v unreachable in table %d is gone, or leads elsewhere", at.prefix, at.table)
			d.staleRoutes[at] = true
		}
	}
	if !d.settled {
		return
	}
	for at := range routes {
		if _, ok := d.want.wantedAt(at); !ok && !d.staleRoutes[at] {
			d.differs("an unexpected route to %v exists", at.prefix)
			d.staleRoutes[at] = true
		}
	}
}

// Settle removes the leftovers of an earlier run that no desired state has claimed: marked routes, groups and nexthop
// objects in the tables of this Driver. Call it once, when the whole desired state has been programmed: after
// contract.Server.Restore or, without a journal, after the first Hello, for which Recover has restored the forwarding that
// was found. Until then the leftovers keep forwarding. Afterwards, any other object that appears with the mark is removed
// as soon as it is noticed.
func (d *Driver) Settle() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.settled = true
	for at := range d.have.routes {
		if _, ok := d.want.wantedAt(at); !ok {
			d.staleRoutes[at] = true
		}
	}
	failures := d.sync()
	d.removeStrays()
	failures = append(failures, d.sync()...)
	var errs []error
	for _, f := range failures {
		errs = append(errs, f.err)
	}
	return errors.Join(errs...)
}

// removeStrays removes the leftovers of Settle except for routes in Driver.routes.
func (d *Driver) removeStrays() {
	pl := &plan{}
	for _, r := range d.strangeRoute {
		pl.lastOps = append(pl.lastOps, op{kind: deleteRoute, at: routeKey{r.Prefix, r.Table}, route: &r})
	}
	d.strangeRoute = nil
	inUse := map[uint32]bool{}
	for _, r := range d.have.routes {
		inUse[r.nexthop] = true
	}
	for id := range d.have.strays {
		if !inUse[id] {
			pl.lastOps = append(pl.lastOps, op{kind: deleteGroup, id: id})
		}
	}
	for id := range d.have.loose {
		pl.lastOps = append(pl.lastOps, op{kind: deleteNexthop, id: id})
	}
	routes := maps.Clone(d.have.routes)
	for _, f := range d.execute(pl, false) {
		d.log.Error("linux data plane: cannot remove the objects of an earlier run", "error", f.err)
	}
	// A strange route may have the same prefix as a regular one.
	d.have.routes = routes
}

// Removed holds the numbers of objects that Flush removed.
type Removed struct{ Routes, Rules, Groups, Nexthops int }

// Flush removes every marked route, rule and nexthop object from the network namespace of the calling thread, in all
// tables, and nothing else. It needs no Driver, and must not run while a Driver is open. Sysctls stay.
func Flush(config Config) (removed Removed, err error) {
	config, err = config.withDefaults()
	if err != nil {
		return removed, fmt.Errorf("flush the linux data plane: %w", err)
	}
	conn, err := rtnl.Dial()
	if err != nil {
		return removed, fmt.Errorf("flush the linux data plane: %w", err)
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	// The kinds are processed in sequence, each read just before its removal: removing a nexthop removes the routes that use
	// it.
	for _, kind := range []func(*rtnl.Conn, uint8, *rtnl.Batch) (*int, error){removed.rules, removed.routes, removed.groups, removed.nexthops} {
		b := conn.Begin()
		count, err := kind(conn, config.Protocol, b)
		if err != nil {
			return removed, fmt.Errorf("flush the linux data plane: %w", err)
		}
		var errs []error
		for _, err := range conn.Do(b) {
			switch {
			case err == nil:
				*count++
			case !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ESRCH):
				errs = append(errs, err)
			}
		}
		if err := errors.Join(errs...); err != nil {
			return removed, fmt.Errorf("flush the linux data plane: %w", err)
		}
	}
	return removed, nil
}

func (r *Removed) rules(conn *rtnl.Conn, protocol uint8, b *rtnl.Batch) (*int, error) {
	for _, f := range families(hasIPv6()) {
		rules, err := conn.Rules(f)
		if err != nil {
			return nil, err
		}
		for _, rule := range rules {
			if rule.Protocol == protocol {
				b.DelRule(rule)
			}
		}
	}
	return &r.Rules, nil
}

func (r *Removed) routes(conn *rtnl.Conn, protocol uint8, b *rtnl.Batch) (*int, error) {
	for _, f := range families(hasIPv6()) {
		routes, err := conn.RoutesBy(f, 0, protocol)
		if err != nil {
			return nil, err
		}
		for _, route := range routes {
			b.DelRoute(byNexthop(route))
		}
	}
	return &r.Routes, nil
}

func (r *Removed) groups(conn *rtnl.Conn, protocol uint8, b *rtnl.Batch) (*int, error) {
	return &r.Groups, delNexthops(conn, protocol, b, true)
}

func (r *Removed) nexthops(conn *rtnl.Conn, protocol uint8, b *rtnl.Batch) (*int, error) {
	return &r.Nexthops, delNexthops(conn, protocol, b, false)
}

func delNexthops(conn *rtnl.Conn, protocol uint8, b *rtnl.Batch, groups bool) error {
	all, err := conn.Nexthops()
	if err != nil {
		return err
	}
	for _, n := range all {
		if n.Protocol == protocol && len(n.Members) > 0 == groups {
			b.DelNexthop(n.ID)
		}
	}
	return nil
}
