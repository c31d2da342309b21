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
	Busy        int               `json:"busy"`        // processes that did nothing but use processor time
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
	By           map[string]distribution `json:"by"` // contestant
	label        string
	values       map[string][]float64
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
		r.Figures = append(r.Figures, result{Key: f.key, Title: f.title, Unit: f.unit, label: f.label, Destinations: x.size, By: map[string]distribution{}, values: map[string][]float64{}})
	}
}

func (r *report) add(contestant string, got samples) {
	for key, values := range got {
		i := slices.IndexFunc(r.Figures, func(f result) bool { return f.Key == key })
		r.Figures[i].values[contestant] = append(r.Figures[i].values[contestant], values...)
	}
}

// end computes and prints the figures of a row.
func (r *report) end(x row) {
	for i := len(r.Figures) - len(x.figures); i < len(r.Figures); i++ {
		f := &r.Figures[i]
		best := math.Inf(1)
		for name, values := range f.values {
			slices.Sort(values)
			rank := func(p float64) float64 { return values[max(0, int(math.Ceil(p*float64(len(values))))-1)] }
			f.By[name] = distribution{P50: rank(0.5), P99: rank(0.99), Min: values[0], Max: values[len(values)-1], N: len(values)}
			if name == "bird" || name == "frr" {
				best = min(best, f.By[name].P50)
			}
		}
		for name, d := range f.By {
			if best > 0 && !math.IsInf(best, 1) {
				d.Ratio = d.P50 / best
				f.By[name] = d
			}
		}
		fmt.Printf("%5.0fs  %-14s", time.Since(r.Time).Seconds(), f.Key)
		for _, c := range r.settings.contestants {
			if d, ok := f.By[c.name()]; ok {
				fmt.Printf("  %s %s (%s)", c.name(), number(d.P50), number(d.P99))
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

// file is the name of a report without its ending; a busy machine's has another one.
func (r *report) file(busy bool) string {
	name := "bench-peers"
	if busy {
		name += "-busy"
	}
	return filepath.Join(r.settings.out, name)
}

// table writes the figures in Markdown. Next to those of a busy machine are those of the idle one, if there is a report
// of it.
func (r *report) table() string {
	idle := map[string]result{}
	if r.Busy > 0 {
		var other report
		if text, err := os.ReadFile(r.file(false) + ".json"); err == nil && json.Unmarshal(text, &other) == nil {
			for _, f := range other.Figures {
				idle[f.Key] = f
			}
		}
	}
	var b strings.Builder
	fmt.Fprintf(&b, "\n| p50 (p99) x ratio%s | unit | n |", map[bool]string{true: ", idle / busy machine"}[len(idle) > 0])
	for _, c := range r.settings.contestants {
		fmt.Fprintf(&b, " %s |", c.name())
	}
	b.WriteString("\n|---|---|---|" + strings.Repeat("---|", len(r.settings.contestants)) + "\n")
	for _, f := range r.Figures {
		n := 0
		for _, d := range f.By {
			n = max(n, d.N)
		}
		fmt.Fprintf(&b, "| %s | %s | %d |", f.Title, f.Unit, n)
		for _, c := range r.settings.contestants {
			if d, ok := idle[f.Key].By[c.name()]; ok {
				fmt.Fprintf(&b, " %s /", d)
			}
			if d, ok := f.By[c.name()]; ok {
				fmt.Fprintf(&b, " %s |", d)
			} else {
				b.WriteString(" - |")
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
		err = os.WriteFile(r.file(r.Busy > 0)+".json", append(text, '\n'), 0o644)
	}
	if err == nil {
		err = os.WriteFile(r.file(r.Busy > 0)+".svg", []byte(r.drawing()), 0o644)
	}
	return err
}
