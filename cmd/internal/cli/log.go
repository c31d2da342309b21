package cli

import (
	"io"
	"log/slog"
	"time"

	"github.com/fared/fared/internal/asynclog"
)

// NewLogger returns a logger of text that waits for w.
func NewLogger(w io.Writer, level slog.Leveler) *slog.Logger {
	return slog.New(logHandlers(inJournal(w), "text", level)(w))
}

// logHandlers returns a function that makes handlers of a format, text or json, for the journal or for other readers.
func logHandlers(journal bool, format string, level slog.Leveler) func(io.Writer) slog.Handler {
	opts := &slog.HandlerOptions{Level: level}
	plain := func(w io.Writer) slog.Handler {
		if format == "json" {
			return slog.NewJSONHandler(w, opts)
		}
		return slog.NewTextHandler(w, opts)
	}
	if !journal {
		return plain
	}
	return func(w io.Writer) slog.Handler { return newJournalHandler(w, plain) }
}

// LogPatience limits how long the end of a daemon waits for the reader of its log.
const LogPatience = 2 * time.Second

// NewQueuedLogger returns a logger that never waits for w, and its queue, which the caller must close.
func NewQueuedLogger(w io.Writer, format string, level slog.Leveler) (*slog.Logger, *asynclog.Log) {
	queue, handler := asynclog.New(w, logHandlers(inJournal(w), format, level))
	return slog.New(handler), queue
}
