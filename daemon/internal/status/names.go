package status

import "github.com/fared/fared/internal/metric"

// exported is the daemon's metrics. docs/operations/metrics.md is generated from it.
var exported metric.Set

// Exported returns the daemon's metrics, in the order of their documentation.
func Exported() []*metric.Metric { return exported.All() }

var (
	metricBuildInfo      = exported.Gauge("fared_build_info", "Always 1.", "version", "go_version")
	metricLoopResponding = exported.Gauge("fared_loop_responding", "1 when the daemon's loop answered; with 0 metrics that need an answer are absent.")
	metricConverged      = exported.Gauge("fared_converged", "1 after the start.")
	metricRevision       = exported.Gauge("fared_revision", "Revision of the state.")

	metricSessions          = exported.Gauge("fared_sessions", "Sessions by state.", "state")
	metricSessionUp         = exported.Gauge("fared_session_up", "1 when the session is established.", "session", "plane", "device")
	metricSessionGeneration = exported.Counter("fared_session_generation_total", "Times the session was established.", "session")
	metricSessionFlaps      = exported.Counter("fared_session_flaps_total", "Times the established session failed.", "session")
	metricSessionBFD        = exported.Gauge("fared_session_bfd_up", "1 when BFD is up and protects the session; absent without BFD.", "session")
	metricSessionRoutes     = exported.Gauge("fared_session_routes", "Routes now: received = used + all of fared_session_routes_ignored.", "session", "use")
	metricSessionIgnored    = exported.Gauge("fared_session_routes_ignored", "Routes that are not used now.", "session", "reason")
	metricBandwidthIgnored  = exported.Gauge("fared_session_bandwidth_ignored", "Usable routes whose bandwidth does not count now.", "plane", "session", "reason")
	metricRoutesDropped     = exported.Gauge("fared_session_routes_dropped", "Routes that the guard drops now, by a fault; family_: loopbacks without their family.", "plane", "session", "reason")
	metricGuardDropped      = exported.Counter("fared_guard_dropped_total", "Messages, routes and attributes dropped by the guard, packets dropped by BFD (bfd_).", "session", "reason")
	metricInputsIgnored     = exported.Counter("fared_inputs_ignored_total", "Inputs that the path-bandwidth table did not use.", "reason")

	metricDestinations = exported.Gauge("fared_destinations", "Destinations; by source group (its first loopback) where there are several.")
	metricReachable    = exported.Gauge("fared_destinations_reachable", "Destinations that have weights.")
	metricVectors      = exported.Gauge("fared_vectors", "Distinct weight vectors.")

	metricConflicts = exported.Gauge("fared_destinations_conflicting", "Destinations that several origins announce, by their AS paths.")
	metricClaimed   = exported.Gauge("fared_loopbacks_claimed", "Local loopbacks that another AS announces.")

	metricUnrecorded        = exported.Counter("fared_recording_missing_events_total", "Events that could not be written to record.file.")
	metricUnlogged          = exported.Counter("fared_log_lines_dropped_total", "Log lines left out for a slow reader.")
	metricSlotTableFailures = exported.Counter("fared_slot_table_failures_total", "Failed publications of the slot table.")
	metricSlotTableFailing  = exported.Gauge("fared_slot_table_failing", "1 while the latest publication of the slot table failed.")
	metricDrainsUnsaved     = exported.Gauge("fared_drains_unsaved", "1 while a restart would lose a drain, or has.")
	metricTracesDropped     = exported.Counter("fared_traces_dropped_total", "Traces that did not reach traces.endpoint.")
	metricWithoutLanding    = exported.Gauge("fared_slots_without_landing_port", "Slots without a source port that lands on their sub-port.")

	metricPlaneUp        = exported.Gauge("fared_plane_up", "1 when the plane is up.", "plane")
	metricPlaneDrained   = exported.Gauge("fared_plane_drained", "1 when the plane is drained.", "plane")
	metricPlaneBandwidth = exported.Gauge("fared_plane_bandwidth_bps", "Sum of the plane's sub-ports that count, bit/s.", "plane")
	metricPlaneWeight    = exported.Gauge("fared_plane_weight_ratio", "Share of the plane in the weights, 0 to 1, mean over reachable destinations.", "plane")
	metricSubPortUp      = exported.Gauge("fared_sub_port_up", "1 when the sub-port counts: link, known speed, established session, not drained.", "plane", "device")
	metricSubPortLink    = exported.Gauge("fared_sub_port_link_up", "1 when the link is up, and not damped.", "plane", "device")
	metricSubPortDrained = exported.Gauge("fared_sub_port_drained", "1 while a drain of the sub-port, its plane or its leaf begins, lasts or ends.", "plane", "device")
	metricSubPortSpeed   = exported.Gauge("fared_sub_port_speed_bps", "Speed of the sub-port, bit/s.", "plane", "device")
	metricSubPortDamped  = exported.Counter("fared_sub_port_damped_total", "Rises of the link that damping has held.", "plane", "device")

	metricEvents       = exported.Counter("fared_events_total", "Events by kind.", "kind")
	metricStep         = exported.Histogram("fared_loop_step_seconds", "Duration of a step of the daemon's loop.")
	metricAcknowledged = exported.Histogram("fared_update_acknowledged_seconds", "From an input to its result in effect.")
	metricQueue        = exported.Gauge("fared_queue_depth", "Depth of a queue.", "queue")

	metricDataplaneConnected   = exported.Gauge("fared_dataplane_connected", "1 when the data plane is connected; absent in a daemon without one.")
	metricDataplaneOperations  = exported.Counter("fared_dataplane_operations_total", "Operations toward the data plane: sent, in_effect, refused.", "level", "result")
	metricDataplanePending     = exported.Gauge("fared_dataplane_pending", "Operations sent and not yet in effect.")
	metricDataplaneApproximate = exported.Gauge("fared_dataplane_approximate", "Weight vectors with a share off by more than 1 % of itself.")
	metricDataplaneRefused     = exported.Gauge("fared_dataplane_refused", "Objects whose last change the data plane refused.")
	metricDataplaneLimited     = exported.Gauge("fared_dataplane_limited", "1 for each state of the host that drops or diverts packets.", "reason")
	metricDataplaneIntact      = exported.Gauge("fared_dataplane_intact", "0 while the layer below the data plane lacks an acknowledged object.")

	metricProofProbes       = exported.Counter("fared_proof_probes_total", "Probes to destinations that answer: answered, lost.", "plane", "result")
	metricProofRoundTrip    = exported.Gauge("fared_proof_round_trip_ns", "Mean round trip of the plane's probes, without the peers' time, nanoseconds.", "plane")
	metricProofFindings     = exported.Gauge("fared_proof_findings", "Sub-ports and planes by which packets go wrong now; an empty plane: all.", "plane", "device", "problem", "direction")
	metricProofDestinations = exported.Gauge("fared_proof_destinations", "Destinations with shares in effect: answering or silent.", "state")
	metricProofDropped      = exported.Counter("fared_proof_dropped_total", "Packets at the port of proofs without an answer.", "reason")
	metricProofAvoided      = exported.Gauge("fared_proof_avoided", "Destinations toward which the plane is avoided (proof.unproved).", "plane")
	metricProofActive       = exported.Gauge("fared_proof_active", "1 while probes are sent.")

	metricWatches = exported.Gauge("fared_watches", "WatchWeights and WatchEvents calls now.")
	metricCalls   = exported.Counter("fared_calls_total", "Finished gRPC calls by code.", "code")
	metricPanics  = exported.Counter("fared_panics_total", "Handlers that panicked.")
)
