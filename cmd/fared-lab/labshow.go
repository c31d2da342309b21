package main

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/lab"
	"github.com/fared/fared/lab/judge"
	"github.com/fared/fared/topo"
)

// labShow presents a lab's progress.
type labShow interface {
	starting()
	progress(text string) // of a start that takes a while
	started(f *lab.Fabric, took time.Duration)
	run(n int) // one of several, counted from 1
	scenario(s *lab.Scenario)
	result(r lab.Result)
	next() // the step after it begins
	// ended receives the summary of several runs, nil for one run, and the sum of the transfers, nil without transfers.
	ended(met bool, summary []lab.Summary, transfers *lab.TransferSummary)
	// close restores the terminal; it may be called after any other method.
	close()
}

// newLabShow chooses the presentation: the live table in a terminal, unless a log goes to the same terminal.
func newLabShow(e *cli.Env, o lab.Options, scenarios []*lab.Scenario, runs int, verbose bool) (show labShow, live bool) {
	switch {
	case e.Output != "table":
		return &labData{e: e, o: o, runs: runs}, false
	case e.Terminal != nil && !verbose:
		return newLabLive(e, o, scenarios, runs), true
	}
	return &labLines{e: e, o: o, runs: runs}, false
}

// labData prints a JSON object on one line, or a YAML document, for each step.
type labData struct {
	e       *cli.Env
	o       lab.Options
	runs, n int // number of runs, and number of the current run
}

func (*labData) starting()                          {}
func (*labData) progress(string)                    {}
func (*labData) started(*lab.Fabric, time.Duration) {}
func (*labData) scenario(*lab.Scenario)             {}
func (*labData) next()                              {}
func (*labData) close()                             {}

func (s *labData) run(n int) { s.n = n }

func (s *labData) result(r lab.Result) { s.print(s.step(r)) }

func (s *labData) ended(_ bool, summary []lab.Summary, transfers *lab.TransferSummary) {
	if summary != nil {
		b, _ := json.Marshal(map[string][]lab.Summary{"summary": summary}) // strings and integers always marshal
		s.print(b)
	}
	if transfers != nil {
		b, _ := json.Marshal(map[string]*lab.TransferSummary{"transfers": transfers}) // strings and integers always marshal
		s.print(b)
	}
}

// print prints an object.
func (s *labData) print(b []byte) {
	if s.e.Output == "json" {
		fmt.Fprintf(s.e.Out, "%s\n", b)
		return
	}
	fmt.Fprintln(s.e.Out, "---")
	_ = cli.PrintJSON(s.e.Out, "yaml", b) // an error of the output ends the command by itself
}

// step writes a step, beginning with the keys that scripts use, in order, with weights in the order of planes.
func (s *labData) step(r lab.Result) []byte {
	b := []byte{'{'}
	add := func(key string, value any) {
		if len(b) > 1 {
			b = append(b, ',')
		}
		text, ok := value.([]byte)
		if !ok {
			text, _ = json.Marshal(value) // strings, integers and booleans always marshal
		}
		b = append(fmt.Appendf(b, "%q:", key), text...)
	}
	add("step", r.Step)
	add("source", r.Source)
	add("destination", r.Destination)
	add("weights", s.byPlane(r.Weights))
	add("expected", s.byPlane(r.Expected))
	add("ok", r.OK)
	add("slots_moved", r.SlotsMoved)
	add("scenario", r.Scenario)
	add("pairs", r.Pairs)
	add("elapsed_ns", r.ElapsedNS)
	if s.runs > 1 {
		add("run", s.n)
	}
	if s.o.Timeline {
		add("weights_followed_ns", r.WeightsFollowedNS)
	}
	if t := r.Traffic; t != nil {
		add("packets_sent", t.Sent)
		add("packets_lost", t.Lost)
		add("steady_packets_sent", t.SteadySent)
		add("steady_packets_lost", t.SteadyLost)
		add("measured_packets", inPlanes(s.o, t.Measured))
		add("measured_share", inPlanes(s.o, t.Share))
		add("weight_share", inPlanes(s.o, t.Wanted))
		add("packets_duplicated", t.Duplicated)
		add("packets_late", t.Late)
		add("loss_interval_ns", t.LossIntervalNS)
		add("loss_worst", t.LossWorst)
		add("loss_span_ns", t.LossSpanNS)
		add("loss_pairs", t.LossPairs)
		add("loss_planes", inPlanes(s.o, t.LossPlanes))
	}
	if r.Transfer != nil {
		add("transfer", r.Transfer)
	}
	if len(r.Timeline) > 0 {
		add("timeline", r.Timeline)
	}
	if len(r.Wrong) > 0 {
		add("wrong", r.Wrong)
	}
	return append(b, '}')
}

func (s *labData) byPlane(weights map[string]uint32) []byte { return inPlanes(s.o, weights) }

// inPlanes writes values in the order of the planes.
func inPlanes[V uint32 | uint64 | float64](o lab.Options, values map[string]V) []byte {
	b := []byte{'{'}
	for p := range o.Planes {
		if p > 0 {
			b = append(b, ',')
		}
		name := fmt.Sprintf("p%d", p)
		text, _ := json.Marshal(values[name]) // finite numbers always marshal
		b = append(fmt.Appendf(b, "%q:", name), text...)
	}
	return append(b, '}')
}

// inOrder returns the weights in the order of the planes.
func inOrder(o lab.Options, weights map[string]uint32) []uint32 {
	out := make([]uint32, o.Planes)
	for p := range out {
		out[p] = weights[fmt.Sprintf("p%d", p)]
	}
	return out
}

// labLines prints plain lines, at most 120 columns wide at the default size.
type labLines struct {
	e     *cli.Env
	o     lab.Options
	runs  int
	steps int
}

// stepColumn is the width of a step's text; a longer text has a separate line.
const stepColumn = 56

func size(o lab.Options) string {
	if o.GPUPorts == topo.Own {
		return fmt.Sprintf("%d planes, %d servers with %d GPUs each, which own %d sub-ports of %s in every plane", o.Planes, o.Servers, o.GPUs, o.SubPorts, o.Speed)
	}
	return fmt.Sprintf("%d planes, %d servers with %d GPU each, %d sub-ports of %s in every plane", o.Planes, o.Servers, o.GPUs, o.SubPorts, o.Speed)
}

func (s *labLines) starting() { fmt.Fprintln(s.e.Out, size(s.o)) }

func (s *labLines) progress(text string) { fmt.Fprintln(s.e.Out, text) }

func (s *labLines) started(f *lab.Fabric, took time.Duration) {
	fmt.Fprintf(s.e.Out, "%d BGP sessions established, every weight in effect after %s\n", f.Sessions(), took.Round(time.Millisecond))
}

func (s *labLines) scenario(sc *lab.Scenario) {
	fmt.Fprintf(s.e.Out, "\n%s\n", s.e.Paint(cli.Bold, sc.Name+": "+sc.Title))
}

func (s *labLines) result(r lab.Result) {
	s.steps++
	text := r.Step
	mark := labMark(s.e, r.OK)
	if utf8.RuneCountInString(text) > stepColumn {
		fmt.Fprintf(s.e.Out, "  %s %s\n", mark, text)
		mark, text = "     ", ""
	}
	fmt.Fprintf(s.e.Out, "  %s %-*s %s -> %s  %s\n", mark, stepColumn, text, r.Source, r.Destination, bars(inOrder(s.o, r.Weights)))
	verdict := fmt.Sprintf("all %d pairs match the expected weights after %s", r.Pairs, took(r))
	if !r.OK {
		verdict = "after " + took(r).String()
	}
	fmt.Fprintf(s.e.Out, "        %s, %d slots moved\n", verdict, r.SlotsMoved)
	if r.Traffic != nil {
		fmt.Fprintf(s.e.Out, "        %s\n", packets(s.o, r.Traffic))
	}
	if s.o.Transport != "" {
		fmt.Fprintf(s.e.Out, "        %s\n", transferred(r.Transfer))
	}
	for _, line := range timeline(s.o, r) {
		fmt.Fprintf(s.e.Out, "        %s\n", line)
	}
	for _, w := range r.Wrong {
		fmt.Fprintf(s.e.Out, "        %s\n", w)
	}
}

// packets describes the results of a step's packets, and the planes' parts of the watched pair's packets.
func packets(o lab.Options, t *lab.Traffic) string {
	text := fmt.Sprintf("%d packets, %d lost, %d of them while nothing changed", t.Sent, t.Lost, t.SteadyLost)
	if o.Planes > 8 || t.SteadySent == 0 {
		return text
	}
	text += "; shares at the leaves:"
	for p := range o.Planes {
		name := fmt.Sprintf("p%d", p)
		text += fmt.Sprintf(" %.1f", 100*t.Share[name])
	}
	return text + " %"
}

func (s *labLines) run(n int) {
	if s.runs > 1 {
		fmt.Fprintf(s.e.Out, "\n%s\n", s.e.Paint(cli.Bold, runOf(n, s.runs)))
	}
}

func runOf(n, runs int) string { return fmt.Sprintf("run %d of %d", n, runs) }

func (s *labLines) ended(met bool, summary []lab.Summary, transfers *lab.TransferSummary) {
	printLabEnd(s.e, s.steps, met, summary, transfers)
}

// printLabEnd prints the results of a lab.
func printLabEnd(e *cli.Env, steps int, met bool, summary []lab.Summary, transfers *lab.TransferSummary) {
	for _, line := range summaryLines(summary) {
		fmt.Fprintln(e.Out, line)
	}
	for _, line := range transferLines(transfers) {
		fmt.Fprintln(e.Out, line)
	}
	fmt.Fprintf(e.Out, "\n%s\n", labVerdict(e, steps, met))
}

func (s *labLines) next()  {}
func (s *labLines) close() {}

func labMark(e *cli.Env, ok bool) string {
	if ok {
		return e.Paint(cli.Green, "ok   ")
	}
	return e.Paint(cli.Red, "WRONG")
}

func labVerdict(e *cli.Env, steps int, met bool) string {
	if !met {
		return fmt.Sprintf("%s, %s", cli.Several(steps, "step"), e.Paint(cli.Bold+cli.Red, "NOT every expectation met"))
	}
	return fmt.Sprintf("%s, %s", cli.Several(steps, "step"), e.Paint(cli.Bold, "every expectation met"))
}

func took(r lab.Result) time.Duration { return time.Duration(r.ElapsedNS).Round(10 * time.Microsecond) }

// bars draws weights: 2:2:1:2 and a bar for every plane, in proportion to the largest weight.
func bars(weights []uint32) string {
	const wide = 23 // of all bars, in columns
	width := (wide+1)/max(1, len(weights)) - 1
	text := fmt.Sprintf("%-7s", judge.Ratio(weights))
	if width < 1 {
		return strings.TrimRight(text, " ")
	}
	for _, w := range weights {
		text += " " + bar(w, slices.Max(weights), min(width, 8))
	}
	return text
}

// bar draws one bar; a weight above 0 has at least one column.
func bar(w, top uint32, width int) string {
	n := 0
	if w > 0 && width > 0 {
		n = max(1, int(uint64(w)*uint64(width)/uint64(top)))
	}
	return strings.Repeat("█", n) + strings.Repeat("·", width-n)
}
