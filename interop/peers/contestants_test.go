package peers

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/fared/fared/internal/testkit/binary"
	"github.com/fared/fared/internal/testkit/testbed"
)

// contestant is a router that can be the server of a bed.
type contestant interface {
	name() string
	version() string
	tools() []string
	start(*bed)
	// inKernel reports whether the weights are in the kernel's routes and nexthops. If not, packets show them.
	inKernel() bool
}

// contestants take part unless others are chosen. GoBGP does not: gobgpd writes no routes itself, its client of zebra
// (gobgpd 3.10) does not work with FRR 8.4, and newer versions give zebra no weights (pkg/server/zclient.go).
var contestants = []contestant{frr{}, bird{}, fared{driver: "linux"}, fared{driver: "bpf"}, fared{driver: "linux", inside: true}}

// newer take part if they are chosen: FRR 10.3 and BIRD 3 of Debian 13.
var newer = []contestant{frr{testbed.Unpacked("trixie", "frr")}, bird{testbed.Unpacked("trixie", "bird3")}}

// output returns the first line that a program prints.
func output(name string, args ...string) string {
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		return err.Error()
	}
	line, _, _ := strings.Cut(string(out), "\n")
	return strings.TrimSpace(line)
}

// bird is BIRD 2, or BIRD 3 below root: its filter gives a route the weight of its community, and the kernel protocol
// merges the routes of the planes.
type bird struct{ root string }

func (d bird) name() string {
	if d.root != "" {
		return "bird3"
	}
	return "bird"
}
func (d bird) program() []string { return testbed.Program(d.root, "/usr/sbin/bird") }
func (d bird) version() string {
	return output(d.program()[0], append(d.program()[1:], "--version")...)
}
func (bird) inKernel() bool    { return true }
func (d bird) tools() []string { return []string{d.program()[len(d.program())-1]} }

func (d bird) start(b *bed) { b.startBIRD(d, true) }

// startBIRD starts BIRD with or without weights.
func (b *bed) startBIRD(d bird, weighted bool) {
	b.t.Helper()
	var c strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&c, format+"\n", args...) }
	line("log stderr { error, fatal, bug };\nrouter id %s;\nprotocol device {}", loopback)
	line("protocol static own { ipv4; route %s/32 via \"lo\"; }", loopback)
	line("protocol kernel { merge paths on; ipv4 { import none; export where source = RTS_BGP; }; }")
	if b.bfd > 0 {
		line("protocol bfd { interface \"*\" { interval %d ms; multiplier 3; }; }", b.bfd.Milliseconds())
	}
	// A filter cannot compute with the value of a community, so it has a case for each speed.
	line("filter from_leaf {\n  weight = 1;")
	for gbps := half / 2; weighted && gbps <= full; gbps += half / 2 {
		value := community(gbps)
		line("  if (generic, 0x4%04x, 0x%x) ~ bgp_ext_community then weight = %d;", administrator, value[4:], gbps/(half/2))
	}
	line("  accept;\n}")
	for p := range planes {
		line("protocol bgp leaf%d {\n  local %s as %d; neighbor %s as %d;", p, serverAddress(p), serverAS, leafAddress(p), firstLeafAS+p)
		line("  hold time %d; connect delay time 0; connect retry time 1; error wait time 1, 1;", holdTime)
		if b.bfd > 0 {
			line("  bfd on;")
		}
		line("  ipv4 { import filter from_leaf; export where source = RTS_STATIC; };\n}")
	}
	control := filepath.Join(b.dir, "bird.ctl")
	words := append(d.program(), "-f", "-c", b.file("bird.conf", c.String()), "-s", control, "-P", filepath.Join(b.dir, "bird.pid"))
	b.runUntil(control, words[0], words[1:]...)
}

// frr is FRR 8.4, or FRR 10.3 below root: bgpd computes weights of multipath routes from the communities, zebra writes
// them.
type frr struct{ root string }

func (d frr) name() string {
	if d.root != "" {
		return "frr10"
	}
	return "frr"
}
func (d frr) version() string {
	words := testbed.FRR{Root: d.root}.Command("bgpd")
	return output(words[0], append(words[1:], "--version")...)
}
func (frr) inKernel() bool { return true }
func (d frr) tools() (all []string) {
	for _, name := range []string{"zebra", "bgpd", "bfdd"} {
		words := testbed.FRR{Root: d.root}.Command(name)
		all = append(all, words[len(words)-1])
	}
	return all
}

func (d frr) start(b *bed) {
	b.t.Helper()
	f := testbed.FRR{Sockets: filepath.Join(b.dir, "run"), Root: d.root, Start: b.server.StartOnHost}
	daemon := func(name, config string) {
		b.processes = append(b.processes, f.Daemon(b.t, name, b.file(name+".conf", config)))
	}
	// Without nexthop objects, which this version loses members of after a flap on recent kernels (interop).
	daemon("zebra", "no zebra nexthop kernel enable\nzebra work-queue 0\n")
	if b.bfd > 0 {
		daemon("bfdd", fmt.Sprintf("bfd\n profile fast\n  detect-multiplier 3\n  receive-interval %[1]d\n  transmit-interval %[1]d\n exit\nexit\n", b.bfd.Milliseconds()))
	}
	var c strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&c, format+"\n", args...) }
	line("frr defaults datacenter\nbgp route-map delay-timer 0\nrouter bgp %d\n bgp router-id %s", serverAS, loopback)
	line(" no bgp ebgp-requires-policy\n no bgp default ipv4-unicast\n bgp bestpath as-path multipath-relax\n coalesce-time 0\n timers bgp %d %d", holdTime/3, holdTime)
	for p := range planes {
		line(" neighbor %s remote-as %d\n neighbor %[1]s timers connect 1\n neighbor %[1]s advertisement-interval 0", leafAddress(p), firstLeafAS+p)
		if b.bfd > 0 {
			line(" neighbor %s bfd\n neighbor %[1]s bfd profile fast", leafAddress(p))
		}
	}
	line(" address-family ipv4 unicast\n  maximum-paths %d\n  network %s/32", planes, loopback)
	for p := range planes {
		line("  neighbor %s activate", leafAddress(p))
	}
	line(" exit-address-family\nexit")
	daemon("bgpd", c.String())
}

// fared is the daemon and the agent with a driver. inside means that the agent is in the daemon's process.
type fared struct {
	driver string
	inside bool
}

func (f fared) name() string {
	switch {
	case f.inside && f.driver == "linux":
		return "fared-inside"
	case f.inside:
		return "fared-" + f.driver + "-inside"
	}
	return "fared-" + f.driver
}
func (fared) version() string {
	return "fared " + output("git", "describe", "--tags", "--always", "--dirty")
}
func (f fared) inKernel() bool { return f.driver == "linux" }
func (fared) tools() []string  { return nil }

// flags returns the agent's flags.
func (f fared) flags(b *bed) []string {
	return []string{"--driver=" + f.driver, "--socket=" + filepath.Join(b.dir, "dataplane.sock"), "--pin-dir=/sys/fs/bpf/" + b.server.Name}
}

func (f fared) start(b *bed) {
	args := append([]string{"dataplane", "--log-level", "warn"}, f.flags(b)...)
	b.t.Cleanup(func() {
		// Pinned objects outlive the namespace; the agent, which started later, has ended by now.
		testbed.Flush(b.t, b.server, args[1:]...)
	})
	b.server.SetApart()
	dataplane := fmt.Sprintf("{address: %q}", "unix:"+filepath.Join(b.dir, "dataplane.sock"))
	if f.inside {
		dataplane = fmt.Sprintf(`{address: "inside:", flags: [%s]}`, strings.Join(f.flags(b), ", "))
	} else {
		b.runUntil(filepath.Join(b.dir, "dataplane.sock"), binary.Fared(b.t), args...)
	}
	var c strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&c, format+"\n", args...) }
	line("as: %d\nrouter_id: %s\nloopbacks: [%[2]s/32]\naccept: [10.0.0.0/8]", serverAS, loopback)
	line("bgp: {hold_time: %ds, connect_retry: 1s, max_prefixes: %d}", holdTime, max(16384, b.destinations))
	if b.bfd > 0 {
		line("bfd: {interval: %v, multiplier: 3}", b.bfd)
	}
	if b.silent {
		line("proof: {enabled: false}")
	}
	if !b.damped {
		line("links: {damping: {failures: 0}}")
	}
	line("dataplane: %s\napi: {socket: %q}\nlog: {level: warn}\nplanes:", dataplane, filepath.Join(b.dir, "fared.sock"))
	for p := range planes {
		line("- name: %s\n  sub_ports:", device(p))
		for s := range subPorts {
			i := p + s*mostPlanes
			line("  - {device: %s, speed: %dG, sessions: [{peer: %s, peer_as: %d}]}", device(i), full, leafAddress(i), firstLeafAS+p)
		}
	}
	b.run(binary.Fared(b.t), "run", "--config", b.file("fared.yaml", c.String()))
}
