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
		for _, fam := range f.families4and6() {
			t.line("template bgp %s%s {\n  hold time 9; keepalive time 3;%s", g, fam.suffix, bfd)
			t.line("  connect delay time 1; connect retry time 1; error wait time 1, 1;")
			t.line("  %s { import filter loopbacks%s; export %s; };\n}\n", fam.name, fam.suffix, export)
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
