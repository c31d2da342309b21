package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/fared/fared/cmd/internal/clitest"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
)

const prometheusAt = "127.0.0.1:9090"

// noAgent is the data plane of a server without an agent.
const noAgent = "memory:"

// slowTimers are of the bed's configurations: the defaults of BFD, 0.9 s, and of BGP expire between processes of a busy
// machine.
const slowTimers = "bfd: {interval: 1s, multiplier: 60}\nbgp: {hold_time: 90s}\n"

// scenarioLimit is the longest that the bed waits for a state. It is far above what each takes, because tests share a
// busy machine.
const scenarioLimit = 90 * time.Second

// ofLoad are the alerts that a busy machine fires.
var ofLoad = []string{"FaredLoopSlow", "FaredKernelSlow"}

// durations are the `for` of alerts, and their values in the bed. The shortest is above three intervals of scrapes, so
// that one failed scrape does not count.
var durations = map[string]string{"10s": "2s", "1m": "2s", "2m": "4s", "5m": "2s", "10m": "3s"}

// windows are the ranges of rates and increases of alerts, and their values in the bed. A day stays a day.
var windows = map[string]string{"5m": "15s", "15m": "15s", "30m": "30s", "1h": "15s", "1d": "1d"}

// prometheusBed is a server with the agent of driver bpf, two leaves and a second server, each in a network namespace,
// and a Prometheus with fared's rules that scrapes both daemons of the server, and other targets of a test. Packets
// pass the leaves after forward.
type prometheusBed struct {
	t     *testing.T
	dir   string
	nodes map[string]*netnstest.Namespace
	runs  map[string]*netnstest.Process
	// agentFlags are further flags of the agent. targets are further targets of job fared. fleet is the target of job
	// fared-fleet, if any. interval is the interval of scrapes.
	agentFlags, targets []string
	fleet, interval     string
}

// cable is a cable from a server to a leaf, which have the addresses 192.0.2.2n and 192.0.2.2n+1.
type cable struct{ server, plane, port int }

func (c cable) n() int             { return 4*c.server + 2*c.plane + c.port }
func (c cable) serverPort() string { return fmt.Sprintf("p%d%c", c.plane, 'a'+c.port) }
func (c cable) leafPort() string   { return fmt.Sprintf("s%d%c", c.server, 'a'+c.port) }

// newPrometheusBed starts all but Prometheus. keys is a part of the configuration of server0.
func newPrometheusBed(t *testing.T, keys string, agentFlags ...string) *prometheusBed {
	t.Helper()
	netnstest.Require(t, "prometheus", "promtool")
	t.Parallel() // most of the time the tests wait for the durations of alerts
	b := &prometheusBed{t: t, dir: testbed.ShortDir(t), nodes: map[string]*netnstest.Namespace{}, runs: map[string]*netnstest.Process{}, agentFlags: agentFlags, interval: "500ms"}
	for _, name := range []string{"server0", "server1", "leaf0", "leaf1"} {
		b.nodes[name] = netnstest.New(t)
	}
	b.flushed(0)
	subPort := func(device, session string) string {
		return fmt.Sprintf("      - {device: %s, speed: 400G, sessions: [{%s}]}\n", device, session)
	}
	planes := map[string]string{}
	for plane := range 2 {
		leaf := fmt.Sprintf("leaf%d", plane)
		planes[leaf] = fmt.Sprintf("planes:\n  - name: p%d\n    sub_ports:\n", plane)
		for server := range 2 {
			name := fmt.Sprintf("server%d", server)
			if plane == 0 {
				planes[name] = "planes:\n"
			}
			planes[name] += fmt.Sprintf("  - name: p%d\n    sub_ports:\n", plane)
			for port := range 2 {
				c := cable{server, plane, port}
				here, there := fmt.Sprintf("192.0.2.%d", 2*c.n()), fmt.Sprintf("192.0.2.%d", 2*c.n()+1)
				netnstest.Cable(t, b.nodes[name], c.serverPort(), here+"/31", b.nodes[leaf], c.leafPort(), there+"/31")
				planes[name] += subPort(c.serverPort(), fmt.Sprintf("peer: %s, peer_as: %d", there, 65200+plane))
				planes[leaf] += subPort(c.leafPort(), fmt.Sprintf("peer: %s, local: %s, peer_as: %d, passive: true", here, there, 65100+server))
			}
		}
	}
	for i := range 2 {
		data, more := noAgent, ""
		if i == 0 {
			more, data = keys, b.agentAt(0)
		}
		loopback := fmt.Sprintf("10.255.0.%d", i+1)
		b.nodes[fmt.Sprintf("server%d", i)].Addr("lo", loopback+"/32")
		b.write(fmt.Sprintf("server%d.yaml", i), fmt.Sprintf("role: server\nrouter_id: %s\nas: %d\nloopbacks: [%[1]s/32]\naccept: [10.255.0.0/16]\ndrain_delay: 100ms\n%[5]sdataplane: {address: %[3]q}\nmetrics: {listen: \"127.0.0.1:9469\"}\n%[4]s",
			loopback, 65100+i, data, planes[fmt.Sprintf("server%d", i)], slowTimers+more))
		b.write(fmt.Sprintf("leaf%d.yaml", i), fmt.Sprintf("role: leaf\nrouter_id: 10.254.0.%d\nas: %d\naccept: [10.255.0.0/16]\nmetrics: {listen: \"0.0.0.0:9469\"}\n%s%s",
			i+1, 65200+i, slowTimers, planes[fmt.Sprintf("leaf%d", i)]))
	}
	b.start("agent")
	for _, name := range []string{"leaf0", "leaf1", "server0", "server1"} {
		b.start(name)
	}
	return b
}

// command returns the command line of fared for "env".
func (b *prometheusBed) command(args ...string) []string {
	b.t.Helper()
	self := executable(b.t)
	return append([]string{clitest.AsFared + "=1", self}, args...)
}

func (b *prometheusBed) write(name, text string) {
	b.t.Helper()
	if err := os.WriteFile(filepath.Join(b.dir, name), []byte(text), 0o644); err != nil {
		b.t.Fatal(err)
	}
}

// agentAt returns the address of a server's agent.
func (b *prometheusBed) agentAt(server int) string {
	return fmt.Sprintf("unix:%s/agent%d", b.dir, server)
}

// agent returns the command line of a server's agent.
func (b *prometheusBed) agent(server int) []string {
	b.t.Helper()
	socket := strings.TrimPrefix(b.agentAt(server), "unix:")
	return b.command(append([]string{"dataplane", "--driver", "bpf", "--socket", socket, "--journal", socket + ".journal"}, b.agentFlags...)...)
}

// flushed removes at the end the objects of a server's agent that outlive the namespace.
func (b *prometheusBed) flushed(server int) {
	b.t.Cleanup(func() {
		if _, err := b.nodes[fmt.Sprintf("server%d", server)].Output("env", append(b.agent(server), "--flush")...); err != nil {
			b.t.Error(err)
		}
	})
}

// forward starts an agent for the second server, and lets the leaves forward the packets of both.
func (b *prometheusBed) forward() {
	b.t.Helper()
	b.flushed(1)
	b.runs["agent1"] = b.nodes["server1"].Start(b.t, "env", b.agent(1)...)
	b.runs["server1"].Kill()
	text, err := os.ReadFile(filepath.Join(b.dir, "server1.yaml"))
	if err != nil {
		b.t.Fatal(err)
	}
	b.write("server1.yaml", strings.Replace(string(text), strconv.Quote(noAgent), strconv.Quote(b.agentAt(1)), 1))
	b.start("server1")
	for plane := range 2 {
		leaf := b.nodes[fmt.Sprintf("leaf%d", plane)]
		leaf.Sysctl("net.ipv4.ip_forward=1")
		for server := range 2 {
			route := []string{"route", "add", fmt.Sprintf("10.255.0.%d/32", server+1)}
			for port := range 2 {
				route = append(route, "nexthop", "via", fmt.Sprintf("192.0.2.%d", 2*cable{server, plane, port}.n()))
			}
			leaf.IP(route...)
		}
	}
}

// start starts a node, or the agent of server0.
func (b *prometheusBed) start(name string) {
	b.t.Helper()
	if name == "agent" {
		b.runs[name] = b.nodes["server0"].Start(b.t, "env", append(b.agent(0), "--metrics-listen", "127.0.0.1:9179")...)
		return
	}
	verb := "run"
	if strings.HasPrefix(name, "leaf") {
		verb = "leaf"
	}
	b.runs[name] = b.nodes[name].Start(b.t, "env", b.command(verb, "--config", filepath.Join(b.dir, name+".yaml"), "--socket", filepath.Join(b.dir, name))...)
}

// prometheus starts Prometheus with the configuration of docs/operations/metrics.md and the rules. Its addresses are
// this bed's, and durations and intervals of scrapes are shorter. It waits until all targets answer.
func (b *prometheusBed) prometheus() {
	b.t.Helper()
	rules, err := os.ReadFile("../../monitoring/fared.rules.yml")
	if err != nil {
		b.t.Fatal(err)
	}
	shorter := func(pattern string, values map[string]string) {
		rules = regexp.MustCompile(pattern).ReplaceAllFunc(rules, func(found []byte) []byte {
			m := regexp.MustCompile(pattern).FindSubmatch(found)
			if values[string(m[2])] == "" {
				b.t.Fatalf("the bed has no duration for %q", found)
			}
			return slices.Concat(m[1], []byte(values[string(m[2])]), m[3])
		})
	}
	shorter(`(?m)^( +for: )(\d+[a-z])($)`, durations)
	shorter(`(\[)(\d+[a-z])(\])`, windows)
	b.write("fared.rules.yml", string(rules))
	page, err := os.ReadFile("../../docs/operations/metrics.md")
	if err != nil {
		b.t.Fatal(err)
	}
	_, config, found := strings.Cut(string(page), "```yaml\n# prometheus.yml\n")
	config, _, closed := strings.Cut(config, "```\n")
	if !found || !closed {
		b.t.Fatal("docs/operations/metrics.md has no prometheus.yml")
	}
	for old, new := range map[string]string{
		`"10.0.0.1:9469", "10.0.0.2:9469"`: `"` + strings.Join(append([]string{"127.0.0.1:9469"}, b.targets...), `", "`) + `"`, `"10.0.0.1:9179", "10.0.0.2:9179"`: `"127.0.0.1:9179"`, "scrape_interval: 15s": "scrape_interval: " + b.interval,
	} {
		if !strings.Contains(config, old) {
			b.t.Fatalf("docs/operations/metrics.md: prometheus.yml has no %s", old)
		}
		config = strings.ReplaceAll(config, old, new)
	}
	targets := 2 + len(b.targets)
	if b.fleet != "" {
		targets++
		config += fmt.Sprintf("  - job_name: fared-fleet\n    scrape_interval: %s\n    static_configs: [{targets: [%q]}]\n    relabel_configs: *host\n", b.interval, b.fleet)
	}
	b.write("prometheus.yml", "global: {evaluation_interval: 200ms}\n"+config)
	file := filepath.Join(b.dir, "prometheus.yml")
	promtool(b.t, "check", "config", file)
	b.runs["prometheus"] = b.nodes["server0"].Start(b.t, "prometheus", "--config.file", file, "--storage.tsdb.path", filepath.Join(b.dir, "tsdb"),
		"--web.listen-address", prometheusAt, "--query.lookback-delta", "5s", "--log.level", "warn")
	b.t.Cleanup(func() {
		if b.t.Failed() {
			b.t.Logf("alerts that fired: %q", slices.Sorted(maps.Keys(b.fired())))
		}
	})
	within(b.t, scenarioLimit, func() error {
		var data struct {
			ActiveTargets []struct{ Health, LastError string }
		}
		if err := b.get("targets", nil, &data); err != nil {
			return err
		}
		for _, target := range data.ActiveTargets {
			if target.Health != "up" {
				return fmt.Errorf("targets %+v", data.ActiveTargets)
			}
		}
		if len(data.ActiveTargets) != targets {
			return fmt.Errorf("targets %+v", data.ActiveTargets)
		}
		return nil
	})
}

// get reads data of Prometheus's HTTP API.
func (b *prometheusBed) get(path string, query url.Values, data any) error {
	dial := dialIn(b.nodes["server0"], prometheusAt)
	client := http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true, DialContext: func(context.Context, string, string) (net.Conn, error) { return dial() },
	}}
	answer, err := client.Get("http://" + prometheusAt + "/api/v1/" + path + "?" + query.Encode())
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil {
		return err
	}
	all := struct{ Data any }{data}
	if err := json.Unmarshal(text, &all); err != nil || answer.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s, %w\n%s", path, answer.Status, err, text)
	}
	return nil
}

// sample is an element of an instant vector.
type sample struct {
	Metric map[string]string
	Value  [2]any // time, value as text
}

func (s sample) value() float64 {
	text, _ := s.Value[1].(string)
	v, err := strconv.ParseFloat(text, 64)
	if err != nil {
		return math.NaN()
	}
	return v
}

// query returns the present result of an expression.
func (b *prometheusBed) query(expr string) []sample {
	b.t.Helper()
	var data struct{ Result []sample }
	if err := b.get("query", url.Values{"query": {expr}}, &data); err != nil {
		b.t.Fatal(err)
	}
	return data.Result
}

// subject returns the name of an alert, and its object.
func subject(labels map[string]string) string {
	words := []string{labels["alertname"]}
	for _, l := range []string{"plane", "device", "session"} {
		if labels[l] != "" {
			words = append(words, labels[l])
		}
	}
	return strings.Join(words, " ")
}

// firing waits until exactly these alerts of the server fire, and checks their annotations. Those of ofLoad count only
// if they are wanted.
func (b *prometheusBed) firing(want ...string) {
	b.t.Helper()
	slices.Sort(want)
	began := time.Now()
	defer func() { b.t.Logf("firing %q after %v", want, time.Since(began).Round(100*time.Millisecond)) }()
	within(b.t, scenarioLimit, func() error {
		var data struct {
			Alerts []struct {
				Labels, Annotations map[string]string
				State               string
			}
		}
		if err := b.get("alerts", nil, &data); err != nil {
			return err
		}
		var got []string
		for _, a := range data.Alerts {
			if a.State != "firing" {
				continue
			}
			if name := subject(a.Labels); !slices.Contains(ofLoad, name) || slices.Contains(want, name) {
				got = append(got, name)
			}
			for name, text := range a.Annotations {
				if text == "" || strings.Contains(text, "<") || strings.Contains(text, "{{") || name == "summary" && !strings.HasPrefix(text, a.Labels["instance"]+": ") {
					b.t.Errorf("%s: %s is %q", subject(a.Labels), name, text)
				}
			}
		}
		if slices.Sort(got); !slices.Equal(got, want) {
			return fmt.Errorf("firing %q, want %q", got, want)
		}
		return nil
	})
}

// fired returns the alerts that have fired since the start, without those of ofLoad.
func (b *prometheusBed) fired() map[string]bool {
	b.t.Helper()
	ever := map[string]bool{}
	for _, s := range b.query(`count_over_time(ALERTS{alertstate="firing"}[1h])`) {
		if name := subject(s.Metric); !slices.Contains(ofLoad, name) {
			ever[name] = true
		}
	}
	return ever
}

// evaluated waits until the rules have been evaluated n more times.
func (b *prometheusBed) evaluated(n float64) {
	b.t.Helper()
	count := func() (sum float64) {
		text := scrape(b.t, prometheusAt, "text/plain", dialIn(b.nodes["server0"], prometheusAt))
		for _, m := range regexp.MustCompile(`(?m)^prometheus_rule_group_iterations_total\{.*;fared"\} (\d+)$`).FindAllStringSubmatch(text, -1) {
			v, err := strconv.ParseFloat(m[1], 64)
			if err != nil {
				b.t.Fatal(err)
			}
			sum += v
		}
		return sum
	}
	end := count() + n
	within(b.t, scenarioLimit, func() error {
		if have := count(); have < end {
			return fmt.Errorf("%v evaluations, want %v", have, end)
		}
		return nil
	})
}

// send sends packets to the second server from the source port of each slot, and returns the number of packets by the
// slots' planes.
func (b *prometheusBed) send(packets int) map[string]float64 {
	b.t.Helper()
	sent := map[string]float64{}
	text := b.fared("weights", "-o", "json")
	var weights struct {
		Destinations []struct {
			Pairs []struct {
				Slots []struct {
					Plane string
					Port  int `json:"source_port"`
				}
			}
		}
	}
	if err := json.Unmarshal([]byte(text), &weights); err != nil || len(weights.Destinations) != 1 || len(weights.Destinations[0].Pairs) != 1 {
		b.t.Fatalf("%v: want one pair in:\n%s", err, text)
	}
	err := b.nodes["server0"].Do(func() error {
		for _, slot := range weights.Destinations[0].Pairs[0].Slots {
			conn, err := net.DialUDP("udp4", &net.UDPAddr{IP: net.IPv4(10, 255, 0, 1), Port: slot.Port}, &net.UDPAddr{IP: net.IPv4(10, 255, 0, 2), Port: 4791})
			if err != nil {
				return err
			}
			for range packets {
				if _, err := conn.Write(make([]byte, 1000)); err != nil {
					conn.Close()
					return err
				}
			}
			conn.Close()
			sent[slot.Plane] += float64(packets)
		}
		return nil
	})
	if err != nil || len(sent) != 2 {
		b.t.Fatalf("%v: sent %v", err, sent)
	}
	return sent
}

func (b *prometheusBed) fared(args ...string) string {
	b.t.Helper()
	return must(b.t, append([]string{"--socket", filepath.Join(b.dir, "server0")}, args...)...)
}

// ready starts Prometheus, and waits until all sessions and their BFD are up and no alert has fired for the longest of
// durations.
func (b *prometheusBed) ready() {
	b.t.Helper()
	b.weights("1:1")
	b.prometheus()
	within(b.t, scenarioLimit, func() error {
		if up := b.query(`sum(fared_session_bfd_up{session=~"p./p.*"})`); len(up) != 1 || up[0].value() != 4 {
			return fmt.Errorf("sessions with BFD: %v, want 4", up)
		}
		return nil
	})
	b.evaluated(25)
	b.firing()
}

// weights waits until the server's weights are these, in effect.
func (b *prometheusBed) weights(want string) {
	b.t.Helper()
	within(b.t, scenarioLimit, func() error {
		o := fared(b.t, "--socket", filepath.Join(b.dir, "server0"), "weights")
		for line := range strings.Lines(o.Out) {
			if strings.HasPrefix(line, "10.255.0.2/32  "+want) && strings.HasSuffix(line, "in effect\n") {
				return nil
			}
		}
		return fmt.Errorf("no %q, but:\n%s%s", want, o.Out, o.Err)
	})
}
