package speaker

import (
	"context"
	"fmt"
	"log/slog"
	"runtime"
	"slices"

	gobgplog "github.com/osrg/gobgp/v3/pkg/log"
)

// logger hands what GoBGP logs to slog. GoBGP reports normal life as info and
// the peers' doings as warnings; here that is debug and info, because what
// matters of it is reported by the session itself.
type logger struct {
	log     *slog.Logger
	session string
	fatal   func(error)
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

// end reports a broken invariant of GoBGP and never returns. GoBGP goes on
// with broken tables where Fatal and Panic return, so should the injected
// function come back, at least the calling goroutine ends here.
func (l *logger) end(msg string, fields gobgplog.Fields) {
	l.write(slog.LevelError, msg, fields)
	l.fatal(fmt.Errorf("session %s: gobgp cannot continue: %s", l.session, msg))
	runtime.Goexit()
}

func (l *logger) Panic(msg string, fields gobgplog.Fields) { l.end(msg, fields) }
func (l *logger) Fatal(msg string, fields gobgplog.Fields) { l.end(msg, fields) }
func (l *logger) Error(msg string, fields gobgplog.Fields) { l.write(slog.LevelWarn, msg, fields) }
func (l *logger) Warn(msg string, fields gobgplog.Fields)  { l.write(slog.LevelInfo, msg, fields) }
func (l *logger) Info(msg string, fields gobgplog.Fields)  { l.write(slog.LevelDebug, msg, fields) }

// Debug is what GoBGP says about every message; it costs more than the message
// itself, so it is only asked for one level below debug.
func (l *logger) Debug(msg string, fields gobgplog.Fields) {
	l.write(slog.LevelDebug-4, msg, fields)
}

// SetLevel does nothing: the level is the slog handler's.
func (l *logger) SetLevel(gobgplog.LogLevel) {}

func (l *logger) GetLevel() gobgplog.LogLevel {
	if l.log.Enabled(context.Background(), slog.LevelDebug-4) {
		return gobgplog.DebugLevel
	}
	return gobgplog.InfoLevel
}
