package grpcserve

import (
	"context"
	"errors"
	"maps"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/fared/fared/internal/testkit/gate"
)

// TestProbes checks Check, List and Watch of a probe whose result changes, of a probe that hangs, and of an ordinary
// service, until Shutdown.
func TestProbes(t *testing.T) {
	gate.Slow(t, gate.Labs, "waits for probes")
	const (
		serving = healthpb.HealthCheckResponse_SERVING
		not     = healthpb.HealthCheckResponse_NOT_SERVING
	)
	var broken atomic.Bool
	h := NewHealth(map[string]func(context.Context) error{
		Readiness: func(context.Context) error {
			if broken.Load() {
				return errors.New("no data plane")
			}
			return nil
		},
		Liveness: func(ctx context.Context) error { <-ctx.Done(); return context.Cause(ctx) },
	})
	h.SetServingStatus("", serving)
	l, options, err := Listen("127.0.0.1:0", nil)
	if err != nil {
		t.Fatal(err)
	}
	s := New(1<<10, Window, h, options...)
	go s.Serve(l)
	defer s.Stop()
	conn, err := grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	client := healthpb.NewHealthClient(conn)
	all := func(want map[string]healthpb.HealthCheckResponse_ServingStatus) {
		t.Helper()
		got := map[string]healthpb.HealthCheckResponse_ServingStatus{}
		list, err := client.List(t.Context(), &healthpb.HealthListRequest{}, grpc.WaitForReady(true))
		if err != nil {
			t.Fatal(err)
		}
		for name, r := range list.Statuses {
			got[name] = r.Status
		}
		if !maps.Equal(got, want) {
			t.Errorf("List: %v, want %v", got, want)
		}
		for name, status := range want {
			if r, err := client.Check(t.Context(), &healthpb.HealthCheckRequest{Service: name}); err != nil || r.Status != status {
				t.Errorf("Check of %q: %v, %v, want %v", name, r, err, status)
			}
		}
		if _, err := client.Check(t.Context(), &healthpb.HealthCheckRequest{Service: "other"}); status.Code(err) != codes.NotFound {
			t.Errorf("Check of an unknown service: %v", err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	watch, err := client.Watch(ctx, &healthpb.HealthCheckRequest{Service: Readiness}, grpc.WaitForReady(true))
	if err != nil {
		t.Fatal(err)
	}
	next := func(want healthpb.HealthCheckResponse_ServingStatus) {
		t.Helper()
		if r, err := watch.Recv(); err != nil || r.Status != want {
			t.Fatalf("Watch: %v, %v, want %v", r, err, want)
		}
	}
	next(serving)
	all(map[string]healthpb.HealthCheckResponse_ServingStatus{"": serving, Readiness: serving, Liveness: not})
	broken.Store(true)
	next(not)
	all(map[string]healthpb.HealthCheckResponse_ServingStatus{"": serving, Readiness: not, Liveness: not})
	broken.Store(false)
	next(serving)
	h.Shutdown()
	next(not)
	if _, err := watch.Recv(); status.Code(err) != codes.Unavailable {
		t.Errorf("Watch after Shutdown: %v", err)
	}
	all(map[string]healthpb.HealthCheckResponse_ServingStatus{"": not, Readiness: not, Liveness: not})
}
