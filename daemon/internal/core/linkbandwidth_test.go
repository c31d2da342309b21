package core

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/fared/fared/fare"
)

// advertisedBy returns a core's advertisement of a prefix on each session, as the bytes of its communities.
func advertisedBy(c *Core, prefix netip.Prefix) map[int]string {
	advertised := map[int]string{}
	c.Advertise(func(session int, routes []Route) {
		for _, r := range routes {
			if r.Prefix == prefix {
				advertised[session] = fmt.Sprint(r.Communities)
			}
		}
	})
	return advertised
}

// TestLinkBandwidthBySession checks that a leaf removes, keeps or regenerates the value on each session, as RFC 10005
// permits.
func TestLinkBandwidthBySession(t *testing.T) {
	c := coreOf(t, `
role: leaf
as: 65000
router_id: 10.9.0.1
accept: [10.255.0.0/16]
planes:
- name: p0
  sub_ports:
  - {device: s0, speed: 400G, sessions: [{peer: 192.0.2.1}]}
  - {device: s1, speed: 400G, sessions: [{peer: 192.0.2.3}]}
  - {device: r, speed: 400G, sessions: [{peer: 192.0.2.5}]}
  - {device: k, speed: 400G, sessions: [{peer: 192.0.2.7, bandwidth: keep}]}
  - {device: x, speed: 400G, sessions: [{peer: 192.0.2.9, bandwidth: remove}]}
`)
	for i := range 5 {
		node, as := leafNode(max(i, 1)), uint32(65100+max(i, 1)) // the first two belong to one server
		do(t, c, up(i, 0), Fabric{fare.SessionUp{Session: i, Generation: 1, Node: node, PeerAS: as}})
	}
	// 400G and 100G as float32 of bytes/s, with the sender's administrator.
	all, quarter := fare.Community{0, 4, 0, 9, 0x51, 0x3a, 0x43, 0xb7}, fare.Community{0, 4, 0, 9, 0x50, 0x3a, 0x43, 0xb7}
	for i, value := range []fare.Community{all, quarter} {
		do(t, c, Fabric{fare.RouteUpdate{Session: i, Generation: 1, Prefix: destination(0), Attrs: &fare.Attributes{
			Communities: []fare.Community{value}, ASPath: []uint32{65101}}}})
	}
	want := map[int]string{
		2: "[0004fde85" + "168d4a5]", // 500G: 62.5e9 bytes/s
		3: fmt.Sprint([]fare.Community{all}),
		4: "[]",
	}
	if got := advertisedBy(c, destination(0)); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("advertised %v, want %v", got, want)
	}
	do(t, c, Fabric{fare.RouteWithdraw{Session: 0, Generation: 1, Prefix: destination(0)}})
	want[2], want[3] = "[0004fde8503a43b7]", fmt.Sprint([]fare.Community{quarter})
	if got := advertisedBy(c, destination(0)); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("with the other half: advertised %v, want %v", got, want)
	}
}

// TestLinkBandwidthByConfiguration checks that the operator selects transitivity, administrator and value (RFC 10005).
func TestLinkBandwidthByConfiguration(t *testing.T) {
	const text = `
as: 4200001000
loopbacks: [10.255.0.9/32]
accept: [10.255.0.0/16]
KEYS
planes:
- name: p0
  sub_ports:
  - {device: a, speed: 400G, sessions: [{peer: 192.0.2.1}]}
  - {device: b, speed: 400G, advertise: 100G, sessions: [{peer: 192.0.2.3}]}
`
	own := netip.MustParsePrefix("10.255.0.9/32")
	for keys, want := range map[string][2]string{
		"":                                    {"[00045ba0513a43b7]", "[00045ba0503a43b7]"},
		"path_bandwidth: {transitive: false}": {"[40045ba0513a43b7]", "[40045ba0503a43b7]"},
		"path_bandwidth: {administrator: 7}":  {"[00040007513a43b7]", "[00040007503a43b7]"},
		"path_bandwidth: {administrator: 65535, advertise: node}": {"[0004ffff513a43b7]", "[0004ffff503a43b7]"},
	} {
		c := coreOf(t, strings.Replace(text, "KEYS", keys, 1))
		for i := range 2 { // two leaves
			do(t, c, up(i, 0), Fabric{fare.SessionUp{Session: i, Generation: 1, Node: leafNode(i), PeerAS: uint32(65100 + i)}})
		}
		advertised := advertisedBy(c, own)
		if advertised[0] != want[0] || advertised[1] != want[1] {
			t.Errorf("%q: %v, want %v", keys, advertised, want)
		}
	}
}

// switches are cores of leaves, spines and super-spines, connected in pure code: the advertisements of one are the
// input of the next.
type switches struct {
	t     *testing.T
	cores []*Core
	as    []uint32
	names []string
	wires [][]wire // by switch and session
	alive []bool
	sent  map[[2]int]map[netip.Prefix]string
	gen   uint64
}

type wire struct{ to, session int }

// newSwitches builds switches from the named cables, 400G each. A word after a name is its key for the sub-port, such
// as "spine1 leaf1": "", "uplink: true".
func newSwitches(t *testing.T, cables [][4]string, hosts map[string]int) *switches {
	f := &switches{t: t, sent: map[[2]int]map[netip.Prefix]string{}}
	ports := map[string][]string{}
	index := map[string]int{}
	add := func(name, keys string) wire {
		if _, ok := index[name]; !ok {
			index[name] = len(f.names)
			f.names, f.wires, f.alive = append(f.names, name), append(f.wires, nil), append(f.alive, true)
		}
		ports[name] = append(ports[name], keys)
		return wire{index[name], len(ports[name]) - 1}
	}
	for _, c := range cables {
		a, b := add(c[0], c[1]), add(c[2], c[3])
		f.wires[a.to], f.wires[b.to] = append(f.wires[a.to], b), append(f.wires[b.to], a)
	}
	for name, n := range hosts {
		for range n {
			add(name, "")
		}
	}
	for i, name := range f.names {
		var b strings.Builder
		as := uint32(65000 + i)
		fmt.Fprintf(&b, "role: leaf\nas: %d\nrouter_id: 10.9.0.%d\naccept: [10.255.0.0/16]\nplanes:\n- name: p0\n  sub_ports:\n", as, i+1)
		for k, keys := range ports[name] {
			if keys != "" {
				keys += ", "
			}
			fmt.Fprintf(&b, "  - {device: d%d, speed: 400G, %ssessions: [{peer: 192.0.2.%d}]}\n", k, keys, k+1)
		}
		f.cores, f.as = append(f.cores, coreOf(t, b.String())), append(f.as, as)
	}
	for i := range f.cores {
		f.connect(i)
	}
	return f
}

func (f *switches) id(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 9, 0, byte(i + 1)}) }

// connect brings up the sessions of a switch, at both ends.
func (f *switches) connect(i int) {
	f.gen++
	f.alive[i] = true
	for k, w := range f.wires[i] {
		for _, end := range [][3]int{{i, k, w.to}, {w.to, w.session, i}} {
			do(f.t, f.cores[end[0]], up(end[1], 0), Fabric{fare.SessionUp{Session: end[1], Generation: f.gen, Node: f.id(end[2]), PeerAS: f.as[end[2]]}})
			delete(f.sent, [2]int{end[0], end[1]})
		}
	}
	f.settle()
}

// kill ends the sessions of a switch.
func (f *switches) kill(name string) {
	i := slices.Index(f.names, name)
	f.alive[i] = false
	for k, w := range f.wires[i] {
		for _, end := range [][2]int{{i, k}, {w.to, w.session}} {
			s := f.cores[end[0]].sessions[end[1]]
			do(f.t, f.cores[end[0]], Fabric{fare.SessionDown{Session: end[1], Generation: s.generation}}, down(end[1]))
		}
	}
	f.settle()
}

// settle carries advertisements until nothing changes.
func (f *switches) settle() {
	f.t.Helper()
	for range 100 {
		changed := false
		for i, c := range f.cores {
			c.Advertise(func(session int, routes []Route) {
				if session < len(f.wires[i]) && c.sessions[session].up {
					changed = f.carry(i, session, routes) || changed
				}
			})
		}
		if !changed {
			return
		}
	}
	f.t.Fatal("the switches do not settle")
}

func (f *switches) carry(from, session int, routes []Route) (changed bool) {
	w := f.wires[from][session]
	to := f.cores[w.to]
	generation := to.sessions[w.session].generation
	sent := map[netip.Prefix]string{}
	for _, r := range routes {
		path := append([]uint32{f.as[from]}, r.ASPath...)
		if slices.Contains(path, f.as[w.to]) {
			continue
		}
		text := fmt.Sprint(r.Communities, path)
		sent[r.Prefix] = text
		if f.sent[[2]int{from, session}][r.Prefix] != text {
			changed = true
			do(f.t, to, Fabric{fare.RouteUpdate{Session: w.session, Generation: generation, Prefix: r.Prefix,
				Attrs: &fare.Attributes{Communities: r.Communities, ASPath: path}}})
		}
	}
	for prefix := range f.sent[[2]int{from, session}] {
		if _, ok := sent[prefix]; !ok {
			changed = true
			do(f.t, to, Fabric{fare.RouteWithdraw{Session: w.session, Generation: generation, Prefix: prefix}})
		}
	}
	f.sent[[2]int{from, session}] = sent
	return changed
}

// host makes a server at a switch announce a loopback over one of its sub-ports.
func (f *switches) host(name string, k int, prefix netip.Prefix, b fare.Bandwidth) {
	i := slices.Index(f.names, name)
	session := len(f.wires[i]) + k
	f.gen++
	do(f.t, f.cores[i], up(session, 0), Fabric{fare.SessionUp{Session: session, Generation: f.gen, Node: netip.MustParseAddr("10.8.0.1"), PeerAS: 64001}},
		Fabric{fare.RouteUpdate{Session: session, Generation: f.gen, Prefix: prefix, Attrs: attributes(b, 64001)}})
	f.settle()
}

func (f *switches) at(name string, prefix netip.Prefix) string {
	b, _, ok := f.cores[slices.Index(f.names, name)].sources[0].table.Readvertise(prefix)
	if !ok {
		return "nothing"
	}
	// Shares are rounded to float32 in transit; the tables restore ratios, and a sum is shown to the Mbit/s.
	return fare.Bandwidth(uint64(b+5e5) / 1e6 * 1e6).String()
}

// TestThreeTiers has pods of two spines and two leaves, joined by two super-spines. A super-spine's sub-ports to the
// spines of one pod share its advertised bandwidth, because the pod's leaves sum it again: a leaf of the other pod
// receives the server's bandwidth, reduced in proportion to failed switches. The expected values are calculated by
// hand: one of two equal paths is half.
func TestThreeTiers(t *testing.T) {
	var cables [][4]string
	for pod := 1; pod <= 2; pod++ {
		for spine := 1; spine <= 2; spine++ {
			s := fmt.Sprintf("spine%d%d", pod, spine)
			for leaf := 1; leaf <= 2; leaf++ {
				cables = append(cables, [4]string{fmt.Sprintf("leaf%d%d", pod, leaf), "uplink: true", s, ""})
			}
			for super := 1; super <= 2; super++ {
				cables = append(cables, [4]string{s, "uplink: true", fmt.Sprintf("super%d", super), fmt.Sprintf("share: pod%d", pod)})
			}
		}
	}
	f := newSwitches(t, cables, map[string]int{"leaf11": 2, "leaf12": 1, "leaf21": 1, "leaf22": 1})
	dst := destination(0)
	check := func(when string, near, far string) {
		t.Helper()
		for leaf, want := range map[string]string{"leaf12": near, "leaf21": far, "leaf22": far} {
			if got := f.at(leaf, dst); got != want {
				t.Errorf("%s: %s has %s, want %s", when, leaf, got, want)
			}
		}
	}
	f.host("leaf11", 0, dst, 400e9)
	check("one half of a Y-cable", "400G", "400G")
	f.host("leaf11", 1, dst, 400e9)
	check("both halves", "800G", "800G")
	f.kill("super1")
	check("a super-spine is lost", "800G", "400G")
	f.connect(slices.Index(f.names, "super1"))
	check("and back", "800G", "800G")
	f.kill("spine12")
	check("a near spine is lost", "400G", "400G")
	f.connect(slices.Index(f.names, "spine12"))
	f.kill("spine21")
	check("a far spine is lost", "800G", "400G")
	f.connect(slices.Index(f.names, "spine21"))
	check("all is well", "800G", "800G")
}
