package main

import (
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/lab"
)

// phases are the texts of timeline lines for events that happen at every server.
var phases = map[string]string{
	lab.EventWeights:  "weights changed",
	lab.EventAdopted:  "senders changed their slots",
	lab.EventInEffect: "data planes forward by the new weights",
	lab.EventLeft:     "last packets from abandoned slots",
}

// timeline draws a step's timeline in aligned lines, in order: one for each action, and one for each kind of event at
// the servers, from the first to the last server.
func timeline(o lab.Options, r lab.Result) []string {
	type phase struct {
		event       string
		first, last lab.Event
	}
	var all []phase
	for _, e := range r.Timeline {
		event := e.Event
		if event == lab.EventLastLost {
			event = lab.EventFirstLost // both ends of the same line
		}
		at := slices.IndexFunc(all, func(p phase) bool { return p.event == event })
		if at < 0 || event == lab.EventAction {
			all = append(all, phase{event, e, e})
		} else {
			all[at].last = e
		}
	}
	var lines []string
	for _, p := range all {
		text := ""
		switch p.event {
		case lab.EventAction:
			text = p.first.Detail
		case lab.EventFirstLost:
			text = losses(o, r.Traffic)
		default:
			text = phases[p.event] + ": " + p.first.Node
			if p.last.Node != p.first.Node {
				text += " first, " + p.last.Node + " last"
			}
		}
		span, last := fmt.Sprintf("%9.2f", ms(p.first.AtNS)), fmt.Sprintf("%9.2f", ms(p.last.AtNS))
		if last != span {
			span += " .. " + last
		}
		lines = append(lines, fmt.Sprintf("%-22s ms  %s", span, text))
	}
	return lines
}

// losses describes the packets lost from a step's first action on.
func losses(o lab.Options, t *lab.Traffic) string {
	var n uint64
	var planes []string
	for p := range o.Planes {
		if lost := t.LossPlanes[fmt.Sprintf("p%d", p)]; lost > 0 {
			n += lost
			planes = append(planes, fmt.Sprintf("p%d", p))
		}
	}
	return fmt.Sprintf("%s of %s lost on %s, %s for %.2f ms", cli.Several(int(n), "packet"), cli.Several(t.LossPairs, "pair"),
		strings.Join(planes, ", "), t.LossWorst, ms(t.LossIntervalNS))
}

func ms(ns int64) float64 { return float64(ns) / 1e6 }

// summaryLines draws the results of several runs, a line for each step.
func summaryLines(summary []lab.Summary) []string {
	if len(summary) == 0 {
		return nil
	}
	packets := slices.ContainsFunc(summary, func(s lab.Summary) bool { return s.LossInterval != nil })
	head := fmt.Sprintf("%-*s %-7s %-24s", stepColumn+4, "median (min..max), ms", "met", "weights followed")
	if packets {
		head += " " + fmt.Sprintf("%-24s", "loss interval") + " lost packets"
	}
	lines := []string{"", head}
	scenario := ""
	for _, s := range summary {
		if s.Scenario != scenario {
			scenario = s.Scenario
			lines = append(lines, "  "+scenario)
		}
		text := s.Step
		if utf8.RuneCountInString(text) > stepColumn {
			lines = append(lines, "    "+text)
			text = ""
		}
		line := fmt.Sprintf("    %-*s %-7s %-24s", stepColumn, text, fmt.Sprintf("%d/%d", s.OK, s.Runs), spreadMS(s.WeightsFollowed))
		if s.LossInterval != nil {
			line += fmt.Sprintf(" %-24s %d (%d..%d)", spreadMS(*s.LossInterval), s.PacketsLost.Median, s.PacketsLost.Min, s.PacketsLost.Max)
		}
		lines = append(lines, strings.TrimRight(line, " "))
	}
	lines[1] = strings.TrimRight(lines[1], " ")
	return lines
}

// spreadMS writes nanoseconds in milliseconds.
func spreadMS(s lab.Spread) string {
	return fmt.Sprintf("%.2f (%.2f..%.2f)", ms(s.Median), ms(s.Min), ms(s.Max))
}
