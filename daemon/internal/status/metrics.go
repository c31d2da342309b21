package status

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"runtime"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"google.golang.org/grpc/codes"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/metric"
)

// loopTimeout limits how long a scrape or a health check waits for the loop.
const loopTimeout = 2 * time.Second

// MetricsConfig configures the sources of metrics.
type MetricsConfig struct {
	Reader  *Reader
	Service *Service
	Version string
}

// Metrics exports the daemon's state. Each scrape reads all values except durations from a Report, so that there is one
// source of truth and series end with their session. A nil *Metrics observes nothing.
type Metrics struct {
	c                       MetricsConfig
	several                 bool           // there are several source groups, which then are a label
	destinations, reachable *metric.Metric // with this label
	step                    prometheus.Histogram
	acknowledged            prometheus.Histogram
}

// NewMetrics registers the daemon's metrics.
func NewMetrics(reg prometheus.Registerer, c MetricsConfig) (*Metrics, error) {
	if c.Reader == nil || c.Service == nil {
		return nil, errors.New("metrics: Reader and Service are needed")
	}
	m := &Metrics{
		c: c, destinations: metricDestinations, reachable: metricReachable,
		// 1 µs (no work) to 0.26 s; 25 µs to 0.8 s.
		step: metricStep.New(prometheus.ExponentialBuckets(1e-6, 4, 10)), acknowledged: metricAcknowledged.New(prometheus.ExponentialBuckets(25e-6, 2, 16)),
	}
	if m.several = len(c.Reader.b.layout.Groups) > 1; m.several {
		m.destinations, m.reachable = metricDestinations.With("source"), metricReachable.With("source")
	}
	if err := reg.Register(m); err != nil {
		return nil, fmt.Errorf("register metrics: %w", err)
	}
	return m, nil
}

// ObserveStep records the duration of a step of the loop. It does not allocate.
func (m *Metrics) ObserveStep(d time.Duration) {
	if m != nil {
		m.step.Observe(d.Seconds())
	}
}

// ObserveAcknowledged records the time from an input to the data plane's "in effect". It does not allocate.
func (m *Metrics) ObserveAcknowledged(d time.Duration) {
	if m != nil {
		m.acknowledged.Observe(d.Seconds())
	}
}

// Describe implements prometheus.Collector.
func (m *Metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range exported.All() {
		switch d {
		case metricDestinations:
			d = m.destinations
		case metricReachable:
			d = m.reachable
		}
		ch <- d.Desc()
	}
}

// Collect implements prometheus.Collector.
func (m *Metrics) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), loopTimeout)
	defer cancel()
	s := scrape{m, ch}
	r, err := m.c.Reader.Report(ctx)
	s.flag(metricLoopResponding, err == nil)
	if err == nil {
		s.report(r)
	}
	if p := m.c.Service.c.Proofs; p != nil {
		s.proof(p.Status())
	}
	s.put(metricBuildInfo, 1, m.c.Version, runtime.Version())
	for kind, n := range m.c.Reader.b.journal.byKind() {
		if kind > 0 {
			s.put(metricEvents, float64(n), EventKind(kind).String())
		}
	}
	s.put(metricWatches, float64(m.c.Service.watching()))
	s.put(metricPanics, float64(m.c.Service.panics.Load()))
	for code := range m.c.Service.calls {
		if n := m.c.Service.calls[code].Load(); n > 0 {
			s.put(metricCalls, float64(n), codes.Code(code).String())
		}
	}
	m.step.Collect(ch)
	m.acknowledged.Collect(ch)
}

// scrape is one collection.
type scrape struct {
	m  *Metrics
	ch chan<- prometheus.Metric
}

func (s scrape) put(m *metric.Metric, value float64, labels ...string) {
	s.ch <- m.Sample(value, labels...)
}

func (s scrape) flag(m *metric.Metric, on bool, labels ...string) {
	s.ch <- m.Flag(on, labels...)
}

func (s scrape) report(r *Report) {
	s.flag(metricConverged, r.Process.Converged)
	s.put(metricRevision, float64(r.View.Revision()))
	s.destinations(r.View)
	s.put(metricVectors, float64(r.View.Vectors()))
	s.put(metricConflicts, float64(r.Process.Conflicts))
	s.put(metricClaimed, float64(r.Process.ClaimedLoopbacks))
	for _, c := range r.Process.Avoided {
		s.put(metricProofAvoided, float64(c.Value), c.Name)
	}
	s.put(metricUnrecorded, float64(r.Process.Unrecorded))
	s.put(metricUnlogged, float64(r.Process.Unlogged))
	s.put(metricSlotTableFailures, float64(r.Process.SlotTable.Failures))
	s.flag(metricSlotTableFailing, r.Process.SlotTable.Failure != "")
	s.flag(metricDrainsUnsaved, r.Process.DrainsFailure != "")
	s.put(metricTracesDropped, float64(r.Process.TracesDropped))
	s.put(metricWithoutLanding, float64(r.Process.WithoutLanding))
	s.sessions(r)
	weights := r.View.planeWeights()
	for _, p := range r.Planes {
		s.flag(metricPlaneUp, p.Up, p.Name)
		s.flag(metricPlaneDrained, p.Drained, p.Name)
		s.put(metricPlaneBandwidth, float64(p.Bandwidth()), p.Name)
		s.put(metricPlaneWeight, weights[p.Name], p.Name)
		for _, sp := range p.SubPorts {
			s.flag(metricSubPortUp, sp.Counts(), p.Name, sp.Device)
			s.flag(metricSubPortLink, sp.Carrier, p.Name, sp.Device)
			s.flag(metricSubPortDrained, sp.Drained || sp.Draining, p.Name, sp.Device)
			s.put(metricSubPortSpeed, float64(sp.Speed), p.Name, sp.Device)
			s.put(metricSubPortDamped, float64(sp.HeldRises), p.Name, sp.Device)
		}
	}
	for _, c := range merge(nil, r.Process.Ignored) {
		s.put(metricInputsIgnored, float64(c.Value), c.Name)
	}
	for _, q := range merge(nil, r.Process.Queues) {
		s.put(metricQueue, float64(q.Value), q.Name)
	}
	if r.Process.Dataplane.Address != "" {
		s.dataplane(&r.Process.Dataplane)
	}
}

// reasons counts the limitations by reason.
func reasons(limitations []Limitation) []Count {
	out := make([]Count, len(limitations))
	for i, x := range limitations {
		out[i] = Count{x.Reason, 1}
	}
	return out
}

func (s scrape) dataplane(d *Dataplane) {
	s.flag(metricDataplaneConnected, d.Connected)
	s.put(metricDataplanePending, float64(d.Pending))
	s.put(metricDataplaneApproximate, float64(d.Approximate))
	s.put(metricDataplaneRefused, float64(d.Refused))
	s.flag(metricDataplaneIntact, d.Damage == "")
	for _, x := range merge(nil, reasons(d.Limitations)) {
		s.put(metricDataplaneLimited, 1, x.Name)
	}
	for _, o := range d.Operations {
		s.put(metricDataplaneOperations, float64(o.Sent), o.Level, "sent")
		s.put(metricDataplaneOperations, float64(o.InEffect), o.Level, "in_effect")
		s.put(metricDataplaneOperations, float64(o.Refused), o.Level, "refused")
	}
}

// destinations counts destinations, by source group if there are several.
func (s scrape) destinations(v *View) {
	_, groups := v.Tally()
	for i, t := range groups {
		var labels []string
		if s.m.several {
			labels = []string{v.layout.Groups[i].name()}
		}
		s.put(s.m.destinations, float64(t.Destinations), labels...)
		s.put(s.m.reachable, float64(t.Reachable), labels...)
	}
}

// name returns the name of a source group in metrics: its first loopback.
func (g *LayoutGroup) name() string {
	if len(g.Sources) == 0 {
		return ""
	}
	return g.Sources[0].String()
}

// metricOfFault has the metric of each kind of fault.
var metricOfFault = map[string]*metric.Metric{FaultBandwidthIgnored: metricBandwidthIgnored, FaultRoutesDropped: metricRoutesDropped}

func (s scrape) sessions(r *Report) {
	states := []Count{{StateIdle, 0}, {StateConnecting, 0}, {StateOpening, 0}, {StateEstablished, 0}, {StateDraining, 0}, {StateDrained, 0}, {StateHeld, 0}, {StateWaiting, 0}}
	for i := range r.Sessions {
		x := &r.Sessions[i]
		states = merge(states, []Count{{x.State, 1}})
		s.flag(metricSessionUp, x.Up(), x.Name, x.Plane, x.Device)
		s.put(metricSessionGeneration, float64(x.Generation), x.Name)
		s.put(metricSessionFlaps, float64(x.Flaps), x.Name)
		if x.BFD != "" {
			s.flag(metricSessionBFD, x.BFD == "up", x.Name)
		}
		s.put(metricSessionRoutes, float64(x.Received), x.Name, "received")
		s.put(metricSessionRoutes, float64(x.Used), x.Name, "used")
		s.put(metricSessionRoutes, float64(x.Advertised), x.Name, "advertised")
		for _, c := range merge(nil, x.Ignored) {
			s.put(metricSessionIgnored, float64(c.Value), x.Name, c.Name)
		}
		for _, f := range r.Process.Faults {
			if m := metricOfFault[f.Kind]; m != nil && f.Session == x.Name {
				s.put(m, float64(f.Routes), f.Plane, f.Session, f.Reason)
			}
		}
		for _, c := range merge(nil, x.Dropped) {
			s.put(metricGuardDropped, float64(c.Value), x.Name, c.Name)
		}
	}
	for _, c := range states {
		s.put(metricSessions, float64(c.Value), c.Name)
	}
}

// Handler serves GET /metrics in the Prometheus and OpenMetrics formats, and two probes that answer 200, or 503 with
// the reason: GET /healthz while the daemon's loop answers, and GET /readyz as Reader.Ready.
func Handler(g prometheus.Gatherer, r *Reader) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(g, promhttp.HandlerOpts{
		MaxRequestsInFlight: 4, Timeout: 2 * loopTimeout, EnableOpenMetrics: true,
	}))
	probe := func(path string, check func(context.Context) error) {
		mux.HandleFunc("GET "+path, func(w http.ResponseWriter, req *http.Request) {
			ctx, cancel := context.WithTimeout(req.Context(), loopTimeout)
			defer cancel()
			w.Header().Set("Content-Type", "text/plain; charset=utf-8")
			if err := check(ctx); err != nil {
				w.WriteHeader(http.StatusServiceUnavailable)
				fmt.Fprintln(w, err)
				return
			}
			fmt.Fprintln(w, "ok")
		})
	}
	probe("/healthz", func(ctx context.Context) error {
		if err := r.Ping(ctx); err != nil {
			return fmt.Errorf("the daemon's loop does not answer: %w", err)
		}
		return nil
	})
	probe("/readyz", r.Ready)
	return mux
}

// proof exports the results of probes.
func (s scrape) proof(p *farev1.ProofStatus) {
	s.flag(metricProofActive, p.Inactive == "")
	s.put(metricProofDestinations, float64(p.Answering), "answering")
	s.put(metricProofDestinations, float64(p.Destinations-p.Answering), "silent")
	for _, x := range p.Planes {
		s.put(metricProofProbes, float64(x.Answered), x.Plane, "answered")
		s.put(metricProofProbes, float64(x.Lost), x.Plane, "lost")
		if x.RoundTripNs > 0 {
			s.put(metricProofRoundTrip, float64(x.RoundTripNs), x.Plane)
		}
	}
	type series struct{ plane, device, problem, direction string }
	findings := map[series]float64{}
	for _, f := range p.Findings {
		findings[series{f.Plane, f.Device, f.Problem, f.Direction}]++
	}
	for k, n := range findings {
		s.put(metricProofFindings, n, k.plane, k.device, k.problem, k.direction)
	}
	for _, c := range p.Counters {
		reason, _ := strings.CutPrefix(c.Name, `proof_dropped{reason="`)
		s.put(metricProofDropped, float64(c.Value), strings.TrimSuffix(reason, `"}`))
	}
}
