package main

import (
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"
)

// TestFrameFitsTheTerminal checks that no line and no frame exceeds the terminal's size, that the last steps are
// visible, and that the hidden steps are counted.
func TestFrameFitsTheTerminal(t *testing.T) {
	for _, size := range [][2]int{{80, 24}, {40, 10}, {20, 5}, {1, 1}, {200, 60}} {
		for _, steps := range []int{0, 1, 13, 14, 15, 500} {
			columns, rows := size[0], size[1]
			picture := []string{"\x1b[1mfared lab\x1b[0m  " + strings.Repeat("x", 100), "", strings.Repeat("█", 90)}
			var done []string
			for i := range steps {
				done = append(done, fmt.Sprintf("step %d: %s", i, strings.Repeat("y", 120)))
			}
			lines := frame(picture, done, 0, columns, rows)
			if len(lines) > max(0, rows-1) {
				t.Errorf("%dx%d, %d steps: %d lines", columns, rows, steps, len(lines))
			}
			shown, counted := 0, 0
			for _, line := range lines {
				bare := strings.NewReplacer("\x1b[1m", "", "\x1b[0m", "").Replace(line)
				if n := utf8.RuneCountInString(bare); n > columns {
					t.Errorf("%dx%d: a line of %d columns: %q", columns, rows, n, line)
				}
				if strings.HasPrefix(bare, "step ") {
					shown++
				}
				_, _ = fmt.Sscanf(bare, "  ... and %d more above", &counted)
			}
			if rows >= 10 && shown+counted != steps {
				t.Errorf("%dx%d: of %d steps %d are shown and %d counted", columns, rows, steps, shown, counted)
			}
		}
	}
	for width := range 21 {
		for _, w := range []uint32{0, 1, 7} {
			if n := utf8.RuneCountInString(bar(w, 7, width)); n != width {
				t.Errorf("a bar of %d columns has %d", width, n)
			}
		}
	}
	for columns := range 200 {
		for longest := range 200 {
			if n := barSize(20, longest, columns); n < 0 || n > 20 || n > 0 && longest+n > columns {
				t.Errorf("a bar of %d next to %d in %d columns", n, longest, columns)
			}
		}
	}
}
