package supervise

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/testkit/netnstest"
)

// asSupervisor makes the test binary a supervisor of the shell commands in its arguments. A supervisor reaps every
// child, so it needs a separate process.
const asSupervisor = "FARED_TEST_SUPERVISE"

func TestMain(m *testing.M) {
	if os.Getenv(asSupervisor) == "" {
		os.Exit(m.Run())
	}
	config := Config{Output: os.Stdout, Log: slog.New(slog.NewTextHandler(os.Stdout, nil)), Grace: time.Second}
	for i, script := range os.Args[1:] {
		config.Commands = append(config.Commands, Command{Name: fmt.Sprint("c", i), Path: "/bin/sh", Args: []string{"sh", "-c", script}})
	}
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGTERM, unix.SIGINT)
	defer stop()
	if err := Run(ctx, config); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}

// limit bounds a test's wait for an expected event.
const limit = time.Minute

// run is a supervisor in a separate process.
type run struct {
	t     *testing.T
	cmd   *exec.Cmd
	lines chan string
	seen  []string
	used  map[int]bool // lines of seen that until has returned
}

// start supervises shell scripts.
func start(t *testing.T, scripts ...string) *run {
	t.Helper()
	return startAs(t, nil, scripts...)
}

func startAs(t *testing.T, attr *unix.SysProcAttr, scripts ...string) *run {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	r := &run{t: t, cmd: exec.Command(self, scripts...), lines: make(chan string, 10_000), used: map[int]bool{}}
	r.cmd.Env = append(os.Environ(), asSupervisor+"=1")
	r.cmd.SysProcAttr = attr
	out, err := r.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	r.cmd.Stderr = os.Stderr
	if err := r.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(r.lines)
		for in := bufio.NewScanner(out); in.Scan(); {
			r.lines <- in.Text()
		}
	}()
	t.Cleanup(func() {
		if r.cmd.ProcessState != nil {
			return
		}
		// After a failed test, let the supervisor end its processes, because it has the complete list.
		_ = r.cmd.Process.Signal(unix.SIGCONT)
		_ = r.cmd.Process.Signal(unix.SIGTERM)
		after := time.AfterFunc(limit, func() { _ = r.cmd.Process.Kill() })
		defer after.Stop()
		_ = r.cmd.Wait()
	})
	return r
}

// until returns the text after the given text in the first line that has it and was not returned before, because
// commands write concurrently.
func (r *run) until(text string) string {
	r.t.Helper()
	deadline := time.After(limit)
	for i := 0; ; i++ {
		if i == len(r.seen) {
			select {
			case line, ok := <-r.lines:
				if !ok {
					r.t.Fatalf("ended without %q:\n%s", text, strings.Join(r.seen, "\n"))
				}
				r.seen = append(r.seen, line)
			case <-deadline:
				r.t.Fatalf("no %q within %v:\n%s", text, limit, strings.Join(r.seen, "\n"))
			}
		}
		if _, after, found := strings.Cut(r.seen[i], text); found && !r.used[i] {
			r.used[i] = true
			return after
		}
	}
}

// pid reads the process ID that a command prints after a text.
func (r *run) pid(text string) int {
	r.t.Helper()
	pid, err := strconv.Atoi(r.until(text))
	if err != nil || pid <= 1 {
		r.t.Fatalf("no process ID: %v", err)
	}
	return pid
}

func (r *run) signal(pid int, sig unix.Signal) {
	r.t.Helper()
	if err := unix.Kill(pid, sig); err != nil {
		r.t.Fatalf("signal %v to %d: %v", sig, pid, err)
	}
}

// end stops the supervisor and waits for it.
func (r *run) end() {
	r.t.Helper()
	r.signal(r.cmd.Process.Pid, unix.SIGTERM)
	r.wait()
}

// wait reads to the end of the output, which comes when the supervisor and all other holders of the pipe have ended.
func (r *run) wait() {
	r.t.Helper()
	for deadline := time.After(limit); ; {
		select {
		case line, ok := <-r.lines:
			if ok {
				r.seen = append(r.seen, line)
				continue
			}
			if err := r.cmd.Wait(); err != nil {
				r.t.Errorf("%v:\n%s", err, strings.Join(r.seen, "\n"))
			}
			return
		case <-deadline:
			r.t.Fatalf("does not end within %v:\n%s", limit, strings.Join(r.seen, "\n"))
		}
	}
}

func (r *run) count(text string) int { return strings.Count(strings.Join(r.seen, "\n"), text) }

// gone waits until the process does not exist, not even as a zombie.
func gone(t *testing.T, pid int) {
	t.Helper()
	for deadline := time.Now().Add(limit); unix.Kill(pid, 0) == nil; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("process %d is still there", pid)
		}
	}
}

// forever prints its process ID, and runs until SIGTERM.
const forever = "trap 'exit 0' TERM; echo pid $$; while :; do sleep 0.01; done"

// TestKilledStartsAgain checks that a killed command runs again as another process, and that the others are not
// restarted.
func TestKilledStartsAgain(t *testing.T) {
	r := start(t, forever, "echo once; exec sleep 1000")
	first := r.pid("c0: pid ")
	for range 3 {
		r.signal(first, unix.SIGKILL)
		second := r.pid("c0: pid ")
		if second == first {
			t.Fatalf("process %d again", first)
		}
		first = second
	}
	r.end()
	gone(t, first)
	if n := r.count("c1: once"); n != 1 {
		t.Errorf("the other command started %d times", n)
	}
	if n := r.count("how=SIGKILL"); n != 3 {
		t.Errorf("%d of 3 deaths are logged:\n%s", n, strings.Join(r.seen, "\n"))
	}
}

// TestFrozenSupervisor checks that a process that dies while the supervisor is stopped is restarted as soon as the
// supervisor continues. A lab crashes a node in this way.
func TestFrozenSupervisor(t *testing.T) {
	r := start(t, forever, forever)
	a, b := r.pid("c0: pid "), r.pid("c1: pid ")
	for range 3 {
		r.signal(r.cmd.Process.Pid, unix.SIGSTOP)
		r.signal(a, unix.SIGKILL)
		r.signal(b, unix.SIGKILL)
		dead(t, a)
		dead(t, b)
		r.signal(r.cmd.Process.Pid, unix.SIGCONT)
		c, d := r.pid("c0: pid "), r.pid("c1: pid ")
		gone(t, a)
		gone(t, b)
		a, b = c, d
	}
	r.end()
}

// dead waits until a process is a zombie, or does not exist.
func dead(t *testing.T, pid int) {
	t.Helper()
	for deadline := time.Now().Add(limit); ; time.Sleep(time.Millisecond) {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			return
		}
		if fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:])); fields[0] == "Z" {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("process %d does not die", pid)
		}
	}
}

// TestOrphansAreReaped checks that an orphaned grandchild is reaped, and does not count as a command.
func TestOrphansAreReaped(t *testing.T) {
	r := start(t, "sleep 0.2 & echo orphan $!; echo pid $$; wait; exec sleep 1000", "(sleep 0.01 & echo left $!); exec sleep 1000")
	left := r.pid("c1: left ")
	gone(t, left)
	orphan, parent := r.pid("c0: orphan "), r.pid("c0: pid ")
	r.signal(parent, unix.SIGKILL)
	gone(t, parent)
	gone(t, orphan)
	r.end()
}

// TestEndsInOrder checks that SIGTERM lets a command finish, that a command that ignores it is killed, and that none is
// restarted.
func TestEndsInOrder(t *testing.T) {
	r := start(t, "trap 'echo done; exit 3' TERM; echo ready; while :; do sleep 0.01; done", "trap '' TERM; echo pid $$; while :; do sleep 0.01; done")
	r.until("c0: ready")
	stubborn := r.pid("c1: pid ")
	r.end()
	gone(t, stubborn)
	if r.count("c0: done") != 1 || r.count("c0: ready") != 1 {
		t.Errorf("the first did not finish once:\n%s", strings.Join(r.seen, "\n"))
	}
	if r.count("exit code 3") != 1 || r.count("how=SIGKILL") != 1 {
		t.Errorf("how they ended is not said:\n%s", strings.Join(r.seen, "\n"))
	}
}

// TestHangupIsPassedOn checks that a command receives SIGHUP, and that it and the supervisor continue.
func TestHangupIsPassedOn(t *testing.T) {
	r := start(t, "trap 'echo again' HUP; trap 'exit 0' TERM; echo ready; while :; do sleep 0.01; done")
	r.until("c0: ready")
	for range 2 {
		r.signal(r.cmd.Process.Pid, unix.SIGHUP)
		r.until("c0: again")
	}
	r.end()
	if n := r.count("c0: ready"); n != 1 {
		t.Errorf("started %d times", n)
	}
}

// TestEndWhileWaiting checks that a command that keeps ending does not prevent the supervisor's end, whatever the
// pause.
func TestEndWhileWaiting(t *testing.T) {
	r := start(t, "echo up; exit 7")
	for range 4 {
		r.until("exit code 7")
	}
	r.end()
	if !strings.Contains(strings.Join(r.seen, "\n"), "again_in=0s") || r.count("again_in=100ms") != 1 {
		t.Errorf("the pauses are not as promised:\n%s", strings.Join(r.seen, "\n"))
	}
}

// TestCannotStart checks that the start of a missing program is retried and logged.
func TestCannotStart(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	log, w := io.Pipe()
	done := make(chan error, 1)
	go func() {
		done <- Run(ctx, Config{
			Commands: []Command{{Name: "none", Path: "/none/such", Args: []string{"such"}}}, Output: io.Discard,
			Log: slog.New(slog.NewTextHandler(w, nil)),
		})
		w.Close()
	}()
	in := bufio.NewScanner(log)
	for range 3 {
		if !in.Scan() || !strings.Contains(in.Text(), "cannot start") || !strings.Contains(in.Text(), "/none/such") {
			t.Fatalf("said %q", in.Text())
		}
	}
	cancel()
	for in.Scan() {
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// TestAsPID1 runs the supervisor in a separate PID namespace, where signals without a handler have no effect and all
// processes end with PID 1.
func TestAsPID1(t *testing.T) {
	if os.Geteuid() != 0 {
		netnstest.Lacks(t, "a PID namespace needs root")
	}
	r := startAs(t, &unix.SysProcAttr{Cloneflags: unix.CLONE_NEWPID}, forever, "setsid sleep 1000 & echo ready; exec sleep 1000")
	r.until("c1: ready")
	r.until("c0: pid ")
	r.end()
}
