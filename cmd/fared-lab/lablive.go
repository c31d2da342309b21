package main

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/lab"
	"github.com/fared/fared/lab/judge"
)

// labLive is the live table of a lab in a terminal: a picture of the fabric above the finished steps. It draws on the
// terminal's alternate screen, ten times a second and after every step. At the end it leaves the last picture and all
// steps on the main screen, where they can be scrolled.
type labLive struct {
	e     *cli.Env
	o     lab.Options
	runs  int
	total int // steps of all runs
	begun time.Time

	mu      sync.Mutex // guards the fields below, and the drawing
	fabric  *lab.Fabric
	up      time.Duration
	doing   string // phase of the start, until there is a fabric
	playing *lab.Scenario
	at      int         // index of the current step
	last    *lab.Result // result of that step, once it is done
	done    []string    // lines: scenarios and their steps
	steps   int         // number of finished steps

	stop chan struct{}
	over sync.WaitGroup
	once sync.Once
}

// Control sequences of the terminal: alternate screen without a cursor, and back; cursor to the top left; clear to the
// end of the line or of the screen.
const (
	otherScreen = "\x1b[?1049h\x1b[?25l"
	firstScreen = "\x1b[?1049l\x1b[?25h"
)

// redraw is the interval of drawing between reports.
const redraw = 100 * time.Millisecond

func newLabLive(e *cli.Env, o lab.Options, scenarios []*lab.Scenario, runs int) *labLive {
	s := &labLive{e: e, o: o, runs: runs, begun: time.Now(), stop: make(chan struct{})}
	for _, sc := range scenarios {
		s.total += runs * len(sc.Steps)
	}
	return s
}

func (s *labLive) starting() {
	fmt.Fprint(s.e.Out, otherScreen)
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
		s.change(func() { s.done = append(s.done, s.e.Paint(cli.Bold, runOf(n, s.runs))) })
	}
}

func (s *labLive) scenario(sc *lab.Scenario) {
	s.change(func() {
		s.playing, s.at, s.last = sc, 0, nil
		s.done = append(s.done, s.e.Paint(cli.Bold, sc.Name+": "+sc.Title))
	})
}

func (s *labLive) result(r lab.Result) {
	s.change(func() {
		s.last = &r
		s.steps++
		s.done = append(s.done, fmt.Sprintf("  %s %-*s %-7s %8s  %d slots moved", labMark(s.e, r.OK), stepColumn, r.Step, judge.Ratio(inOrder(s.o, r.Weights)), took(r), r.SlotsMoved))
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
	for _, line := range slices.Concat(s.picture(s.o.Planes, math.MaxInt), s.done) {
		fmt.Fprintln(s.e.Out, line)
	}
	printLabEnd(s.e, s.steps, met, summary, transfers)
}

// close leaves the finished steps on the main screen, unless ended has done so.
func (s *labLive) close() {
	if !s.leave() {
		return
	}
	for _, line := range s.done {
		fmt.Fprintln(s.e.Out, line)
	}
}

// leave ends the drawing and returns to the main screen, once; it reports whether this call did so.
func (s *labLive) leave() (left bool) {
	s.once.Do(func() {
		close(s.stop)
		s.over.Wait()
		fmt.Fprint(s.e.Out, firstScreen)
		left = true
	})
	return left
}

// change applies f and redraws at once.
func (s *labLive) change(f func()) {
	s.mu.Lock()
	f()
	s.mu.Unlock()
	s.draw()
}

// draw writes one frame, cut to the terminal's present size: the picture, and the last steps that fit below.
func (s *labLive) draw() {
	s.mu.Lock()
	defer s.mu.Unlock()
	columns, rows := s.e.Screen()
	var b strings.Builder
	b.WriteString(cli.Home)
	for _, line := range frame(s.picture(max(1, rows-10), columns), s.done, 0, columns, rows) {
		b.WriteString(line + cli.ClearLine + "\n")
	}
	b.WriteString(cli.ClearBelow)
	fmt.Fprint(s.e.Out, b.String())
}

// frame returns the lines of a screen of columns by rows, with the last row free: the picture, and the last of the
// finished steps under a line that counts the hidden ones. before is the number of earlier steps that are not in done.
func frame(picture, done []string, before, columns, rows int) []string {
	if room := max(0, rows-1-len(picture)); before+len(done) > room {
		last := min(len(done), max(room-1, min(room, 1)))
		hidden := before + len(done) - last
		done = done[len(done)-last:]
		if room > 1 {
			done = append([]string{fmt.Sprintf("  ... and %d more above", hidden)}, done...)
		}
	}
	lines := slices.Concat(picture, done)
	lines = lines[:max(0, min(len(lines), rows-1))]
	for i, line := range lines {
		lines[i] = cli.Fit(line, columns)
	}
	return lines
}

// barSize returns the length of the bars, at most most, that fits next to the longest line in columns.
func barSize(most, longest, columns int) int { return max(0, min(most, columns-longest)) }

// picture draws the fabric: at most planes planes, bars that fit into columns, the weights of the pair that the step
// watches, and the step.
func (s *labLive) picture(planes, columns int) []string {
	lines := []string{s.e.Paint(cli.Bold, "fared lab") + "  " + size(s.o)}
	if s.fabric == nil {
		return append(lines, fmt.Sprintf("establishing %d BGP sessions  %s", s.o.ServerSessions(), s.elapsed()), s.doing)
	}
	lines = append(lines, fmt.Sprintf("%d BGP sessions, every weight in effect after %s; step %d of %d, %s", s.fabric.Sessions(), s.up.Round(time.Millisecond), s.number(), s.total, s.elapsed()), "")
	step := &lab.Step{}
	if s.playing != nil {
		step = &s.playing.Steps[s.at]
	}
	p := s.fabric.Picture(step)
	lines = append(lines, fmt.Sprintf("  %-6s %-8s %-6s %-9s %s -> %s", "plane", "leaf", "state", "cables", p.Source, p.Destination)+heading(p))
	weights := make([]*farev1.PlaneWeight, len(p.Planes)) // nil for an unknown weight, which reads as 0
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
		color, state := cli.Green, "up"
		switch {
		case plane.Up == 0:
			color, state = cli.Red, "DOWN"
		case plane.Up < plane.Cables:
			color = cli.Yellow
		}
		w := weights[i]
		note := "  " + cli.Bandwidth(w.GetBandwidthBps())
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
		beside := fmt.Sprintf("  %-6s %-8s %-6s %-9s %3d ", plane.Plane, plane.Leaf, state, fmt.Sprintf("%d/%d", plane.Up, plane.Cables), w.GetWeight()) + note
		lines = append(lines, fmt.Sprintf("  %-6s %-8s %s %-9s %3d %s%s", plane.Plane, plane.Leaf, s.e.Paint(color, fmt.Sprintf("%-6s", state)),
			fmt.Sprintf("%d/%d", plane.Up, plane.Cables), w.GetWeight(), s.e.Paint(color, bar(w.GetWeight(), top, barSize(20, utf8.RuneCountInString(beside), columns))), note))
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
		now = fmt.Sprintf("  %s %s: %d pairs after %s", labMark(s.e, s.last.OK), s.last.Step, s.last.Pairs, took(*s.last))
	}
	return append(lines, "", now, "")
}

// heading returns the heading of the columns for packets.
func heading(p lab.Picture) string {
	if !p.Packets {
		return ""
	}
	return "        measured of expected share, at the leaf"
}

// number returns the number of the current step, counted from 1.
func (s *labLive) number() int {
	if s.last != nil || s.steps == s.total {
		return s.steps
	}
	return s.steps + 1
}

func (s *labLive) elapsed() string { return time.Since(s.begun).Round(redraw).String() }
