package topo

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strings"

	"github.com/fared/fared/fare"
)

// NodeWiring is the kernel configuration of a node before any program runs on it.
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
	// Index is the interface index (ifindex) in network namespaces, the same at both ends of a cable. So ifindex equals
	// iflink, as for a physical NIC, and the kernel announces a lost carrier as late as it does there
	// (net/core/link_watch.c). Containers have other indexes, which are equal at both ends, too (Fabric.Clab).
	Index int
	Addrs []netip.Prefix // a /31, a /127, or both
	Rate  fare.Bandwidth // rate of its tbf qdisc, in bit/s; 0: no qdisc
}

// firstIndex leaves room for the devices that exist in every namespace.
const firstIndex = 100

// Wiring returns the wiring of every node, in the order of Nodes. Devices have qdiscs if these are the source of the
// site's speeds.
func (f *Fabric) Wiring(site Site) []NodeWiring {
	var all []NodeWiring
	for _, n := range f.Nodes() {
		w := NodeWiring{Node: n, Sysctls: f.sysctls(n.Kind)}
		if n.Kind == KindServer {
			for g := range f.GPUs {
				w.Loopbacks = append(w.Loopbacks, f.LoopbacksAt(n.Index, g)...)
			}
		} else {
			w.Sysctls = append(w.Sysctls, hashSeed(n))
		}
		for _, c := range f.At(n) {
			here, _ := c.At(n)
			d := Device{Name: here.Device, Index: c.index()}
			for _, a := range here.Addrs() {
				d.Addrs = append(d.Addrs, OnCable(a))
			}
			if site.RateScale > 0 {
				d.Rate = max(c.Speed/fare.Bandwidth(site.RateScale), 1)
			}
			w.Devices = append(w.Devices, d)
		}
		all = append(all, w)
	}
	return all
}

func (c *Cable) index() int { return firstIndex + c.Index }

// sysctls returns the settings that a node's role requires. A reply may use another plane than its request, so reverse
// path filters are off.
func (f *Fabric) sysctls(k Kind) []Sysctl {
	filters := []Sysctl{{"net.ipv4.conf.all.rp_filter", "0"}, {"net.ipv4.conf.default.rp_filter", "0"}}
	if f.speaks6() {
		filters = append(filters, sysctls6...)
		if k != KindServer {
			filters = append(filters, Sysctl{"net.ipv6.conf.all.forwarding", "1"}, Sysctl{"net.ipv6.fib_multipath_hash_policy", "3"}, Sysctl{"net.ipv6.fib_multipath_hash_fields", "0x37"})
		}
	}
	if k == KindServer {
		return append([]Sysctl{{"net.ipv4.ip_forward", "0"}}, filters...)
	}
	// The hash covers addresses, protocol and ports (Documentation/networking/ip-sysctl.rst), and not the hash of a
	// sender's socket, which a packet carries through a veth pair.
	return append([]Sysctl{
		{"net.ipv4.ip_forward", "1"}, {"net.ipv4.fib_multipath_hash_policy", "3"}, {"net.ipv4.fib_multipath_hash_fields", "0x37"},
	}, filters...)
}

// sysctls6 are the settings of every node with IPv6 addresses. Docker disables IPv6 in containers without an IPv6
// network. By default, a device that is set down loses its addresses, and gets them back a second late, after duplicate
// address detection (RFC 4862).
var sysctls6 = []Sysctl{
	{"net.ipv6.conf.all.disable_ipv6", "0"}, {"net.ipv6.conf.default.disable_ipv6", "0"}, {"net.ipv6.conf.all.keep_addr_on_down", "1"},
	{"net.ipv6.conf.all.accept_dad", "0"}, {"net.ipv6.conf.default.accept_dad", "0"},
}

// HashSeed is a setting that kernels before Linux 6.11 do not have.
const HashSeed = "net.ipv4.fib_multipath_hash_seed"

// hashSeed gives each node a distinct hash seed (Linux 6.11). By default all kernels of one machine use the same one.
// Then all flows that a leaf sends to one spine select the same member at the next leaf too, which sends them all to
// one sub-port. A server's data plane sets the seed if it is zero.
func hashSeed(n *Node) Sysctl {
	return Sysctl{HashSeed, fmt.Sprint(binary.BigEndian.Uint32(n.ID.AsSlice()))}
}

// IP returns the lines for `ip -batch` that give a node its addresses and set its devices up.
func (w NodeWiring) IP() []string {
	lines := []string{"link set lo up"}
	add := func(a netip.Prefix, device string) {
		line := fmt.Sprintf("addr add %s dev %s", a, device)
		if a.Addr().Is6() {
			line += " nodad"
		}
		lines = append(lines, line)
	}
	for _, a := range w.Loopbacks {
		add(a, "lo")
	}
	for _, d := range w.Devices {
		for _, a := range d.Addrs {
			add(a, d.Name)
		}
		lines = append(lines, fmt.Sprintf("link set %s up", d.Name))
	}
	return lines
}

// TC returns the lines for `tc -batch` that give a node's devices their rates, or none.
func (w NodeWiring) TC() []string {
	var lines []string
	for _, d := range w.Devices {
		if d.Rate > 0 {
			// A burst of 10 ms, so that the kernel's timer tick does not slow the device down, and of at least one
			// large packet.
			lines = append(lines, fmt.Sprintf("qdisc add dev %s root tbf rate %dbit burst %d latency 50ms", d.Name, d.Rate, max(d.Rate/8/100, 64<<10)))
		}
	}
	return lines
}

// Pairs returns the lines for `ip -batch` that create the cables between network namespaces, as veth pairs; netns
// returns a node's namespace.
func (f *Fabric) Pairs(netns func(node string) string) []string {
	lines := make([]string, len(f.Cables))
	for i, c := range f.Cables {
		lines[i] = fmt.Sprintf("link add name %s index %d netns %s type veth peer name %s index %d netns %s",
			c.Down.Device, c.index(), netns(c.Down.Node.Name), c.Up.Device, c.index(), netns(c.Up.Node.Name))
	}
	return lines
}

// netnsName returns the network namespace of a node in the script.
func (f *Fabric) netnsName(node string) string { return f.Name + "-" + node }

// NetnsScript returns a script that creates the fabric from network namespaces and veth pairs (up), and removes it
// (down).
func (f *Fabric) NetnsScript(site Site) File {
	var t text
	t.line("#!/bin/sh\n# Network namespaces and cables of the fabric %s, generated from its description. It needs root, iproute2 and procps.", f.Name)
	t.line("# up makes them; down ends their processes and removes them.")
	t.line("set -eu\n\nnodes='%s'\n", strings.Join(f.nodeNames(), " "))
	t.line("down() {\n  for node in $nodes; do\n    ip netns pids %s-$node 2>/dev/null | xargs -r kill || true\n    ip netns del %s-$node 2>/dev/null || true\n  done\n}\n", f.Name, f.Name)
	t.line("up() {\n  trap down EXIT # a failure leaves nothing behind\n  for node in $nodes; do ip netns add %s-$node; done", f.Name)
	batch := func(command string, lines []string) {
		if len(lines) > 0 {
			t.line("  %s -batch - <<'END'\n%s\nEND", command, strings.Join(lines, "\n"))
		}
	}
	wiring := f.Wiring(site)
	for _, w := range wiring { // before the devices, which copy some settings when they are created
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
