package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/internal/rdmadev/rdmadevtest"
)

var update = flag.Bool("update", false, "rewrite testdata/*.golden")

// TestGolden plays the command lines in testdata/*.golden against a daemon with canned answers. A line "$ fared ..." is a
// command line. Below it are its standard output, its standard error with "! " before each line, and its exit code.
// SOCKET stands for the daemon's socket, UNSERVED for a path without a file, TESTDATA for the folder, TABLE for a slot table whose
// daemon has ended, OTHERLAYOUT for a slot table of another layout, RXE and FOUR for roots of sysfs. Lines with "# " before the first command are a comment.
func TestGolden(t *testing.T) {
	files, err := filepath.Glob("testdata/*.golden")
	if err != nil || len(files) == 0 {
		t.Fatalf("no golden files: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".golden"), func(t *testing.T) {
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			got, commands := playGolden(t, string(want))
			if commands == 0 {
				t.Fatalf("%s: no command lines", file)
			}
			if *update {
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			if got != string(want) {
				t.Errorf("%s: -update rewrites it\n%s", file, firstDifference(got, string(want)))
			}
		})
	}
}

// progressLine is a line of progress on standard error.
var progressLine = regexp.MustCompile(`^\d+ of \d+ after \d+`)

func playGolden(t *testing.T, text string) (got string, commands int) {
	var b strings.Builder
	table, layout := endedTable(t)
	rxe, four := rdmadevtest.Tree(t, "../../internal/rdmadev/testdata/rxe-faults.txt"), rdmadevtest.Tree(t, "../../internal/rdmadev/testdata/four.txt")
	for line := range strings.Lines(text) {
		line = strings.TrimSuffix(line, "\n")
		if commands == 0 && strings.HasPrefix(line, "# ") {
			b.WriteString(line + "\n")
		}
		command, ok := strings.CutPrefix(line, "$ fared")
		if !ok {
			continue
		}
		commands++
		socket, _ := startFake(t) // a new daemon for each command, so that their order does not matter
		unserved := filepath.Join(filepath.Dir(socket), "unserved")
		args := []string{"--socket", socket}
		for _, word := range strings.Fields(command) {
			args = append(args, strings.NewReplacer("UNSERVED", unserved, "TESTDATA", "testdata", "TABLE", table, "OTHERLAYOUT", layout, "RXE", rxe, "FOUR", four, "''", "").Replace(word))
		}
		if len(args) > 2 && strings.HasPrefix(args[2], "__complete") { // cobra requires this as the first word
			args = append(append([]string{args[2]}, args[:2]...), args[3:]...)
		}
		o := fared(t, args...)
		if o.code != cli.ExitOK && (o.out != "" && !reports(command) || !explains(o.err)) {
			t.Errorf("fared%s: exit %d with standard output %q and standard error %q", command, o.code, o.out, o.err)
		}
		if strings.Contains(o.out+o.err, "\x1b") {
			t.Errorf("fared%s: escape codes where there is no terminal", command)
		}
		if commands > 1 || b.Len() > 0 {
			b.WriteString("\n")
		}
		fmt.Fprintf(&b, "%s\n", line)
		names := strings.NewReplacer(unserved, "UNSERVED", socket, "SOCKET", table, "TABLE", layout, "OTHERLAYOUT", rxe, "RXE", four, "FOUR")
		b.WriteString(names.Replace(o.out))
		for text := range strings.Lines(names.Replace(o.err)) {
			if !progressLine.MatchString(text) { // only a slow machine prints it
				b.WriteString("! " + text)
			}
		}
		fmt.Fprintf(&b, "exit %d\n", o.code)
	}
	return b.String(), commands
}

// reports reports whether a command line prints its output before it fails.
func reports(command string) bool {
	return strings.HasPrefix(command, " watch") || strings.HasPrefix(command, " rdma") || strings.Contains(command, "drain") || strings.HasPrefix(command, " health")
}

func firstDifference(got, want string) string {
	g, w := strings.Split(got, "\n"), strings.Split(want, "\n")
	for i := range max(len(g), len(w)) {
		at := func(lines []string) string {
			if i < len(lines) {
				return lines[i]
			}
			return "(the end)"
		}
		if at(g) != at(w) {
			return fmt.Sprintf("line %d is\n%q, want\n%q", i+1, at(g), at(w))
		}
	}
	return "none"
}
