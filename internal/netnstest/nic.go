package netnstest

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/linkpoll"
)

// NIC is Veth with one interface index for both ends. Then ifindex equals iflink, as in a physical device, so the
// kernel does not regard a lost carrier as urgent (net/core/link_watch.c).
func NIC(t testing.TB, a *Namespace, deviceA string, b *Namespace, deviceB string) {
	t.Helper()
	const first = 1_000_000 // above the indexes of existing devices; those of containers continue the host's
	index := fmt.Sprint(first + indexes.Add(1))
	IP(t, "link", "add", "name", deviceA, "index", index, "netns", a.Name,
		"type", "veth", "peer", "name", deviceB, "index", index, "netns", b.Name)
}

// CPU returns the processor time of the process, which on a busy machine is a better measure than elapsed time.
func CPU(t testing.TB) time.Duration {
	t.Helper()
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// LateLink is a cable that no program polls. It shows when the kernel itself announces a lost carrier.
type LateLink struct {
	leaf   *Namespace
	device string
	events *os.File
}

// NewLateLink makes a LateLink between a new namespace and a leaf, with its carrier up.
func NewLateLink(t testing.TB, leaf *Namespace) *LateLink {
	t.Helper()
	server := New(t)
	l := &LateLink{leaf: leaf, device: fmt.Sprintf("late%d", indexes.Add(1))}
	NIC(t, server, "eth0", leaf, l.device)
	server.Addr("eth0")
	leaf.Addr(l.device)
	err := server.Do(func() error {
		fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		l.events = os.NewFile(uintptr(fd), "rtnetlink")
		return unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: unix.RTMGRP_LINK})
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.events.Close() })
	return l
}

// Cut sets the cable's carrier down, then that of the other devices of the leaf. It returns a channel that is closed when the kernel has
// announced the cable's loss.
func (l *LateLink) Cut(others ...string) <-chan struct{} {
	l.leaf.t.Helper()
	raw, err := l.events.SyscallConn()
	buf := make([]byte, 64<<10)
	for drained := false; err == nil && !drained; { // earlier events
		err = raw.Control(func(fd uintptr) {
			_, err := unix.Read(int(fd), buf)
			drained = err != nil
		})
	}
	if err != nil {
		l.leaf.t.Fatal(err)
	}
	l.leaf.down(append([]string{l.device}, others...)...)
	announced := make(chan struct{})
	go func() {
		defer close(announced)
		_, _ = l.events.Read(buf) // fails when the test has ended
	}()
	return announced
}

// Before reports whether the channel stays open for some time. An event before the call then precedes the announcement, and has another cause.
func Before(announced <-chan struct{}) bool {
	select {
	case <-announced:
		return false
	case <-time.After(50 * time.Millisecond):
		return true
	}
}

// down sets devices down by one process, in their order.
func (n *Namespace) down(devices ...string) {
	n.t.Helper()
	var lines strings.Builder
	for _, d := range devices {
		fmt.Fprintf(&lines, "link set %s down\n", d)
	}
	command := exec.Command("ip", "-n", n.Name, "-batch", "-")
	command.Stdin = strings.NewReader(lines.String())
	if out, err := command.CombinedOutput(); err != nil {
		n.t.Fatalf("ip -batch: %v\n%s", err, out)
	}
}

// Mend restores the cable's carrier.
func (l *LateLink) Mend() { l.leaf.IP("link", "set", l.device, "up") }

// attempts limits the repetitions of a comparison with an event of the kernel, which may come early when other devices of the machine change.
const attempts = 5

// SecondCable fails unless a program under test notices the second failed cable of a port before the kernel announces it. first and
// second are devices of the leaf that NIC made; dark reports whether the program has noticed the lost carrier at a device's far end.
// A third cable, which no program polls and which fails with the second, shows when the kernel's events come.
func SecondCable(t testing.TB, leaf *Namespace, first, second string, dark func(device string) bool) {
	t.Helper()
	late := NewLateLink(t, leaf)
	noticed := func(device string, want bool) {
		t.Helper()
		Eventually(t, time.Minute, func() error {
			if dark(device) != want {
				return fmt.Errorf("the loss of carrier of %s is known: %v", device, !want)
			}
			return nil
		})
	}
	for range attempts {
		noticed(first, false)
		noticed(second, false)
		// After this pause the kernel announces the first cable at once, and the program no longer polls quickly for an earlier event.
		time.Sleep(2 * linkpoll.Window)
		leaf.down(first)
		noticed(first, true)
		announced := late.Cut(second)
		noticed(second, true)
		if Before(announced) {
			return
		}
		for _, device := range []string{first, second} {
			leaf.IP("link", "set", device, "up")
		}
		late.Mend()
	}
	t.Fatalf("in %d attempts the second cable was never noticed before the kernel announced a third", attempts)
}
