package topo

import (
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"
)

// Sizes in the drawing, in SVG's user units; a letter is seven units wide.
const (
	letter     = 7
	margin     = 20
	gap        = 16 // between boxes
	boxHeight  = 40
	portWidth  = 8
	portStep   = 12 // from one port of a server to the next
	gpuSize    = 10
	gpuStep    = 14
	ownerGap   = 10 // between the ports of two GPUs that own theirs
	lanes      = 5  // from one cable at a leaf to the next
	planesTop  = 56
	stub       = 12 // length of a port's cable before it splits
	serverTall = 58
)

// shape is the place and size of a box.
type shape struct{ x, y, w, h int }

func (s shape) middle() int { return s.x + s.w/2 }

// svg draws a picture.
type svg struct {
	*picture
	text
	shapes  map[*box]shape
	columns []shape       // columns of the planes
	lower   map[*line]int // x of a line at its lower box
	upper   map[*line]int // x of a line at its upper box
	width   int
	height  int
	// controls makes every cable a button.
	controls bool
}

// SVG returns the drawing as Scalable Vector Graphics: planes in columns, spines above leaves, and servers below all of
// them. A server, or each of its GPUs if these own their ports, has a port for each plane, in the plane's color, from
// which a line for each sub-port goes to a leaf: two lines are a Y-cable.
func (f *Fabric) SVG() string { return f.svg(false) }

// ControlSVG returns the drawing for a page with a script: lines do not share their ends, and each line for cables has
// the class "cable", the role of a button, a name, and the attribute data-cables with their numbers in Cables,
// separated by spaces.
func (f *Fabric) ControlSVG() string { return f.svg(true) }

func (f *Fabric) svg(controls bool) string {
	s := &svg{picture: f.picture(), shapes: map[*box]shape{}, lower: map[*line]int{}, upper: map[*line]int{}, controls: controls}
	s.place()
	s.attach()
	s.draw()
	return s.String()
}

// place sets the shape of every box.
func (s *svg) place() {
	cables := map[*box]int{}
	for _, l := range s.lines {
		cables[l.up]++
	}
	row := func(kind Kind, plane int) (boxes []*box, width int) {
		for _, b := range s.boxes {
			if b.kind == kind && b.plane == plane {
				w := letter*utf8.RuneCountInString(b.label()) + 2*gap
				if kind == KindServer {
					w = max(w, s.owners()*s.ownerWidth()+gap, s.GPUs*gpuStep+gap)
				} else {
					w = max(w, lanes*cables[b]+gap)
				}
				s.shapes[b] = shape{w: w}
				boxes = append(boxes, b)
				width += w + gap
			}
		}
		return boxes, width - gap
	}
	// spread centers a row of boxes in a span.
	spread := func(boxes []*box, width, x, span, y, h int) {
		x += (span - width) / 2
		for _, b := range boxes {
			w := s.shapes[b].w
			s.shapes[b] = shape{x, y, w, h}
			x += w + gap
		}
	}
	servers, below := row(KindServer, -1)
	type column struct {
		leaves, spines []*box
		lw, sw         int
	}
	columns := make([]column, s.Planes)
	wide, above := 0, 0
	for p := range columns {
		c := &columns[p]
		c.leaves, c.lw = row(KindLeaf, p)
		c.spines, c.sw = row(KindSpine, p)
		wide = max(wide, c.lw+2*gap, c.sw+2*gap)
	}
	above = s.Planes*(wide+gap) - gap
	if above < below {
		wide += (below - above) / s.Planes
		above = s.Planes*(wide+gap) - gap
	}
	content := max(above, below, (letter+1)*utf8.RuneCountInString(s.Title()))
	s.width = content + 2*margin
	leafTop := planesTop + 32
	if s.Spines > 0 {
		leafTop += 2 * boxHeight
		if s.Leaves > 1 {
			leafTop += boxHeight
		}
	}
	bottom := leafTop + boxHeight + gap
	// Lines with a large horizontal distance need height to be distinguishable.
	serverTop := bottom + max(140, content/8)
	s.height = serverTop + serverTall + margin + gap
	x := margin + (content-above)/2
	for _, c := range columns {
		s.columns = append(s.columns, shape{x, planesTop, wide, bottom - planesTop})
		spread(c.spines, c.sw, x, wide, planesTop+32, boxHeight)
		spread(c.leaves, c.lw, x, wide, leafTop, boxHeight)
		x += wide + gap
	}
	spread(servers, below, margin, content, serverTop, serverTall)
}

// attach sets the points at which lines meet boxes: at a server in the port of their plane, elsewhere next to each
// other.
func (s *svg) attach() {
	side := func(at map[*line]int, mine, other func(*line) *box, every func(*line) bool) {
		all := map[*box][]*line{}
		for _, l := range s.lines {
			if every(l) {
				all[mine(l)] = append(all[mine(l)], l)
			}
		}
		for b, lines := range all {
			slices.SortStableFunc(lines, func(a, b *line) int { return s.shapes[other(a)].x - s.shapes[other(b)].x })
			shape := s.shapes[b]
			for i, l := range lines {
				at[l] = shape.x + shape.w*(2*i+1)/(2*len(lines))
			}
		}
	}
	down, up := func(l *line) *box { return l.down }, func(l *line) *box { return l.up }
	side(s.upper, up, down, func(*line) bool { return true })
	side(s.lower, down, up, func(l *line) bool { return l.down.kind == KindLeaf })
	type port struct {
		server     *box
		gpu, plane int
	}
	ends := map[port][]*line{}
	for _, l := range s.lines {
		if l.down.kind == KindServer {
			s.lower[l] = s.port(l.down, l.gpu, l.plane)
			at := port{l.down, l.gpu, l.plane}
			ends[at] = append(ends[at], l)
		}
	}
	if !s.controls {
		return
	}
	for _, lines := range ends { // side by side, so that a cut cable is visible at its server too
		slices.SortStableFunc(lines, func(a, b *line) int { return s.upper[a] - s.upper[b] })
		step := max(1, portStep/(len(lines)+1))
		for i, l := range lines {
			s.lower[l] += step * (2*i + 1 - len(lines)) / 2
		}
	}
}

// ownerWidth returns the width of the ports of a server, or of those of each GPU that owns its ports.
func (s *svg) ownerWidth() int {
	return max(s.Planes*portStep, gpuStep) + ownerGap*min(1, s.owners()-1)
}

// owner returns the middle of a server's ports, or of those of a GPU that owns them.
func (s *svg) owner(b *box, gpu int) int {
	return s.shapes[b].middle() + s.ownerWidth()*(2*gpu-s.owners()+1)/2
}

// port returns the middle of a port.
func (s *svg) port(b *box, gpu, plane int) int {
	return s.owner(b, gpu) + portStep*(2*plane-s.Planes+1)/2
}

func (s *svg) draw() {
	s.line(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" font-size="12" text-anchor="middle">`, s.width, s.height)
	s.line(`<title>%s</title>`, s.Title())
	s.line(`<rect width="%d" height="%d" fill="#ffffff"/>`, s.width, s.height)
	s.line(`<text x="%d" y="32" font-size="14" text-anchor="start">%s</text>`, margin, s.Title())
	for plane, c := range s.columns {
		s.line(`<rect x="%d" y="%d" width="%d" height="%d" rx="8" fill="%s" fill-opacity="0.1"/>`, c.x, c.y, c.w, c.h, color(plane))
		s.line(`<text x="%d" y="%d" fill="%s" font-weight="bold">plane %s</text>`, c.middle(), c.y+20, color(plane), s.PlaneName(plane))
	}
	s.WriteString(`<g fill="none" stroke-linecap="round">` + "\n")
	for _, l := range s.lines {
		from, to := s.shapes[l.down], s.shapes[l.up]
		x1, y1, x2, y2, width := s.lower[l], from.y, s.upper[l], to.y+to.h, "2"
		begin := fmt.Sprintf("M%d %d", x1, y1)
		if l.down.kind == KindServer {
			y1 -= stub
			begin += fmt.Sprintf("V%d", y1)
			width = "1.2"
		}
		bend := (y1 - y2) / 2
		s.line(`<path d="%sC%d %d %d %d %d %d" stroke="%s" stroke-width="%s"%s/>`, begin, x1, y1-bend, x2, y2+bend, x2, y2, color(l.plane), width, s.control(l))
	}
	s.WriteString("</g>\n")
	for _, b := range s.boxes {
		s.box(b)
	}
	s.line(`</svg>`)
}

// control returns the attributes of a line that is a button.
func (s *svg) control(l *line) string {
	if !s.controls {
		return ""
	}
	numbers, names := make([]string, len(l.cables)), make([]string, len(l.cables))
	for i, c := range l.cables {
		numbers[i], names[i] = fmt.Sprint(c.Index), fmt.Sprintf("%s %s to %s", c.Down.Node.Name, c.Down.Device, c.Up.Node.Name)
	}
	return fmt.Sprintf(` class="cable" role="button" tabindex="0" aria-pressed="false" aria-label="cut %s" data-cables="%s"`, strings.Join(names, ", "), strings.Join(numbers, " "))
}

func (s *svg) box(b *box) {
	at, stroke, detail := s.shapes[b], "#333333", ""
	if b.kind != KindServer {
		stroke, detail = color(b.plane), s.Software(b.first)
	}
	s.line(`<g>`)
	if b.count == 1 {
		s.line(`<title>%s: AS %d, %s</title>`, b.first.Name, b.first.AS, b.first.ID)
	} else {
		s.line(`<rect x="%d" y="%d" width="%d" height="%d" rx="4" fill="#ffffff" stroke="%s"/>`, at.x+5, at.y+5, at.w, at.h, stroke)
		detail = strings.TrimSpace(fmt.Sprintf("× %d %s", b.count, detail))
	}
	s.line(`<rect x="%d" y="%d" width="%d" height="%d" rx="4" fill="#ffffff" stroke="%s"/>`, at.x, at.y, at.w, at.h, stroke)
	if b.kind != KindServer {
		s.line(`<text x="%d" y="%d">%s</text>`, at.middle(), at.y+17, b.label())
		s.line(`<text x="%d" y="%d" font-size="10" fill="#555555">%s</text>`, at.middle(), at.y+32, detail)
		s.line(`</g>`)
		return
	}
	for _, g := range s.groups[b.first.Index*s.owners() : (b.first.Index+1)*s.owners()] {
		for plane, cables := range g.Planes {
			if len(cables) > 0 {
				s.line(`<rect x="%d" y="%d" width="%d" height="%d" fill="%s"/>`, s.port(b, g.GPU, plane)-portWidth/2, at.y-3, portWidth, 6, color(plane))
			}
		}
	}
	s.line(`<text x="%d" y="%d">%s</text>`, at.middle(), at.y+22, b.label())
	for g := range s.GPUs {
		x := at.middle() - (s.GPUs*gpuStep-(gpuStep-gpuSize))/2 + g*gpuStep
		if s.owners() > 1 { // below the GPU's ports
			x = s.owner(b, g) - gpuSize/2
		}
		s.line(`<rect x="%d" y="%d" width="%d" height="%d" fill="#76b900" stroke="#333333" stroke-width="0.5"><title>GPU %d</title></rect>`, x, at.y+30, gpuSize, gpuSize, g)
	}
	if detail != "" {
		s.line(`<text x="%d" y="%d" font-size="10" fill="#555555">%s</text>`, at.middle(), at.y+52, detail)
	}
	s.line(`</g>`)
}
