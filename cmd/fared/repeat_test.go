package main

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/cmd/internal/cli"
)

// TestRepeat checks that --watch shows the state again and again, without a daemon the error, and ends with exit code
// 0; that a wrong use ends at once; and that a terminal receives each state in place of the previous one.
func TestRepeat(t *testing.T) {
	socket, _ := startFake(t)
	b := inBackground(t, "--socket", socket, "status", "--watch", "--every", "100ms")
	for range 3 {
		b.Until(t, "router ID")
		b.Until(t, "sessions ")
	}
	b.Stop()
	if code := <-b.Code; code != cli.ExitOK || b.Err.Len() > 0 {
		t.Errorf("exit code %d: %s", code, b.Err)
	} else {
		b.Code <- code
	}
	none := inBackground(t, "--socket", socket+"x", "planes", "-w", "--every", "100ms")
	for range 2 {
		none.Until(t, "fared: no daemon answers")
	}
	for _, args := range [][]string{{"status", "--watch", "--every", "1ms"}, {"sessions", "--watch", "-o", "xml"}} {
		if text := refused(t, cli.ExitUsage, append([]string{"--socket", socket}, args...)...); text == "" {
			t.Errorf("%q: no error", args)
		}
	}
	terminal := &cli.Env{Terminal: pseudoTerminal(t, 80, 24)}
	first, second := frameOf(terminal, "a\nb\n", true), frameOf(terminal, "c\n", false)
	if !strings.HasSuffix(first, cli.Home+"a"+cli.ClearLine+"\nb"+cli.ClearLine+"\n"+cli.ClearBelow) || second != cli.Home+"c"+cli.ClearLine+"\n"+cli.ClearBelow {
		t.Errorf("a terminal receives %q, then %q", first, second)
	}
}

// pseudoTerminal returns the terminal's end of a pseudo terminal of columns by rows.
func pseudoTerminal(t *testing.T, columns, rows uint16) *os.File {
	t.Helper()
	control, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { control.Close() })
	if err := unix.IoctlSetPointerInt(int(control.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	number, err := unix.IoctlGetInt(int(control.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if err := unix.IoctlSetWinsize(int(f.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: rows, Col: columns}); err != nil {
		t.Fatal(err)
	}
	return f
}

// TestRepeatFitsTheTerminal draws states of any size in pseudo terminals: no line is longer than a row, the lines and
// the cursor fit below each other, so that the head stays, and the hidden lines are counted.
func TestRepeatFitsTheTerminal(t *testing.T) {
	for _, size := range [][2]uint16{{80, 24}, {40, 10}, {80, 2}, {200, 60}} {
		columns, rows := int(size[0]), int(size[1])
		e := &cli.Env{Terminal: pseudoTerminal(t, size[0], size[1])}
		for _, n := range []int{1, rows - 1, rows, 500} {
			var text strings.Builder
			for i := range n {
				fmt.Fprintf(&text, "line %d: %s\n", i, strings.Repeat("ü", 150))
			}
			frame := strings.NewReplacer(cli.Home, "", cli.ClearLine, "", cli.ClearBelow, "").Replace(frameOf(e, text.String(), false))
			lines := strings.Split(strings.TrimSuffix(frame, "\n"), "\n")
			if len(lines) > rows-1 {
				t.Errorf("%d lines at %dx%d: %d are drawn", n, columns, rows, len(lines))
			}
			shown, hidden := 0, 0
			for _, line := range lines {
				if w := utf8.RuneCountInString(line); w > columns {
					t.Errorf("%d lines at %dx%d: a line of %d columns", n, columns, rows, w)
				}
				if strings.HasPrefix(line, "line ") {
					shown++
				}
				_, _ = fmt.Sscanf(line, "... and %d more lines", &hidden)
			}
			if shown+hidden != n || rows > 2 && !strings.HasPrefix(lines[0], "line 0:") {
				t.Errorf("%d lines at %dx%d: %d shown and %d counted, first %q", n, columns, rows, shown, hidden, lines[0])
			}
		}
	}
}
