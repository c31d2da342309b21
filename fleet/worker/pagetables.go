package worker

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	fleetv1 "github.com/fared/fared/api/fleet/v1"
	"github.com/fared/fared/daemon/page"
	"github.com/fared/fared/topo"
	"github.com/fared/fared/topo/locate"
)

const (
	// block is the number of nodes of a row of the drawing: a change sends the rows that differ.
	block = 64
	// maxRows bounds each list.
	maxRows = 100
	// worst is the number of pairs and of probes in the lists.
	worst = 20
)

// headRow is the row of the table "head".
type headRow struct {
	Fabric            string   `json:"fabric"`
	Servers           int      `json:"servers"`
	ServersReporting  int      `json:"servers_reporting"`
	Switches          int      `json:"switches"`
	SwitchesReporting int      `json:"switches_reporting"`
	Faults            int      `json:"faults"`
	Pairs             []uint64 `json:"pairs_by_planes"`
	Problems          []string `json:"problems"`
}

// faultRow is a row of the table "faults". Nodes are those that the drawing marks.
type faultRow struct {
	*fleetv1.Fault
	Since int64    `json:"since_ms"`
	Nodes []string `json:"nodes"`
}

// probeRow is a row of the table "probes".
type probeRow struct {
	From   string  `json:"from"`
	To     string  `json:"to"`
	Plane  string  `json:"plane"`
	Lost   float64 `json:"lost"`
	Probes float64 `json:"probes"`
}

// tables returns everything that a browser shows.
func (w *Worker) tables(moments []moment) map[string]page.Table {
	views, _ := w.views()
	found := w.found.Load()
	all, byPlanes := w.directions(views)
	head := headRow{Fabric: w.fabric.Title(), Servers: w.fabric.Servers, Switches: len(w.fabric.Leaf) + len(w.fabric.Spine), Faults: len(found.faults), Pairs: byPlanes, Problems: append([]string{}, w.problems()...)}
	for n := range views {
		if n.Kind == topo.KindServer {
			head.ServersReporting++
		} else {
			head.SwitchesReporting++
		}
	}
	out := map[string]page.Table{"head": {page.NewRow("head", head)}, "faults": w.faultRows(found.faults), "drains": w.drainRows(views),
		"nodes": w.drawing(views), "pairs": w.pairRows(all), "probes": {}, "timeline": {}}
	for i, p := range w.worstProbes(views) {
		out["probes"] = append(out["probes"], page.NewRow(fmt.Sprint(i), p))
	}
	for _, m := range moments {
		out["timeline"] = append(out["timeline"], page.NewRow(fmt.Sprint(m.Number), m))
	}
	return out
}

func (w *Worker) faultRows(faults []*fleetv1.Fault) (rows page.Table) {
	for _, f := range faults[:min(len(faults), maxRows)] {
		row := faultRow{Fault: f, Since: int64(f.SinceNs / 1e6), Nodes: []string{}}
		for _, part := range append([]string{f.Part}, f.Alternatives...) {
			row.Nodes = append(row.Nodes, w.nodesOf(part)...)
		}
		row.Nodes = row.Nodes[:min(len(row.Nodes), maxRows)]
		rows = append(rows, page.NewRow(f.Part+" "+f.Fault, row))
	}
	return rows
}

// nodesOf returns the nodes that the drawing marks for a part: the node itself, or the lower ends of its cables.
func (w *Worker) nodesOf(part string) (names []string) {
	name, rest, pair := strings.Cut(part, "->")
	if pair {
		to, _, _ := strings.Cut(rest, " ")
		return []string{name, to}
	}
	if w.fabric.Node(part) != nil {
		return []string{part}
	}
	found, _ := w.fabric.Find(part) // an unknown part has none
	for _, c := range found {
		if !slices.Contains(names, c.Down.Node.Name) && len(names) < maxRows {
			names = append(names, c.Down.Node.Name)
		}
	}
	return names
}

// drainRow is a row of the table "drains".
type drainRow struct {
	Part    string `json:"part"`
	By      string `json:"by"`
	Reason  string `json:"reason"`
	Drained int    `json:"drained"`
	All     int    `json:"sub_ports"`
	Queued  bool   `json:"queued"`
}

func (w *Worker) drainRows(views map[*topo.Node]*locate.View) page.Table {
	rows := page.Table{}
	if granted := w.granted.Load(); granted != nil {
		for _, d := range granted.Drains[:min(len(granted.Drains), maxRows)] {
			all, drained := w.progress(d.Part, views)
			rows = append(rows, page.NewRow(d.Part, drainRow{d.Part, d.By, d.Reason, drained, all, d.Queued}))
		}
	}
	return rows
}

// pairRows returns the directions with the fewest planes.
func (w *Worker) pairRows(all []direction) page.Table {
	worstFirst(all)
	groups := w.fabric.Groups()
	rows := page.Table{}
	for _, d := range all[:min(len(all), worst)] {
		row := pathShown{groups[d.From].Name, groups[d.First].Name, groups[d.Last].Name, d.planes, uint64(d.sum)}
		rows = append(rows, page.NewRow(row.From+" "+row.First, row))
	}
	return rows
}

// worstProbes returns the destinations with the greatest parts of lost probes.
func (w *Worker) worstProbes(views map[*topo.Node]*locate.View) []probeRow {
	groups := w.fabric.Groups()
	rows := []probeRow{}
	for _, n := range w.fabric.Server {
		if v := views[n]; v != nil {
			for _, x := range v.Lost {
				rows = append(rows, probeRow{groups[x.From].Name, groups[x.To].Name, w.fabric.PlaneName(x.Plane), x.Lost, x.Probes})
			}
		}
	}
	slices.SortStableFunc(rows, func(a, b probeRow) int { return cmp.Compare(b.Lost*a.Probes, a.Lost*b.Probes) })
	return rows[:min(len(rows), worst)]
}

// cell is a block of nodes in the drawing: a letter for each. "." is up, "?" does not report, "d" drained; "1" to "9"
// are the planes of a server with a failed cable, or tenths of a switch's cables, rounded up.
type cell struct {
	Row    string   `json:"row"` // "servers", or the plane of switches
	Names  []string `json:"names"`
	States string   `json:"states"`
}

// drawing returns the states of all nodes, in blocks.
func (w *Worker) drawing(views map[*topo.Node]*locate.View) (rows page.Table) {
	worst := w.cableStates(views)
	var open *cell
	flush := func() {
		if open != nil {
			rows = append(rows, page.NewRow(open.Names[0], open))
		}
		open = nil
	}
	for _, list := range [][]*topo.Node{w.fabric.Spine, w.fabric.Leaf, w.fabric.Server} {
		for _, n := range list {
			row := [...]string{"servers", "leaves", "spines"}[n.Kind]
			if n.Plane >= 0 {
				row += " " + w.fabric.PlaneName(n.Plane)
			}
			if open == nil || open.Row != row || len(open.Names) == block {
				flush()
				open = &cell{Row: row}
			}
			open.Names = append(open.Names, n.Name)
			open.States += string(w.letter(n, views[n] != nil, worst))
		}
		flush()
	}
	return rows
}

// letter returns the state of a node in the drawing.
func (w *Worker) letter(n *topo.Node, reports bool, worst []locate.State) byte {
	failed, drained, all := 0, 0, w.fabric.At(n)
	planes := map[int]bool{}
	for _, c := range all {
		switch worst[c.Index] {
		case locate.Silent, locate.Dark:
			failed++
			planes[c.Plane] = true
		case locate.Drained:
			drained++
		}
	}
	switch {
	case failed > 0 && n.Kind == topo.KindServer:
		return byte('0' + min(len(planes), 9))
	case failed > 0:
		return byte('0' + min(1+9*failed/len(all), 9))
	case drained > 0:
		return 'd'
	case !reports && n.Kind == topo.KindServer:
		return '?'
	}
	return '.'
}
