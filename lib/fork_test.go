package lib

import (
	"bufio"
	"context"
	"net/netip"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fared/fared/internal/testkit/cbuild"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// TestFork forks a process whose threads read a table: parent and children go on with their tables while the writer
// changes and replaces the file, under the sanitizers of memory and of threads, and under valgrind, which finds no leak
// in any of them.
func TestFork(t *testing.T) {
	gate.Slow(t, gate.C, "forks under sanitizers")
	netnstest.Tools(t, "valgrind")
	for name, command := range map[string][]string{
		"memory":   {"setarch", "-R", compile(t, "fork", memory)},
		"threads":  {"setarch", "-R", compile(t, "fork", thread)},
		"valgrind": {"valgrind", "-q", "--error-exitcode=3", "--leak-check=full", compile(t, "fork", plain)},
	} {
		t.Run(name, func(t *testing.T) {
			if name != "memory" {
				gate.Slow(t, gate.C, "another sanitizer")
			}
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
			defer cancel()
			p := publish(t)
			set := func(share uint32) {
				p.set(t, netip.MustParseAddr("10.255.0.1"), netip.MustParseAddr("10.255.0.2"), slices.Repeat([]uint32{share}, 16))
			}
			set(1)
			cmd := exec.CommandContext(ctx, command[0], append(command[1:], p.path, "3")...)
			cmd.WaitDelay = time.Second
			var errors strings.Builder
			cmd.Stderr = &errors
			out, err := cmd.StdoutPipe()
			if err == nil {
				err = cmd.Start()
			}
			if err != nil {
				t.Fatal(err)
			}
			if !bufio.NewScanner(out).Scan() {
				t.Error("no output")
			}
			for i := range uint32(300) {
				if i%100 == 99 { // the next change is published with another file
					if err := p.w.Begin(shape(128)); err != nil {
						t.Fatal(err)
					}
				}
				set(1000 + i)
				time.Sleep(time.Millisecond)
			}
			set(777)
			if err := cmd.Wait(); err != nil || errors.Len() > 0 {
				t.Errorf("%v\n%s", err, errors.String())
			}
		})
	}
}

// TestClose opens and closes the library 200 times.
func TestClose(t *testing.T) {
	library := filepath.Join(cbuild.Make(t, ".", "libfared.so"), "libfared.so")
	run(t, compile(t, "close", plain), library, goldenTable)
}
