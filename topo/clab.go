package topo

import (
	"slices"
	"strconv"
	"strings"
)

// SpecFile is the name of the description among generated files.
const SpecFile = "fabric.yaml"

// ClabFile is the name of the fabric's containerlab topology file.
func (f *Fabric) ClabFile() string { return f.Name + ".clab.yml" }

// role is what nodes of one kind and one software have in common in a containerlab topology file, where it is a group.
type role struct {
	image string
	cmd   string // "": the image's
	exec  []string
	binds [][2]string // a file of the node, and where it is in the container
	// sysctls beside those of the wiring. /proc/sys cannot be written in a container that is not privileged, so what a data plane sets
	// itself elsewhere has to be right from the start.
	sysctls []Sysctl
}

// role is that of a node.
func (f *Fabric) role(n *Node) role {
	switch f.Software(n) {
	case FRR:
		r := role{
			image: "${FRR_IMAGE:=fared-frr:local}",
			// What init scripts of FRR start too, but daemons that died are started again after a second.
			cmd: "/usr/lib/frr/watchfrr --interval 1 --min-restart-interval 1 --max-restart-interval 1 zebra bgpd staticd",
		}
		if f.BFD > 0 {
			r.cmd += " bfdd"
		}
		for _, file := range []string{"frr.conf", "daemons", "vtysh.conf"} {
			r.binds = append(r.binds, [2]string{file, "/etc/frr/" + file})
		}
		return r
	case BIRD:
		return role{
			image: "${BIRD_IMAGE:=fared-bird:local}",
			exec:  []string{"ip -batch /etc/bird/" + addressFile},
			binds: [][2]string{{"bird.conf", "/etc/bird/bird.conf"}, {addressFile, "/etc/bird/" + addressFile}},
		}
	}
	r := role{
		image:   "${FARED_IMAGE:=fared:local}",
		cmd:     "supervise -- dataplane --driver linux -- leaf",
		exec:    []string{"/fared netsetup"},
		binds:   [][2]string{{ConfigFile, "/etc/fared/fared.yaml"}},
		sysctls: []Sysctl{{"net.ipv4.nexthop_compat_mode", "0"}, {"net.ipv6.fib_multipath_hash_policy", "1"}},
	}
	if n.Kind == KindServer {
		r.cmd = "supervise -- dataplane --driver linux -- run"
		r.sysctls = append(r.sysctls, Sysctl{"net.ipv4.fib_multipath_hash_policy", "1"})
	}
	return r
}

// addressFile holds lines for `ip -batch`, for a node whose software sets no addresses.
const addressFile = "addresses"

// Clab is the containerlab topology file. Paths in it are relative to its folder, where each node's files are in nodes/NODE.
//
// Nodes have no network but their cables. Images are named by variables of the environment (FARED_IMAGE, FRR_IMAGE, BIRD_IMAGE).
func (f *Fabric) Clab() File {
	var t text
	t.line("# The fabric %s, generated from %s beside it: containerlab deploy -t %s", f.Name, SpecFile, f.ClabFile())
	t.line("name: %s\ntopology:\n  defaults:\n    kind: linux\n    network-mode: none", f.Name)
	t.line("    restart-policy: \"no\" # a container that starts again has lost its cables\n    cap-add: [NET_ADMIN, NET_RAW, SYS_ADMIN]")
	t.line("  groups:")
	for _, list := range [][]*Node{f.Server, f.Leaf, f.Spine} {
		if len(list) == 0 {
			continue
		}
		kind, r := list[0].Kind, f.role(list[0])
		t.line("    %s:\n      image: %s", kind, r.image)
		if r.cmd != "" {
			t.line("      cmd: %s", r.cmd)
		}
		if r.exec != nil {
			t.line("      exec: [%s]", strings.Join(r.exec, ", "))
		}
		t.line("      sysctls:")
		for _, s := range slices.Concat(sysctls(kind), r.sysctls) {
			t.line("        %s: %q", s.Name, s.Value)
		}
	}
	t.line("  nodes:")
	for _, n := range f.Nodes() {
		t.line("    %s:\n      group: %s", n.Name, n.Kind)
		if f.Spines > 0 && n.Kind != KindServer {
			// Docker refuses a setting that the kernel does not have: only where there is something to gain.
			t.line("      sysctls: {%s: \"%s\"} # Linux 6.11", hashSeed(n).Name, hashSeed(n).Value)
		}
		t.line("      binds:")
		for _, b := range f.role(n).binds {
			t.line("        - nodes/%s/%s:%s:ro", n.Name, b[0], b[1])
		}
	}
	t.line("  links:")
	for _, c := range f.Cables {
		t.line("    - endpoints: [%s, %s]", strconv.Quote(c.Down.Node.Name+":"+c.Down.Device), strconv.Quote(c.Up.Node.Name+":"+c.Up.Device))
	}
	return File{f.ClabFile(), t.String()}
}
