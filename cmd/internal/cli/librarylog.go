package cli

import (
	"context"
	"io"
	"log"
	"log/slog"
	"os"
	"regexp"
	"strings"
	"sync/atomic"

	"google.golang.org/grpc/grpclog"
)

// LibraryLog receives the messages that libraries log by themselves: gRPC's logger, and package log, to which net/http
// writes. Both would write to standard error directly, and wait for its reader.
var LibraryLog lineLogger

// lineLogger is an io.Writer that makes each line a record of a log. While there is no log, lines go to standard error.
type lineLogger struct{ log atomic.Pointer[slog.Logger] }

// libraryLine is a line of package log with its standard flags, and a severity if it is of gRPC.
var libraryLine = regexp.MustCompile(`^\d{4}/\d\d/\d\d \d\d:\d\d:\d\d (?:(INFO|WARNING|ERROR|FATAL): )?`)

// Write logs one line. Lines without a severity are warnings.
func (l *lineLogger) Write(line []byte) (int, error) {
	to := l.log.Load()
	if to == nil {
		return os.Stderr.Write(line)
	}
	level, text := slog.LevelWarn, string(line)
	if m := libraryLine.FindStringSubmatch(text); m != nil {
		text = text[len(m[0]):]
		switch m[1] {
		case "INFO":
			level = slog.LevelInfo
		case "ERROR", "FATAL":
			level = slog.LevelError
		}
	}
	to.Log(context.Background(), level, "message of a library", "text", strings.TrimSpace(text))
	return len(line), nil
}

// Use makes l write to a log until the returned function is called.
func (l *lineLogger) Use(to *slog.Logger) (restore func()) {
	l.log.Store(to)
	return func() { l.log.Store(nil) }
}

// logLibraries makes libraries log to libraryLog. It is called once, before any use of gRPC, which reads its logger
// without a lock. GRPC_GO_LOG_SEVERITY_LEVEL is the least severity of gRPC's messages, as for gRPC's own logger: error
// by default.
func logLibraries() {
	log.SetOutput(&LibraryLog)
	infos, warnings, failures := io.Discard, io.Discard, io.Discard
	switch strings.ToLower(os.Getenv("GRPC_GO_LOG_SEVERITY_LEVEL")) {
	case "", "error":
		failures = &LibraryLog
	case "warning":
		warnings = &LibraryLog
	case "info":
		infos = &LibraryLog
	}
	grpclog.SetLoggerV2(grpclog.NewLoggerV2(infos, warnings, failures))
}
