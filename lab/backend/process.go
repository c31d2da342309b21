package backend

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Process is a program of a node.
type Process struct {
	program string        // its name at the node, such as "run"
	cmd     *exec.Cmd     // the started command
	done    chan struct{} // closed when it has ended
	// stopping is true once its end is wanted, struck once kill or strike has killed it.
	stopping, struck atomic.Bool
}

// StartProcess starts a program in a namespace, in a separate process group, so that an interrupt at the terminal ends
// only the lab, which then ends the program. Its output is appended to a file, so it never blocks. fail is called if it
// ends unexpectedly.
func StartProcess(ns Namespace, node, name, log string, fail func(error), program string, args ...string) (*Process, error) {
	file, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	p := &Process{program: name, cmd: exec.Command(program, args...), done: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr, p.cmd.Dir = file, file, filepath.Dir(log)
	p.cmd.SysProcAttr = &unix.SysProcAttr{Setpgid: true}
	if err := ns.Do(p.cmd.Start); err != nil {
		return nil, fmt.Errorf("%s: %s: %w", node, name, err)
	}
	go func() {
		err := p.cmd.Wait()
		// The end by another's SIGKILL is unexpected, even if it is noticed when the process was asked to end.
		if !p.stopping.Load() || killed(err) && !p.struck.Load() {
			how := "with exit code 0"
			if err != nil {
				how = err.Error()
			}
			fail(fmt.Errorf("%s: %s ended unexpectedly (%s); its last lines in %s:\n%s", node, name, how, log, lastLines(log, 10)))
		}
		close(p.done)
	}()
	return p, nil
}

// killed reports whether a process has ended by SIGKILL.
func killed(err error) bool {
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		return false
	}
	status, ok := exit.Sys().(syscall.WaitStatus)
	return ok && status.Signaled() && status.Signal() == unix.SIGKILL
}

// Ask asks the process to end.
func (p *Process) Ask() {
	p.stopping.Store(true)
	_ = p.cmd.Process.Signal(unix.SIGTERM) // an error means that it has already ended
}

// Wait waits for a process that was asked to end, and kills it after the patience.
func (p *Process) Wait(patience time.Duration) {
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-p.done:
	case <-timer.C:
		p.kill()
	}
}

// kill kills the process, like a crash.
func (p *Process) kill() {
	p.strike()
	<-p.done
}

// strike is kill without waiting for the end.
func (p *Process) strike() {
	p.stopping.Store(true)
	p.struck.Store(true)
	_ = p.cmd.Process.Kill() // an error means that it has already ended
}

// lastLines returns the last n lines of a log.
func lastLines(file string, n int) string {
	b, err := os.ReadFile(file)
	if err != nil {
		return "  " + err.Error()
	}
	lines := strings.Split(strings.TrimRight(string(b), "\n"), "\n")
	return "  " + strings.Join(lines[max(0, len(lines)-n):], "\n  ")
}
