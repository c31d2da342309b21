package topo

import (
	"slices"
	"strconv"
	"strings"
)

// SpecFile is the name of the description among generated files.
const SpecFile = "fabric.yaml"

// ClabFile returns the name of the fabric's containerlab topology file.
func (f *Fabric) ClabFile() string { return f.Name + ".clab.yml" }

// role is the common part of nodes of one kind and software in a containerlab topology file, where it becomes a group.
type role struct {
	image string
	cmd   string // "" means the image's command
	exec  []string
	binds [][2]string // a file of the node, and its path in the container
	// sysctls in addition to those of the wiring. /proc/sys is read-only in a container that is not privileged, so
	// settings that a data plane otherwise makes itself must be correct from the start.
	sysctls []Sysctl
}

// role returns the role of a node.
func (f *Fabric) role(n *Node) role {
	switch f.Software(n) {
	case FRR:
		r := role{
			image: "${FRR_IMAGE:=fared-frr:local}",
			// The daemons that FRR's init script starts, but a daemon that has died is restarted after a second, and
			// one that takes more than 20 s to start, on a busy machine, is not killed for that.
			cmd: "/usr/lib/frr/watchfrr --interval 1 --min-restart-interval 1 --max-restart-interval 1 --restart-timeout 600 zebra bgpd staticd",
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
		exec:    []string{"/fared netsetup" + f.matchIndex(n.Kind)},
		binds:   [][2]string{{ConfigFile, "/etc/fared/fared.yaml"}},
		sysctls: []Sysctl{{"net.ipv4.nexthop_compat_mode", "0"}},
	}
	if n.Kind == KindServer || !f.speaks6() { // the wiring of the other nodes includes this setting
		r.sysctls = append(r.sysctls, Sysctl{"net.ipv6.fib_multipath_hash_policy", "1"})
	}
	if n.Kind == KindServer {
		r.cmd = "supervise -- dataplane --driver linux -- run"
		r.sysctls = append(r.sysctls, Sysctl{"net.ipv4.fib_multipath_hash_policy", "1"})
	}
	return r
}

// matchIndex returns the option of `fared netsetup` that gives both ends of a cable the same interface index.
// containerlab creates veth pairs in the host's namespace, where each end gets a different index. The option is set at
// one end of each cable: at the lower end if fared runs there, otherwise at the upper end. A cable without fared at
// either end keeps two indexes.
func (f *Fabric) matchIndex(k Kind) string {
	switch {
	case k == KindServer, k == KindSpine && f.Spec.Leaf != Fared:
		return " --match-index *"
	case k == KindLeaf && f.Spines > 0:
		return " --match-index up*" // only the devices toward spines have such names
	}
	return ""
}

// addressFile holds lines for `ip -batch`, for a node whose software sets no addresses.
const addressFile = "addresses"

// Clab returns the containerlab topology file. Paths in it are relative to its folder, in which nodes/NODE holds each
// node's files.
//
// Nodes have no network except their cables. Environment variables name the images (FARED_IMAGE, FRR_IMAGE,
// BIRD_IMAGE).
func (f *Fabric) Clab() File {
	var t text
	t.line("# The fabric %s, generated from %s in this directory: containerlab deploy -t %s", f.Name, SpecFile, f.ClabFile())
	t.line("name: %s\ntopology:\n  defaults:\n    kind: linux\n    network-mode: none", f.Name)
	t.line("    restart-policy: \"no\" # a restarted container has no cables\n    cap-add: [NET_ADMIN, NET_RAW, SYS_ADMIN]")
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
		for _, s := range slices.Concat(f.sysctls(kind), r.sysctls) {
			t.line("        %s: %q", s.Name, s.Value)
		}
	}
	t.line("  nodes:")
	for _, n := range f.Nodes() {
		t.line("    %s:\n      group: %s", n.Name, n.Kind)
		if f.Spines > 0 && n.Kind != KindServer {
			// Docker rejects a setting that the kernel does not have, so it is used only with spines, where it has an
			// effect.
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
