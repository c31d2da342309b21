package worker

import (
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc"

	fleetv1 "github.com/fared/fared/api/fleet/v1"
	"github.com/fared/fared/fleet/drain"
	"github.com/fared/fared/internal/metric"
	"github.com/fared/fared/topo"
)

// scrape returns the samples of a worker's metrics of the fleet.
func scrape(t *testing.T, w *Worker) (lines []string) {
	t.Helper()
	r := httptest.NewRecorder()
	w.MetricsHandler().ServeHTTP(r, httptest.NewRequest("GET", "/metrics", nil))
	for line := range strings.Lines(r.Body.String()) {
		if strings.HasPrefix(line, "fared_") {
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	return lines
}

// TestMetrics scrapes a worker of three servers: one does not report, one has no carrier at a sub-port, and a leaf
// is drained. All declared metrics are exported.
func TestMetrics(t *testing.T) {
	f := number(t, topo.Spec{Planes: 2, Servers: 3, Underlay: netip.MustParsePrefix("127.0.0.0/8")})
	first, second := listen(t), listen(t)
	serve(t, f, second)
	w, _ := serveConfig(t, first, Config{Fabric: f, Peers: []string{second.Addr().String()}, Engine: &engine{}, Budget: drain.Budget{Planes: 1}})
	c := ask(t, first.Addr().String())
	for _, n := range f.Server[:2] {
		m := message(f, n, 1, 1)
		if n.Index == 1 {
			m.Ports.Ports[0].State = "dark"
			m.Paths.Paths[0].BandwidthBps[1] = 0
		}
		stream, err := c.Report(t.Context(), grpc.WaitForReady(true))
		if err != nil {
			t.Fatal(err)
		}
		if err := stream.Send(m); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := c.Drain(t.Context(), &fleetv1.DrainRequest{Part: "server1/p1"}); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		`fared_fleet_nodes{kind="server",state="reporting"} 2`, `fared_fleet_nodes{kind="server",state="missing"} 1`, `fared_fleet_nodes{kind="switch",state="missing"} 2`,
		`fared_fleet_messages_total{result="kept"} 2`, `fared_fleet_peer_up{worker="` + second.Addr().String() + `"} 1`,
		`fared_fleet_faults{fault="dark",kind="half-cable"} 1`, `fared_fleet_pairs{planes="1"} 2`, `fared_fleet_pairs{planes="2"} 2`, `fared_fleet_pairs_below_budget 0`,
		`fared_fleet_engine_up 1`, `fared_fleet_drains{state="draining"} 1`, `fared_fleet_drain_sub_ports_left{part="server1/p1"} 2`,
	} {
		until(t, want, func() bool { return slices.Contains(scrape(t, w), want) })
	}
	text := strings.Join(scrape(t, w), "\n")
	if !strings.Contains(text, `fared_fleet_fault_sure_ratio{fault="dark",kind="half-cable",part="server2/p0.0"} 0.9`) {
		t.Errorf("no fault of server2/p0.0:\n%s", text)
	}
	for _, m := range Metrics() {
		name := m.Name
		if m.Type == metric.Histogram {
			name += "_bucket"
		}
		if !strings.Contains(text, name+"{") && !strings.Contains(text, name+" ") {
			t.Errorf("%s is not exported", name)
		}
	}
}
