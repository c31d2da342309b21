package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/internal/testkit/binary"
	"github.com/fared/fared/lab"
	"github.com/fared/fared/lab/judge"
	"github.com/fared/fared/topo"
)

// small is a fabric that starts quickly.
var small = []string{"lab", "--planes", "2", "--servers", "2"}

func labArgs(args ...string) []string { return append(slices.Clone(small), args...) }

// TestLabJSON checks that every step is one line with a JSON object, beginning with the keys that scripts use.
func TestLabJSON(t *testing.T) {
	out := must(t, labArgs("--scenario", "sub-cable", "-o", "json")...)
	lines := strings.Split(strings.TrimSuffix(out, "\n"), "\n")
	if len(lines) != 4 {
		t.Fatalf("%d lines, want one for each of 4 steps:\n%s", len(lines), out)
	}
	want := []string{`{"p0":2,"p1":1}`, `{"p0":2,"p1":1}`, `{"p0":2,"p1":1}`, `{"p0":1,"p1":1}`}
	contract := regexp.MustCompile(`^\{"step":"[^"]+","source":"server1","destination":"server2","weights":(\{[^}]*\}),"expected":(\{[^}]*\}),"ok":true,"slots_moved":0,"scenario":"sub-cable","pairs":2,"elapsed_ns":[0-9]+\}$`)
	for i, line := range lines {
		m := contract.FindStringSubmatch(line)
		if m == nil {
			t.Errorf("step %d:\n%s\ndoes not look like\n%s", i+1, line, contract)
		} else if m[1] != want[i] || m[2] != want[i] {
			t.Errorf("step %d has weights %s, expected %s; want %s", i+1, m[1], m[2], want[i])
		}
	}
}

// TestLabOrder checks that planes above 9 are sorted by number.
func TestLabOrder(t *testing.T) {
	o := lab.Options{Spec: topo.Spec{Planes: 12}}
	weights := map[string]uint32{}
	for p := range o.Planes {
		weights[fmt.Sprintf("p%d", p)] = uint32(p)
	}
	s := labData{o: o}
	got := string(s.byPlane(weights))
	if got != `{"p0":0,"p1":1,"p2":2,"p3":3,"p4":4,"p5":5,"p6":6,"p7":7,"p8":8,"p9":9,"p10":10,"p11":11}` {
		t.Error(got)
	}
}

// TestLabWrong checks that an unmet expectation is reported on every kind of output, and ends with exit code 1.
func TestLabWrong(t *testing.T) {
	o := fared(t, labArgs("--script", "testdata/wrong.txt")...)
	if o.Code != cli.ExitFailed || !explains(o.Err) || !strings.Contains(o.Err, "expectation") {
		t.Errorf("exit %d, standard error:\n%s", o.Code, o.Err)
	}
	for _, want := range []string{"  WRONG half a Y-cable fails", "line 5: server1 -> server2 has 2:1, the script expects 1:1", "  ok    it is mended", "2 steps, NOT every expectation met"} {
		if !strings.Contains(o.Out, want) {
			t.Errorf("no %q in:\n%s", want, o.Out)
		}
	}
	if strings.Contains(o.Out, "\x1b") {
		t.Errorf("escape codes where there is no terminal:\n%q", o.Out)
	}
	o = fared(t, labArgs("--script", "testdata/wrong.txt", "-o", "json")...)
	if o.Code != cli.ExitFailed || strings.Count(o.Out, "\n") != 2 {
		t.Fatalf("exit %d, standard output:\n%s", o.Code, o.Out)
	}
	var step struct {
		OK    bool
		Wrong []string
	}
	if err := json.Unmarshal([]byte(o.Out[:strings.Index(o.Out, "\n")]), &step); err != nil || step.OK || len(step.Wrong) != 1 {
		t.Errorf("the first step is %+v, %v", step, err)
	}
}

// TestLabWidth checks that plain lines of the default size fit 120 columns and are aligned: those of every step of
// every scenario, as it would be reported.
func TestLabWidth(t *testing.T) {
	var lines bytes.Buffer
	o := lab.Options{Spec: topo.Spec{Planes: 4, Servers: 8, GPUs: 1, SubPorts: 2, Speed: 400e9}}
	scenarios, err := lab.Load("all", o)
	if err != nil {
		t.Fatal(err)
	}
	s := &labLines{e: &cli.Env{Out: &lines}, o: o}
	s.starting()
	for _, scenario := range scenarios {
		s.scenario(scenario)
		for _, step := range scenario.Steps {
			s.result(lab.Result{Step: step.Text, Source: "server1", Destination: "server2", Weights: map[string]uint32{"p0": 2, "p1": 2, "p2": 1, "p3": 2}, OK: true,
				SlotsMoved: 448, Pairs: 56, ElapsedNS: int64(12*time.Second + 345670*time.Microsecond)})
		}
	}
	s.ended(true, nil, nil)
	out := lines.String()
	column := -1
	for line := range strings.Lines(out) {
		line = strings.TrimSuffix(line, "\n")
		if n := utf8.RuneCountInString(line); n > 120 {
			t.Errorf("%d columns: %s", n, line)
		}
		if at := strings.Index(line, "server1 -> server2"); at >= 0 {
			if column < 0 {
				column = at
			}
			if at != column {
				t.Errorf("the pair is in column %d, elsewhere in %d: %s", at, column, line)
			}
		}
	}
	if column < 0 || !strings.HasSuffix(out, " steps, every expectation met\n") {
		t.Errorf("lab prints:\n%s", out)
	}

	var b bytes.Buffer
	s = &labLines{e: &cli.Env{Out: &b}, o: lab.Options{Spec: topo.Spec{Planes: 2}}}
	s.result(lab.Result{Step: strings.Repeat("long ", 14), Source: "server1", Destination: "server2", Weights: map[string]uint32{"p0": 2, "p1": 1}, OK: true})
	if lines := strings.Split(b.String(), "\n"); !strings.HasPrefix(lines[0], "  ok    long") || strings.Index(lines[1], "server1 -> server2") != column {
		t.Errorf("a long step is printed as:\n%s", b.String())
	}
}

// TestBars checks that bars are in proportion: a small value has a visible bar, and only zero has an empty bar.
func TestBars(t *testing.T) {
	for _, test := range []struct {
		weights []uint32
		want    string
	}{
		{[]uint32{2, 2, 1, 2}, "2:2:1:2 █████ █████ ██··· █████"},
		{[]uint32{0, 0}, "0:0     ········ ········"},
		{[]uint32{1, 1000}, "1:1000  █······· ████████"},
		{slices.Repeat([]uint32{1}, 24), judge.Ratio(slices.Repeat([]uint32{1}, 24))},
	} {
		if got := bars(test.weights); got != test.want {
			t.Errorf("bars(%v) = %q, want %q", test.weights, got, test.want)
		}
	}
}

// TestLabInterrupted checks that Ctrl-C ends a lab and all its processes at once.
func TestLabInterrupted(t *testing.T) {
	b := inBackground(t, labArgs("--pace", "1h")...)
	b.Until(t, "0 slots moved")
	if code := b.End(t); code != cli.ExitFailed || !strings.Contains(b.Err.String(), "fared: interrupted") {
		t.Errorf("exit %d, %s", code, b.Err)
	}
}

// TestWriteConfigs checks that the written files are valid and can be read again.
func TestWriteConfigs(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new")
	must(t, labArgs("--write-configs", dir, "--gpus", "2")...)
	files, err := filepath.Glob(filepath.Join(dir, "*.yaml"))
	if err != nil || len(files) != 4 {
		t.Fatalf("%v, %v", files, err)
	}
	for _, file := range files {
		if out, err := exec.Command(binary.Fared(t), "check", "--config", file).CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
		}
	}
	refused(t, cli.ExitFailed, labArgs("--write-configs", filepath.Join(files[0], "below"))...)
}

// openTerminal makes a pseudo-terminal of a size. The returned function yields the text written to it, and must be
// called after the last write.
func openTerminal(t *testing.T, columns, rows uint16) (tty *os.File, screen func() string) {
	t.Helper()
	pty, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatalf("a test of the live table needs a pseudo-terminal: %v", err)
	}
	raw := int(pty.Fd())
	if err := unix.IoctlSetPointerInt(raw, unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(raw, unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.IoctlSetWinsize(raw, unix.TIOCSWINSZ, &unix.Winsize{Row: rows, Col: columns}); err != nil {
		t.Fatal(err)
	}
	tty, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	var reading sync.WaitGroup
	reading.Go(func() { io.Copy(&b, pty) }) // ends with EIO when the other side is closed
	return tty, sync.OnceValue(func() string {
		tty.Close()
		reading.Wait()
		pty.Close()
		return b.String()
	})
}

var colors = regexp.MustCompile("\x1b\\[[0-9]*m")

// TestLabLive checks that in a terminal the picture of the fabric follows the steps and fits the terminal's size; at
// the end the terminal is restored and has every step.
func TestLabLive(t *testing.T) {
	for _, test := range []struct {
		name          string
		noColor       string
		columns, rows uint16
	}{
		{"wide", "", 120, 40},
		{"small and without color", "1", 50, 12},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Setenv("TERM", "xterm")
			t.Setenv("NO_COLOR", test.noColor)
			tty, screen := openTerminal(t, test.columns, test.rows)
			var errOut bytes.Buffer
			code := execute(t.Context(), labArgs("--scenario", "leaf", "--pace", "0"), strings.NewReader(""), tty, &errOut)
			text := screen()
			if code != cli.ExitOK || errOut.Len() > 0 {
				t.Fatalf("exit %d: %s", code, errOut.String())
			}
			if got := colors.MatchString(text); got == (test.noColor != "") {
				t.Errorf("colors: %v", got)
			}
			text = strings.ReplaceAll(colors.ReplaceAllString(text, ""), "\r\n", "\n") // the terminal adds the carriage returns
			live, ok := strings.CutPrefix(text, otherScreen)
			live, after, ok2 := strings.Cut(live, firstScreen)
			if !ok || !ok2 || strings.Contains(after, "\x1b") {
				t.Fatalf("the terminal is not left as it was: %q", text)
			}
			frames := strings.Split(live, cli.Home)[1:]
			dark := false
			for _, frame := range frames {
				lines := strings.Split(strings.TrimSuffix(frame, cli.ClearBelow), cli.ClearLine+"\n")
				if len(lines) > int(test.rows) {
					t.Fatalf("a frame of %d lines:\n%s", len(lines), frame)
				}
				for _, line := range lines {
					if utf8.RuneCountInString(line) > int(test.columns) {
						t.Errorf("a line is wider than the terminal: %q", line)
					}
				}
				dark = dark || strings.Contains(frame, "p1     leaf1    DOWN   0/4") && strings.Contains(frame, "ok    the plane's leaf fails")
			}
			if !dark {
				t.Errorf("no frame of %d shows the dead leaf; the last is\n%s", len(frames), frames[len(frames)-1])
			}
			for _, want := range []string{"p1     leaf1    up     4/4         1 ████████████████████  800G", "leaf: a leaf fails", "  ok    the plane's leaf fails", "1:0", "  ok    the leaf returns", "2 steps, every expectation met"} {
				if !strings.Contains(after, want) {
					t.Errorf("no %q in what is left:\n%s", want, after)
				}
			}
		})
	}
}

// TestLabLiveInterrupted checks that Ctrl-C restores the terminal, and that there is no live table where the terminal
// cannot show it.
func TestLabLiveInterrupted(t *testing.T) {
	t.Setenv("TERM", "xterm")
	tty, screen := openTerminal(t, 80, 24)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var errOut bytes.Buffer
	if code := execute(ctx, labArgs(), strings.NewReader(""), tty, &errOut); code != cli.ExitFailed {
		t.Errorf("exit %d", code)
	}
	if text := screen(); !strings.HasSuffix(text, firstScreen) {
		t.Errorf("%q", text)
	}
	t.Setenv("TERM", "dumb")
	tty, screen = openTerminal(t, 80, 24)
	if code := execute(t.Context(), labArgs("--scenario", "none"), strings.NewReader(""), tty, &errOut); code != cli.ExitOK {
		t.Errorf("exit %d", code)
	}
	if text := screen(); strings.Contains(text, "\x1b") || !strings.Contains(text, "every expectation met") {
		t.Errorf("a dumb terminal gets %q", text)
	}
}

func TestFit(t *testing.T) {
	for _, test := range []struct {
		line    string
		columns int
		want    string
	}{
		{"planes", 4, "plan"},
		{"██··", 3, "██·"},
		{cli.Bold + "fared" + cli.Plain + " lab", 5, cli.Bold + "fared" + cli.Plain},
		{cli.Bold + "fared" + cli.Plain + " lab", 3, cli.Bold + "far" + cli.Plain},
		{"short", 80, "short"},
	} {
		if got := cli.Fit(test.line, test.columns); got != test.want {
			t.Errorf("fit(%q, %d) = %q, want %q", test.line, test.columns, got, test.want)
		}
	}
}

// TestLabOnlyFared checks that one process replaces a description's FRR spines by fared, with a line on standard error.
func TestLabOnlyFared(t *testing.T) {
	done := fared(t, "lab", "--example", "two-tier", "--scenario", "none", "--pace", "0s")
	if want := "in a single process the spines run fared instead of frr; with --netns they run frr"; !strings.Contains(done.Err, want) {
		t.Errorf("no %q in\n%s", want, done.Err)
	}
	if !strings.Contains(done.Out, "every expectation met") {
		t.Error(done.Out)
	}
}

// TestLabPipe checks that a reader that closes the pipe ends a lab quietly.
func TestLabPipe(t *testing.T) {
	for _, args := range [][]string{labArgs(), labArgs("-o", "json")} {
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		r.Close()
		var errOut bytes.Buffer
		code := execute(t.Context(), args, strings.NewReader(""), w, &errOut)
		w.Close()
		if code != cli.ExitOK || errOut.Len() > 0 {
			t.Errorf("fared %s into a closed pipe: exit %d, %s", strings.Join(args, " "), code, errOut.String())
		}
	}
}
