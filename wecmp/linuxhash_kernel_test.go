//go:build linux

package wecmp

import (
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// namespace is a network namespace of the test, configured by ip(8).
type namespace struct {
	t    *testing.T
	name string
}

// newNamespace requires root, ip(8) and a kernel with a configurable seed (Linux 6.11). Without them the test is
// skipped with the reason; with FARED_REQUIRE_ALL=1 in the environment it fails.
func newNamespace(t *testing.T, name string) namespace {
	t.Helper()
	missing := func(format string, args ...any) {
		t.Helper()
		if os.Getenv("FARED_REQUIRE_ALL") == "1" {
			t.Fatalf(format, args...)
		}
		t.Skipf(format, args...)
	}
	n := namespace{t, fmt.Sprintf("fared-wecmp-%s-%d", name, os.Getpid())}
	if os.Geteuid() != 0 {
		missing("a network namespace needs root")
	}
	if out, err := exec.Command("ip", "netns", "add", n.name).CombinedOutput(); err != nil {
		missing("ip netns add: %v: %s", err, out)
	}
	t.Cleanup(func() {
		if out, err := exec.Command("ip", "netns", "del", n.name).CombinedOutput(); err != nil {
			t.Errorf("ip netns del: %v: %s", err, out)
		}
	})
	for _, set := range []string{"net.ipv4.fib_multipath_hash_policy=1", "net.ipv6.fib_multipath_hash_policy=1", "net.ipv4.fib_multipath_hash_seed=287454020"} {
		if out, err := exec.Command("ip", "netns", "exec", n.name, "sysctl", "-qw", set).CombinedOutput(); err != nil {
			missing("sysctl %s: %v: %s", set, err, out)
		}
	}
	return n
}

// batch runs commands of ip(8), one per line, and returns their output.
func (n namespace) batch(lines ...string) string {
	n.t.Helper()
	cmd := exec.Command("ip", "-n", n.name, "-o", "-batch", "-")
	cmd.Stdin = strings.NewReader(strings.Join(lines, "\n") + "\n")
	out, err := cmd.CombinedOutput()
	if err != nil {
		n.t.Fatalf("ip -batch: %v: %s", err, out)
	}
	return string(out)
}

var routeDevice = regexp.MustCompile(`dev d(\d+) `)

// protocols lists the protocols of queue pairs by their names in ip(8).
var protocols = []struct {
	name   string
	number uint8
}{{"udp", ProtocolUDP}, {"tcp", ProtocolTCP}}

// TestLinuxL4IsTheKernels queries a kernel, by RTM_GETROUTE, for the devices of hundreds of UDP and TCP flows in both
// families, over multipath routes and resilient nexthop groups, and compares each answer with LinuxL4.
func TestLinuxL4IsTheKernels(t *testing.T) {
	const devices = 5
	n := newNamespace(t, "hash")
	setup := []string{"link set lo up"}
	families := []struct{ source, destination, network, gateway string }{
		{"10.255.0.%d", "10.254.%d.%d", "10.254.%d.0/24", "10.1.%d.2"},
		{"fd00:255::%x", "fd00:254:%x::%x", "fd00:254:%x::/48", "fd01:%d::2"},
	}
	for d := range devices {
		setup = append(setup,
			fmt.Sprintf("link add d%d index %d type veth peer name e%d index %d", d, 100+d, d, 200+d),
			fmt.Sprintf("link set d%d up", d), fmt.Sprintf("link set e%d up", d),
			fmt.Sprintf("addr add 10.1.%d.1/24 dev d%d", d, d), fmt.Sprintf("addr add fd01:%d::1/64 dev d%d nodad", d, d),
			fmt.Sprintf("nexthop add id %d via 10.1.%d.2 dev d%d", 1+d, d, d), fmt.Sprintf("nexthop add id %d via fd01:%d::2 dev d%d", 101+d, d, d))
	}
	for s := 1; s <= 200; s += 50 {
		setup = append(setup, fmt.Sprintf("addr add 10.255.0.%d/32 dev lo", s), fmt.Sprintf("addr add fd00:255::%x/128 dev lo nodad", s))
	}
	type kind struct {
		members, buckets int
	}
	kinds := []kind{{2, 0}, {3, 0}, {5, 0}, {3, 64}, {5, 128}}
	for k, kind := range kinds {
		for f, family := range families {
			route := fmt.Sprintf("route add "+family.network, k+1)
			if kind.buckets == 0 {
				for d := range kind.members {
					route += fmt.Sprintf(" nexthop via "+family.gateway+" dev d%d", d, d)
				}
			} else {
				id, group := 1000+10*k+f, []string(nil)
				for d := range kind.members {
					group = append(group, strconv.Itoa(100*f+1+d))
				}
				setup = append(setup, fmt.Sprintf("nexthop add id %d group %s type resilient buckets %d idle_timer 0", id, strings.Join(group, "/"), kind.buckets))
				route += fmt.Sprintf(" nhid %d", id)
			}
			setup = append(setup, route)
		}
	}
	n.batch(setup...)

	for _, family := range families {
		for k, kind := range kinds {
			var lines []string
			var want []int
			hash := LinuxL4{Seed: 287454020, Buckets: kind.buckets}
			for i := range 300 {
				src := fmt.Sprintf(family.source, 1+i%4*50)
				dst := fmt.Sprintf(family.destination, k+1, 1+i%7*31)
				sport := MinPort + i*53
				if i%5 == 0 {
					sport = 1 + i // below the destination port: reverses the order of the ports
				}
				for _, protocol := range protocols {
					lines = append(lines, fmt.Sprintf("route get %s from %s ipproto %s sport %d dport %d", dst, src, protocol.name, sport, PortRoCE))
					h, ok := hash.Hash(netip.MustParseAddr(src), netip.MustParseAddr(dst), protocol.number, uint16(sport), PortRoCE)
					if !ok {
						t.Fatalf("no hash from %s to %s", src, dst)
					}
					want = append(want, hash.Member(h, kind.members))
				}
			}
			got := routeDevice.FindAllStringSubmatch(n.batch(lines...), -1)
			if len(got) != len(lines) {
				t.Fatalf("%d answers to %d questions", len(got), len(lines))
			}
			seen := map[int]bool{}
			for i := range got {
				device, _ := strconv.Atoi(got[i][1])
				seen[device] = true
				if device != want[i] {
					t.Fatalf("%+v: %s: device %d, computed %d", kind, lines[i], device, want[i])
				}
			}
			if len(seen) != kind.members {
				t.Errorf("%s, %+v: only devices %v were seen", family.network, kind, seen)
			}
		}
	}
}

// TestLastingPortsInTheKernel assigns a resilient group's buckets as described for fare.v1.FlowHash, and queries the
// kernel for the devices of the planner's ports.
func TestLastingPortsInTheKernel(t *testing.T) {
	const devices, buckets = 5, 128
	n := newNamespace(t, "lasting")
	setup := []string{"link set lo up", "addr add 10.255.0.1/32 dev lo", "addr add fd00:255::1/128 dev lo nodad"}
	var groups [2]string
	for d := range devices {
		setup = append(setup,
			fmt.Sprintf("link add d%d index %d type veth peer name e%d index %d", d, 100+d, d, 200+d),
			fmt.Sprintf("link set d%d up", d), fmt.Sprintf("link set e%d up", d),
			fmt.Sprintf("addr add 10.1.%d.1/24 dev d%d", d, d), fmt.Sprintf("addr add fd01:%d::1/64 dev d%d nodad", d, d),
			fmt.Sprintf("nexthop add id %d via 10.1.%d.2 dev d%d", 1+d, d, d), fmt.Sprintf("nexthop add id %d via fd01:%d::2 dev d%d", 101+d, d, d))
		run := roundDiv(uint64(d+1)*buckets, devices) - roundDiv(uint64(d)*buckets, devices)
		for f := range groups { // the last member gets the first run
			groups[f] = fmt.Sprintf("%d,%d/", 100*f+1+d, run) + groups[f]
		}
	}
	for f, destination := range []string{"10.254.0.0/16", "fd00:254::/32"} {
		setup = append(setup,
			fmt.Sprintf("nexthop add id %d group %s type resilient buckets %d idle_timer 0", 1000+f, strings.TrimSuffix(groups[f], "/"), buckets),
			fmt.Sprintf("route add %s nhid %d", destination, 1000+f))
	}
	n.batch(setup...)

	for _, protocol := range protocols {
		cfg := square(devices, 1)
		cfg.Slots, cfg.Protocol, cfg.Port = 40, protocol.number, 4444
		cfg.Hash = LinuxL4{Seed: 287454020, Buckets: buckets, Lasting: 3}
		p := mustPlanner(t, cfg)
		places := homePlaces(p)
		for _, pair := range [][2]string{{"10.255.0.1", "10.254.3.4"}, {"10.255.0.1", "10.254.200.1"}, {"fd00:255::1", "fd00:254::7"}} {
			ports, how := p.Ports(netip.MustParseAddr(pair[0]), netip.MustParseAddr(pair[1]), places, nil)
			if how.Method != MethodHash || how.Missed != 0 {
				t.Fatalf("%v, %d missed", how, how.Missed)
			}
			var lines []string
			for _, port := range ports {
				lines = append(lines, fmt.Sprintf("route get %s from %s ipproto %s sport %d dport 4444", pair[1], pair[0], protocol.name, port))
			}
			got := routeDevice.FindAllStringSubmatch(n.batch(lines...), -1)
			if len(got) != len(lines) {
				t.Fatalf("%d answers to %d questions", len(got), len(lines))
			}
			for s := range got {
				if device, _ := strconv.Atoi(got[s][1]); device != places[s].Plane {
					t.Errorf("slot %d of %s: %s port %d leaves over device %d, its sub-port is %d",
						s, pair[1], protocol.name, ports[s], device, places[s].Plane)
				}
			}
		}
	}
}
