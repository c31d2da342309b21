package daemon

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/fared/fared/daemon/internal/dataplane"
	"github.com/fared/fared/daemon/internal/speaker"
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
		out.Await = l.ports.await
		out.Ports = func(src, dst netip.Addr, v *status.Vector, buf []uint16) ([]uint16, string) {
			places := make([]wecmp.Place, len(v.Slots))
			for i, s := range v.Slots {
				places[i] = wecmp.Place{Plane: s.Plane, SubPort: s.SubPort}
			}
			ports, placement := l.ports.choose(src, dst, places, buf)
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
	view := s.core.table.Group(fare.GroupID(v.Group))
	out := status.Vector{Reachable: v.Reachable, Planes: make([]status.VectorPlane, len(v.Weights))}
	if !v.Reachable {
		out.Reason = view.Reason.String()
	}
	group := s.effects.inEffect(dataplane.Object{Kind: dataplane.KindGroup, Group: id})
	for p := range out.Planes {
		out.Planes[p] = status.VectorPlane{
			Weight: v.Weights[p], Bandwidth: v.Bandwidths[p], InEffect: group && s.subPortsInEffect(p), SubPorts: slices.Clone(v.SubPortWeights[p]),
		}
		if r := view.Planes[p].Reason; r != fare.ReasonUsed {
			out.Planes[p].Reason = r.String()
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

// subPortReason says why a sub-port does not count; "" when it does.
func (l *loop) subPortReason(i int, view fare.SubPortView) string {
	switch {
	case view.Reason == fare.ReasonUsed:
		return ""
	case view.Reason == fare.ReasonLinkDown && l.lanes[i].Reason != "":
		return l.lanes[i].Reason
	case view.Reason == fare.ReasonSpeedUnknown:
		return "speed unknown: set speed in the configuration"
	}
	return view.Reason.String()
}

// Destination implements status.Source.
func (s source) Destination(prefix netip.Prefix) (status.Destination, bool) {
	a, ok := s.effects.destinations[prefix]
	if !ok {
		return status.Destination{}, false
	}
	return status.Destination{
		Vector: a.vector, SlotsMoved: a.moved, Drain: a.drain,
		InEffect: s.effects.inEffect(dataplane.Object{Kind: dataplane.KindDestination, Destination: prefix}),
	}, true
}

// Planes implements status.Source.
func (s source) Planes() []status.Plane {
	out := make([]status.Plane, len(s.core.layout.planes))
	for p, name := range s.core.layout.planes {
		view := s.core.table.Plane(p)
		out[p] = status.Plane{Name: name, Up: view.Up, Drained: view.Drained}
	}
	for i := range s.core.layout.subPorts {
		sp, view := &s.core.layout.subPorts[i], s.core.table.SubPort(i)
		shown := status.SubPort{
			Device: sp.Device, Carrier: view.Up, Drained: view.Drained || view.Reason == fare.ReasonDrained, Speed: uint64(view.Speed),
			SpeedSource: s.lanes[i].SpeedSource, Reason: s.subPortReason(i, view),
		}
		for k := range s.core.layout.sessions {
			if s.core.layout.sessions[k].subPort == i {
				shown.Sessions = append(shown.Sessions, s.core.layout.sessions[k].Name)
			}
		}
		out[sp.plane].SubPorts = append(out[sp.plane].SubPorts, shown)
	}
	return out
}

// Sessions implements status.Source.
func (s source) Sessions() []status.Session {
	views := s.core.table.Sessions(nil)
	out := make([]status.Session, len(views))
	for i := range out {
		l, view := &s.core.layout.sessions[i], &views[i]
		st := s.d.speaker.Status(i)
		v := status.Session{
			Name: l.Name, Plane: s.core.layout.planes[l.plane], Device: s.core.layout.subPorts[l.subPort].Device,
			PeerAS: st.PeerAS, PeerID: st.PeerID, State: st.State.String(), Since: st.Since, Generation: st.Generation, Flaps: st.Flaps,
			Received: view.Routes.Received, Used: view.Routes.Used, Ignored: counts(&view.Routes), Advertised: uint64(st.Advertised),
			Reason: st.Reason, BFD: st.BFD.State, BFDDetection: st.BFD.DetectionTime, EndOfRIB: view.Up && s.core.sessions[i].eorDone(l),
		}
		if v.Peer = l.Peer.String(); st.Remote.IsValid() {
			v.Peer = st.Remote.Addr().String()
		} else if !l.Peer.IsValid() {
			v.Peer = ""
		}
		if v.PeerAS == 0 {
			v.PeerAS = l.PeerAS
		}
		if st.State == speaker.Established && s.core.sessions[i].advert != advertNormal {
			v.State = status.StateDrained
		}
		if v.Reason == "" {
			v.Reason = s.faults[i]
		}
		for _, c := range st.Counters {
			if direction, reason, ok := strings.Cut(c.Name, "_dropped_"); ok {
				if direction == "out" {
					reason = "out_" + reason
				}
				v.Dropped = append(v.Dropped, status.Count{Name: reason, Value: c.Value})
			}
		}
		out[i] = v
	}
	return out
}

// Process implements status.Source.
func (s source) Process() status.Process {
	stats := s.core.table.Stats()
	out := status.Process{
		Role: s.core.cfg.Role.String(), RouterID: s.core.cfg.RouterID, AS: s.core.cfg.AS, Converged: s.core.Converged(), Ignored: counts(&stats.Events),
	}
	if s.core.ownLoopbacks > 0 {
		out.Ignored = append(out.Ignored, status.Count{Name: "own-loopback", Value: s.core.ownLoopbacks})
	}
	if s.d.client == nil {
		return out
	}
	out.WithoutLanding = uint64(s.ports.withoutLanding())
	st := s.d.client.Status()
	out.Dataplane = status.Dataplane{
		Connected: st.Connected, Name: st.Name, Version: st.Version, Address: s.core.cfg.Dataplane.Address, Pending: uint64(s.effects.pending), LastError: s.dpError,
	}
	if out.Dataplane.LastError == "" && st.LastError != nil {
		out.Dataplane.LastError = st.LastError.Error()
	}
	for class, n := range st.Counters.Sent {
		out.Dataplane.Operations = append(out.Dataplane.Operations, status.Operations{Level: dataplane.Class(class).String(), Sent: n})
	}
	out.Dataplane.Operations = append(out.Dataplane.Operations, status.Operations{Level: "all", InEffect: st.Counters.InEffect, Refused: st.Counters.Refused})
	out.Queues = []status.Count{{Name: "dataplane", Value: uint64(st.Queued)}, {Name: "dataplane-in-flight", Value: uint64(st.InFlight)}}
	return out
}

// counts lists what of a tally was not used, by reason.
func counts(t *fare.Tally) []status.Count {
	var out []status.Count
	for r := range fare.Reasons {
		if n := t.Reason(r); n > 0 {
			out = append(out, status.Count{Name: r.String(), Value: n})
		}
	}
	return out
}
