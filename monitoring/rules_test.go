package monitoring

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/fared/fared/daemon"
	"github.com/fared/fared/dataplane/agent"
	"github.com/fared/fared/fleet/worker"
	"github.com/fared/fared/internal/metric"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/kube"
)

const (
	rulesFile = "fared.rules.yml"
	runbooks  = "../docs/operations/alerts.md"
	runbookAt = "/usr/share/doc/fared/operations/alerts.md#"
)

// rule is an alerting rule.
type rule struct {
	Alert, Expr, For    string
	Labels, Annotations map[string]string
}

// rules reads the alerting rules.
func rules(t *testing.T) (out []rule) {
	t.Helper()
	var file struct {
		Groups []struct{ Rules []rule }
	}
	b, err := os.ReadFile(rulesFile)
	if err == nil {
		err = yaml.Unmarshal(b, &file)
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, g := range file.Groups {
		out = append(out, g.Rules...)
	}
	if len(out) < 20 {
		t.Fatalf("%d rules", len(out))
	}
	return out
}

// series returns the names of all exported time series.
func series() map[string]bool {
	out := map[string]bool{}
	for _, m := range slices.Concat(daemon.Metrics(), agent.Metrics(), worker.Metrics(), kube.Metrics()) {
		if m.Type != metric.Histogram {
			out[m.Name] = true
			continue
		}
		for _, suffix := range []string{"_bucket", "_sum", "_count"} {
			out[m.Name+suffix] = true
		}
	}
	return out
}

var metricName = regexp.MustCompile(`\bfared_\w+`)

func promtool(t *testing.T, args ...string) {
	t.Helper()
	netnstest.Tools(t, "promtool")
	if out, err := exec.Command("promtool", args...).CombinedOutput(); err != nil {
		t.Errorf("promtool %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

// TestRules checks that promtool accepts the rules, that each has all parts, and that each metric in them is exported.
func TestRules(t *testing.T) {
	exported := series()
	for _, r := range rules(t) {
		if s := r.Labels["severity"]; s != "page" && s != "warn" {
			t.Errorf("%s: severity %q, want page or warn", r.Alert, s)
		}
		for _, name := range []string{"summary", "description", "runbook"} {
			if r.Annotations[name] == "" {
				t.Errorf("%s has no %s", r.Alert, name)
			}
		}
		if !strings.HasPrefix(r.Annotations["summary"], "{{ $labels.instance }}: ") {
			t.Errorf("%s: the summary does not begin with the instance", r.Alert)
		}
		for _, name := range metricName.FindAllString(r.Expr, -1) {
			if !exported[name] {
				t.Errorf("%s: no time series %s is exported", r.Alert, name)
			}
		}
	}
	promtool(t, "check", "rules", rulesFile)
}

// TestRunbooks checks that each alert has a section of its name, to which its annotation leads, and each section an
// alert.
func TestRunbooks(t *testing.T) {
	b, err := os.ReadFile(runbooks)
	if err != nil {
		t.Fatal(err)
	}
	sections := map[string]string{}
	for _, part := range strings.Split(string(b), "\n## ")[1:] {
		name, text, _ := strings.Cut(part, "\n")
		sections[name] = text
	}
	for _, r := range rules(t) {
		text, ok := sections[r.Alert]
		if !ok {
			t.Errorf("%s has no section %q", runbooks, r.Alert)
			continue
		}
		delete(sections, r.Alert)
		if !strings.HasPrefix(text, "*"+r.Labels["severity"]+"*") {
			t.Errorf("the section %s does not begin with *%s*", r.Alert, r.Labels["severity"])
		}
		if want := runbookAt + strings.ToLower(r.Alert); r.Annotations["runbook"] != want {
			t.Errorf("%s: runbook %q, want %q", r.Alert, r.Annotations["runbook"], want)
		}
	}
	for name := range sections {
		t.Errorf("%s: no alert %s", runbooks, name)
	}
}

// example is a course of metrics: lines of a series and its values each minute, in the notation of promtool. In the
// series, @ stands for the labels of the instance, and values stay at the last one until the end.
type example []string

// examples has for each alert a course that makes it fire, and it alone, and a similar course that makes no alert fire.
var examples = map[string]struct{ fires, silent example }{
	"FaredDown":         {example{`up{job="fared",@} 1 0`}, example{`up{job="fared",@} 1 0 1`, `up{job="node",@} 0`}},
	"FaredLoopStuck":    {example{`fared_loop_responding{@} 1 0`}, example{`fared_loop_responding{@} 1 0 1`}},
	"FaredNotConverged": {example{`fared_converged{@} 0`}, example{`fared_converged{@} 0 0 1`}},
	"FaredPlaneDown": {
		// One sub-port of the plane is drained; the other has failed. The alerts of its session and sub-port are
		// silent.
		example{`fared_plane_up{plane="p0",@} 1 0`, `fared_sub_port_up{plane="p0",device="a",@} 1 0`, `fared_sub_port_up{plane="p0",device="b",@} 0`,
			`fared_sub_port_drained{plane="p0",device="a",@} 0`, `fared_sub_port_drained{plane="p0",device="b",@} 1`, `fared_session_up{plane="p0",device="a",session="s",@} 1 0`},
		example{`fared_plane_up{plane="p0",@} 1 0`, `fared_sub_port_up{plane="p0",device="a",@} 1 0`, `fared_sub_port_up{plane="p0",device="b",@} 1 0`,
			`fared_sub_port_drained{plane="p0",device="a",@} 0 1`, `fared_sub_port_drained{plane="p0",device="b",@} 0 1`, `fared_session_up{plane="p0",device="a",session="s",@} 1 0`},
	},
	"FaredPlaneDegraded": {
		example{`fared_plane_up{plane="p0",@} 1`, `fared_sub_port_up{plane="p0",device="a",@} 1 0`, `fared_sub_port_up{plane="p0",device="b",@} 1`,
			`fared_sub_port_link_up{plane="p0",device="a",@} 1 0`, `fared_sub_port_drained{plane="p0",device="a",@} 0`, `fared_session_up{plane="p0",device="a",session="s",@} 1 0`},
		example{`fared_plane_up{plane="p0",@} 1`, `fared_sub_port_up{plane="p0",device="a",@} 1 0`, `fared_sub_port_up{plane="p0",device="b",@} 1`,
			`fared_sub_port_link_up{plane="p0",device="a",@} 1 0`, `fared_sub_port_drained{plane="p0",device="a",@} 0 1`, `fared_session_up{plane="p0",device="a",session="s",@} 1 0`},
	},
	"FaredLinkDamped": {example{`fared_sub_port_damped_total{plane="p0",device="a",@} 0 2`}, example{`fared_sub_port_damped_total{plane="p0",device="a",@} 7`}},
	"FaredSessionDown": {
		example{`fared_plane_up{plane="p0",@} 1`, `fared_sub_port_up{plane="p0",device="a",@} 1 0`, `fared_sub_port_link_up{plane="p0",device="a",@} 1`,
			`fared_sub_port_drained{plane="p0",device="a",@} 0`, `fared_session_up{plane="p0",device="a",session="s",@} 1 0`},
		// Two minutes without the session, and then a drain.
		example{`fared_plane_up{plane="p0",@} 1`, `fared_sub_port_up{plane="p0",device="a",@} 1 0`, `fared_sub_port_link_up{plane="p0",device="a",@} 1`,
			`fared_sub_port_drained{plane="p0",device="a",@} 0 0 0 1`, `fared_session_up{plane="p0",device="a",session="s",@} 1 0`},
	},
	"FaredSessionFlaps": {example{`fared_session_flaps_total{session="s",@} 0 2 4`}, example{`fared_session_flaps_total{session="s",@} 40 40 40 40 40 40 40 42 43`}},
	"FaredBFDDown": {
		example{`fared_session_up{session="s",@} 1`, `fared_session_bfd_up{session="s",@} 1 0`},
		example{`fared_session_up{session="s",@} 1`, `fared_session_bfd_up{session="s",@} 0`}, // the leaf has no BFD
	},
	"FaredDestinationsUnreachable": {
		// A server whose leaves withdraw all routes, or send other ones. TestPrometheusFaults has destinations that are
		// known.
		example{`fared_destinations{@} 4 0`, `fared_destinations_reachable{@} 4 0`, `fared_converged{@} 1`, `fared_session_up{plane="p0",device="a",session="s",@} 1`, `fared_dataplane_connected{@} 1`},
		// A leaf before its servers.
		example{`fared_destinations{@} 4 3 0`, `fared_destinations_reachable{@} 4 3 0`, `fared_converged{@} 1`, `fared_session_up{plane="p0",device="a",session="s",@} 1`},
	},
	"FaredRoutesDropped": {
		example{`fared_session_routes_dropped{plane="p0",session="s",reason="route_next_hop",@} 3`},
		example{`fared_session_routes_dropped{plane="p0",session="s",reason="route_next_hop",@} 3 0`},
	},
	"FaredLoopbackClaimed":       {example{`fared_loopbacks_claimed{@} 0 1`}, example{`fared_loopbacks_claimed{@} 0 1 0`}},
	"FaredOriginConflict":        {example{`fared_destinations_conflicting{@} 0 2`}, example{`fared_destinations_conflicting{@} 2 2 0`}},
	"FaredBandwidthIgnored":      {example{`fared_session_bandwidth_ignored{plane="p0",session="s",reason="below-minimum",@} 3`}, example{`fared_session_bandwidth_ignored{plane="p0",session="s",reason="below-minimum",@} 3 0`}},
	"FaredDataplaneDisconnected": {example{`fared_dataplane_connected{@} 1 0`}, example{`fared_dataplane_connected{@} 1 0 1`}},
	"FaredDataplaneStalled": {
		example{`fared_dataplane_connected{@} 1`, `fared_dataplane_pending{@} 0 8`},
		example{`fared_dataplane_connected{@} 1`, `fared_dataplane_pending{@} 0 8 8 0 8 0 8 8 0 8 0 0`},
	},
	"FaredDataplaneRefuses":      {example{`fared_dataplane_refused{@} 0 1`}, example{`fared_dataplane_refused{@} 0 1 0`}},
	"FaredDataplaneDamaged":      {example{`fared_dataplane_intact{@} 1 0`}, example{`fared_dataplane_intact{@} 1 0 1`}},
	"FaredPacketsWrong":          {example{`fared_proof_findings{plane="p1",device="eth1",problem="lost",direction="ours",@} 1`}, example{`fared_proof_findings{plane="",device="",problem="lost",direction="ours",@} 1`}},
	"FaredDataplaneLimited":      {example{`fared_dataplane_limited{reason="driver",@} 1`}, example{`fared_dataplane_limited{reason="mtu",@} 1 1 0`}},
	"FaredSlotTableNotPublished": {example{`fared_slot_table_failing{@} 0 1`}, example{`fared_slot_table_failing{@} 0 1 0`}},
	"FaredDrainsUnsaved":         {example{`fared_drains_unsaved{@} 0 1`}, example{`fared_drains_unsaved{@} 0 1 0`}},
	"FaredRecordingIncomplete":   {example{`fared_recording_missing_events_total{@} 0+1x29`}, example{`fared_recording_missing_events_total{@} 5`}},
	"FaredLoopSlow": {
		example{`fared_loop_step_seconds_bucket{le="0.001",@} 0+98x29`, `fared_loop_step_seconds_bucket{le="0.2",@} 0+100x29`, `fared_loop_step_seconds_bucket{le="+Inf",@} 0+100x29`},
		example{`fared_loop_step_seconds_bucket{le="0.001",@} 0+100x29`, `fared_loop_step_seconds_bucket{le="0.2",@} 0+100x29`, `fared_loop_step_seconds_bucket{le="+Inf",@} 0+100x29`},
	},
	"FaredPanic":       {example{`fared_panics_total{@} 0 1`}, example{`fared_panics_total{@} 1`, `fared_agent_panics_total{@} 1`}},
	"FaredAgentBroken": {example{`fared_agent_serving{@} 1 0`}, example{`fared_agent_serving{@} 1 0 1`}},
	"FaredKernelSlow": {
		example{`fared_agent_kernel_seconds_bucket{le="0.001",@} 0+98x29`, `fared_agent_kernel_seconds_bucket{le="0.2",@} 0+100x29`, `fared_agent_kernel_seconds_bucket{le="+Inf",@} 0+100x29`},
		// The load of many destinations is one slow batch.
		example{`fared_agent_kernel_seconds_bucket{le="0.001",@} 0 0 0 4`, `fared_agent_kernel_seconds_bucket{le="0.2",@} 0 0 0 4`, `fared_agent_kernel_seconds_bucket{le="+Inf",@} 0 0 0 5`},
	},
	"FaredAgentJournalBehind": {example{`fared_agent_journal_behind{@} 0 1`}, example{`fared_agent_journal_behind{@} 0 1 0`}},
	"FaredAgentRepairs":       {example{`fared_agent_repairs_total{@} 0+1x29`}, example{`fared_agent_repairs_total{@} 1`}},
	"FaredSteeringDrops": {
		example{`fared_agent_steering_dropped_packets_total{reason="unreachable",@} 0+100x29`},
		example{`fared_agent_steering_dropped_packets_total{reason="unreachable",@} 0+6x29`, `fared_agent_steering_dropped_packets_total{reason="protocol",@} 0+100x29`},
	},
	"FaredFleetDown":  {example{`up{job="fared-fleet",@} 1 0`}, example{`up{job="fared-fleet",@} 1 0 1`}},
	"FaredFleetFault": {example{`fared_fleet_fault_sure_ratio{part="leaf1",kind="leaf",fault="dark",@} 0.99`}, example{`fared_fleet_fault_sure_ratio{part="leaf1",kind="leaf",fault="dark",@} 0.99 stale _x27`}},
	"FaredFleetMissing": {
		example{`fared_fleet_nodes{kind="server",state="missing",@} 0 1`},
		// Leaves without fared do not report.
		example{`fared_fleet_nodes{kind="server",state="missing",@} 1 1 0`, `fared_fleet_nodes{kind="switch",state="missing",@} 4`},
	},
	"FaredFleetEngineDown":   {example{`fared_fleet_engine_up{@} 1 0`}, example{`fared_fleet_engine_up{@} 1 0 1`}},
	"FaredFleetDrainOverdue": {example{`fared_fleet_drain_sub_ports_left{part="leaf1",@} 3`}, example{`fared_fleet_drain_sub_ports_left{part="leaf1",@} 9 9 9 9 9 3 3 0`}},
}

// minutes is the length of an example.
const minutes = 30

// group returns an example as a group of unit tests for promtool: alerts that fire at the end, and the minutes from the
// begin without any.
func (e example) group(name string, quietUntil int, want ...rule) map[string]any {
	var input []map[string]string
	for _, line := range e {
		text, values, _ := strings.Cut(line, "} ")
		labels := `job="fared",instance="server1"`
		if strings.Contains(text, `job="`) {
			labels = `instance="server1"`
		}
		last := strings.Fields(values)
		if !strings.Contains(values, "x") {
			values += fmt.Sprintf(" %sx%d", last[len(last)-1], minutes-len(last)-1)
		}
		input = append(input, map[string]string{"series": strings.Replace(text, "@", labels, 1) + "}", "values": values})
	}
	firing := func(at int, want ...rule) map[string]any {
		samples := []map[string]any{}
		for _, r := range want {
			samples = append(samples, map[string]any{"labels": fmt.Sprintf(`{alertname=%q,severity=%q,instance="server1"}`, r.Alert, r.Labels["severity"]), "value": 1})
		}
		return map[string]any{
			"expr": `count by (alertname, severity, instance) (ALERTS{alertstate="firing"})`, "eval_time": fmt.Sprintf("%dm", at), "exp_samples": samples,
		}
	}
	tests := []map[string]any{firing(minutes-1, want...)}
	for at := range quietUntil {
		tests = append(tests, firing(at))
	}
	return map[string]any{"name": name, "interval": "1m", "input_series": input, "promql_expr_test": tests}
}

// TestExamples checks by promtool that each alert fires in its example, after its time, alone and with its severity,
// and that no alert ever fires in the other example.
func TestExamples(t *testing.T) {
	gate.Needed(t, "promtool plays every alert")
	here, err := filepath.Abs(rulesFile)
	if err != nil {
		t.Fatal(err)
	}
	var groups []map[string]any
	for _, r := range rules(t) {
		e, ok := examples[r.Alert]
		if !ok {
			t.Errorf("no example of %s", r.Alert)
			continue
		}
		groups = append(groups, e.fires.group(r.Alert, 1, r), e.silent.group(r.Alert+", silent", minutes))
	}
	if len(groups) != 2*len(examples) {
		t.Errorf("%d examples, %d rules", len(examples), len(groups)/2)
	}
	b, err := yaml.Marshal(map[string]any{"rule_files": []string{here}, "evaluation_interval": "1m", "tests": groups})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "test.yml")
	if err := os.WriteFile(file, b, 0o600); err != nil {
		t.Fatal(err)
	}
	promtool(t, "test", "rules", file)
}
