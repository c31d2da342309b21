package status

import (
	"cmp"
	"context"
	"net/netip"
	"slices"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// reasonNoVector is shown for a destination whose vector is unknown to the source.
const reasonNoVector = "no weights computed yet"

// awaitTimeout limits how long GetWeights waits for ports that depend on a query to the data plane; then it shows the
// ports known so far.
const awaitTimeout = time.Second

// render returns the message of a destination for a filter that selects it. Messages share plane lists, which must not
// be modified.
func (v *View) render(d *destination, f *filter) *farev1.DestinationWeights {
	group := &v.layout.Groups[d.key.Source]
	out := &farev1.DestinationWeights{
		Destination: d.key.String(),
		Revision:    v.revisionOf(d),
		SlotsMoved:  d.SlotsMoved,
		Sources:     group.names(),
	}
	w := v.vector(d.Vector)
	if w == nil {
		if out.Reason = d.Reason; out.Reason == "" {
			out.Reason = reasonNoVector
		}
		out.Planes = group.unreachable(out.Reason)
		return out
	}
	out.Reachable, out.Reason = w.Reachable, w.Reason
	if w.Reachable {
		out.Vector = d.Vector
	}
	out.Planes, out.NotInEffect = w.planes(group, d.InEffect), cmp.Or(w.NotInEffect, d.NotInEffect)
	out.BandwidthIgnored = w.BandwidthIgnored
	if !f.omitPairs {
		out.Pairs = w.pairs(v.layout, group, d.key.Addr(), d.Drain, f)
	}
	return out
}

// names lists the loopbacks of the source group.
func (g *LayoutGroup) names() []string {
	var out []string
	for _, p := range g.Sources {
		out = append(out, p.String())
	}
	return out
}

// unreachable returns every plane with weight 0.
func (g *LayoutGroup) unreachable(reason string) []*farev1.PlaneWeight {
	out := make([]*farev1.PlaneWeight, len(g.Planes))
	for i, p := range g.Planes {
		pw := &farev1.PlaneWeight{Plane: p.Name, Reason: reason}
		for _, device := range p.SubPorts {
			pw.SubPorts = append(pw.SubPorts, &farev1.SubPortWeight{Device: device})
		}
		out[i] = pw
	}
	return out
}

// planes returns the vector's plane weights for destinations that are, or are not, themselves in effect. A vector is
// part of views of only one layout, and of one source group.
func (w *vector) planes(g *LayoutGroup, inEffect bool) []*farev1.PlaneWeight {
	cache := &w.pictures[0]
	if inEffect {
		cache = &w.pictures[1]
	}
	if p := cache.Load(); p != nil {
		return *p
	}
	out := make([]*farev1.PlaneWeight, len(g.Planes))
	for i, lp := range g.Planes {
		pw := &farev1.PlaneWeight{Plane: lp.Name, SubPorts: make([]*farev1.SubPortWeight, len(lp.SubPorts))}
		var vp VectorPlane
		if i < len(w.Planes) {
			vp = w.Planes[i]
		}
		pw.Weight, pw.BandwidthBps, pw.Reason = vp.Weight, vp.Bandwidth, vp.Reason
		pw.InEffect = inEffect && vp.InEffect
		for j, device := range lp.SubPorts {
			pw.SubPorts[j] = &farev1.SubPortWeight{Device: device}
			if j < len(vp.SubPorts) {
				pw.SubPorts[j].Weight = vp.SubPorts[j]
			}
		}
		out[i] = pw
	}
	cache.Store(&out) // of two concurrent stores, either is correct
	return out
}

// pairs returns the slots of every pair of the destination with a source of its family.
func (w *vector) pairs(l *Layout, g *LayoutGroup, dst netip.Addr, drain []uint16, f *filter) []*farev1.PairSlots {
	if l.Ports == nil || len(w.Slots) == 0 {
		return nil
	}
	var out []*farev1.PairSlots
	var buf [128]uint16
	for _, p := range g.pairsOf(dst, f.sources) {
		src := p.Addr()
		ports, placement := l.Ports(FlowService{}, src, dst, &w.Vector, buf[:0])
		pair := &farev1.PairSlots{Source: p.String(), PortPlacement: placement, Slots: make([]*farev1.Slot, len(w.Slots))}
		slots := make([]farev1.Slot, len(w.Slots))
		for i, s := range w.Slots {
			m := &slots[i]
			m.Slot, m.SharePpb, m.DrainBeforeMove = uint32(i), s.Share, s.Drain || slices.Contains(drain, uint16(i))
			if s.Plane >= 0 && s.Plane < len(g.Planes) {
				lp := &g.Planes[s.Plane]
				m.Plane = lp.Name
				if s.SubPort >= 0 && s.SubPort < len(lp.SubPorts) {
					m.Device = lp.SubPorts[s.SubPort]
				}
			}
			if i < len(ports) {
				m.SourcePort = uint32(ports[i])
			}
			pair.Slots[i] = m
		}
		for _, to := range f.services {
			pair.Services = append(pair.Services, w.toward(l, to, src, dst))
		}
		out = append(out, pair)
	}
	return out
}

// toward returns the source ports of a pair's slots for the flows to a service.
func (w *vector) toward(l *Layout, to FlowService, src, dst netip.Addr) *farev1.ServicePorts {
	var buf [128]uint16
	ports, placement := l.Ports(to, src, dst, &w.Vector, buf[:0])
	out := &farev1.ServicePorts{
		Service:     &farev1.Service{Protocol: uint32(to.Protocol), Port: uint32(to.Port)},
		SourcePorts: make([]uint32, len(ports)), PortPlacement: placement,
	}
	for i, port := range ports {
		out.SourcePorts[i] = uint32(port)
	}
	return out
}

// pairsOf returns the sources that have pairs with a destination, limited to the given sources unless these are empty.
func (g *LayoutGroup) pairsOf(dst netip.Addr, sources []netip.Addr) (out []netip.Prefix) {
	for _, p := range g.Sources {
		src := p.Addr()
		if src.Is4() == dst.Is4() && src != dst && (len(sources) == 0 || slices.Contains(sources, src)) {
			out = append(out, p)
		}
	}
	return out
}

// await waits for at most awaitTimeout until the ports of a destination's pairs are final.
func (l *Layout) await(ctx context.Context, dst netip.Addr, f *filter) {
	if l.Await == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, awaitTimeout)
	defer cancel()
	for i := range l.Groups {
		for _, p := range l.Groups[i].pairsOf(dst, f.sources) {
			l.Await(ctx, FlowService{}, p.Addr(), dst)
			for _, to := range f.services {
				l.Await(ctx, to, p.Addr(), dst)
			}
		}
	}
}

func (e *Explanation) render() *farev1.Explanation {
	out := &farev1.Explanation{Rules: e.Rules}
	for _, r := range e.Routes {
		m := &farev1.ExplainedRoute{
			Session: r.Session, Plane: r.Plane, Device: r.Device, Node: r.Node,
			AdvertisedBps: r.Advertised, HasBandwidth: r.Known, AsPath: r.ASPath, Reason: r.Reason,
		}
		for _, c := range r.Communities {
			m.Communities = append(m.Communities, &farev1.ExplainedCommunity{Raw: c.Raw, Meaning: c.Meaning, Reason: c.Reason})
		}
		out.Routes = append(out.Routes, m)
	}
	for _, p := range e.Planes {
		m := &farev1.ExplainedPlane{Plane: p.Plane, BandwidthBps: p.Bandwidth, Rule: p.Rule}
		for _, n := range p.Nodes {
			m.Nodes = append(m.Nodes, &farev1.ExplainedNode{
				Node: n.Node, Devices: n.Devices, LocalBps: n.Local, AdvertisedBps: n.Advertised, HasBandwidth: n.Known, BandwidthBps: n.Bandwidth,
			})
		}
		out.Planes = append(out.Planes, m)
	}
	return out
}
