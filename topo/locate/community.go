package locate

import (
	"fmt"

	"github.com/fared/fared/topo"
)

// communities finds the parts whose routes have bandwidths that do not count: a server whose own routes alone are
// concerned, a leaf, or one session.
func (l *Locator) communities(views map[*topo.Node]*View, hard hardFaults) []Guilty {
	n := len(l.fabric.Cables)
	failed, up, reasons := make([]bool, n), make([]bool, n), map[int]string{}
	origins := map[int][]int{} // cables by server
	for _, server := range l.fabric.Server {
		v := views[server]
		if v == nil {
			continue
		}
		for i, c := range l.fabric.At(server) {
			if i >= len(v.Ports) || hard.cables[c.Index].state != Up {
				continue
			}
			p := &v.Ports[i]
			if failed[c.Index], up[c.Index] = p.Ignored != "", p.Ignored == ""; p.Ignored == "" {
				continue
			}
			reasons[c.Index] = p.Ignored
			if p.Origin > 0 && p.Origin <= len(l.fabric.Server) {
				origins[p.Origin-1] = append(origins[p.Origin-1], c.Index)
			}
		}
	}
	var extra []part
	for i, node := range l.fabric.Server { // in order
		if len(origins[i]) > 0 {
			extra = append(extra, part{node.Name, server, sorted(origins[i])})
		}
	}
	var all []Guilty
	for _, c := range l.cover(failed, up, extra) {
		g := Guilty{Part: c.name, Kind: c.kind, Fault: FaultCommunity, Confidence: sure(c.margin)}
		for _, i := range c.cables {
			if r := reasons[i]; r != "" {
				g.Evidence = []string{fmt.Sprintf("bandwidths of routes on %d sessions do not count: %s", c.failed, r)}
				break
			}
		}
		all = append(all, g)
	}
	return all
}
