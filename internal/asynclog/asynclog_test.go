package asynclog

import (
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func text(w io.Writer) slog.Handler {
	return slog.NewTextHandler(w, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}})
}

// gate is a writer that waits until it is opened.
type gate struct {
	opened  chan struct{}
	entered chan struct{} // closed at the first write
	once    sync.Once
	bytes.Buffer
}

func newGate() *gate { return &gate{opened: make(chan struct{}), entered: make(chan struct{})} }

func (g *gate) Write(p []byte) (int, error) {
	g.once.Do(func() { close(g.entered) })
	<-g.opened
	return g.Buffer.Write(p)
}

// TestOrder checks that all lines of several loggers are written, in order, by the time Close returns.
func TestOrder(t *testing.T) {
	var out bytes.Buffer
	l, handler := New(&out, text)
	log := slog.New(handler)
	var want strings.Builder
	for i := range 1000 {
		log.With("k", i).Info("m")
		fmt.Fprintf(&want, "level=INFO msg=m k=%d\n", i)
	}
	l.Close(time.Minute)
	if out.String() != want.String() || l.Dropped() != 0 {
		t.Errorf("%d lines dropped, wrote\n%s", l.Dropped(), out.String())
	}
}

// TestStuckReader logs many times the size of the queue to a writer that does not return: no call waits, the memory is
// bounded, and once the writer continues, the lines that were left out are counted at their place.
func TestStuckReader(t *testing.T) {
	g := newGate()
	l, handler := New(g, text)
	log := slog.New(handler)
	const lines, size = 10000, 1000
	payload := strings.Repeat("x", size)
	for i := range lines {
		log.Info("m", "k", i, "p", payload)
	}
	l.mu.Lock()
	if l.bytes > Size {
		t.Errorf("%d bytes are queued, want at most %d", l.bytes, Size)
	}
	l.mu.Unlock()
	dropped := int(l.Dropped())
	if written := lines - dropped; written*size > Size || (written+2)*(size+40) < Size {
		t.Errorf("%d lines of %d were left out", dropped, lines)
	}
	close(g.opened)
	for n := 1; n > 0; { // until there is room
		l.mu.Lock()
		n = l.bytes
		l.mu.Unlock()
	}
	log.Info("after")
	l.Close(time.Minute)
	got := strings.Split(strings.TrimSpace(g.String()), "\n")
	if len(got) != lines-dropped+2 {
		t.Fatalf("%d lines, want %d", len(got), lines-dropped+2)
	}
	for i, line := range got[:lines-dropped] {
		if !strings.HasPrefix(line, fmt.Sprintf("level=INFO msg=m k=%d ", i)) {
			t.Fatalf("line %d: %.40s", i, line)
		}
	}
	if want := fmt.Sprintf("level=WARN msg=\"log lines were left out, because the log's reader is too slow\" lines=%d", dropped); got[lines-dropped] != want || got[lines-dropped+1] != "level=INFO msg=after" {
		t.Errorf("the last lines are\n%s\n%s\nwant\n%s\nlevel=INFO msg=after", got[lines-dropped], got[lines-dropped+1], want)
	}
	if int(l.Dropped()) != dropped {
		t.Errorf("%d lines are dropped, %d before", l.Dropped(), dropped)
	}
}

// TestCloseIsBounded checks that Close returns although the writer does not, and that later lines are dropped.
func TestCloseIsBounded(t *testing.T) {
	g := newGate()
	l, handler := New(g, text)
	log := slog.New(handler)
	log.Info("stuck")
	<-g.entered
	l.Close(time.Millisecond)
	log.Info("late")
	if l.Dropped() != 1 {
		t.Errorf("%d lines are dropped, want 1", l.Dropped())
	}
	close(g.opened)
	<-l.done
	if got := g.String(); !strings.HasPrefix(got, "level=INFO msg=stuck\n") || strings.Contains(got, "late") {
		t.Errorf("wrote %s", got)
	}
}

// BenchmarkLine measures a line's cost for its source.
func BenchmarkLine(b *testing.B) {
	l, handler := New(io.Discard, text)
	defer l.Close(time.Minute)
	log := slog.New(handler)
	b.ReportAllocs()
	for b.Loop() {
		log.Info("session established", "session", "p0/s0", "generation", 1)
	}
}
