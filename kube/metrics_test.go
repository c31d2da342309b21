package kube

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/fared/fared/internal/testkit/netnstest"
)

// values returns the agent's metrics by name and labels.
func values(t *testing.T, a *Agent) map[string]float64 {
	t.Helper()
	registry := prometheus.NewRegistry()
	registry.MustRegister(a)
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]float64{}
	for _, f := range families {
		for _, m := range f.Metric {
			name := f.GetName()
			for _, l := range m.Label {
				if !strings.HasSuffix(l.GetName(), "version") {
					name += " " + l.GetValue()
				}
			}
			all[name] = m.GetGauge().GetValue() + m.GetCounter().GetValue()
		}
	}
	return all
}

// TestMetrics checks the metrics while writes succeed, and while they fail.
func TestMetrics(t *testing.T) {
	api, client := serveAPI(t)
	client.Timeout = limit // a write that takes long is not a failed one
	daemon := newFakeDaemon()
	events, _ := serveSentinel(t)
	var c clock
	a := start(t, Options{Daemon: daemon.serve(t), API: client, Sentinel: events, Now: c.now})
	begin := float64(c.now().Unix())
	all := map[string]float64{}
	netnstest.Eventually(t, limit, func() error {
		all = values(t, a)
		if all["fared_kube_writes_total written api-server"] < 2 || all["fared_kube_objects_behind nvsentinel"]+all["fared_kube_objects_behind api-server"] > 0 {
			return fmt.Errorf("%v", all)
		}
		return nil
	})
	for name, want := range map[string]float64{
		"fared_kube_build_info": 1, "fared_kube_node_known": 1, "fared_kube_objects api-server": 2, "fared_kube_objects nvsentinel": 1,
		"fared_kube_lag_seconds api-server": 0, "fared_kube_writes_total written nvsentinel": 1, "fared_kube_writes_total failed api-server": 0,
	} {
		if got, ok := all[name]; got != want || !ok {
			t.Errorf("%s is %v, want %v", name, got, want)
		}
	}
	if all["fared_kube_observations_total"] < 1 || all["fared_kube_last_success_timestamp_seconds api-server"] < begin {
		t.Errorf("%v", all)
	}
	for _, m := range Metrics() {
		found := false
		for name := range all {
			found = found || strings.Split(name, " ")[0] == m.Name
		}
		if !found {
			t.Errorf("%s is not exported", m.Name)
		}
	}
	api.do(func() {
		api.fault = func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusInternalServerError) }
	})
	daemon.set("p0.0")
	netnstest.Eventually(t, limit, func() error {
		c.nextHour(a)
		if all = values(t, a); all["fared_kube_writes_total failed api-server"] < 1 || all["fared_kube_lag_seconds api-server"] < 3600 {
			return fmt.Errorf("%v", all)
		}
		return nil
	})
}
