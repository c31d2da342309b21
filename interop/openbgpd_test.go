package interop

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/fared/fared/internal/testkit/testbed"
)

// openbgpd runs bgpd of OpenBGPD, which passes on extended communities that it does not know. root is the folder of
// testbed.Unpacked.
type openbgpd struct{ root string }

func (d openbgpd) tools() []string {
	return append(programs(testbed.Program(d.root, "/usr/sbin/bgpd"), testbed.Program(d.root, "/usr/sbin/bgpctl")), "unshare")
}

func (openbgpd) socket(l *leaf) string { return filepath.Join(l.dir, "bgpd.sock") }

func (d openbgpd) start(t *testing.T, l *leaf) {
	t.Helper()
	config := writeFile(t, l.dir, "bgpd.conf", d.config(l))
	// bgpd executes itself, by argv[0], for each of its other two processes. A script of that name runs the suite's
	// loader in all three.
	words := testbed.Program(d.root, "/usr/sbin/bgpd")
	script := writeFile(t, l.dir, "bgpd", fmt.Sprintf("#!/bin/sh\nexec %s --argv0 \"$0\" %s \"$@\"\n", words[0], strings.Join(words[1:], " ")))
	// bgpd requires its user, whose home directory it makes its root, and refuses a configuration that others can read.
	passwd := writeFile(t, l.dir, "passwd", "root:x:0:0::/root:/bin/sh\n_openbgpd:x:65534:65534::"+l.dir+":/bin/false\n")
	for file, mode := range map[string]os.FileMode{config: 0o600, script: 0o755} {
		if err := os.Chmod(file, mode); err != nil {
			t.Fatal(err)
		}
	}
	l.run(t, d.socket(l), "unshare", "-m", "sh", "-c", `mount --bind "$0" /etc/passwd && exec "$@"`, passwd, script, "-d", "-f", config)
}

func (d openbgpd) config(l *leaf) string {
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	line("AS %d\nrouter-id %s\nsocket %q\nholdtime 3\nconnect-retry 1", l.as, l.routerID, d.socket(l))
	for _, p := range l.peers {
		for i, families := range []string{" announce IPv4 unicast\n announce IPv6 none", " announce IPv6 unicast\n announce IPv4 none"} {
			line("neighbor %s {\n remote-as %d\n%s\n}", p.remote[i], p.as, families)
		}
	}
	line("allow from any\nallow to any") // the default is to refuse
	return b.String()
}

func (d openbgpd) show(l *leaf, into any, args ...string) error {
	words := slices.Concat(testbed.Program(d.root, "/usr/sbin/bgpctl"), []string{"-j", "-s", d.socket(l), "show"}, args)
	out, err := exec.Command(words[0], words[1:]...).Output()
	if err != nil {
		return fmt.Errorf("bgpctl show %s: %w", strings.Join(args, " "), err)
	}
	if err := json.Unmarshal(out, into); err != nil {
		return fmt.Errorf("bgpctl show %s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return nil
}

func (d openbgpd) established(l *leaf) (n int, err error) {
	var answer struct{ Neighbors []struct{ State string } }
	err = d.show(l, &answer, "neighbor")
	for _, p := range answer.Neighbors {
		if p.State == "Established" {
			n++
		}
	}
	return n, err
}

func (d openbgpd) paths(l *leaf, prefix netip.Prefix) ([]path, error) {
	var answer openbgpdRoutes
	if err := d.show(l, &answer, "rib", "detail", prefix.String()); err != nil {
		return nil, err
	}
	return answer.paths(), nil
}

// openbgpdRoutes is the output of `bgpctl -j show rib detail`; {} if there is no route.
type openbgpdRoutes struct {
	RIB []struct {
		Neighbor struct {
			RemoteAddr string `json:"remote_addr"`
		}
		ExtendedCommunities []string `json:"extended_communities"`
	}
}

func (r openbgpdRoutes) paths() (out []path) {
	for _, route := range r.RIB {
		n := path{from: route.Neighbor.RemoteAddr}
		for _, c := range route.ExtendedCommunities {
			// A type that it does not know: of 7.7 the sub-type, of 8.8 the type too; the value is an integer.
			kind, value, _ := strings.Cut(c, "] ")
			var as uint16
			var low uint32
			if _, err := fmt.Sscanf(value, "%d:%d", &as, &low); err != nil || kind != "[4" && kind != "[0:4" {
				n.other = append(n.other, c)
				continue
			}
			b, _ := linkBandwidthOf(0x0004<<16|uint32(as), low)
			if kind == "[4" {
				b.kind = -1
			}
			n.bandwidths = append(n.bandwidths, b)
		}
		out = append(out, n)
	}
	slices.SortFunc(out, func(a, b path) int { return strings.Compare(a.from, b.from) })
	return out
}

func TestReadOpenBGPD(t *testing.T) {
	const output = `{"rib": [
		{"prefix": "10.255.0.2/32", "neighbor": {"remote_addr": "10.0.1.3", "bgp_id": "10.255.0.2"}, "valid": true, "ecmp": true, "extended_communities": ["[4] 23456:1315859240"]},
		{"prefix": "10.255.0.2/32", "neighbor": {"remote_addr": "10.0.1.1"}, "best": true, "extended_communities": ["rt 1:2", "[0:4] 65101:1307470632"]}]}`
	var r openbgpdRoutes
	if err := json.Unmarshal([]byte(output), &r); err != nil {
		t.Fatal(err)
	}
	got := r.paths()
	want := "[10.0.1.1 [AS 65101, 4000000000 bit/s, type 0x0] [rt 1:2] 10.0.1.3 [AS 23456, 8000000000 bit/s, type -0x1] []]"
	if fmt.Sprint(got) != want {
		t.Errorf("got  %v\nwant %s", got, want)
	}
}
