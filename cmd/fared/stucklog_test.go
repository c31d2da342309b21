package main

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/cmd/internal/clitest"
)

// fullPipe returns the writing end of a pipe that has no room, and whose reader reads nothing.
func fullPipe(t *testing.T) *os.File {
	t.Helper()
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fds[0]) })
	for _, n := range []int{4096, 1} {
		for b := make([]byte, n); ; {
			if _, err := unix.Write(fds[1], b); err == unix.EAGAIN {
				break
			} else if err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := unix.SetNonblock(fds[1], false); err != nil {
		t.Fatal(err)
	}
	w := os.NewFile(uintptr(fds[1]), "full pipe")
	t.Cleanup(func() { w.Close() })
	return w
}

// TestLogWithoutReader starts the processes of a fabric with a standard error that takes nothing: sessions come up,
// weights follow a failed leaf, status answers and counts the lines that were left out, and SIGTERM ends the processes.
func TestLogWithoutReader(t *testing.T) {
	f := startProcesses(t)
	stuck := fullPipe(t)
	again := func(name, verb string) {
		t.Helper()
		if code := f.nodes[name].End(t, syscall.SIGTERM); code != cli.ExitOK {
			t.Fatalf("%s: exit %d", name, code)
		}
		self := executable(t)
		p := &clitest.Process{Cmd: exec.Command(self, verb, "--config", f.config(name), "--socket", f.socket(name), "--log-level", "debug"), Done: make(chan struct{})}
		p.Cmd.Env, p.Cmd.Stderr = append(os.Environ(), clitest.AsFared+"=1", "GRPC_GO_LOG_SEVERITY_LEVEL=info"), stuck
		if err := p.Cmd.Start(); err != nil {
			t.Fatal(err)
		}
		go func() {
			_ = p.Cmd.Wait()
			close(p.Done)
		}()
		t.Cleanup(func() {
			_ = p.Cmd.Process.Kill()
			<-p.Done
		})
		f.nodes[name] = p
	}
	again("server1", "run")
	again("leaf0", "leaf")
	f.until("server1", "10.255.0.2/32  1:1")
	if code := f.nodes["leaf1"].End(t, syscall.SIGKILL); code != -1 {
		t.Errorf("SIGKILL: exit %d", code)
	}
	f.until("server1", "10.255.0.2/32  1:0")
	// Each refused reload logs every error of the file, until the queue of 1 MiB is full.
	f.edit("server1", "planes:\n", strings.Repeat("unknown: x\n", 1000)+"planes:\n")
	within(t, time.Minute, func() error {
		if err := f.nodes["server1"].Cmd.Process.Signal(syscall.SIGHUP); err != nil {
			return err
		}
		if st := f.ask("server1", "status"); !strings.Contains(st, `log_lines_dropped{reason="slow-reader"}`) {
			return fmt.Errorf("status counts no lines:\n%s", st)
		}
		return nil
	})
	for _, name := range []string{"server1", "leaf0"} {
		if code := f.nodes[name].End(t, syscall.SIGTERM); code != cli.ExitOK {
			t.Errorf("%s: exit %d", name, code)
		}
	}
}

// TestLibrariesLog checks that messages of gRPC and net/http are records of the process's log, in its format, and that
// none goes past it.
func TestLibrariesLog(t *testing.T) {
	self := executable(t)
	dir, port := t.TempDir(), freePort(t)
	p := &clitest.Process{Cmd: exec.Command(self, "dataplane", "--driver", "memory", "--log-format", "json", "--socket", filepath.Join(dir, "s"), "--metrics-listen", port), Done: make(chan struct{})}
	p.Cmd.Env = append(os.Environ(), clitest.AsFared+"=1", "GRPC_GO_LOG_SEVERITY_LEVEL=info")
	p.Cmd.Stdout, p.Cmd.Stderr = &p.Log, &p.Log
	if err := p.Cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = p.Cmd.Wait()
		close(p.Done)
	}()
	t.Cleanup(func() {
		_ = p.Cmd.Process.Kill()
		<-p.Done
	})
	const want = `"msg":"message of a library","text":"[core] [Server #`
	within(t, time.Minute, func() error {
		if log := p.Log.String(); !strings.Contains(log, want) {
			return fmt.Errorf("no message of gRPC in the log:\n%s", log)
		}
		return nil
	})
	if code := p.End(t, syscall.SIGTERM); code != cli.ExitOK {
		t.Errorf("exit %d", code)
	}
	for line := range strings.Lines(p.Log.String()) {
		if !json.Valid([]byte(line)) {
			t.Errorf("a line past the log: %s", line)
		}
	}
	var records strings.Builder
	defer cli.LibraryLog.Use(slog.New(slog.NewTextHandler(&records, nil)))()
	for _, c := range []struct{ line, want string }{
		{"2026/01/02 03:04:05 ERROR: [core] x: y\n", `level=ERROR msg="message of a library" text="[core] x: y"`},
		{"2026/01/02 03:04:05 http: Accept error\n", `level=WARN msg="message of a library" text="http: Accept error"`},
		{"x", `level=WARN msg="message of a library" text=x`},
	} {
		records.Reset()
		if n, err := cli.LibraryLog.Write([]byte(c.line)); n != len(c.line) || err != nil || !strings.HasSuffix(records.String(), c.want+"\n") {
			t.Errorf("%q: %d, %v, record %s, want %s", c.line, n, err, records.String(), c.want)
		}
	}
}
