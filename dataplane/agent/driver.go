package agent

import (
	"log/slog"
	"runtime/debug"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/dataplane/memory"
)

// driver is what makes this machine forward.
type driver struct {
	name      string
	forwarder contract.Forwarder
	// settle is called once, when everything that a journal promised was committed: what is left over goes.
	settle func() error
	// healthy says what is wrong, nil for nothing.
	healthy func() error
	collect func(sampler) // nil: no metrics of its own
	close   func() error
}

// nothing is a Forwarder that forwards nothing.
type nothing struct{}

func (nothing) Capabilities() *farev1.Capabilities     { return memory.DefaultCapabilities() }
func (nothing) SetForwarding(*farev1.Forwarding) error { return nil }
func (nothing) Commit([]contract.Change) error         { return nil }

func memoryDriver() *driver {
	none := func() error { return nil }
	return &driver{name: Memory, forwarder: nothing{}, settle: none, healthy: none, close: none}
}

// watched is a Forwarder that is measured, and whose panics are errors of the call: an operation that meets a fault must
// not end the process each time that the journal brings it back.
type watched struct {
	contract.Forwarder
	log     *slog.Logger
	seconds prometheus.Histogram
	errors  atomic.Uint64
	panics  atomic.Uint64
}

func newWatched(f contract.Forwarder, log *slog.Logger) *watched {
	return &watched{Forwarder: f, log: log, seconds: prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: nameCommitSeconds, Help: "How long the driver took to carry out a batch, from the call to packets obeying.",
		Buckets: prometheus.ExponentialBuckets(10e-6, 2.5, 14), // 10 µs to 1.5 s
	})}
}

// caught turns a panic into an error.
func (w *watched) caught(doing string, err *error) {
	if p := recover(); p != nil {
		w.panics.Add(1)
		w.log.Error("the driver panicked", "doing", doing, "panic", p, "stack", string(debug.Stack()))
		*err = status.Errorf(codes.Internal, "a fault in the data-plane agent, which goes on: report it with what its log says about %s", doing)
	}
}

func (w *watched) SetForwarding(forwarding *farev1.Forwarding) (err error) {
	defer w.caught("Hello", &err)
	return w.Forwarder.SetForwarding(forwarding)
}

func (w *watched) Commit(changes []contract.Change) (err error) {
	begin := time.Now()
	defer func() {
		w.seconds.Observe(time.Since(begin).Seconds())
		if err != nil {
			w.errors.Add(1)
		}
	}()
	defer w.caught("a commit", &err)
	return w.Forwarder.Commit(changes)
}

// Recover implements contract.Recoverer.
func (w *watched) Recover() (found *farev1.SnapshotResponse) {
	var err error // logged
	defer w.caught("taking over", &err)
	if r, ok := w.Forwarder.(contract.Recoverer); ok {
		return r.Recover()
	}
	return nil
}

// Landing implements contract.Lander.
func (w *watched) Landing(request *farev1.LandingRequest) (_ *farev1.LandingResponse, err error) {
	l, ok := w.Forwarder.(contract.Lander)
	if !ok {
		return nil, status.Error(codes.Unimplemented, "this data plane does not place flows by a hash")
	}
	defer w.caught("Landing", &err)
	return l.Landing(request)
}

// Counters implements contract.Counter.
func (w *watched) Counters(request *farev1.CountersRequest, send func(*farev1.CountersResponse) error) (err error) {
	c, ok := w.Forwarder.(contract.Counter)
	if !ok {
		return status.Error(codes.Unimplemented, "this data plane counts nothing")
	}
	defer w.caught("Counters", &err)
	return c.Counters(request, send)
}
