package agent

import "github.com/fared/fared/internal/metric"

// exported is the agent's metrics. docs/operations/metrics.md is generated from it.
var exported metric.Set

// Metrics returns the metrics that agents export, in the order of their documentation.
func Metrics() []*metric.Metric { return exported.All() }

var (
	metricBuildInfo         = exported.Gauge("fared_agent_build_info", "Always 1.", "version", "go_version", "driver")
	metricServing           = exported.Gauge("fared_agent_serving", "1 when the driver works.")
	metricLimited           = exported.Gauge("fared_agent_limited", "1 with a limitation, which /healthz names.")
	metricIntact            = exported.Gauge("fared_agent_intact", "1 while the layer below has every acknowledged object.")
	metricRepairs           = exported.Counter("fared_agent_repairs_total", "Repaired objects that other programs had changed or removed.")
	metricUnlogged          = exported.Counter("fared_agent_log_lines_dropped_total", "Log lines left out for a slow reader.")
	metricOperations        = exported.Counter("fared_agent_operations_total", "Operations judged, restored ones included.", "kind")
	metricOperationOutcomes = exported.Counter("fared_agent_operation_outcomes_total", "Operations judged, by outcome.", "outcome")
	metricBatches           = exported.Counter("fared_agent_batches_total", "Batches given to the driver.")
	metricBatchesRetried    = exported.Counter("fared_agent_batches_retried_total", "Batches that failed and were split.")
	metricCommitSeconds     = exported.Histogram("fared_agent_commit_seconds", "Duration of a batch at the driver.")
	metricCommitErrors      = exported.Counter("fared_agent_commit_errors_total", "Batches and single operations that failed at the driver.")
	metricPanics            = exported.Counter("fared_agent_panics_total", "Faults of the driver that were caught.")
	metricHellos            = exported.Counter("fared_agent_hellos_total", "Hellos accepted.")
	metricSnapshots         = exported.Counter("fared_agent_snapshots_total", "Snapshots sent.")
	metricStreams           = exported.Counter("fared_agent_streams_total", "Program streams begun.")
	metricStreamsReplaced   = exported.Counter("fared_agent_streams_replaced_total", "Program streams replaced by a newer one; growth hints at several control planes.")
	metricSubPorts          = exported.Gauge("fared_agent_sub_ports", "Sub-ports by state.", "state")
	metricGroups            = exported.Gauge("fared_agent_groups", "Groups programmed.")
	metricDestinations      = exported.Gauge("fared_agent_destinations", "Destinations programmed.")
	metricAttachments       = exported.Gauge("fared_agent_attachments", "Attached namespaces by state.", "state")
	metricAttachmentErrors  = exported.Counter("fared_agent_attachment_errors_total", "Failed attempts to program an attached namespace.")

	metricJournalBytes      = exported.Gauge("fared_agent_journal_bytes", "Length of the journal.")
	metricJournalStateBytes = exported.Gauge("fared_agent_journal_state_bytes", "Length of the journal with current state alone.")
	metricJournalBehind     = exported.Gauge("fared_agent_journal_behind", "1 while the journal lacks records.")
	metricJournalRecords    = exported.Counter("fared_agent_journal_records_total", "Records written.")
	metricJournalRewrites   = exported.Counter("fared_agent_journal_rewrites_total", "Times the journal was compacted.")
	metricJournalErrors     = exported.Counter("fared_agent_journal_errors_total", "Failed writes of the journal.")

	metricKernelSeconds        = exported.Histogram("fared_agent_kernel_seconds", "Time of a batch of changes in the kernel.")
	metricKernelOperations     = exported.Counter("fared_agent_kernel_operations_total", "Changes sent to the kernel.", "object")
	metricKernelObjects        = exported.Gauge("fared_agent_kernel_objects", "The agent's objects in the kernel.", "object")
	metricKernelErrors         = exported.Counter("fared_agent_kernel_errors_total", "Changes that the kernel refused.")
	metricKernelRetries        = exported.Counter("fared_agent_kernel_retries_total", "Batches planned again after a refusal.")
	metricKernelMoved          = exported.Counter("fared_agent_kernel_moved_total", "Groups that lost members with a carrier.")
	metricKernelAudits         = exported.Counter("fared_agent_kernel_audits_total", "Comparisons of all objects with the kernel.")
	metricKernelDifferences    = exported.Counter("fared_agent_kernel_differences_total", "Repaired objects that other programs had changed.")
	metricKernelOverruns       = exported.Counter("fared_agent_kernel_overruns_total", "Times the kernel dropped link events.")
	metricKernelResyncs        = exported.Counter("fared_agent_kernel_resyncs_total", "Times all objects were read again.")
	metricKernelHashMismatches = exported.Counter("fared_agent_kernel_hash_mismatches_total", "Source ports that the kernel placed elsewhere.")
	metricKernelBrokenSubPorts = exported.Gauge("fared_agent_kernel_broken_sub_ports", "Sub-ports with a carrier whose next hop the kernel refuses.")

	metricSteeringObjects        = exported.Gauge("fared_agent_steering_objects", "Entries of the steering's maps.", "object")
	metricSteeringUncountedPairs = exported.Gauge("fared_agent_steering_uncounted_pairs", "Pairs whose slots are not counted: the map is full.")
	metricSteeringLiveSubPorts   = exported.Gauge("fared_agent_steering_live_sub_ports", "Sub-ports that may carry packets now.")
	metricSteeringAudits         = exported.Counter("fared_agent_steering_audits_total", "Comparisons of maps, rules and routes with the kernel.")
	metricSteeringRepairs        = exported.Counter("fared_agent_steering_repairs_total", "Repaired objects of the steering.")
	metricSteeringDroppedPackets = exported.Counter("fared_agent_steering_dropped_packets_total", "Packets that were not sent.", "reason")
	metricSteeringSentBytes      = exported.Counter("fared_agent_steering_sent_bytes_total", "Bytes of steered flows sent over the sub-port.", "plane", "device")
	metricSteeringSentPackets    = exported.Counter("fared_agent_steering_sent_packets_total", "Packets of steered flows sent over the sub-port.", "plane", "device")
)
