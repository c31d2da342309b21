package topo

import (
	"fmt"
	"strings"
)

// birdConfig returns bird.conf, for BIRD 2. BIRD does not set the addresses of
// devices.
func (f *Fabric) birdConfig(n *Node) string {
	var t text
	t.line("# %s", f.title(n))
	t.line("log stderr all;\nrouter id %s;\nprotocol device {}\n", n.ID)
	for _, fam := range f.families4and6() {
		t.line("protocol kernel {\n  %s { import none; export all; };\n  merge paths on limit 64;\n}\n", fam.name)
		t.line("filter loopbacks%s {\n  if net ~ [ %s{%d,%d} ] then accept;\n  reject;\n}\n", fam.suffix, f.loopbackNetwork(fam), fam.bits, fam.bits)
	}
	bfd := ""
	if f.BFD > 0 {
		t.line("protocol bfd {\n  interface \"*\" { interval %d ms; multiplier %d; };\n}\n", f.BFD.Milliseconds(), bfdMultiplier)
		bfd = "\n  bfd on;"
	}
	for _, g := range f.peerGroups(n) {
		export := "all"
		if g == spines {
			export = "filter to_spines"
			t.line("# The spine receives the routes of another spine of the plane from the other leaves itself.")
			t.line("filter to_spines {\n  if bgp_path ~ [= * %d * =] then reject;\n  accept;\n}\n", f.SpineAS+uint32(n.Plane))
		}
		for _, session := range f.sessions() {
			t.line("template bgp %s%s {\n  hold time 9; keepalive time 3;%s", g, session[0].suffix, bfd)
			t.line("  connect delay time 1; connect retry time 1; error wait time 1, 1;")
			more := ""
			if f.unnumbered() {
				more = " next hop self; extended next hop on;"
			}
			for _, fam := range session {
				filter := fam.suffix
				if fam.bits == 128 {
					filter = "6"
				}
				t.line("  %s { import filter loopbacks%s; export %s;%s };", fam.name, filter, export, more)
			}
			t.line("}\n")
		}
	}
	for _, c := range f.At(n) {
		here, there := c.At(n)
		name := birdName.Replace(there.Node.Name)
		if !c.Uplink() {
			if f.owners() > 1 {
				name += "_" + gpuName(c.Group.GPU) // the sub-ports of each GPU are numbered from 0
			}
			name += fmt.Sprintf("_%d", c.Sub)
		}
		if f.unnumbered() { // the other end finds this one by router advertisements, and connects
			t.line("protocol radv { interface %q { min ra interval 3; max ra interval 4; }; }", here.Device)
			t.line("protocol bgp %s from %s { local as %d; neighbor range fe80::/10 as %d; interface %q; dynamic name \"%s_\"; passive on; }",
				name, peerGroup(there.Node), n.AS, there.Node.AS, here.Device, name)
			continue
		}
		for _, fam := range f.families4and6() {
			session := name
			if fam.suffix != "" {
				session += "_v" + fam.suffix
			}
			t.line("protocol bgp %s from %s%s { local %s as %d; neighbor %s as %d; }", session, peerGroup(there.Node), fam.suffix, here.addr(fam), n.AS, there.addr(fam), there.Node.AS)
		}
	}
	return t.String()
}

// birdName replaces the dashes that names in BIRD must not contain.
var birdName = strings.NewReplacer("-", "_")
