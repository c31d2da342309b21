package status

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// DefaultMaxWatches is the limit of concurrent watches of each access right when ServiceConfig.MaxWatches is 0.
const DefaultMaxWatches = 64

// DrainTarget names the target of a drain: exactly one field is set.
type DrainTarget struct {
	Plane string
	// Leaf is a router ID or the address of a session.
	Leaf string
	// SubPort is a device.
	SubPort string
}

// ServiceConfig configures the services. Every function may be called from any goroutine.
type ServiceConfig struct {
	Reader *Reader
	// Version is the program's version; Started is the start time of the process.
	Version string
	Started time.Time
	// Explain is called on the loop's goroutine. It returns false for an unknown destination.
	Explain func(Key) (Explanation, bool)
	// Drain takes a target out of service (on) or returns it to service (off). It returns the target in the form of Process.Drains and the
	// sessions concerned. Without force it refuses a drain that would leave a reachable destination without any plane. Draining a drained target
	// is not an error. Errors are Problems.
	Drain func(ctx context.Context, target DrainTarget, on, force bool) (DrainTarget, []string, error)
	// Reload reads the configuration again and returns the changes made, or with dryRun the changes it would make. Errors are Problems.
	Reload func(ctx context.Context, dryRun bool) ([]string, error)
	// MaxWatches bounds concurrent WatchWeights and WatchEvents calls: those of endpoints that only read, and separately those of the others, so
	// that readers cannot shut out operators. 0 means DefaultMaxWatches.
	MaxWatches int
	// Now is the clock; nil means time.Now.
	Now func() time.Time
	Log *slog.Logger
}

// Service implements fare.v1.WeightService and fare.v1.FabricService.
type Service struct {
	c       ServiceConfig
	weights weightService
	fabric  fabricService

	watches  [accessRights]atomic.Int64 // by the right of the endpoint
	stopping chan struct{}              // closed when the server stops, which ends all watches
	stopped  atomic.Bool
	panics   atomic.Uint64
	calls    [codes.Unauthenticated + 1]atomic.Uint64 // finished calls by code
}

// NewService returns a Service, or an error if the configuration is incomplete.
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

// stop ends all current and future watches.
func (s *Service) stop() {
	if s.stopped.CompareAndSwap(false, true) {
		close(s.stopping)
	}
}

// startWatch counts a watch of the call that ctx belongs to, or returns an error if there are too many. The caller calls done at its end.
func (s *Service) startWatch(ctx context.Context) (done func(), err error) {
	watches := &s.watches[accessOf(ctx)]
	if n := watches.Add(1); n > int64(s.c.MaxWatches) {
		watches.Add(-1)
		return nil, rpcError(codes.ResourceExhausted, reasonWatches,
			"too many concurrent watches: end one, or share one among the readers of this host",
			&errdetails.QuotaFailure{Violations: []*errdetails.QuotaFailure_Violation{{
				Subject: "watches", Description: "limit of concurrent WatchWeights and WatchEvents calls",
			}}})
	}
	return func() { watches.Add(-1) }, nil
}

// watching returns the number of watches of all endpoints.
func (s *Service) watching() (n int64) {
	for i := range s.watches {
		n += s.watches[i].Load()
	}
	return n
}

// errStopping ends a watch when the server stops.
func errStopping() error {
	return rpcError(codes.Unavailable, reasonStopping,
		"the daemon is stopping: watch again, resuming after the last revision", retryInfo())
}
