package speaker

import (
	"context"
	"fmt"
	"log/slog"
	"runtime"
	"slices"

	gobgplog "github.com/osrg/gobgp/v3/pkg/log"
)

// logger forwards GoBGP's log to slog. GoBGP logs normal operation as info and
// events caused by peers as warnings; logger lowers them to debug and info,
// because the session itself reports the relevant events.
type logger struct {
	log     *slog.Logger
	session string
	fatal   func(error)
	broken  func(error) // called when GoBGP reports the end of its listener; not nil
}

var _ gobgplog.Logger = (*logger)(nil)

func (l *logger) write(level slog.Level, msg string, fields gobgplog.Fields) {
	if !l.log.Enabled(context.Background(), level) {
		return
	}
	attrs := make([]slog.Attr, 0, len(fields)+1)
	attrs = append(attrs, slog.String("session", l.session))
	keys := make([]string, 0, len(fields))
	for k := range fields {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	for _, k := range keys {
		attrs = append(attrs, slog.Any(k, fields[k]))
	}
	l.log.LogAttrs(context.Background(), level, "gobgp: "+msg, attrs...)
}

// end reports a broken invariant of GoBGP and never returns. GoBGP continues
// with broken tables if Fatal or Panic returns, so if the injected function
// returns, end exits at least the calling goroutine.
func (l *logger) end(msg string, fields gobgplog.Fields) {
	l.write(slog.LevelError, msg, fields)
	l.fatal(fmt.Errorf("session %s: gobgp cannot continue: %s", l.session, msg))
	runtime.Goexit()
}

func (l *logger) Panic(msg string, fields gobgplog.Fields) { l.end(msg, fields) }
func (l *logger) Fatal(msg string, fields gobgplog.Fields) { l.end(msg, fields) }
func (l *logger) Error(msg string, fields gobgplog.Fields) { l.write(slog.LevelWarn, msg, fields) }
func (l *logger) Warn(msg string, fields gobgplog.Fields) {
	if err := acceptFailed(msg, fields); err != nil {
		l.broken(err)
	}
	l.write(slog.LevelInfo, msg, fields)
}
func (l *logger) Info(msg string, fields gobgplog.Fields) { l.write(slog.LevelDebug, msg, fields) }

// Debug logs GoBGP's output about every message; it costs more than the message
// itself, so it is enabled only one level below debug.
func (l *logger) Debug(msg string, fields gobgplog.Fields) {
	l.write(slog.LevelDebug-4, msg, fields)
}

// SetLevel does nothing: the slog handler determines the level.
func (l *logger) SetLevel(gobgplog.LogLevel) {}

func (l *logger) GetLevel() gobgplog.LogLevel {
	if l.log.Enabled(context.Background(), slog.LevelDebug-4) {
		return gobgplog.DebugLevel
	}
	return gobgplog.InfoLevel
}
