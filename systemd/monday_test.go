package systemd

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// destination is a remote GPU behind the four leaves.
const destination = "10.255.1.1"

// Time limits of TestMonday, including docker exec on a busy machine. The log has the measured times. A lost carrier
// ends the session at once (docs/configuration.md, bgp.hold_time), and a leaf that ends closes its sessions. A returned
// plane waits for bgp.connect_retry (1s) and the leaf's routes; an undrained plane also waits for drain_delay (5s).
const (
	lossLimit   = 15 * time.Second
	returnLimit = 60 * time.Second
)

// leaves starts the four leaves of examples/server-8gpu.yaml, each in a network namespace with FRR, and cables with tbf
// at 400G to the ports in the example. examples/frr-leaf.conf is the leaf of plane p0; those of p1 and p2 have other
// numbers, and that of p3 is unnumbered. Each leaf announces the destination as a server's, without bandwidth, because
// FRR 8.4.4 of Debian corrupts values above 34 Gbit/s. So this test does not cover failures beyond the leaves.
func (m *machine) leaves() {
	m.t.Helper()
	example, err := os.ReadFile("../examples/frr-leaf.conf")
	if err != nil {
		m.t.Fatal(err)
	}
	m.run("mkdir -p /run/frr-leaves && chown frr:frr /run/frr-leaves")
	for plane := range 4 {
		leaf := fmt.Sprintf("leaf%d", plane)
		lines := []string{"ip netns add " + leaf, "ip -n " + leaf + " link set lo up", "ip -n " + leaf + " address add " + destination + "/32 dev lo",
			// Probes find no server at the destination, and are not counted.
			"ip -n " + leaf + " rule add pref 1 lookup local", "ip -n " + leaf + " rule delete pref 0", "ip -n " + leaf + " rule add pref 0 ipproto 17 dport 4796 blackhole"}
		var ports []string
		for half := range 2 {
			port, address := fmt.Sprintf("eth%d", 2*plane+half), fmt.Sprintf("10.%d.0.%d/31", plane, 2*half)
			ports = append(ports, port)
			lines = append(lines, "ip link add "+port+" type veth peer name "+port+" netns "+leaf,
				"tc qdisc add dev "+port+" root tbf rate 400gbit burst 1mb latency 10ms", "ip -n "+leaf+" link set "+port+" up")
			if plane < 3 {
				lines = append(lines, "ip -n "+leaf+" address add "+address+" dev "+port)
			}
		}
		m.run(strings.Join(lines, " && "))
		text := string(example)
		replace := func(old, new string) {
			m.t.Helper()
			if !strings.Contains(text, old) {
				m.t.Fatalf("examples/frr-leaf.conf lacks %q", old)
			}
			text = strings.ReplaceAll(text, old, new)
		}
		replace("4200100000", fmt.Sprint(4200100000+plane))
		replace("leaf-p0", fmt.Sprintf("leaf-p%d", plane))
		replace("router-id 10.1.0.1", fmt.Sprintf("router-id 10.1.0.%d", plane+1))
		replace("  maximum-paths 64\n", "  maximum-paths 64\n  network "+destination+"/32 route-map REMOTE\n")
		// Define the route-map before its use: with the delay timer at 0 FRR does not apply a route-map that follows.
		replace("router bgp", "route-map REMOTE permit 10\n set as-path prepend 4200000002\nexit\n!\nrouter bgp")
		if plane == 3 {
			for i, address := range []string{"10.0.0.1", "10.0.0.3"} {
				replace(" neighbor "+address+" remote-as 4200000001\n neighbor "+address+" peer-group SERVERS\n",
					" neighbor "+ports[i]+" interface peer-group SERVERS\n neighbor "+ports[i]+" remote-as 4200000001\n")
			}
			replace(" neighbor SERVERS ttl-security hops 1\n", " neighbor SERVERS capability extended-nexthop\n")
			replace("router bgp", "interface eth6\n no ipv6 nd suppress-ra\n ipv6 nd ra-interval 1\nexit\ninterface eth7\n no ipv6 nd suppress-ra\n ipv6 nd ra-interval 1\nexit\nrouter bgp")
		} else {
			replace("neighbor 10.0.0.", fmt.Sprintf("neighbor 10.%d.0.", plane))
		}
		m.write("/etc/frr/"+leaf+".conf", text)
		m.startLeaf(plane)
	}
}

// leafDaemons are FRR's daemons of a leaf.
var leafDaemons = []string{"zebra", "bfdd", "bgpd"}

// startLeaf starts the daemons of a leaf.
func (m *machine) startLeaf(plane int) {
	m.t.Helper()
	dir := fmt.Sprintf("/run/frr-leaves/%d", plane)
	m.run("install -d -o frr -g frr " + dir)
	for _, daemon := range leafDaemons {
		line := fmt.Sprintf("rm -f %[1]s/%[3]s.vty; ip netns exec leaf%[2]d /usr/lib/frr/%[3]s --daemon -u frr -g frr -f /etc/frr/leaf%[2]d.conf -i %[1]s/%[3]s.pid -z %[1]s/zserv --vty_socket %[1]s -A 127.0.0.1 -P 0",
			dir, plane, daemon)
		if daemon == "bfdd" {
			line += " $(/usr/lib/frr/bfdd --help | grep -q -- --bfdctl && echo --bfdctl " + dir + "/bfdd.sock)" // gone in FRR 10
		} else if daemon == "bgpd" {
			line += " --log file:" + dir + "/bgpd.log --log-level informational"
		}
		m.run(line)
		m.eventually(fmt.Sprintf("test -S %s/%s.vty", dir, daemon))
	}
}

// stopLeaf kills the daemons of a leaf.
func (m *machine) stopLeaf(plane int) {
	m.t.Helper()
	m.signalLeaf(plane, "KILL")
}

// signalLeaf sends a signal to the daemons of a leaf.
func (m *machine) signalLeaf(plane int, signal string) {
	m.t.Helper()
	line := "kill -" + signal
	for _, daemon := range leafDaemons {
		line += fmt.Sprintf(" $(cat /run/frr-leaves/%d/%s.pid)", plane, daemon)
	}
	m.run(line)
}

// spread returns each device's part of the buckets of the destination's nexthop group, as the kernel reports them.
func (m *machine) spread() (map[string]float64, error) {
	ask := func(line string, into any) error {
		out, err := m.try("ip -j " + line)
		if err == nil && out != "" {
			err = json.Unmarshal([]byte(out), into)
		}
		if err != nil {
			return fmt.Errorf("ip -j %s: %w: %.300s", line, err, out)
		}
		return nil
	}
	var routes []struct{ NHID int }
	var nexthops []struct {
		ID  int
		Dev string
	}
	var buckets []struct{ Bucket struct{ NHID int } }
	if err := ask("route show "+destination, &routes); err != nil {
		return nil, err
	}
	if len(routes) != 1 || routes[0].NHID == 0 {
		return nil, fmt.Errorf("%s has %d routes: %v", destination, len(routes), routes)
	}
	if err := ask("nexthop show", &nexthops); err != nil {
		return nil, err
	}
	if err := ask(fmt.Sprintf("nexthop bucket show id %d", routes[0].NHID), &buckets); err != nil {
		return nil, err
	}
	devices := map[int]string{}
	for _, n := range nexthops {
		devices[n.ID] = n.Dev
	}
	parts := map[string]float64{}
	for _, b := range buckets {
		parts[devices[b.Bucket.NHID]] += 1 / float64(len(buckets))
	}
	return parts, nil
}

// forwards waits until the kernel spreads packets over exactly these ports, each within 1 % of an equal part. All ports
// are 400G, so that is also each plane's part by bandwidth.
func (m *machine) forwards(step string, limit time.Duration, ports ...int) {
	m.t.Helper()
	want := map[string]bool{}
	for _, p := range ports {
		want[fmt.Sprintf("eth%d", p)] = true
	}
	begin := time.Now()
	netnstest.Eventually(m.t, patience(time.Minute), func() error {
		parts, err := m.spread()
		if err != nil {
			return err
		}
		for device, part := range parts {
			if share := 1 / float64(len(want)); !want[device] || part < share*0.99 || part > share*1.01 {
				return fmt.Errorf("%s: the kernel has %v, want equal parts on %v", step, parts, slices.Sorted(maps.Keys(want)))
			}
		}
		if len(parts) != len(want) {
			return fmt.Errorf("%s: the kernel has %v, want equal parts on %v", step, parts, slices.Sorted(maps.Keys(want)))
		}
		return nil
	})
	took := time.Since(begin)
	m.t.Logf("%s: %v", step, took.Round(10*time.Millisecond))
	if limit = patience(limit); took > limit {
		m.t.Errorf("%s: the kernel's weights took %v, the limit is %v", step, took, limit)
	}
	// fared shows the kernel's state: weights in effect, and half a port counts half.
	planes := make([]int, 4)
	for _, p := range ports {
		planes[p/2]++
	}
	whole := true
	for _, n := range planes {
		whole = whole && (n == 0 || n == 2)
	}
	for i := range planes {
		if whole {
			planes[i] /= 2
		}
	}
	shown := strings.Trim(strings.ReplaceAll(fmt.Sprint(planes), " ", ":"), "[]")
	m.eventually(fmt.Sprintf(`fared weights | grep -E '^%s/32 +%s .* in effect$'`, destination, shown))
}

// allPorts are the sub-ports of examples/server-8gpu.yaml.
var allPorts = []string{"eth0", "eth1", "eth2", "eth3", "eth4", "eth5", "eth6", "eth7"}

// losses runs fn and samples the kernel's nexthops meanwhile. It returns the number of samples, and the time and the
// fullest group of those in which no group has all ports.
func (m *machine) losses(fn func()) (samples int, lost []string) {
	m.t.Helper()
	m.run("systemd-run --quiet --unit samples --collect sh -c 'while date +%T.%N && ip -j nexthop show; do :; done >/run/samples'")
	m.eventually("test -s /run/samples")
	fn()
	m.run("systemctl stop samples")
	var at string
	for line := range strings.Lines(m.run("cat /run/samples")) {
		if !strings.HasPrefix(line, "[") {
			at = strings.TrimSpace(line)
			continue
		}
		fullest, whole := fullestGroup(line)
		if !whole {
			continue
		}
		samples++
		if len(fullest) < len(allPorts) {
			lost = append(lost, fmt.Sprintf("%s %v", at, fullest))
		}
	}
	return samples, lost
}

// fullestGroup returns those of allPorts that the group with the most of them has, by a line of ip -j nexthop show.
// whole is false for a line that is cut short, or if a group was replaced between the parts of the kernel's answer.
func fullestGroup(line string) (fullest []string, whole bool) {
	var nexthops []struct {
		ID    int
		Dev   string
		Group []struct{ ID int }
	}
	if json.Unmarshal([]byte(line), &nexthops) != nil {
		return nil, false
	}
	devices := map[int]string{}
	for _, n := range nexthops {
		devices[n.ID] = n.Dev
	}
	for _, n := range nexthops {
		var ports []string
		for _, member := range n.Group {
			device := devices[member.ID]
			if device == "" {
				return nil, false
			}
			if slices.Contains(allPorts, device) && !slices.Contains(ports, device) {
				ports = append(ports, device)
			}
		}
		if len(ports) > len(fullest) {
			fullest = ports
		}
	}
	return fullest, true
}

// leafCloses is the line in a leaf's log of a session that it has closed because of BFD: the neighbor is a device, or
// the address of the server on it.
var leafCloses = regexp.MustCompile(`%ADJCHANGE: neighbor (?:eth([0-7])|10\.([0-2])\.0\.([13]))\b.* Down BFD down received`)

// closedPorts returns the ports whose sessions the leaves have closed because of BFD, by the logs of their bgpd.
func (m *machine) closedPorts() (ports []string) {
	m.t.Helper()
	for _, line := range leafCloses.FindAllStringSubmatch(m.run("cat /run/frr-leaves/*/bgpd.log"), -1) {
		port := "eth" + line[1]
		if line[1] == "" {
			plane, _ := strconv.Atoi(line[2])
			host, _ := strconv.Atoi(line[3])
			port = fmt.Sprintf("eth%d", 2*plane+host/2)
		}
		ports = append(ports, port)
	}
	return ports
}

// keeps runs fn and fails if a port is unused meanwhile, except one whose leaf has closed its session: FRR 8.4.4, whose
// bgpd hears of the end of the BFD session before a restart only when the new BGP session is up, closes that, on an
// emulated processor.
func (m *machine) keeps(step string, fn func()) {
	m.t.Helper()
	begin := strings.TrimSpace(m.run("truncate --size 0 /run/frr-leaves/*/bgpd.log && date '+%F %T'"))
	samples, lost := m.losses(fn)
	closed := m.closedPorts()
	m.t.Logf("%s: %d samples of the kernel's nexthops, leaves closed the sessions of %v", step, samples, closed)
	if samples == 0 {
		m.t.Errorf("%s: no sample", step)
	}
	lost = slices.DeleteFunc(lost, func(sample string) bool {
		return !slices.ContainsFunc(allPorts, func(port string) bool { return !strings.Contains(sample, port) && !slices.Contains(closed, port) })
	})
	if len(lost) > 0 {
		log := m.run(fmt.Sprintf("cat /run/frr-leaves/*/bgpd.log; journalctl --no-pager --output short-precise --since '%s' --unit 'fared*' | grep -v DEBUG", begin))
		m.t.Errorf("%s: of %d samples %d lack a port:\n%s\n%s", step, samples, len(lost), strings.Join(lost, "\n"), log)
	}
}

// TestMonday is the first day of a new user: the example, installed by docs/operations/install.md, "Steps without a
// package", behind FRR leaves at 400G. Each failure and each maintenance step leads to the right weights in the kernel,
// without manual intervention.
func TestMonday(t *testing.T) {
	if inVM == "" {
		gate.Slow(t, gate.Systemd, "a day of a server: failures, restarts, kills")
	}
	m := boot(t)
	all := []int{0, 1, 2, 3, 4, 5, 6, 7}
	example, err := os.ReadFile("../examples/server-8gpu.yaml")
	if err != nil {
		t.Fatal(err)
	}
	m.run("systemctl stop frr && ip link delete p0.0") // Debian's unit is for one instance, in the server's namespace
	m.leaves()
	m.write("/etc/fared/fared.yaml", string(example))
	m.netsetup("/etc/fared/fared.yaml")
	m.run("fared check && systemctl enable --now fared-dataplane fared")
	m.forwards("start", time.Minute, all...)

	cut := func(port int, state string) {
		m.run(fmt.Sprintf("ip -n leaf%d link set eth%d %s", port/2, port, state))
	}
	if _, lost := m.losses(func() {
		cut(1, "down")
		m.forwards("half a cable fails", lossLimit, 0, 2, 3, 4, 5, 6, 7)
	}); len(lost) == 0 {
		t.Error("no sample lacks the port that failed, so whole samples below show nothing")
	}
	cut(0, "down")
	m.forwards("the whole port fails", lossLimit, 2, 3, 4, 5, 6, 7)
	cut(0, "up")
	cut(1, "up")
	m.forwards("the port returns", returnLimit, all...)
	m.stopLeaf(2)
	m.forwards("a leaf fails", lossLimit, 0, 1, 2, 3, 6, 7)
	m.startLeaf(2)
	m.forwards("the leaf returns", returnLimit, all...)
	m.eventually("fared sessions | grep -c 'up 900ms' | grep -x 8") // BFD, with its defaults
	m.signalLeaf(2, "STOP")
	m.forwards("a leaf hangs", lossLimit, 0, 1, 2, 3, 6, 7)
	if out := m.run("journalctl --unit fared --output cat | grep -c 'msg=session-down .*BFD down: the peer was silent'"); out != "2" {
		t.Errorf("BFD noticed the silence of %s sessions, want 2", out)
	}
	m.signalLeaf(2, "CONT")
	m.forwards("it continues", returnLimit, all...)

	m.keeps("a restart of fared", func() {
		m.run("systemctl restart fared")
		m.forwards("restart", time.Minute, all...)
		m.eventually("fared status | grep -i 'converged' && fared sessions -o json | grep -c '\"established\"' | grep -x 8")
	})
	m.keeps("a reload", func() {
		m.write("/etc/fared/fared.yaml", strings.Replace(string(example), "level: info", "level: debug", 1))
		m.run("systemctl reload fared")
	})
	m.forwards("reload", lossLimit, all...)

	m.run("fared drain plane p1 --wait")
	m.forwards("drain", lossLimit, 0, 1, 4, 5, 6, 7)
	m.run("fared undrain plane p1 --wait")
	m.forwards("undrain", returnLimit, all...)

	begin := time.Now()
	m.keeps("a process killed six times", func() {
		for i := range 6 {
			unit := []string{"fared", "fared-dataplane"}[i%2]
			pid := m.show(unit, "MainPID")
			m.run("kill -9 " + pid)
			m.eventually(fmt.Sprintf(`p=$(systemctl show --value --property MainPID %s); test "$p" != 0 -a "$p" != %s`, unit, pid))
		}
		t.Logf("six kills in %v", time.Since(begin).Round(time.Millisecond))
		m.eventually("systemctl is-active fared fared-dataplane")
		m.forwards("after six kills", time.Minute, all...)
	})
	cut(4, "down")
	m.forwards("half a cable fails after six kills", lossLimit, 0, 1, 2, 3, 5, 6, 7)
	cut(4, "up")
	m.forwards("the cable returns", returnLimit, all...)

	m.fails("fared dataplane --flush") // refused while the agent runs
	m.run("systemctl stop fared fared-dataplane && fared dataplane --flush")
	if out := m.run("ip nexthop show protocol 179; ip route show proto 179; ip -6 route show proto 179"); out != "" {
		t.Errorf("a flush leaves behind:\n%s", out)
	}
	m.run("systemctl start fared")
	m.forwards("start after a flush", time.Minute, all...)
	if out := m.run("systemctl list-units --failed --plain --no-legend 'fared*'"); out != "" {
		t.Errorf("failed units at the end of the day:\n%s", out)
	}
}
