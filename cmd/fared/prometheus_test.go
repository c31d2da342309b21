package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/internal/testkit/binary"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// quietTime is the environment variable with the duration of TestPrometheusQuiet, 10s by default.
const quietTime = "FARED_PROMETHEUS_QUIET"

// TestPrometheusQuiet checks that no alert fires while nothing happens but traffic.
func TestPrometheusQuiet(t *testing.T) {
	gate.Slow(t, gate.Prometheus, "a daemon in steady state for minutes")
	quiet := 10 * time.Second
	if text := os.Getenv(quietTime); text != "" {
		var err error
		if quiet, err = time.ParseDuration(text); err != nil {
			t.Fatalf("%s: %v", quietTime, err)
		}
	}
	b := newPrometheusBed(t, "")
	b.targets = []string{"192.0.2.1:9469"}
	b.ready()
	for end := time.Now().Add(quiet); time.Now().Before(end); {
		b.send(10)
		b.evaluated(5)
	}
	if fired := b.fired(); len(fired) > 0 {
		t.Errorf("alerts that fired: %q", slices.Sorted(maps.Keys(fired)))
	}
}

// TestPrometheus runs Prometheus with fared's rules next to real daemons, over failures and maintenance: each failure
// fires its alert alone, which ends with it; nothing fires otherwise; and each query of the dashboard returns data.
func TestPrometheus(t *testing.T) {
	gate.Slow(t, gate.Prometheus, "alerts of failures, after their waiting times")
	b := newPrometheusBed(t, "")
	b.targets = []string{"192.0.2.1:9469"}
	b.ready()
	b.fared("drain", "sub-port", "p1b") // operations, whose times the dashboard shows
	b.weights("2:1")
	b.fared("undrain", "sub-port", "p1b")
	b.weights("1:1")
	t.Run("dashboard", func(t *testing.T) { b.dashboard(t) })

	// A leaf fails, and returns with a wrong AS for one session.
	leaf, err := os.ReadFile(filepath.Join(b.dir, "leaf1.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	b.runs["leaf1"].Kill()
	b.firing("FaredPlaneDown p1")
	good := fmt.Sprintf("peer: 192.0.2.%d, local: 192.0.2.%d, peer_as: 65100", 2*cable{0, 1, 1}.n(), 2*cable{0, 1, 1}.n()+1)
	bad := strings.Replace(string(leaf), good, strings.Replace(good, "65100", "65199", 1), 1)
	if bad == string(leaf) {
		t.Fatalf("no session %q in:\n%s", good, leaf)
	}
	b.write("leaf1.yaml", bad)
	b.start("leaf1")
	b.firing("FaredSessionDown p1 p1b p1/p1b")
	b.runs["leaf1"].Kill()
	b.write("leaf1.yaml", string(leaf))
	b.start("leaf1")
	b.firing()

	// A cable fails; maintenance of its sub-port ends the alert.
	b.nodes["leaf1"].IP("link", "set", cable{0, 1, 1}.leafPort(), "down")
	b.firing("FaredPlaneDegraded p1 p1b")
	b.fared("drain", "sub-port", "p1b")
	b.firing()
	b.fared("undrain", "sub-port", "p1b")
	b.firing("FaredPlaneDegraded p1 p1b")
	b.nodes["leaf1"].IP("link", "set", cable{0, 1, 1}.leafPort(), "up")
	b.firing()

	// A drained leaf fails without an alert, until the end of the drain.
	b.weights("1:1")
	b.fared("drain", "leaf", "10.254.0.2", "--wait", "--timeout", scenarioLimit.String())
	b.runs["leaf1"].Kill()
	within(t, scenarioLimit, func() error {
		if up := b.query(`sum(fared_session_up{plane="p1"})`); len(up) != 1 || up[0].value() != 0 {
			return fmt.Errorf("sessions of p1: %v", up)
		}
		return nil
	})
	b.evaluated(25) // 5 s, where each of the alerts has 2 s or 4 s
	b.firing()
	b.fared("undrain", "leaf", "10.254.0.2")
	b.firing("FaredPlaneDown p1")
	b.start("leaf1")
	b.firing()

	// The agent fails, and the daemon.
	b.weights("1:1")
	b.runs["agent"].Kill()
	b.firing("FaredDataplaneDisconnected")
	b.start("agent")
	b.firing()
	b.runs["server0"].Kill()
	b.firing("FaredDown")
	b.start("server0")
	b.firing()

	// Over the whole test no other alert has fired. Between the starts of a leaf's sessions more than 4 s may pass on a
	// busy machine.
	ever := b.fired()
	delete(ever, "FaredSessionDown p1 p1a p1/p1a")
	want := []string{"FaredDataplaneDisconnected", "FaredDown", "FaredPlaneDegraded p1 p1b", "FaredPlaneDown p1", "FaredSessionDown p1 p1b p1/p1b"}
	if got := slices.Sorted(maps.Keys(ever)); !slices.Equal(got, want) {
		t.Errorf("alerts that fired: %q, want %q", got, want)
	}
}

// TestPrometheusFaults runs Prometheus with fared's rules next to real daemons with faults that leave every link and
// session up: each fires its alert, which ends with it.
func TestPrometheusFaults(t *testing.T) {
	gate.Slow(t, gate.Prometheus, "each fault and its alert")
	b := newPrometheusBed(t, "")
	b.targets = []string{"192.0.2.1:9469"}
	b.ready()
	// inTheWay puts a folder in the place of a file that the daemon writes.
	inTheWay := func(file string) (remove func()) {
		t.Helper()
		path := filepath.Join(b.dir, file)
		if err := os.RemoveAll(path); err != nil {
			t.Fatal(err)
		}
		if err := os.MkdirAll(filepath.Join(path, "folder"), 0o755); err != nil {
			t.Fatal(err)
		}
		return func() {
			if err := os.RemoveAll(path); err != nil {
				t.Fatal(err)
			}
		}
	}

	// A node goes from one fault to the next without a start in between: more than three fire FaredSessionFlaps.
	original := map[string]string{}
	for _, c := range []struct {
		node, old, new string
		want           []string
	}{
		{"leaf1", "bfd: {interval: 1s, multiplier: 60}\n", "bfd: {interval: 0s}\n", []string{"FaredBFDDown p1/p1a", "FaredBFDDown p1/p1b"}},
		{"leaf1", "peer_as: 65100, passive: true", "peer_as: 65100, passive: true, bandwidth: remove", []string{"FaredBandwidthIgnored p1 p1/p1a", "FaredBandwidthIgnored p1 p1/p1b"}},
		{"leaf1", "", "", nil},
		{"server1", "loopbacks: [10.255.0.2/32]", "loopbacks: [10.255.0.2/32, 10.255.0.1/32]", []string{"FaredOriginConflict"}}, // at the leaf, which passes on one of the routes
		{"server1", "", "", nil},
		{"server0", "peer_as: 65201}", "peer_as: 65201, accept: [10.255.0.9/32]}", []string{"FaredRoutesDropped p1 p1/p1a", "FaredRoutesDropped p1 p1/p1b"}},
		{"server0", "", "", nil},
	} {
		text := original[c.node]
		if text == "" {
			read, err := os.ReadFile(filepath.Join(b.dir, c.node+".yaml"))
			if err != nil {
				t.Fatal(err)
			}
			text = string(read)
			original[c.node] = text
		}
		if c.old != "" && !strings.Contains(text, c.old) {
			t.Fatalf("no %q in:\n%s", c.old, text)
		}
		b.runs[c.node].Kill()
		b.write(c.node+".yaml", strings.ReplaceAll(text, c.old, c.new))
		b.start(c.node)
		b.firing(c.want...)
	}

	b.weights("1:1")
	b.fared("drain", "plane", "p0")
	b.fared("drain", "plane", "p1", "--force")
	b.firing("FaredDestinationsUnreachable")
	b.fared("undrain", "plane", "p0")
	b.fared("undrain", "plane", "p1")
	b.firing()

	remove := inTheWay("server0.drains")
	if o := fared(t, "--socket", filepath.Join(b.dir, "server0"), "drain", "sub-port", "p1b"); o.Code != cli.ExitFailed || !strings.Contains(o.Err, "a restart would forget changes of drains") {
		t.Fatalf("exit code %d: %s%s", o.Code, o.Out, o.Err)
	}
	b.firing("FaredDrainsUnsaved")
	remove()
	b.fared("undrain", "sub-port", "p1b")
	b.firing()

	remove = inTheWay("server0.slots")
	b.firing("FaredSlotTableNotPublished")
	remove()
	b.firing()
}

// TestPrometheusPackets runs Prometheus with fared's rules next to a daemon whose packets a leaf does not forward,
// while every link and session is up.
func TestPrometheusPackets(t *testing.T) {
	gate.Slow(t, gate.Prometheus, "a second agent, whose probes pass the leaves")
	b := newPrometheusBed(t, "")
	netnstest.Tools(t, "nft")
	b.forward()
	b.ready()
	within(t, scenarioLimit, func() error {
		if proved := b.query(`fared_proof_probes_total{result="answered"} > 0`); len(proved) != 2 {
			return fmt.Errorf("planes with answered probes: %v, want 2", proved)
		}
		return nil
	})
	b.firing()
	b.nodes["leaf1"].Run("nft", "add table ip eats; add chain ip eats f { type filter hook forward priority 0; }; add rule ip eats f ip protocol udp drop")
	b.firing("FaredPacketsWrong p1 p1a", "FaredPacketsWrong p1 p1b")
	b.nodes["leaf1"].Run("nft", "delete table ip eats")
	b.firing()
}

// TestPrometheusFleet runs Prometheus with fared's rules next to a worker of a fleet, to which one of two servers
// reports: without an engine of drains, with it, while a leaf is lost, with a drain that the server cannot carry out,
// and after the end of the worker.
func TestPrometheusFleet(t *testing.T) {
	gate.Slow(t, gate.Prometheus, "alerts of a fleet")
	netnstest.Tools(t, "etcd")
	b := newPrometheusBed(t, "")
	b.fleet = "127.0.0.1:9473"
	lab, server := binary.Lab(t), b.nodes["server0"]
	const etcd = "http://127.0.0.1:2379"
	b.runs["worker"] = server.Start(t, lab, "fleet", "worker", "--planes", "2", "--servers", "2", "--keep-planes", "0", "--metrics-listen", b.fleet, "--etcd", etcd)
	b.weights("1:1")
	b.prometheus()
	const missing = "FaredFleetMissing" // server2
	b.firing("FaredFleetEngineDown", missing)
	server.Start(t, "etcd", "--data-dir", filepath.Join(b.dir, "etcd"), "--listen-client-urls", etcd, "--advertise-client-urls", etcd, "--listen-peer-urls", "http://127.0.0.1:2380")
	server.Start(t, "env", b.command("report", "--socket", filepath.Join(b.dir, "server0"), "--worker", "127.0.0.1:4798")...)
	b.firing(missing)
	b.runs["leaf1"].Kill()
	b.firing("FaredFleetFault", missing, "FaredPlaneDown p1") // no server has a route to server2 in p1
	b.start("leaf1")
	b.firing(missing)
	server.Run(lab, "fleet", "drain", "server1/p0") // whose sub-ports have other names here
	b.firing("FaredFleetDrainOverdue", missing)
	server.Run(lab, "fleet", "undrain", "server1/p0")
	b.firing(missing)
	b.runs["worker"].Kill()
	b.firing("FaredFleetDown")
}

// dashboard checks that each query of the dashboard returns data, and that the counters of the sub-ports are those of
// the packets sent.
func (b *prometheusBed) dashboard(t *testing.T) {
	var board struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
	}
	text, err := os.ReadFile("../../monitoring/fared.dashboard.json")
	if err == nil {
		err = json.Unmarshal(text, &board)
	}
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, p := range board.Panels {
		for _, q := range p.Targets {
			n++
			expr := strings.NewReplacer("$__rate_interval", "30s", "$instance", ".*").Replace(q.Expr)
			within(t, scenarioLimit, func() error {
				// Counters of packets grow in the interval of rates.
				b.send(1)
				result := b.query(expr)
				for _, s := range result {
					if v := s.value(); math.IsNaN(v) || math.IsInf(v, 0) {
						return fmt.Errorf("%s: %s returns %v", p.Title, expr, s)
					}
				}
				if len(result) == 0 {
					return fmt.Errorf("%s: %s returns nothing", p.Title, expr)
				}
				return nil
			})
		}
	}
	if n < 20 {
		t.Errorf("%d queries", n)
	}

	counted := func(metric string) map[string]float64 {
		out := map[string]float64{}
		for _, s := range b.query(`sum by (plane) (` + metric + `)`) {
			out[s.Metric["plane"]] = s.value()
		}
		return out
	}
	const packets, length = "fared_agent_steering_sent_packets_total", 1000 + 8 + 20 + 14 // UDP, IPv4, Ethernet
	b.evaluated(5)
	before, bytes := counted(packets), counted("fared_agent_steering_sent_bytes_total")
	sent := b.send(1000)
	within(t, scenarioLimit, func() error {
		now, nowBytes := counted(packets), counted("fared_agent_steering_sent_bytes_total")
		for plane, n := range sent {
			if now[plane]-before[plane] != n || nowBytes[plane]-bytes[plane] != n*length {
				return fmt.Errorf("plane %s: %v packets and %v bytes counted, %v sent", plane, now[plane]-before[plane], nowBytes[plane]-bytes[plane], n)
			}
		}
		return nil
	})
}

// TestPrometheusFlaps runs Prometheus with fared's rules next to real daemons with a flapping link, a false origin and
// an incomplete start: each fires its alert, which ends with it.
func TestPrometheusFlaps(t *testing.T) {
	gate.Slow(t, gate.Prometheus, "alerts of flaps")
	b := newPrometheusBed(t, "")
	b.ready()
	// change restarts a node with another text in its configuration, and returns the original.
	change := func(node, old, new string) (restore func()) {
		t.Helper()
		path := filepath.Join(b.dir, node+".yaml")
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(text), old) {
			t.Fatalf("no %q in:\n%s", old, text)
		}
		with := func(text string) {
			b.runs[node].Kill()
			b.write(node+".yaml", text)
			b.start(node)
		}
		with(strings.ReplaceAll(string(text), old, new))
		return func() { with(string(text)) }
	}

	// A leaf fails while the daemon starts again, which waits for it until the deadline of the start.
	b.runs["server0"].Kill() // first, so that its data plane still has the plane
	b.runs["leaf1"].Kill()
	restore := change("server0", "role: server\n", "role: server\nstart: {deadline: 20s}\n")
	b.firing("FaredNotConverged", "FaredPlaneDown p1")
	b.firing("FaredPlaneDown p1")
	restore()
	b.start("leaf1")
	b.firing()

	// Another server announces the loopback of this one, and the leaves prefer the lower BGP identifier.
	restore = change("server1", "router_id: 10.255.0.2\nas: 65101\nloopbacks: [10.255.0.2/32]", "router_id: 10.0.0.1\nas: 65101\nloopbacks: [10.255.0.2/32, 10.255.0.1/32]")
	b.firing("FaredLoopbackClaimed")
	restore()
	b.firing()

	// A link flaps: each failure ends the session, and from the fourth on the link's return is held.
	b.weights("1:1")
	port := cable{0, 1, 1}.leafPort()
	for range 6 {
		b.nodes["leaf1"].IP("link", "set", port, "down")
		b.weights("2:1")
		b.nodes["leaf1"].IP("link", "set", port, "up")
		b.weights("1:1")
	}
	b.firing("FaredLinkDamped p1 p1b", "FaredSessionFlaps p1/p1b")
	b.firing()
}

// smallDisk mounts a file system of some bytes. fill uses all its room, and free returns it.
func smallDisk(t *testing.T, path string, bytes int) (_ string, fill func() (free func())) {
	t.Helper()
	if err := os.Mkdir(path, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", path, "tmpfs", 0, fmt.Sprintf("size=%d", bytes)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(path, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return path, func() func() {
		other := filepath.Join(path, "other")
		if err := os.WriteFile(other, make([]byte, 2*bytes), 0o644); !errors.Is(err, unix.ENOSPC) {
			t.Fatalf("the file system has room: %v", err)
		}
		return func() {
			if err := os.Remove(other); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// TestPrometheusAgent runs Prometheus with fared's rules next to real daemons with an agent that refuses, hangs, cannot
// write, is interfered with, or drops packets: each fires its alert, which ends with it.
func TestPrometheusAgent(t *testing.T) {
	gate.Slow(t, gate.Prometheus, "alerts of the agent")
	b := newPrometheusBed(t, "")
	disk, fill := smallDisk(t, filepath.Join(b.dir, "disk"), 64<<10)
	// again starts the agent again with flags.
	again := func(flags ...string) {
		b.runs["agent"].Stop()
		b.agentFlags = append([]string{"--journal", filepath.Join(disk, "journal")}, flags...)
		b.start("agent")
	}
	again()
	b.ready()

	// Another program keeps the kernel's lock of network configuration while the agent changes weights.
	b.slowKernel(time.Second, func() { b.fared("drain", "sub-port", "p1b") })
	b.firing("FaredKernelSlow")
	within(t, scenarioLimit, func() error { // firing does not require an alert of load to end
		if fired := b.query(`ALERTS{alertname="FaredKernelSlow",alertstate="firing"}`); len(fired) > 0 {
			return fmt.Errorf("FaredKernelSlow fires: %v", fired)
		}
		return nil
	})
	b.fared("undrain", "sub-port", "p1b")
	b.weights("1:1")

	// The agent's policy does not permit the destination.
	again("--allow-prefix", "10.255.1.0/24")
	b.firing("FaredDataplaneRefuses")
	again()
	b.firing()
	b.weights("1:1")

	// The agent's file system is full.
	free := fill()
	for range 100 { // the journal's last page has room for some records
		if len(b.query(`fared_agent_journal_behind == 1`)) > 0 {
			break
		}
		b.fared("drain", "sub-port", "p1b")
		b.weights("2:1")
		b.fared("undrain", "sub-port", "p1b")
		b.weights("1:1")
	}
	b.firing("FaredAgentJournalBehind")
	free()
	b.firing()
	b.weights("1:1")

	// Another program removes the rules that lead to the agent's table.
	for _, rule := range strings.Split(strings.TrimSpace(b.nodes["server0"].IP("rule", "show", "table", "179")), "\n") {
		b.nodes["server0"].IP(append([]string{"rule", "delete"}, strings.Fields(rule[strings.Index(rule, ":")+1:])...)...)
	}
	b.firing("FaredAgentRepairs")
	b.firing()

	// Another program makes the reverse path filter of a sub-port strict.
	filter := []string{"sysctl", "-w", "net.ipv4.conf.p1a.rp_filter=1"}
	for _, alerts := range [][]string{{"FaredDataplaneLimited"}, {}} {
		if out, err := b.nodes["server0"].Output(filter[0], filter[1:]...); err != nil {
			t.Fatalf("%q: %v: %s", filter, err, out)
		}
		b.firing(alerts...)
		filter[2] = "net.ipv4.conf.p1a.rp_filter=0"
	}

	// Another program puts a device of its own in the place of the agent's, faster than the agent can restore it.
	if err := b.runs["agent"].Signal(unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	b.nodes["server0"].IP("link", "delete", "fared0")
	b.nodes["server0"].IP("link", "add", "fared0", "type", "bridge")
	if err := b.runs["agent"].Signal(unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	b.firing("FaredAgentBroken", "FaredDataplaneDamaged")
	b.nodes["server0"].IP("link", "delete", "fared0")
	b.firing()
	b.weights("1:1")

	// A program sends to an address of no server, which another program has routed to the agent's device.
	b.nodes["server0"].IP("route", "add", "10.255.0.77/32", "dev", "fared0")
	stop, stopped := make(chan struct{}), make(chan error, 1)
	if err := b.nodes["server0"].Do(func() error {
		conn, err := net.DialUDP("udp4", &net.UDPAddr{IP: net.IPv4(10, 255, 0, 1)}, &net.UDPAddr{IP: net.IPv4(10, 255, 0, 77), Port: 4791})
		if err != nil {
			return err
		}
		go func() {
			defer conn.Close()
			for {
				select {
				case <-stop:
					stopped <- nil
					return
				case <-time.After(20 * time.Millisecond):
					_, _ = conn.Write(make([]byte, 100)) // refused where the kernel reports the previous one's loss
				}
			}
		}()
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	b.firing("FaredSteeringDrops")
	close(stop)
	<-stopped
	b.firing()

	// The agent hangs.
	b.weights("1:1")
	if err := b.runs["agent"].Signal(unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	b.fared("drain", "sub-port", "p1b")
	b.firing("FaredDataplaneStalled")
	if err := b.runs["agent"].Signal(unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	b.firing()
	b.fared("undrain", "sub-port", "p1b")
	b.weights("1:1")
}
