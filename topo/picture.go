package topo

import (
	"fmt"
	"strings"

	"github.com/fared/fared/fare"
)

// picture is the content of a drawing: boxes for nodes, and lines for cables. If there are many nodes, one box
// represents all that are alike, and one line their cables, so that the drawing of any fabric stays readable.
type picture struct {
	*Fabric
	boxes []*box // servers, leaves, spines
	lines []*line
	of    map[*Node]*box
}

// box is a node, or some nodes that are alike.
type box struct {
	kind        Kind
	plane       int
	first, last *Node
	count       int
}

// line is a cable between two boxes, or all cables with the same place.
type line struct {
	down, up *box
	plane    int
	gpu      int // owner of a server's cable; 0 otherwise
	count    int
	cables   []*Cable
	speed    fare.Bandwidth
}

// Maximum numbers of nodes with separate boxes.
const (
	maxServerBoxes = 16
	maxSwitchBoxes = 4 // of one kind in a plane
)

func (f *Fabric) picture() *picture {
	p := &picture{Fabric: f, of: map[*Node]*box{}}
	switches := func(list []*Node, inPlane int) {
		for i, n := range list {
			p.add(n, inPlane > maxSwitchBoxes && i%inPlane > 0)
		}
	}
	for i, n := range f.Server {
		p.add(n, f.Servers > maxServerBoxes && i > 0 && (f.Leaves > maxSwitchBoxes || f.leafOf(i, 0) == f.leafOf(i-1, 0)) && f.alike(i, i-1))
	}
	switches(f.Leaf, f.Leaves)
	switches(f.Spine, f.Spines)
	type place struct {
		down, up *box
		gpu, sub int
	}
	known := map[place]*line{}
	for _, c := range f.Cables {
		at := place{down: p.of[c.Down.Node], up: p.of[c.Up.Node]}
		if !c.Uplink() {
			at.gpu, at.sub = c.Group.GPU, c.Sub
		}
		l := known[at]
		if l == nil {
			l = &line{down: at.down, up: at.up, plane: c.Plane, gpu: at.gpu, speed: c.Speed}
			known[at] = l
			p.lines = append(p.lines, l)
		}
		l.count++
		l.cables = append(l.cables, c)
	}
	return p
}

// alike reports whether two servers have the same ports.
func (f *Fabric) alike(a, b int) bool {
	for owner := range f.owners() {
		for p := range f.Planes {
			x, y := f.groups[a*f.owners()+owner].Planes[p], f.groups[b*f.owners()+owner].Planes[p]
			if len(x) != len(y) || len(x) > 0 && x[0].Speed != y[0].Speed {
				return false
			}
		}
	}
	return true
}

// add draws a node, in the box of the previous one if together is set, otherwise in a new box.
func (p *picture) add(n *Node, together bool) {
	if !together {
		p.boxes = append(p.boxes, &box{kind: n.Kind, plane: n.Plane, first: n})
	}
	b := p.boxes[len(p.boxes)-1]
	b.last = n
	b.count++
	p.of[n] = b
}

// label returns a box's name.
func (b *box) label() string {
	if b.count == 1 {
		return b.first.Name
	}
	return b.first.Name + " … " + b.last.Name
}

// Title returns a description of a fabric in one line.
func (f *Fabric) Title() string {
	parts := []string{several(f.Servers, "server") + " with " + several(f.GPUs, "GPU") + " each", several(f.Planes, "plane")}
	switches := several(f.Leaves, "leaf") + " (" + f.Spec.Leaf + ")"
	if f.Spines > 0 {
		switches += " and " + several(f.Spines, "spine") + " (" + f.Spec.Spine + ")"
	}
	parts = append(parts, switches+" a plane")
	owner := "server"
	if f.owners() > 1 {
		owner = "GPU"
	}
	cables := fmt.Sprintf("%d × %s a %s and plane", f.SubPorts, f.Speed, owner)
	if f.SubPorts == 2 {
		cables = "Y-cables of " + cables
	}
	parts = append(parts, cables)
	if list, _ := parseOverrides(string(f.Overrides)); len(list) > 0 {
		parts = append(parts, several(len(list), "override"))
	}
	if f.Spines > 0 {
		parts = append(parts, "uplinks of "+f.UplinkSpeed.String())
	}
	switch f.Addresses {
	case IPv6:
		parts = append(parts, "IPv6")
	case Dual:
		parts = append(parts, "IPv4 and IPv6")
	}
	if f.unnumbered() {
		parts = append(parts, "unnumbered cables")
	}
	return f.Name + ": " + strings.Join(parts, ", ")
}

// several returns a number with its noun.
func several(n int, what string) string {
	switch {
	case n == 1:
		return "1 " + what
	case strings.HasSuffix(what, "f"):
		what = strings.TrimSuffix(what, "f") + "ve"
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// colors are the colors of the planes, in turn; they are also distinct for most people with a color vision deficiency
// (Okabe and Ito).
var colors = []string{"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#6a3d9a", "#555555"}

func color(plane int) string { return colors[plane%len(colors)] }

// Dot returns the drawing as a Graphviz graph.
func (f *Fabric) Dot() string {
	p := f.picture()
	var t text
	t.line("graph %q {", f.Name)
	t.line("  graph [label=%q, labelloc=t, fontname=\"sans-serif\", ranksep=1.5];", f.Title())
	t.line("  node [shape=box, style=\"rounded,filled\", fillcolor=white, fontname=\"sans-serif\"];")
	t.line("  edge [fontname=\"sans-serif\", fontsize=9];")
	node := func(indent string, b *box) {
		label := b.label()
		if b.kind == KindServer {
			label += fmt.Sprintf("\n%s", several(b.count*f.GPUs, "GPU"))
		} else if b.count > 1 {
			label += fmt.Sprintf("\n× %d", b.count)
		}
		attributes := fmt.Sprintf("label=%q", label)
		if b.count > 1 {
			attributes += ", peripheries=2"
		}
		t.line("%s%q [%s];", indent, b.first.Name, attributes)
	}
	for plane := -1; plane < f.Planes; plane++ {
		indent := "  "
		if plane >= 0 {
			indent = "    "
			t.line("  subgraph \"cluster_%s\" {\n    graph [label=%q, color=%q];", f.PlaneName(plane), "plane "+f.PlaneName(plane), color(plane))
		}
		for _, b := range p.boxes {
			if b.plane == plane {
				node(indent, b)
			}
		}
		if plane >= 0 {
			t.line("  }")
		}
	}
	for _, l := range p.lines {
		attributes := fmt.Sprintf("color=%q", color(l.plane))
		label := ""
		if f.owners() > 1 && l.down.kind == KindServer {
			label = gpuName(l.gpu)
		}
		if l.count > 1 {
			label = strings.TrimSpace(fmt.Sprintf("%s %d × %s", label, l.count, l.speed))
		}
		if label != "" {
			attributes += fmt.Sprintf(", label=%q", label)
		}
		t.line("  %q -- %q [%s];", l.up.first.Name, l.down.first.Name, attributes)
	}
	t.line("}")
	return t.String()
}
