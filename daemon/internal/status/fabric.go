package status

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

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
	out := &farev1.GetStatusResponse{
		Version: f.s.c.Version, Instance: f.s.c.Reader.Instance(), Revision: r.View.revision,
		Role: r.Process.Role, RouterId: addrString(r.Process.RouterID), AsNumber: r.Process.AS, Converged: r.Process.Converged,
		UptimeNs:           uint64(max(0, f.s.c.Now().Sub(f.s.c.Started))),
		SessionsConfigured: uint32(len(r.Sessions)), SessionsEstablished: uint32(r.Established()),
		Destinations: uint32(r.View.Destinations()), DestinationsReachable: uint32(r.View.Reachable()), Groups: uint32(r.View.Vectors()),
		Dataplane: r.Process.Dataplane.render(),
		Counters: counters(
			labelled{"guard_dropped", r.Dropped()}, labelled{"routes_ignored", r.Ignored()}, labelled{"inputs_ignored", r.Process.Ignored},
		),
	}
	for _, p := range r.View.layout.Sources {
		out.Loopbacks = append(out.Loopbacks, p.String())
	}
	return out, nil
}

// Established returns how many sessions are established, drained ones included.
func (r *Report) Established() int {
	n := 0
	for i := range r.Sessions {
		if r.Sessions[i].Up() {
			n++
		}
	}
	return n
}

// Dropped returns what the guards dropped since start, by reason, sorted, over all sessions.
func (r *Report) Dropped() []Count {
	return r.sum(func(s *Session) []Count { return s.Dropped })
}

// Ignored returns the routes held now that are not used, by reason, sorted, over all sessions.
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

// merge adds counts to those of the same name.
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

// labelled is counts of one name by reason.
type labelled struct {
	name   string
	counts []Count
}

// counters makes name{reason="..."} of each count, sorted.
func counters(all ...labelled) []*farev1.Counter {
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
			State: s.State, Generation: s.Generation, EndOfRib: s.EndOfRIB, Reason: s.Reason,
			RoutesReceived: uint32(s.Received), RoutesUsed: uint32(s.Used), RoutesAdvertised: uint32(s.Advertised),
			Counters: counters(labelled{"guard_dropped", s.Dropped}, labelled{"routes_ignored", s.Ignored}),
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
		m := &farev1.Plane{Plane: p.Name, Up: p.Up, Drained: p.Drained, BandwidthBps: p.Bandwidth()}
		for _, s := range p.SubPorts {
			m.SubPorts = append(m.SubPorts, &farev1.SubPort{
				Device: s.Device, Carrier: s.Carrier, Drained: s.Drained, SpeedBps: s.Speed, SpeedSource: s.SpeedSource,
				Reason: s.Reason, Sessions: s.Sessions,
			})
		}
		out.Planes = append(out.Planes, m)
	}
	return out, nil
}

// WatchEvents implements fare.v1.FabricService.
func (f *fabricService) WatchEvents(req *farev1.WatchEventsRequest, stream farev1.FabricService_WatchEventsServer) error {
	if req.GetRecent() > journalSize {
		return toRPC(fieldErrors{{"recent", fmt.Sprintf("%d is more than is remembered: ask for at most %d", req.GetRecent(), journalSize)}})
	}
	done, err := f.s.startWatch()
	if err != nil {
		return err
	}
	defer done()
	ctx, j := stream.Context(), &f.s.c.Reader.b.journal
	told := j.latest()
	told -= min(told, uint64(req.GetRecent()))
	var buf []entry
	for {
		wake := j.wake.wait() // before looking, so that no event falls between
		buf = j.after(told, buf[:0])
		for _, e := range buf {
			err := stream.Send(&farev1.FabricEvent{
				TimeNs: uint64(max(0, e.Time.UnixNano())), Revision: e.revision, Sequence: e.sequence,
				Kind: e.Kind.String(), Subject: e.Subject, Detail: e.Detail,
			})
			if err != nil {
				return err
			}
			told = e.sequence
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
	sessions, err := f.drain(ctx, req.GetTarget(), true)
	if err != nil {
		return nil, err
	}
	return &farev1.DrainResponse{Revision: f.s.c.Reader.Revision(), Sessions: sessions}, nil
}

// Undrain implements fare.v1.FabricService.
func (f *fabricService) Undrain(ctx context.Context, req *farev1.UndrainRequest) (*farev1.UndrainResponse, error) {
	sessions, err := f.drain(ctx, req.GetTarget(), false)
	if err != nil {
		return nil, err
	}
	return &farev1.UndrainResponse{Revision: f.s.c.Reader.Revision(), Sessions: sessions}, nil
}

func (f *fabricService) drain(ctx context.Context, t *farev1.DrainTarget, on bool) ([]string, error) {
	target := DrainTarget{Plane: t.GetPlane(), Leaf: t.GetLeaf(), SubPort: t.GetSubPort()}
	if target == (DrainTarget{}) {
		return nil, toRPC(fieldErrors{{"target", "it is empty: name a plane, a leaf (router ID or session address) or a sub-port (device)"}})
	}
	sessions, err := f.s.c.Drain(ctx, target, on)
	return sessions, controlError(ctx, err)
}

// Reload implements fare.v1.FabricService.
func (f *fabricService) Reload(ctx context.Context, req *farev1.ReloadRequest) (*farev1.ReloadResponse, error) {
	changes, err := f.s.c.Reload(ctx, req.GetDryRun())
	if err != nil {
		return nil, controlError(ctx, err)
	}
	return &farev1.ReloadResponse{Changes: changes}, nil
}

// controlError is an error of Drain or Reload. What is no Problem and not the caller's context is a fault of ours.
func controlError(ctx context.Context, err error) error {
	var p *Problem
	if err != nil && ctx.Err() == nil && !errors.As(err, &p) {
		err = &Problem{Kind: Internal, Err: err, Remedy: "see the daemon's log"}
	}
	return toRPC(err)
}
