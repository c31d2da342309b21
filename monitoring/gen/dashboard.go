package main

import "encoding/json"

const dashboardFile = "monitoring/fared.dashboard.json"

// query is a query of a panel; its legend has labels as {{label}}.
type query struct{ expr, legend string }

// panel is a panel of the dashboard: width is in columns of 24, unit is one of Grafana's.
type panel struct {
	title, meaning string
	kind           string // stat, timeseries or state-timeline
	width          int
	unit           string
	queries        []query
}

// row is a row of panels with a heading.
type row struct {
	title  string
	panels []panel
}

// The label instance must be the same for a server's daemon and its agent (docs/operations/metrics.md has the
// configuration).
const (
	bytesByPlane = `sum by (instance, plane) (rate(fared_agent_steering_sent_bytes_total{instance=~"$instance"}[$__rate_interval]))`
	bytesOfAll   = `sum by (instance) (rate(fared_agent_steering_sent_bytes_total{instance=~"$instance"}[$__rate_interval]))`
)

// quantiles returns the queries of the median and the 99th percentile of a histogram over all instances.
func quantiles(name string) []query {
	of := func(q string) string {
		return `histogram_quantile(` + q + `, sum by (le) (rate(` + name + `_bucket{instance=~"$instance"}[$__rate_interval])))`
	}
	return []query{{of("0.5"), "median"}, {of("0.99"), "99th percentile"}}
}

// dashboard is the table from which the file is generated.
var dashboard = []row{
	{"Overview", []panel{
		{"Daemons", "fared processes that answer", "stat", 4, "short", []query{{`sum(up{job="fared",instance=~"$instance"})`, ""}}},
		{"Planes up", "planes with a link and a session, over all servers", "stat", 4, "short", []query{{`sum(fared_plane_up{instance=~"$instance"})`, ""}}},
		{"Planes down", "planes that are down and not drained", "stat", 4, "short", []query{{
			`count(fared_plane_up{instance=~"$instance"} == 0 unless on (instance, plane) min by (instance, plane) (fared_sub_port_drained) == 1) or vector(0)`, ""}}},
		{"Sessions established", "BGP sessions, drained ones included", "stat", 4, "short", []query{{`sum(fared_session_up{instance=~"$instance"})`, ""}}},
		{"Destinations reachable", "the lowest share of reachable destinations of a server", "stat", 4, "percentunit", []query{{
			`min(fared_destinations_reachable{instance=~"$instance"} / (fared_destinations > 0)) or vector(0)`, ""}}},
		{"Alerts", "firing alerts of fared", "stat", 4, "short", []query{{`count(ALERTS{alertname=~"Fared.*",alertstate="firing",instance=~"$instance"}) or vector(0)`, ""}}},
	}},
	{"Planes", []panel{
		{"Planes", "1: up. A drained plane is down on purpose", "state-timeline", 12, "short", []query{{`fared_plane_up{instance=~"$instance"}`, "{{instance}} {{plane}}"}}},
		{"Drained sub-ports", "1: drained, or being drained or undrained", "state-timeline", 12, "short", []query{{`fared_sub_port_drained{instance=~"$instance"}`, "{{instance}} {{device}}"}}},
		{"Weights", "share of each plane in the weights, the mean over servers and destinations", "timeseries", 8, "percentunit", []query{{
			`avg by (plane) (fared_plane_weight_ratio{instance=~"$instance"})`, "{{plane}}"}}},
		{"Bandwidth of sub-ports", "sum over servers of the sub-ports that count", "timeseries", 8, "bps", []query{{`sum by (plane) (fared_plane_bandwidth_bps{instance=~"$instance"})`, "{{plane}}"}}},
		{"Failures of links and sessions", "failures of established sessions, and rises of links held by damping, a second", "timeseries", 8, "cps", []query{
			{`sum by (instance) (rate(fared_session_flaps_total{instance=~"$instance"}[$__rate_interval]))`, "{{instance}} sessions"},
			{`sum by (instance) (rate(fared_sub_port_damped_total{instance=~"$instance"}[$__rate_interval]))`, "{{instance}} damped"},
		}},
		{"Sent by plane", "steered packets with headers; driver bpf", "timeseries", 12, "bps", []query{{`8 * sum by (plane) (` + bytesByPlane + `)`, "{{plane}}"}}},
		{"Sent share minus weight", "0 where a server's bytes follow its weights, if its traffic to all destinations is equal; driver bpf", "timeseries", 12, "percentunit", []query{{
			bytesByPlane + ` / on (instance) group_left () ` + bytesOfAll + ` - on (instance, plane) fared_plane_weight_ratio{instance=~"$instance"}`, "{{instance}} {{plane}}"}}},
	}},
	{"Sessions and routes", []panel{
		{"Sessions by state", "", "timeseries", 8, "short", []query{{`sum by (state) (fared_sessions{instance=~"$instance"})`, "{{state}}"}}},
		{"Routes", "of all sessions: received, used for weights, advertised", "timeseries", 8, "short", []query{{`sum by (use) (fared_session_routes{instance=~"$instance"})`, "{{use}}"}}},
		{"Destinations", "", "timeseries", 8, "short", []query{
			{`sum by (instance) (fared_destinations{instance=~"$instance"})`, "{{instance}} known"},
			{`sum by (instance) (fared_destinations_reachable{instance=~"$instance"})`, "{{instance}} reachable"},
		}},
	}},
	{"From an UPDATE to the data plane", []panel{
		{"Input to weights in effect", "from an input at the loop to the data plane's confirmation", "timeseries", 8, "s", quantiles("fared_update_acknowledged_seconds")},
		{"Steps of the loop", "", "timeseries", 8, "s", quantiles("fared_loop_step_seconds")},
		{"Batches at the driver", "", "timeseries", 8, "s", quantiles("fared_agent_commit_seconds")},
		{"Operations", "toward the data plane", "timeseries", 8, "ops", []query{{`sum by (level, result) (rate(fared_dataplane_operations_total{instance=~"$instance"}[$__rate_interval]))`, "{{level}} {{result}}"}}},
		{"Not in effect", "objects that wait, are refused, or have shares off by more than 1 %", "timeseries", 8, "short", []query{
			{`sum(fared_dataplane_pending{instance=~"$instance"})`, "pending"},
			{`sum(fared_dataplane_refused{instance=~"$instance"})`, "refused"},
			{`sum(fared_dataplane_approximate{instance=~"$instance"})`, "approximate"},
		}},
		{"Kernel objects", "changes by the agent; drivers bpf and linux", "timeseries", 8, "ops", []query{{`sum by (object) (rate(fared_agent_kernel_operations_total{instance=~"$instance"}[$__rate_interval]))`, "{{object}}"}}},
	}},
	{"Agents and processes", []panel{
		{"Packets dropped by steering", "driver bpf", "timeseries", 8, "pps", []query{{`sum by (reason) (rate(fared_agent_steering_dropped_packets_total{instance=~"$instance"}[$__rate_interval]))`, "{{reason}}"}}},
		{"CPU", "processors in use", "timeseries", 8, "short", []query{{`rate(process_cpu_seconds_total{job=~"fared|fared-agent",instance=~"$instance"}[$__rate_interval])`, "{{instance}} {{job}}"}}},
		{"Memory", "resident", "timeseries", 8, "bytes", []query{{`process_resident_memory_bytes{job=~"fared|fared-agent",instance=~"$instance"}`, "{{instance}} {{job}}"}}},
	}},
}

// dashboardJSON returns the dashboard in Grafana's format (JSON model, schema version 39: Grafana 11).
func dashboardJSON() (string, error) {
	type object = map[string]any
	source := object{"type": "prometheus", "uid": "${datasource}"}
	panels, id, y := []object{}, 0, 0
	add := func(p object, title string, x, w, h int) {
		id++
		p["id"], p["title"], p["gridPos"] = id, title, object{"x": x, "y": y, "w": w, "h": h}
		panels = append(panels, p)
	}
	for _, r := range dashboard {
		add(object{"type": "row", "collapsed": false, "panels": []object{}}, r.title, 0, 24, 1)
		y++
		x, height := 0, 0
		for _, p := range r.panels {
			h := 8
			if p.kind == "stat" {
				h = 4
			}
			if x+p.width > 24 {
				x, y = 0, y+height
			}
			targets := []object{}
			for i, q := range p.queries {
				targets = append(targets, object{"refId": string(rune('A' + i)), "datasource": source, "expr": q.expr, "legendFormat": q.legend})
			}
			add(object{
				"type": p.kind, "description": p.meaning, "datasource": source, "targets": targets,
				"fieldConfig": object{"defaults": object{"unit": p.unit}, "overrides": []object{}},
			}, p.title, x, p.width, h)
			x, height = x+p.width, h
		}
		y += height
	}
	b, err := json.MarshalIndent(object{
		"uid": "fared", "title": "fared", "tags": []string{"fared"}, "schemaVersion": 39, "editable": true, "refresh": "10s",
		"time": object{"from": "now-1h", "to": "now"}, "panels": panels,
		"templating": object{"list": []object{
			{"name": "datasource", "type": "datasource", "query": "prometheus"},
			{
				"name": "instance", "label": "server", "type": "query", "datasource": source, "query": "label_values(fared_build_info, instance)",
				"refresh": 2, "multi": true, "includeAll": true, "allValue": ".*", "current": object{"text": "All", "value": "$__all"},
			},
		}},
	}, "", "  ")
	return string(b) + "\n", err
}
