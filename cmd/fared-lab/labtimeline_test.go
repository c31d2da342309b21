package main

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/lab"
	"github.com/fared/fared/topo"
)

// TestTimelineLines checks that each action has a line, and each kind of event at all servers one, from the first to
// the last.
func TestTimelineLines(t *testing.T) {
	o := lab.Options{Spec: topo.Spec{Planes: 3}}
	r := lab.Result{Timeline: []lab.Event{
		{AtNS: 950_000, Event: lab.EventFirstLost, Node: "server1", Detail: "p2 toward server2"},
		{AtNS: 2_130_000, Event: lab.EventAction, Detail: "cut server2 p2"},
		{AtNS: 3_000_000, Event: lab.EventWeights, Node: "server3", Detail: "1:1:0 toward server2"},
		{AtNS: 3_100_000, Event: lab.EventInEffect, Node: "server3", Detail: "toward server2"},
		{AtNS: 61_234_567, Event: lab.EventLastLost, Node: "server1", Detail: "p2 toward server2"},
		{AtNS: 61_300_000, Event: lab.EventLeft, Node: "server1", Detail: "p2 toward server2"},
		{AtNS: 62_000_000, Event: lab.EventWeights, Node: "server1", Detail: "1:1:0 toward server2"},
		{AtNS: 62_000_000, Event: lab.EventAction, Detail: "cut server2 p1"},
		{AtNS: 10_062_000_000, Event: lab.EventWeights, Node: "server2", Detail: "1:0:0 toward server1"},
	}, Traffic: &lab.Traffic{LossPairs: 1, LossPlanes: map[string]uint64{"p0": 0, "p1": 4, "p2": 38}, LossIntervalNS: 60_784_567, LossWorst: "server1 -> server2"}}
	want := []string{
		"     0.95 ..     61.23 ms  42 packets of 1 pair lost on p1, p2, server1 -> server2 for 60.78 ms",
		"     2.13              ms  cut server2 p2",
		"     3.00 ..  10062.00 ms  weights changed: server3 first, server2 last",
		"     3.10              ms  data planes forward by the new weights: server3",
		"    61.30              ms  last packets from abandoned slots: server1",
		"    62.00              ms  cut server2 p1",
	}
	if got := timeline(o, r); !slices.Equal(got, want) {
		t.Errorf("\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if got := timeline(o, lab.Result{}); got != nil {
		t.Errorf("of nothing: %q", got)
	}
}

// TestSummaryLines checks that columns are aligned, with and without packets.
func TestSummaryLines(t *testing.T) {
	long := strings.Repeat("long ", 14)
	with := func(step string, packets bool) lab.Summary {
		s := lab.Summary{Scenario: "port", Step: step, Runs: 5, OK: 4, WeightsFollowed: lab.Spread{Median: 66_990_000, Min: 64_000_000, Max: 74_260_000}}
		if packets {
			s.LossInterval, s.PacketsLost = &lab.Spread{Median: 62_070_000, Min: 57_530_000, Max: 66_610_000}, &lab.Spread{Median: 46, Min: 36, Max: 57}
		}
		return s
	}
	for want, summary := range map[string][]lab.Summary{
		"": nil,
		`
median (min..max), ms                                        met     weights followed         loss interval            lost packets
  port
    it fails                                                 4/5     66.99 (64.00..74.26)     62.07 (57.53..66.61)     46 (36..57)
    ` + long + `
                                                             4/5     66.99 (64.00..74.26)     62.07 (57.53..66.61)     46 (36..57)`: {with("it fails", true), with(long, true)},
		`
median (min..max), ms                                        met     weights followed
  port
    it fails                                                 4/5     66.99 (64.00..74.26)`: {with("it fails", false)},
	} {
		if got := strings.Join(summaryLines(summary), "\n"); got != want {
			t.Errorf("\n%s\nwant\n%s", got, want)
		}
	}
}

// TestLabRuns checks that several runs are numbered, timed and summed, as data and as lines.
func TestLabRuns(t *testing.T) {
	gate.Slow(t, gate.Labs, "eight runs of a scenario")
	args := labArgs("--scenario", "leaf", "--runs", "3", "--timeline")
	out := must(t, append(args, "-o", "json")...)
	lines := strings.Split(strings.TrimSuffix(out, "\n"), "\n")
	if len(lines) != 3*2+1 {
		t.Fatalf("%d lines, want one for each of 2 steps in 3 runs, and a summary:\n%s", len(lines), out)
	}
	followed := map[string][]int64{}
	for i, line := range lines[:6] {
		var step struct {
			Step     string
			Run      int
			Followed int64       `json:"weights_followed_ns"`
			Timeline []lab.Event `json:"timeline"`
		}
		err := json.Unmarshal([]byte(line), &step)
		// The action need not be the first event.
		acted := slices.ContainsFunc(step.Timeline, func(e lab.Event) bool { return e.Event == lab.EventAction })
		if err != nil || step.Run != 1+i/2 || step.Followed <= 0 || len(step.Timeline) < 3 || !acted {
			t.Errorf("line %d: %+v, %v", i+1, step, err)
		}
		followed[step.Step] = append(followed[step.Step], step.Followed)
	}
	var last struct{ Summary []lab.Summary }
	if err := json.Unmarshal([]byte(lines[6]), &last); err != nil || len(last.Summary) != 2 {
		t.Fatalf("%v in %s", err, lines[6])
	}
	for _, s := range last.Summary {
		all := followed[s.Step]
		slices.Sort(all)
		if len(all) != 3 || s.Runs != 3 || s.OK != 3 || s.WeightsFollowed != (lab.Spread{Median: all[1], Min: all[0], Max: all[2]}) || s.LossInterval != nil || s.Scenario != "leaf" {
			t.Errorf("%+v of %v", s, all)
		}
	}

	out = must(t, args...)
	for _, want := range []string{"\nrun 1 of 3\n", "\nrun 3 of 3\n", " ms  kill leaf1\n", " ms  weights changed: ", "\nmedian (min..max), ms", "3/3 ", "\n6 steps, every expectation met\n"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in:\n%s", want, out)
		}
	}
	for line := range strings.Lines(out) {
		if n := utf8.RuneCountInString(line); n > 121 {
			t.Errorf("%d columns: %s", n, line)
		}
	}
	out = must(t, labArgs("--scenario", "leaf", "--runs", "2")...)
	if strings.Contains(out, " ms  kill") || strings.Contains(out, " 0.00 (") {
		t.Errorf("timelines that were not asked for, or are not summed up:\n%s", out)
	}
	for _, n := range []string{"0", "-1", "10001"} {
		if got := refused(t, cli.ExitUsage, labArgs("--runs", n)...); !strings.Contains(got, fmt.Sprintf("--runs %s is not within 1 to 10000", n)) {
			t.Errorf("%s", got)
		}
	}
}
