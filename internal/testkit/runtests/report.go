package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/fared/fared/internal/testkit/gate"
)

// longest is the duration above which a test of the gate declares why the gate needs it.
const longest = 5 * time.Second

// An outcome is the end of a test.
type outcome string

// The outcomes, as test2json names them.
const (
	pass outcome = "pass"
	fail outcome = "fail"
	skip outcome = "skip"
)

// A ran is a test or subtest that has run.
type ran struct {
	name    string
	outcome outcome
	elapsed time.Duration
	output  []string // lines without those of the framework
}

// A result is the result of a job.
type result struct {
	job       job
	log       string // path of the output
	took, cpu time.Duration
	failed    bool     // a test failed, or the binary did
	tests     []*ran   // in the order of their start
	output    []string // lines outside of tests
}

// parse reads the events of one test binary.
func parse(events []byte) (result, error) {
	var res result
	byName := map[string]*ran{}
	for dec := json.NewDecoder(bytes.NewReader(events)); ; {
		var e struct {
			Action, Test, Output string
			Elapsed              float64
		}
		if err := dec.Decode(&e); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return result{}, err
		}
		if e.Test == "" {
			if line := strings.TrimRight(e.Output, "\n"); line != "" {
				res.output = append(res.output, line)
			}
			res.failed = res.failed || e.Action == string(fail)
			continue
		}
		t := byName[e.Test]
		if t == nil {
			t = &ran{name: e.Test}
			byName[e.Test] = t
			res.tests = append(res.tests, t)
		}
		switch e.Action {
		case string(pass), string(fail), string(skip):
			t.outcome, t.elapsed = outcome(e.Action), time.Duration(e.Elapsed*float64(time.Second))
		case "output":
			if line := strings.TrimRight(e.Output, "\n"); !strings.HasPrefix(line, "=== ") && line != "" {
				t.output = append(t.output, line)
			}
		}
	}
	for _, t := range res.tests {
		if t.outcome == "" { // the binary ended within the test
			t.outcome, res.failed = fail, true
		}
	}
	return res, nil
}

// count returns the number of tests and subtests with an outcome.
func (r result) count(o outcome) int {
	n := 0
	for _, t := range r.tests {
		if t.outcome == o {
			n++
		}
	}
	return n
}

// reason returns the text of a skip.
func (t *ran) reason() string {
	for _, line := range t.output {
		if _, text, found := strings.Cut(line, ".go:"); found && !strings.HasPrefix(strings.TrimSpace(line), "---") {
			if _, text, found = strings.Cut(text, ": "); found {
				return text
			}
		}
	}
	return "no reason"
}

// A verdict is the sum of a run.
type verdict struct {
	passed, failed int
	lacking        []string            // skips for a missing tool, privilege or feature of the kernel
	left           map[string][]string // slow tests that did not run, by part
	outgrown       []string            // tests above the limit that do not declare why the gate needs them
	slowest        []*ran
}

// sum adds up results. Subtests count, as in the output of go test -v.
func sum(results []result) verdict {
	v := verdict{left: map[string][]string{}}
	for _, res := range results {
		v.passed += res.count(pass)
		v.failed += res.count(fail)
		if res.failed && res.count(fail) == 0 {
			v.failed++
		}
		needed := map[string]bool{}
		for _, t := range res.job.tests {
			needed[t.name] = t.needed
		}
		for _, t := range res.tests {
			name := res.job.pkg.path + "." + t.name
			if t.outcome == skip {
				v.skipped(name, t.reason())
			}
			if top := !strings.Contains(t.name, "/"); top {
				v.slowest = append(v.slowest, &ran{name: name, elapsed: t.elapsed})
				if t.elapsed > longest && !needed[t.name] {
					v.outgrown = append(v.outgrown, fmt.Sprintf("%s %.1fs", name, t.elapsed.Seconds()))
				}
			}
		}
	}
	slices.SortStableFunc(v.slowest, func(a, b *ran) int { return cmp.Compare(b.elapsed, a.elapsed) })
	v.slowest = v.slowest[:min(len(v.slowest), 10)]
	return v
}

// skipped adds a skip.
func (v *verdict) skipped(name, reason string) {
	if rest, found := strings.CutPrefix(reason, gate.SkippedSlow); found {
		part, _, _ := strings.Cut(rest, ":")
		v.left[part] = append(v.left[part], name)
	} else if !strings.HasPrefix(reason, gate.SkippedRace) {
		v.lacking = append(v.lacking, name+": "+reason)
	}
}

// failures prints the messages of each failed test.
func failures(w io.Writer, results []result) {
	for _, res := range results {
		if !res.failed {
			continue
		}
		for _, t := range res.tests {
			if t.outcome == fail {
				fmt.Fprintf(w, "--- %s.%s failed (%s)\n", res.job.pkg.path, t.name, res.log)
				ends(w, t.output, 15)
			}
		}
		if out := crash(res.output); len(out) > 0 {
			fmt.Fprintf(w, "--- %s (%s)\n", res.job.pkg.path, res.log)
			ends(w, out, 30)
		}
	}
}

// crash returns the lines from a panic, a data race or a leak on.
func crash(lines []string) []string {
	i := slices.IndexFunc(lines, func(s string) bool {
		return strings.HasPrefix(s, "panic:") || strings.HasPrefix(s, "fatal error:") || strings.Contains(s, "DATA RACE") || strings.Contains(s, "goleak:")
	})
	if i < 0 {
		return nil
	}
	return lines[i:]
}

// ends prints the first and the last n lines: a test ends with its failure, or with the logs of its processes.
func ends(w io.Writer, lines []string, n int) {
	for i, line := range lines {
		switch {
		case i < n || i >= len(lines)-n:
			fmt.Fprintf(w, "    %.300s\n", line)
		case i == n:
			fmt.Fprintf(w, "    ... %d lines\n", len(lines)-2*n)
		}
	}
}

// print prints what a run left out, its slowest tests, and those that have outgrown the gate.
func (v verdict) print(w io.Writer) {
	for _, part := range gate.Parts() {
		if names := v.left[string(part)]; len(names) > 0 {
			fmt.Fprintf(w, "left out, %d for make test-slow PARTS=%s: %s\n", len(names), part, strings.Join(names, " "))
		}
	}
	if len(v.slowest) > 0 {
		fmt.Fprintln(w, "slowest:")
		for _, t := range v.slowest {
			fmt.Fprintf(w, "  %6.1fs  %s\n", t.elapsed.Seconds(), t.name)
		}
	}
	for _, t := range v.outgrown {
		fmt.Fprintf(w, "outgrown: %s is above %v: make it quicker, declare it gate.Slow, or gate.Needed with the reason\n", t, longest)
	}
	for _, t := range v.lacking {
		fmt.Fprintf(w, "skipped: %s\n", t)
	}
}

// total prints the closing line of a run with that title.
func (v verdict) total(w io.Writer, title string, took time.Duration) {
	fmt.Fprintf(w, "%s: %d passed, %d failed, %d skipped in %.0f s\n", title, v.passed, v.failed, len(v.lacking), took.Seconds())
}
