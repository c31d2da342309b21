package status

// Names of metrics. Each comment is the metric's documentation: its exported help text, then its type and labels; a test compares the comments
// with the exported metrics. Units: _seconds, _bps (bit/s), _total (since start).
const (
	// Always 1; the labels identify the program. Gauge; labels: version, go_version.
	nameBuildInfo = "fared_build_info"
	// 1 when the daemon's loop answered this scrape; with 0 only metrics that need no answer are exported. Gauge.
	nameLoopResponding = "fared_loop_responding"
	// 1 after end-of-RIB from every session, or the start deadline. Gauge.
	nameConverged = "fared_converged"
	// Revision of the state. Gauge.
	nameRevision = "fared_revision"

	// Sessions by state. Gauge; labels: state.
	nameSessions = "fared_sessions"
	// 1 when the session is established, drained or not. Gauge; labels: session, plane, device.
	nameSessionUp = "fared_session_up"
	// Times the session was established, its generation. Counter; labels: session.
	nameSessionGeneration = "fared_session_generation_total"
	// Times the established session failed. Counter; labels: session.
	nameSessionFlaps = "fared_session_flaps_total"
	// 1 when the session's BFD is up and protects it; absent without BFD. Gauge; labels: session.
	nameSessionBFD = "fared_session_bfd_up"
	// Routes of the session now: received = used + all of fared_session_routes_ignored. Gauge; labels: session, use.
	nameSessionRoutes = "fared_session_routes"
	// Routes of the session now that are not used, by reason. Gauge; labels: session, reason.
	nameSessionIgnored = "fared_session_routes_ignored"
	// Usable routes of the session now whose bandwidth the weights do not follow, by reason. Gauge; labels: plane, session, reason.
	nameBandwidthIgnored = "fared_session_bandwidth_ignored"
	// Messages, routes and attributes that the guard dropped, by reason. Counter; labels: session, reason.
	nameGuardDropped = "fared_guard_dropped_total"
	// Inputs that the path-bandwidth table did not use, by reason. Counter; labels: reason.
	nameInputsIgnored = "fared_inputs_ignored_total"

	// Destinations known; by source group (its first loopback) where there are several. Gauge.
	nameDestinations = "fared_destinations"
	// Destinations that have weights; by source group where there are several. Gauge.
	nameReachable = "fared_destinations_reachable"
	// Distinct weight vectors. Gauge.
	nameVectors = "fared_vectors"

	// Destinations that several origins announce, as far as AS paths show. Gauge.
	nameConflicts = "fared_destinations_conflicting"
	// Local loopbacks that another AS announces. Gauge.
	nameClaimed = "fared_loopbacks_claimed"

	// Events that are missing in record.file, because they could not be written. Counter.
	nameUnrecorded = "fared_recording_missing_events_total"
	// Failed publications of the slot table; each is repeated within a second. Counter.
	nameSlotTableFailures = "fared_slot_table_failures_total"
	// Slots whose source port does not land on their sub-port, because the data plane's hash leaves none. Gauge.
	nameWithoutLanding = "fared_slots_without_landing_port"

	// 1 when the plane is up. Gauge; labels: plane.
	namePlaneUp = "fared_plane_up"
	// 1 when the plane is drained. Gauge; labels: plane.
	namePlaneDrained = "fared_plane_drained"
	// Sum of the plane's sub-ports that count, bit/s. Gauge; labels: plane.
	namePlaneBandwidth = "fared_plane_bandwidth_bps"
	// 1 when the sub-port counts: it has a carrier, is not drained, and has no fault. Gauge; labels: plane, device.
	nameSubPortUp = "fared_sub_port_up"
	// Speed of the sub-port, bit/s. Gauge; labels: plane, device.
	nameSubPortSpeed = "fared_sub_port_speed_bps"
	// Rises of the sub-port's link that damping has held. Counter; labels: plane, device.
	nameSubPortDamped = "fared_sub_port_damped_total"

	// Events by kind. Counter; labels: kind.
	nameEvents = "fared_events_total"
	// Duration of a step of the daemon's loop. Histogram.
	nameStep = "fared_loop_step_seconds"
	// From an input at the loop to the data plane's confirmation that its result is in effect. Histogram.
	nameAcknowledged = "fared_update_acknowledged_seconds"
	// Depth of a queue. Gauge; labels: queue.
	nameQueue = "fared_queue_depth"

	// 1 when the data plane is connected. Gauge.
	nameDataplaneConnected = "fared_dataplane_connected"
	// Operations toward the data plane by level and result (sent, in_effect, refused). Counter; labels: level, result.
	nameDataplaneOperations = "fared_dataplane_operations_total"
	// Operations sent and not yet in effect. Gauge.
	nameDataplanePending = "fared_dataplane_pending"
	// Weight vectors in the data plane now with a share off by more than 1 % of itself. Gauge.
	nameDataplaneApproximate = "fared_dataplane_approximate"
	// Objects whose last change the data plane refused, now. Gauge.
	nameDataplaneRefused = "fared_dataplane_refused"
	// 0 while the layer below the data plane lacks an acknowledged object. Gauge.
	nameDataplaneIntact = "fared_dataplane_intact"

	// WatchWeights and WatchEvents calls now. Gauge.
	nameWatches = "fared_watches"
	// Finished gRPC calls by code. Counter; labels: code.
	nameCalls = "fared_calls_total"
	// Handlers that panicked. Counter.
	namePanics = "fared_panics_total"
)
