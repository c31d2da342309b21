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
func (d *Driver) Commit(changes []contract.Change) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	groups, routes := map[groupKey]bool{}, map[routeKey]bool{}
	for _, c := range changes {
		d.applyChange(c, groups, routes)
	}
	err := d.relevant(d.sync(), groups, routes)
	if err == nil {
		return nil
	}
	for i := len(changes) - 1; i >= 0; i-- {
		d.applyChange(changes[i].Inverse(), groups, routes)
	}
	if again := d.relevant(d.sync(), groups, routes); again != nil {
		d.log.Error("linux data plane: cannot restore the state before a refused change; retrying", "error", again)
		d.tear(status.Convert(again).Message())
	}
	return err
}

// applyChange adds a change to the desired state, and records the affected groups and routes.
func (d *Driver) applyChange(c contract.Change, groups map[groupKey]bool, routes map[routeKey]bool) {
	touch := func(wanted uint32) {
		for f := range d.have.drop {
			key := groupKey{wanted, family(f)}
			if d.have.groups[key] != nil {
				groups[key] = true
				d.staleGroups[key] = true
			}
		}
	}
	switch c.Kind {
	case contract.SubPortChange:
		if sp := d.want.byDevice[c.Device]; sp != nil {
			sp.down = !c.Up
			if sp.down {
				d.watch.Start() // the control plane may learn of a failure before the kernel's event arrives
			}
			for _, key := range d.stale(sp) {
				groups[key] = true
			}
		}
	case contract.GroupChange:
		if c.After == nil {
			delete(d.want.vectors, c.Group)
		} else {
			d.want.vectors[c.Group] = c.After
		}
		touch(c.Group)
	case contract.DestinationChange:
		f := familyOf(c.Prefix.Addr())
		if c.From.Group != 0 {
			key := groupKey{c.From.Group, f}
			if d.want.use(key, -1) == 0 {
				d.staleGroups[key] = true
			}
			delete(d.want.destinations, c.Key())
			d.count(c.Key(), -1)
		}
		if c.To.Group != 0 {
			key := groupKey{c.To.Group, f}
			g := d.have.groups[key]
			if g == nil {
				g = &group{key: key, source: c.Source}
				d.have.groups[key] = g
			}
			if g.source != c.Source { // the id was reused by another source group before the kernel group of the first one was removed
				d.renew(g, c.Source)
			}
			d.want.use(key, 1)
			d.want.destinations[c.Key()] = c.To.Group
			d.count(c.Key(), 1)
			groups[key] = true
		}
		if at, ok := d.want.place(c.Key()); ok {
			routes[at] = true
			d.staleRoutes[at] = true
		}
	}
}

// relevant returns the first refusal that concerns the given groups or routes, or a shortage of room for nexthops, as a
// status, or nil.
func (d *Driver) relevant(failures []failure, groups map[groupKey]bool, routes map[routeKey]bool) error {
	for _, f := range failures {
		ours := f.op.key.wanted != 0 && groups[f.op.key]
		if f.op.at.prefix.IsValid() { // one route of a group does not concern the group's others
			ours = routes[f.op.at]
		}
		if ours || exhausted(f.err) && f.op.kind == makeNexthop {
			return f.refusal()
		}
		d.log.Error("linux data plane: the kernel refused a change; retrying", "error", f.err)
	}
	return nil
}

// SetForwarding implements contract.Forwarder. Changed next hops are updated in place, so that no packet takes another
// path; groups are redistributed if sub-ports were added, removed or reordered.
func (d *Driver) SetForwarding(forwarding *farev1.Forwarding) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.judge(forwarding); err != nil {
		return err
	}
	if transit(forwarding) {
		err := d.space.Do(func() error {
			_, err := setUpTransit(d.hopsV6(forwarding))
			return err
		})
		if err != nil {
			return status.Errorf(codes.Unavailable, "forwarding: without loopbacks this node forwards for others: %v", err)
		}
	}
	before := d.forwarding
	if err := d.forward(forwarding); err != nil {
		if before != nil {
			if again := d.forward(before); again != nil {
				d.log.Error("linux data plane: cannot restore the forwarding before a refused one; retrying", "error", again)
			}
		}
		return err
	}
	d.forwarding = proto.CloneOf(forwarding)
	return d.findHash()
}

// transit reports whether a Forwarding belongs to a node that sends no flows itself.
func transit(forwarding *farev1.Forwarding) bool { return len(forwarding.GetLoopbacks()) == 0 }

// hopsV6 reports whether a Forwarding can forward IPv6, which needs an IPv6 next hop.
func (d *Driver) hopsV6(forwarding *farev1.Forwarding) bool {
	return d.ipv6 && slices.ContainsFunc(forwarding.GetPlanes(), func(plane *farev1.ForwardingPlane) bool {
		return slices.ContainsFunc(plane.SubPorts, func(sp *farev1.ForwardingSubPort) bool { return sp.NextHopV6 != "" })
	})
}

// judge checks the requirements of this data plane on a Forwarding that exceed the contract.
func (d *Driver) judge(forwarding *farev1.Forwarding) error {
	n := 0
	for i, plane := range forwarding.GetPlanes() {
		for j, sp := range plane.SubPorts {
			n++
			at := func(format string, args ...any) error {
				return status.Errorf(codes.InvalidArgument, "forwarding: planes[%d].sub_ports[%d]: "+format, append([]any{i, j}, args...)...)
			}
			if sp.Netns != "" {
				if own, err := d.space.Is(sp.Netns); err != nil {
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
	return d.judgeSources(forwarding)
}

func parseHop(text string) (netip.Addr, error) {
	if text == "" {
		return netip.Addr{}, nil
	}
	a, err := netip.ParseAddr(text)
	return a.Unmap().WithZone(""), err
}

// forward applies a valid Forwarding.
func (d *Driver) forward(forwarding *farev1.Forwarding) error {
	byDevice := map[string]*subPort{}
	var subPorts []*subPort
	structure := false
	for _, plane := range forwarding.Planes {
		for _, wire := range plane.SubPorts {
			sp := d.want.byDevice[wire.Device]
			if sp == nil {
				sp = &subPort{device: wire.Device}
			}
			subPorts = append(subPorts, sp)
			byDevice[sp.device] = sp
			for f, text := range []string{wire.NextHopV4, wire.NextHopV6} {
				sp.hops[f], _ = parseHop(text) // judge has validated it
				if d.setHop(sp, family(f)) {
					structure = true
				}
			}
		}
	}
	for device, sp := range d.want.byDevice {
		if byDevice[device] == nil {
			for _, q := range sp.pools {
				if q != nil {
					d.have.retire(q)
				}
			}
		}
	}
	d.want.subPorts, d.want.byDevice = subPorts, byDevice
	if d.setSources(forwarding) || structure {
		d.want.generation++
		d.staleEverywhere()
	}
	if err := d.rereadAddresses(); err != nil { // the loopbacks among the addresses were unknown until now
		return kernelStatus(err)
	}
	clear(d.have.unfit)
	d.staleSources()
	for key := range d.have.groups {
		d.staleGroups[key] = true
	}
	// Refusals here concern groups that were set before; only a shortage of resources is caused by Hello.
	for _, f := range d.sync() {
		if exhausted(f.err) {
			return f.refusal()
		}
		d.log.Error("linux data plane: the kernel refused a change; retrying", "error", f.err)
	}
	if d.settled {
		d.removeStrays()
	}
	if err := d.setUpRules(); err != nil {
		return kernelStatus(err)
	}
	return nil
}

// staleEverywhere marks all existing and all wanted routes.
func (d *Driver) staleEverywhere() {
	if d.settled {
		for at := range d.have.routes {
			d.staleRoutes[at] = true
		}
	}
	for key := range d.want.destinations {
		if at, ok := d.want.place(key); ok {
			d.staleRoutes[at] = true
		}
	}
	for _, at := range d.want.closedRoutes() {
		d.staleRoutes[at] = true
	}
}

// buckets returns the number of buckets of a group if the largest source group has subPorts.
func (d *Driver) buckets(subPorts int) int {
	if d.config.Buckets != 0 {
		return int(d.config.Buckets)
	}
	most := MaxBuckets
	if d.maxWeight < most {
		most = mostNarrow
	}
	return min(DefaultBuckets*subPorts, most)
}

// resize sets the number of buckets, for source groups of up to subPorts. The kernel cannot change the number of buckets of
// a group: existing groups are replaced by new ones, to which their routes are moved one by one.
func (d *Driver) resize(buckets, subPorts int) {
	other := d.want.size != buckets
	d.want.size, d.want.lasting, d.want.scaling = buckets, layout{buckets, subPorts}.lasting(), newScaling(buckets, d.maxWeight)
	d.capabilities.MaxVectors = uint32(min(d.config.Memory/uint64(bucketSize*buckets*len(families(d.ipv6))), math.MaxUint32))
	for _, s := range d.want.sources {
		s.layout = layout{buckets, len(s.subPorts)}
	}
	if !other {
		return
	}
	for _, g := range d.have.groups {
		d.renew(g, g.source)
	}
	d.staleEverywhere()
}

// renew schedules a new kernel group for a source group; the old one is removed once no route uses it.
func (d *Driver) renew(g *group, source netip.Prefix) {
	if g.exists {
		d.have.strays[g.id] = stray{Nexthop: rtnl.Nexthop{ID: g.id, Members: g.members}}
	}
	*g = group{key: g.key, source: source}
	d.staleGroups[g.key] = true
}

// Approximate implements contract.Approximator. It judges the weights as they were set, independent of the state of
// sub-ports.
func (d *Driver) Approximate(group uint32) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	wanted := d.want.vectors[group]
	name, _ := netip.ParsePrefix(wanted.GetSource()) // not valid without source groups
	s := d.want.sourceOf(name)
	weights := make([]uint32, len(s.subPorts))
	for _, m := range wanted.GetMembers() {
		if i := s.index(d.want.byDevice[m.Device]); i >= 0 {
			weights[i] = m.Weight
		}
	}
	i, part := s.layout.deviation(weights)
	if math.Abs(part) <= tolerance {
		return ""
	}
	return fmt.Sprintf("the share of %s is off by %+.1f %% of itself: %d buckets allow no smaller steps", s.subPorts[i].device, 100*part, d.want.size)
}

// setHop updates the pool of a sub-port from its next hop and link, and reports whether the pool was added, removed or
// moved to another device.
func (d *Driver) setHop(sp *subPort, f family) (other bool) {
	q, hop := sp.pools[f], sp.hops[f]
	device := d.have.names[sp.device] // 0 without a device
	if !hop.IsValid() {
		if q != nil {
			d.have.retire(q)
			sp.pools[f] = nil
		}
		return q != nil
	}
	if q == nil {
		q = &pool{subPort: sp, family: f, gateway: hop, device: device}
		sp.pools[f] = q
		d.adopt(q)
		return true
	}
	if q.device != device {
		d.have.retire(q)
		q.device, q.gateway, q.broken = device, hop, nil
		return true
	}
	if q.gateway != hop {
		q.gateway, q.broken = hop, nil
		d.have.changed = append(d.have.changed, q)
	}
	return false
}
