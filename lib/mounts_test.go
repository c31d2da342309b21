package lib

import (
	"bufio"
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/client/slots"
	"github.com/fared/fared/internal/slotfile"
	"github.com/fared/fared/internal/slotfile/slotfiletest"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// follower is the variable that makes the test binary the Go reader of these tests.
const follower = "FARED_TEST_FOLLOW"

// The pair that the readers follow.
var near, far = netip.MustParseAddr("10.255.0.1"), netip.MustParseAddr("10.255.0.2")

func TestMain(m *testing.M) {
	if os.Getenv(follower) != "" {
		follow()
		return
	}
	os.Exit(m.Run())
}

// follow does in Go what tests/follow.c does in C, and tests/follow.py in Python.
func follow() {
	source, destination := netip.MustParseAddr(os.Args[1]), netip.MustParseAddr(os.Args[2])
	go func() {
		os.Stdin.Read(make([]byte, 1)) // ends with the test
		os.Exit(0)
	}()
	table, err := slots.Open("")
	if err != nil {
		fmt.Println("0 0 0", err)
		return
	}
	last := ""
	for mark := table.Mark(); ; {
		share, reason := uint32(0), "success"
		if p, err := table.Lookup(source, destination, nil); err == nil && len(p.Slots) > 0 {
			share = p.Slots[0].Share
		}
		if err := table.Check(); err != nil {
			reason = err.Error()
		}
		if line := fmt.Sprint(table.Status().Run, share, " ", reason); line != last {
			fmt.Println(monotonic(), line)
			last = line
		}
		ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
		mark, _ = table.Wait(ctx, mark)
		cancel()
	}
}

func monotonic() int64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		panic(err)
	}
	return ts.Nano()
}

// followers returns the commands of the readers in C, Go and Python. That in C is static: it runs in any container.
func followers(t *testing.T) map[string][]string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	module, err := filepath.Abs("../python")
	if err != nil {
		t.Fatal(err)
	}
	script, err := filepath.Abs("tests/follow.py")
	if err != nil {
		t.Fatal(err)
	}
	return map[string][]string{
		"C": {compileStatic(t, "follow"), near.String(), far.String()}, "Go": {"env", follower + "=1", self, near.String(), far.String()}, "Python": python(t, script, module, near.String(), far.String()),
	}
}

// compileStatic compiles a program of lib/tests that needs no shared library.
func compileStatic(t testing.TB, program string) string {
	t.Setenv("LDFLAGS", "-static")
	return compile(t, program, plain)
}

// reader is a running reader.
type reader struct {
	cmd   *exec.Cmd
	mu    sync.Mutex
	lines []string
}

// startReader starts a reader, which ends with the test.
func startReader(t *testing.T, name string, args ...string) *reader {
	t.Helper()
	r := &reader{cmd: exec.Command(name, args...)}
	out, err := r.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	in, err := r.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	r.cmd.Stderr = os.Stderr
	if err := r.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for scan := bufio.NewScanner(out); scan.Scan(); {
			r.mu.Lock()
			r.lines = append(r.lines, scan.Text())
			r.mu.Unlock()
		}
	}()
	t.Cleanup(func() {
		in.Close()
		<-done
		if err := r.cmd.Wait(); err != nil {
			t.Errorf("%v: %v", args, err)
		}
	})
	return r
}

// await waits until the reader's last line has a share and contains a reason; "success" with heartbeats meanwhile.
func (p *published) await(t *testing.T, r *reader, who string, share uint32, reason string) {
	t.Helper()
	netnstest.Eventually(t, 2*time.Minute, func() error {
		if reason == "success" {
			if err := p.w.Beat(); err != nil {
				return err
			}
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		if len(r.lines) == 0 {
			return fmt.Errorf("%s: no line", who)
		}
		last := r.lines[len(r.lines)-1]
		if f := strings.SplitN(last, " ", 4); len(f) < 4 || f[2] != fmt.Sprint(share) || !strings.Contains(f[3], reason) {
			return fmt.Errorf("%s: %q, want share %d and %q", who, last, share, reason)
		}
		return nil
	})
}

// inMount returns a command in a mount namespace with a read-only bind mount of dir at mount, as a container has.
func inMount(dir, mount string, command ...string) []string {
	const script = `mount --bind "$0" "$1" && mount -o remount,bind,ro "$1" && shift && exec "$@"`
	return append([]string{"unshare", "--mount", "--propagation", "private", "sh", "-c", script, dir, mount, "env", "FARED_SLOTS=" + filepath.Join(mount, "slots")}, command...)
}

// begins starts another process's publication with a share of the pair's first slot.
func (p *published) begins(t *testing.T, share uint32) {
	t.Helper()
	var err error
	if p.w, err = slotfile.Open(p.path, 0); err != nil {
		t.Fatal(err)
	}
	if err := p.w.Begin(shape(2)); err != nil {
		t.Fatal(err)
	}
	p.set(t, near, far, []uint32{share, 1e9 - share})
}

// TestMounts follows the table by bind mounts, as in containers: through restarts of fared that keep the directory,
// through a time without fared, and up to the end of the directory, after which no table can appear.
func TestMounts(t *testing.T) {
	gate.Needed(t, "readers in containers follow the table")
	netnstest.Require(t, "unshare", "nsenter", "mount")
	dir := filepath.Join(t.TempDir(), "table")
	commands, all := followers(t), map[string]*reader{} // compiled before the table's first heartbeat
	p := &published{path: filepath.Join(dir, "slots")}
	p.begins(t, 1)
	t.Cleanup(func() { p.w.Close() })
	for who, command := range commands {
		c := inMount(dir, t.TempDir(), command...)
		all[who] = startReader(t, c[0], c[1:]...)
	}
	await := func(share uint32, reason string) {
		t.Helper()
		for who, r := range all {
			p.await(t, r, who, share, reason)
		}
	}
	await(1, "success")
	restart := func(share uint32, meanwhile func()) {
		t.Helper()
		if err := p.w.Close(); err != nil {
			t.Fatal(err)
		}
		meanwhile()
		p.begins(t, share)
	}
	for share := range uint32(5) {
		restart(share+2, func() {})
		await(share+2, "success")
	}
	restart(7, func() {
		slotfiletest.Age(t, p.path)
		await(6, "nothing has updated the slot table for a minute")
	})
	await(7, "success")
	restart(8, func() {
		slotfiletest.Age(t, p.path)
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
	})
	await(7, "was deleted after it was mounted here")
	for who, r := range all {
		new := append([]string{"--target", fmt.Sprint(r.cmd.Process.Pid), "--mount", "env", environment(t, r)}, commands[who]...)
		p.await(t, startReader(t, "nsenter", new...), "a new program in "+who, 0, "was deleted after it was mounted here")
	}
}

// environment returns FARED_SLOTS of a reader.
func environment(t *testing.T, r *reader) string {
	t.Helper()
	i := slices.IndexFunc(r.cmd.Args, func(arg string) bool { return strings.HasPrefix(arg, "FARED_SLOTS=") })
	if i < 0 {
		t.Fatalf("%v has no path", r.cmd.Args)
	}
	return r.cmd.Args[i]
}

// TestMountsOfDocker follows the table in a container of Docker, by the documented mount, through restarts of fared.
func TestMountsOfDocker(t *testing.T) {
	gate.Slow(t, gate.Containers, "starts a container")
	netnstest.Require(t, "docker")
	const image = "fared-debian:local"
	if out, err := exec.Command("docker", "image", "inspect", image).CombinedOutput(); err != nil {
		netnstest.Lacks(t, fmt.Sprintf("the image %s is not there, 'make images' makes it: %v: %s", image, err, out))
	}
	program := compileStatic(t, "follow")
	dir := filepath.Join(t.TempDir(), "table")
	p := &published{path: filepath.Join(dir, "slots")}
	p.begins(t, 1)
	t.Cleanup(func() { p.w.Close() })
	r := startReader(t, "docker", "run", "--rm", "--interactive", "--network", "none", "--volume", dir+":/run/fared/table:ro", "--volume", program+":/follow:ro",
		"--entrypoint", "/follow", image, near.String(), far.String())
	p.await(t, r, "the container", 1, "success")
	for share := range uint32(20) {
		if err := p.w.Close(); err != nil {
			t.Fatal(err)
		}
		p.begins(t, share+2)
		p.await(t, r, "the container", share+2, "success")
	}
}
