package interop

import (
	"fmt"
	"net/netip"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/fared/fared/internal/testkit/testbed"
)

// bird runs BIRD, which passes on extended communities that it does not know. root is that of testbed.Program.
type bird struct{ root string }

func (d bird) program(name string) []string { return testbed.Program(d.root, "/usr/sbin/"+name) }

func (d bird) tools() []string { return programs(d.program("bird"), d.program("birdc")) }

func (d bird) start(t *testing.T, l *leaf) {
	t.Helper()
	control := filepath.Join(l.dir, "bird.ctl")
	words := append(d.program("bird"), "-f", "-c", writeFile(t, l.dir, "bird.conf", birdConfig(l)), "-s", control, "-P", filepath.Join(l.dir, "bird.pid"))
	l.run(t, control, words[0], words[1:]...)
}

// command runs birdc.
func (d bird) command(l *leaf, args ...string) ([]byte, error) {
	words := slices.Concat(d.program("birdc"), []string{"-s", filepath.Join(l.dir, "bird.ctl")}, args)
	return exec.Command(words[0], words[1:]...).CombinedOutput()
}

func birdConfig(l *leaf) string {
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	line("log stderr all;\nrouter id %s;\nprotocol device {}", l.routerID)
	for _, family := range []string{"ipv4", "ipv6"} {
		line("protocol kernel { %s { import none; export all; }; merge paths on; }", family)
	}
	if l.bfd > 0 {
		line("protocol bfd { interface \"*\" { interval %d ms; multiplier 3; %s}; }", l.bfd.Milliseconds(), l.auth.bird())
	}
	line("filter to_servers {")
	if l.advertise != 0 || l.strip {
		// The key of a generic community ends in the AS of its creator.
		for _, as := range []uint32{serverAS[0], 23456} {
			line("  bgp_ext_community.delete([(generic, 0x%x, *)]);", 0x00040000|as)
		}
	}
	if l.advertise != 0 {
		high, low := linkBandwidth{as: uint16(l.as), bps: l.advertise}.community()
		line("  bgp_ext_community.add((generic, 0x%x, 0x%x));", high, low)
	}
	if l.shutdown {
		line("  bgp_community.add((65535, 0));")
	}
	line("  accept;\n}")
	timers := fmt.Sprintf("  hold time %d; keepalive time 1; connect delay time 1; connect retry time 1; error wait time 1, 1;", int(holdTime(l.bfd).Seconds()))
	for _, p := range l.peers {
		export := "all"
		if p.server != nil {
			export = "filter to_servers"
		}
		if p.unnumbered { // the server finds the leaf by its router advertisements, and connects
			line("protocol radv { interface \"%s\" { min ra interval 3; max ra interval 4; }; }", p.device)
			line("protocol bgp %s {", birdName(p, "link"))
			line("  local as %d; neighbor range fe80::/10 as %d; interface \"%s\"; dynamic name \"%s\"; passive on;", l.as, p.as, p.device, birdName(p, "session"))
			line("%s", timers)
			for _, family := range []string{"ipv4", "ipv6"} {
				line("  %s { import all; export %s; next hop self; extended next hop on; };", family, export)
			}
			line("}")
			continue
		}
		for i, family := range []string{"ipv4", "ipv6"} {
			line("protocol bgp %s {", birdName(p, family))
			line("  local %s as %d; neighbor %s as %d;", p.local[i], l.as, p.remote[i], p.as)
			line("%s", timers)
			if l.bfd > 0 {
				line("  bfd on;")
			}
			line("  %s { import all; export %s; };\n}", family, export)
		}
	}
	return b.String()
}

// birdName returns a protocol's name, which must not contain a dash.
func birdName(p *peer, family string) string {
	return strings.ReplaceAll(p.device, "-", "_") + "_" + family
}

func (d bird) show(l *leaf, command string) (string, error) {
	out, err := d.command(l, "show "+command)
	// birdc fails if the result is empty.
	if err != nil && !strings.Contains(string(out), "Network not found") {
		return "", fmt.Errorf("birdc show %s: %w\n%s", command, err, out)
	}
	return string(out), nil
}

func (d bird) established(l *leaf) (int, error) {
	out, err := d.show(l, "protocols")
	return strings.Count(out, " Established"), err
}

func (d bird) paths(l *leaf, prefix netip.Prefix) ([]path, error) {
	out, err := d.show(l, "route all "+prefix.String())
	if err != nil {
		return nil, err
	}
	names := map[string]string{}
	for _, p := range l.peers {
		for i, family := range []string{"ipv4", "ipv6"} {
			names[birdName(p, family)] = p.remote[i].String()
		}
	}
	return birdPaths(out, names)
}

// birdPaths parses `show route all`; names holds the neighbor's address of each
// protocol.
func birdPaths(out string, names map[string]string) ([]path, error) {
	var paths []path
	for line := range strings.Lines(out) {
		line = strings.TrimSpace(line)
		switch {
		case strings.Contains(line, "unicast ["):
			_, rest, _ := strings.Cut(line, "[")
			protocol, _, _ := strings.Cut(rest, " ")
			from, known := names[protocol]
			if !known {
				return nil, fmt.Errorf("BIRD shows a route of %q:\n%s", protocol, out)
			}
			paths = append(paths, path{from: from})
		case strings.HasPrefix(line, "BGP.ext_community:") && len(paths) > 0:
			last := &paths[len(paths)-1]
			for _, c := range strings.SplitAfter(strings.TrimPrefix(line, "BGP.ext_community:"), ")") {
				if c = strings.TrimSpace(c); c == "" {
					continue
				}
				// A type that BIRD does not know, for two-octet AS numbers.
				var kind, as, low uint32
				if _, err := fmt.Sscanf(c, "(unknown 0x%x, %d, %d)", &kind, &as, &low); err == nil {
					if b, ok := linkBandwidthOf(kind<<16|as, low); ok {
						last.bandwidths = append(last.bandwidths, b)
						continue
					}
				}
				last.other = append(last.other, c)
			}
		}
	}
	slices.SortFunc(paths, func(a, b path) int { return strings.Compare(a.from, b.from) })
	return paths, nil
}

func TestReadBIRD(t *testing.T) {
	const output = `BIRD 2.0.12 ready.
Table master4:
10.255.0.1/32        unicast [srv0_1_ipv4 05:42:46.561] * (100) [AS65101i]
	via 10.0.0.3 on srv0-1
	Type: BGP univ
	BGP.ext_community: (unknown 0x4, 65101, 1307470632) (rt, 1, 2)
                     unicast [srv0_0_ipv4 05:42:46.561] (100) [AS65101i]
	via 10.0.0.1 on srv0-0
	BGP.ext_community: (unknown 0x4004, 23456, 1299082024)
`
	got, err := birdPaths(output, map[string]string{"srv0_0_ipv4": "10.0.0.1", "srv0_1_ipv4": "10.0.0.3"})
	want := "[10.0.0.1 [AS 23456, 2000000000 bit/s, type 0x40] [] 10.0.0.3 [AS 65101, 4000000000 bit/s, type 0x0] [(rt, 1, 2)]]"
	if fmt.Sprint(got) != want || err != nil {
		t.Errorf("got  %v, %v\nwant %s", got, err, want)
	}
	if got, err := birdPaths("BIRD 2.0.12 ready.\nNetwork not found\n", nil); len(got) != 0 || err != nil {
		t.Errorf("no route: %v, %v", got, err)
	}
}
