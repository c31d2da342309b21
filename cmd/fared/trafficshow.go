package main

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"golang.org/x/term"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/fare"
	"github.com/fared/fared/traffic"
)

// trafficShow is how a run's progress is shown. Its methods are called one after the other.
type trafficShow interface {
	interval(*farev1.TrafficInterval)
	// close leaves the terminal as it was.
	close()
}

// trafficShow chooses how to show: a live table in a terminal, lines elsewhere, nothing beside data.
func (e *env) trafficShow(cfg traffic.Config) trafficShow {
	switch {
	case e.output != "table":
		return trafficNothing{}
	case e.terminal != nil:
		s := &trafficLive{e: e, cfg: cfg}
		fmt.Fprint(e.out, otherScreen)
		s.draw()
		return s
	}
	return &trafficLines{e: e}
}

type trafficNothing struct{}

func (trafficNothing) interval(*farev1.TrafficInterval) {}
func (trafficNothing) close()                           {}

// trafficLines prints a line for each interval.
type trafficLines struct{ e *env }

func (s *trafficLines) interval(i *farev1.TrafficInterval) { fmt.Fprintln(s.e.out, intervalLine(i)) }
func (*trafficLines) close()                               {}

// intervalLine is an interval in a line: when it ended, and the goodput of all and of planes.
func intervalLine(i *farev1.TrafficInterval) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%9s  %10s", time.Duration(i.GetToNs()).Round(time.Millisecond), bitsPerSecond(i.GetGoodputBps()))
	for _, p := range i.GetPlanes() {
		fmt.Fprintf(&b, "  %s %s", p.GetPlane(), bitsPerSecond(p.GetSentBps()))
		if p.GetAgainBps() > 0 {
			fmt.Fprintf(&b, " (again %s)", bitsPerSecond(p.GetAgainBps()))
		}
	}
	return b.String()
}

// bitsPerSecond is a rate that was measured, for people: three digits are enough.
func bitsPerSecond(bps uint64) string {
	unit := uint64(1)
	for bps/unit >= 1000 {
		unit *= 10
	}
	return bandwidth(uint64(fare.Bandwidth((bps + unit/2) / unit * unit)))
}

// trafficLive is a table in a terminal: planes above, the last intervals below. It is drawn on the terminal's other screen.
type trafficLive struct {
	e     *env
	cfg   traffic.Config
	last  *farev1.TrafficInterval
	lines []string
	drawn time.Time
}

// kept is how many intervals are kept for the table: more than any terminal shows.
const kept = 256

func (s *trafficLive) interval(i *farev1.TrafficInterval) {
	s.last = i
	if s.lines = append(s.lines, intervalLine(i)); len(s.lines) > kept {
		s.lines = s.lines[1:]
	}
	if time.Since(s.drawn) >= redraw { // intervals may be far shorter than anybody can read
		s.draw()
	}
}

func (s *trafficLive) close() { fmt.Fprint(s.e.out, firstScreen) }

func (s *trafficLive) draw() {
	s.drawn = time.Now()
	columns, rows, err := term.GetSize(int(s.e.terminal.Fd()))
	if err != nil || columns <= 0 || rows <= 0 {
		columns, rows = 80, 24
	}
	lines := s.picture()
	list := s.lines
	if room := max(0, rows-1-len(lines)); len(list) > room {
		list = list[len(list)-room:]
	}
	var b strings.Builder
	b.WriteString(home)
	for n, line := range append(lines, list...) {
		if n < rows-1 {
			b.WriteString(fit(line, columns) + clearLine + "\n")
		}
	}
	b.WriteString(clearBelow)
	fmt.Fprint(s.e.out, b.String())
}

func (s *trafficLive) picture() []string {
	title := fmt.Sprintf("%s  %s, %s of %d bytes, %d outstanding, order %s", s.e.paint(bold, "fared traffic"), s.cfg.Pattern, s.cfg.Op, s.cfg.Message, s.cfg.Outstanding, s.cfg.Ordering)
	if s.last == nil {
		return []string{title, "connecting", ""}
	}
	lines := []string{title, fmt.Sprintf("%s after %s", s.e.paint(bold, bitsPerSecond(s.last.GetGoodputBps())), time.Duration(s.last.GetToNs()).Round(redraw)), ""}
	top := uint64(1)
	for _, p := range s.last.GetPlanes() {
		top = max(top, p.GetSentBps())
	}
	for _, p := range s.last.GetPlanes() {
		color := green
		switch {
		case p.GetSentBps() == 0:
			color = red
		case p.GetAgainBps() > 0:
			color = yellow
		}
		line := fmt.Sprintf("  %-8s %s %10s", p.GetPlane(), s.e.paint(color, bar(uint32(p.GetSentBps()*1000/top), 1000, 30)), bitsPerSecond(p.GetSentBps()))
		if p.GetAgainBps() > 0 {
			line += "  sent again " + bitsPerSecond(p.GetAgainBps())
		}
		lines = append(lines, line)
	}
	return append(lines, "")
}

func (e *env) printTraffic(r *farev1.TrafficReport) error {
	return e.print(r, func(w *tabwriter.Writer) { e.trafficTable(w, r) })
}

// trafficTable is a report for people.
func (e *env) trafficTable(w io.Writer, r *farev1.TrafficReport) {
	row(w, "SOURCE", "DESTINATION", "BYTES", "GOODPUT", "MIN", "MEDIAN", "MAX", "P50", "P99", "P99.9", "LATEST", "LOST", "DUPLICATED", "REORDERED", "WRONG", "ERRORS")
	figures := func(source, destination string, f *farev1.TrafficFigures) {
		l := f.GetLatency()
		lowest, middle, highest := "-", "-", "-" // shorter than an interval
		if f.GetGoodputMaxBps() > 0 {
			lowest, middle, highest = bitsPerSecond(f.GetGoodputMinBps()), bitsPerSecond(f.GetGoodputMedianBps()), bitsPerSecond(f.GetGoodputMaxBps())
		}
		row(w, source, destination, fmt.Sprint(f.GetBytes()), bitsPerSecond(f.GetGoodputBps()), lowest, middle,
			highest, age(l.GetP50Ns()), age(l.GetP99Ns()), age(l.GetP999Ns()), age(l.GetMaxNs()), fmt.Sprint(f.GetLost()),
			fmt.Sprint(f.GetDuplicated()), fmt.Sprint(f.GetReordered()), fmt.Sprint(f.GetWrongBytes()), fmt.Sprint(f.GetErrors()))
	}
	for _, p := range r.GetPairs() {
		figures(p.GetSource(), p.GetDestination(), p.GetFigures())
	}
	figures("all", several(len(r.GetPairs()), "pair"), r.GetTotal())
	row(w)
	row(w, "PLANE", "SENT", "AGAIN", "DUE", "SENT %", "DUE %", "DEVIATION")
	for _, p := range r.GetPlanes() {
		row(w, p.GetPlane(), fmt.Sprint(p.GetSent()), fmt.Sprint(p.GetAgain()), fmt.Sprint(p.GetDue()), partOf(int64(p.GetSentPpb())), partOf(int64(p.GetDuePpb())),
			fmt.Sprintf("%+.3f", float64(p.GetDeviationPpb())/1e7))
	}
	row(w)
	verdict := e.paint(green, "every byte verified")
	if !r.GetOk() {
		verdict = e.paint(bold+red, "NOT every message arrived once and whole")
	}
	fmt.Fprintf(w, "%s, %s by %s in order %s, %s messages of %d bytes in %s: %s\n", r.GetPattern(), r.GetOp(), r.GetTransport(), r.GetOrdering(),
		fmt.Sprint(r.GetTotal().GetMessages()), r.GetMessageBytes(), age(r.GetElapsedNs()), verdict)
	for _, line := range r.GetErrors() {
		fmt.Fprintln(w, "  "+line)
	}
}

// partOf writes parts per billion as people read them.
func partOf(ppb int64) string { return fmt.Sprintf("%.3f", float64(ppb)/1e7) }
