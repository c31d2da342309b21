package interop

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/fared/fared/internal/testkit/testbed"
)

// gobgp runs gobgpd. gobgpd has no kernel table, and its zebra client (3.10) does not work with
// the zebra of FRR 8.4, so follow copies its table to the kernel. root is that of testbed.Program.
type gobgp struct{ root string }

func (d gobgp) program(name string) []string { return testbed.Program(d.root, "/usr/bin/"+name) }

func (d gobgp) tools() []string { return programs(d.program("gobgpd"), d.program("gobgp")) }

func (gobgp) socket(l *leaf) string { return "unix://" + filepath.Join(l.dir, "gobgp.sock") }

func (d gobgp) start(t *testing.T, l *leaf) {
	t.Helper()
	words := append(d.program("gobgpd"), "-t", "yaml", "-f", writeFile(t, l.dir, "gobgpd.yaml", gobgpConfig(l)), "--api-hosts", d.socket(l), "--pprof-disable", "-p")
	l.run(t, filepath.Join(l.dir, "gobgp.sock"), words[0], words[1:]...)
}

func gobgpConfig(l *leaf) string {
	var b strings.Builder
	fmt.Fprintf(&b, "global:\n  config: {as: %d, router-id: %s}\nneighbors:\n", l.as, l.routerID)
	for _, p := range l.peers {
		for i, family := range []string{"ipv4", "ipv6"} {
			fmt.Fprintf(&b, "- config: {neighbor-address: %q, peer-as: %d}\n", p.remote[i], p.as)
			fmt.Fprintf(&b, "  timers: {config: {hold-time: 3, keepalive-interval: 1, connect-retry: 1, idle-hold-time-after-reset: 1}}\n")
			fmt.Fprintf(&b, "  afi-safis: [{config: {afi-safi-name: %s-unicast}}]\n", family)
		}
	}
	return b.String()
}

func (d gobgp) ask(l *leaf, into any, args ...string) error {
	words := slices.Concat(d.program("gobgp"), []string{"--target", d.socket(l), "-j"}, args)
	out, err := exec.Command(words[0], words[1:]...).Output()
	if err != nil {
		return fmt.Errorf("gobgp %s: %w\n%s", strings.Join(args, " "), err, out)
	}
	if err := json.Unmarshal(out, into); err != nil {
		return fmt.Errorf("gobgp %s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return nil
}

func (d gobgp) established(l *leaf) (int, error) {
	var neighbors []struct {
		State struct {
			SessionState int `json:"session_state"`
		}
	}
	if err := d.ask(l, &neighbors, "neighbor"); err != nil {
		return 0, err
	}
	const established = 6
	n := 0
	for _, p := range neighbors {
		if p.State.SessionState == established {
			n++
		}
	}
	return n, nil
}

func (d gobgp) paths(l *leaf, prefix netip.Prefix) ([]path, error) {
	table, err := d.table(l, prefix.Addr().Is4())
	if err != nil {
		return nil, err
	}
	return gobgpPaths(table[prefix.String()])
}

// gobgpTable is the output of `gobgp global rib -j`: the paths of each prefix, the best
// one first.
type gobgpTable map[string][]gobgpPath

type gobgpPath struct {
	NeighborIP string `json:"neighbor-ip"`
	Attrs      []struct {
		Type    int
		Nexthop string
		Value   json.RawMessage
	}
}

func (d gobgp) table(l *leaf, v4 bool) (gobgpTable, error) {
	var t gobgpTable
	return t, d.ask(l, &t, "global", "rib", "-a", map[bool]string{true: "ipv4", false: "ipv6"}[v4])
}

func gobgpPaths(in []gobgpPath) ([]path, error) {
	const extendedCommunities = 16
	var out []path
	for _, p := range in {
		n := path{from: p.NeighborIP}
		for _, a := range p.Attrs {
			if a.Type != extendedCommunities {
				continue
			}
			var list []struct {
				Type, Subtype int
				ASN           uint16
				Bandwidth     float64
			}
			if err := json.Unmarshal(a.Value, &list); err != nil {
				return nil, fmt.Errorf("gobgp shows %s: %w", a.Value, err)
			}
			for _, c := range list {
				if c.Subtype == 4 && c.Type&^0x40 == 0 {
					// The output is 64 for either type.
					n.bandwidths = append(n.bandwidths, linkBandwidth{as: c.ASN, bps: uint64(c.Bandwidth) * 8, kind: -1})
				} else {
					n.other = append(n.other, fmt.Sprintf("%d:%d", c.Type, c.Subtype))
				}
			}
		}
		out = append(out, n)
	}
	slices.SortFunc(out, func(a, b path) int { return strings.Compare(a.from, b.from) })
	return out, nil
}

// follow replaces the kernel's routes by those of gobgpd's table.
func (d gobgp) follow(t *testing.T, l *leaf) {
	t.Helper()
	for _, v4 := range []bool{true, false} {
		table, err := d.table(l, v4)
		if err != nil {
			t.Fatal(err)
		}
		family := map[bool]string{true: "-4", false: "-6"}[v4]
		l.ns.IP(family, "route", "flush", "proto", "186") // bgp
		for prefix, paths := range table {
			args := []string{family, "route", "add", prefix, "proto", "186"}
			for _, p := range paths {
				hop := gobgpNexthop(p)
				if hop == "" {
					t.Fatalf("gobgpd has a path to %s without a next hop: %+v", prefix, p)
				}
				args = append(args, "nexthop", "via", hop)
			}
			l.ns.IP(args...)
		}
	}
}

func gobgpNexthop(p gobgpPath) string {
	for _, a := range p.Attrs {
		if a.Nexthop != "" {
			return a.Nexthop
		}
	}
	return ""
}

func TestReadGoBGP(t *testing.T) {
	const output = `{"10.255.0.1/32":[{"nlri":{"prefix":"10.255.0.1/32"},"best":true,"attrs":[{"type":1,"value":0},
		{"type":2,"as_paths":[{"segment_type":2,"num":1,"asns":[65101]}]},{"type":3,"nexthop":"10.0.0.1"},
		{"type":16,"value":[{"type":64,"subtype":4,"asn":65101,"bandwidth":500000000},{"type":0,"subtype":2,"value":"1:2"}]}],
		"stale":false,"source-id":"10.255.0.1","neighbor-ip":"10.0.0.1"}]}`
	var table gobgpTable
	if err := json.Unmarshal([]byte(output), &table); err != nil {
		t.Fatal(err)
	}
	in := table["10.255.0.1/32"]
	got, err := gobgpPaths(in)
	want := "[10.0.0.1 [AS 65101, 4000000000 bit/s, type -0x1] [0:2]]"
	if fmt.Sprint(got) != want || err != nil {
		t.Errorf("got  %v, %v\nwant %s", got, err, want)
	}
	if hop := gobgpNexthop(in[0]); hop != "10.0.0.1" {
		t.Errorf("next hop %q", hop)
	}
}
