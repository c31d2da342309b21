package status

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"runtime"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"google.golang.org/grpc/codes"
)

// loopTimeout limits how long a scrape or a health check waits for the loop.
const loopTimeout = 2 * time.Second

// MetricsConfig configures the sources of metrics.
type MetricsConfig struct {
	Reader  *Reader
	Service *Service
	Version string
}

// Metrics exports the daemon's state. Each scrape reads all values except durations from a Report, so that there is one source of truth and
// series end with their session. A nil *Metrics observes nothing.
type Metrics struct {
	c            MetricsConfig
	descs        map[string]*prometheus.Desc
	several      bool // there are several source groups, which then are a label
	step         prometheus.Histogram
	acknowledged prometheus.Histogram
}

// metric describes a metric for Prometheus; histograms describe themselves.
type metric struct {
	name   string
	help   string
	kind   prometheus.ValueType
	labels []string
}

const (
	gauge   = prometheus.GaugeValue
	counter = prometheus.CounterValue
)

// scraped lists all metrics except the histograms.
var scraped = []metric{
	{nameBuildInfo, "Always 1; the labels identify the program.", gauge, []string{"version", "go_version"}},
	{nameLoopResponding, "1 when the daemon's loop answered this scrape; with 0 only metrics that need no answer are exported.", gauge, nil},
	{nameConverged, "1 after end-of-RIB from every session, or the start deadline.", gauge, nil},
	{nameRevision, "Revision of the state.", gauge, nil},
	{nameSessions, "Sessions by state.", gauge, []string{"state"}},
	{nameSessionUp, "1 when the session is established, drained or not.", gauge, []string{"session", "plane", "device"}},
	{nameSessionGeneration, "Times the session was established, its generation.", counter, []string{"session"}},
	{nameSessionFlaps, "Times the established session failed.", counter, []string{"session"}},
	{nameSessionBFD, "1 when the session's BFD is up and protects it; absent without BFD.", gauge, []string{"session"}},
	{nameSessionRoutes, "Routes of the session now: received = used + all of fared_session_routes_ignored.", gauge, []string{"session", "use"}},
	{nameSessionIgnored, "Routes of the session now that are not used, by reason.", gauge, []string{"session", "reason"}},
	{nameBandwidthIgnored, "Usable routes of the session now whose bandwidth the weights do not follow, by reason.", gauge, []string{"plane", "session", "reason"}},
	{nameGuardDropped, "Messages, routes and attributes that the guard dropped, by reason.", counter, []string{"session", "reason"}},
	{nameInputsIgnored, "Inputs that the path-bandwidth table did not use, by reason.", counter, []string{"reason"}},
	{nameDestinations, "Destinations known; by source group (its first loopback) where there are several.", gauge, nil},
	{nameReachable, "Destinations that have weights; by source group where there are several.", gauge, nil},
	{nameVectors, "Distinct weight vectors.", gauge, nil},
	{nameConflicts, "Destinations that several origins announce, as far as AS paths show.", gauge, nil},
	{nameClaimed, "Local loopbacks that another AS announces.", gauge, nil},
	{nameUnrecorded, "Events that are missing in record.file, because they could not be written.", counter, nil},
	{nameSlotTableFailures, "Failed publications of the slot table; each is repeated within a second.", counter, nil},
	{nameWithoutLanding, "Slots whose source port does not land on their sub-port, because the data plane's hash leaves none.", gauge, nil},
	{namePlaneUp, "1 when the plane is up.", gauge, []string{"plane"}},
	{namePlaneDrained, "1 when the plane is drained.", gauge, []string{"plane"}},
	{namePlaneBandwidth, "Sum of the plane's sub-ports that count, bit/s.", gauge, []string{"plane"}},
	{nameSubPortUp, "1 when the sub-port counts: it has a carrier, is not drained, and has no fault.", gauge, []string{"plane", "device"}},
	{nameSubPortSpeed, "Speed of the sub-port, bit/s.", gauge, []string{"plane", "device"}},
	{nameSubPortDamped, "Rises of the sub-port's link that damping has held.", counter, []string{"plane", "device"}},
	{nameEvents, "Events by kind.", counter, []string{"kind"}},
	{nameQueue, "Depth of a queue.", gauge, []string{"queue"}},
	{nameDataplaneConnected, "1 when the data plane is connected.", gauge, nil},
	{nameDataplaneOperations, "Operations toward the data plane by level and result (sent, in_effect, refused).", counter, []string{"level", "result"}},
	{nameDataplanePending, "Operations sent and not yet in effect.", gauge, nil},
	{nameDataplaneApproximate, "Weight vectors in the data plane now with a share off by more than 1 % of itself.", gauge, nil},
	{nameDataplaneRefused, "Objects whose last change the data plane refused, now.", gauge, nil},
	{nameDataplaneIntact, "0 while the layer below the data plane lacks an acknowledged object.", gauge, nil},
	{nameWatches, "WatchWeights and WatchEvents calls now.", gauge, nil},
	{nameCalls, "Finished gRPC calls by code.", counter, []string{"code"}},
	{namePanics, "Handlers that panicked.", counter, nil},
}

const (
	helpStep         = "Duration of a step of the daemon's loop."
	helpAcknowledged = "From an input at the loop to the data plane's confirmation that its result is in effect."
)

// NewMetrics registers the daemon's metrics.
func NewMetrics(reg prometheus.Registerer, c MetricsConfig) (*Metrics, error) {
	if c.Reader == nil || c.Service == nil {
		return nil, errors.New("metrics: Reader and Service are needed")
	}
	m := &Metrics{
		c: c, descs: make(map[string]*prometheus.Desc, len(scraped)),
		// 1 µs (no work) to 0.26 s; 25 µs to 0.8 s.
		step: prometheus.NewHistogram(prometheus.HistogramOpts{Name: nameStep, Help: helpStep, Buckets: prometheus.ExponentialBuckets(1e-6, 4, 10)}),
		acknowledged: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: nameAcknowledged, Help: helpAcknowledged, Buckets: prometheus.ExponentialBuckets(25e-6, 2, 16),
		}),
	}
	m.several = len(c.Reader.b.layout.Groups) > 1
	for _, d := range scraped {
		labels := d.labels
		if m.several && (d.name == nameDestinations || d.name == nameReachable) {
			labels = []string{"source"}
		}
		m.descs[d.name] = prometheus.NewDesc(d.name, d.help, labels, nil)
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
	for _, d := range scraped {
		ch <- m.descs[d.name]
	}
	m.step.Describe(ch)
	m.acknowledged.Describe(ch)
}

// Collect implements prometheus.Collector.
func (m *Metrics) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), loopTimeout)
	defer cancel()
	s := scrape{m, ch}
	r, err := m.c.Reader.Report(ctx)
	s.flag(nameLoopResponding, err == nil)
	if err == nil {
		s.report(r)
	}
	s.put(nameBuildInfo, 1, m.c.Version, runtime.Version())
	for kind, n := range m.c.Reader.b.journal.byKind() {
		if kind > 0 {
			s.put(nameEvents, float64(n), EventKind(kind).String())
		}
	}
	s.put(nameWatches, float64(m.c.Service.watching()))
	s.put(namePanics, float64(m.c.Service.panics.Load()))
	for code := range m.c.Service.calls {
		if n := m.c.Service.calls[code].Load(); n > 0 {
			s.put(nameCalls, float64(n), codes.Code(code).String())
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

func (s scrape) put(name string, value float64, labels ...string) {
	s.ch <- prometheus.MustNewConstMetric(s.m.descs[name], kinds[name], value, labels...)
}

// kinds maps the name of a scraped metric to its type.
var kinds = func() map[string]prometheus.ValueType {
	out := make(map[string]prometheus.ValueType, len(scraped))
	for _, d := range scraped {
		out[d.name] = d.kind
	}
	return out
}()

func (s scrape) flag(name string, on bool, labels ...string) {
	value := 0.0
	if on {
		value = 1
	}
	s.put(name, value, labels...)
}

func (s scrape) report(r *Report) {
	s.flag(nameConverged, r.Process.Converged)
	s.put(nameRevision, float64(r.View.Revision()))
	s.destinations(r.View)
	s.put(nameVectors, float64(r.View.Vectors()))
	s.put(nameConflicts, float64(r.Process.Conflicts))
	s.put(nameClaimed, float64(r.Process.ClaimedLoopbacks))
	s.put(nameUnrecorded, float64(r.Process.Unrecorded))
	s.put(nameSlotTableFailures, float64(r.Process.SlotTable.Failures))
	s.put(nameWithoutLanding, float64(r.Process.WithoutLanding))
	s.sessions(r)
	for _, p := range r.Planes {
		s.flag(namePlaneUp, p.Up, p.Name)
		s.flag(namePlaneDrained, p.Drained, p.Name)
		s.put(namePlaneBandwidth, float64(p.Bandwidth()), p.Name)
		for _, sp := range p.SubPorts {
			s.flag(nameSubPortUp, sp.Counts(), p.Name, sp.Device)
			s.put(nameSubPortSpeed, float64(sp.Speed), p.Name, sp.Device)
			s.put(nameSubPortDamped, float64(sp.HeldRises), p.Name, sp.Device)
		}
	}
	for _, c := range merge(nil, r.Process.Ignored) {
		s.put(nameInputsIgnored, float64(c.Value), c.Name)
	}
	for _, q := range merge(nil, r.Process.Queues) {
		s.put(nameQueue, float64(q.Value), q.Name)
	}
	d := &r.Process.Dataplane
	s.flag(nameDataplaneConnected, d.Connected)
	s.put(nameDataplanePending, float64(d.Pending))
	s.put(nameDataplaneApproximate, float64(d.Approximate))
	s.put(nameDataplaneRefused, float64(d.Refused))
	s.flag(nameDataplaneIntact, d.Damage == "")
	for _, o := range d.Operations {
		s.put(nameDataplaneOperations, float64(o.Sent), o.Level, "sent")
		s.put(nameDataplaneOperations, float64(o.InEffect), o.Level, "in_effect")
		s.put(nameDataplaneOperations, float64(o.Refused), o.Level, "refused")
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
		s.put(nameDestinations, float64(t.Destinations), labels...)
		s.put(nameReachable, float64(t.Reachable), labels...)
	}
}

// name returns the name of a source group in metrics: its first loopback.
func (g *LayoutGroup) name() string {
	if len(g.Sources) == 0 {
		return ""
	}
	return g.Sources[0].String()
}

func (s scrape) sessions(r *Report) {
	states := []Count{{StateIdle, 0}, {StateConnecting, 0}, {StateOpening, 0}, {StateEstablished, 0}, {StateDraining, 0}, {StateDrained, 0}, {StateHeld, 0}}
	for i := range r.Sessions {
		x := &r.Sessions[i]
		states = merge(states, []Count{{x.State, 1}})
		s.flag(nameSessionUp, x.Up(), x.Name, x.Plane, x.Device)
		s.put(nameSessionGeneration, float64(x.Generation), x.Name)
		s.put(nameSessionFlaps, float64(x.Flaps), x.Name)
		if x.BFD != "" {
			s.flag(nameSessionBFD, x.BFD == "up", x.Name)
		}
		s.put(nameSessionRoutes, float64(x.Received), x.Name, "received")
		s.put(nameSessionRoutes, float64(x.Used), x.Name, "used")
		s.put(nameSessionRoutes, float64(x.Advertised), x.Name, "advertised")
		for _, c := range merge(nil, x.Ignored) {
			s.put(nameSessionIgnored, float64(c.Value), x.Name, c.Name)
		}
		for _, f := range r.Process.Faults {
			if f.Kind == FaultBandwidthIgnored && f.Session == x.Name {
				s.put(nameBandwidthIgnored, float64(f.Routes), f.Plane, f.Session, f.Reason)
			}
		}
		for _, c := range merge(nil, x.Dropped) {
			s.put(nameGuardDropped, float64(c.Value), x.Name, c.Name)
		}
	}
	for _, c := range states {
		s.put(nameSessions, float64(c.Value), c.Name)
	}
}

// Handler serves GET /metrics in the Prometheus and OpenMetrics formats, and GET /healthz: 200 while the daemon's loop answers, else 503 with
// the reason.
func Handler(g prometheus.Gatherer, r *Reader) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(g, promhttp.HandlerOpts{
		MaxRequestsInFlight: 4, Timeout: 2 * loopTimeout, EnableOpenMetrics: true,
	}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, req *http.Request) {
		ctx, cancel := context.WithTimeout(req.Context(), loopTimeout)
		defer cancel()
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		if err := r.Ping(ctx); err != nil {
			w.WriteHeader(http.StatusServiceUnavailable)
			fmt.Fprintf(w, "the daemon's loop does not answer: %v\n", err)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	return mux
}
