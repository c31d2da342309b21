package worker

import "github.com/fared/fared/internal/metric"

// exported is the worker's metrics. docs/operations/metrics.md is generated from it.
var exported metric.Set

// Metrics returns the metrics that workers export, in the order of their documentation.
func Metrics() []*metric.Metric { return exported.All() }

var (
	metricBuildInfo = exported.Gauge("fared_fleet_build_info", "Always 1.", "version", "go_version")
	metricRevision  = exported.Gauge("fared_fleet_revision", "Revision of the view.")
	metricNodes     = exported.Gauge("fared_fleet_nodes", "Nodes by kind (server, switch) and state (reporting, missing).", "kind", "state")
	metricReportAge = exported.Gauge("fared_fleet_report_age_ns", "Age of the oldest of the nodes' last messages, nanoseconds; without probes nodes send changes alone.")
	metricMessages  = exported.Counter("fared_fleet_messages_total", "Messages of nodes and workers: kept, old (a newer one was faster), refused.", "result")
	metricPeerUp    = exported.Gauge("fared_fleet_peer_up", "1 while the other worker sends its nodes' states.", "worker")
	metricStrangers = exported.Gauge("fared_fleet_refused_nodes", "Nodes whose reports were refused within ten minutes, at most 100.")
	metricFaults    = exported.Gauge("fared_fleet_faults", "Parts at fault.", "kind", "fault")
	metricFaultSure = exported.Gauge("fared_fleet_fault_sure_ratio", "Probability of the part's fault, 0 to 1; of at most 100 parts.", "part", "kind", "fault")
	metricPairs     = exported.Gauge("fared_fleet_pairs", "Pairs of source groups by their planes with bandwidth, as far as servers report.", "planes")
	metricPairsLow  = exported.Gauge("fared_fleet_pairs_below_budget", "Pairs with fewer planes than --keep-planes.")
	metricDrains    = exported.Gauge("fared_fleet_drains", "Drains of the fleet: queued, draining, drained.", "state")
	metricDrainLeft = exported.Gauge("fared_fleet_drain_sub_ports_left", "Sub-ports of a granted drain that are not drained.", "part")
	metricEngineUp  = exported.Gauge("fared_fleet_engine_up", "1 when the engine of drains answered last; absent without one.")
	metricDecision  = exported.Histogram("fared_fleet_decision_seconds", "Time to name the parts at fault after a change.")
)
