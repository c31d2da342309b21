package cli

import (
	"context"
	"errors"
	"io"
	"os"
	"strings"
	"syscall"
	"time"
	"unicode/utf8"

	"golang.org/x/term"
)

// stdout is standard output that remembers its first error and then ends the command, because further output has no
// reader.
type stdout struct {
	w    io.Writer
	stop context.CancelFunc
	err  error
}

func (s *stdout) Write(b []byte) (int, error) {
	if s.err != nil {
		return 0, s.err
	}
	n, err := s.w.Write(b)
	if err != nil {
		s.err = err
		s.stop()
	}
	return n, err
}

// closed reports whether the reader closed the pipe (fared weights | head -1), which is no error.
func (s *stdout) closed() bool {
	return errors.Is(s.err, syscall.EPIPE) || errors.Is(s.err, io.ErrClosedPipe)
}

// terminal returns the terminal that w is, or nil if w is no terminal, or one that cannot place its cursor.
func terminal(w io.Writer) *os.File {
	f, ok := w.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) || os.Getenv("TERM") == "dumb" {
		return nil
	}
	return f
}

// Screen returns the present size of the terminal, 80 by 24 if it does not know its size.
func (e *Env) Screen() (columns, rows int) {
	columns, rows, err := term.GetSize(int(e.Terminal.Fd()))
	if err != nil || columns <= 0 || rows <= 0 {
		return 80, 24
	}
	return columns, rows
}

// Colors, for a terminal whose user has not set NO_COLOR (https://no-color.org).
const (
	Bold   = "\x1b[1m"
	Red    = "\x1b[31m"
	Green  = "\x1b[32m"
	Yellow = "\x1b[33m"
	Plain  = "\x1b[0m"
)

// Paint colors a text if the terminal has colors.
func (e *Env) Paint(color, text string) string {
	if e.Terminal == nil || os.Getenv("NO_COLOR") != "" {
		return text
	}
	return color + text + Plain
}

// Sequences that place the next text at the top left, and erase the rest of a line or of the screen.
const (
	Home       = "\x1b[H"
	ClearLine  = "\x1b[K"
	ClearBelow = "\x1b[J"
)

// Fit cuts a line to columns; color sequences do not count.
func Fit(line string, columns int) string {
	var b strings.Builder
	colored := false
	for line != "" && columns > 0 {
		if strings.HasPrefix(line, "\x1b[") {
			n := strings.IndexByte(line, 'm') + 1
			b.WriteString(line[:n])
			colored, line = line[:n] != Plain, line[n:]
			continue
		}
		_, n := utf8.DecodeRuneInString(line)
		b.WriteString(line[:n])
		line = line[n:]
		columns--
	}
	if colored {
		b.WriteString(Plain)
	}
	return b.String()
}

// Wait pauses so that a reader can look at a step.
func Wait(ctx context.Context, d time.Duration) {
	if d <= 0 {
		return
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
