package linux

import (
	"fmt"
	"math"
	"net/netip"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/internal/rtnl"
)

// Commit implements contract.Forwarder. It returns after the kernel has acknowledged all changes.
func (p *Plane) Commit(changes []contract.Change) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	groups, routes := map[groupKey]bool{}, map[routeKey]bool{}
	for _, c := range changes {
		p.want(c, groups, routes)
	}
	err := p.relevant(p.sync(), groups, routes)
	if err == nil {
		return nil
	}
	for i := len(changes) - 1; i >= 0; i-- {
		p.want(changes[i].Inverse(), groups, routes)
	}
	if again := p.relevant(p.sync(), groups, routes); again != nil {
		p.log.Error("linux data plane: cannot restore the state before a refused change; retrying", "error", again)
		p.tear(status.Convert(again).Message())
	}
	return err
}

// want adds a change to the wanted state, and records the affected groups and routes.
func (p *Plane) want(c contract.Change, groups map[groupKey]bool, routes map[routeKey]bool) {
	touch := func(wanted uint32) {
		for f := range p.drop {
			key := groupKey{wanted, family(f)}
			if p.groups[key] != nil {
				groups[key] = true
				p.staleGroups[key] = true
			}
		}
	}
	switch c.Kind {
	case contract.SubPortChange:
		if sp := p.byDevice[c.Device]; sp != nil {
			sp.down = !c.Up
			if sp.down {
				p.watch.Start() // the control plane may learn of a failure before the kernel's event arrives
			}
			for _, key := range p.stale(sp) {
				groups[key] = true
			}
		}
	case contract.GroupChange:
		if c.After == nil {
			delete(p.wanted, c.Group)
		} else {
			p.wanted[c.Group] = c.After
		}
		for _, f := range []family{v4, v6} {
			if g := p.groups[groupKey{c.Group, f}]; g != nil {
				g.answered = g.moved
			}
		}
		touch(c.Group)
	case contract.DestinationChange:
		f := familyOf(c.Prefix.Addr())
		if c.From.Group != 0 {
			key := groupKey{c.From.Group, f}
			if g := p.groups[key]; g != nil {
				if g.users--; g.users == 0 {
					p.staleGroups[key] = true
				}
			}
			delete(p.destinations, c.Key())
			p.count(c.Key(), -1)
		}
		if c.To.Group != 0 {
			key := groupKey{c.To.Group, f}
			g := p.groups[key]
			if g == nil {
				g = &group{key: key, source: c.Source}
				p.groups[key] = g
			}
			if g.source != c.Source { // the id was reused by another source group before the kernel group of the first one was removed
				p.renew(g, c.Source)
			}
			g.users++
			p.destinations[c.Key()] = c.To.Group
			p.count(c.Key(), 1)
			groups[key] = true
		}
		if at, ok := p.place(c.Key()); ok {
			routes[at] = true
			p.staleRoutes[at] = true
		}
	}
}

// relevant returns the first refusal that concerns the given groups or routes, or a shortage of room for nexthops, as a
// status, or nil.
func (p *Plane) relevant(failures []failure, groups map[groupKey]bool, routes map[routeKey]bool) error {
	for _, f := range failures {
		ours := f.op.group != nil && groups[f.op.group.key]
		if f.op.at.prefix.IsValid() { // one route of a group does not concern the group's others
			ours = routes[f.op.at]
		}
		if ours || exhausted(f.err) && f.op.kind == makeNexthop {
			return f.refusal()
		}
		p.log.Error("linux data plane: the kernel refused a change; retrying", "error", f.err)
	}
	return nil
}

// SetForwarding implements contract.Forwarder. Changed next hops are updated in place, so that no packet takes another
// path; groups are redistributed if sub-ports were added, removed or reordered.
func (p *Plane) SetForwarding(forwarding *farev1.Forwarding) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.judge(forwarding); err != nil {
		return err
	}
	if transit(forwarding) {
		err := p.space.do(func() error {
			_, err := setUpTransit(p.hopsV6(forwarding))
			return err
		})
		if err != nil {
			return status.Errorf(codes.Unavailable, "forwarding: without loopbacks this node forwards for others: %v", err)
		}
	}
	before := p.forwarding
	if err := p.forward(forwarding); err != nil {
		if before != nil {
			if again := p.forward(before); again != nil {
				p.log.Error("linux data plane: cannot restore the forwarding before a refused one; retrying", "error", again)
			}
		}
		return err
	}
	p.forwarding = proto.CloneOf(forwarding)
	return p.findHash()
}

// transit reports whether a Forwarding belongs to a node that sends no flows itself.
func transit(forwarding *farev1.Forwarding) bool { return len(forwarding.GetLoopbacks()) == 0 }

// hopsV6 reports whether a Forwarding can forward IPv6, which needs an IPv6 next hop.
func (p *Plane) hopsV6(forwarding *farev1.Forwarding) bool {
	return p.ipv6 && slices.ContainsFunc(forwarding.GetPlanes(), func(plane *farev1.ForwardingPlane) bool {
		return slices.ContainsFunc(plane.SubPorts, func(sp *farev1.ForwardingSubPort) bool { return sp.NextHopV6 != "" })
	})
}

// judge checks the requirements of this data plane on a Forwarding that exceed the contract.
func (p *Plane) judge(forwarding *farev1.Forwarding) error {
	n := 0
	for i, plane := range forwarding.GetPlanes() {
		for j, sp := range plane.SubPorts {
			n++
			at := func(format string, args ...any) error {
				return status.Errorf(codes.InvalidArgument, "forwarding: planes[%d].sub_ports[%d]: "+format, append([]any{i, j}, args...)...)
			}
			if sp.Netns != "" {
				if own, err := p.space.is(sp.Netns); err != nil {
					return at("netns %q: %v; leave it empty, or run the data plane in it", sp.Netns, err)
				} else if !own {
					return at("netns %q is not the data plane's network namespace; run one data plane in each network namespace", sp.Netns)
				}
			}
			for f, text := range []string{sp.NextHopV4, sp.NextHopV6} {
				hop, err := parseHop(text)
				if err != nil || hop.IsValid() && familyOf(hop) != family(f) {
					return at("next hop %q is not an address of its family; swap or correct it", text)
				}
				if hop.IsUnspecified() || hop.IsMulticast() || hop.IsLoopback() {
					return at("next hop %s cannot be a neighbor's address; correct it, or leave it empty", text)
				}
			}
		}
	}
	if n == 0 {
		return status.Error(codes.InvalidArgument, "forwarding: no sub-ports; list at least one")
	}
	return p.judgeSources(forwarding)
}

func parseHop(text string) (netip.Addr, error) {
	if text == "" {
		return netip.Addr{}, nil
	}
	a, err := netip.ParseAddr(text)
	return a.Unmap().WithZone(""), err
}

// forward applies a valid Forwarding.
func (p *Plane) forward(forwarding *farev1.Forwarding) error {
	byDevice := map[string]*subPort{}
	var subPorts []*subPort
	structure := false
	for _, plane := range forwarding.Planes {
		for _, wire := range plane.SubPorts {
			sp := p.byDevice[wire.Device]
			if sp == nil {
				sp = &subPort{device: wire.Device}
			}
			subPorts = append(subPorts, sp)
			byDevice[sp.device] = sp
			for f, text := range []string{wire.NextHopV4, wire.NextHopV6} {
				sp.hops[f], _ = parseHop(text) // judge has validated it
				if p.setHop(sp, family(f)) {
					structure = true
				}
			}
		}
	}
	for device, sp := range p.byDevice {
		if byDevice[device] == nil {
			for _, q := range sp.pools {
				if q != nil {
					p.retire(q)
				}
			}
		}
	}
	p.subPorts, p.byDevice = subPorts, byDevice
	if p.setSources(forwarding) || structure {
		p.generation++
		p.staleEverywhere()
	}
	if err := p.rereadAddresses(); err != nil { // the loopbacks among the addresses were unknown until now
		return kernelStatus(err)
	}
	clear(p.unfit)
	p.staleSources()
	for key := range p.groups {
		p.staleGroups[key] = true
	}
	// Refusals here concern groups that were set before; only a shortage of resources is caused by Hello.
	for _, f := range p.sync() {
		if exhausted(f.err) {
			return f.refusal()
		}
		p.log.Error("linux data plane: the kernel refused a change; retrying", "error", f.err)
	}
	if p.settled {
		p.removeStrays()
	}
	if err := p.setUpRules(); err != nil {
		return kernelStatus(err)
	}
	return nil
}

// staleEverywhere marks all existing and all wanted routes.
func (p *Plane) staleEverywhere() {
	if p.settled {
		for at := range p.routes {
			p.staleRoutes[at] = true
		}
	}
	for key := range p.destinations {
		if at, ok := p.place(key); ok {
			p.staleRoutes[at] = true
		}
	}
	for _, at := range p.closedRoutes() {
		p.staleRoutes[at] = true
	}
}

// buckets returns the number of buckets of a group if the largest source group has subPorts.
func (p *Plane) buckets(subPorts int) int {
	if p.config.Buckets != 0 {
		return int(p.config.Buckets)
	}
	most := MaxBuckets
	if p.maxWeight < most {
		most = mostNarrow
	}
	return min(DefaultBuckets*subPorts, most)
}

// resize sets the number of buckets, for source groups of up to subPorts. The kernel cannot change the number of buckets of
// a group: existing groups are replaced by new ones, to which their routes are moved one by one.
func (p *Plane) resize(buckets, subPorts int) {
	other := p.size != buckets
	p.size, p.lasting, p.scaling = buckets, layout{buckets, subPorts}.lasting(), newScaling(buckets, p.maxWeight)
	p.capabilities.MaxVectors = uint32(min(p.config.Memory/uint64(bucketSize*buckets*len(families(p.ipv6))), math.MaxUint32))
	for _, s := range p.sources {
		s.layout = layout{buckets, len(s.subPorts)}
	}
	if !other {
		return
	}
	for _, g := range p.groups {
		p.renew(g, g.source)
	}
	p.staleEverywhere()
}

// renew schedules a new kernel group for a source group; the old one is removed once no route uses it.
func (p *Plane) renew(g *group, source netip.Prefix) {
	if g.exists {
		p.strays[g.id] = stray{Nexthop: rtnl.Nexthop{ID: g.id, Members: g.members}}
	}
	*g = group{key: g.key, source: source, users: g.users}
	p.staleGroups[g.key] = true
}

// Approximate implements contract.Approximator. It judges the weights as they were set, independent of the state of
// sub-ports.
func (p *Plane) Approximate(group uint32) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	wanted := p.wanted[group]
	name, _ := netip.ParsePrefix(wanted.GetSource()) // not valid without source groups
	s := p.sourceOf(name)
	weights := make([]uint32, len(s.subPorts))
	for _, m := range wanted.GetMembers() {
		if i := s.index(p.byDevice[m.Device]); i >= 0 {
			weights[i] = m.Weight
		}
	}
	i, part := s.layout.deviation(weights)
	if math.Abs(part) <= tolerance {
		return ""
	}
	return fmt.Sprintf("the share of %s is off by %+.1f %% of itself: %d buckets allow no smaller steps", s.subPorts[i].device, 100*part, p.size)
}

// setHop updates the pool of a sub-port from its next hop and link, and reports whether the pool was added, removed or
// moved to another device.
func (p *Plane) setHop(sp *subPort, f family) (other bool) {
	q, hop := sp.pools[f], sp.hops[f]
	device := p.names[sp.device] // 0 without a device
	if !hop.IsValid() {
		if q != nil {
			p.retire(q)
			sp.pools[f] = nil
		}
		return q != nil
	}
	if q == nil {
		q = &pool{subPort: sp, family: f, gateway: hop, device: device}
		sp.pools[f] = q
		p.adopt(q)
		return true
	}
	if q.device != device {
		p.retire(q)
		q.device, q.gateway, q.broken = device, hop, nil
		return true
	}
	if q.gateway != hop {
		q.gateway, q.broken = hop, nil
		p.changed = append(p.changed, q)
	}
	return false
}
