package status

// Names of metrics. Each comment is the metric's documentation: its help text as exported, then its type and labels; a
// test compares them with what is exported. Units: _seconds, _bps (bit/s), _total (since start).
const (
	// Always 1; says which program this is. Gauge; labels: version, go_version.
	nameBuildInfo = "fared_build_info"
	// 1 when the daemon's loop answered this scrape; 0: only what needs no answer is exported. Gauge.
	nameLoopResponding = "fared_loop_responding"
	// 1 after end-of-RIB from every session, or the start deadline. Gauge.
	nameConverged = "fared_converged"
	// Revision of the state. Gauge.
	nameRevision = "fared_revision"

	// Sessions by state. Gauge; labels: state.
	nameSessions = "fared_sessions"
	// 1 when the session is established, drained or not. Gauge; labels: session, plane, device.
	nameSessionUp = "fared_session_up"
	// How often the session was established, its generation. Counter; labels: session.
	nameSessionGeneration = "fared_session_generation_total"
	// How often the established session was lost. Counter; labels: session.
	nameSessionFlaps = "fared_session_flaps_total"
	// 1 when BFD beside the session is up and protects it; absent without BFD. Gauge; labels: session.
	nameSessionBFD = "fared_session_bfd_up"
	// Routes of the session now: received = used + all of fared_session_routes_ignored. Gauge; labels: session, use.
	nameSessionRoutes = "fared_session_routes"
	// Routes of the session now that are not used, by reason. Gauge; labels: session, reason.
	nameSessionIgnored = "fared_session_routes_ignored"
	// What the guard kept away from BGP, by reason. Counter; labels: session, reason.
	nameGuardDropped = "fared_guard_dropped_total"
	// Inputs that the path-bandwidth table did not use, by reason. Counter; labels: reason.
	nameInputsIgnored = "fared_inputs_ignored_total"

	// Destinations known. Gauge.
	nameDestinations = "fared_destinations"
	// Destinations that have weights. Gauge.
	nameReachable = "fared_destinations_reachable"
	// Distinct weight vectors. Gauge.
	nameVectors = "fared_vectors"

	// Slots given a source port that does not land on their place, because the data plane's hash leaves none. Gauge.
	nameWithoutLanding = "fared_slots_without_landing_port"

	// 1 when the plane is up. Gauge; labels: plane.
	namePlaneUp = "fared_plane_up"
	// 1 when the plane is drained. Gauge; labels: plane.
	namePlaneDrained = "fared_plane_drained"
	// Sum of the plane's sub-ports that count, bit/s. Gauge; labels: plane.
	namePlaneBandwidth = "fared_plane_bandwidth_bps"
	// 1 when the sub-port counts: carrier, not drained, nothing against it. Gauge; labels: plane, device.
	nameSubPortUp = "fared_sub_port_up"
	// Speed of the sub-port, bit/s. Gauge; labels: plane, device.
	nameSubPortSpeed = "fared_sub_port_speed_bps"

	// Events by kind. Counter; labels: kind.
	nameEvents = "fared_events_total"
	// Duration of a step of the daemon's loop. Histogram.
	nameStep = "fared_loop_step_seconds"
	// From an input at the loop to the data plane's confirmation that what follows is in effect. Histogram.
	nameAcknowledged = "fared_update_acknowledged_seconds"
	// Depth of a queue. Gauge; labels: queue.
	nameQueue = "fared_queue_depth"

	// 1 when the data plane is connected. Gauge.
	nameDataplaneConnected = "fared_dataplane_connected"
	// Operations toward the data plane by level and result (sent, in_effect, refused). Counter; labels: level, result.
	nameDataplaneOperations = "fared_dataplane_operations_total"
	// Operations sent and not yet in effect. Gauge.
	nameDataplanePending = "fared_dataplane_pending"

	// WatchWeights and WatchEvents calls now. Gauge.
	nameWatches = "fared_watches"
	// Finished gRPC calls by code. Counter; labels: code.
	nameCalls = "fared_calls_total"
	// Handlers that panicked. Counter.
	namePanics = "fared_panics_total"
)
