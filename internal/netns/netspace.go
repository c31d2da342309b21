// Package netns opens the later sockets of an endpoint in the network namespace in which it was opened, on any thread.
package netns

import (
	"fmt"
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
func Current() (Namespace, error) {
	fd, err := unix.Open(threadNamespace, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return Namespace{}, err
	}
	var s unix.Stat_t
	if err := unix.Fstat(fd, &s); err != nil {
		unix.Close(fd)
		return Namespace{}, err
	}
	return Namespace{fd: fd, dev: s.Dev, ino: s.Ino}, nil
}

// Close closes the file descriptor. A second call does nothing.
func (n *Namespace) Close() {
	if n.fd > 0 {
		unix.Close(n.fd)
		n.fd = 0
	}
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
	if s.Dev == n.dev && s.Ino == n.ino {
		return f()
	}
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		home, err := unix.Open(threadNamespace, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			runtime.UnlockOSThread()
			done <- err
			return
		}
		defer unix.Close(home)
		if err := unix.Setns(n.fd, unix.CLONE_NEWNET); err != nil {
			runtime.UnlockOSThread()
			done <- fmt.Errorf("setns: %w", err)
			return
		}
		err = f()
		if unix.Setns(home, unix.CLONE_NEWNET) == nil {
			runtime.UnlockOSThread() // otherwise the thread ends with its goroutine
		}
		done <- err
	}()
	return <-done
}
