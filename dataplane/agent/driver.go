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
	"github.com/fared/fared/dataplane/internal/naming"
	"github.com/fared/fared/dataplane/internal/returning"
	"github.com/fared/fared/dataplane/memory"
	"github.com/fared/fared/internal/hostcheck"
)

// driver forwards on this machine.
type driver struct {
	name      string
	forwarder contract.Forwarder
	// settle removes leftovers of earlier runs. It is called once all state of a journal has been committed.
	settle func() error
	// limitations returns the current limitations of the host.
	limitations func() []hostcheck.Finding
	// healthy returns the current fault, or nil.
	healthy func() error
	kernel  prometheus.Histogram // of metricKernelSeconds; nil for drivers that do not change the kernel
	collect func(sampler)        // nil without metrics of the driver
	close   func() error
}

// nothing is a Forwarder that forwards nothing.
type nothing struct{}

func (nothing) Capabilities() *farev1.Capabilities     { return memory.DefaultCapabilities() }
func (nothing) SetForwarding(*farev1.Forwarding) error { return nil }
func (nothing) Commit([]contract.Change) error         { return nil }

func memoryDriver() *driver {
	none := func() error { return nil }
	return &driver{name: Memory, forwarder: nothing{}, settle: none, limitations: func() []hostcheck.Finding { return nil }, healthy: none, close: none}
}

// watched is a Forwarder that is measured, and whose panics become errors of the call: an operation that causes a panic
// must not end the process each time the journal restores it.
type watched struct {
	contract.Forwarder
	namer   *naming.Namer     // nil gives no names
	keeper  *returning.Keeper // nil follows no addresses
	log     *slog.Logger
	seconds prometheus.Histogram
	errors  atomic.Uint64
	panics  atomic.Uint64
}

func newWatched(f contract.Forwarder, namer *naming.Namer, keeper *returning.Keeper, log *slog.Logger) *watched {
	return &watched{Forwarder: f, namer: namer, keeper: keeper, log: log, seconds: metricCommitSeconds.New(durations())}
}

// durations are the bounds of histograms in seconds, 10 µs to 1.5 s.
func durations() []float64 { return prometheus.ExponentialBuckets(10e-6, 2.5, 14) }

// caught converts a panic into an error.
func (w *watched) caught(doing string, err *error) {
	if p := recover(); p != nil {
		w.panics.Add(1)
		w.log.Error("the driver panicked", "doing", doing, "panic", p, "stack", string(debug.Stack()))
		*err = status.Errorf(codes.Internal, "a fault in the data-plane agent, which continues: report it with the log entries about %s", doing)
	}
}

func (w *watched) SetForwarding(forwarding *farev1.Forwarding) (err error) {
	defer w.caught("Hello", &err)
	if w.namer != nil {
		if err := w.namer.Set(forwarding); err != nil {
			return err
		}
	}
	if w.keeper != nil {
		w.keeper.Set(forwarding)
	}
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

// Approximate implements contract.Approximator.
func (w *watched) Approximate(group uint32) (deviation string) {
	var err error // logged
	defer w.caught("judging weights", &err)
	if a, ok := w.Forwarder.(contract.Approximator); ok {
		return a.Approximate(group)
	}
	return ""
}

// WithoutIPv6 implements contract.Explainer.
func (w *watched) WithoutIPv6() string {
	if e, ok := w.Forwarder.(contract.Explainer); ok {
		return e.WithoutIPv6()
	}
	return ""
}

// Guard implements contract.Guardian.
func (w *watched) Guard(report func(*farev1.Integrity)) {
	if g, ok := w.Forwarder.(contract.Guardian); ok {
		g.Guard(report)
	}
}

// Retry implements contract.Retrier.
func (w *watched) Retry(again func()) {
	if r, ok := w.Forwarder.(contract.Retrier); ok {
		r.Retry(again)
	}
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
		return status.Error(codes.Unimplemented, "this data plane has no counters")
	}
	defer w.caught("Counters", &err)
	return c.Counters(request, send)
}
