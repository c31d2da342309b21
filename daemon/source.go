package daemon

import (
	"cmp"
	"context"
	"net/netip"
	"slices"
	"strings"

	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/daemon/internal/core"
	"github.com/fared/fared/daemon/internal/dpclient"
	"github.com/fared/fared/daemon/internal/speaker"
	"github.com/fared/fared/daemon/internal/status"
	"github.com/fared/fared/fare"
	"github.com/fared/fared/wecmp"
)

// source implements status.Source on the loop's state; its methods run on the loop's goroutine.
type source struct{ *loop }

// statusLayout returns the part of the status that the configuration determines.
func (l *loop) statusLayout() status.Layout {
	var out status.Layout
	out.Planes = slices.Clone(l.core.Layout().Planes)
	for i := range l.core.Layout().SubPorts {
		sp := &l.core.Layout().SubPorts[i]
		out.SubPorts = append(out.SubPorts, status.LayoutSubPort{Device: sp.Device, Plane: sp.Plane, Netns: sp.Netns})
	}
	for i := range l.core.Layout().Sources {
		s := &l.core.Layout().Sources[i]
		group := status.LayoutGroup{Sources: slices.Clone(s.Loopbacks)}
		for p, name := range s.Planes {
			plane := status.LayoutPlane{Name: name}
			for _, at := range s.OfPlane[p] {
				plane.SubPorts = append(plane.SubPorts, s.SubPorts[at].Device)
			}
			group.Planes = append(group.Planes, plane)
		}
		out.Groups = append(out.Groups, group)
	}
	if l.core.Config().Forwards() {
		out.AskedPorts = l.core.FlowHash().Algorithm == core.FlowHashAsk
		out.Await = func(ctx context.Context, to status.FlowService, src, dst netip.Addr) {
			l.ports.await(ctx, wecmp.Service(to), src, dst)
		}
		out.Ports = func(to status.FlowService, src, dst netip.Addr, v *status.Vector, buf []uint16) ([]uint16, string) {
			places := make([]wecmp.Place, len(v.Slots))
			for i, s := range v.Slots {
				places[i] = wecmp.Place{Plane: s.Plane, SubPort: s.SubPort}
			}
			ports, placement := l.ports.choose(wecmp.Service(to), src, dst, places, buf)
			return ports, placement.String()
		}
	}
	if cfg := l.core.Config(); cfg.Role == fare.RoleServer {
		out.Services, out.SamePorts = steered(&cfg.Dataplane), l.ports.samePorts()
	}
	return out
}

// steered returns the services that the data plane of a server steers: each of udp_ports, each of tcp_ports, the range.
func steered(d *config.Dataplane) []status.ServiceRange {
	var out []status.ServiceRange
	for _, port := range d.UDPPorts {
		out = append(out, status.ServiceRange{Protocol: wecmp.ProtocolUDP, First: port, Last: port})
	}
	for _, port := range d.TCPPorts {
		out = append(out, status.ServiceRange{Protocol: wecmp.ProtocolTCP, First: port, Last: port})
	}
	// A valid configuration has a valid range.
	if first, last, err := d.TCPRange(); err == nil && first > 0 {
		out = append(out, status.ServiceRange{Protocol: wecmp.ProtocolTCP, First: first, Last: last})
	}
	return out
}

// Vector implements status.Source.
func (s source) Vector(id uint32) (status.Vector, bool) {
	v, ok := s.core.Vector(id)
	if !ok {
		return status.Vector{}, false
	}
	source, _ := s.core.OwnerOf(id)
	view := s.core.Group(source, v.Group)
	out := status.Vector{Reachable: v.Reachable, Planes: make([]status.VectorPlane, len(v.Weights))}
	if !v.Reachable {
		out.Reason = view.Reason.String()
	}
	out.BandwidthIgnored = s.ignoredText(source, view.Ignored)
	object := dpclient.Object{Kind: dpclient.KindVector, Vector: id}
	group := s.damage == "" && s.shown.inEffect(object)
	if out.NotInEffect = cmp.Or(s.subPortRefusal(source), s.shown.reason(object)); s.damage != "" {
		out.NotInEffect = "damaged: " + s.damage
	}
	for p := range out.Planes {
		out.Planes[p] = status.VectorPlane{
			Weight: v.Weights[p], Bandwidth: v.Bandwidths[p], InEffect: group && s.subPortsInEffect(source, p), SubPorts: slices.Clone(v.SubPortWeights[p]),
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

// subPortsInEffect reports whether the state of all sub-ports of a source group's plane is in effect.
func (l *loop) subPortsInEffect(source, plane int) bool {
	at := &l.core.Layout().Sources[source]
	for _, i := range at.OfPlane[plane] {
		if !l.shown.inEffect(dpclient.Object{Kind: dpclient.KindSubPort, SubPort: at.SubPorts[i].Device}) {
			return false
		}
	}
	return true
}

// subPortRefusal returns the first sub-port of a source group whose state the data plane refused, with the reason, or
// "" if there is none.
func (l *loop) subPortRefusal(source int) string {
	for _, sp := range l.core.Layout().Sources[source].SubPorts {
		if reason := l.shown.reason(dpclient.Object{Kind: dpclient.KindSubPort, SubPort: sp.Device}); reason != "" {
			return "sub-port " + sp.Device + " " + reason
		}
	}
	return ""
}

// subPortReason returns why a sub-port does not count, or "" if it does, and whether the reason lasts until an operator
// acts.
func (l *loop) subPortReason(i int, view fare.SubPortView) (reason string, persistent bool) {
	switch {
	case view.Reason == fare.ReasonUsed:
		return "", false
	case view.Reason == fare.ReasonLinkDown && l.links[i].Reason != "":
		return l.links[i].Reason, l.links[i].Persistent
	case view.Reason == fare.ReasonSpeedUnknown:
		return "speed unknown: set speed in the configuration", true
	}
	return view.Reason.String(), false
}

// Destination implements status.Source.
func (s source) Destination(shown status.Key) (status.Destination, bool) {
	if shown.Source >= len(s.core.Layout().Sources) { // of a layout before a reload
		return status.Destination{}, false
	}
	a := s.shown.destination(s.key(shown.Source, shown.Prefix))
	if a == nil {
		return status.Destination{}, false
	}
	return status.Destination{
		Vector: a.vector, SlotsMoved: a.moved, Drain: a.drain, InEffect: a.state == effectDone, NotInEffect: a.reason,
	}, true
}

// Planes implements status.Source.
func (s source) Planes() []status.Plane {
	out := make([]status.Plane, len(s.core.Layout().Planes))
	for p, name := range s.core.Layout().Planes {
		view := s.core.Plane(p)
		out[p] = status.Plane{Name: name, Up: view.Up, Drained: view.Drained}
	}
	for i := range s.core.Layout().SubPorts {
		sp, view := &s.core.Layout().SubPorts[i], s.core.SubPort(i)
		drained := view.Drained || view.Reason == fare.ReasonDrained || s.core.LeafDrained(i)
		draining := drained && !s.core.OutOfService(i)
		if plane := &out[sp.Plane]; draining && (plane.Drained || plane.Draining) {
			plane.Drained, plane.Draining = false, true
		}
		shown := status.SubPort{
			Device: sp.Device, Carrier: view.Up, Drained: drained && !draining, Draining: draining, Speed: uint64(view.Speed),
			SpeedSource: s.links[i].SpeedSource, Netdev: s.links[i].Netdev, HeldRises: s.links[i].damping.held,
		}
		shown.Reason, shown.Persistent = s.subPortReason(i, view)
		shown.Loopbacks = s.loopbacksOf(sp.Device)
		if link := &s.links[i]; link.held && link.damped {
			shown.DampedUntil = link.holdUntil
		}
		for k := range s.core.Layout().Sessions {
			if s.core.Layout().Sessions[k].SubPort == i {
				shown.Sessions = append(shown.Sessions, s.core.Layout().Sessions[k].Name)
			}
		}
		out[sp.Plane].SubPorts = append(out[sp.Plane].SubPorts, shown)
	}
	return out
}

// loopbacksOf returns the loopbacks that a sub-port serves, nil if there is one source group.
func (s source) loopbacksOf(device string) (all []netip.Prefix) {
	groups := s.core.Layout().Sources
	if len(groups) < 2 {
		return nil
	}
	for i := range groups {
		if slices.ContainsFunc(groups[i].SubPorts, func(sp core.LayoutSubPort) bool { return sp.Device == device }) {
			all = append(all, groups[i].Loopbacks...)
		}
	}
	return all
}

// Sessions implements status.Source.
func (s source) Sessions() []status.Session {
	views := s.core.SessionViews()
	out := make([]status.Session, len(views))
	for i := range out {
		l, view := &s.core.Layout().Sessions[i], &views[i]
		st := s.d.speaker.Status(i)
		v := status.Session{
			Name: l.Name, Plane: s.core.Layout().Planes[l.Plane], Device: s.core.Layout().SubPorts[l.SubPort].Device,
			PeerAS: st.PeerAS, PeerID: st.PeerID, State: st.State.String(), Since: st.Since, Generation: st.Generation, Flaps: st.Flaps,
			Received: view.Routes.Received, Used: view.Routes.Used, Ignored: counts(&view.Routes), Advertised: uint64(st.Advertised),
			Reason: st.Reason, BFD: st.BFD.State, BFDDetection: st.BFD.DetectionTime, EndOfRIB: view.Up && s.core.SessionState(i).EndOfRIB,
			Dropped: drops(st.Counters),
		}
		if v.Peer = l.Peer.String(); st.Remote.IsValid() {
			v.Peer = st.Remote.Addr().String()
		} else if !l.Peer.IsValid() {
			v.Peer = ""
		}
		if v.PeerAS == 0 {
			v.PeerAS = l.PeerAS
		}
		if st.State == speaker.Established {
			switch draining, drained := s.core.SessionDrain(i); {
			case drained:
				v.State = status.StateDrained
			case draining:
				v.State = status.StateDraining
			}
		}
		if link := &s.links[l.SubPort]; st.State == speaker.Held && link.Absent {
			v.State, v.Reason = status.StateWaiting, link.Reason
		}
		// The fault of an established session is later than the end of the previous one: SessionUp clears faults.
		if st.State == speaker.Established {
			v.Fault = s.faults[i]
		}
		if fault := s.faults[i]; fault != "" && (v.Reason == "" || st.State == speaker.Established) {
			v.Reason = fault
		}
		out[i] = v
	}
	return out
}

// drops returns the drop counters of a session by reason; those of the outbound direction begin with "out_", those of
// BFD with "bfd_".
func drops(counters []speaker.Counter) []status.Count {
	var out []status.Count
	for _, c := range counters {
		if direction, reason, ok := strings.Cut(c.Name, "_dropped_"); ok {
			if direction != "in" {
				reason = direction + "_" + reason
			}
			out = append(out, status.Count{Name: reason, Value: c.Value})
		}
	}
	return out
}

// Process implements status.Source.
func (s source) Process() status.Process {
	out := status.Process{
		Role: s.core.Config().Role.String(), RouterID: s.core.Config().RouterID, AS: s.core.Config().AS, Converged: s.core.Converged(),
	}
	for r := range fare.Reasons {
		if n := s.core.Ignored(r); n > 0 {
			out.Ignored = append(out.Ignored, status.Count{Name: r.String(), Value: n})
		}
	}
	out.Drains = s.drains()
	for _, f := range s.sessionFaults() {
		out.Faults = append(out.Faults, f.Fault)
	}
	out.WithdrawnByRestart = s.core.Config().Role == fare.RoleServer && s.core.Config().BGP.RestartTime == 0
	if s.recorder != nil {
		out.Unrecorded = s.recorder.lost
	}
	if s.d.deps.LogDropped != nil {
		out.Unlogged = s.d.deps.LogDropped()
	}
	out.DrainsFailure, out.TracesDropped = s.d.drains.problem(), s.tracer.count()
	if s.d.table != nil {
		out.SlotTable = s.d.table.Health()
	}
	out.Conflicts, out.ClaimedLoopbacks = uint64(s.core.Conflicts()), uint64(s.core.ClaimedLoopbacks())
	if s.core.Config().Proof.Unproved == fare.UnprovedAvoid {
		for p, n := range s.core.AvoidedBy() {
			out.Avoided = append(out.Avoided, status.Count{Name: s.core.Layout().Planes[p], Value: uint64(n)})
		}
	}
	if n := s.core.OwnLoopbacks(); n > 0 {
		out.Ignored = append(out.Ignored, status.Count{Name: "own-loopback", Value: n})
	}
	if s.d.client == nil {
		return out
	}
	out.WithoutLanding = uint64(s.ports.withoutLanding())
	st := s.d.client.Status()
	out.Dataplane = status.Dataplane{
		Connected: st.Connected, Name: st.Name, Version: st.Version, Address: s.core.Config().Dataplane.Address, LastError: s.dpError,
		Pending: uint64(s.shown.counts[effectPending]), Approximate: uint64(s.shown.counts[effectApproximate]),
		Refused: uint64(s.shown.counts[effectRefused]), Damage: s.damage, Repairs: st.Repairs,
	}
	for _, x := range s.limitations {
		out.Dataplane.Limitations = append(out.Dataplane.Limitations, status.Limitation{Reason: x.Reason, Text: x.Text, Remedy: x.Remedy})
	}
	if !st.Connected && out.Dataplane.LastError == "" && st.LastError != nil {
		out.Dataplane.LastError = st.LastError.Error()
	}
	for class, n := range st.Counters.Sent {
		out.Dataplane.Operations = append(out.Dataplane.Operations, status.Operations{
			Level: dpclient.Class(class).String(), Sent: n, InEffect: st.Counters.InEffect[class], Refused: st.Counters.Refused[class],
		})
	}
	out.Queues = []status.Count{{Name: "dataplane", Value: uint64(st.Queued)}, {Name: "dataplane-in-flight", Value: uint64(st.InFlight)}}
	return out
}

// counts lists the unused items of a tally by reason.
func counts(t *fare.Tally) []status.Count {
	var out []status.Count
	for r := range fare.Reasons {
		if n := t.Reason(r); n > 0 {
			out = append(out, status.Count{Name: r.String(), Value: n})
		}
	}
	return out
}
