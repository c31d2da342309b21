package cli

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"syscall"
	"time"
)

// inJournal reports whether w is the stream that systemd has connected to the journal: its device and inode are those
// of JOURNAL_STREAM (systemd.exec(5)).
func inJournal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	info, err := f.Stat()
	if err != nil {
		return false
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	return ok && os.Getenv("JOURNAL_STREAM") == fmt.Sprintf("%d:%d", st.Dev, st.Ino)
}

// Priorities of syslog, as the journal reads them at the begin of a line (sd-daemon(3)).
const (
	priorityError   = "<3>"
	priorityWarning = "<4>"
	priorityInfo    = "<6>"
	priorityDebug   = "<7>"
)

// journalHandler writes records for the journal: each line begins with its priority, and has no time, which the journal
// adds. It has one handler for each priority, least first.
type journalHandler [4]slog.Handler

// newJournalHandler returns a handler whose lines format makes, with one Write for each record.
func newJournalHandler(w io.Writer, format func(io.Writer) slog.Handler) (h journalHandler) {
	for i, priority := range []string{priorityDebug, priorityInfo, priorityWarning, priorityError} {
		h[i] = format(&prioritized{w, priority})
	}
	return h
}

func (h journalHandler) Enabled(ctx context.Context, level slog.Level) bool {
	return h[0].Enabled(ctx, level)
}

func (h journalHandler) Handle(ctx context.Context, r slog.Record) error {
	at := 0
	for i, least := range []slog.Level{slog.LevelInfo, slog.LevelWarn, slog.LevelError} {
		if r.Level >= least {
			at = i + 1
		}
	}
	r.Time = time.Time{}
	return h[at].Handle(ctx, r)
}

func (h journalHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	for i := range h {
		h[i] = h[i].WithAttrs(attrs)
	}
	return h
}

func (h journalHandler) WithGroup(name string) slog.Handler {
	for i := range h {
		h[i] = h[i].WithGroup(name)
	}
	return h
}

// prioritized begins each line with a priority.
type prioritized struct {
	w        io.Writer
	priority string
}

func (p *prioritized) Write(text []byte) (int, error) {
	var out bytes.Buffer
	for line := range bytes.Lines(text) {
		out.WriteString(p.priority)
		out.Write(line)
	}
	if _, err := p.w.Write(out.Bytes()); err != nil {
		return 0, err
	}
	return len(text), nil
}
