package main

import (
	"fmt"
	"io"
	"math"
	"strings"
	"text/tabwriter"
	"time"
	"unicode/utf8"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/fare"
	"github.com/fared/fared/traffic"
)

// trafficShow presents a run's progress. Its methods are called one after the other.
type trafficShow interface {
	interval(*farev1.TrafficInterval)
	// close restores the terminal.
	close()
}

// newTrafficShow chooses the presentation: a live table in a terminal, lines elsewhere, and none if the output is data.
func newTrafficShow(e *cli.Env, cfg traffic.Config) trafficShow {
	switch {
	case e.Output != "table":
		return trafficNothing{}
	case e.Terminal != nil:
		s := &trafficLive{e: e, cfg: cfg}
		fmt.Fprint(e.Out, otherScreen)
		s.draw()
		return s
	}
	return &trafficLines{e: e}
}

type trafficNothing struct{}

func (trafficNothing) interval(*farev1.TrafficInterval) {}
func (trafficNothing) close()                           {}

// trafficLines prints a line for each interval.
type trafficLines struct{ e *cli.Env }

func (s *trafficLines) interval(i *farev1.TrafficInterval) {
	fmt.Fprintln(s.e.Out, intervalLine(i, math.MaxInt))
}
func (*trafficLines) close() {}

// intervalLine returns an interval as a line: its end, and the goodput of all pairs and of each plane. It counts the
// planes that do not fit into columns.
func intervalLine(i *farev1.TrafficInterval, columns int) string {
	line := fmt.Sprintf("%9s  %10s", time.Duration(i.GetToNs()).Round(time.Millisecond), bitsPerSecond(i.GetGoodputBps()))
	short := line // the longest beginning that leaves room for the count of the remaining planes
	for n, p := range i.GetPlanes() {
		if left := fmt.Sprintf("  and %d more", len(i.GetPlanes())-n); n == 0 || utf8.RuneCountInString(line+left) <= columns {
			short = line + left
		}
		line += fmt.Sprintf("  %s %s", p.GetPlane(), bitsPerSecond(p.GetSentBps()))
		if p.GetAgainBps() > 0 {
			line += fmt.Sprintf(" (resent %s)", bitsPerSecond(p.GetAgainBps()))
		}
	}
	if utf8.RuneCountInString(line) > columns {
		return short
	}
	return line
}

// bitsPerSecond writes a measured rate for people, with three digits.
func bitsPerSecond(bps uint64) string {
	unit := uint64(1)
	for bps/unit >= 1000 {
		unit *= 10
	}
	return cli.Bandwidth(uint64(fare.Bandwidth((bps + unit/2) / unit * unit)))
}

// trafficLive is a table in a terminal: planes above, the last intervals below. It draws on the terminal's alternate
// screen.
type trafficLive struct {
	e         *cli.Env
	cfg       traffic.Config
	intervals []*farev1.TrafficInterval // the last intervals, at most kept
	before    int                       // number of earlier intervals
	drawn     time.Time
}

// kept is the number of intervals kept for the table: more than any terminal shows.
const kept = 256

func (s *trafficLive) interval(i *farev1.TrafficInterval) {
	if s.intervals = append(s.intervals, i); len(s.intervals) > kept {
		s.intervals = s.intervals[1:]
		s.before++
	}
	if time.Since(s.drawn) >= redraw { // intervals may be far shorter than a readable picture
		s.draw()
	}
}

func (s *trafficLive) close() { fmt.Fprint(s.e.Out, firstScreen) }

func (s *trafficLive) draw() {
	s.drawn = time.Now()
	columns, rows := s.e.Screen()
	var b strings.Builder
	b.WriteString(cli.Home)
	for _, line := range s.frame(columns, rows) {
		b.WriteString(line + cli.ClearLine + "\n")
	}
	b.WriteString(cli.ClearBelow)
	fmt.Fprint(s.e.Out, b.String())
}

// frame returns the lines of a screen of columns by rows, with the last row free.
func (s *trafficLive) frame(columns, rows int) []string {
	lines := make([]string, len(s.intervals))
	for n, i := range s.intervals {
		lines[n] = intervalLine(i, columns)
	}
	return frame(s.picture(max(1, rows-8), columns), lines, s.before, columns, rows)
}

// picture draws the last interval: at most planes planes, with bars that fit into columns.
func (s *trafficLive) picture(planes, columns int) []string {
	title := fmt.Sprintf("%s  %s, %s of %d bytes, %d outstanding, order %s", s.e.Paint(cli.Bold, "fared traffic"), s.cfg.Pattern, s.cfg.Op, s.cfg.Message, s.cfg.Outstanding, s.cfg.Ordering)
	if len(s.intervals) == 0 {
		return []string{title, "connecting", ""}
	}
	last := s.intervals[len(s.intervals)-1]
	lines := []string{title, fmt.Sprintf("%s after %s", s.e.Paint(cli.Bold, bitsPerSecond(last.GetGoodputBps())), time.Duration(last.GetToNs()).Round(redraw)), ""}
	row := func(p *farev1.TrafficPlaneRate, bar string) string {
		line := fmt.Sprintf("  %-8s %s %10s", p.GetPlane(), bar, bitsPerSecond(p.GetSentBps()))
		if p.GetAgainBps() > 0 {
			line += "  resent " + bitsPerSecond(p.GetAgainBps())
		}
		return line
	}
	top, longest := uint64(1), 0
	for _, p := range last.GetPlanes() {
		top, longest = max(top, p.GetSentBps()), max(longest, utf8.RuneCountInString(row(p, "")))
	}
	for _, p := range last.GetPlanes()[:min(planes, len(last.GetPlanes()))] {
		color := cli.Green
		switch {
		case p.GetSentBps() == 0:
			color = cli.Red
		case p.GetAgainBps() > 0:
			color = cli.Yellow
		}
		lines = append(lines, row(p, s.e.Paint(color, bar(uint32(p.GetSentBps()*1000/top), 1000, barSize(30, longest, columns)))))
	}
	if hidden := len(last.GetPlanes()) - planes; hidden > 0 {
		lines = append(lines, fmt.Sprintf("  and %d more", hidden))
	}
	return append(lines, "")
}

func printTraffic(e *cli.Env, r *farev1.TrafficReport) error {
	return e.Print(r, func(w *tabwriter.Writer) { trafficTable(e, w, r) })
}

// trafficTable draws a report for people.
func trafficTable(e *cli.Env, w io.Writer, r *farev1.TrafficReport) {
	cli.Row(w, "SOURCE", "DESTINATION", "BYTES", "GOODPUT", "MIN", "MEDIAN", "MAX", "P50", "P99", "P99.9", "LATEST", "LOST", "DUPLICATED", "REORDERED", "WRONG", "ERRORS")
	figures := func(source, destination string, f *farev1.TrafficFigures) {
		l := f.GetLatency()
		lowest, middle, highest := "-", "-", "-" // for a run shorter than an interval
		if f.GetGoodputMaxBps() > 0 {
			lowest, middle, highest = bitsPerSecond(f.GetGoodputMinBps()), bitsPerSecond(f.GetGoodputMedianBps()), bitsPerSecond(f.GetGoodputMaxBps())
		}
		cli.Row(w, source, destination, fmt.Sprint(f.GetBytes()), bitsPerSecond(f.GetGoodputBps()), lowest, middle,
			highest, cli.Age(l.GetP50Ns()), cli.Age(l.GetP99Ns()), cli.Age(l.GetP999Ns()), cli.Age(l.GetMaxNs()), fmt.Sprint(f.GetLost()),
			fmt.Sprint(f.GetDuplicated()), fmt.Sprint(f.GetReordered()), fmt.Sprint(f.GetWrongBytes()), fmt.Sprint(f.GetErrors()))
	}
	for _, p := range r.GetPairs() {
		figures(p.GetSource(), p.GetDestination(), p.GetFigures())
	}
	figures("all", cli.Several(len(r.GetPairs()), "pair"), r.GetTotal())
	cli.Row(w)
	cli.Row(w, "PLANE", "SENT", "RESENT", "DUE", "WIRE", "SENT %", "WIRE %", "DUE %", "DEVIATION", "STALLS")
	for _, p := range r.GetPlanes() {
		wire, wirePart := "-", "-"
		if p.Wire != nil {
			wire, wirePart = fmt.Sprint(p.GetWire()), partOf(int64(p.GetWirePpb()))
		}
		cli.Row(w, p.GetPlane(), fmt.Sprint(p.GetSent()), fmt.Sprint(p.GetAgain()), fmt.Sprint(p.GetDue()), wire, partOf(int64(p.GetSentPpb())), wirePart, partOf(int64(p.GetDuePpb())),
			fmt.Sprintf("%+.3f", float64(p.GetDeviationPpb())/1e7), fmt.Sprint(p.GetStalls()))
	}
	cli.Row(w)
	verdict := e.Paint(cli.Green, "every byte verified")
	if !r.GetOk() {
		verdict = e.Paint(cli.Bold+cli.Red, "NOT every message arrived exactly once and intact")
	}
	fmt.Fprintf(w, "%s, %s by %s in order %s, %s messages of %d bytes in %s: %s\n", r.GetPattern(), r.GetOp(), r.GetTransport(), r.GetOrdering(),
		fmt.Sprint(r.GetTotal().GetMessages()), r.GetMessageBytes(), cli.Age(r.GetElapsedNs()), verdict)
	for _, line := range r.GetErrors() {
		fmt.Fprintln(w, "  "+line)
	}
}

// partOf writes parts per billion as percent.
func partOf(ppb int64) string { return fmt.Sprintf("%.3f", float64(ppb)/1e7) }
