package lab

import (
	"fmt"
	"net/netip"
	"slices"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/topo"
)

// planeWeights returns a row's weights by plane of the fabric, with 0 in a plane to which the row's source group is not
// connected.
func planeWeights(p *topo.Fabric, d *farev1.DestinationWeights) []uint32 {
	w := make([]uint32, p.Planes)
	for i := range w {
		for _, plane := range d.Planes {
			if plane.Plane == p.PlaneName(i) {
				w[i] = plane.Weight
			}
		}
	}
	return w
}

// waysOf returns the ways of a server that a row describes: one from each source group with a loopback among the row's
// sources.
func waysOf(p *topo.Fabric, server int, d *farev1.DestinationWeights) (all []topo.Way, err error) {
	dst, err := netip.ParsePrefix(d.Destination)
	if err != nil {
		return nil, err
	}
	for _, g := range p.GroupsAt(server) {
		if slices.ContainsFunc(p.LoopbacksOf(p.Groups()[g]), func(l netip.Prefix) bool { return slices.Contains(d.Sources, l.String()) }) {
			all = append(all, topo.Way{Source: g, Destination: dst.Addr()})
		}
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("weights of %q, none of which is a loopback of %s", d.Sources, p.Server[server].Name)
	}
	return all, nil
}
