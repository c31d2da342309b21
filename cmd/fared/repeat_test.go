package main

import (
	"os"
	"strings"
	"testing"
)

// TestRepeat checks that --watch shows the state again and again, without a daemon the error, and ends with exit code 0; that a wrong use ends at once; and that a
// terminal receives each state in place of the previous one.
func TestRepeat(t *testing.T) {
	socket, _ := startFake(t)
	b := inBackground(t, "--socket", socket, "status", "--watch", "--every", "100ms")
	for range 3 {
		b.until(t, "router ID")
		b.until(t, "sessions ")
	}
	b.stop()
	if code := <-b.code; code != exitOK || b.err.Len() > 0 {
		t.Errorf("exit code %d: %s", code, b.err)
	} else {
		b.code <- code
	}
	none := inBackground(t, "--socket", socket+"x", "planes", "-w", "--every", "100ms")
	for range 2 {
		none.until(t, "fared: no daemon answers")
	}
	for _, args := range [][]string{{"status", "--watch", "--every", "1ms"}, {"sessions", "--watch", "-o", "xml"}} {
		if text := refused(t, exitUsage, append([]string{"--socket", socket}, args...)...); text == "" {
			t.Errorf("%q: no error", args)
		}
	}
	terminal := &env{terminal: os.Stdout}
	first, second := terminal.frameOf("a\nb\n", true), terminal.frameOf("c\n", false)
	if !strings.HasSuffix(first, home+"a"+clearLine+"\nb"+clearLine+"\n"+clearBelow) || second != home+"c"+clearLine+"\n"+clearBelow {
		t.Errorf("a terminal receives %q, then %q", first, second)
	}
}
