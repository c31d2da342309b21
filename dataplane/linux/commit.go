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
)

// Commit implements contract.Forwarder. It returns after the kernel has acknowledged all changes.
func (d *Driver) Commit(changes []contract.Change) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.occupied.refuse(d.state, changes); err != nil {
		return err
	}
	d.beforeRise(changes)
	groups, routes := map[groupKey]bool{}, map[routeKey]bool{}
	for _, c := range changes {
		d.apply(c, groups, routes)
	}
	failures := d.sync()
	err := d.relevant(failures, groups, routes)
	if err == nil {
		if slices.ContainsFunc(changes, func(c contract.Change) bool { return c.Kind == contract.DestinationChange && c.From.Group == 0 }) {
			d.lookSoon()
		}
		return nil
	}
	for i := len(changes) - 1; i >= 0; i-- {
		d.apply(changes[i].Inverse(), groups, routes)
	}
	if again := d.relevant(d.sync(), groups, routes); again != nil {
		d.state.log.Error("linux data plane: cannot restore the state before a refused change; retrying", "error", again)
		d.integrity.tear(status.Convert(again).Message())
	}
	d.occupied.note(d.state, failures)
	return err
}

// beforeRise reads the carriers before a sub-port is set up: the control plane has seen its carrier, whose event may
// still wait for this process. Without that the weights would be acknowledged while packets still avoid the sub-port.
// The caller holds mu.
func (d *Driver) beforeRise(changes []contract.Change) {
	if slices.ContainsFunc(changes, contract.Change.Raises) {
		d.links.watch.Start()
		d.pollLinks()
		d.handleLinks(d.links.watch.Ask(d.links.carriers()))
	}
}

// apply is state.applyChange. A sub-port that is set down makes requests of all carriers due.
func (d *Driver) apply(c contract.Change, groups map[groupKey]bool, routes map[routeKey]bool) {
	d.state.applyChange(c, groups, routes)
	if c.Kind == contract.SubPortChange && !c.Up {
		d.links.watch.StartAfterChange() // the control plane may learn of a failure before the kernel's event arrives
	}
}

// relevant returns the first refusal that concerns the given groups or routes, or a shortage of room for nexthops, as a
// status, or nil.
func (d *Driver) relevant(failures []failure, groups map[groupKey]bool, routes map[routeKey]bool) error {
	for i, f := range failures {
		ours := f.op.key.wanted != 0 && groups[f.op.key]
		if f.op.at.prefix.IsValid() { // one route of a group does not concern the group's others
			ours = routes[f.op.at]
		}
		if ours || exhausted(f.err) && f.op.kind == makeNexthop {
			d.complain(failures[:i])
			return f.refusal()
		}
	}
	d.complain(failures)
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
			_, err := setUpTransit(d.state.hopsV6(forwarding))
			return err
		})
		if err != nil {
			return status.Errorf(codes.Unavailable, "forwarding: without loopbacks this node forwards for others: %v", err)
		}
	} else if err := d.space.Do(func() error { _, err := setUp(false); return err }); err != nil {
		return status.Errorf(codes.Unavailable, "forwarding: %v", err)
	}
	devices := d.state.have.devices(forwarding)
	if err := d.space.Do(func() error {
		_, err := setUpNeighbors(devices)
		return err
	}); err != nil {
		d.state.log.Warn("linux data plane: a sub-port may return a second later than its link", "error", err)
	}
	before := d.forwarding
	if err := d.forward(forwarding); err != nil {
		if before != nil {
			if again := d.forward(before); again != nil {
				d.state.log.Error("linux data plane: cannot restore the forwarding before a refused one; retrying", "error", again)
			}
		}
		return err
	}
	d.forwarding = proto.CloneOf(forwarding)
	hash, err := d.prober.findHash(forwarding)
	if err != nil {
		return err
	}
	d.capabilities.FlowHash = hash
	return nil
}

// transit reports whether a Forwarding belongs to a node that sends no flows itself.
func transit(forwarding *farev1.Forwarding) bool { return len(forwarding.GetLoopbacks()) == 0 }

// hopsV6 reports whether a Forwarding can forward IPv6, which needs an IPv6 next hop.
func (st *state) hopsV6(forwarding *farev1.Forwarding) bool {
	return st.ipv6 && slices.ContainsFunc(forwarding.GetPlanes(), func(plane *farev1.ForwardingPlane) bool {
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
	return d.state.judgeSources(forwarding)
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
	structure := d.state.setSubPorts(forwarding)
	if d.state.setSources(forwarding) || structure {
		d.state.want.generation++
		d.state.staleEverywhere()
	}
	if err := d.reader.rereadAddresses(); err != nil { // the loopbacks among the addresses were unknown until now
		return kernelStatus(err)
	}
	clear(d.state.have.unfit)
	d.state.staleSources()
	for key := range d.state.have.groups {
		d.state.staleGroups[key] = true
	}
	// Refusals here concern groups that were set before; only a shortage of resources is caused by Hello.
	failures := d.sync()
	for _, f := range failures {
		if exhausted(f.err) {
			return f.refusal()
		}
	}
	d.complain(failures)
	if d.state.settled {
		d.reader.removeStrays()
	}
	if err := d.rules.setUp(); err != nil {
		return kernelStatus(err)
	}
	d.reach.port = uint16(forwarding.DirectProbePort)
	d.reach.sync()
	d.lookSoon() // packets have other source addresses and ports
	return nil
}

// Approximate implements contract.Approximator. It judges the weights as they were set, independent of the state of
// sub-ports.
func (d *Driver) Approximate(group uint32) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	wanted := d.state.want.vectors[group]
	name, _ := netip.ParsePrefix(wanted.GetSource()) // not valid without source groups
	s := d.state.want.sourceOf(name)
	weights := make([]uint32, len(s.subPorts))
	for _, m := range wanted.GetMembers() {
		if i := s.index(d.state.want.byDevice[m.Device]); i >= 0 {
			weights[i] = m.Weight
		}
	}
	i, part := s.layout.deviation(weights)
	if math.Abs(part) <= tolerance {
		return ""
	}
	return fmt.Sprintf("the share of %s is off by %+.1f %% of itself: %d buckets allow no smaller steps", s.subPorts[i].device, 100*part, d.state.want.size)
}
