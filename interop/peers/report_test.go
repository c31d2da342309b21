package peers

import (
	"bufio"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// report has the figures of a contest. Its fields are those of bench-peers.json.
type report struct {
	Time        time.Time         `json:"time"`
	Seconds     float64           `json:"seconds"` // duration of the contest
	Machine     machine           `json:"machine"`
	Busy        int               `json:"busy"`        // processes that did nothing but use processor time in the figures of busy
	Contestants map[string]string `json:"contestants"` // version by name
	Figures     []result          `json:"figures"`
	Failures    []string          `json:"failures,omitempty"`

	settings settings
	rowBegan time.Time
}

type machine struct {
	Processor  string `json:"processor"`
	Processors int    `json:"processors"`
	Kernel     string `json:"kernel"`
	Load       string `json:"load"` // /proc/loadavg at the start
}

// result is a figure of all contestants.
type result struct {
	Key          string                  `json:"key"`
	Title        string                  `json:"title"`
	Unit         string                  `json:"unit"` // ms, MB (10^6 bytes), %, packets, changes
	Destinations int                     `json:"destinations"`
	By           map[string]distribution `json:"by"`             // contestant, on an idle machine
	Busy         map[string]distribution `json:"busy,omitempty"` // the same next to busy processes
	label        string
	values       [2]map[string][]float64 // idle, busy
}

// distribution summarizes the repetitions of a figure. Percentiles are values that were measured (nearest rank).
type distribution struct {
	P50 float64 `json:"p50"`
	P99 float64 `json:"p99"`
	Min float64 `json:"min"`
	Max float64 `json:"max"`
	N   int     `json:"n"`
	// Ratio is p50 divided by the lower p50 of BIRD and FRR; 0 if neither has one.
	Ratio float64 `json:"ratio,omitempty"`
}

func newReport(s settings) *report {
	r := &report{Time: time.Now(), settings: s, Busy: s.busy, Contestants: map[string]string{}, Machine: machine{Processors: runtime.NumCPU()}}
	for _, c := range s.contestants {
		r.Contestants[c.name()] = c.version()
	}
	var name unix.Utsname
	if unix.Uname(&name) == nil {
		r.Machine.Kernel = unix.ByteSliceToString(name.Release[:])
	}
	if load, err := os.ReadFile("/proc/loadavg"); err == nil {
		r.Machine.Load = strings.TrimSpace(string(load))
	}
	if f, err := os.Open("/proc/cpuinfo"); err == nil {
		defer f.Close()
		for lines := bufio.NewScanner(f); lines.Scan() && r.Machine.Processor == ""; {
			if key, value, _ := strings.Cut(lines.Text(), ":"); strings.TrimSpace(key) == "model name" {
				r.Machine.Processor = strings.TrimSpace(value)
			}
		}
	}
	return r
}

// fail records that a contestant takes no further part with this number of destinations.
func (r *report) fail(b *bed, when string, err error) {
	b.out = fmt.Errorf("%s, %s, %s: %w", b.name, count(b.destinations), when, err)
	r.Failures = append(r.Failures, b.out.Error())
	fmt.Println(b.out)
	b.t.Error(b.out) // its processes' output is shown at the end of the subtest
}

func (r *report) begin(x row) {
	r.rowBegan = time.Now()
	for _, f := range x.figures {
		r.Figures = append(r.Figures, result{Key: f.key, Title: f.title, Unit: f.unit, label: f.label, Destinations: x.size, By: map[string]distribution{}, Busy: map[string]distribution{}, values: [2]map[string][]float64{{}, {}}})
	}
}

func (r *report) add(contestant string, got samples, busy bool) {
	for key, values := range got {
		f := &r.Figures[slices.IndexFunc(r.Figures, func(f result) bool { return f.Key == key })]
		by := f.values[0]
		if busy {
			by = f.values[1]
		}
		by[contestant] = append(by[contestant], values...)
	}
}

// summarize writes the distributions of a figure's values.
func summarize(all map[string][]float64, by map[string]distribution) {
	best := math.Inf(1)
	for name, values := range all {
		slices.Sort(values)
		rank := func(p float64) float64 { return values[max(0, int(math.Ceil(p*float64(len(values))))-1)] }
		by[name] = distribution{P50: rank(0.5), P99: rank(0.99), Min: values[0], Max: values[len(values)-1], N: len(values)}
		if name == "bird" || name == "frr" {
			best = min(best, by[name].P50)
		}
	}
	for name, d := range by {
		if best > 0 && !math.IsInf(best, 1) {
			d.Ratio = d.P50 / best
			by[name] = d
		}
	}
}

// end computes and prints the figures of a row.
func (r *report) end(x row) {
	for i := len(r.Figures) - len(x.figures); i < len(r.Figures); i++ {
		f := &r.Figures[i]
		summarize(f.values[0], f.By)
		summarize(f.values[1], f.Busy)
		fmt.Printf("%5.0fs  %-14s", time.Since(r.Time).Seconds(), f.Key)
		for _, c := range r.settings.contestants {
			if d, ok := f.By[c.name()]; ok {
				fmt.Printf("  %s %s (%s)", c.name(), number(d.P50), number(d.P99))
			}
			if d, ok := f.Busy[c.name()]; ok {
				fmt.Printf(" busy %s (%s)", number(d.P50), number(d.P99))
			}
		}
		fmt.Println()
	}
}

// number writes a value with three digits.
func number(v float64) string {
	switch {
	case v == 0:
		return "0"
	case math.Abs(v) < 0.9995:
		return fmt.Sprintf("%.3f", v)
	case math.Abs(v) < 9.995:
		return fmt.Sprintf("%.2f", v)
	case math.Abs(v) < 99.95:
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.0f", v)
}

// table writes the figures in Markdown, with a column for the idle machine and, where busy processes ran, another for
// the busy one next to it.
func (r *report) table() string {
	var b strings.Builder
	b.WriteString("\n| p50 (p99) x ratio | unit | n |")
	columns := 0
	for _, c := range r.settings.contestants {
		fmt.Fprintf(&b, " %s |", c.name())
		if columns++; r.Busy > 0 {
			fmt.Fprintf(&b, " %s, busy |", c.name())
			columns++
		}
	}
	b.WriteString("\n|---|---|---|" + strings.Repeat("---|", columns) + "\n")
	for _, f := range r.Figures {
		n := 0
		for _, d := range f.By {
			n = max(n, d.N)
		}
		fmt.Fprintf(&b, "| %s | %s | %d |", f.Title, f.Unit, n)
		cell := func(by map[string]distribution, name string) {
			if d, ok := by[name]; ok {
				fmt.Fprintf(&b, " %s |", d)
			} else {
				b.WriteString(" - |")
			}
		}
		for _, c := range r.settings.contestants {
			cell(f.By, c.name())
			if r.Busy > 0 {
				cell(f.Busy, c.name())
			}
		}
		b.WriteString("\n")
	}
	return b.String()
}

// String writes p50, p99 and the ratio to the best of BIRD and FRR.
func (d distribution) String() string {
	text := number(d.P50)
	if d.N > 1 {
		text += " (" + number(d.P99) + ")"
	}
	switch {
	case d.Ratio == 0, d.Ratio == 1:
	case d.Ratio < 10:
		text += fmt.Sprintf(" x%.2g", d.Ratio)
	default:
		text += fmt.Sprintf(" x%.0f", d.Ratio)
	}
	return text
}

// finish prints the table and writes the files.
func (r *report) finish() error {
	r.Seconds = math.Round(time.Since(r.Time).Seconds())
	fmt.Println(r.table())
	if r.settings.out == "" {
		return nil
	}
	if err := os.MkdirAll(r.settings.out, 0o755); err != nil {
		return err
	}
	text, err := json.MarshalIndent(r, "", "  ")
	if err == nil {
		err = os.WriteFile(filepath.Join(r.settings.out, "bench-peers.json"), append(text, '\n'), 0o644)
	}
	if err == nil {
		err = os.WriteFile(filepath.Join(r.settings.out, "bench-peers.svg"), []byte(r.drawing()), 0o644)
	}
	return err
}
