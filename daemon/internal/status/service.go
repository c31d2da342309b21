package status

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"sync/atomic"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// DefaultMaxWatches is how many watches may run at once when ServiceConfig.MaxWatches is 0.
const DefaultMaxWatches = 64

// DrainTarget names what to drain: exactly one field is set.
type DrainTarget struct {
	Plane string
	// Leaf is a router ID or the address of a session.
	Leaf string
	// SubPort is a device.
	SubPort string
}

// ServiceConfig is what the services need of the daemon. Every function may be called from any goroutine.
type ServiceConfig struct {
	Reader *Reader
	// Version is the program's; Started is when the process started.
	Version string
	Started time.Time
	// Explain is called on the loop's goroutine. It returns false for an unknown destination.
	Explain func(netip.Prefix) (Explanation, bool)
	// Drain takes a target out of service (on) or back (off), and returns the sessions it concerns. Draining the drained
	// is no error. Errors are Problems.
	Drain func(ctx context.Context, target DrainTarget, on bool) ([]string, error)
	// Reload reads the configuration again and returns what changed, or would change. Errors are Problems.
	Reload func(ctx context.Context, dryRun bool) ([]string, error)
	// MaxWatches bounds WatchWeights and WatchEvents calls at once; 0: DefaultMaxWatches.
	MaxWatches int
	// Now is the clock; nil: time.Now.
	Now func() time.Time
	Log *slog.Logger
}

// Service implements fare.v1.WeightService and fare.v1.FabricService.
type Service struct {
	c       ServiceConfig
	weights weightService
	fabric  fabricService

	watches  atomic.Int64
	stopping chan struct{} // closed when the server stops: watches end
	stopped  atomic.Bool
	panics   atomic.Uint64
	calls    [codes.Unauthenticated + 1]atomic.Uint64 // finished calls by code
}

// NewService checks the configuration.
func NewService(c ServiceConfig) (*Service, error) {
	switch {
	case c.Reader == nil, c.Explain == nil, c.Drain == nil, c.Reload == nil:
		return nil, errors.New("status service: Reader, Explain, Drain and Reload are needed")
	case c.MaxWatches < 0:
		return nil, errors.New("status service: MaxWatches is negative")
	}
	if c.MaxWatches == 0 {
		c.MaxWatches = DefaultMaxWatches
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	s := &Service{c: c, stopping: make(chan struct{})}
	s.weights.s, s.fabric.s = s, s
	return s, nil
}

// Weights returns the implementation of WeightService, for servers other than Server.
func (s *Service) Weights() farev1.WeightServiceServer { return &s.weights }

// Fabric returns the implementation of FabricService.
func (s *Service) Fabric() farev1.FabricServiceServer { return &s.fabric }

// stop ends all watches, now and in future.
func (s *Service) stop() {
	if s.stopped.CompareAndSwap(false, true) {
		close(s.stopping)
	}
}

// startWatch counts a watch, or refuses it. The caller calls done at its end.
func (s *Service) startWatch() (done func(), err error) {
	if n := s.watches.Add(1); n > int64(s.c.MaxWatches) {
		s.watches.Add(-1)
		return nil, rpcError(codes.ResourceExhausted, reasonWatches,
			"too many watches at once: end one, or share one among readers of this host",
			&errdetails.QuotaFailure{Violations: []*errdetails.QuotaFailure_Violation{{
				Subject: "watches", Description: "bound on WatchWeights and WatchEvents calls at once",
			}}})
	}
	return func() { s.watches.Add(-1) }, nil
}

// errStopping ends a watch when the server stops.
func errStopping() error {
	return rpcError(codes.Unavailable, reasonStopping,
		"the daemon is stopping: watch again, resuming after the last revision", retryInfo())
}
