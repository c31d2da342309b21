package linux

import (
	"cmp"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/internal/rtnl"
)

// The table of routes and the loopback's interface index of the planes that offline returns.
const (
	offlineTable = 254
	loIndex      = 1
)

// offline returns a Driver without a kernel: sub-ports p0, p1, ... on the devices 10, 11, ..., each with a next hop of
// both families. The test calls done for the ops of its plans.
func offline(t *testing.T, subPorts int) *Driver {
	t.Helper()
	config, err := Config{Buckets: 64, Logger: slog.New(slog.DiscardHandler), witnessTime: time.Hour, inPlace: true}.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	d := newDriver(config)
	d.state.ipv6, d.state.maxWeight, d.capabilities = true, 65535, &farev1.Capabilities{}
	d.state.have.links[loIndex], d.state.have.names["lo"] = rtnl.Link{Index: loIndex, Name: "lo", Up: true, Carrier: true, Loopback: true}, loIndex
	f := &farev1.Forwarding{}
	for i := range subPorts {
		l := rtnl.Link{Index: 10 + i, Name: fmt.Sprintf("p%d", i), Up: true, Carrier: true}
		d.state.have.links[l.Index], d.state.have.names[l.Name] = l, l.Index
		sp := &subPort{device: l.Name, hops: [2]netip.Addr{netip.AddrFrom4([4]byte{10, 1, byte(i), 2}), netip.MustParseAddr(fmt.Sprintf("fd01:%d::2", i))}}
		d.state.want.subPorts, d.state.want.byDevice[l.Name] = append(d.state.want.subPorts, sp), sp
		d.state.setHop(sp, v4)
		d.state.setHop(sp, v6)
		f.Planes = append(f.Planes, &farev1.ForwardingPlane{Plane: l.Name, SubPorts: []*farev1.ForwardingSubPort{{Device: l.Name}}})
	}
	d.forwarding = f
	d.state.setSources(f)
	return d
}

// set makes a group wanted, with weights by sub-port.
func (d *Driver) set(id uint32, weights ...uint32) {
	g := &farev1.Vector{Id: id}
	for i, w := range weights {
		if w > 0 {
			g.Members = append(g.Members, &farev1.VectorMember{Plane: d.state.want.subPorts[i].device, Device: d.state.want.subPorts[i].device, Weight: w})
		}
	}
	d.state.applyChange(contract.Change{Kind: contract.GroupChange, Group: id, After: g}, map[groupKey]bool{}, map[routeKey]bool{})
}

// leads moves a destination from one group to another; 0 is no group.
func (d *Driver) leads(prefix string, from, to uint32) {
	c := contract.Change{Kind: contract.DestinationChange, Prefix: mustPrefix(prefix)}
	c.From.Group, c.To.Group = from, to
	d.state.applyChange(c, map[groupKey]bool{}, map[routeKey]bool{})
}

// obey plans and calls done for all ops until a plan is empty, and returns the ops in order.
func (d *Driver) obey(t *testing.T) (all []op) {
	t.Helper()
	for range 5 {
		pl := d.state.plan()
		if pl.empty() {
			d.state.await(nil)
			return all
		}
		ops := slices.Concat(pl.nexthopOps, pl.groupOps, pl.closeOps, pl.routeOps, pl.anchorOps, pl.lastOps, pl.openOps)
		for i := range ops {
			d.state.done(&ops[i])
		}
		all = append(all, ops...)
	}
	t.Fatalf("plans without end: %+v", all)
	return nil
}

// countOps counts ops of a kind.
func countOps(ops []op, kind opKind) (n int) {
	for _, o := range ops {
		if o.kind == kind {
			n++
		}
	}
	return n
}

// devices returns the device of each bucket of a group, "" for a bucket without one.
func (d *Driver) devices(g *group) (table []string) {
	for _, s := range g.segments {
		name := ""
		if q := d.state.have.owners[s.id]; q != nil && q.subPort != nil {
			name = q.subPort.device
		}
		table = append(table, slices.Repeat([]string{name}, s.size)...)
	}
	return table
}

// sharesOf counts the buckets of each device.
func (d *Driver) sharesOf(g *group) map[string]int {
	n := map[string]int{}
	for _, d := range d.devices(g) {
		n[d]++
	}
	return n
}

// planner returns a planner for the stale groups and routes.
func (d *Driver) planner() *planner { return newPlanner(&d.state.want, &d.state.have, d.state.scope()) }

// statesOf returns the routes of a map.
func statesOf(all map[routeKey]routeState) *routeStates {
	r := &routeStates{}
	for at, state := range all {
		r.set(at, state)
	}
	return r
}

// planInputs describes the state that planning reads and must not change.
func (d *Driver) planInputs() string {
	var b []byte
	for _, key := range slices.SortedFunc(maps.Keys(d.state.have.groups), func(a, b groupKey) int {
		return cmp.Or(cmp.Compare(a.wanted, b.wanted), cmp.Compare(a.family, b.family))
	}) {
		b = fmt.Appendf(b, "%+v\n", *d.state.have.groups[key])
	}
	for _, q := range d.state.pools() {
		b = fmt.Appendf(b, "pool %v %v %v\n", q.gateway, q.ids, q.broken)
	}
	h := &d.state.have
	return string(fmt.Appendf(b, "%v\n%v\n%v\n%v\n%v\n%v\n%v\n%v\n%v\n%v\n%v", maps.Collect(h.routes.all()), h.used, h.next, len(h.owners), h.strays, h.loose, h.retired,
		len(h.changed), d.state.staleGroups, d.state.staleRoutes, d.state.want.users))
}
