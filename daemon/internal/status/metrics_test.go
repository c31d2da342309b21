package status

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	farev1 "github.com/fared/fared/api/fare/v1"
)

func newMetrics(t testing.TB, l *fakeLoop) (*prometheus.Registry, *Metrics, *Service) {
	t.Helper()
	reg := prometheus.NewPedanticRegistry()
	s := l.service(t, nil)
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

// documented reads the comments of names.go: metric name to comment.
func documented(t *testing.T) map[string]string {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), "names.go", nil, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for _, d := range file.Decls {
		gen, ok := d.(*ast.GenDecl)
		if !ok || gen.Tok != token.CONST {
			continue
		}
		for _, spec := range gen.Specs {
			v := spec.(*ast.ValueSpec)
			name, err := strconv.Unquote(v.Values[0].(*ast.BasicLit).Value)
			if err != nil {
				t.Fatal(err)
			}
			out[name] = strings.Join(strings.Fields(v.Doc.Text()), " ")
		}
	}
	return out
}

// TestMetricsAreDocumented checks that the exported metrics are exactly those of names.go, with the documented properties.
func TestMetricsAreDocumented(t *testing.T) {
	l := newFake(1, 10)
	l.builder.Event(Event{Kind: EventReload})
	l.builder.Commit()
	l.start(t)
	reg, _, s := newMetrics(t, l)
	srv := serve(t, s, nil)
	if _, err := srv.fabric.GetStatus(t.Context(), &farev1.GetStatusRequest{}); err != nil {
		t.Fatal(err)
	}
	docs := documented(t)
	families := gather(t, reg)
	if got, want := slices.Sorted(maps.Keys(families)), slices.Sorted(maps.Keys(docs)); !slices.Equal(got, want) {
		t.Fatalf("exported:\n%s\ndocumented:\n%s", got, want)
	}
	order := map[string][]string{}
	for _, m := range scraped {
		order[m.name] = m.labels
	}
	for name, f := range families {
		kind := f.GetType().String()
		want := f.GetHelp() + " " + kind[:1] + strings.ToLower(kind[1:])
		if labels := order[name]; len(labels) > 0 {
			want += "; labels: " + strings.Join(labels, ", ")
		}
		if want += "."; docs[name] != want {
			t.Errorf("%s:\nnames.go: %s\nexported: %s", name, docs[name], want)
		}
		for _, m := range f.Metric {
			var got []string
			for _, p := range m.Label {
				got = append(got, p.GetName())
			}
			if !slices.Equal(got, slices.Sorted(slices.Values(order[name]))) {
				t.Errorf("%s has labels %s, documented %s", name, got, order[name])
			}
		}
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
	l.vectors[1] = Vector{Reachable: true}
	l.builder.MarkVector(1)
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
		name, labels string
		want         float64
	}{
		{nameLoopResponding, "", 1},
		{nameConverged, "", 1},
		{nameRevision, "", 2},
		{nameSessions, "state=established", 1},
		{nameSessions, "state=idle", 1},
		{nameSessions, "state=held", 0},
		{nameSessionUp, "device=p0a,plane=p0,session=p0/p0a", 1},
		{nameSessionUp, "device=p0b,plane=p0,session=p0/p0b", 0},
		{nameSessionGeneration, "session=p0/p0a", 3},
		{nameSessionFlaps, "session=p0/p0a", 2},
		{nameBandwidthIgnored, "plane=p0,reason=below-minimum,session=p0/p0a", 3},
		{nameSessionBFD, "session=p0/p0a", 1},
		{nameSessionRoutes, "session=p0/p0a,use=received", 7},
		{nameSessionRoutes, "session=p0/p0a,use=used", 4},
		{nameSessionRoutes, "session=p0/p0a,use=advertised", 8},
		{nameSessionIgnored, "reason=looped,session=p0/p0a", 2},
		{nameGuardDropped, "reason=bad-marker,session=p0/p0a", 5},
		{nameInputsIgnored, "reason=old-generation", 3},
		{nameDestinations, "", 3},
		{nameReachable, "", 1},
		{nameVectors, "", 1},
		{namePlaneUp, "plane=p0", 1},
		{namePlaneDrained, "plane=p1", 1},
		{namePlaneBandwidth, "plane=p0", 400e9},
		{nameSubPortUp, "device=p0a,plane=p0", 1},
		{nameSubPortUp, "device=p0b,plane=p0", 0},
		{nameSubPortSpeed, "device=p0b,plane=p0", 400e9},
		{nameSubPortDamped, "device=p0b,plane=p0", 3},
		{nameEvents, "kind=drain", 2},
		{nameEvents, "kind=reload", 0},
		{nameQueue, "queue=speaker", 2},
		{nameDataplaneConnected, "", 1},
		{nameDataplaneOperations, "level=group,result=refused", 1},
		{nameDataplaneOperations, "level=destination,result=in_effect", 8},
		{nameDataplanePending, "", 1},
		{nameDataplaneApproximate, "", 2},
		{nameDataplaneRefused, "", 3},
		{nameDataplaneIntact, "", 0},
		{nameWatches, "", 0},
		{namePanics, "", 0},
	} {
		if v, ok := series(got[c.name])[c.labels]; !ok || v != c.want {
			t.Errorf("%s{%s} = %v (there: %v), want %v", c.name, c.labels, v, ok, c.want)
		}
	}
	step, ack := got[nameStep].Metric[0].Histogram, got[nameAcknowledged].Metric[0].Histogram
	if step.GetSampleCount() != 2 || step.GetSampleSum() < 5 || ack.GetSampleCount() != 1 {
		t.Errorf("histograms: %v, %v", step, ack)
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
	code, body := get("GET", "/metrics")
	if code != http.StatusOK || !strings.Contains(body, "\nfared_loop_responding 0\n") || !strings.Contains(body, "fared_build_info") || strings.Contains(body, "\nfared_revision") {
		t.Errorf("metrics without a loop: %d\n%s", code, body)
	}
}

func ExampleEventKind_String() {
	fmt.Println(EventSessionUp, EventEndOfRIB)
	// Output: session-up end-of-rib
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
	for name, want := range map[string]map[string]float64{
		nameDestinations: {"source=10.255.0.1/32": 3, "source=10.255.0.2/32": 2},
		nameReachable:    {"source=10.255.0.1/32": 3, "source=10.255.0.2/32": 0},
	} {
		if !maps.Equal(series(got[name]), want) {
			t.Errorf("%s: %v, want %v", name, series(got[name]), want)
		}
	}
	status, err := service.Fabric().GetStatus(t.Context(), &farev1.GetStatusRequest{})
	if err != nil || status.Destinations != 3 || status.DestinationsReachable != 3 || len(status.Loopbacks) != 5 {
		t.Errorf("status %v, %v: want 3 destinations, each counted once, and 5 loopbacks", status, err)
	}
}
