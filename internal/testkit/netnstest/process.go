package netnstest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/testkit/testlog"
)

// Process is a program that runs in a namespace.
type Process struct {
	// Name is the program's file name.
	Name string
	cmd  *exec.Cmd
	log  testlog.Log
	done chan struct{} // closed when the process has ended
	err  error         // result of the process; read after done
	stop sync.Once
}

// Start starts a program in the namespace. The end of the test stops it; if the
// test has failed by then, the end of the program's output is logged.
func (n *Namespace) Start(t testing.TB, name string, args ...string) *Process {
	t.Helper()
	return n.start(t, func(run func() error) error { return run() }, name, args...)
}

// StartOnHost is Start with a /sys that shows the namespace's devices, as on a host; what is mounted on /sys/fs/bpf
// stays.
func (n *Namespace) StartOnHost(t testing.TB, name string, args ...string) *Process {
	t.Helper()
	return n.start(t, withSysfs, name, args...)
}

// withSysfs calls run with mounts of the calling thread, which ends with its goroutine.
func withSysfs(run func() error) error {
	runtime.LockOSThread() // and never unlocked
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return os.NewSyscallError("unshare", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return os.NewSyscallError("mount", err)
	}
	const bpf = "/sys/fs/bpf"
	tree, err := unix.OpenTree(unix.AT_FDCWD, bpf, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return os.NewSyscallError("open_tree "+bpf, err)
	}
	defer unix.Close(tree)
	if err := unix.Mount("sysfs", "/sys", "sysfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return os.NewSyscallError("mount /sys", err)
	}
	if err := unix.MoveMount(tree, "", unix.AT_FDCWD, bpf, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return os.NewSyscallError("move_mount "+bpf, err)
	}
	return run()
}

func (n *Namespace) start(t testing.TB, with func(run func() error) error, name string, args ...string) *Process {
	t.Helper()
	p := &Process{Name: filepath.Base(name), cmd: exec.Command(name, args...), done: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = &p.log, &p.log
	// In a separate process group an interrupt at the terminal ends only the test, which ends this process.
	p.cmd.SysProcAttr = &unix.SysProcAttr{Setpgid: true}
	if err := n.Do(func() error { return with(p.cmd.Start) }); err != nil {
		t.Fatalf("start %s in %s: %v", name, n.Name, err)
	}
	go func() {
		p.err = p.cmd.Wait()
		close(p.done)
	}()
	t.Cleanup(func() {
		p.Stop()
		if t.Failed() {
			t.Logf("%s in %s wrote:\n%s", p.Name, n.Name, p.tail(8<<10))
		}
	})
	return p
}

// Pid returns the process id.
func (p *Process) Pid() int { return p.cmd.Process.Pid }

// Log returns the process's output so far.
func (p *Process) Log() string { return p.log.String() }

// Running returns nil while the process runs, and then its result.
func (p *Process) Running() error {
	select {
	case <-p.done:
		return fmt.Errorf("%s ended: %v\n%s", p.Name, p.err, p.tail(4<<10))
	default:
		return nil
	}
}

// AwaitText waits until the process has written text. Its end before that fails the test.
func (p *Process) AwaitText(t testing.TB, text string) {
	t.Helper()
	Eventually(t, time.Minute, func() error {
		err := p.Running()
		if strings.Contains(p.Log(), text) {
			return nil
		}
		if err != nil {
			t.Fatal(err)
		}
		return fmt.Errorf("%s has not written %q:\n%s", p.Name, text, p.Log())
	})
}

// AwaitSocket waits until ss with an option, such as "-tlnH", lists text among the sockets of the namespace.
func (p *Process) AwaitSocket(t testing.TB, n *Namespace, option, text string) {
	t.Helper()
	Eventually(t, time.Minute, func() error {
		out, err := n.Output("ss", option)
		if err == nil && !strings.Contains(string(out), text) {
			err = fmt.Errorf("%s has no socket %s:\n%s", p.Name, text, p.Log())
		}
		return err
	})
}

// AwaitEnd waits until the process has ended.
func (p *Process) AwaitEnd(t testing.TB) {
	t.Helper()
	select {
	case <-p.done:
	case <-time.After(90 * time.Second):
		t.Fatalf("%s still runs:\n%s", p.Name, p.Log())
	}
}

// Signal sends a signal to the process.
func (p *Process) Signal(s unix.Signal) error { return p.cmd.Process.Signal(s) }

// Stop sends SIGTERM, after three seconds SIGKILL, and waits.
func (p *Process) Stop() {
	p.stop.Do(func() {
		_ = p.Signal(unix.SIGTERM) // an error means that the process has ended
		select {
		case <-p.done:
		case <-time.After(3 * time.Second):
			_ = p.cmd.Process.Kill()
			<-p.done
		}
	})
}

// Kill ends the process by SIGKILL, as a crash does.
func (p *Process) Kill() {
	p.stop.Do(func() {
		_ = p.cmd.Process.Kill()
		<-p.done
	})
}

// tail returns the end of the output, at most that many bytes.
func (p *Process) tail(most int) string {
	text := p.log.String()
	return text[max(0, len(text)-most):]
}
