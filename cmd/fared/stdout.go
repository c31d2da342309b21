package main

import (
	"context"
	"errors"
	"io"
	"os"
	"syscall"

	"golang.org/x/term"
)

// stdout is standard output that remembers its first error and then ends the command, because further output has no reader.
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

// screen returns the present size of the terminal, 80 by 24 if it does not know its size.
func (e *env) screen() (columns, rows int) {
	columns, rows, err := term.GetSize(int(e.terminal.Fd()))
	if err != nil || columns <= 0 || rows <= 0 {
		return 80, 24
	}
	return columns, rows
}

// Colors, for a terminal whose user has not set NO_COLOR (https://no-color.org).
const (
	bold   = "\x1b[1m"
	red    = "\x1b[31m"
	green  = "\x1b[32m"
	yellow = "\x1b[33m"
	plain  = "\x1b[0m"
)

// paint colors a text if the terminal has colors.
func (e *env) paint(color, text string) string {
	if e.terminal == nil || os.Getenv("NO_COLOR") != "" {
		return text
	}
	return color + text + plain
}
