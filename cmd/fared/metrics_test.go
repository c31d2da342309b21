package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/fared/fared/daemon"
	"github.com/fared/fared/dataplane/agent"
	"github.com/fared/fared/internal/metric"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// freePort returns an address of 127.0.0.1 at which nobody listens.
func freePort(t *testing.T) string {
	t.Helper()
	return fmt.Sprintf("127.0.0.1:%d", netnstest.FreePort(t))
}

// dialIn returns a function that connects to a TCP address in a namespace.
func dialIn(n *netnstest.Namespace, address string) func() (net.Conn, error) {
	return func() (conn net.Conn, err error) {
		err = n.Do(func() (err error) { conn, err = net.Dial("tcp", address); return err })
		return conn, err
	}
}

// scrape returns the metrics at an address in a format, text/plain or application/openmetrics-text. dial connects.
func scrape(t *testing.T, address, format string, dial func() (net.Conn, error)) string {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+address+"/metrics", nil)
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Accept", format)
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true, DialContext: func(context.Context, string, string) (net.Conn, error) { return dial() },
	}}
	answer, err := client.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	b, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Fatal(err)
	}
	if got := answer.Header.Get("Content-Type"); answer.StatusCode != http.StatusOK || !strings.HasPrefix(got, format) {
		t.Fatalf("%s: %s of type %q, want %s\n%s", address, answer.Status, got, format, b)
	}
	return string(b)
}

// conform checks the metrics of a running process: promtool accepts their names, each is declared with its type, and
// OpenMetrics has the same.
func conform(t *testing.T, text, open string, declared []*metric.Metric) {
	t.Helper()
	check := exec.Command("promtool", "check", "metrics")
	check.Stdin = strings.NewReader(text)
	if out, err := check.CombinedOutput(); err != nil || len(out) != 0 {
		t.Errorf("promtool check metrics: %v\n%s", err, out)
	}
	types := map[string]metric.Type{}
	for _, m := range declared {
		types[m.Name] = m.Type
	}
	n := 0
	for line := range strings.Lines(text) {
		var name, kind string
		if _, err := fmt.Sscanf(line, "# TYPE fared_%s %s", &name, &kind); err != nil {
			continue
		}
		name = "fared_" + name
		if n++; types[name] != metric.Type(kind) {
			t.Errorf("%s is exported as a %s, declared as a %q", name, kind, types[name])
		}
		if family := strings.TrimSuffix(name, "_total"); !strings.Contains(open, "\n# TYPE "+family+" "+kind+"\n") || kind == "counter" && family == name {
			t.Errorf("%s is not a %s in OpenMetrics", name, kind)
		}
	}
	if n < 20 || !strings.HasSuffix(open, "\n# EOF\n") {
		t.Errorf("%d metrics; OpenMetrics ends with %q", n, open[max(0, len(open)-20):])
	}
}

// TestDaemonMetricsConform checks the metrics of a running daemon.
func TestDaemonMetricsConform(t *testing.T) {
	netnstest.Tools(t, "promtool")
	f := startProcesses(t)
	f.nodes["server1"].End(t, syscall.SIGTERM)
	at := freePort(t)
	f.edit("server1", "planes:\n", "metrics: {listen: "+at+"}\nplanes:\n")
	f.start("server1")
	f.until("server1", "10.255.0.2/32  1:1")
	dial := func() (net.Conn, error) { return net.Dial("tcp", at) }
	conform(t, scrape(t, at, "text/plain", dial), scrape(t, at, "application/openmetrics-text", dial), daemon.Metrics())
}

// TestAgentMetricsConform checks the metrics of a running agent of each driver.
func TestAgentMetricsConform(t *testing.T) {
	drivers(t, func(t *testing.T, driver string) {
		b := newKernelBed(t, driver)
		netnstest.Tools(t, "promtool")
		_, a, _ := b.start()
		a.hello(t, b.forwarding)
		a.program(t, someState()...)
		dial := dialIn(b.n, metricsAt)
		text := scrape(t, metricsAt, "text/plain", dial)
		conform(t, text, scrape(t, metricsAt, "application/openmetrics-text", dial), agent.Metrics())
		if steers := strings.Contains(text, "\nfared_agent_steering_sent_bytes_total{device=\"dp0a\",plane=\"p0\"} 0\n"); steers != (b.driver == "bpf") {
			t.Errorf("bytes of sub-ports are exported: %v", steers)
		}
	})
}

// promtool runs promtool, which must accept its input.
func promtool(t *testing.T, args ...string) {
	t.Helper()
	if out, err := exec.Command("promtool", args...).CombinedOutput(); err != nil {
		t.Fatalf("promtool %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}
