package worker

import (
	"fmt"
	"net/http"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	fleetv1 "github.com/fared/fared/api/fleet/v1"
	"github.com/fared/fared/internal/metric"
	"github.com/fared/fared/internal/version"
	"github.com/fared/fared/topo"
	"github.com/fared/fared/topo/locate"
)

// maxParts bounds the time series with a part's name.
const maxParts = 100

// tally is the counters of a worker for its metrics.
type tally struct {
	kept, old, refused atomic.Uint64 // messages
	peers              map[string]*atomic.Bool
	engine             atomic.Bool
	decision           prometheus.Histogram
}

func newTally(peers []string) *tally {
	t := &tally{peers: map[string]*atomic.Bool{}, decision: metricDecision.New([]float64{.001, .003, .01, .03, .1, .3, 1, 3, 10})}
	for _, p := range peers {
		t.peers[p] = new(atomic.Bool)
	}
	return t
}

// count counts a message.
func (t *tally) count(kept bool) {
	if kept {
		t.kept.Add(1)
	} else {
		t.old.Add(1)
	}
}

// MetricsHandler serves /metrics and /healthz.
func (w *Worker) MetricsHandler() http.Handler {
	registry := prometheus.NewRegistry()
	registry.MustRegister(w, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{MaxRequestsInFlight: 4, EnableOpenMetrics: true}))
	mux.HandleFunc("GET /healthz", func(rw http.ResponseWriter, _ *http.Request) { fmt.Fprintln(rw, "ok") })
	return mux
}

// Describe implements prometheus.Collector without descriptions, because the set of metrics is not fixed.
func (w *Worker) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (w *Worker) Collect(ch chan<- prometheus.Metric) {
	sample := func(m *metric.Metric, value float64, labels ...string) { ch <- m.Sample(value, labels...) }
	views, revision := w.views()
	sample(metricBuildInfo, 1, version.String(), runtime.Version())
	sample(metricRevision, float64(revision))
	sample(metricReportAge, float64(w.oldest(time.Now())))
	for result, n := range map[string]*atomic.Uint64{"kept": &w.tally.kept, "old": &w.tally.old, "refused": &w.tally.refused} {
		sample(metricMessages, float64(n.Load()), result)
	}
	for peer, up := range w.tally.peers {
		ch <- metricPeerUp.Flag(up.Load(), peer)
	}
	w.collectNodes(sample, views)
	sample(metricStrangers, float64(len(w.refusedNodes(time.Now()))))
	collectFaults(sample, w.found.Load().faults)
	low := uint64(0)
	_, byPlanes := w.directions(views)
	for planes, n := range byPlanes {
		sample(metricPairs, float64(n), fmt.Sprint(planes))
		if planes < w.Budget.Planes {
			low += n
		}
	}
	sample(metricPairsLow, float64(low))
	if w.book != nil {
		ch <- metricEngineUp.Flag(w.tally.engine.Load())
		w.collectDrains(sample, views)
	}
	w.tally.decision.Collect(ch)
}

// sampler records one value of a metric; labels are the values of the metric's labels.
type sampler func(m *metric.Metric, value float64, labels ...string)

func (w *Worker) collectNodes(sample sampler, views map[*topo.Node]*locate.View) {
	count := map[[2]string]int{{"server", "reporting"}: 0, {"server", "missing"}: 0, {"switch", "reporting"}: 0, {"switch", "missing"}: 0}
	for _, n := range w.fabric.Nodes() {
		kind, state := "switch", "missing"
		if n.Kind == topo.KindServer {
			kind = "server"
		}
		if views[n] != nil {
			state = "reporting"
		}
		count[[2]string{kind, state}]++
	}
	for labels, n := range count {
		sample(metricNodes, float64(n), labels[0], labels[1])
	}
}

func collectFaults(sample sampler, faults []*fleetv1.Fault) {
	count := map[[2]string]int{}
	for i, f := range faults {
		count[[2]string{f.Kind, f.Fault}]++
		if i < maxParts {
			sample(metricFaultSure, float64(f.ConfidencePpb)/1e9, f.Part, f.Kind, f.Fault)
		}
	}
	for labels, n := range count {
		sample(metricFaults, float64(n), labels[0], labels[1])
	}
}

func (w *Worker) collectDrains(sample sampler, views map[*topo.Node]*locate.View) {
	count := map[string]int{"queued": 0, "draining": 0, "drained": 0}
	if granted := w.granted.Load(); granted != nil {
		for _, d := range granted.Drains {
			if d.Queued {
				count["queued"]++
				continue
			}
			all, drained := w.progress(d.Part, views)
			sample(metricDrainLeft, float64(all-drained), d.Part)
			if all > drained {
				count["draining"]++
			} else {
				count["drained"]++
			}
		}
	}
	for state, n := range count {
		sample(metricDrains, float64(n), state)
	}
}
