// Package unixsocket makes listening unix sockets that have the right mode and owner at any time, replace only unserved
// sockets, and are removed only by the process that made them.
package unixsocket

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/plainfile"
)

// DefaultMode lets the owner and the group connect.
const DefaultMode os.FileMode = 0o660

// maxPath is sockaddr_un.sun_path without its terminating zero.
const maxPath = 107

// InUseError reports that another process serves the socket.
type InUseError struct{ Path, Setting string }

func (e *InUseError) Error() string {
	return fmt.Sprintf("%s is served by another fared: stop the other fared, or use another %s", e.Path, e.Setting)
}

// Config describes a socket.
type Config struct {
	Path string
	// Mode of the socket; 0 means DefaultMode.
	Mode os.FileMode
	// Owner is "user", "user:group" or ":group", each a name or a number; empty means the process's user and group.
	Owner string
	// Setting is the source of Path in errors, "api.socket" or "--socket".
	Setting string
}

// Listener is a listening socket at its final path, with its mode and owner.
type Listener struct {
	*net.UnixListener
	path string
	lock *os.File
}

// Listen makes the socket, and its directory (0755) if it is missing. A lock file next to it (PATH.lock, which is never
// removed) decides between processes that start at once; the kernel releases the lock with its process. Listen replaces
// a socket file only if no process answers there; otherwise the error is an *InUseError.
//
// The socket is made in a private directory and renamed, so that it never has another mode or owner at its path.
func Listen(c Config, log *slog.Logger) (_ *Listener, err error) {
	if len(c.Path) > maxPath {
		return nil, fmt.Errorf("%s is too long for a socket (%d bytes, at most %d): use a shorter %s", c.Path, len(c.Path), maxPath, c.Setting)
	}
	if c.Mode == 0 {
		c.Mode = DefaultMode
	}
	uid, gid, err := parseOwner(c.Owner)
	if err != nil {
		return nil, err
	}
	lock, err := c.lock()
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			lock.Close()
		}
	}()
	if stale, err := c.checkStale(); err != nil {
		return nil, err
	} else if stale {
		log.Info("replacing a socket without a server", "socket", c.Path)
	}
	dir, err := os.MkdirTemp(filepath.Dir(c.Path), ".fared-")
	if err != nil {
		return nil, fmt.Errorf("make a socket next to %s: %w", c.Path, err)
	}
	defer os.RemoveAll(dir)
	temp := filepath.Join(dir, "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: temp, Net: "unix"})
	if err != nil {
		if errors.Is(err, unix.EINVAL) {
			return nil, fmt.Errorf("the directory of %s is too long to make a socket in: use a shorter %s", c.Path, c.Setting)
		}
		return nil, fmt.Errorf("listen on %s: %w", c.Path, err)
	}
	l.SetUnlinkOnClose(false) // it would remove the temporary name
	defer func() {
		if err != nil {
			l.Close()
		}
	}()
	if err := os.Chmod(temp, c.Mode.Perm()); err != nil {
		return nil, fmt.Errorf("set the mode of %s: %w", c.Path, err)
	}
	if uid >= 0 || gid >= 0 {
		if err := os.Chown(temp, uid, gid); err != nil {
			return nil, fmt.Errorf("change the owner of %s to %s: %w: run as root, or as a member of that group", c.Path, c.Owner, err)
		}
	}
	if err := os.Rename(temp, c.Path); err != nil {
		return nil, fmt.Errorf("put the socket at %s: %w", c.Path, err)
	}
	return &Listener{UnixListener: l, path: c.Path, lock: lock}, nil
}

// Close stops listening and removes the socket; holding the lock proves ownership. A second Close is no error.
func (s *Listener) Close() error {
	err := s.UnixListener.Close()
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	if rerr := os.Remove(s.path); rerr != nil && !errors.Is(rerr, os.ErrNotExist) {
		err = errors.Join(err, rerr)
	}
	return errors.Join(err, s.lock.Close())
}

func (c *Config) lock() (*os.File, error) {
	// Outside of a systemd unit (RuntimeDirectory=) no other program makes the runtime directory.
	if err := os.MkdirAll(filepath.Dir(c.Path), 0o755); err != nil {
		return nil, fmt.Errorf("make the directory of %s: %w: run as root, or use another %s", c.Path, err, c.Setting)
	}
	lock, err := plainfile.Open(c.Path+".lock", os.O_CREATE|os.O_RDWR, 0o600)
	if _, serr := os.Stat(c.Path + ".lock"); errors.Is(err, os.ErrPermission) && serr == nil {
		return nil, fmt.Errorf("lock %s: %w: another user has started a process with this socket; remove the file as that user or as root", c.Path, err)
	}
	if err != nil {
		return nil, fmt.Errorf("lock %s: %w: its directory must be writable (RuntimeDirectory= in a systemd unit)", c.Path, err)
	}
	for {
		err = unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil {
		lock.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, &InUseError{c.Path, c.Setting}
		}
		return nil, fmt.Errorf("lock %s: %w", c.Path, err)
	}
	return lock, nil
}

// checkStale reports whether an unserved socket is at the path. Any other file there is an error.
func (c *Config) checkStale() (bool, error) {
	info, err := os.Lstat(c.Path)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("inspect %s: %w", c.Path, err)
	}
	if info.Mode().Type() != os.ModeSocket {
		return false, fmt.Errorf("%s exists and is not a socket: move it away, or use another %s", c.Path, c.Setting)
	}
	conn, err := net.DialTimeout("unix", c.Path, time.Second)
	switch {
	case err == nil:
		conn.Close()
		return false, &InUseError{c.Path, c.Setting}
	case errors.Is(err, unix.ECONNREFUSED):
		return true, nil
	case errors.Is(err, unix.EAGAIN), os.IsTimeout(err): // a process listens, and is busy
		return false, &InUseError{c.Path, c.Setting}
	}
	return false, fmt.Errorf("find the server of %s: %w: remove the socket if it has none", c.Path, err)
}

// parseOwner reads "user", "user:group" or ":group", each a name or a number, and returns -1 for an absent part.
func parseOwner(owner string) (uid, gid int, err error) {
	name, group, _ := strings.Cut(owner, ":")
	uid, err = lookup(name, "user", func(s string) (string, error) {
		u, err := user.Lookup(s)
		if err != nil {
			return "", err
		}
		return u.Uid, nil
	})
	if err != nil {
		return -1, -1, err
	}
	gid, err = lookup(group, "group", func(s string) (string, error) {
		g, err := user.LookupGroup(s)
		if err != nil {
			return "", err
		}
		return g.Gid, nil
	})
	return uid, gid, err
}

func lookup(name, kind string, find func(string) (string, error)) (int, error) {
	if name == "" {
		return -1, nil
	}
	if n, err := strconv.Atoi(name); err == nil && n >= 0 {
		return n, nil
	}
	id, err := find(name)
	if err != nil {
		return -1, fmt.Errorf("socket owner: %w: name an existing %s, or its number", err, kind)
	}
	return strconv.Atoi(id)
}
