package topo

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/fared/fared/fare"
)

// Site says where the nodes of a fabric run, as far as their configurations have to know. The zero value: on machines of their
// own, over cables of their full speed.
type Site struct {
	// Port is the TCP port of BGP sessions, 1 to 65535; 0: 179, the only one that FRR and BIRD are told of.
	Port int
	// SpeedScale is how many times slower the cables are than the Spec says, for labs; 0: 1. Weights are ratios, so they stay the same.
	SpeedScale uint64
	// Speeds is who tells fared a sub-port's speed: "" for its file, "tbf" for the qdisc of a lab's device (speed_source).
	Speeds string
	// AssumeUp is for cables that no kernel knows (link_state: assume-up). It needs Speeds "".
	AssumeUp bool
	// Socket is where a node's fared answers; nil, or "": the default of api.socket.
	Socket func(node string) string
	// Dataplane is the address of a node's data plane; nil, or "": the default of dataplane.address for its role.
	Dataplane func(node string) string
	// UDPPorts and TCPPorts are servers' dataplane.udp_ports and dataplane.tcp_ports: the destination ports that are steered. nil: the
	// default, RoCEv2's. The first of them is the one that source ports are chosen for.
	UDPPorts, TCPPorts []uint16
	// RestartTime is bgp.restart_time, in whole seconds; 0: no graceful restart.
	RestartTime time.Duration
	// Lab shortens what fared waits for, so that the steps of a lab are short.
	Lab bool
}

// scaled is the speed that a cable has at the site, at least 1 bit/s.
func (s Site) scaled(b fare.Bandwidth) fare.Bandwidth {
	return max(b/fare.Bandwidth(max(s.SpeedScale, 1)), 1)
}

// File is a generated file. A script is a file whose text begins with "#!".
type File struct {
	Name string // relative to the folder it belongs in, with slashes
	Text string
}

// bfdMultiplier is how many packets of BFD in a row have to be missing (RFC 5880, Section 6.8.4).
const bfdMultiplier = 3

// ConfigFile is the name of a node's configuration of fared.
const ConfigFile = "fared.yaml"

// Files are the configuration of a node: fared.yaml; or frr.conf, daemons and vtysh.conf; or bird.conf.
//
// Of each cable's two ends the lower one connects: a server to its leaf, a leaf to its spine; fared's upper end is passive.
//
// frr.conf is FRR's integrated configuration. zebra and bgpd also take it one by one with -f, and then only log what is meant
// for the other.
func (f *Fabric) Files(n *Node, site Site) []File {
	switch f.Software(n) {
	case FRR:
		return f.frrFiles(n, site)
	case BIRD:
		return []File{{"bird.conf", f.birdConfig(n)}}
	}
	return []File{{ConfigFile, f.faredConfig(n, site)}}
}

// group names the nodes at the other ends of some of a node's cables: servers or leaves below it, spines above it.
func group(there *Node) string { return [...]string{"servers", "leaves", spines}[there.Kind] }

// groups are those of a node, the ones below it first.
func (f *Fabric) groups(n *Node) []string {
	var all []string
	for _, c := range f.At(n) {
		if _, there := c.At(n); !slices.Contains(all, group(there.Node)) {
			all = append(all, group(there.Node))
		}
	}
	return all
}

// spines is the group above a leaf.
const spines = "spines"

// text collects lines.
type text struct{ strings.Builder }

func (t *text) line(format string, args ...any) { fmt.Fprintf(t, format+"\n", args...) }

// title says what a file is, after the mark of a comment.
func (f *Fabric) title(n *Node) string {
	where := ""
	if n.Plane >= 0 {
		where = " in plane " + f.PlaneName(n.Plane)
	}
	return fmt.Sprintf("%s%s of the fabric %s, generated from its description.", n.Name, where, f.Name)
}

// faredConfig is fared.yaml: that of `fared run` for a server, of `fared leaf` for a leaf or spine, which are the same to it.
func (f *Fabric) faredConfig(n *Node, site Site) string {
	var t text
	t.line("# %s", f.title(n))
	role := "leaf"
	if n.Kind == KindServer {
		role = "server"
	}
	t.line("role: %s\nrouter_id: %s\nas: %d", role, n.ID, n.AS)
	if n.Kind == KindServer {
		t.line("loopbacks:")
		for g := range f.GPUs {
			t.line("  - %s", f.Loopback(n.Index, g))
		}
	}
	t.line("accept: [%s]", f.Loopbacks)
	if site.Lab {
		t.line("drain_delay: 200ms\nstart: {deadline: 20s}")
	}
	var bgp []string
	if site.Lab {
		bgp = append(bgp, "connect_retry: 200ms")
	}
	if site.RestartTime > 0 {
		// So that a neighbour which can keeps the routes of a node whose control plane has crashed, and says when it has sent all of
		// its own, which FRR does to no other (RFC 4724).
		bgp = append(bgp, "restart_time: "+site.RestartTime.String())
	}
	if n.Kind == KindServer && f.Spec.Leaf == BIRD {
		// BIRD passes on what its best path says and adds nothing up.
		t.line("path_bandwidth: {advertise: node}")
	}
	if bgp != nil {
		t.line("bgp: {%s}", strings.Join(bgp, ", "))
	}
	if f.BFD > 0 {
		t.line("bfd: {interval: %s, multiplier: %d}", f.BFD, bfdMultiplier)
	}
	if n.Kind == KindServer {
		t.line("weights: {mode: %s, policy: %s, ordering: %s}", f.Mode, f.Policy, f.Ordering)
	}
	if dataplane := site.dataplane(n); dataplane != nil {
		t.line("dataplane: {%s}", strings.Join(dataplane, ", "))
	}
	if socket := ask(site.Socket, n); socket != "" {
		t.line("api: {socket: %q}", socket)
	}
	t.line("planes:")
	plane := -1
	for _, c := range f.At(n) {
		if c.Plane != plane {
			plane = c.Plane
			t.line("  - name: %s\n    sub_ports:", f.PlaneName(plane))
		}
		here, there := c.At(n)
		t.line("      - device: %s", here.Device)
		if site.Speeds == "" {
			t.line("        speed: %s", speedText(site.scaled(c.Speed)))
		} else {
			t.line("        speed_source: %s", site.Speeds)
		}
		if site.AssumeUp {
			t.line("        link_state: assume-up")
		}
		if c.Uplink() && n.Kind == KindLeaf {
			t.line("        uplink: true")
		}
		session := fmt.Sprintf("peer: %s, local: %s, peer_as: %d", there.Addr, here.Addr, there.Node.AS)
		if site.Port != 0 {
			session += fmt.Sprintf(", port: %d", site.Port)
		}
		if here == &c.Up {
			session += ", passive: true"
		}
		t.line("        sessions:\n          - {%s}", session)
	}
	return t.String()
}

// ask is what a function of a Site says, "" when there is none.
func ask(say func(string) string, n *Node) string {
	if say == nil {
		return ""
	}
	return say(n.Name)
}

// dataplane are the keys of a node's dataplane section; nil: all have their defaults.
func (s Site) dataplane(n *Node) (keys []string) {
	if address := ask(s.Dataplane, n); address != "" {
		keys = append(keys, fmt.Sprintf("address: %q", address))
	}
	if n.Kind != KindServer {
		return keys
	}
	for _, ports := range []struct {
		key  string
		list []uint16
	}{{"udp_ports", s.UDPPorts}, {"tcp_ports", s.TCPPorts}} {
		if ports.list != nil {
			keys = append(keys, fmt.Sprintf("%s: [%s]", ports.key, strings.Join(strings.Fields(strings.Trim(fmt.Sprint(ports.list), "[]")), ", ")))
		}
	}
	return keys
}
