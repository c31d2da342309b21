package agent

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// claimName is the abstract unix address that an agent with a kernel driver binds. Abstract addresses belong to the
// network namespace, like routes and nexthops, so there is one claim per namespace, independent of socket and journal.
// The kernel releases it when the process ends.
const claimName = "@fared-dataplane"

// ClaimedError reports that another process holds the claim on the network namespace.
type ClaimedError struct {
	PID int32  // 0 for a process in another PID namespace
	UID uint32 // as mapped by the caller's user namespace
	// Serves is the address that the holder serves, as it reports itself. Empty for a process that is not an agent.
	Serves string
}

func (e *ClaimedError) Error() string {
	text := "another process"
	if e.Serves != "" {
		text = fmt.Sprintf("another data-plane agent, at %q,", e.Serves)
	}
	if e.PID != 0 {
		text += fmt.Sprintf(" (process %d of user %d)", e.PID, e.UID)
	}
	return text + " has this network namespace: stop that process first (systemctl stop fared-dataplane)"
}

// trusted reports whether the holder may be an agent: it runs as root or as the caller's user. Any local user can bind
// an abstract address.
func (e *ClaimedError) trusted() bool { return e.UID == 0 || e.UID == uint32(os.Geteuid()) }

// claim is a claim on a network namespace.
type claim struct {
	listener *net.UnixListener
	released atomic.Bool
}

// takeClaim claims the network namespace of the calling thread for an agent that serves an address. The error is a
// *ClaimedError if another process has it.
func takeClaim(serves string) (*claim, error) {
	for range 3 {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: claimName, Net: "unix"})
		if err == nil {
			c := &claim{listener: l}
			go c.answer(serves)
			return c, nil
		}
		if !errors.Is(err, unix.EADDRINUSE) {
			return nil, fmt.Errorf("claim the network namespace: %w", err)
		}
		holder, err := claimHolder()
		if errors.Is(err, unix.ECONNREFUSED) {
			continue // released meanwhile, or bound but not listening yet
		}
		if err != nil {
			return nil, fmt.Errorf("find the process that has claimed the network namespace: %w: run ss -xlp src %s to find it", err, claimName)
		}
		return nil, holder
	}
	return nil, fmt.Errorf("the address %s is bound, but no process listens on it: run ss -xap | grep fared-dataplane to find the process, and stop it", claimName)
}

// claimHolder queries the kernel for the credentials of the holder.
func claimHolder() (*ClaimedError, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: claimName}); err != nil {
		return nil, err
	}
	peer, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return nil, err
	}
	out := &ClaimedError{PID: peer.Pid, UID: peer.Uid}
	wait := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	if n, err := unix.Poll(wait, 1000); err != nil || n == 0 || !out.trusted() {
		return out, nil // Serves only improves the message
	}
	var text [256]byte
	if n, err := unix.Read(fd, text[:]); err == nil && n > 0 {
		out.Serves = string(text[:n])
	}
	return out, nil
}

// answer writes the agent's address to each connection, so that connections do not accumulate and an error can name the
// agent.
func (c *claim) answer(serves string) {
	for {
		conn, err := c.listener.Accept()
		if err != nil {
			if c.released.Load() {
				return
			}
			time.Sleep(100 * time.Millisecond) // out of descriptors
			continue
		}
		_, _ = conn.Write([]byte(serves))
		conn.Close()
	}
}

func (c *claim) release() error {
	c.released.Store(true)
	return c.listener.Close()
}

// claimNamespace claims the network namespace for a kernel driver before anything is changed. A process of another,
// unprivileged user that holds the name must not prevent the agent from starting: it is logged, and the claim is
// retried later.
func (a *Agent) claimNamespace() error {
	if a.c.Driver == Memory || a.claim != nil {
		return nil
	}
	serves := a.c.Socket
	if serves == "" {
		serves = a.c.Listen
	}
	c, err := takeClaim(serves)
	var held *ClaimedError
	if errors.As(err, &held) && !held.trusted() {
		if !a.squatted {
			a.log.Error("a process that cannot be an agent has taken the address that excludes a second agent; continuing without the address", "name", claimName, "pid", held.PID, "uid", held.UID,
				"remedy", fmt.Sprintf("end process %d; until then start no second agent in this network namespace", held.PID))
		}
		a.squatted = true
		return nil
	}
	if err != nil {
		return err
	}
	a.claim, a.squatted = c, false
	return nil
}
