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
)

// Names of metrics that are used several times.
const nameCommitSeconds = "fared_agent_commit_seconds"

const (
	gauge   = prometheus.GaugeValue
	counter = prometheus.CounterValue
)

// sampler records one value; labels are alternating names and values.
type sampler func(name, help string, kind prometheus.ValueType, value float64, labels ...string)

// Describe implements prometheus.Collector without descriptions, because the set of metrics is not fixed.
func (a *Agent) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (a *Agent) Collect(ch chan<- prometheus.Metric) {
	sample := func(name, help string, kind prometheus.ValueType, value float64, labels ...string) {
		var names, values []string
		for i := 0; i < len(labels); i += 2 {
			names, values = append(names, labels[i]), append(values, labels[i+1])
		}
		ch <- prometheus.MustNewConstMetric(prometheus.NewDesc(name, help, names, nil), kind, value, values...)
	}
	count := func(name, help string, value uint64, labels ...string) {
		sample(name, help, counter, float64(value), labels...)
	}
	t := a.server.Tally()
	sample("fared_agent_build_info", "Always 1; the labels identify the program.", gauge, 1, "version", a.c.Version, "go_version", runtime.Version(), "driver", a.driver.name)
	sample("fared_agent_serving", "1 when the driver works.", gauge, oneIf(a.healthy()))

	sample("fared_agent_limited", "1 when the driver works with a limitation: /healthz names it.", gauge, oneIf(a.driver.note != ""))
	integrity := a.server.Integrity()
	sample("fared_agent_intact", "1 while the layer below has every acknowledged object.", gauge, oneIf(integrity.Intact))
	count("fared_agent_repairs_total", "Repaired objects that other programs had changed or removed.", integrity.Repairs)

	const operations = "Operations judged, by kind; includes those restored from the journal."
	for kind, n := range map[string]uint64{
		"sub_port": t.SubPorts, "set_vector": t.GroupSets, "delete_vector": t.GroupDeletes,
		"set_destination": t.DestinationSets, "delete_destination": t.DestinationDeletes, "malformed": t.Malformed,
	} {
		count("fared_agent_operations_total", operations, n, "kind", kind)
	}
	const outcomes = "Operations judged, by outcome; they sum to fared_agent_operations_total."
	for outcome, n := range map[string]uint64{"changed": t.Changed, "unchanged": t.Unchanged, "refused": t.Refused} {
		count("fared_agent_operation_outcomes_total", outcomes, n, "outcome", outcome)
	}
	count("fared_agent_batches_total", "Batches given to the driver.", t.Batches)
	count("fared_agent_batches_retried_total", "Batches that failed and were carried out one operation at a time.", t.Retried)
	count("fared_agent_commit_errors_total", "Batches, single operations included, that failed at the driver.", a.watched.errors.Load())
	count("fared_agent_panics_total", "Faults of the driver that were caught.", a.watched.panics.Load())
	a.watched.seconds.Collect(ch)
	count("fared_agent_hellos_total", "Hellos accepted.", t.Hellos)
	count("fared_agent_snapshots_total", "Snapshots sent.", t.Snapshots)
	count("fared_agent_streams_total", "Program streams begun.", t.Streams)
	count("fared_agent_streams_replaced_total", "Program streams that a newer one replaced; growth hints at several control planes.", t.StreamsReplaced)

	a.server.View(func(s *contract.State) {
		up := 0
		for device := range s.Devices {
			if s.Up(device) {
				up++
			}
		}
		const help = "Sub-ports by the state that the control plane set."
		sample("fared_agent_sub_ports", help, gauge, float64(up), "state", "up")
		sample("fared_agent_sub_ports", help, gauge, float64(len(s.Devices)-up), "state", "down")
		sample("fared_agent_groups", "Groups programmed.", gauge, float64(len(s.Groups)))
		sample("fared_agent_destinations", "Destinations programmed.", gauge, float64(len(s.Destinations)))
	})

	if a.journal != nil {
		j := a.journal.Stats()
		sample("fared_agent_journal_bytes", "Length of the journal.", gauge, float64(j.Bytes))
		sample("fared_agent_journal_state_bytes", "Length that the journal would have if it held only current state.", gauge, float64(j.StateBytes))
		sample("fared_agent_journal_behind", "1 while the journal lacks records: a restart would begin with an older state.", gauge, oneIf(j.Behind))
		count("fared_agent_journal_records_total", "Records written.", j.Records)
		count("fared_agent_journal_rewrites_total", "Times the journal was compacted.", j.Rewrites)
		count("fared_agent_journal_errors_total", "Failed writes of the journal.", j.Errors)
	}
	if a.driver.collect != nil {
		a.driver.collect(sample)
	}
}

func oneIf(yes bool) float64 {
	if yes {
		return 1
	}
	return 0
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
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
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
		if a.driver.note != "" {
			fmt.Fprintln(w, a.driver.note)
		}
	})
	return &metricsServer{l, &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}}, nil
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
