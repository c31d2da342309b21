// Package asynclog writes log lines without ever making their source wait: a reader of standard error that stops
// reading must not stop a daemon.
package asynclog

import (
	"io"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"
)

// Size bounds the queued lines, in bytes.
const Size = 1 << 20

// Log is an io.Writer that queues lines for another writer, and leaves out lines while the queue is full. Once there is
// room, a line reports their number, at their place.
type Log struct {
	out     io.Writer
	own     *slog.Logger // formats reports into report
	report  []byte
	dropped atomic.Uint64
	done    chan struct{} // closed when no goroutine writes any more

	mu      sync.Mutex
	ready   sync.Cond // a line was queued, or closing was set
	queue   [][]byte
	bytes   int
	omitted uint64 // lines left out since the last report
	closing bool
}

// New returns a Log that writes to out from a separate goroutine until Close, and a handler that logs to it. format
// returns a handler that makes one Write for each record.
func New(out io.Writer, format func(io.Writer) slog.Handler) (*Log, slog.Handler) {
	l := &Log{out: out, done: make(chan struct{})}
	l.ready.L = &l.mu
	l.own = slog.New(format(writerFunc(func(p []byte) (int, error) {
		l.report = append([]byte(nil), p...)
		return len(p), nil
	})))
	go l.run()
	return l, format(l)
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// Write queues a line. It never waits for out, and never fails.
func (l *Log) Write(p []byte) (int, error) {
	line := append([]byte(nil), p...)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closing || l.bytes+len(line) > Size {
		l.omitted++
		l.dropped.Add(1)
		return len(p), nil
	}
	l.queueReportLocked()
	l.queue, l.bytes = append(l.queue, line), l.bytes+len(line)
	l.ready.Signal()
	return len(p), nil
}

// queueReportLocked queues a line with the number of lines that were left out, if there are any. The caller holds mu.
func (l *Log) queueReportLocked() {
	if l.omitted == 0 {
		return
	}
	l.own.Warn("log lines were left out, because the log's reader is too slow", "lines", l.omitted)
	l.queue, l.bytes, l.omitted = append(l.queue, l.report), l.bytes+len(l.report), 0
}

// Dropped returns the number of lines left out since New.
func (l *Log) Dropped() uint64 { return l.dropped.Load() }

// run writes the queued lines.
func (l *Log) run() {
	defer close(l.done)
	l.mu.Lock()
	defer l.mu.Unlock()
	for {
		for len(l.queue) == 0 {
			l.queueReportLocked()
			if len(l.queue) > 0 {
				break
			}
			if l.closing {
				return
			}
			l.ready.Wait()
		}
		line := l.queue[0]
		l.queue[0] = nil
		l.queue = l.queue[1:]
		l.mu.Unlock()
		_, _ = l.out.Write(line) // a closed log has no place to report to
		l.mu.Lock()
		l.bytes -= len(line)
	}
}

// Close writes the queued lines, for at most patience, and leaves out later ones. A goroutine that out blocks remains.
func (l *Log) Close(patience time.Duration) {
	l.mu.Lock()
	l.closing = true
	l.ready.Signal()
	l.mu.Unlock()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-l.done:
	case <-timer.C:
	}
}
