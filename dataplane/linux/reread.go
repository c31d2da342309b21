package linux

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/rtnl"
)

// stray is a marked group that no wanted state has claimed.
type stray struct {
	rtnl.Nexthop
	segments []segment
}

// reread reads back the kernel state and marks the parts that differ from the wanted state. If buckets is set, it also
// compares the owner of every bucket. The caller holds mu.
func (p *Plane) reread(buckets bool) error {
	p.stats.Resyncs++
	p.unread = true // until everything is read
	links, err := p.conn.Links()
	if err != nil {
		return err
	}
	nexthops, err := p.conn.Nexthops()
	if err != nil {
		return err
	}
	routes, strange, err := p.readRoutes()
	if err != nil {
		return err
	}
	if err := p.rereadAddresses(); err != nil {
		return err
	}
	p.rereadLinks(links)
	ours := map[uint32]rtnl.Nexthop{}
	clear(p.used)
	for _, n := range nexthops {
		p.used[n.ID] = true
		if n.Protocol == p.config.Protocol {
			ours[n.ID] = n
		}
	}
	for key, g := range p.groups {
		if g.id == 0 {
			continue
		}
		if _, mine := ours[g.id]; p.used[g.id] && !mine {
			p.differs("group %d now belongs to another program", g.id)
			g.exists, g.segments, g.members, g.weights, g.moved, g.id = false, nil, nil, nil, false, 0
			p.staleGroups[key] = true
			continue
		}
		p.used[g.id] = true
		if err := p.rereadGroup(g, ours, buckets); err != nil {
			return err
		}
		if g.moved { // the routes of a group that is gone are gone with it, so that they mark it
			p.staleGroups[key] = true
		}
		delete(ours, g.id)
	}
	clear(p.strays)
	for id, n := range ours {
		if len(n.Members) == 0 {
			continue
		}
		s := stray{Nexthop: n}
		if n.Resilient && !p.settled {
			table, err := p.conn.Buckets(id)
			if err != nil && !errors.Is(err, unix.ENOENT) {
				return err
			}
			s.segments = segmentsOf(table)
		}
		p.strays[id] = s
		delete(ours, id)
	}
	for _, q := range p.pools() {
		p.forget(q, func(id uint32) bool {
			n, ok := ours[id]
			return !ok || !q.is(p, n)
		})
		for _, id := range q.ids {
			delete(ours, id)
		}
	}
	p.retired = slices.DeleteFunc(p.retired, func(id uint32) bool {
		_, there := ours[id]
		delete(ours, id)
		return !there
	})
	p.loose = ours
	for _, q := range p.pools() {
		p.adopt(q)
	}
	p.rereadRoutes(routes, strange)
	if p.settled {
		p.removeStrays()
	}
	p.unread = false
	return nil
}

// readRoutes returns the marked routes of the Plane's tables: routes that a Plane can have set, and strange ones.
func (p *Plane) readRoutes() (routes map[routeKey]routeState, strange []rtnl.Route, err error) {
	routes = map[routeKey]routeState{}
	for _, f := range families(p.ipv6) {
		found, err := p.conn.RoutesBy(f, 0, p.config.Protocol)
		if err != nil {
			return nil, nil, err
		}
		for _, r := range found {
			if r.Table != p.config.Table && !p.config.ofSource(r.Table) {
				continue // of another data plane with the same mark
			}
			r = byNexthop(r)
			if r.Nexthop != 0 && r.Metric == p.config.Metric && r.Prefix.IsSingleIP() {
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

func (p *Plane) rereadLinks(links []rtnl.Link) {
	now := map[int]rtnl.Link{}
	for _, l := range links {
		now[l.Index] = l
	}
	var events []rtnl.LinkEvent
	for index, l := range p.links {
		if _, ok := now[index]; !ok {
			events = append(events, rtnl.LinkEvent{Link: l, Gone: true})
		}
	}
	for _, l := range links {
		if p.links[l.Index] != l {
			events = append(events, rtnl.LinkEvent{Link: l})
		}
	}
	p.takeLinks(events)
}

// rereadGroup compares the recorded state of a group with the kernel.
func (p *Plane) rereadGroup(g *group, ours map[uint32]rtnl.Nexthop, buckets bool) error {
	n, ok := ours[g.id]
	if !ok || len(n.Members) == 0 || !n.Resilient || int(n.Buckets) != p.size || n.IdleTimer != 0 {
		if g.exists {
			p.differs("group %d is gone, or was changed", g.id)
		}
		g.exists, g.segments, g.members, g.weights, g.moved = false, nil, nil, nil, false
		if ok {
			// The group has the mark but not the expected form: it is removed as a stray, and a new group replaces it.
			p.staleGroups[g.key] = true
			g.id = 0
		}
		return nil
	}
	if !g.exists {
		// The group was created by a batch whose answers were lost.
		g.exists, g.members, g.moved = true, n.Members, true
	}
	same := maps.Equal(weightsOf(n.Members), weightsOf(g.members)) && p.lead(g.members, ours)
	if same && buckets {
		var err error
		if same, err = p.sameBuckets(g); err != nil {
			return err
		}
	}
	if !same {
		if !g.moved {
			p.differs("group %d has other members or buckets", g.id)
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
func (p *Plane) sameBuckets(g *group) (bool, error) {
	if g.moved || g.dropping {
		return true, nil // the owners are unknown, or one nexthop owns all
	}
	table, err := p.conn.Buckets(g.id)
	return slices.Equal(segmentsOf(table), g.segments), err
}

// lead reports whether members have the next hops that the Plane gave them.
func (p *Plane) lead(members []rtnl.Member, ours map[uint32]rtnl.Nexthop) bool {
	return !slices.ContainsFunc(members, func(m rtnl.Member) bool {
		n, ok := ours[m.ID]
		q := p.owners[m.ID]
		return !ok || q != nil && !q.is(p, n)
	})
}

func weightsOf(members []rtnl.Member) map[uint32]uint32 {
	weights := make(map[uint32]uint32, len(members))
	for _, m := range members {
		weights[m.ID] = m.Weight
	}
	return weights
}

func (p *Plane) rereadRoutes(routes map[routeKey]routeState, strange []rtnl.Route) {
	p.strangeRoute = strange
	before := p.routes
	p.routes = routes
	for key := range p.destinations {
		at, ok := p.place(key)
		if !ok || p.staleRoutes[at] {
			continue
		}
		wanted, _ := p.wantedAt(at)
		g := p.groups[groupKey{wanted, familyOf(key.Prefix.Addr())}]
		switch r, there := routes[at]; {
		case !there || r.nexthop != g.id:
			if g.exists {
				p.differs("the route to %v is gone, or leads elsewhere", key)
			}
			p.staleRoutes[at] = true
		case r.source != p.preferred(at):
			if r.source != before[at].source { // otherwise the host's addresses have changed, not the route
				p.differs("the route to %v has another source address", key)
			}
			p.staleRoutes[at] = true
		}
	}
	for _, at := range p.closedRoutes() {
		if p.owners[routes[at].nexthop] != p.hole[familyOf(at.prefix.Addr())] && !p.staleRoutes[at] {
			p.differs("the route that makes %v unreachable in table %d is gone, or leads elsewhere", at.prefix, at.table)
			p.staleRoutes[at] = true
		}
	}
	if !p.settled {
		return
	}
	for at := range routes {
		if _, ok := p.wantedAt(at); !ok && !p.staleRoutes[at] {
			p.differs("an unexpected route to %v exists", at.prefix)
			p.staleRoutes[at] = true
		}
	}
}

// Settle removes the leftovers of an earlier run that no wanted state has claimed: marked routes, groups and nexthop
// objects in the tables of this Plane. Call it once, when the whole wanted state has been programmed: after
// contract.Server.Restore or, without a journal, after the first Hello, for which Recover has restored the forwarding that
// was found. Until then the leftovers keep forwarding. Afterwards, any other object that appears with the mark is removed
// as soon as it is noticed.
func (p *Plane) Settle() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.settled = true
	for at := range p.routes {
		if _, ok := p.wantedAt(at); !ok {
			p.staleRoutes[at] = true
		}
	}
	failures := p.sync()
	p.removeStrays()
	failures = append(failures, p.sync()...)
	var errs []error
	for _, f := range failures {
		errs = append(errs, f.err)
	}
	return errors.Join(errs...)
}

// removeStrays removes the leftovers of Settle except for routes in Plane.routes.
func (p *Plane) removeStrays() {
	pl := &plan{Plane: p}
	for _, r := range p.strangeRoute {
		pl.lastOps = append(pl.lastOps, op{kind: deleteRoute, at: routeKey{r.Prefix, r.Table}, route: &r})
	}
	p.strangeRoute = nil
	inUse := map[uint32]bool{}
	for _, r := range p.routes {
		inUse[r.nexthop] = true
	}
	for id := range p.strays {
		if !inUse[id] {
			pl.lastOps = append(pl.lastOps, op{kind: deleteGroup, id: id})
		}
	}
	for id := range p.loose {
		pl.lastOps = append(pl.lastOps, op{kind: deleteNexthop, id: id})
	}
	routes := maps.Clone(p.routes)
	for _, f := range p.execute(pl, false) {
		p.log.Error("linux data plane: cannot remove the objects of an earlier run", "error", f.err)
	}
	// A strange route may have the same prefix as a regular one.
	p.routes = routes
}

// Removed holds the numbers of objects that Flush removed.
type Removed struct{ Routes, Rules, Groups, Nexthops int }

// Flush removes every marked route, rule and nexthop object from the network namespace of the calling thread, in all
// tables, and nothing else. It needs no Plane, and must not run while a Plane is open. Sysctls stay.
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
