package topo

import (
	"fmt"
	"strings"

	"github.com/fared/fared/fare"
)

// A picture is what drawings show: boxes for nodes, and lines for cables. Where nodes are many, one box stands for all that are
// alike, and one line for their cables, so that a drawing stays readable for any fabric.
type picture struct {
	*Fabric
	boxes []*box // servers, leaves, spines
	lines []*line
	of    map[*Node]*box
}

// box is a node, or some that are alike.
type box struct {
	kind        Kind
	plane       int
	first, last *Node
	count       int
}

// line is a cable between two boxes, or all with the same place.
type line struct {
	down, up *box
	plane    int
	sub      int // of a server's cable; 0 for uplinks
	count    int
	speed    fare.Bandwidth
}

// Up to so many nodes have boxes of their own.
const (
	maxServerBoxes = 16
	maxSwitchBoxes = 4 // of a kind in a plane
)

func (f *Fabric) picture() *picture {
	p := &picture{Fabric: f, of: map[*Node]*box{}}
	switches := func(list []*Node, inPlane int) {
		for i, n := range list {
			p.add(n, inPlane > maxSwitchBoxes && i%inPlane > 0)
		}
	}
	for i, n := range f.Server {
		p.add(n, f.Servers > maxServerBoxes && i > 0 && (f.Leaves > maxSwitchBoxes || f.leafOf(i, 0) == f.leafOf(i-1, 0)))
	}
	switches(f.Leaf, f.Leaves)
	switches(f.Spine, f.Spines)
	type place struct {
		down, up *box
		sub      int
	}
	known := map[place]*line{}
	for _, c := range f.Cables {
		at := place{down: p.of[c.Down.Node], up: p.of[c.Up.Node], sub: c.Sub}
		if c.Uplink() {
			at.sub = 0
		}
		l := known[at]
		if l == nil {
			l = &line{down: at.down, up: at.up, plane: c.Plane, sub: at.sub, speed: c.Speed}
			known[at] = l
			p.lines = append(p.lines, l)
		}
		l.count++
	}
	return p
}

// add draws a node, together with the one before it or in a box of its own.
func (p *picture) add(n *Node, together bool) {
	if !together {
		p.boxes = append(p.boxes, &box{kind: n.Kind, plane: n.Plane, first: n})
	}
	b := p.boxes[len(p.boxes)-1]
	b.last = n
	b.count++
	p.of[n] = b
}

// label is a box's name.
func (b *box) label() string {
	if b.count == 1 {
		return b.first.Name
	}
	return b.first.Name + " … " + b.last.Name
}

// Title describes a fabric in a line.
func (f *Fabric) Title() string {
	parts := []string{several(f.Servers, "server") + " with " + several(f.GPUs, "GPU") + " each", several(f.Planes, "plane")}
	switches := several(f.Leaves, "leaf") + " (" + f.Spec.Leaf + ")"
	if f.Spines > 0 {
		switches += " and " + several(f.Spines, "spine") + " (" + f.Spec.Spine + ")"
	}
	parts = append(parts, switches+" a plane")
	cables := fmt.Sprintf("%d × %s a server and plane", f.SubPorts, f.Speed)
	if f.SubPorts == 2 {
		cables = "Y-cables of " + cables
	}
	parts = append(parts, cables)
	if f.Spines > 0 {
		parts = append(parts, "uplinks of "+f.UplinkSpeed.String())
	}
	return f.Name + ": " + strings.Join(parts, ", ")
}

// several counts things.
func several(n int, what string) string {
	switch {
	case n == 1:
		return "1 " + what
	case strings.HasSuffix(what, "f"):
		what = strings.TrimSuffix(what, "f") + "ve"
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// colours are those of the planes, in turn: distinct for most people with a colour vision deficiency too (Okabe and Ito).
var colours = []string{"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#6a3d9a", "#555555"}

func colour(plane int) string { return colours[plane%len(colours)] }

// Dot is the drawing as a Graphviz graph.
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
			t.line("  subgraph \"cluster_%s\" {\n    graph [label=%q, color=%q];", f.PlaneName(plane), "plane "+f.PlaneName(plane), colour(plane))
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
		attributes := fmt.Sprintf("color=%q", colour(l.plane))
		if l.count > 1 {
			attributes += fmt.Sprintf(", label=\"%d × %s\"", l.count, l.speed)
		}
		t.line("  %q -- %q [%s];", l.up.first.Name, l.down.first.Name, attributes)
	}
	t.line("}")
	return t.String()
}
