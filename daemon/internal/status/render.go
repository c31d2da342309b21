package status

import (
	"context"
	"net/netip"
	"slices"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// reasonNoVector is shown for a destination whose vector the source does not know.
const reasonNoVector = "no weights computed yet"

// awaitTimeout is how long GetWeights waits for ports that have to be asked for; then it shows what it has.
const awaitTimeout = time.Second

// render makes the picture of a destination. Plane lists are shared between messages: nobody may change them.
func (v *View) render(d *destination, sources []netip.Addr, omitPairs bool) *farev1.DestinationWeights {
	out := &farev1.DestinationWeights{
		Destination: d.prefix.String(),
		Revision:    v.revisionOf(d),
		SlotsMoved:  d.SlotsMoved,
	}
	w := v.vector(d.Vector)
	if w == nil {
		if out.Reason = d.Reason; out.Reason == "" {
			out.Reason = reasonNoVector
		}
		out.Planes = v.layout.unreachable(out.Reason)
		return out
	}
	out.Reachable, out.Reason = w.Reachable, w.Reason
	if w.Reachable {
		out.Group = d.Vector
	}
	out.Planes = w.planes(v.layout, d.InEffect)
	if !omitPairs {
		out.Pairs = w.pairs(v.layout, d.prefix.Addr(), d.Drain, sources)
	}
	return out
}

// unreachable is every plane with nothing to carry.
func (l *Layout) unreachable(reason string) []*farev1.PlaneWeight {
	out := make([]*farev1.PlaneWeight, len(l.Planes))
	for i, p := range l.Planes {
		pw := &farev1.PlaneWeight{Plane: p.Name, Reason: reason}
		for _, device := range p.SubPorts {
			pw.SubPorts = append(pw.SubPorts, &farev1.SubPortWeight{Device: device})
		}
		out[i] = pw
	}
	return out
}

// planes returns the vector's plane weights for destinations that are, or are not, themselves in effect. A vector is
// part of views of one layout only.
func (w *vector) planes(l *Layout, inEffect bool) []*farev1.PlaneWeight {
	cache := &w.pictures[0]
	if inEffect {
		cache = &w.pictures[1]
	}
	if p := cache.Load(); p != nil {
		return *p
	}
	out := make([]*farev1.PlaneWeight, len(l.Planes))
	for i, lp := range l.Planes {
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
	cache.Store(&out) // of two at once, either is right
	return out
}

// pairs returns the slots of every pair of a source of the destination's family and the destination.
func (w *vector) pairs(l *Layout, dst netip.Addr, drain []uint16, sources []netip.Addr) []*farev1.PairSlots {
	if l.Ports == nil || len(w.Slots) == 0 {
		return nil
	}
	var out []*farev1.PairSlots
	var buf [128]uint16
	for _, p := range l.pairsOf(dst, sources) {
		src := p.Addr()
		ports, placement := l.Ports(src, dst, &w.Vector, buf[:0])
		pair := &farev1.PairSlots{Source: p.String(), PortPlacement: placement, Slots: make([]*farev1.Slot, len(w.Slots))}
		slots := make([]farev1.Slot, len(w.Slots))
		for i, s := range w.Slots {
			m := &slots[i]
			m.Slot, m.SharePpb, m.DrainBeforeMove = uint32(i), s.Share, s.Drain || slices.Contains(drain, uint16(i))
			if s.Plane >= 0 && s.Plane < len(l.Planes) {
				lp := &l.Planes[s.Plane]
				m.Plane = lp.Name
				if s.SubPort >= 0 && s.SubPort < len(lp.SubPorts) {
					m.SubPort = lp.SubPorts[s.SubPort]
				}
			}
			if i < len(ports) {
				m.UdpSourcePort = uint32(ports[i])
			}
			pair.Slots[i] = m
		}
		out = append(out, pair)
	}
	return out
}

// pairsOf yields the sources that have pairs with a destination, of those asked for; none asked for: of all.
func (l *Layout) pairsOf(dst netip.Addr, sources []netip.Addr) (out []netip.Prefix) {
	for _, p := range l.Sources {
		src := p.Addr()
		if src.Is4() == dst.Is4() && src != dst && (len(sources) == 0 || slices.Contains(sources, src)) {
			out = append(out, p)
		}
	}
	return out
}

// await waits, not for long, until the ports of a destination's pairs are all that they will be.
func (l *Layout) await(ctx context.Context, dst netip.Addr, sources []netip.Addr) {
	if l.Await == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, awaitTimeout)
	defer cancel()
	for _, p := range l.pairsOf(dst, sources) {
		l.Await(ctx, p.Addr(), dst)
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
