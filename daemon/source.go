package daemon

import (
	"net/netip"
	"slices"

	"github.com/fared/fared/daemon/internal/dataplane"
	"github.com/fared/fared/daemon/internal/status"
	"github.com/fared/fared/fare"
	"github.com/fared/fared/wecmp"
)

// source shows the loop's state to the status; its methods run on the loop's goroutine.
type source struct{ *loop }

// statusLayout is what the configuration fixes of the status.
func (l *loop) statusLayout() status.Layout {
	out := status.Layout{Sources: slices.Clone(l.core.cfg.Loopbacks)}
	for p, name := range l.core.layout.planes {
		plane := status.LayoutPlane{Name: name}
		for i := range l.core.layout.subPorts {
			if l.core.layout.subPorts[i].plane == p {
				plane.SubPorts = append(plane.SubPorts, l.core.layout.subPorts[i].Device)
			}
		}
		out.Planes = append(out.Planes, plane)
	}
	if l.core.engine != nil {
		planner := l.core.planner
		out.Ports = func(src, dst netip.Addr, v *status.Vector, buf []uint16) ([]uint16, string) {
			places := make([]wecmp.Place, len(v.Slots))
			for i, s := range v.Slots {
				places[i] = wecmp.Place{Plane: s.Plane, SubPort: s.SubPort}
			}
			ports, placement := planner.Ports(src, dst, places, buf)
			return ports, placement.String()
		}
	}
	return out
}

// Vector implements status.Source.
func (s source) Vector(id uint32) (status.Vector, bool) {
	v, ok := s.core.engine.Vector(id)
	if !ok {
		return status.Vector{}, false
	}
	out := status.Vector{Reachable: v.Reachable, Reason: v.Reason, Planes: make([]status.VectorPlane, len(v.Weights))}
	group := s.effects.inEffect(dataplane.Object{Kind: dataplane.KindGroup, Group: id})
	for p := range out.Planes {
		out.Planes[p] = status.VectorPlane{
			Weight: v.Weights[p], Bandwidth: v.Bandwidths[p], InEffect: group && s.subPortsInEffect(p), SubPorts: slices.Clone(v.SubPortWeights[p]),
		}
		if v.Weights[p] == 0 {
			out.Planes[p].Reason = s.planeReason(p)
		}
	}
	for _, slot := range v.Slots {
		out.Slots = append(out.Slots, status.Slot{Plane: slot.Plane, SubPort: slot.SubPort, Share: slot.SharePPB, Drain: slot.Drain})
	}
	return out, true
}

// subPortsInEffect says whether the data plane has taken the state of all of a plane's sub-ports.
func (l *loop) subPortsInEffect(plane int) bool {
	for i := range l.core.layout.subPorts {
		sp := &l.core.layout.subPorts[i]
		if sp.plane == plane && !l.effects.inEffect(dataplane.Object{Kind: dataplane.KindSubPort, SubPort: sp.Device}) {
			return false
		}
	}
	return true
}

// planeReason says why a plane carries nothing.
func (l *loop) planeReason(plane int) string {
	reason := ""
	for i := range l.core.layout.subPorts {
		if l.core.layout.subPorts[i].plane != plane {
			continue
		}
		if r := l.subPortReason(i); r == "" {
			return "no usable path through this plane"
		} else if reason == "" {
			reason = r
		}
	}
	return reason
}

// subPortReason says why a sub-port does not count; "" when it does.
func (l *loop) subPortReason(i int) string {
	p := &l.core.subPorts[i]
	switch {
	case l.drained(i):
		return "drained"
	case !p.link:
		return l.lanes[i].Reason
	case p.established == 0:
		return "no session established"
	case p.speed == 0:
		return "speed unknown: set speed in the configuration"
	}
	return ""
}

// drained says whether a sub-port is under a drain of its own, of its plane, or of every leaf it leads to.
func (l *loop) drained(i int) bool {
	sp := &l.core.layout.subPorts[i]
	for _, d := range l.core.drains {
		if d.target.SubPort == sp.Device || d.target.Plane == l.core.layout.planes[sp.plane] {
			return true
		}
	}
	sessions, covered := 0, 0
	for s := range l.core.sessions {
		if l.core.sessions[s].subPort != i {
			continue
		}
		sessions++
		if slices.ContainsFunc(l.core.drains, func(d drain) bool { return d.target.Leaf.IsValid() && d.target.Leaf == l.core.sessions[s].node }) {
			covered++
		}
	}
	return sessions > 0 && covered == sessions
}

// Destination implements status.Source.
func (s source) Destination(prefix netip.Prefix) (status.Destination, bool) {
	a, ok := s.effects.destinations[prefix]
	if !ok {
		return status.Destination{}, false
	}
	return status.Destination{
		Vector: a.vector, SlotsMoved: a.moved,
		InEffect: s.effects.inEffect(dataplane.Object{Kind: dataplane.KindDestination, Destination: prefix}),
	}, true
}

// Planes implements status.Source.
func (s source) Planes() []status.Plane {
	out := make([]status.Plane, len(s.core.layout.planes))
	for p, name := range s.core.layout.planes {
		out[p].Name = name
		out[p].Drained = slices.ContainsFunc(s.core.drains, func(d drain) bool { return d.target.Plane == name })
	}
	for i := range s.core.layout.subPorts {
		sp := &s.core.layout.subPorts[i]
		view := status.SubPort{
			Device: sp.Device, Carrier: s.core.subPorts[i].link, Drained: s.drained(i), Speed: uint64(s.core.subPorts[i].speed),
			SpeedSource: s.lanes[i].SpeedSource, Reason: s.subPortReason(i),
		}
		for k := range s.core.layout.sessions {
			if s.core.layout.sessions[k].subPort == i {
				view.Sessions = append(view.Sessions, s.core.layout.sessions[k].Name)
			}
		}
		p := &out[sp.plane]
		p.Up = p.Up || view.Counts()
		p.SubPorts = append(p.SubPorts, view)
	}
	return out
}

// Sessions implements status.Source.
func (s source) Sessions() []status.Session {
	out := make([]status.Session, len(s.core.layout.sessions))
	for i := range out {
		l := &s.core.layout.sessions[i]
		st := s.d.speaker.Status(i)
		routes := s.core.table.SessionRoutes(i)
		v := status.Session{
			Name: l.Name, Plane: s.core.layout.planes[l.plane], Device: s.core.layout.subPorts[l.subPort].Device,
			PeerAS: st.PeerAS, PeerID: st.PeerID, State: st.State.String(), Since: st.Since, Generation: st.Generation, Flaps: s.sessions[i].flaps,
			Received: uint64(routes.Received), Used: uint64(routes.Used), Advertised: uint64(st.Advertised), Reason: st.Reason,
			EndOfRIB: s.core.sessions[i].eorDone(l),
		}
		for reason, n := range routes.Ignored {
			if n > 0 {
				v.Ignored = append(v.Ignored, status.Count{Name: fare.Reason(reason).String(), Value: uint64(n)})
			}
		}
		if st.Remote.IsValid() {
			v.Peer = st.Remote.Addr().String()
		} else if l.Peer.IsValid() {
			v.Peer = l.Peer.String()
		}
		if v.PeerAS == 0 {
			v.PeerAS = l.PeerAS
		}
		if st.State == speakerEstablished && s.core.sessions[i].advert != advertNormal {
			v.State = status.StateDrained
		}
		if f := s.sessions[i].fault; f != "" && v.Reason == "" {
			v.Reason = f
		}
		for _, c := range st.Dropped {
			v.Dropped = append(v.Dropped, status.Count{Name: c.Name, Value: c.Value})
		}
		out[i] = v
	}
	return out
}
