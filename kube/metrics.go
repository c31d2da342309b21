package kube

import (
	"net"
	"net/http"
	"runtime"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/fared/fared/internal/httpserve"
	"github.com/fared/fared/internal/metric"
	"github.com/fared/fared/kube/pacer"
)

// exported is the program's metrics. docs/operations/metrics.md is generated from it.
var exported metric.Set

// Metrics returns the metrics that agents export, in the order of their documentation.
func Metrics() []*metric.Metric { return exported.All() }

var (
	metricBuildInfo    = exported.Gauge("fared_kube_build_info", "Always 1.", "version", "go_version")
	metricObservations = exported.Counter("fared_kube_observations_total", "Complete answers of the daemon.")
	metricNodeKnown    = exported.Gauge("fared_kube_node_known", "1 once the API server has shown the node: nothing is written before.")
	metricWrites       = exported.Counter("fared_kube_writes_total", "Writes to the API server or NVSentinel: written, refused, or failed with an unknown effect.", "to", "result")
	metricObjects      = exported.Gauge("fared_kube_objects", "Objects that are shown.", "to")
	metricBehind       = exported.Gauge("fared_kube_objects_behind", "Objects that are not written as they should be.", "to")
	metricLag          = exported.Gauge("fared_kube_lag_seconds", "Time since the first of these changed; 0 without one. Minor changes wait for some 10 s.", "to")
	metricSuccess      = exported.Gauge("fared_kube_last_success_timestamp_seconds", "Unix time of the last write that succeeded; 0 before the first.", "to")
)

// Describe implements prometheus.Collector without descriptions, as the data plane's agent.
func (a *Agent) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (a *Agent) Collect(ch chan<- prometheus.Metric) {
	ch <- metricBuildInfo.Sample(1, a.Version, runtime.Version())
	ch <- metricObservations.Sample(float64(a.observations.Load()))
	ch <- metricNodeKnown.Flag(a.uid.Load() != nil)
	a.api.collect(ch, "api-server")
	if a.Sentinel != nil {
		a.health.collect(ch, "nvsentinel")
	}
}

// collect emits the metrics of a sink.
func (s *sink) collect(ch chan<- prometheus.Metric, to string) {
	s.mu.Lock()
	objects, behind, since := s.pacer.Behind()
	results, success, now := s.results, s.success, s.now()
	s.mu.Unlock()
	for r, name := range map[pacer.Result]string{pacer.Written: "written", pacer.Refused: "refused", pacer.Failed: "failed"} {
		ch <- metricWrites.Sample(float64(results[r]), to, name)
	}
	ch <- metricObjects.Sample(float64(objects), to)
	ch <- metricBehind.Sample(float64(behind), to)
	lag, last := 0.0, 0.0
	if behind > 0 {
		lag = now.Sub(since).Seconds()
	}
	if !success.IsZero() {
		last = float64(success.UnixMilli()) / 1000
	}
	ch <- metricLag.Sample(lag, to)
	ch <- metricSuccess.Sample(last, to)
}

// ServeMetrics serves /metrics at an address, host:port, until the process ends.
func (a *Agent) ServeMetrics(address string) error {
	l, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(a, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{MaxRequestsInFlight: 4, EnableOpenMetrics: true}))
	go func() { a.Log.Warn("metrics are not served any longer", "error", httpserve.New(mux).Serve(l)) }()
	return nil
}
