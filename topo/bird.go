package topo

import (
	"fmt"
	"strings"
)

// birdConfig is bird.conf, for BIRD 2. The addresses of devices are not BIRD's to set.
func (f *Fabric) birdConfig(n *Node) string {
	var t text
	t.line("# %s", f.title(n))
	t.line("log stderr all;\nrouter id %s;\nprotocol device {}\n", n.ID)
	t.line("protocol kernel {\n  ipv4 { import none; export all; };\n  merge paths on limit 64;\n}\n")
	t.line("filter loopbacks {\n  if net ~ [ %s{32,32} ] then accept;\n  reject;\n}\n", f.Loopbacks)
	bfd := ""
	if f.BFD > 0 {
		t.line("protocol bfd {\n  interface \"*\" { interval %d ms; multiplier %d; };\n}\n", f.BFD.Milliseconds(), bfdMultiplier)
		bfd = "\n  bfd on;"
	}
	for _, g := range f.groups(n) {
		export := "all"
		if g == spines {
			export = "filter to_spines"
			t.line("# A spine has from the other leaves itself what another spine of the plane says.")
			t.line("filter to_spines {\n  if bgp_path ~ [= * %d * =] then reject;\n  accept;\n}\n", f.SpineAS+uint32(n.Plane))
		}
		t.line("template bgp %s {\n  hold time 9; keepalive time 3;%s", g, bfd)
		t.line("  connect delay time 1; connect retry time 1; error wait time 1, 1;")
		t.line("  ipv4 { import filter loopbacks; export %s; };\n}\n", export)
	}
	for _, c := range f.At(n) {
		here, there := c.At(n)
		name := birdName.Replace(there.Node.Name)
		if !c.Uplink() {
			name += fmt.Sprintf("_%d", c.Sub)
		}
		t.line("protocol bgp %s from %s { local %s as %d; neighbor %s as %d; }", name, group(there.Node), here.Addr, n.AS, there.Addr, there.Node.AS)
	}
	return t.String()
}

// birdName makes a name of what may not hold a dash.
var birdName = strings.NewReplacer("-", "_")
