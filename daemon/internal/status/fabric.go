package status

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"unicode"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// fabricService implements fare.v1.FabricService.
type fabricService struct {
	farev1.UnimplementedFabricServiceServer
	s *Service
}

// GetStatus implements fare.v1.FabricService.
func (f *fabricService) GetStatus(ctx context.Context, _ *farev1.GetStatusRequest) (*farev1.GetStatusResponse, error) {
	r, err := f.s.c.Reader.Report(ctx)
	if err != nil {
		return nil, loopError(ctx, err)
	}
	tally, _ := r.View.Tally()
	out := &farev1.GetStatusResponse{
		Version: f.s.c.Version, Instance: f.s.c.Reader.Instance(), Revision: r.View.revision,
		Role: r.Process.Role, RouterId: addrString(r.Process.RouterID), AsNumber: r.Process.AS, Converged: r.Process.Converged,
		UptimeNs:           uint64(max(0, f.s.c.Now().Sub(f.s.c.Started))),
		SessionsConfigured: uint32(len(r.Sessions)), SessionsEstablished: uint32(r.Established()),
		Destinations: uint32(tally.Destinations), DestinationsReachable: uint32(tally.Reachable), Vectors: uint32(r.View.Vectors()),
		Dataplane:         r.Process.Dataplane.render(),
		SlotTableFailures: r.Process.SlotTable.Failures, SlotTableError: r.Process.SlotTable.Failure, DrainsError: r.Process.DrainsFailure,
		WithdrawnByRestart: r.Process.WithdrawnByRestart,
		Counters: counters(
			labeled{"guard_dropped", r.Dropped()}, labeled{"routes_ignored", r.Ignored()}, labeled{"inputs_ignored", r.Process.Ignored},
			labeled{"recording_missing", nonzero(Count{"unwritten", r.Process.Unrecorded})},
			labeled{"log_lines_dropped", nonzero(Count{"slow-reader", r.Process.Unlogged})},
			labeled{"conflicts", nonzero(Count{"destinations", r.Process.Conflicts}, Count{"loopbacks", r.Process.ClaimedLoopbacks})},
		),
	}
	for _, p := range r.View.layout.sources() {
		out.Loopbacks = append(out.Loopbacks, p.String())
	}
	if f.s.c.Proofs != nil {
		out.Proof = f.s.c.Proofs.Status()
	}
	for _, x := range r.Process.Faults {
		out.Faults = append(out.Faults, &farev1.Fault{
			Kind: x.Kind, Plane: x.Plane, Session: x.Session, Reason: x.Reason, Routes: x.Routes, Example: x.Example.String(), Remedy: x.Remedy,
		})
	}
	for _, d := range r.Process.Drains {
		out.Drains = append(out.Drains, &farev1.DrainStatus{
			Target: d.Target.render(), Stage: d.Stage, Waiting: uint32(d.Waiting), WaitsFor: d.WaitsFor, By: d.By, Reason: d.Reason,
		})
		if !d.Since.IsZero() {
			out.Drains[len(out.Drains)-1].SinceNs = uint64(d.Since.UnixNano())
		}
	}
	return out, nil
}

// nonzero returns the counts that are not 0.
func nonzero(counts ...Count) []Count {
	return slices.DeleteFunc(counts, func(c Count) bool { return c.Value == 0 })
}

func (t DrainTarget) render() *farev1.DrainTarget {
	switch {
	case t.Plane != "":
		return &farev1.DrainTarget{Target: &farev1.DrainTarget_Plane{Plane: t.Plane}}
	case t.Leaf != "":
		return &farev1.DrainTarget{Target: &farev1.DrainTarget_Leaf{Leaf: t.Leaf}}
	}
	return &farev1.DrainTarget{Target: &farev1.DrainTarget_SubPort{SubPort: t.SubPort}}
}

// Established returns the number of established sessions, including drained ones.
func (r *Report) Established() int {
	n := 0
	for i := range r.Sessions {
		if r.Sessions[i].Up() {
			n++
		}
	}
	return n
}

// Dropped returns the guards' drops since start, by reason, sorted, over all sessions.
func (r *Report) Dropped() []Count {
	return r.sum(func(s *Session) []Count { return s.Dropped })
}

// Ignored returns the unused routes among those held now, by reason, sorted, over all sessions.
func (r *Report) Ignored() []Count {
	return r.sum(func(s *Session) []Count { return s.Ignored })
}

func (r *Report) sum(of func(*Session) []Count) []Count {
	var out []Count
	for i := range r.Sessions {
		out = merge(out, of(&r.Sessions[i]))
	}
	slices.SortFunc(out, func(a, b Count) int { return strings.Compare(a.Name, b.Name) })
	return out
}

// merge adds counts to those with the same name.
func merge(into, counts []Count) []Count {
	for _, c := range counts {
		i := slices.IndexFunc(into, func(o Count) bool { return o.Name == c.Name })
		if i < 0 {
			i, into = len(into), append(into, Count{Name: c.Name})
		}
		into[i].Value += c.Value
	}
	return into
}

// labeled holds counts of one name by reason.
type labeled struct {
	name   string
	counts []Count
}

// counters returns name{reason="..."} for each count, sorted.
func counters(all ...labeled) []*farev1.Counter {
	var out []*farev1.Counter
	for _, l := range all {
		for _, c := range l.counts {
			out = append(out, &farev1.Counter{Name: fmt.Sprintf("%s{reason=%q}", l.name, c.Name), Value: c.Value})
		}
	}
	slices.SortStableFunc(out, func(a, b *farev1.Counter) int { return strings.Compare(a.Name, b.Name) })
	return out
}

func addrString(a netip.Addr) string {
	if !a.IsValid() {
		return ""
	}
	return a.String()
}

func (d *Dataplane) render() *farev1.DataplaneStatus {
	out := &farev1.DataplaneStatus{
		Connected: d.Connected, Name: d.Name, Address: d.Address, OperationsPending: d.Pending, LastError: d.LastError,
		Approximate: d.Approximate, Refused: d.Refused, Damage: d.Damage, Repairs: d.Repairs,
	}
	for _, x := range d.Limitations {
		out.Limitations = append(out.Limitations, &farev1.Limitation{Reason: x.Reason, Text: x.Text, Remedy: x.Remedy})
	}
	for _, o := range d.Operations {
		out.OperationsSent += o.Sent
		out.OperationsInEffect += o.InEffect
		out.OperationsRefused += o.Refused
	}
	return out
}

// ListSessions implements fare.v1.FabricService.
func (f *fabricService) ListSessions(ctx context.Context, _ *farev1.ListSessionsRequest) (*farev1.ListSessionsResponse, error) {
	r, err := f.s.c.Reader.Report(ctx)
	if err != nil {
		return nil, loopError(ctx, err)
	}
	out := &farev1.ListSessionsResponse{Revision: r.View.revision}
	now := f.s.c.Now()
	for _, s := range r.Sessions {
		m := &farev1.Session{
			Name: s.Name, Plane: s.Plane, Device: s.Device, PeerAddress: s.Peer, PeerAs: s.PeerAS, PeerRouterId: addrString(s.PeerID),
			State: s.State, Generation: s.Generation, EndOfRib: s.EndOfRIB, Reason: s.Reason, Fault: s.Fault,
			RoutesReceived: uint32(s.Received), RoutesUsed: uint32(s.Used), RoutesAdvertised: uint32(s.Advertised),
			Counters: counters(labeled{"guard_dropped", s.Dropped}, labeled{"routes_ignored", s.Ignored}),
			BfdState: s.BFD, BfdDetectionTimeNs: uint64(s.BFDDetection),
		}
		if !s.Since.IsZero() {
			m.StateAgeNs = uint64(max(0, now.Sub(s.Since)))
		}
		out.Sessions = append(out.Sessions, m)
	}
	return out, nil
}

// ListPlanes implements fare.v1.FabricService.
func (f *fabricService) ListPlanes(ctx context.Context, _ *farev1.ListPlanesRequest) (*farev1.ListPlanesResponse, error) {
	r, err := f.s.c.Reader.Report(ctx)
	if err != nil {
		return nil, loopError(ctx, err)
	}
	out := &farev1.ListPlanesResponse{Revision: r.View.revision}
	for _, p := range r.Planes {
		m := &farev1.Plane{Plane: p.Name, Up: p.Up, Drained: p.Drained, Draining: p.Draining, BandwidthBps: p.Bandwidth()}
		for _, s := range p.SubPorts {
			sp := &farev1.SubPort{
				Device: s.Device, Carrier: s.Carrier, Drained: s.Drained, Draining: s.Draining, SpeedBps: s.Speed, SpeedSource: s.SpeedSource,
				Reason: s.Reason, Persistent: s.Persistent, Sessions: s.Sessions, Netdev: s.Netdev,
			}
			for _, l := range s.Loopbacks {
				sp.Loopbacks = append(sp.Loopbacks, l.String())
			}
			if !s.DampedUntil.IsZero() {
				sp.DampedUntilNs = uint64(s.DampedUntil.UnixNano())
			}
			m.SubPorts = append(m.SubPorts, sp)
		}
		out.Planes = append(out.Planes, m)
	}
	return out, nil
}

// WatchEvents implements fare.v1.FabricService.
func (f *fabricService) WatchEvents(req *farev1.WatchEventsRequest, stream farev1.FabricService_WatchEventsServer) error {
	if req.GetRecent() > journalSize {
		return toRPC(fieldErrors{{"recent", fmt.Sprintf("%d is above the number of events kept: ask for at most %d", req.GetRecent(), journalSize)}})
	}
	done, err := f.s.startWatch(stream.Context())
	if err != nil {
		return err
	}
	defer done()
	ctx, j := stream.Context(), &f.s.c.Reader.b.journal
	last := j.latest()
	last -= min(last, uint64(req.GetRecent()))
	var buf []entry
	for {
		wake := j.wake.wait() // before the read, so that no event is missed
		buf = j.after(last, buf[:0])
		for _, e := range buf {
			err := stream.Send(&farev1.FabricEvent{
				TimeNs: uint64(max(0, e.Time.UnixNano())), Revision: e.revision, Sequence: e.sequence,
				Kind: e.Kind.String(), Subject: e.Subject, Detail: e.Detail,
			})
			if err != nil {
				return err
			}
			last = e.sequence
		}
		select {
		case <-wake:
		case <-ctx.Done():
			return toRPC(ctx.Err())
		case <-f.s.stopping:
			return errStopping()
		}
	}
}

// Drain implements fare.v1.FabricService.
func (f *fabricService) Drain(ctx context.Context, req *farev1.DrainRequest) (*farev1.DrainResponse, error) {
	target, sessions, err := f.drain(ctx, req.GetTarget(), DrainRequest{On: true, Force: req.GetForce(), Reason: req.GetReason()})
	if err != nil {
		return nil, err
	}
	return &farev1.DrainResponse{Revision: f.s.c.Reader.Revision(), Sessions: sessions, Target: target.render()}, nil
}

// Undrain implements fare.v1.FabricService.
func (f *fabricService) Undrain(ctx context.Context, req *farev1.UndrainRequest) (*farev1.UndrainResponse, error) {
	target, sessions, err := f.drain(ctx, req.GetTarget(), DrainRequest{})
	if err != nil {
		return nil, err
	}
	return &farev1.UndrainResponse{Revision: f.s.c.Reader.Revision(), Sessions: sessions, Target: target.render()}, nil
}

// maxReason is the greatest length of a drain's reason, bytes.
const maxReason = 256

func (f *fabricService) drain(ctx context.Context, t *farev1.DrainTarget, req DrainRequest) (DrainTarget, []string, error) {
	req.Target = DrainTarget{Plane: t.GetPlane(), Leaf: t.GetLeaf(), SubPort: t.GetSubPort()}
	var wrong fieldErrors
	if req.Target == (DrainTarget{}) {
		wrong = append(wrong, fieldError{"target", "it is empty: name a plane, a leaf (router ID or session address) or a sub-port (device)"})
	}
	if len(req.Reason) > maxReason {
		wrong = append(wrong, fieldError{"reason", fmt.Sprintf("it has %d bytes: use at most %d", len(req.Reason), maxReason)})
	}
	if i := strings.IndexFunc(req.Reason, func(r rune) bool { return !unicode.IsPrint(r) }); i >= 0 { // it is shown on terminals and in logs
		wrong = append(wrong, fieldError{"reason", fmt.Sprintf("byte %d is not printable: use one line of text", i)})
	}
	if wrong != nil {
		return req.Target, nil, toRPC(wrong)
	}
	target, sessions, err := f.s.c.Drain(ctx, req)
	return target, sessions, controlError(ctx, err)
}

// ClearSession implements fare.v1.FabricService.
func (f *fabricService) ClearSession(ctx context.Context, req *farev1.ClearSessionRequest) (*farev1.ClearSessionResponse, error) {
	if req.GetSession() == "" {
		return nil, toRPC(fieldErrors{{"session", "it is empty: name a session of ListSessions"}})
	}
	if err := f.s.c.ClearSession(ctx, req.GetSession()); err != nil {
		return nil, controlError(ctx, err)
	}
	return &farev1.ClearSessionResponse{Revision: f.s.c.Reader.Revision()}, nil
}

// Reload implements fare.v1.FabricService.
func (f *fabricService) Reload(ctx context.Context, req *farev1.ReloadRequest) (*farev1.ReloadResponse, error) {
	changes, err := f.s.c.Reload(ctx, req.GetDryRun())
	if err != nil {
		return nil, controlError(ctx, err)
	}
	return &farev1.ReloadResponse{Changes: changes}, nil
}

// controlError converts an error of Drain, ClearSession or Reload. An error that is neither a Problem nor the caller's
// context is a fault of the daemon.
func controlError(ctx context.Context, err error) error {
	var p *Problem
	if err != nil && ctx.Err() == nil && !errors.As(err, &p) {
		err = &Problem{Kind: Internal, Err: err, Remedy: "see the daemon's log"}
	}
	return toRPC(err)
}
