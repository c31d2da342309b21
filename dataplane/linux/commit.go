package linux

import (
	"net/netip"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
)

// Commit implements contract.Forwarder. It returns when the kernel has acknowledged everything that differed.
func (p *Plane) Commit(changes []contract.Change) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	groups, routes := map[groupKey]bool{}, map[netip.Prefix]bool{}
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
		p.log.Error("linux data plane: cannot go back to what was before a refused change; trying again", "error", again)
	}
	return err
}

// want makes a change wanted, and notes what it touches.
func (p *Plane) want(c contract.Change, groups map[groupKey]bool, routes map[netip.Prefix]bool) {
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
			for key := range p.groups {
				for _, m := range p.wanted[key.wanted].GetMembers() {
					if m.Device == c.Device {
						groups[key] = true
						p.staleGroups[key] = true
					}
				}
			}
		}
	case contract.GroupChange:
		if c.After == nil {
			delete(p.wanted, c.Group)
		} else {
			p.wanted[c.Group] = c.After
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
			delete(p.destinations, c.Prefix)
		}
		if c.To.Group != 0 {
			key := groupKey{c.To.Group, f}
			g := p.groups[key]
			if g == nil {
				g = &group{key: key}
				p.groups[key] = g
			}
			g.users++
			p.destinations[c.Prefix] = c.To.Group
			groups[key] = true
		}
		routes[c.Prefix] = true
		p.staleRoutes[c.Prefix] = true
	}
}

// relevant returns the refusal that concerns what was touched, as a status; nil: there is none.
func (p *Plane) relevant(failures []failure, groups map[groupKey]bool, routes map[netip.Prefix]bool) error {
	var err error
	for _, f := range failures {
		ours := f.op.group != nil && groups[f.op.group.key] || f.op.prefix.IsValid() && routes[f.op.prefix]
		if f.op.prefix.IsValid() && !routes[f.op.prefix] {
			ours = false
		}
		if ours || exhausted(f.err) && f.op.kind == makeNexthop {
			return f.refusal()
		}
		p.log.Error("linux data plane: the kernel refused a change; trying again", "error", f.err)
	}
	return err
}

// SetForwarding implements contract.Forwarder. Next hops that changed are changed in place, so that no packet takes another
// way; groups are dealt anew when sub-ports came, went or changed their order.
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
				p.log.Error("linux data plane: cannot go back to the forwarding before a refused one; trying again", "error", again)
			}
		}
		return err
	}
	p.forwarding = proto.CloneOf(forwarding)
	p.findHash()
	return nil
}

// transit says whether a Forwarding is that of a node which has no flows of its own.
func transit(forwarding *farev1.Forwarding) bool { return len(forwarding.GetLoopbacks()) == 0 }

// hopsV6 says whether IPv6 can be forwarded by a Forwarding: some next hop is IPv6.
func (p *Plane) hopsV6(forwarding *farev1.Forwarding) bool {
	return p.ipv6 && slices.ContainsFunc(forwarding.GetPlanes(), func(plane *farev1.ForwardingPlane) bool {
		return slices.ContainsFunc(plane.SubPorts, func(sp *farev1.ForwardingSubPort) bool { return sp.NextHopV6 != "" })
	})
}

// judge checks what this data plane asks of a Forwarding beyond the contract.
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
					return at("netns %q is not the data plane's own; run one data plane in each network namespace", sp.Netns)
				}
			}
			for f, text := range []string{sp.NextHopV4, sp.NextHopV6} {
				hop, err := parseHop(text)
				if err != nil || hop.IsValid() && familyOf(hop) != family(f) {
					return at("next hop %q is not an address of its family; swap or correct it", text)
				}
				if hop.IsUnspecified() || hop.IsMulticast() || hop.IsLoopback() {
					return at("next hop %s is no neighbour's address; correct it, or leave it empty", text)
				}
			}
		}
	}
	if n > int(p.config.Buckets) {
		return status.Errorf(codes.InvalidArgument, "forwarding: %d sub-ports do not fit into %d buckets; set more buckets", n, p.config.Buckets)
	}
	if n == 0 {
		return status.Error(codes.InvalidArgument, "forwarding: no sub-ports; name at least one")
	}
	return nil
}

func parseHop(text string) (netip.Addr, error) {
	if text == "" {
		return netip.Addr{}, nil
	}
	a, err := netip.ParseAddr(text)
	return a.Unmap().WithZone(""), err
}

// forward makes a valid Forwarding the present one.
func (p *Plane) forward(forwarding *farev1.Forwarding) error {
	byDevice := map[string]*subPort{}
	var subPorts []*subPort
	structure := false
	for _, plane := range forwarding.Planes {
		for _, wire := range plane.SubPorts {
			sp := p.byDevice[wire.Device]
			if sp == nil {
				sp = &subPort{device: wire.Device}
				structure = true
			}
			structure = structure || sp.index != len(subPorts)
			sp.index = len(subPorts)
			subPorts = append(subPorts, sp)
			byDevice[sp.device] = sp
			for f, text := range []string{wire.NextHopV4, wire.NextHopV6} {
				sp.hops[f], _ = parseHop(text) // judged before
				if p.setHop(sp, family(f)) {
					structure = true
				}
			}
		}
	}
	structure = structure || len(subPorts) != len(p.subPorts)
	for device, sp := range p.byDevice {
		if byDevice[device] == nil {
			for f, q := range sp.pools {
				if q != nil {
					p.retire(q)
					sp.pools[f] = nil
				}
			}
		}
	}
	p.subPorts, p.byDevice, p.layout = subPorts, byDevice, layout{int(p.config.Buckets), len(subPorts)}
	if structure {
		p.generation++
	}
	for key := range p.groups {
		p.staleGroups[key] = true
	}
	// What the kernel refuses here, it refuses of groups that were set before; only having no room is Hello's fault.
	for _, f := range p.sync() {
		if exhausted(f.err) {
			return f.refusal()
		}
		p.log.Error("linux data plane: the kernel refused a change; trying again", "error", f.err)
	}
	return nil
}

// setHop brings the pool of a sub-port in line with its next hop and link, and says whether there is another pool now.
func (p *Plane) setHop(sp *subPort, f family) (other bool) {
	q, hop := sp.pools[f], sp.hops[f]
	device := p.names[sp.device] // 0: there is none
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
		p.adopt(q)
		return true
	}
	if q.gateway != hop {
		q.gateway, q.broken = hop, nil
		if len(q.ids) > 0 {
			p.changed = append(p.changed, q)
		}
		p.adopt(q)
	}
	return false
}
