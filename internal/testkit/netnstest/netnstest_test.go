package netnstest

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestMissingNamesTheTool(t *testing.T) {
	Require(t)
	if got := missing([]string{"ip", "fared-no-such-tool"}); !strings.Contains(got, "fared-no-such-tool is not installed") {
		t.Errorf("missing = %q", got)
	}
}

func TestVethJoinsNamespaces(t *testing.T) {
	Require(t, "ping")
	a, b := New(t), New(t)
	Veth(t, a, "eth0", b, "eth0")
	a.Addr("eth0", "192.0.2.1/30", "2001:db8::1/64")
	b.Addr("eth0", "192.0.2.2/30", "2001:db8::2/64")
	for _, to := range []string{"192.0.2.2", "2001:db8::2"} {
		Eventually(t, time.Minute, func() error {
			_, err := a.Output("ping", "-c1", "-W1", to)
			return err
		})
	}
	if ia, ib := a.Device("eth0").Index, b.Device("eth0").Index; ia == ib {
		t.Errorf("both ends have index %d", ia)
	}
}

func TestDoReturnsTheThread(t *testing.T) {
	Require(t)
	n := New(t)
	var inside unix.Stat_t
	n.Must(func() error { return unix.Stat("/proc/thread-self/ns/net", &inside) })
	var want, after unix.Stat_t
	if err := unix.Stat(n.Path(), &want); err != nil {
		t.Fatal(err)
	}
	if inside.Ino != want.Ino {
		t.Errorf("inside: namespace %d, want %d", inside.Ino, want.Ino)
	}
	if err := unix.Stat("/proc/thread-self/ns/net", &after); err != nil {
		t.Fatal(err)
	}
	if after.Ino == want.Ino {
		t.Error("the test's thread is in the namespace")
	}
	wrong := errors.New("f's own")
	if err := n.Do(func() error { return wrong }); err != wrong {
		t.Errorf("Do = %v, want f's error", err)
	}
}

func TestProcessIsStoppedByPid(t *testing.T) {
	Require(t, "sh")
	n := New(t)
	p := n.Start(t, "sh", "-c", "trap 'echo told; exit 0' TERM; echo begun; while :; do sleep 0.01; done")
	Eventually(t, time.Minute, func() error {
		if !strings.Contains(p.Log(), "begun") {
			return errors.New("nothing written")
		}
		return p.Running()
	})
	p.Stop()
	if p.Running() == nil || !strings.Contains(p.Log(), "told") {
		t.Errorf("running %v, log %q", p.Running(), p.Log())
	}
	if _, err := os.Stat(fmt.Sprintf("/proc/%d", p.Pid())); err == nil {
		t.Error("the process is still there")
	}
}

// TestStartOnHost checks that a process sees its namespace's devices in /sys and what is mounted on /sys/fs/bpf, and
// that this process's mounts stay.
func TestStartOnHost(t *testing.T) {
	Require(t, "stat")
	space, other := New(t), New(t)
	Veth(t, space, "only-there", other, "v0")
	kind := func(run func(*exec.Cmd) ([]byte, error)) string {
		out, err := run(exec.Command("stat", "-f", "-c", "%i %T", "/sys/fs/bpf"))
		if err != nil {
			t.Fatal(err)
		}
		return string(out)
	}
	bpf := kind((*exec.Cmd).Output)
	p := space.StartOnHost(t, "sh", "-c", "stat -f -c '%i %T' /sys/fs/bpf; cat /sys/class/net/only-there/iflink")
	p.AwaitEnd(t)
	if log := p.Log(); !regexp.MustCompile("^" + regexp.QuoteMeta(bpf) + "[0-9]+\n$").MatchString(log) {
		t.Errorf("%q, want %q and a number", log, bpf)
	}
	if _, err := os.Stat("/sys/class/net/only-there"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("this process has it too: %v", err)
	}
}

// TestDeafen checks that a socket of the namespace receives no later event of a link, and that those of other
// namespaces do.
func TestDeafen(t *testing.T) {
	deaf, other := Pair(t, "eth0", "192.0.2.1/30", "192.0.2.2/30")
	listen := func() (int, error) {
		fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
		if err != nil {
			return 0, err
		}
		return fd, unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: unix.RTMGRP_LINK})
	}
	for _, n := range []*Namespace{deaf, other} {
		fd := In(n, listen)
		defer unix.Close(fd)
		if n == deaf {
			n.Deafen()
		}
		n.IP("link", "set", "eth0", "mtu", "1400") // the event precedes the answer
		if _, err := unix.Read(fd, make([]byte, 64<<10)); (n == deaf) != (err == unix.EAGAIN) || n == other && err != nil {
			t.Errorf("%s: %v", n.Name, err)
		}
	}
}
