package grpcserve

import (
	"context"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
)

// Names of the services of grpc.health.v1 that are probes, such as those of Kubernetes (grpc.service).
const (
	// Liveness is SERVING while the process works. If it does not, a restart may help.
	Liveness = "liveness"
	// Readiness is SERVING while the process does its work. A restart does not help otherwise.
	Readiness = "readiness"
)

const (
	// probeTimeout limits a probe.
	probeTimeout = 2 * time.Second
	// probeInterval is the interval of the probes of a Watch.
	probeInterval = time.Second
)

// Health is a health server whose status of some services is the result of a function at the time of the call.
type Health struct {
	*health.Server
	probes map[string]func(context.Context) error
	ended  context.Context
	end    context.CancelFunc
}

// NewHealth returns a server for the probes, by the name of the service. A probe returns nil for SERVING, and must end
// with its context.
func NewHealth(probes map[string]func(context.Context) error) *Health {
	h := &Health{Server: health.NewServer(), probes: probes}
	h.ended, h.end = context.WithCancel(context.Background())
	return h
}

// Shutdown sets all services to NOT_SERVING for good, and ends the watches of probes.
func (h *Health) Shutdown() {
	h.end()
	h.Server.Shutdown()
}

// result calls a probe.
func (h *Health) result(ctx context.Context, probe func(context.Context) error) healthpb.HealthCheckResponse_ServingStatus {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	if h.ended.Err() != nil || probe(ctx) != nil {
		return healthpb.HealthCheckResponse_NOT_SERVING
	}
	return healthpb.HealthCheckResponse_SERVING
}

// Check implements healthpb.HealthServer.
func (h *Health) Check(ctx context.Context, req *healthpb.HealthCheckRequest) (*healthpb.HealthCheckResponse, error) {
	if probe := h.probes[req.GetService()]; probe != nil {
		return &healthpb.HealthCheckResponse{Status: h.result(ctx, probe)}, nil
	}
	return h.Server.Check(ctx, req)
}

// List implements healthpb.HealthServer.
func (h *Health) List(ctx context.Context, req *healthpb.HealthListRequest) (*healthpb.HealthListResponse, error) {
	all, err := h.Server.List(ctx, req)
	if err != nil {
		return nil, err
	}
	for name, probe := range h.probes {
		all.Statuses[name] = &healthpb.HealthCheckResponse{Status: h.result(ctx, probe)}
	}
	return all, nil
}

// Watch implements healthpb.HealthServer. It sends the status of a probe, and each change within probeInterval.
func (h *Health) Watch(req *healthpb.HealthCheckRequest, stream grpc.ServerStreamingServer[healthpb.HealthCheckResponse]) error {
	probe := h.probes[req.GetService()]
	if probe == nil {
		return h.Server.Watch(req, stream)
	}
	tick := time.NewTicker(probeInterval)
	defer tick.Stop()
	last := healthpb.HealthCheckResponse_UNKNOWN
	for {
		if now := h.result(stream.Context(), probe); now != last {
			if err := stream.Send(&healthpb.HealthCheckResponse{Status: now}); err != nil {
				return err
			}
			last = now
		}
		if h.ended.Err() != nil {
			return status.Error(codes.Unavailable, "the server is stopping")
		}
		select {
		case <-stream.Context().Done():
			return context.Cause(stream.Context())
		case <-h.ended.Done():
		case <-tick.C:
		}
	}
}
