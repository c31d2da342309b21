package status

import (
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/metric"
)

func newMetrics(t testing.TB, l *fakeLoop) (*prometheus.Registry, *Metrics, *Service) {
	t.Helper()
	reg := prometheus.NewPedanticRegistry()
	s := l.service(t, func(c *ServiceConfig) { c.Proofs = fakeProofs{} })
	m, err := NewMetrics(reg, MetricsConfig{Reader: s.c.Reader, Service: s, Version: "v1"})
	if err != nil {
		t.Fatal(err)
	}
	return reg, m, s
}

func gather(t *testing.T, g prometheus.Gatherer) map[string]*dto.MetricFamily {
	t.Helper()
	families, err := g.Gather()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]*dto.MetricFamily{}
	for _, f := range families {
		out[f.GetName()] = f
	}
	return out
}

// TestMetricsAreDescribed checks that each metric of names.go is exported, with its type, meaning and labels, and no
// other.
func TestMetricsAreDescribed(t *testing.T) {
	l := newFake(1, 10)
	l.builder.Event(Event{Kind: EventReload})
	l.builder.Commit()
	l.start(t)
	reg, _, s := newMetrics(t, l)
	srv := serve(t, s, nil)
	if _, err := srv.fabric.GetStatus(t.Context(), &farev1.GetStatusRequest{}); err != nil {
		t.Fatal(err)
	}
	families := gather(t, reg)
	for _, m := range Exported() {
		f := families[m.Name]
		delete(families, m.Name)
		if got := strings.ToLower(f.GetType().String()); got != string(m.Type) || f.GetHelp() != m.Help || len(f.GetMetric()) == 0 {
			t.Errorf("%s: exported as a %s, %q, with %d series; described as a %s, %q", m.Name, got, f.GetHelp(), len(f.GetMetric()), m.Type, m.Help)
		}
		for _, series := range f.GetMetric() {
			var got []string
			for _, p := range series.Label {
				got = append(got, p.GetName())
			}
			if !slices.Equal(got, slices.Sorted(slices.Values(m.Labels))) {
				t.Errorf("%s has labels %s, described with %s", m.Name, got, m.Labels)
			}
		}
	}
	for name := range families {
		t.Errorf("%s is exported and not described", name)
	}
}

// series returns a family's values by "label=value,...".
func series(f *dto.MetricFamily) map[string]float64 {
	out := map[string]float64{}
	for _, m := range f.GetMetric() {
		var labels []string
		for _, p := range m.Label {
			labels = append(labels, p.GetName()+"="+p.GetValue())
		}
		out[strings.Join(labels, ",")] = m.GetGauge().GetValue() + m.GetCounter().GetValue()
	}
	return out
}

func TestMetricsValues(t *testing.T) {
	l := newFake(1, 10)
	l.vectors[1] = Vector{Reachable: true, Planes: []VectorPlane{{Weight: 3}, {Weight: 1}}}
	l.builder.MarkVector(1)
	l.planes[1].SubPorts = []SubPort{{Device: "p1a", Carrier: true, Drained: true, Reason: "drained"}, {Device: "p1b", Carrier: true, Draining: true, Reason: "drained"}, {Device: "p1c", Reason: "no carrier"}}
	for i := range 3 {
		l.destinations[prefixAt(i)] = Destination{Vector: uint32(i % 2)}
		l.builder.MarkDestination(prefixAt(i))
	}
	l.builder.Event(Event{Kind: EventDrain})
	l.builder.Event(Event{Kind: EventDrain})
	l.builder.Commit()
	l.start(t)
	reg, m, _ := newMetrics(t, l)
	m.ObserveStep(3 * time.Microsecond)
	m.ObserveStep(5 * time.Second)
	m.ObserveAcknowledged(200 * time.Microsecond)
	got := gather(t, reg)
	for _, c := range []struct {
		metric *metric.Metric
		labels string
		want   float64
	}{
		{metricLoopResponding, "", 1},
		{metricConverged, "", 1},
		{metricRevision, "", 2},
		{metricSessions, "state=established", 1},
		{metricSessions, "state=idle", 1},
		{metricSessions, "state=held", 0},
		{metricSessionUp, "device=p0a,plane=p0,session=p0/p0a", 1},
		{metricSessionUp, "device=p0b,plane=p0,session=p0/p0b", 0},
		{metricSessionGeneration, "session=p0/p0a", 3},
		{metricSessionFlaps, "session=p0/p0a", 2},
		{metricBandwidthIgnored, "plane=p0,reason=below-minimum,session=p0/p0a", 3},
		{metricSessionBFD, "session=p0/p0a", 1},
		{metricSessionRoutes, "session=p0/p0a,use=received", 7},
		{metricSessionRoutes, "session=p0/p0a,use=used", 4},
		{metricSessionRoutes, "session=p0/p0a,use=advertised", 8},
		{metricSessionIgnored, "reason=looped,session=p0/p0a", 2},
		{metricGuardDropped, "reason=bad-marker,session=p0/p0a", 5},
		{metricInputsIgnored, "reason=old-generation", 3},
		{metricDestinations, "", 3},
		{metricReachable, "", 1},
		{metricVectors, "", 1},
		{metricPlaneUp, "plane=p0", 1},
		{metricPlaneDrained, "plane=p1", 1},
		{metricPlaneBandwidth, "plane=p0", 400e9},
		{metricPlaneWeight, "plane=p0", 0.75},
		{metricPlaneWeight, "plane=p1", 0.25},
		{metricSubPortLink, "device=p0b,plane=p0", 1},
		{metricSubPortLink, "device=p1c,plane=p1", 0},
		{metricSubPortDrained, "device=p0b,plane=p0", 0},
		{metricSubPortDrained, "device=p1a,plane=p1", 1},
		{metricSubPortDrained, "device=p1b,plane=p1", 1},
		{metricSubPortUp, "device=p0a,plane=p0", 1},
		{metricSubPortUp, "device=p0b,plane=p0", 0},
		{metricSubPortSpeed, "device=p0b,plane=p0", 400e9},
		{metricSubPortDamped, "device=p0b,plane=p0", 3},
		{metricEvents, "kind=drain", 2},
		{metricEvents, "kind=reload", 0},
		{metricQueue, "queue=speaker", 2},
		{metricDataplaneConnected, "", 1},
		{metricDataplaneOperations, "level=group,result=refused", 1},
		{metricDataplaneOperations, "level=destination,result=in_effect", 8},
		{metricDataplanePending, "", 1},
		{metricDataplaneApproximate, "", 2},
		{metricDataplaneRefused, "", 3},
		{metricDataplaneIntact, "", 0},
		{metricDataplaneLimited, "reason=rp-filter", 1},
		{metricSlotTableFailing, "", 0},
		{metricWatches, "", 0},
		{metricPanics, "", 0},
	} {
		if v, ok := series(got[c.metric.Name])[c.labels]; !ok || v != c.want {
			t.Errorf("%s{%s} = %v (there: %v), want %v", c.metric.Name, c.labels, v, ok, c.want)
		}
	}
	step, ack := got[metricStep.Name].Metric[0].Histogram, got[metricAcknowledged.Name].Metric[0].Histogram
	if step.GetSampleCount() != 2 || step.GetSampleSum() < 5 || ack.GetSampleCount() != 1 {
		t.Errorf("histograms: %v, %v", step, ack)
	}

	// A daemon without a data plane has no metrics of one, which would read as a lost connection.
	l.on(t, func() {
		l.process.Dataplane, l.process.SlotTable = Dataplane{}, SlotTable{Failures: 1, Failure: "disk full"}
	})
	got = gather(t, reg)
	for name := range got {
		if strings.HasPrefix(name, "fared_dataplane_") {
			t.Errorf("%s is exported without a data plane", name)
		}
	}
	if failing := series(got[metricSlotTableFailing.Name])[""]; failing != 1 {
		t.Errorf("%s is %v after a failure", metricSlotTableFailing.Name, failing)
	}

	// A removed session takes its series along.
	l.on(t, func() { l.sessions = l.sessions[1:] })
	for name, f := range gather(t, reg) {
		for labels := range series(f) {
			if strings.Contains(labels, "session=p0/p0a") {
				t.Errorf("%s{%s} outlives its session", name, labels)
			}
		}
	}
}

func TestMetricsRegisterTwice(t *testing.T) {
	l := newFake(1, 10)
	reg, _, s := newMetrics(t, l)
	if _, err := NewMetrics(reg, MetricsConfig{Reader: s.c.Reader, Service: s}); err == nil {
		t.Error("no error for a second registration")
	}
	if _, err := NewMetrics(reg, MetricsConfig{}); err == nil {
		t.Error("no error without a reader")
	}
	var none *Metrics
	none.ObserveStep(time.Second)
	none.ObserveAcknowledged(time.Second)
}

func TestHandler(t *testing.T) {
	l := newFake(1, 10)
	reg, _, s := newMetrics(t, l)
	h := Handler(reg, s.c.Reader)
	conn := serve(t, s, nil).conn
	// probe checks that a probe over gRPC agrees with its status code over HTTP.
	probe := func(name string, code int) {
		t.Helper()
		want := healthpb.HealthCheckResponse_NOT_SERVING
		if code == http.StatusOK {
			want = healthpb.HealthCheckResponse_SERVING
		}
		got, err := healthpb.NewHealthClient(conn).Check(t.Context(), &healthpb.HealthCheckRequest{Service: name})
		if err != nil || got.Status != want {
			t.Errorf("%s: %v, %v, want %v", name, got, err, want)
		}
	}
	get := func(method, path string) (int, string) {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), method, path, nil))
		body, err := io.ReadAll(w.Result().Body)
		if err != nil {
			t.Fatal(err)
		}
		return w.Code, string(body)
	}
	t.Run("loop running", func(t *testing.T) {
		l.start(t)
		if code, body := get("GET", "/healthz"); code != http.StatusOK || body != "ok\n" {
			t.Errorf("healthz: %d %q", code, body)
		}
		probe("liveness", http.StatusOK)
		for _, c := range []struct {
			process Process
			code    int
			want    string
		}{
			{Process{Converged: true}, http.StatusOK, "ok\n"}, // a leaf without a data plane
			{Process{}, http.StatusServiceUnavailable, "the start is not over"},
			{Process{Converged: true, Dataplane: Dataplane{Address: "unix:/x", Connected: true}}, http.StatusOK, "ok\n"},
			{Process{Converged: true, Dataplane: Dataplane{Address: "unix:/x"}}, http.StatusServiceUnavailable, "no data plane is connected at unix:/x\n"},
		} {
			if err := l.do(t.Context(), func() { l.process = c.process }); err != nil {
				t.Fatal(err)
			}
			if code, body := get("GET", "/readyz"); code != c.code || !strings.Contains(body, c.want) {
				t.Errorf("readyz of %+v: %d %q", c.process, code, body)
			}
			probe("readiness", c.code)
			probe("liveness", http.StatusOK)
		}
		if code, body := get("GET", "/metrics"); code != http.StatusOK || !strings.Contains(body, "\nfared_loop_responding 1\n") || !strings.Contains(body, "\nfared_revision 1\n") {
			t.Errorf("metrics: %d\n%s", code, body)
		}
		if code, _ := get("POST", "/metrics"); code != http.StatusMethodNotAllowed {
			t.Errorf("POST: %d", code)
		}
	})
	// The loop has stopped with the subtest: metrics that need no loop are still exported.
	if code, body := get("GET", "/healthz"); code != http.StatusServiceUnavailable || !strings.Contains(body, errLoopStopped.Error()) {
		t.Errorf("healthz without a loop: %d %q", code, body)
	}
	probe("liveness", http.StatusServiceUnavailable)
	probe("readiness", http.StatusServiceUnavailable)
	if code, body := get("GET", "/readyz"); code != http.StatusServiceUnavailable || !strings.Contains(body, errLoopStopped.Error()) {
		t.Errorf("readyz without a loop: %d %q", code, body)
	}
	code, body := get("GET", "/metrics")
	if code != http.StatusOK || !strings.Contains(body, "\nfared_loop_responding 0\n") || !strings.Contains(body, "fared_build_info") || strings.Contains(body, "\nfared_revision") {
		t.Errorf("metrics without a loop: %d\n%s", code, body)
	}
}

func ExampleEventKind_String() {
	fmt.Println(EventSessionUp, EventEndOfRIB)
	// Output: session-up end-of-rib
}

// TestPlaneWeights checks the mean of shares: two destinations 3:1, a destination of each source group, one 1:1, two
// unreachable, one without a vector.
func TestPlaneWeights(t *testing.T) {
	l := newFake(1, 10).two()
	l.vectors[1] = Vector{Reachable: true, Planes: []VectorPlane{{Weight: 3}, {Weight: 1}}}
	l.vectors[2] = Vector{Reachable: true, Planes: []VectorPlane{{Weight: 1}, {Weight: 1}}}
	l.vectors[3] = Vector{Planes: []VectorPlane{{}, {}}}
	for id := range l.vectors {
		l.builder.MarkVector(id)
	}
	for i, d := range []struct {
		source int
		vector uint32
	}{{0, 1}, {1, 1}, {0, 2}, {0, 3}, {1, 3}, {0, 0}} {
		key := Key{prefixAt(i).Prefix, d.source}
		l.destinations[key] = Destination{Vector: d.vector}
		l.builder.MarkDestination(key)
	}
	l.builder.Commit()
	got := l.builder.build().planeWeights()
	if want := map[string]float64{"p0": (0.75 + 0.75 + 0.5) / 3, "p1": (0.25 + 0.5) / 3, "p2": 0.25 / 3}; !maps.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

// TestMetricsOfSources checks that with several source groups destinations are counted for each.
func TestMetricsOfSources(t *testing.T) {
	l := newFake(1, 10).two()
	for id, reachable := range map[uint32]bool{1: true, 2: false} {
		l.vectors[id] = Vector{Reachable: reachable}
		l.builder.MarkVector(id)
	}
	for i := range 3 {
		for source := range 2 {
			if key := (Key{prefixAt(i).Prefix, source}); i+source < 3 {
				l.destinations[key] = Destination{Vector: uint32(source + 1)}
				l.builder.MarkDestination(key)
			}
		}
	}
	l.builder.Commit()
	l.start(t)
	reg, _, service := newMetrics(t, l)
	got := gather(t, reg)
	for m, want := range map[*metric.Metric]map[string]float64{
		metricDestinations: {"source=10.255.0.1/32": 3, "source=10.255.0.2/32": 2},
		metricReachable:    {"source=10.255.0.1/32": 3, "source=10.255.0.2/32": 0},
	} {
		if !maps.Equal(series(got[m.Name]), want) {
			t.Errorf("%s: %v, want %v", m.Name, series(got[m.Name]), want)
		}
	}
	status, err := service.Fabric().GetStatus(t.Context(), &farev1.GetStatusRequest{})
	if err != nil || status.Destinations != 3 || status.DestinationsReachable != 3 || len(status.Loopbacks) != 5 {
		t.Errorf("status %v, %v: want 3 destinations, each counted once, and 5 loopbacks", status, err)
	}
}
