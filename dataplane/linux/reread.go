package linux

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/dataplane/internal/rtnl"
)

// stray is a group with the mark that nothing wanted has claimed.
type stray struct {
	rtnl.Nexthop
	segments []segment
}

// reread brings everything that the Plane thinks of the kernel in line with what the kernel says, and marks what then
// differs from what is wanted. With buckets it compares the owner of every bucket too. The caller holds mu.
func (p *Plane) reread(buckets bool) error {
	p.stats.Resyncs++
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
		p.used[g.id] = true
		if err := p.rereadGroup(g, ours, buckets); err != nil {
			return err
		}
		if g.moved || !g.exists && g.users > 0 {
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
	for q := range p.pools {
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
	for q := range p.pools {
		p.adopt(q)
	}
	p.rereadRoutes(routes, strange)
	if p.settled {
		p.removeStrays()
	}
	return nil
}

// readRoutes returns the marked routes of the table, those that the Plane can have set, and others.
func (p *Plane) readRoutes() (routes map[netip.Prefix]uint32, strange []rtnl.Route, err error) {
	routes = map[netip.Prefix]uint32{}
	for _, f := range families(p.ipv6) {
		found, err := p.conn.RoutesBy(f, p.config.Table, p.config.Protocol)
		if err != nil {
			return nil, nil, err
		}
		for _, r := range found {
			r = byNexthop(r)
			if r.Nexthop != 0 && r.Metric == p.config.Metric && r.Prefix.IsSingleIP() && r.Type == 0 && !r.Source.IsValid() {
				routes[r.Prefix] = r.Nexthop
			} else {
				strange = append(strange, r)
			}
		}
	}
	return routes, strange, nil
}

// byNexthop takes the type from a route by nexthop id: the kernel says what the nexthop does, and would not find the route
// to delete by that.
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

// hasIPv6 says whether the kernel speaks it. The caller is inside the namespace.
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

// rereadGroup compares what the Plane knows of a group with the kernel.
func (p *Plane) rereadGroup(g *group, ours map[uint32]rtnl.Nexthop, buckets bool) error {
	n, ok := ours[g.id]
	if !ok || len(n.Members) == 0 || !n.Resilient || int(n.Buckets) != p.layout.buckets || n.IdleTimer != 0 {
		if g.exists {
			p.stats.Differences++
		}
		g.exists, g.segments, g.members, g.weights, g.moved = false, nil, nil, nil, false
		if ok {
			// Of our mark and not as we make them: removed as a stray, another takes its place.
			p.staleGroups[g.key] = true
			g.id = 0
		}
		return nil
	}
	if !g.exists {
		// Made by a batch whose answers were lost.
		g.exists, g.members, g.moved = true, n.Members, true
	}
	same := maps.Equal(weightsOf(n.Members), weightsOf(g.members))
	if same && buckets && !g.moved && !g.dropping {
		table, err := p.conn.Buckets(g.id)
		if err != nil {
			return err
		}
		same = slices.Equal(segmentsOf(table), g.segments)
	}
	if !same {
		if !g.moved {
			p.stats.Differences++
			// Nobody knows what it was by: dealt anew at once.
			g.weights = nil
		}
		g.moved, g.segments, g.members, g.dropping = true, nil, n.Members, false
		if first, ok := ours[n.Members[0].ID]; g.key.family == v6 && (!ok || !first.Gateway.IsValid()) {
			g.rejecting = true
		}
	}
	return nil
}

func weightsOf(members []rtnl.Member) map[uint32]uint32 {
	weights := make(map[uint32]uint32, len(members))
	for _, m := range members {
		weights[m.ID] = m.Weight
	}
	return weights
}

func (p *Plane) rereadRoutes(routes map[netip.Prefix]uint32, strange []rtnl.Route) {
	if !p.settled {
		p.strangeRoute = strange
	} else if len(strange) > 0 {
		p.strangeRoute = strange
	}
	p.routes = routes
	for prefix, wanted := range p.destinations {
		g := p.groups[groupKey{wanted, familyOf(prefix.Addr())}]
		if id, ok := routes[prefix]; (!ok || id != g.id) && !p.staleRoutes[prefix] {
			if g.exists {
				p.stats.Differences++
			}
			p.staleRoutes[prefix] = true
		}
	}
	if !p.settled {
		return
	}
	for prefix := range routes {
		if _, ok := p.destinations[prefix]; !ok && !p.staleRoutes[prefix] {
			p.stats.Differences++
			p.staleRoutes[prefix] = true
		}
	}
}

// Settle removes what an earlier run left and nothing wanted has claimed: routes, groups and nexthop objects with the mark,
// in this Plane's table. Call it once, when everything wanted has been said again: after contract.Server.Restore, or, if
// there was no journal, after the first Hello, for which Recover has brought back what was found. Before, leftovers
// forward on. Afterwards, whatever else appears with the mark is removed as soon as it is noticed.
func (p *Plane) Settle() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.settled = true
	for prefix := range p.routes {
		if _, ok := p.destinations[prefix]; !ok {
			p.staleRoutes[prefix] = true
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

// removeStrays removes what Settle is for, other than routes that stand in the mirror.
func (p *Plane) removeStrays() {
	pl := &plan{Plane: p}
	for _, r := range p.strangeRoute {
		pl.lastOps = append(pl.lastOps, op{kind: deleteRoute, prefix: r.Prefix, route: &r})
	}
	p.strangeRoute = nil
	inUse := map[uint32]bool{}
	for _, id := range p.routes {
		inUse[id] = true
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
		p.log.Error("linux data plane: cannot remove what an earlier run left", "error", f.err)
	}
	// A strange route may have the prefix of one that is not.
	p.routes = routes
}

// Removed counts what Flush removed.
type Removed struct{ Routes, Rules, Groups, Nexthops int }

// Flush removes every route, rule and nexthop object with the mark from the calling thread's network namespace, in all
// tables, and nothing else. It needs no Plane, and must not run beside one. Settings of /proc/sys stay.
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
	// One kind after the other, each read just before: removing a nexthop removes the routes that use it.
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
