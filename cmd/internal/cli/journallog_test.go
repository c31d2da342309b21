package cli

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
)

// journalFile returns a file that JOURNAL_STREAM names.
func journalFile(t *testing.T) *os.File {
	t.Helper()
	f, err := os.CreateTemp(t.TempDir(), "journal")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	var st unix.Stat_t
	if err := unix.Stat(f.Name(), &st); err != nil {
		t.Fatal(err)
	}
	t.Setenv("JOURNAL_STREAM", fmt.Sprintf("%d:%d", st.Dev, st.Ino))
	return f
}

// TestJournalIsRecognized checks that a stream is the journal's only if JOURNAL_STREAM has its device and inode
// (systemd.exec(5)).
func TestJournalIsRecognized(t *testing.T) {
	f := journalFile(t)
	if !inJournal(f) {
		t.Error("the stream of JOURNAL_STREAM is not recognized")
	}
	if inJournal(&bytes.Buffer{}) {
		t.Error("a buffer is the journal")
	}
	other, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if inJournal(other) {
		t.Error("another file is the journal: a child's output that is redirected")
	}
	t.Setenv("JOURNAL_STREAM", "")
	if inJournal(f) {
		t.Error("without JOURNAL_STREAM a file is the journal")
	}
}

// TestJournalLines checks the lines of a log for the journal: a priority of sd-daemon(3) and no time, in both formats.
// Other readers get the time, and no priority.
func TestJournalLines(t *testing.T) {
	write := func(journal bool, format string) string {
		var b bytes.Buffer
		log := slog.New(logHandlers(journal, format, slog.LevelDebug)(&b)).With("a", 1).WithGroup("g")
		log.Debug("one", "time", "kept")
		log.Info("two")
		log.Warn("three")
		log.Log(t.Context(), slog.LevelWarn+1, "four")
		log.Error("five\nsix")
		return b.String()
	}
	for format, want := range map[string]string{
		"text": "<7>level=DEBUG msg=one a=1 g.time=kept\n<6>level=INFO msg=two a=1\n<4>level=WARN msg=three a=1\n<4>level=WARN+1 msg=four a=1\n<3>level=ERROR msg=\"five\\nsix\" a=1\n",
		"json": `<7>{"level":"DEBUG","msg":"one","a":1,"g":{"time":"kept"}}` + "\n" + `<6>{"level":"INFO","msg":"two","a":1}` + "\n" + `<4>{"level":"WARN","msg":"three","a":1}` + "\n" +
			`<4>{"level":"WARN+1","msg":"four","a":1}` + "\n" + `<3>{"level":"ERROR","msg":"five\nsix","a":1}` + "\n",
	} {
		if got := write(true, format); got != want {
			t.Errorf("%s:\n%s, want\n%s", format, got, want)
		}
		for line := range strings.Lines(write(false, format)) {
			if strings.HasPrefix(line, "<") || !strings.Contains(line, "time") {
				t.Errorf("a line for other readers: %s", line)
			}
		}
	}
}

// TestErrorsAreErrorsInTheJournal checks that each line of a command's error has the priority of errors in the journal.
func TestErrorsAreErrorsInTheJournal(t *testing.T) {
	f := journalFile(t)
	failing := func(*Env) *cobra.Command {
		return &cobra.Command{SilenceErrors: true, SilenceUsage: true, RunE: func(*cobra.Command, []string) error { return Exit(ExitConfig, errors.New("no file"), "name one") }}
	}
	if code := Execute(t.Context(), failing, nil, nil, &bytes.Buffer{}, f); code != ExitConfig {
		t.Errorf("exit code %d, want %d", code, ExitConfig)
	}
	text, err := os.ReadFile(f.Name())
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSuffix(string(text), "\n"), "\n")
	if len(lines) != 2 || !strings.HasPrefix(lines[0], "<3>fared: ") || !strings.HasPrefix(lines[1], "<3>  ") {
		t.Errorf("the lines in the journal: %q", lines)
	}
}
