// Package supervise keeps commands running. It serves as PID 1 of a container whose network devices must outlive the
// processes that use them: a container's network namespace exists as long as its PID 1, and cables in it
// (veth pairs) are deleted with it.
//
// One goroutine starts and reaps, so that no end is missed. It waits for every child of this process, including adopted
// orphans. No other part of the process may start processes meanwhile.
package supervise

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"time"

	"golang.org/x/sys/unix"
)

// Command is a program to keep running.
type Command struct {
	// Name prefixes each line of the command's output.
	Name string
	// Path is the program, and Args its arguments, beginning with its name.
	Path string
	Args []string
}

// Config describes the commands to supervise.
type Config struct {
	Commands []Command
	// Output receives standard output and standard error of the commands, line by line.
	Output io.Writer
	// Log receives starts and ends.
	Log *slog.Logger
	// Grace is the time between SIGTERM and SIGKILL. 0 means DefaultGrace.
	Grace time.Duration
}

// DefaultGrace is shorter than the 10 s that `docker stop` grants PID 1.
const DefaultGrace = 8 * time.Second

// child is a command and the process that runs it.
type child struct {
	Command
	process *os.Process // nil if none runs
	started time.Time
	pause   backoff
	due     time.Time // time of the next start; meaningful if no process runs
}

type supervisor struct {
	Config
	children []*child
	output   *output
	ending   bool // start no further process
}

// Run starts the commands, and restarts commands that end, until ctx is done. The first restart is immediate; pauses
// then grow while a command keeps ending early. When ctx is done every command gets SIGTERM, and Run returns when all
// have ended. SIGHUP is passed on. Commands run in separate process groups, so that a terminal's Ctrl-C reaches them
// once: from this process.
func Run(ctx context.Context, config Config) error {
	if config.Grace == 0 {
		config.Grace = DefaultGrace
	}
	// PID 1 adopts orphans in any case; another process only as a subreaper.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("become the reaper of orphans: %w", err)
	}
	s := &supervisor{Config: config, output: newOutput(config.Output)}
	for _, c := range config.Commands {
		s.children = append(s.children, &child{Command: c})
	}
	// A buffer of one each suffices: a pending signal need not be queued twice.
	ended, hangup := make(chan os.Signal, 1), make(chan os.Signal, 1)
	signal.Notify(ended, unix.SIGCHLD)
	defer signal.Stop(ended)
	signal.Notify(hangup, unix.SIGHUP)
	defer signal.Stop(hangup)
	s.keep(ctx, ended, hangup)
	s.end(ended)
	return s.output.close()
}

// keep starts commands that do not run, until ctx is done.
func (s *supervisor) keep(ctx context.Context, ended, hangup <-chan os.Signal) {
	wake := time.NewTimer(0)
	defer wake.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-hangup:
			s.hangUp()
			continue
		case <-ended:
			select {
			case <-hangup: // before a restart: a command that has just started does not handle the signal yet, and would end
				s.hangUp()
			default:
			}
			s.reap()
		case <-wake.C:
		}
		now := time.Now()
		next := time.Duration(-1)
		for _, c := range s.children {
			if c.process == nil && !c.due.After(now) {
				s.start(c)
			}
			if c.process == nil && (next < 0 || c.due.Sub(now) < next) {
				next = c.due.Sub(now)
			}
		}
		if next >= 0 {
			wake.Reset(next)
		}
	}
}

// start starts a command. A failed start counts as an early end.
func (s *supervisor) start(c *child) {
	c.started = time.Now()
	err := s.spawn(c)
	if err != nil {
		c.due = c.started.Add(c.pause.after(0))
		s.Log.Error("cannot start", "command", c.Name, "error", err, "again_in", time.Until(c.due).Round(time.Millisecond))
		return
	}
	s.Log.Info("started", "command", c.Name, "pid", c.process.Pid)
}

func (s *supervisor) spawn(c *child) error {
	stdin, err := os.Open(os.DevNull)
	if err != nil {
		return err
	}
	defer stdin.Close()
	stdout, err := s.output.pipe(c.Name)
	if err != nil {
		return err
	}
	defer stdout.Close()
	c.process, err = os.StartProcess(c.Path, c.Args, &os.ProcAttr{
		Files: []*os.File{stdin, stdout, stdout}, Sys: &unix.SysProcAttr{Setpgid: true},
	})
	return err
}

// reap waits for all ended processes. The goroutine that starts processes calls it, so a process that ends at once is
// already known.
func (s *supervisor) reap() {
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, unix.WNOHANG, nil)
		if err == unix.EINTR {
			continue
		}
		if err != nil || pid <= 0 {
			return // no child left, or no ended child
		}
		for _, c := range s.children {
			if c.process == nil || c.process.Pid != pid {
				continue
			}
			_ = c.process.Release()
			c.process = nil
			lived := time.Since(c.started)
			log := s.Log.With("command", c.Name, "pid", pid, "how", how(status), "after", lived.Round(time.Millisecond))
			if s.ending {
				log.Info("ended")
				continue
			}
			pause := c.pause.after(lived)
			c.due = time.Now().Add(pause)
			log.Warn("ended", "again_in", pause)
		}
	}
}

// how describes the end of a process.
func how(s unix.WaitStatus) string {
	if s.Signaled() {
		return unix.SignalName(s.Signal())
	}
	return fmt.Sprintf("exit code %d", s.ExitStatus())
}

// hangUp passes SIGHUP on.
func (s *supervisor) hangUp() {
	s.signal(unix.SIGHUP)
	s.Log.Info("passed on", "signal", "SIGHUP")
}

// signal sends a signal to every command's process group.
func (s *supervisor) signal(sig unix.Signal) (running bool) {
	for _, c := range s.children {
		if c.process != nil {
			running = true
			_ = unix.Kill(-c.process.Pid, sig) // a process that has just ended is reaped next
		}
	}
	return running
}

// end stops all commands.
func (s *supervisor) end(ended <-chan os.Signal) {
	s.ending = true
	grace := time.NewTimer(s.Grace)
	defer grace.Stop()
	for running := s.signal(unix.SIGTERM); running; {
		select {
		case <-ended:
			s.reap()
		case <-grace.C:
			s.Log.Warn("killing the commands that have not ended in time", "grace", s.Grace)
			s.signal(unix.SIGKILL)
		}
		running = false
		for _, c := range s.children {
			running = running || c.process != nil
		}
	}
}
