package status

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
)

// DefaultSocketMode lets the owner and the group connect.
const DefaultSocketMode os.FileMode = 0o660

// maxSocketPath is sockaddr_un.sun_path without its terminating zero.
const maxSocketPath = 107

// InUseError says that another process serves the socket.
type InUseError struct{ Path string }

func (e *InUseError) Error() string {
	return fmt.Sprintf("%s is served by another fared: stop that one, or give this one another api.socket", e.Path)
}

// unixSocket is a listening socket at its final path, with its mode and owner.
type unixSocket struct {
	*net.UnixListener
	path string
	lock *os.File
}

// listenUnix makes the socket. A lock beside it (PATH.lock, which stays behind) decides between processes that start at
// once; the kernel drops it with its process. A socket file is replaced only when nobody answers there.
//
// The socket is made in a private directory and renamed, so that at its path it never has another mode or owner.
func listenUnix(path string, mode os.FileMode, owner string, log *slog.Logger) (_ *unixSocket, err error) {
	if len(path) > maxSocketPath {
		return nil, fmt.Errorf("%s is too long for a socket (%d bytes, at most %d): use a shorter api.socket", path, len(path), maxSocketPath)
	}
	uid, gid, err := parseOwner(owner)
	if err != nil {
		return nil, err
	}
	lock, err := lockSocket(path)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			lock.Close()
		}
	}()
	if stale, err := checkStale(path); err != nil {
		return nil, err
	} else if stale {
		log.Info("replacing a socket that nobody serves", "socket", path)
	}
	dir, err := os.MkdirTemp(filepath.Dir(path), ".fared-")
	if err != nil {
		return nil, fmt.Errorf("make a socket beside %s: %w", path, err)
	}
	defer os.RemoveAll(dir)
	temp := filepath.Join(dir, "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: temp, Net: "unix"})
	if err != nil {
		if errors.Is(err, unix.EINVAL) {
			return nil, fmt.Errorf("the directory of %s is too long to make a socket in: use a shorter api.socket", path)
		}
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	l.SetUnlinkOnClose(false) // it would remove the temporary name
	defer func() {
		if err != nil {
			l.Close()
		}
	}()
	if err := os.Chmod(temp, mode.Perm()); err != nil {
		return nil, fmt.Errorf("set the mode of %s: %w", path, err)
	}
	if uid >= 0 || gid >= 0 {
		if err := os.Chown(temp, uid, gid); err != nil {
			return nil, fmt.Errorf("give %s to %s: %w: run as root, or as a member of that group", path, owner, err)
		}
	}
	if err := os.Rename(temp, path); err != nil {
		return nil, fmt.Errorf("put the socket at %s: %w", path, err)
	}
	return &unixSocket{UnixListener: l, path: path, lock: lock}, nil
}

// Close stops listening and removes the socket; the lock proves that it is ours. Closing twice is no error.
func (s *unixSocket) Close() error {
	err := s.UnixListener.Close()
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	if rerr := os.Remove(s.path); rerr != nil && !errors.Is(rerr, os.ErrNotExist) {
		err = errors.Join(err, rerr)
	}
	return errors.Join(err, s.lock.Close())
}

func lockSocket(path string) (*os.File, error) {
	lock, err := os.OpenFile(path+".lock", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock %s: %w: its directory must exist and be writable (RuntimeDirectory= in a systemd unit)", path, err)
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
			return nil, &InUseError{path}
		}
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return lock, nil
}

// checkStale tells whether a socket that nobody serves is in the way. Anything else in the way is an error.
func checkStale(path string) (bool, error) {
	info, err := os.Lstat(path)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look at %s: %w", path, err)
	}
	if info.Mode().Type() != os.ModeSocket {
		return false, fmt.Errorf("%s exists and is no socket: move it away, or use another api.socket", path)
	}
	conn, err := net.DialTimeout("unix", path, time.Second)
	switch {
	case err == nil:
		conn.Close()
		return false, &InUseError{path}
	case errors.Is(err, unix.ECONNREFUSED):
		return true, nil
	case errors.Is(err, unix.EAGAIN), os.IsTimeout(err): // somebody listens, and is busy
		return false, &InUseError{path}
	}
	return false, fmt.Errorf("find out who serves %s: %w: remove it if nobody does", path, err)
}

// parseOwner reads "user", "user:group" or ":group", each a name or a number; -1 for what is not given.
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
