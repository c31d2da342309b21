package topo

import (
	"fmt"
	"slices"
	"strings"
)

// Site describes the environment of a fabric's nodes, as far as it affects their configurations. The zero value
// describes separate machines with cables of full speed.
type Site struct {
	// Port is the TCP port of BGP sessions, 1 to 65535. 0 means 179, the only one for which FRR and BIRD are
	// configured.
	Port int
	// Lab shortens links.damping to a tenth, as AssumeUp does.
	Lab bool
	// RateScale is the factor by which a lab shapes cables to less than their speed, which fared and its peers
	// advertise nevertheless. 0: not shaped.
	RateScale uint64
	// AssumeUp is for simulated cables without a kernel device (link_state: assume-up), between daemons of one process:
	// none falls silent alone, so bgp.hold_time is long enough for a starved machine.
	AssumeUp bool
	// Socket returns the path of the API socket of a node's fared. If it is nil or returns "", api.socket has its
	// default.
	Socket func(node string) string
	// Dataplane returns the address of a node's data plane. If it is nil or returns "", dataplane.address has the
	// default of the node's role.
	Dataplane func(node string) string
	// UDPPorts and TCPPorts are servers' dataplane.udp_ports and dataplane.tcp_ports: the destination ports that are
	// steered. nil means the default, RoCEv2's port. Source ports are chosen for the first of them.
	UDPPorts, TCPPorts []uint16
	// Quick shortens drain_delay, start.deadline, bgp.connect_retry and links.damping, for labs with short steps.
	Quick bool
}

// File is a generated file. A script is a file whose text begins with "#!".
type File struct {
	Name string // relative to its folder, with slashes
	Text string
}

// bfdMultiplier is the number of consecutive missing BFD packets that take a session down (RFC 5880, Section 6.8.4).
const bfdMultiplier = 3

// ConfigFile is the name of a node's configuration of fared.
const ConfigFile = "fared.yaml"

// Files returns the configuration of a node: fared.yaml; or frr.conf, daemons and vtysh.conf; or bird.conf.
//
// The lower end of each cable connects: a server to its leaf, a leaf to its spine; fared's upper end is passive.
//
// frr.conf is FRR's integrated configuration. zebra and bgpd also accept it individually with -f, and only log the
// lines for the other.
func (f *Fabric) Files(n *Node, site Site) []File {
	switch f.Software(n) {
	case FRR:
		return f.frrFiles(n)
	case BIRD:
		return []File{{"bird.conf", f.birdConfig(n)}}
	}
	return []File{{ConfigFile, f.faredConfig(n, site)}}
}

// peerGroup returns the name of the group of nodes of there's kind: servers or leaves below a node, spines above it.
func peerGroup(there *Node) string { return [...]string{"servers", "leaves", spines}[there.Kind] }

// peerGroups returns the peer groups of a node, those below it first.
func (f *Fabric) peerGroups(n *Node) []string {
	var all []string
	for _, c := range f.At(n) {
		if _, there := c.At(n); !slices.Contains(all, peerGroup(there.Node)) {
			all = append(all, peerGroup(there.Node))
		}
	}
	return all
}

// spines is the group above a leaf.
const spines = "spines"

// text is a builder of lines.
type text struct{ strings.Builder }

func (t *text) line(format string, args ...any) { fmt.Fprintf(t, format+"\n", args...) }

// title returns the heading of a file, without the comment mark.
func (f *Fabric) title(n *Node) string {
	where := ""
	if n.Plane >= 0 {
		where = " in plane " + f.PlaneName(n.Plane)
	}
	return fmt.Sprintf("%s%s of the fabric %s, generated from its description.", n.Name, where, f.Name)
}

// onlyUplinks reports whether a leaf has no server, because there are too few servers for all leaves of a plane: such a
// leaf has no bandwidth to share among its uplinks.
func (f *Fabric) onlyUplinks(leaf *Node) bool {
	return !slices.ContainsFunc(f.At(leaf), func(c *Cable) bool { return !c.Uplink() })
}

// faredConfig returns fared.yaml: for `fared run` on a server, for `fared leaf` on a leaf or a spine, between which it
// does not distinguish.
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
			for _, l := range f.LoopbacksAt(n.Index, g) {
				t.line("  - %s", l)
			}
		}
	}
	t.line("accept: [%s]", strings.Join(texts(f.loopbackNetworks()), ", "))
	if site.Quick {
		t.line("drain_delay: 200ms\nstart: {deadline: 20s}")
	}
	var bgp []string
	if site.Quick {
		bgp = append(bgp, "connect_retry: 200ms")
	}
	if site.AssumeUp {
		bgp = append(bgp, "hold_time: 90s")
	}
	if f.RestartTime > 0 {
		bgp = append(bgp, "restart_time: "+f.RestartTime.String())
	}
	if n.Kind == KindServer && f.SharedAS == SharedServers && f.Spec.Leaf == BIRD {
		bgp = append(bgp, "allow_own_as: 1") // BIRD passes on the AS that all servers share
	}
	var bandwidth []string
	if n.Kind == KindServer && f.Spec.Leaf == BIRD {
		bandwidth = append(bandwidth, "advertise: node") // BIRD passes on the value of its best path and does not sum
	}
	if f.overflows() {
		bandwidth = append(bandwidth, "scale: 1000")
	}
	if bandwidth != nil {
		t.line("path_bandwidth: {%s}", strings.Join(bandwidth, ", "))
	}
	if bgp != nil {
		t.line("bgp: {%s}", strings.Join(bgp, ", "))
	}
	if site.Quick || site.Lab || site.AssumeUp { // a lab fails the same cable every few seconds on purpose
		t.line("links: {damping: {hold: 50ms, longest: 1s, quiet: 2s}}")
	}
	t.line("bfd: {interval: %s, multiplier: %d}", f.BFD, bfdMultiplier)
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
		if n.Kind == KindServer && f.owners() > 1 {
			t.line("        loopbacks: [%s]", strings.Join(texts(f.LoopbacksOf(c.Group)), ", "))
		}
		t.line("        speed: %s", speedText(c.Speed))
		if site.AssumeUp {
			t.line("        link_state: assume-up")
		}
		if c.Uplink() && n.Kind == KindLeaf && !f.onlyUplinks(n) {
			t.line("        uplink: true")
		}
		t.line("        sessions:")
		for _, families := range f.sessions() {
			fam := families[0]
			session := fmt.Sprintf("peer: %q, local: %q, peer_as: %d", there.addr(fam), here.addr(fam), there.Node.AS)
			if fam.bits == 32 {
				session = fmt.Sprintf("peer: %s, local: %s, peer_as: %d", there.Addr, here.Addr, there.Node.AS)
			}
			if f.unnumbered() {
				session = fmt.Sprintf("unnumbered: true, families: [%s], peer_as: %d", strings.Join(names(families), ", "), there.Node.AS)
			}
			if site.Port != 0 {
				session += fmt.Sprintf(", port: %d", site.Port)
			}
			if here == &c.Up {
				session += ", passive: true"
			} else if f.unnumbered() && n.Kind != KindServer {
				session += ", passive: false"
			}
			if here == &c.Up && there.Node.Kind == KindServer && f.SharedAS == SharedServers {
				session += ", as_override: true"
			}
			t.line("          - {%s}", session)
		}
	}
	return t.String()
}

// names returns the names of families.
func names(families []family) (all []string) {
	for _, fam := range families {
		all = append(all, fam.name)
	}
	return all
}

// texts returns the text of each value.
func texts[T fmt.Stringer](values []T) (all []string) {
	for _, v := range values {
		all = append(all, v.String())
	}
	return all
}

// ask returns the result of a function of a Site, or "" if the function is nil.
func ask(say func(string) string, n *Node) string {
	if say == nil {
		return ""
	}
	return say(n.Name)
}

// dataplane returns the keys of a node's dataplane section; nil means that all have their defaults.
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
