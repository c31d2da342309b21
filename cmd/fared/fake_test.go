package main

import (
	"context"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/testkit/testbed"
)

// fake is a daemon with canned answers: half a Y-cable of plane p1 has failed, and the sender's p0 has been drained.
type fake struct {
	farev1.UnimplementedWeightServiceServer
	farev1.UnimplementedFabricServiceServer
	mu sync.Mutex // guards the fields below
	// watches and eventWatches count the streams: the first of each breaks.
	watches, eventWatches int
	looks                 int  // calls of GetStatus
	hangs                 bool // the second call of GetStatus
	// kept: drains are on the disk, as they are after a drain with the reason "kept".
	kept bool
	// givenUp: the drain of p0 has been given up by the third query.
	givenUp bool
	// unmet lists requests that differ from the expected ones.
	unmet []string
}

// hangs, as a value of watches, makes the next watch stay open.
const hangs = 100

// startFake serves a fake on a separate socket until the test ends.
func startFake(t *testing.T) (socket string, f *fake) {
	t.Helper()
	f = &fake{}
	socket = filepath.Join(t.TempDir(), "s")
	t.Cleanup(func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		for _, what := range f.unmet {
			t.Error(what)
		}
	})
	testbed.Serve(t, socket, func(s grpc.ServiceRegistrar) {
		farev1.RegisterWeightServiceServer(s, f)
		farev1.RegisterFabricServiceServer(s, f)
	})
	return socket, f
}

func (f *fake) demand(ok bool, what string) {
	if !ok {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.unmet = append(f.unmet, what)
	}
}

func weightsOf(destination string, weights [2]uint32, omitPairs bool) *farev1.DestinationWeights {
	d := &farev1.DestinationWeights{Destination: destination, Reachable: true, Revision: 7, Vector: 1}
	for i, name := range []string{"p0", "p1"} {
		p := &farev1.PlaneWeight{Plane: name, Weight: weights[i], BandwidthBps: uint64(weights[i]) * 400e9, InEffect: true}
		for _, sub := range []string{".0", ".1"} {
			p.SubPorts = append(p.SubPorts, &farev1.SubPortWeight{Device: name + sub, Weight: min(1, weights[i])})
		}
		if weights[i] == 0 {
			p.Reason = "no usable path through this plane"
		}
		d.Planes = append(d.Planes, p)
	}
	if !omitPairs {
		pair := &farev1.PairSlots{Source: "10.255.0.1/32", PortPlacement: "uniform"}
		for i, share := range []uint32{333333334, 333333333, 166666667, 166666666} {
			pair.Slots = append(pair.Slots, &farev1.Slot{
				Slot: uint32(i), Plane: d.Planes[i/2].Plane, Device: d.Planes[i/2].SubPorts[i%2].Device, SourcePort: uint32(49152 + i), SharePpb: share,
			})
		}
		d.Pairs = []*farev1.PairSlots{pair}
	}
	return d
}

func lost(destination string) *farev1.DestinationWeights {
	d := weightsOf(destination, [2]uint32{}, true)
	d.Reachable, d.Reason = false, "no route"
	return d
}

// rough returns weights that the data plane represents approximately.
func rough(omitPairs bool) *farev1.DestinationWeights {
	d := weightsOf("10.255.0.20/32", [2]uint32{2, 1}, omitPairs)
	for _, p := range d.Planes {
		p.InEffect = false
	}
	d.NotInEffect = "approximate: p1.0 has 3.1 % more than its share"
	d.BandwidthIgnored = "below-minimum from p0/p0.0, p0/p0.1"
	return d
}

func (f *fake) GetWeights(_ context.Context, r *farev1.GetWeightsRequest) (*farev1.GetWeightsResponse, error) {
	if !strings.HasPrefix(r.Destination, "10.255.0.2") {
		return nil, status.Errorf(codes.NotFound, "destination %s: no route to it was ever learned", r.Destination)
	}
	f.demand(r.Explain, "GetWeights without explain")
	if r.Destination == "10.255.0.20" {
		return &farev1.GetWeightsResponse{Revision: 7, Weights: []*farev1.DestinationWeights{rough(true)}}, nil
	}
	d := weightsOf("10.255.0.2/32", [2]uint32{2, 1}, false)
	d.Explanation = &farev1.Explanation{
		Routes: []*farev1.ExplainedRoute{
			{Session: "p0/p0.0", Plane: "p0", Device: "p0.0", Node: "10.1.0.1", AdvertisedBps: 800e9, HasBandwidth: true, AsPath: []uint32{64512, 64601},
				Communities: []*farev1.ExplainedCommunity{{Raw: "0004fc0051ba43b7", Meaning: "link bandwidth 800G"}, {Raw: "0002fc0000000001", Meaning: "route target", Reason: "not-bandwidth"}}},
			{Session: "p1/p1.0", Plane: "p1", Device: "p1.0", Node: "10.1.0.2", Reason: "session-down"},
		},
		Planes: []*farev1.ExplainedPlane{
			{Plane: "p0", BandwidthBps: 800e9, Rule: "sum over nodes of min(local, advertised)", Nodes: []*farev1.ExplainedNode{
				{Node: "10.1.0.1", Devices: []string{"p0.0", "p0.1"}, LocalBps: 800e9, AdvertisedBps: 800e9, HasBandwidth: true, BandwidthBps: 800e9}}},
			{Plane: "p1", BandwidthBps: 400e9, Rule: "sum over nodes of min(local, advertised)", Nodes: []*farev1.ExplainedNode{
				{Node: "10.1.0.2", Devices: []string{"p1.1"}, LocalBps: 400e9, BandwidthBps: 400e9}}},
		},
		Rules: []string{"weights are the planes' bandwidths in lowest terms"},
	}
	return &farev1.GetWeightsResponse{Revision: 7, Weights: []*farev1.DestinationWeights{d}}, nil
}

// ListWeights serves one destination per page, so that a command that stops at the first page fails.
func (f *fake) ListWeights(_ context.Context, r *farev1.ListWeightsRequest) (*farev1.ListWeightsResponse, error) {
	var want string
	if d := r.GetFilter().GetDestinations(); len(d) > 0 {
		if want = d[0]; want == "nonsense" {
			return nil, status.Error(codes.InvalidArgument, `filter.destinations[0]: "nonsense" is neither an address nor a prefix: use 10.255.0.2 or 10.255.0.0/16`)
		}
	}
	all := []*farev1.DestinationWeights{weightsOf("10.255.0.2/32", [2]uint32{2, 1}, r.GetFilter().GetOmitPairs()), lost("10.255.0.3/32")}
	if want == "10.255.0.20" {
		all[0] = rough(r.GetFilter().GetOmitPairs())
	}
	for _, pair := range all[0].Pairs {
		for _, service := range r.Services {
			ports := &farev1.ServicePorts{Service: service, PortPlacement: "hash"}
			for _, s := range pair.Slots {
				ports.SourcePorts = append(ports.SourcePorts, s.SourcePort+1000)
			}
			pair.Services = append(pair.Services, ports)
		}
	}
	first := r.PageToken == ""
	f.demand(first || r.PageToken == "second", "a page token of its own making")
	page := &farev1.ListWeightsResponse{Revision: 7, Weights: all[:1], NextPageToken: "second"}
	if !first {
		page.Weights, page.NextPageToken = all[1:], ""
	}
	if want != "" && !strings.HasPrefix(page.Weights[0].Destination, want) {
		page.Weights = nil
	}
	return page, nil
}

// WatchWeights breaks the first stream in the middle of a revision. The second stream must resume after the last
// complete revision of the first, and meets another run of the daemon; the third is refused.
func (f *fake) WatchWeights(r *farev1.WatchWeightsRequest, s farev1.WeightService_WatchWeightsServer) error {
	f.mu.Lock()
	f.watches++
	n := f.watches
	f.mu.Unlock()
	omit := r.GetFilter().GetOmitPairs()
	send := func(msgs ...*farev1.WatchWeightsResponse) error {
		for _, m := range msgs {
			if err := s.Send(m); err != nil {
				return err
			}
		}
		return status.Error(codes.Unavailable, "the daemon stops")
	}
	switch n {
	case hangs + 1:
		if err := s.Send(&farev1.WatchWeightsResponse{Revision: 7, Instance: "a", Snapshot: true, Complete: true, Weights: []*farev1.DestinationWeights{lost("10.255.0.2/32")}}); err != nil {
			return err
		}
		<-s.Context().Done()
		return s.Context().Err()
	case 1:
		f.demand(r.SinceRevision == 0 && r.Instance == "", "the first watch resumes")
		return send(
			&farev1.WatchWeightsResponse{Revision: 7, Instance: "a", Snapshot: true, Weights: []*farev1.DestinationWeights{weightsOf("10.255.0.2/32", [2]uint32{1, 1}, omit)}},
			&farev1.WatchWeightsResponse{Revision: 7, Instance: "a", Complete: true, Weights: []*farev1.DestinationWeights{weightsOf("10.255.0.3/32", [2]uint32{1, 1}, omit)}},
			&farev1.WatchWeightsResponse{Revision: 8, Instance: "a", Complete: true, Weights: []*farev1.DestinationWeights{weightsOf("10.255.0.2/32", [2]uint32{2, 1}, omit)}},
			&farev1.WatchWeightsResponse{Revision: 9, Instance: "a", Weights: []*farev1.DestinationWeights{weightsOf("10.255.0.3/32", [2]uint32{2, 1}, omit)}},
		)
	case 2:
		f.demand(r.SinceRevision == 8 && r.Instance == "a", "the second watch does not resume after the last complete revision")
		return send(
			&farev1.WatchWeightsResponse{Revision: 9, Instance: "a", Complete: true, Weights: []*farev1.DestinationWeights{lost("10.255.0.3/32")}, Removed: []*farev1.WeightKey{{Destination: "10.255.0.4/32"}}},
		)
	case 3:
		f.demand(r.SinceRevision == 9 && r.Instance == "a", "the third watch does not resume after the last complete revision")
		return send(
			&farev1.WatchWeightsResponse{Revision: 2, Instance: "b", Snapshot: true, Complete: true, Weights: []*farev1.DestinationWeights{weightsOf("10.255.0.2/32", [2]uint32{1, 0}, omit)}},
		)
	}
	f.demand(r.SinceRevision == 2 && r.Instance == "b", "the fourth watch does not resume in the new run")
	return status.Error(codes.ResourceExhausted, "too many watches: end one, then ask again")
}

func (f *fake) GetStatus(ctx context.Context, _ *farev1.GetStatusRequest) (*farev1.GetStatusResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.hangs && f.looks == 1 {
		<-ctx.Done()
		f.looks, f.hangs = 0, false
		return nil, ctx.Err()
	}
	instance := "a"
	if f.eventWatches >= 2 {
		instance = "b"
	}
	f.looks++
	drains := []*farev1.DrainStatus{ // confirmed at the third query
		{Target: &farev1.DrainTarget{Target: &farev1.DrainTarget_Leaf{Leaf: "10.1.0.2"}}, Stage: "drained", SinceNs: 1767323045e9, By: "uid 0 (root) pid 4711", Reason: "new optics"},
		{Target: &farev1.DrainTarget{Target: &farev1.DrainTarget_Plane{Plane: "p0"}}, Stage: "shares", Waiting: 2,
			WaitsFor: []string{"destination 10.255.0.2/32: not acknowledged yet", "destination 10.255.0.3/32: vector 4 was refused: table full"}},
		{Target: &farev1.DrainTarget{Target: &farev1.DrainTarget_SubPort{SubPort: "eth9"}}, Stage: "dormant", SinceNs: 1767323045e9},
	}
	if f.looks > 2 {
		drains[1].Stage, drains[1].Waiting, drains[1].WaitsFor = "drained", 0, nil
		if f.givenUp {
			drains[1].Stage, drains[1].WaitsFor = "given-up", []string{"the other end drains too"}
		}
	}
	var faults []*farev1.Fault
	for _, s := range []string{"p0/p0.0", "p0/p0.1", "p1/p1.0", "p1/p1.1", "p2/p2.0"} {
		faults = append(faults, &farev1.Fault{Kind: "bandwidth-ignored", Plane: s[:2], Session: s, Reason: "below-minimum", Routes: 3, Example: "10.255.0.20/32", Remedy: "upgrade the leaf"})
	}
	faults = append(faults, &farev1.Fault{Kind: "bandwidth-ignored", Plane: "p2", Session: "p2/p2.1", Reason: "missing-bandwidth", Routes: 1, Example: "10.255.0.2/32", Remedy: "send communities"})
	drainsError := "a restart would forget changes of drains, fared tries again each second: open /var/lib/fared/drains.new: read-only file system"
	if f.kept {
		drainsError = ""
	}
	return &farev1.GetStatusResponse{
		Faults: faults,
		Drains: drains, Version: "v1.0.0", Instance: instance, Role: "server", Revision: 7, RouterId: "10.255.0.1", AsNumber: 4200001000, UptimeNs: 93784e9, Converged: true,
		SessionsConfigured: 4, SessionsEstablished: 3, Destinations: 2, DestinationsReachable: 1, Vectors: 1, Loopbacks: []string{"10.255.0.1/32"},
		Dataplane: &farev1.DataplaneStatus{Name: "linux", Address: "unix:/run/fared-dataplane/dataplane.sock", OperationsSent: 12, OperationsInEffect: 10, OperationsRefused: 1,
			OperationsPending: 1, LastError: "operation 12: no memory left: raise the limit", Approximate: 1, Refused: 2, Damage: "2 routes of table 179 are gone", Repairs: 5,
			Limitations: []*farev1.Limitation{{Reason: "rp-filter", Text: "rp_filter is strict on p0.0", Remedy: "set it to 2"},
				{Reason: "driver", Text: "driver linux: steering by BPF is not possible on this host: bpf: the kernel has no TCX; it needs Linux 6.6 and CONFIG_NET_XGRESS; source ports hold for the services of slots.services, other flows follow the kernel's hash",
					Remedy: "remove the cause, or choose the driver by --driver=linux in FARED_DATAPLANE_FLAGS of /etc/default/fared-dataplane; then 'systemctl restart fared-dataplane'"}}},
		SlotTableFailures: 3, SlotTableError: "write /run/fared/slots: no space left on device",
		DrainsError: drainsError,
		Counters: []*farev1.Counter{{Name: `guard_dropped{reason="not-accepted"}`, Value: 3}, {Name: `guard_dropped{reason="route_as_loop"}`, Value: 112},
			{Name: `inputs_ignored{reason="old-generation"}`}, {Name: `inputs_ignored{reason="own-loopback"}`, Value: 4}},
	}, nil
}

func (f *fake) ListSessions(context.Context, *farev1.ListSessionsRequest) (*farev1.ListSessionsResponse, error) {
	return &farev1.ListSessionsResponse{Revision: 7, Sessions: []*farev1.Session{
		{Name: "p0/p0.0", Plane: "p0", Device: "p0.0", PeerAddress: "192.0.2.1", PeerAs: 64512, PeerRouterId: "10.1.0.1", State: "established", StateAgeNs: 61e9, Generation: 1,
			RoutesReceived: 2, RoutesUsed: 2, RoutesAdvertised: 1, EndOfRib: true, BfdState: "up", BfdDetectionTimeNs: 300e6, Reason: "hold timer expired"},
		{Name: "p0/p0.1", Plane: "p0", Device: "p0.1", PeerAddress: "192.0.2.3", PeerAs: 64512, PeerRouterId: "10.1.0.1", State: "established", StateAgeNs: 61e9, Generation: 1,
			RoutesReceived: 2, RoutesUsed: 1, RoutesAdvertised: 1, EndOfRib: true, BfdState: "down", Counters: []*farev1.Counter{{Name: `routes_ignored{reason="as-loop"}`, Value: 1}}},
		{Name: "p1/p1.0", Plane: "p1", Device: "p1.0", PeerAddress: "192.0.2.5", PeerAs: 64513, State: "held", StateAgeNs: 1500e6, Reason: "held down: no carrier"},
		{Name: "p1/p1.1", Plane: "p1", Device: "p1.1", PeerAddress: "192.0.2.7", PeerAs: 64513, PeerRouterId: "10.1.0.2", State: "established", StateAgeNs: 7384e9, Generation: 3,
			RoutesReceived: 2, RoutesUsed: 2, RoutesAdvertised: 1, EndOfRib: true, Fault: "another leaf has its BGP identifier", Reason: "another leaf has its BGP identifier"},
	}}, nil
}

func (f *fake) ListPlanes(context.Context, *farev1.ListPlanesRequest) (*farev1.ListPlanesResponse, error) {
	return &farev1.ListPlanesResponse{Revision: 7, Planes: []*farev1.Plane{
		{Plane: "p0", Up: true, Drained: true, BandwidthBps: 800e9, SubPorts: []*farev1.SubPort{
			{Device: "p0.0", Carrier: true, SpeedBps: 400e9, SpeedSource: "ethtool", Sessions: []string{"p0/p0.0"}},
			{Device: "p0.1", Carrier: true, SpeedBps: 400e9, SpeedSource: "ethtool", Sessions: []string{"p0/p0.1"}},
		}},
		{Plane: "p1", Up: true, BandwidthBps: 400e9, SubPorts: []*farev1.SubPort{
			{Device: "p1.0", SpeedBps: 400e9, SpeedSource: "config", Reason: "no carrier", Sessions: []string{"p1/p1.0"}},
			{Device: "p1.1", Carrier: true, Drained: true, SpeedBps: 400e9, SpeedSource: "config", Sessions: []string{"p1/p1.1"}},
		}},
	}}, nil
}

// WatchEvents breaks twice: first the daemon continues, then it is another run.
func (f *fake) WatchEvents(r *farev1.WatchEventsRequest, s farev1.FabricService_WatchEventsServer) error {
	f.mu.Lock()
	f.eventWatches++
	n := f.eventWatches
	f.mu.Unlock()
	event := func(sequence uint64, kind, subject, detail string) *farev1.FabricEvent {
		return &farev1.FabricEvent{TimeNs: 1789000000e9 + sequence*1e6, Revision: 7, Kind: kind, Subject: subject, Detail: detail, Sequence: sequence}
	}
	all := []*farev1.FabricEvent{event(1, "session-up", "p0/p0.0", "10.1.0.1"), event(2, "link-down", "p1.0", "no carrier"), event(3, "session-down", "p1/p1.0", "held down: no carrier"), event(6, "weights", "10.255.0.2/32", "2:1")}
	switch n {
	case 1:
		f.demand(r.Recent == 5, "the first watch does not ask for what --recent says")
		all = all[:2]
	case 2:
		f.demand(r.Recent == maxRecent, "the second watch may miss events")
	default:
		all = []*farev1.FabricEvent{event(1, "session-up", "p0/p0.0", "another run")}
	}
	for _, e := range all {
		if err := s.Send(e); err != nil {
			return err
		}
	}
	if n > 2 {
		return status.Error(codes.ResourceExhausted, "too many watches: end one, then ask again")
	}
	return status.Error(codes.Unavailable, "the daemon stops")
}

func (f *fake) covered(t *farev1.DrainTarget) ([]string, error) {
	switch {
	case t.GetPlane() == "p0", t.GetLeaf() == "10.1.0.1":
		return []string{"p0/p0.0", "p0/p0.1"}, nil
	case t.GetSubPort() == "p1.1":
		return []string{"p1/p1.1"}, nil
	}
	return nil, status.Error(codes.NotFound, "plane p9: there is none: name one of p0, p1")
}

func (f *fake) Drain(_ context.Context, r *farev1.DrainRequest) (*farev1.DrainResponse, error) {
	sessions, err := f.covered(r.Target)
	f.mu.Lock()
	f.kept = r.Reason == "kept"
	f.mu.Unlock()
	return &farev1.DrainResponse{Revision: 8, Sessions: sessions, Target: r.Target}, err
}

func (f *fake) Undrain(_ context.Context, r *farev1.UndrainRequest) (*farev1.UndrainResponse, error) {
	sessions, err := f.covered(r.Target)
	return &farev1.UndrainResponse{Revision: 9, Sessions: sessions, Target: r.Target}, err
}

func (f *fake) ClearSession(_ context.Context, r *farev1.ClearSessionRequest) (*farev1.ClearSessionResponse, error) {
	switch r.Session {
	case "p0/p0.0":
		return &farev1.ClearSessionResponse{Revision: 8}, nil
	case "p1/p1.0":
		return nil, status.Error(codes.FailedPrecondition, "session p1/p1.0: it is not established but held: held down: no carrier: it connects by itself once the reason has ended")
	}
	return nil, status.Error(codes.NotFound, "session p9/x: there is none: name one of p0/p0.0, p0/p0.1, p1/p1.0, p1/p1.1")
}

func (f *fake) Reload(_ context.Context, r *farev1.ReloadRequest) (*farev1.ReloadResponse, error) {
	if r.DryRun {
		return nil, status.Error(codes.FailedPrecondition, "/etc/fared/fared.yaml: nothing was changed: these keys need a restart of fared: as: 64512 -> 64513")
	}
	return &farev1.ReloadResponse{Changes: []string{"path_bandwidth.missing: equal -> skip", "log.level: info -> debug"}}, nil
}
