package daemon

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/daemon/internal/speaker"
	"github.com/fared/fared/internal/testkit/testlog"
)

// bounds are those of examples/server-8gpu.yaml.
const bounds = "path_bandwidth: {missing: local, minimum: 100G, maximum: 1.6T}\n"

// ignoredOf returns the text about ignored bandwidth in a destination's weights.
func (r *rig) ignoredOf(n int) string {
	resp, err := r.d.WeightService().GetWeights(context.Background(), &farev1.GetWeightsRequest{Destination: destination(n).Addr().String()})
	if err != nil {
		return err.Error()
	}
	return resp.Weights[0].BandwidthIgnored
}

// faultsShown returns the status's faults, one per line.
func (r *rig) faultsShown() string {
	var out []string
	for _, f := range r.status().Faults {
		out = append(out, fmt.Sprintf("%s %s %s %s %d %s %v", f.Kind, f.Plane, f.Session, f.Reason, f.Routes, f.Example, f.Remedy != ""))
	}
	return strings.Join(out, "\n")
}

// lines is a log that tests read.
type lines struct{ testlog.Log }

// count returns the number of lines that contain all words.
func (l *lines) count(words ...string) (n int) {
	for line := range strings.Lines(l.String()) {
		has := true
		for _, w := range words {
			has = has && strings.Contains(line, w)
		}
		if has {
			n++
		}
	}
	return n
}

// logged waits for n lines that contain all words.
func logged(t *testing.T, log *lines, n int, words ...string) {
	t.Helper()
	eventually(t, fmt.Sprintf("%d log lines with %q", n, words), func() bool { return log.count(words...) == n })
}

// sessionsOf returns the sessions of the log lines that contain a word, in order.
func sessionsOf(log *lines, word string) (out []string) {
	for line := range strings.Lines(log.String()) {
		if _, after, ok := strings.Cut(line, "session="); ok && strings.Contains(line, word) {
			out = append(out, strings.Fields(after)[0])
		}
	}
	return out
}

// metric returns the sum of a metric's series with a reason.
func (r *rig) metric(name, reason string) (sum float64) {
	r.t.Helper()
	families, err := r.d.registry.Gather()
	if err != nil {
		r.t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				if f.GetName() == name && l.GetName() == "reason" && l.GetValue() == reason {
					sum += m.GetGauge().GetValue()
				}
			}
		}
	}
	return sum
}

// TestIgnoredBandwidthIsAFault checks that a leaf whose values are out of bounds, or missing where other leaves have
// one, is shown in status, weights and events, from begin to end; one event for each session and reason. A fabric
// without any bandwidth is not a fault.
func TestIgnoredBandwidthIsAFault(t *testing.T) {
	log := &lines{}
	r := newRig(t, shape{Planes: 2, SubPorts: 1, Extra: bounds}, rigOptions{leaves: announceAll(400e9, 2), deps: func(d *Deps) {
		d.Logger = slog.New(slog.NewTextHandler(log, nil))
	}})
	r.wait(destination(0), "1:1")
	r.wait(destination(1), "1:1")
	if shown, word := r.faultsShown(), r.ignoredOf(0); shown != "" || word != "" {
		t.Errorf("with valid values: %q, %q", shown, word)
	}
	// The result of FRR 8.4.4 for 800G: 100 Gbyte/s modulo 2^32.
	r.leaves[1].announce(1_215_752_192*8, destination(0), destination(1))
	eventually(t, "the fault", func() bool {
		return strings.HasPrefix(r.faultsShown(), "bandwidth-ignored p1 p1/p1.0 below-minimum 2 10.255.1.")
	})
	if got := r.ignoredOf(1); got != "below-minimum from p1/p1.0" {
		t.Errorf("weights show %q", got)
	}
	r.wait(destination(0), "1:1") // path_bandwidth.missing: local
	if got := r.metric("fared_session_bandwidth_ignored", "below-minimum"); got != 2 {
		t.Errorf("the metric is %v, want 2", got)
	}
	logged(t, log, 1, "level=WARN", "session=p1/p1.0", "routes ignored, below-minimum")
	// Half of the routes return to a valid value: the fault continues, with fewer routes and without another event.
	r.leaves[1].announce(400e9, destination(0))
	eventually(t, "one route", func() bool {
		return r.faultsShown() == "bandwidth-ignored p1 p1/p1.0 below-minimum 1 10.255.1.1/32 true" && r.ignoredOf(0) == ""
	})
	r.leaves[1].announce(400e9, destination(1))
	eventually(t, "the end", func() bool { return r.faultsShown() == "" && r.ignoredOf(1) == "" })
	logged(t, log, 1, "session=p1/p1.0", "is ignored now, below-minimum")
	if n := log.count("session=p1/p1.0", "routes ignored, below-minimum"); n != 1 {
		t.Errorf("%d lines about the beginning, want 1", n)
	}
	if got := r.metric("fared_session_bandwidth_ignored", "below-minimum"); got != 0 {
		t.Errorf("the metric is %v, want none", got)
	}
	// Absent while the other plane has a value; then absent in both.
	r.leaves[0].announce(noBandwidth, destination(0))
	eventually(t, "missing", func() bool {
		return r.faultsShown() == "bandwidth-ignored p0 p0/p0.0 missing-bandwidth 1 10.255.1.0/32 true" && r.ignoredOf(0) == "missing-bandwidth from p0/p0.0"
	})
	r.leaves[1].announce(noBandwidth, destination(0))
	eventually(t, "no bandwidth by design", func() bool { return r.faultsShown() == "" && r.ignoredOf(0) == "" })
	// A session that ends also ends its fault.
	r.leaves[1].announce(1e9, destination(1))
	eventually(t, "the fault again", func() bool { return r.ignoredOf(1) != "" })
	r.links.change(1, func(e *LinkEvent) { e.Up = false })
	eventually(t, "the fault is gone with its session", func() bool { return r.faultsShown() == "" && r.ignoredOf(1) == "" })
}

// TestIgnoredBandwidthIsReportedAtABoundedRate checks that, of many simultaneous faults, faultLines are reported per
// faultsEvery, and the others after that, each once.
func TestIgnoredBandwidthIsReportedAtABoundedRate(t *testing.T) {
	s := shape{Planes: 5, SubPorts: 4, Extra: bounds}
	l := idle(t, s.Text())
	log := &lines{}
	l.log = slog.New(slog.NewTextHandler(log, nil))
	for i := range 20 {
		establish(l, s, i)
		l.bgp(oneRoute(i, 1, destination(0), attributes(1e9, s.PeerAS(i), 65001)))
	}
	const line = "routes ignored"
	l.markIgnored()
	for reports, want := range []int{8, 16, 20, 20} {
		l.reportFaults()
		l.reportFaults() // too early
		if n := log.count(line); n != want {
			t.Fatalf("after %d reports: %d lines, want %d", reports+1, n, want)
		}
		l.faultReport.last = l.faultReport.last.Add(-faultsEvery)
	}
	if n := len(l.sessionFaults()); n != 20 {
		t.Errorf("%d faults, want 20", n)
	}
	for i := range 20 {
		l.bgp(speaker.SessionDown{Session: i, Generation: 1})
	}
	l.markIgnored()
	for range 3 {
		l.reportFaults()
		l.faultReport.last = l.faultReport.last.Add(-faultsEvery)
	}
	if order := sessionsOf(log, "is ignored now"); !slices.IsSorted(order) || len(order) != 20 {
		t.Errorf("the ends are reported in the order %q", order)
	}
	if order := sessionsOf(log, line); !slices.IsSorted(order) || len(order) != 20 {
		t.Errorf("the faults are reported in the order %q", order)
	}
	if began, ended := log.count(line), log.count("is ignored now"); began != 20 || ended != 20 || len(l.sessionFaults()) != 0 {
		t.Errorf("%d began and %d ended, want 20; %d faults are left", began, ended, len(l.sessionFaults()))
	}
}
