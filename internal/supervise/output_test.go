package supervise

import (
	"errors"
	"io"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/fared/fared/internal/testkit/testlog"
)

// TestOutputIsWholeLines checks that concurrent writers, in parts of any size, do not split each other's lines.
func TestOutputIsWholeLines(t *testing.T) {
	var to testlog.Log
	o := newOutput(&to)
	const lines = 500
	var writing sync.WaitGroup
	for _, name := range []string{"a", "b"} {
		w, err := o.pipe(name)
		if err != nil {
			t.Fatal(err)
		}
		writing.Go(func() {
			defer w.Close()
			for range lines {
				for _, part := range []string{"one ", "line of ", name + "\n"} {
					if _, err := w.WriteString(part); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	writing.Wait()
	if err := o.close(); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"a", "b"} {
		if n := strings.Count(to.String(), name+": one line of "+name+"\n"); n != lines {
			t.Errorf("%d lines of %s, want %d", n, name, lines)
		}
	}
	if n := strings.Count(to.String(), "\n"); n != 2*lines {
		t.Errorf("%d lines, want %d", n, 2*lines)
	}
}

// TestOutputEnds checks that an unfinished last line is completed, and that a line longer than the buffer comes in
// parts.
func TestOutputEnds(t *testing.T) {
	var to testlog.Log
	o := newOutput(&to)
	w, err := o.pipe("c")
	if err != nil {
		t.Fatal(err)
	}
	io.WriteString(w, strings.Repeat("x", maxLine)+"y\nz")
	w.Close()
	if err := o.close(); err != nil {
		t.Fatal(err)
	}
	if want := "c: " + strings.Repeat("x", maxLine) + "\nc: y\nc: z\n"; to.String() != want {
		t.Errorf("%d bytes, want %d; ends in %q", len(to.String()), len(want), to.String()[max(0, len(to.String())-20):])
	}
}

type full struct{}

func (full) Write([]byte) (int, error) { return 0, os.ErrClosed }

// TestOutputFails checks that a failed writer is reported at the end, and blocks no command.
func TestOutputFails(t *testing.T) {
	o := newOutput(full{})
	w, err := o.pipe("c")
	if err != nil {
		t.Fatal(err)
	}
	for range 100 {
		if _, err := io.WriteString(w, strings.Repeat("x", 4096)+"\n"); err != nil {
			t.Fatal(err)
		}
	}
	w.Close()
	if err := o.close(); !errors.Is(err, os.ErrClosed) {
		t.Errorf("close: %v", err)
	}
}

// TestOutputDoesNotWaitForStrangers checks that a pipe that another process still holds does not block close.
func TestOutputDoesNotWaitForStrangers(t *testing.T) {
	var to testlog.Log
	o := newOutput(&to)
	w, err := o.pipe("c")
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	io.WriteString(w, "said\n")
	if err := o.close(); err != nil {
		t.Fatal(err)
	}
	if to.String() != "c: said\n" {
		t.Errorf("%q", to.String())
	}
}
