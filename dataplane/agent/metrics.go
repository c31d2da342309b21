package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"runtime"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/internal/httpserve"
	"github.com/fared/fared/internal/metric"
)

// sampler records one value of a metric; labels are the values of the metric's labels.
type sampler func(m *metric.Metric, value float64, labels ...string)

// Describe implements prometheus.Collector without descriptions, because the set of metrics is not fixed.
func (a *Agent) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (a *Agent) Collect(ch chan<- prometheus.Metric) {
	sample := func(m *metric.Metric, value float64, labels ...string) { ch <- m.Sample(value, labels...) }
	flag := func(m *metric.Metric, on bool) { ch <- m.Flag(on) }
	count := func(m *metric.Metric, n uint64, labels ...string) { sample(m, float64(n), labels...) }
	t := a.server.Tally()
	sample(metricBuildInfo, 1, a.c.Version, runtime.Version(), a.driver.name)
	flag(metricServing, a.healthy())

	flag(metricLimited, len(a.driver.limitations()) > 0)
	integrity := a.server.Integrity()
	flag(metricIntact, integrity.Intact)
	count(metricRepairs, integrity.Repairs)

	if a.c.LogDropped != nil {
		count(metricUnlogged, a.c.LogDropped())
	}

	for kind, n := range map[string]uint64{
		"sub_port": t.SubPorts, "set_vector": t.GroupSets, "delete_vector": t.GroupDeletes,
		"set_destination": t.DestinationSets, "delete_destination": t.DestinationDeletes, "malformed": t.Malformed,
	} {
		count(metricOperations, n, kind)
	}
	for outcome, n := range map[string]uint64{"changed": t.Changed, "unchanged": t.Unchanged, "refused": t.Refused} {
		count(metricOperationOutcomes, n, outcome)
	}
	count(metricBatches, t.Batches)
	count(metricBatchesRetried, t.Retried)
	count(metricCommitErrors, a.watched.errors.Load())
	count(metricPanics, a.watched.panics.Load())
	a.watched.seconds.Collect(ch)
	count(metricHellos, t.Hellos)
	count(metricSnapshots, t.Snapshots)
	count(metricStreams, t.Streams)
	count(metricStreamsReplaced, t.StreamsReplaced)

	a.server.View(func(s *contract.State) {
		up := 0
		for device := range s.Devices {
			if s.Up(device) {
				up++
			}
		}
		sample(metricSubPorts, float64(up), "up")
		sample(metricSubPorts, float64(len(s.Devices)-up), "down")
		sample(metricGroups, float64(len(s.Groups)))
		sample(metricDestinations, float64(s.Destinations.Len()))
	})

	attached := a.pods.Stats()
	sample(metricAttachments, float64(attached.InEffect), "in_effect")
	sample(metricAttachments, float64(attached.Attached-attached.InEffect), "waiting")
	count(metricAttachmentErrors, attached.Failures)

	if a.journal != nil {
		j := a.journal.Stats()
		sample(metricJournalBytes, float64(j.Bytes))
		sample(metricJournalStateBytes, float64(j.StateBytes))
		flag(metricJournalBehind, j.Behind)
		count(metricJournalRecords, j.Records)
		count(metricJournalRewrites, j.Rewrites)
		count(metricJournalErrors, j.Errors)
	}
	if a.driver.kernel != nil {
		a.driver.kernel.Collect(ch)
	}
	if a.driver.collect != nil {
		a.driver.collect(sample)
	}
}

func (a *Agent) healthy() bool {
	answer, err := a.health.Check(context.Background(), &healthpb.HealthCheckRequest{})
	return err == nil && answer.Status == healthpb.HealthCheckResponse_SERVING
}

// metricsServer serves /metrics and /healthz.
type metricsServer struct {
	listener net.Listener
	http     *http.Server
}

func newMetricsServer(address string, a *Agent) (*metricsServer, error) {
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, &FieldError{"MetricsListen", err}
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(a, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{MaxRequestsInFlight: 4, EnableOpenMetrics: true}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		if !a.healthy() || a.damage() != nil {
			why := "the driver is broken; see the log"
			if err := a.damage(); err != nil {
				why = err.Error()
			}
			http.Error(w, why, http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
		for _, f := range a.driver.limitations() {
			fmt.Fprintln(w, f)
		}
	})
	return &metricsServer{l, httpserve.New(mux)}, nil
}

func (m *metricsServer) serve() error {
	if err := m.http.Serve(m.listener); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("metrics: %w", err)
	}
	return nil
}

// stop ends scrapes, after at most patience.
func (m *metricsServer) stop(patience time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if m.http.Shutdown(ctx) != nil {
		m.http.Close()
	}
	m.listener.Close()
}
