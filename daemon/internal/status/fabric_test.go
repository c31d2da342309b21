package status

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"

	farev1 "github.com/fared/fared/api/fare/v1"
)

func TestFabricPictures(t *testing.T) {
	l := newFake(1, 10)
	l.vectors[1] = Vector{Reachable: true}
	l.builder.MarkVector(1)
	l.destinations[prefixAt(0)] = Destination{Vector: 1}
	l.destinations[prefixAt(1)] = Destination{Reason: "x"}
	l.builder.MarkDestination(prefixAt(0))
	l.builder.MarkDestination(prefixAt(1))
	l.builder.Commit()
	l.builder.MarkFabric()
	l.builder.Commit()
	l.start(t)
	srv := serve(t, l.service(t, nil), nil)

	status, err := srv.fabric.GetStatus(t.Context(), &farev1.GetStatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	counter := func(name string, value uint64) *farev1.Counter { return &farev1.Counter{Name: name, Value: value} }
	if diff := cmp.Diff(&farev1.GetStatusResponse{
		Version: "v1", Instance: "fake", Role: "server", Revision: 3, RouterId: "10.255.0.1", AsNumber: 65100, UptimeNs: 110e9, Converged: true,
		SessionsConfigured: 2, SessionsEstablished: 1, Destinations: 2, DestinationsReachable: 1, Vectors: 1,
		Dataplane: &farev1.DataplaneStatus{
			Connected: true, Name: "memory", Address: "memory:", OperationsSent: 15, OperationsInEffect: 13, OperationsRefused: 1, OperationsPending: 1,
			Approximate: 2, Refused: 3, Damage: "a route is gone", Repairs: 4,
			Limitations: []*farev1.Limitation{{Reason: "rp-filter", Text: "strict on eth0", Remedy: "set it to 2"}},
		},
		Loopbacks: []string{"10.255.0.1/32", "10.255.0.9/32", "fd00::1/128"},
		Faults: []*farev1.Fault{{Kind: "bandwidth-ignored", Plane: "p0", Session: "p0/p0a", Reason: "below-minimum", Routes: 3, Example: "10.0.0.0/32", Remedy: "upgrade it"},
			{Kind: "routes-dropped", Plane: "p0", Session: "p0/p0a", Reason: "route_next_hop", Routes: 2, Example: "10.0.0.7/32", Remedy: "set the next hop"}},
		Counters: []*farev1.Counter{
			counter(`guard_dropped{reason="bad-marker"}`, 6), counter(`guard_dropped{reason="too-long"}`, 2), counter(`inputs_ignored{reason="old-generation"}`, 3),
			counter(`routes_ignored{reason="looped"}`, 2), counter(`routes_ignored{reason="not-host"}`, 1),
		},
	}, status, protocmp.Transform()); diff != "" {
		t.Errorf("status (-want +got):\n%s", diff)
	}

	sessions, err := srv.fabric.ListSessions(t.Context(), &farev1.ListSessionsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(&farev1.ListSessionsResponse{Revision: 3, Sessions: []*farev1.Session{
		{
			Name: "p0/p0a", Plane: "p0", Device: "p0a", PeerAddress: "10.0.0.1", PeerAs: 65001, PeerRouterId: "10.1.1.1", State: "established",
			StateAgeNs: 10e9, Generation: 3, RoutesReceived: 7, RoutesUsed: 4, RoutesAdvertised: 8, EndOfRib: true,
			Counters: []*farev1.Counter{counter(`guard_dropped{reason="bad-marker"}`, 5), counter(`routes_ignored{reason="looped"}`, 2), counter(`routes_ignored{reason="not-host"}`, 1)},
			BfdState: "up", BfdDetectionTimeNs: 300e6,
		},
		{
			Name: "p0/p0b", Plane: "p0", Device: "p0b", State: "idle", Reason: "no carrier",
			Counters: []*farev1.Counter{counter(`guard_dropped{reason="bad-marker"}`, 1), counter(`guard_dropped{reason="too-long"}`, 2)},
		},
	}}, sessions, protocmp.Transform()); diff != "" {
		t.Errorf("sessions (-want +got):\n%s", diff)
	}

	planes, err := srv.fabric.ListPlanes(t.Context(), &farev1.ListPlanesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(&farev1.ListPlanesResponse{Revision: 3, Planes: []*farev1.Plane{
		{Plane: "p0", Up: true, BandwidthBps: 400e9, SubPorts: []*farev1.SubPort{
			{Device: "p0a", Carrier: true, SpeedBps: 400e9, SpeedSource: "config", Sessions: []string{"p0/p0a"}},
			{Device: "p0b", Carrier: true, SpeedBps: 400e9, SpeedSource: "config", Reason: "slower than configured", Persistent: true, DampedUntilNs: 77},
		}},
		{Plane: "p1", Drained: true},
	}}, planes, protocmp.Transform()); diff != "" {
		t.Errorf("planes (-want +got):\n%s", diff)
	}
}

func TestWatchEvents(t *testing.T) {
	l := newFake(1, 10)
	add := func(detail string) {
		l.builder.Event(Event{Time: time.Unix(0, 42), Kind: EventLinkDown, Subject: "p0a", Detail: detail})
		l.builder.Commit()
	}
	for range journalSize + 10 {
		add("old")
	}
	l.start(t)
	srv := serve(t, l.service(t, nil), nil)
	open := func(recent uint32) farev1.FabricService_WatchEventsClient {
		stream, err := srv.fabric.WatchEvents(t.Context(), &farev1.WatchEventsRequest{Recent: recent})
		if err != nil {
			t.Fatal(err)
		}
		return stream
	}
	all := open(journalSize)
	for n := uint64(11); n <= journalSize+10; n++ {
		e, err := all.Recv()
		if err != nil || e.Sequence != n || e.Revision != n+1 || e.Detail != "old" {
			t.Fatalf("event %d: %v, %v", n, e, err)
		}
	}
	few := open(2)
	for n := uint64(journalSize + 9); n <= journalSize+10; n++ {
		if e, err := few.Recv(); err != nil || e.Sequence != n {
			t.Fatalf("recent event %d: %v, %v", n, e, err)
		}
	}
	l.on(t, func() { add("new") })
	for _, stream := range []farev1.FabricService_WatchEventsClient{all, few} {
		e, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		want := &farev1.FabricEvent{TimeNs: 42, Revision: journalSize + 12, Kind: "link-down", Subject: "p0a", Detail: "new", Sequence: journalSize + 11}
		if diff := cmp.Diff(want, e, protocmp.Transform()); diff != "" {
			t.Errorf("live event (-want +got):\n%s", diff)
		}
	}
	_, err := open(journalSize + 1).Recv()
	if f := violations(t, err); !slices.Equal(f, []string{"recent"}) {
		t.Errorf("too many: %v", err)
	}
}

// TestJournalGap checks that overwritten events of the ring cause a gap in the sequence.
func TestJournalGap(t *testing.T) {
	var j journal
	for range 3000 {
		j.add(Event{Kind: EventSpeed}, 1)
	}
	got := j.after(5, nil)
	if len(got) != journalSize || got[0].sequence != 3000-journalSize+1 || got[len(got)-1].sequence != 3000 {
		t.Errorf("%d events from %d", len(got), got[0].sequence)
	}
	if j.byKind()[EventSpeed] != 3000 {
		t.Errorf("counted %d", j.byKind()[EventSpeed])
	}
}

func TestEventKindsHaveNames(t *testing.T) {
	seen := map[string]bool{}
	for k := EventSessionUp; k < eventKinds; k++ {
		if s := k.String(); s == "" || seen[s] {
			t.Errorf("kind %d is called %q", k, s)
		} else {
			seen[s] = true
		}
	}
	if s := eventKinds.String(); !strings.HasPrefix(s, "event-") {
		t.Errorf("no kind: %q", s)
	}
}

func TestControl(t *testing.T) {
	l := newFake(1, 10)
	l.start(t)
	var asked, cleared []string
	var forced []bool
	var fail error
	s := l.service(t, func(c *ServiceConfig) {
		c.Drain = func(ctx context.Context, req DrainRequest) (DrainTarget, []string, error) {
			forced = append(forced, req.Force)
			asked = append(asked, cmp.Diff(DrainRequest{}, req))
			if fail != nil {
				return req.Target, nil, fail
			}
			return req.Target, []string{"p0/p0a"}, l.do(ctx, func() { l.builder.MarkFabric(); l.builder.Commit() })
		}
		c.ClearSession = func(_ context.Context, name string) error {
			cleared = append(cleared, name)
			return fail
		}
		c.Reload = func(_ context.Context, dryRun bool) ([]string, error) {
			if dryRun {
				return []string{"would change"}, nil
			}
			return []string{"changed"}, fail
		}
	})
	srv := serve(t, s, nil)
	plane := &farev1.DrainTarget{Target: &farev1.DrainTarget_Plane{Plane: "p0"}}
	drained, err := srv.fabric.Drain(t.Context(), &farev1.DrainRequest{Target: plane})
	if err != nil || drained.Revision != 2 || !slices.Equal(drained.Sessions, []string{"p0/p0a"}) || drained.Target.GetPlane() != "p0" {
		t.Errorf("drain: %v, %v", drained, err)
	}
	undrained, err := srv.fabric.Undrain(t.Context(), &farev1.UndrainRequest{Target: plane})
	if err != nil || undrained.Revision != 3 || len(asked) != 2 {
		t.Errorf("undrain: %v, %v, asked %d times", undrained, err, len(asked))
	}
	if _, err := srv.fabric.Drain(t.Context(), &farev1.DrainRequest{Target: plane, Force: true}); err != nil || !slices.Equal(forced, []bool{false, false, true}) {
		t.Errorf("forced: %v, %v", forced, err)
	}
	for _, target := range []*farev1.DrainTarget{nil, {}, {Target: &farev1.DrainTarget_Leaf{}}} {
		_, err = srv.fabric.Drain(t.Context(), &farev1.DrainRequest{Target: target})
		if f := violations(t, err); !slices.Equal(f, []string{"target"}) {
			t.Errorf("empty target: %v", err)
		}
	}
	for reason, want := range map[string][]string{
		"new optics, größer": nil, strings.Repeat("x", 256): nil, strings.Repeat("x", 257): {"reason"}, "two\nlines": {"reason"}, "\x1b[2J": {"reason"}, "\xff": {"reason"},
	} {
		_, err = srv.fabric.Drain(t.Context(), &farev1.DrainRequest{Target: plane, Reason: reason})
		if want == nil && err != nil || want != nil && !utf8.ValidString(reason) && err == nil {
			t.Errorf("reason %q: %v", reason, err)
		} else if want != nil && utf8.ValidString(reason) && !slices.Equal(violations(t, err), want) {
			t.Errorf("reason %q: %v", reason, err)
		}
	}
	if got := asked[len(asked)-1]; !strings.Contains(strings.Join(asked, "\n"), "new optics") || got == "" {
		t.Errorf("the reason was lost: %s", got)
	}
	if _, err := srv.fabric.ClearSession(t.Context(), &farev1.ClearSessionRequest{}); !slices.Equal(violations(t, err), []string{"session"}) {
		t.Errorf("a session without a name: %v", err)
	}
	if r, err := srv.fabric.ClearSession(t.Context(), &farev1.ClearSessionRequest{Session: "p0/p0a"}); err != nil || r.Revision == 0 || !slices.Equal(cleared, []string{"p0/p0a"}) {
		t.Errorf("clear: %v, %v, cleared %q", r, err, cleared)
	}
	if r, err := srv.fabric.Reload(t.Context(), &farev1.ReloadRequest{DryRun: true}); err != nil || !slices.Equal(r.Changes, []string{"would change"}) {
		t.Errorf("dry run: %v, %v", r, err)
	}
	for _, c := range []struct {
		err  error
		want codes.Code
	}{
		{&Problem{Kind: NotFound, Subject: "p9", Err: errors.New("no such plane"), Remedy: "use p0 or p1"}, codes.NotFound},
		{&Problem{Kind: Invalid, Subject: "target.leaf", Err: errors.New("no address"), Remedy: "use a router ID"}, codes.InvalidArgument},
		{&Problem{Kind: Refused, Subject: "config", Err: errors.New("3 errors"), Remedy: "correct them"}, codes.FailedPrecondition},
		{&Problem{Kind: Unavailable, Err: errLoopStopped, Remedy: "retry"}, codes.Unavailable},
		{&Problem{Err: errors.New("disk"), Remedy: "look at it"}, codes.Internal},
		{errors.New("something"), codes.Internal},
	} {
		fail = c.err
		_, derr := srv.fabric.Drain(t.Context(), &farev1.DrainRequest{Target: plane})
		_, rerr := srv.fabric.Reload(t.Context(), &farev1.ReloadRequest{})
		_, cerr := srv.fabric.ClearSession(t.Context(), &farev1.ClearSessionRequest{Session: "p0/p0a"})
		for _, err := range []error{derr, cerr, rerr} {
			st := grpcstatus.Convert(err)
			if st.Code() != c.want || len(st.Details()) == 0 || !strings.Contains(st.Message(), c.err.Error()) {
				t.Errorf("%v became %v with %d details", c.err, err, len(st.Details()))
			}
		}
	}
}
