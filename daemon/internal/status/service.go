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
	"github.com/fared/fared/internal/grpcserve"
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

// DrainRequest is a request to take a target out of service (On) or to return it to service. Force allows a drain that
// leaves a reachable destination without any plane. Reason is the caller's, "" without one.
type DrainRequest struct {
	Target    DrainTarget
	On, Force bool
	Reason    string
}

// ServiceConfig configures the services. Every function may be called from any goroutine.
type ServiceConfig struct {
	Reader *Reader
	// Version is the program's version; Started is the start time of the process.
	Version string
	Started time.Time
	// Explain is called on the loop's goroutine. It returns false for an unknown destination.
	Explain func(Key) (Explanation, bool)
	// Drain drains or undrains a target, and records that it did. It returns the target in the form of Process.Drains
	// and the sessions concerned. Draining a drained target is not an error. Errors are Problems.
	Drain func(context.Context, DrainRequest) (DrainTarget, []string, error)
	// ClearSession closes the established session of this name, which connects again, and records that it did. Errors
	// are Problems.
	ClearSession func(ctx context.Context, session string) error
	// Reload reads the configuration again, records that it did, and returns the changes made, or with dryRun the
	// changes it would make. Errors are Problems.
	Reload func(ctx context.Context, dryRun bool) ([]string, error)
	// Record appends an event, of a refused call; nil leaves such calls to the log, which has them too.
	Record func(Event)
	// Proofs are the results of probes; nil means that none are sent.
	Proofs Proofs
	// MaxWatches bounds concurrent WatchWeights and WatchEvents calls: those of callers that may only read, and
	// separately those of operators, so that readers cannot shut out operators. A client (grpcserve.Caller) may have
	// half of them. 0 means DefaultMaxWatches.
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

	watches  [accessRights]atomic.Int64 // by the right of the caller
	watchers [accessRights]grpcserve.Clients
	stopping chan struct{} // closed when the server stops, which ends all watches
	stopped  atomic.Bool
	panics   atomic.Uint64
	refusals grpcserve.Refusals
	calls    [codes.Unauthenticated + 1]atomic.Uint64 // finished calls by code
}

// NewService returns a Service, or an error if the configuration is incomplete.
func NewService(c ServiceConfig) (*Service, error) {
	switch {
	case c.Reader == nil, c.Explain == nil, c.Drain == nil, c.ClearSession == nil, c.Reload == nil:
		return nil, errors.New("status service: Reader, Explain, Drain, ClearSession and Reload are needed")
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

// startWatch counts a watch of the call that ctx belongs to, or returns an error if there are too many. The caller
// calls done at its end.
func (s *Service) startWatch(ctx context.Context) (done func(), err error) {
	client, right := grpcserve.CallerOf(ctx).Client(), streamAccess(ctx)
	release, ok := s.watchers[right].Take(client, max(1, s.c.MaxWatches/2))
	if !ok {
		return nil, tooManyWatches("too many concurrent watches of " + client + ", which may have half of all")
	}
	if n := s.watches[right].Add(1); n > int64(s.c.MaxWatches) {
		s.watches[right].Add(-1)
		release()
		return nil, tooManyWatches("too many concurrent watches")
	}
	return func() {
		s.watches[right].Add(-1)
		release()
	}, nil
}

func tooManyWatches(what string) error {
	return rpcError(codes.ResourceExhausted, reasonWatches, what+": end one, or share one among the readers of this host",
		&errdetails.QuotaFailure{Violations: []*errdetails.QuotaFailure_Violation{{
			Subject: "watches", Description: "limit of concurrent WatchWeights and WatchEvents calls",
		}}})
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
