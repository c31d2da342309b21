package main

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"golang.org/x/term"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/lab"
)

// labLive is the live table of a lab in a terminal: a picture of the fabric above the steps that are done. It is drawn on
// the terminal's other screen, ten times a second and after every step; at the end the last picture and all steps are
// left on the first screen, where they can be scrolled.
type labLive struct {
	e     *env
	o     lab.Options
	runs  int
	total int // steps of all runs
	begun time.Time

	mu      sync.Mutex // guards what follows, and the drawing
	fabric  *lab.Fabric
	up      time.Duration
	doing   string // while there is no fabric
	playing *lab.Scenario
	at      int         // which of its steps is going on
	last    *lab.Result // that step's, when it is done
	done    []string    // lines: scenarios and their steps
	steps   int         // done

	stop chan struct{}
	over sync.WaitGroup
	once sync.Once
}

// What a terminal is told: the other screen and no cursor, and back; go to the top left; clear to the line's or the
// screen's end.
const (
	otherScreen = "\x1b[?1049h\x1b[?25l"
	firstScreen = "\x1b[?1049l\x1b[?25h"
	home        = "\x1b[H"
	clearLine   = "\x1b[K"
	clearBelow  = "\x1b[J"
)

// redraw is how often the picture is drawn while nothing is reported.
const redraw = 100 * time.Millisecond

func newLabLive(e *env, o lab.Options, scenarios []*lab.Scenario, runs int) *labLive {
	s := &labLive{e: e, o: o, runs: runs, begun: time.Now(), stop: make(chan struct{})}
	for _, sc := range scenarios {
		s.total += runs * len(sc.Steps)
	}
	return s
}

func (s *labLive) starting() {
	fmt.Fprint(s.e.out, otherScreen)
	s.draw()
	s.over.Go(func() {
		tick := time.NewTicker(redraw)
		defer tick.Stop()
		for {
			select {
			case <-s.stop:
				return
			case <-tick.C:
				s.draw()
			}
		}
	})
}

func (s *labLive) started(f *lab.Fabric, took time.Duration) {
	s.change(func() { s.fabric, s.up = f, took })
}

func (s *labLive) progress(text string) {
	s.change(func() { s.doing = text })
}

func (s *labLive) run(n int) {
	if s.runs > 1 {
		s.change(func() { s.done = append(s.done, s.e.paint(bold, runOf(n, s.runs))) })
	}
}

func (s *labLive) scenario(sc *lab.Scenario) {
	s.change(func() {
		s.playing, s.at, s.last = sc, 0, nil
		s.done = append(s.done, s.e.paint(bold, sc.Name+": "+sc.Title))
	})
}

func (s *labLive) result(r lab.Result) {
	s.change(func() {
		s.last = &r
		s.steps++
		s.done = append(s.done, fmt.Sprintf("  %s %-*s %-7s %8s  %d slots moved", s.e.mark(r.OK), stepColumn, r.Step, lab.Ratio(inOrder(s.o, r.Weights)), took(r), r.SlotsMoved))
		if r.Traffic != nil {
			s.done = append(s.done, "        "+packets(s.o, r.Traffic))
		}
		if s.o.Transport != "" {
			s.done = append(s.done, "        "+transferred(r.Transfer))
		}
		for _, line := range timeline(s.o, r) {
			s.done = append(s.done, "        "+line)
		}
		for _, w := range r.Wrong {
			s.done = append(s.done, "        "+w)
		}
	})
}

func (s *labLive) next() {
	s.change(func() {
		if s.at+1 < len(s.playing.Steps) {
			s.at, s.last = s.at+1, nil
		}
	})
}

func (s *labLive) ended(met bool, summary []lab.Summary, transfers *lab.TransferSummary) {
	s.leave()
	for _, line := range slices.Concat(s.picture(s.o.Planes), s.done) {
		fmt.Fprintln(s.e.out, line)
	}
	s.e.labEnd(s.steps, met, summary, transfers)
}

// close leaves what was done on the first screen, unless ended has.
func (s *labLive) close() {
	if !s.leave() {
		return
	}
	for _, line := range s.done {
		fmt.Fprintln(s.e.out, line)
	}
}

// leave ends the drawing and returns to the first screen; it does so once, and says whether it was this time.
func (s *labLive) leave() (left bool) {
	s.once.Do(func() {
		close(s.stop)
		s.over.Wait()
		fmt.Fprint(s.e.out, firstScreen)
		left = true
	})
	return left
}

// change takes something new and shows it at once.
func (s *labLive) change(f func()) {
	s.mu.Lock()
	f()
	s.mu.Unlock()
	s.draw()
}

// draw writes one frame, cut to the terminal's size as it is now: the picture, and the last steps that fit below.
func (s *labLive) draw() {
	s.mu.Lock()
	defer s.mu.Unlock()
	columns, rows, err := term.GetSize(int(s.e.terminal.Fd()))
	if err != nil || columns <= 0 || rows <= 0 {
		columns, rows = 80, 24
	}
	lines := s.picture(max(1, rows-10))
	list := s.done
	if room := max(0, rows-1-len(lines)); len(list) > room {
		list = list[len(list)-room:]
	}
	lines = slices.Concat(lines, list)
	var b strings.Builder
	b.WriteString(home)
	for _, line := range lines[:min(len(lines), rows-1)] {
		b.WriteString(fit(line, columns) + clearLine + "\n")
	}
	b.WriteString(clearBelow)
	fmt.Fprint(s.e.out, b.String())
}

// picture draws the fabric: at most so many planes, the weights of the pair that the step watches, and the step.
func (s *labLive) picture(planes int) []string {
	lines := []string{s.e.paint(bold, "fared lab") + "  " + size(s.o)}
	if s.fabric == nil {
		return append(lines, fmt.Sprintf("bringing up %d BGP sessions  %s", s.o.Planes*s.o.Servers*s.o.SubPorts, s.elapsed()), s.doing)
	}
	lines = append(lines, fmt.Sprintf("%d BGP sessions, every weight in effect after %s; step %d of %d, %s", s.fabric.Sessions(), s.up.Round(time.Millisecond), s.number(), s.total, s.elapsed()), "")
	step := &lab.Step{}
	if s.playing != nil {
		step = &s.playing.Steps[s.at]
	}
	p := s.fabric.Picture(step)
	lines = append(lines, fmt.Sprintf("  %-6s %-8s %-6s %-9s %s -> %s", "plane", "leaf", "state", "cables", p.Source, p.Destination)+heading(p))
	weights := make([]*farev1.PlaneWeight, len(p.Planes)) // nil: nothing is known of it, which reads as 0
	copy(weights, p.Weights.GetPlanes())
	var top uint32
	for _, w := range weights {
		top = max(top, w.GetWeight())
	}
	var weighed float64
	for _, w := range weights {
		weighed += float64(w.GetWeight())
	}
	for i, plane := range p.Planes[:min(planes, len(p.Planes))] {
		color, state := green, "up"
		switch {
		case plane.Up == 0:
			color, state = red, "DOWN"
		case plane.Up < plane.Cables:
			color = yellow
		}
		w := weights[i]
		note := "  " + bandwidth(w.GetBandwidthBps())
		if w.GetReason() != "" {
			note = "  " + w.GetReason()
		}
		if p.Packets {
			part := 0.0
			if weighed > 0 {
				part = float64(w.GetWeight()) / weighed
			}
			note = fmt.Sprintf("  %5.1f %% of %.1f %%  %6.0f packets/s", 100*plane.Share, 100*part, plane.Rate) + note
		}
		lines = append(lines, fmt.Sprintf("  %-6s %-8s %s %-9s %3d %s%s", plane.Plane, plane.Leaf, s.e.paint(color, fmt.Sprintf("%-6s", state)),
			fmt.Sprintf("%d/%d", plane.Up, plane.Cables), w.GetWeight(), s.e.paint(color, bar(w.GetWeight(), top, 20)), note))
	}
	if hidden := len(p.Planes) - planes; hidden > 0 {
		lines = append(lines, fmt.Sprintf("  and %d more", hidden))
	}
	now := ""
	switch {
	case s.playing == nil:
	case s.last == nil:
		now = "  ...   " + step.Text
	default:
		now = fmt.Sprintf("  %s %s: %d pairs after %s", s.e.mark(s.last.OK), s.last.Step, s.last.Pairs, took(*s.last))
	}
	return append(lines, "", now, "")
}

// heading is that of the columns that only packets have.
func heading(p lab.Picture) string {
	if !p.Packets {
		return ""
	}
	return "        seen of weight, at the leaf"
}

// number is the step that is going on, counted from 1.
func (s *labLive) number() int {
	if s.last != nil || s.steps == s.total {
		return s.steps
	}
	return s.steps + 1
}

func (s *labLive) elapsed() string { return time.Since(s.begun).Round(redraw).String() }

// fit cuts a line to so many columns; what colors it costs none.
func fit(line string, columns int) string {
	var b strings.Builder
	colored := false
	for line != "" && columns > 0 {
		if strings.HasPrefix(line, "\x1b[") {
			n := strings.IndexByte(line, 'm') + 1
			b.WriteString(line[:n])
			colored, line = line[:n] != plain, line[n:]
			continue
		}
		_, n := utf8.DecodeRuneInString(line)
		b.WriteString(line[:n])
		line = line[n:]
		columns--
	}
	if colored {
		b.WriteString(plain)
	}
	return b.String()
}
