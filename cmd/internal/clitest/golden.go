package clitest

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/fared/fared/cmd/internal/cli"
)

var update = flag.Bool("update", false, "rewrite testdata/*.golden")

// Golden plays the command lines in testdata/*.golden. A line "$ fared ..." is a command line. Below it are its
// standard output, its standard error with "! " before each line, and its exit code. SOCKET stands for the socket of a
// daemon, which serve starts for each command, UNSERVED for a path without a file, TESTDATA for the folder, and the
// keys of files for their values. Lines with "# " before the first command are a comment. reports reports whether a
// command line prints its output before it fails.
func Golden(t *testing.T, serve func(*testing.T) (socket string), files map[string]string, reports func(command string) bool) {
	names, err := filepath.Glob("testdata/*.golden")
	if err != nil || len(names) == 0 {
		t.Fatalf("no golden files: %v", err)
	}
	for _, file := range names {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".golden"), func(t *testing.T) {
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			got, commands := playGolden(t, string(want), serve, files, reports)
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
				t.Errorf("%s: -update rewrites it\n%s", file, FirstDifference(got, string(want)))
			}
		})
	}
}

// progressLine is a line of progress on standard error.
var progressLine = regexp.MustCompile(`^\d+ of \d+ after \d+`)

func playGolden(t *testing.T, text string, serve func(*testing.T) string, files map[string]string, reports func(string) bool) (got string, commands int) {
	var b strings.Builder
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
		socket := serve(t) // a new daemon for each command, so that their order does not matter
		unserved := filepath.Join(filepath.Dir(socket), "unserved")
		values, names := []string{"UNSERVED", unserved, "TESTDATA", "testdata", "''", ""}, []string{unserved, "UNSERVED", socket, "SOCKET"}
		for name, value := range files {
			values, names = append(values, name, value), append(names, value, name)
		}
		args := []string{"--socket", socket}
		for _, word := range strings.Fields(command) {
			args = append(args, strings.NewReplacer(values...).Replace(word))
		}
		if len(args) > 2 && strings.HasPrefix(args[2], "__complete") { // cobra requires this as the first word
			args = append(append([]string{args[2]}, args[:2]...), args[3:]...)
		}
		o := Run(t, args...)
		if o.Code != cli.ExitOK && (o.Out != "" && !reports(command) || !Explains(o.Err)) {
			t.Errorf("fared%s: exit %d with standard output %q and standard error %q", command, o.Code, o.Out, o.Err)
		}
		if strings.Contains(o.Out+o.Err, "\x1b") {
			t.Errorf("fared%s: escape codes where there is no terminal", command)
		}
		if commands > 1 || b.Len() > 0 {
			b.WriteString("\n")
		}
		fmt.Fprintf(&b, "%s\n", line)
		known := strings.NewReplacer(names...)
		b.WriteString(known.Replace(o.Out))
		for text := range strings.Lines(known.Replace(o.Err)) {
			if !progressLine.MatchString(text) { // only a slow machine prints it
				b.WriteString("! " + text)
			}
		}
		fmt.Fprintf(&b, "exit %d\n", o.Code)
	}
	return b.String(), commands
}

// FirstDifference describes the first line in which a text differs from the wanted one.
func FirstDifference(got, want string) string {
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
