package topo

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strings"

	"github.com/fared/fared/fare"
)

// NodeWiring is what a node has before anything runs on it: what a kernel is told of it.
type NodeWiring struct {
	Node      *Node
	Sysctls   []Sysctl
	Loopbacks []netip.Prefix // addresses of lo
	Devices   []Device
}

// Sysctl is a setting of the kernel.
type Sysctl struct {
	Name  string // with dots, such as net.ipv4.ip_forward
	Value string
}

// Device is one end of a cable.
type Device struct {
	Name string
	// Index is the interface's (ifindex). No two of a fabric are equal: equal ones at both ends of a veth pair delay the news of a
	// lost carrier by up to a second.
	Index int
	Addr  netip.Prefix   // a /31
	Rate  fare.Bandwidth // its tbf qdisc's, in bit/s; 0: no qdisc
}

// firstIndex leaves room for what a namespace has by itself.
const firstIndex = 100

// Wiring is that of every node, in the order of Nodes. Devices have qdiscs where the site's speeds come from them.
func (f *Fabric) Wiring(site Site) []NodeWiring {
	var all []NodeWiring
	for _, n := range f.Nodes() {
		w := NodeWiring{Node: n, Sysctls: sysctls(n.Kind)}
		if n.Kind == KindServer {
			for g := range f.GPUs {
				w.Loopbacks = append(w.Loopbacks, f.Loopback(n.Index, g))
			}
		} else {
			w.Sysctls = append(w.Sysctls, hashSeed(n))
		}
		for _, c := range f.At(n) {
			here, _ := c.At(n)
			d := Device{Name: here.Device, Index: c.index(here), Addr: netip.PrefixFrom(here.Addr, 31)}
			if site.Speeds == "tbf" {
				d.Rate = site.scaled(c.Speed)
			}
			w.Devices = append(w.Devices, d)
		}
		all = append(all, w)
	}
	return all
}

func (c *Cable) index(end *End) int {
	if end == &c.Down {
		return firstIndex + 2*c.Index
	}
	return firstIndex + 2*c.Index + 1
}

// sysctls are those that a node's part in the fabric needs. A reply may come by another plane than what it answers, so reverse
// path filters are off.
func sysctls(k Kind) []Sysctl {
	filters := []Sysctl{{"net.ipv4.conf.all.rp_filter", "0"}, {"net.ipv4.conf.default.rp_filter", "0"}}
	if k == KindServer {
		return append([]Sysctl{{"net.ipv4.ip_forward", "0"}}, filters...)
	}
	// Addresses, protocol and ports (Documentation/networking/ip-sysctl.rst), and not the hash of a sender's socket, which a packet
	// carries through a veth pair.
	return append([]Sysctl{
		{"net.ipv4.ip_forward", "1"}, {"net.ipv4.fib_multipath_hash_policy", "3"}, {"net.ipv4.fib_multipath_hash_fields", "0x37"},
	}, filters...)
}

// HashSeed is the setting that kernels before Linux 6.11 do not have.
const HashSeed = "net.ipv4.fib_multipath_hash_seed"

// hashSeed makes each node hash by a seed of its own (Linux 6.11). Otherwise all kernels of one machine draw the same one, and of the
// flows that a leaf sends to a spine the next leaf sees only those of one hash, and sends them to one sub-port. A server's data
// plane sets the seed where it is zero.
func hashSeed(n *Node) Sysctl {
	return Sysctl{HashSeed, fmt.Sprint(binary.BigEndian.Uint32(n.ID.AsSlice()))}
}

// IP are the lines for `ip -batch` that give a node its addresses and set its devices up.
func (w NodeWiring) IP() []string {
	lines := []string{"link set lo up"}
	for _, a := range w.Loopbacks {
		lines = append(lines, fmt.Sprintf("addr add %s dev lo", a))
	}
	for _, d := range w.Devices {
		lines = append(lines, fmt.Sprintf("addr add %s dev %s", d.Addr, d.Name), fmt.Sprintf("link set %s up", d.Name))
	}
	return lines
}

// TC are the lines for `tc -batch` that give a node's devices their rates; none where they have none.
func (w NodeWiring) TC() []string {
	var lines []string
	for _, d := range w.Devices {
		if d.Rate > 0 {
			// A burst of 10 ms, so that the kernel's timer tick does not slow the device down; at least one large packet.
			lines = append(lines, fmt.Sprintf("qdisc add dev %s root tbf rate %dbit burst %d latency 50ms", d.Name, d.Rate, max(d.Rate/8/100, 64<<10)))
		}
	}
	return lines
}

// Pairs are the lines for `ip -batch` that make the cables between network namespaces, as veth pairs; netns names a node's.
func (f *Fabric) Pairs(netns func(node string) string) []string {
	lines := make([]string, len(f.Cables))
	for i, c := range f.Cables {
		lines[i] = fmt.Sprintf("link add name %s index %d netns %s type veth peer name %s index %d netns %s",
			c.Down.Device, c.index(&c.Down), netns(c.Down.Node.Name), c.Up.Device, c.index(&c.Up), netns(c.Up.Node.Name))
	}
	return lines
}

// netnsName is the network namespace of a node in the script.
func (f *Fabric) netnsName(node string) string { return f.Name + "-" + node }

// NetnsScript is a script that makes the fabric of network namespaces and veth pairs (up), and removes it (down).
func (f *Fabric) NetnsScript(site Site) File {
	var t text
	t.line("#!/bin/sh\n# Network namespaces and cables of the fabric %s, generated from its description. It needs root, iproute2 and procps.", f.Name)
	t.line("# up makes them; down ends what runs in them and removes them.")
	t.line("set -eu\n\nnodes='%s'\n", strings.Join(f.nodeNames(), " "))
	t.line("down() {\n  for node in $nodes; do\n    ip netns pids %s-$node 2>/dev/null | xargs -r kill || true\n    ip netns del %s-$node 2>/dev/null || true\n  done\n}\n", f.Name, f.Name)
	t.line("up() {\n  trap down EXIT # what fails leaves nothing behind\n  for node in $nodes; do ip netns add %s-$node; done", f.Name)
	batch := func(command string, lines []string) {
		if len(lines) > 0 {
			t.line("  %s -batch - <<'END'\n%s\nEND", command, strings.Join(lines, "\n"))
		}
	}
	wiring := f.Wiring(site)
	for _, w := range wiring { // before the devices, which copy some when they are made
		settings := make([]string, len(w.Sysctls))
		for i, s := range w.Sysctls {
			settings[i] = s.Name + "=" + s.Value
		}
		t.line("  ip netns exec %s sysctl -eqw %s", f.netnsName(w.Node.Name), strings.Join(settings, " "))
	}
	batch("ip", f.Pairs(f.netnsName))
	for _, w := range wiring {
		netns := f.netnsName(w.Node.Name)
		batch("ip -n "+netns, w.IP())
		batch("tc -n "+netns, w.TC())
	}
	t.line("  trap - EXIT\n}\n")
	t.line("case \"${1:-}\" in\n  up | down) \"$1\" ;;\n  *) echo \"usage: $0 up|down\" >&2; exit 2 ;;\nesac")
	return File{"netns.sh", t.String()}
}

func (f *Fabric) nodeNames() []string {
	var all []string
	for _, n := range f.Nodes() {
		all = append(all, n.Name)
	}
	return all
}
