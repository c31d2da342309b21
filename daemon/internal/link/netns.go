package link

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// NamespacePath returns the file of a namespace: a name is a file in the directory of `ip netns`, an absolute path is returned unchanged, and
// empty is the process's own.
func NamespacePath(netns string) string {
	switch {
	case netns == "":
		return "/proc/self/ns/net"
	case strings.HasPrefix(netns, "/"):
		return filepath.Clean(netns)
	}
	return filepath.Join("/run/netns", netns)
}

// InNamespace calls f on a thread that is inside the namespace: sockets that f opens belong to it wherever they are used later. With an empty
// netns it just calls f. Otherwise f must not start goroutines that depend on the namespace.
func InNamespace(netns string, f func() error) error {
	if netns == "" {
		return f()
	}
	path := NamespacePath(netns)
	target, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("network namespace %s: %w", netns, err)
	}
	defer target.Close()
	// f runs on a separate goroutine, so that a thread that cannot return to its namespace ends with it: a locked goroutine that returns
	// destroys its thread.
	done := make(chan error, 1)
	go func() {
		err := errors.New("network namespace " + netns + ": the function ended its goroutine")
		defer func() { done <- err }()
		runtime.LockOSThread()
		home, openErr := os.Open(fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid()))
		if openErr != nil {
			err = fmt.Errorf("own network namespace: %w", openErr)
			runtime.UnlockOSThread()
			return
		}
		defer home.Close()
		if e := unix.Setns(int(target.Fd()), unix.CLONE_NEWNET); e != nil {
			err = enterError(netns, path, e)
			runtime.UnlockOSThread()
			return
		}
		defer func() {
			if unix.Setns(int(home.Fd()), unix.CLONE_NEWNET) == nil {
				runtime.UnlockOSThread()
			}
		}()
		err = f()
	}()
	return <-done
}

func enterError(netns, path string, err error) error {
	switch {
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("network namespace %s: %w: entering it needs CAP_SYS_ADMIN; grant it or start inside (ip netns exec)", netns, err)
	case errors.Is(err, unix.EINVAL):
		return fmt.Errorf("network namespace %s: %w: %s is not a network namespace", netns, err, path)
	}
	return fmt.Errorf("network namespace %s: %w", netns, err)
}

// identity identifies a namespace. The zero value identifies none.
type identity struct {
	dev, ino uint64
}

// identify returns the identity of the namespace to which the file refers now.
func identify(netns string) (identity, error) {
	var st unix.Stat_t
	if err := unix.Stat(NamespacePath(netns), &st); err != nil {
		return identity{}, fmt.Errorf("network namespace %s: %w", netns, err)
	}
	return identity{dev: uint64(st.Dev), ino: st.Ino}, nil
}
