// Package netns runs functions in network namespaces: in the namespace of a name, or in the one in which an endpoint
// was opened.
package netns

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"

	"golang.org/x/sys/unix"
)

// Namespace is a network namespace. Its file descriptor keeps the namespace alive, as a socket does.
type Namespace struct {
	fd  int
	dev uint64
	ino uint64
}

const threadNamespace = "/proc/thread-self/ns/net"

// Current returns the namespace of the calling thread.
func Current() (Namespace, error) { return open(threadNamespace) }

// Open returns the namespace of a name or path, as in Path. The error of a path that leads to another file than a
// network namespace, or of one that this process may not enter, has the remedy.
func Open(name string) (Namespace, error) {
	n, err := open(Path(name))
	if err != nil {
		return n, fmt.Errorf("network namespace %s: %w", name, err)
	}
	if err := onThread(func() error { return enterError(name, n.enter()) }, func() error { return nil }); err != nil {
		n.Close()
		return n, err
	}
	return n, nil
}

func open(path string) (Namespace, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return Namespace{}, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	var s unix.Stat_t
	if err := unix.Fstat(fd, &s); err != nil {
		unix.Close(fd)
		return Namespace{}, err
	}
	return Namespace{fd: fd, dev: s.Dev, ino: s.Ino}, nil
}

// Cookie returns the number that the kernel gives the calling thread's namespace, unique until the kernel restarts
// (Linux 5.14).
func Cookie() (uint64, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, os.NewSyscallError("socket", err)
	}
	defer unix.Close(fd)
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	return cookie, os.NewSyscallError("getsockopt SO_NETNS_COOKIE", err)
}

const bootID = "/proc/sys/kernel/random/boot_id"

// ID identifies the calling thread's namespace among those of all machines: the kernel's boot id, a slash, and Cookie.
func ID() (string, error) {
	boot, err := os.ReadFile(bootID)
	if err != nil {
		return "", err
	}
	cookie, err := Cookie()
	return fmt.Sprintf("%s/%d", bytes.TrimSpace(boot), cookie), err
}

// New makes a namespace, which ends when it is closed and empty.
func New() (n Namespace, err error) {
	err = onThread(func() error { return unix.Unshare(unix.CLONE_NEWNET) }, func() (err error) {
		n, err = Current()
		return err
	})
	return n, err
}

// Dir is the directory in which `ip netns` keeps namespaces by name.
const Dir = "/run/netns"

// Path returns the file of a namespace: a name is a file in Dir, an absolute path is returned unchanged, and "" is the
// process's own.
func Path(name string) string {
	switch {
	case name == "":
		return "/proc/self/ns/net"
	case filepath.IsAbs(name):
		return filepath.Clean(name)
	}
	return filepath.Join(Dir, name)
}

// In calls f on a thread in the namespace of a name or path, as in Path: sockets that f opens belong to it wherever
// they are used later. With an empty name it just calls f. Otherwise f must not start goroutines that depend on the
// namespace.
func In(name string, f func() error) error {
	if name == "" {
		return f()
	}
	n, err := open(Path(name))
	if err != nil {
		return fmt.Errorf("network namespace %s: %w", name, err)
	}
	defer n.Close()
	return onThread(func() error { return enterError(name, n.enter()) }, f)
}

func enterError(name string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("network namespace %s: %w: entering it needs CAP_SYS_ADMIN; grant it or start inside (ip netns exec)", name, err)
	case errors.Is(err, unix.EINVAL):
		return fmt.Errorf("network namespace %s: %w: %s is not a network namespace", name, err, Path(name))
	}
	return fmt.Errorf("network namespace %s: %w", name, err)
}

// Close closes the file descriptor. A second call does nothing.
func (n *Namespace) Close() {
	if n.fd > 0 {
		unix.Close(n.fd)
		n.fd = 0
	}
}

// FD returns the file descriptor, which is valid until Close.
func (n Namespace) FD() int { return n.fd }

// Is reports whether the namespace of a name or path, as in Path, is this one. It fails if the file does not exist.
func (n Namespace) Is(name string) (bool, error) {
	var s unix.Stat_t
	if err := unix.Stat(Path(name), &s); err != nil {
		return false, &fs.PathError{Op: "stat", Path: Path(name), Err: err}
	}
	return n.same(&s), nil
}

func (n Namespace) same(s *unix.Stat_t) bool { return s.Dev == n.dev && s.Ino == n.ino }

func (n Namespace) enter() error {
	if err := unix.Setns(n.fd, unix.CLONE_NEWNET); err != nil {
		return os.NewSyscallError("setns", err)
	}
	return nil
}

// Do calls f on a thread in the namespace; f must do its work on that thread. It is nearly always the calling thread.
// Otherwise another thread enters the namespace and returns, or ends if it cannot return.
func (n Namespace) Do(f func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var s unix.Stat_t
	if err := unix.Stat(threadNamespace, &s); err != nil {
		return err
	}
	if n.same(&s) {
		return f()
	}
	return onThread(n.enter, f)
}

// onThread calls enter, which changes the namespace of its thread, and then f, on a separate goroutine that is locked
// to its thread. A thread that cannot return to its namespace ends with the goroutine.
func onThread(enter, f func() error) error {
	done := make(chan error, 1)
	go func() {
		err := errors.New("the function ended its goroutine")
		defer func() { done <- err }()
		runtime.LockOSThread()
		home, openErr := Current()
		if openErr != nil {
			err = fmt.Errorf("own network namespace: %w", openErr)
			runtime.UnlockOSThread()
			return
		}
		defer home.Close()
		if enterErr := enter(); enterErr != nil {
			err = enterErr
			runtime.UnlockOSThread()
			return
		}
		defer func() {
			if home.enter() == nil {
				runtime.UnlockOSThread()
			}
		}()
		err = f()
	}()
	return <-done
}
