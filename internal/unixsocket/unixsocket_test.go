package unixsocket

import (
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

func TestModeAndOwner(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	for _, mode := range []os.FileMode{0, 0o600, 0o666} {
		l, err := Listen(Config{Path: path, Mode: mode, Setting: "--socket"}, quiet())
		if err != nil {
			t.Fatal(err)
		}
		if mode == 0 {
			mode = DefaultMode
		}
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != mode {
			t.Errorf("%v, %v; want mode %v", info.Mode(), err, mode)
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		if err := l.Close(); err != nil {
			t.Errorf("the second Close: %v", err)
		}
		if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the socket is still there: %v", err)
		}
	}
	if _, err := Listen(Config{Path: path, Owner: "no-such-user", Setting: "--socket"}, quiet()); err == nil || !strings.Contains(err.Error(), "no-such-user") {
		t.Errorf("an unknown owner: %v", err)
	}
	if os.Geteuid() == 0 {
		l, err := Listen(Config{Path: path, Owner: "12:34", Setting: "--socket"}, quiet())
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		info, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		if st := info.Sys().(*syscall.Stat_t); st.Uid != 12 || st.Gid != 34 {
			t.Errorf("owner %d:%d, want 12:34", st.Uid, st.Gid)
		}
	}
}

// TestMissingDirectory checks that a missing directory is made, and that an error names its setting.
// TestLockOfAnotherUser checks that the error about a lock that another user has made names the remedy.
func TestLockOfAnotherUser(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "s")
	if err := errors.Join(os.WriteFile(path+".lock", nil, 0), os.Chmod(dir, 0o777), os.Chmod(filepath.Dir(dir), 0o755)); err != nil {
		t.Fatal(err)
	}
	if os.Geteuid() == 0 { // root may open every file: this thread opens files as nobody
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		const nobody = 65534
		if _, err := unix.SetfsuidRetUid(nobody); err != nil {
			t.Fatal(err)
		}
		defer unix.Setfsuid(0)
	}
	if _, err := Listen(Config{Path: path, Setting: "--socket"}, quiet()); err == nil || !strings.Contains(err.Error(), "remove the file as that user or as root") {
		t.Errorf("%v", err)
	}
}

func TestMissingDirectory(t *testing.T) {
	dir := t.TempDir()
	l, err := Listen(Config{Path: filepath.Join(dir, "run", "fared", "s"), Setting: "--socket"}, quiet())
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(Config{Path: filepath.Join(dir, "file", "s"), Setting: "api.socket"}, quiet()); err == nil || !strings.Contains(err.Error(), "make the directory of "+dir) || !strings.Contains(err.Error(), "another api.socket") {
		t.Errorf("a file in the place of the directory: %v", err)
	}
}

func TestInTheWay(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	c := Config{Path: path, Setting: "--socket"}
	l, err := Listen(c, quiet())
	if err != nil {
		t.Fatal(err)
	}
	var inUse *InUseError
	if _, err := Listen(c, quiet()); !errors.As(err, &inUse) || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "--socket") {
		t.Errorf("a socket that is served: %v", err)
	}
	l.Close()
	// A process without the lock serves the socket.
	foreign, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(c, quiet()); !errors.As(err, &inUse) {
		t.Errorf("a socket of another server: %v", err)
	}
	// A crash leaves the file behind.
	foreign.(*net.UnixListener).SetUnlinkOnClose(false)
	foreign.Close()
	if l, err = Listen(c, quiet()); err != nil {
		t.Fatalf("a stale socket: %v", err)
	}
	l.Close()
	if err := os.WriteFile(path, []byte("keep me"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(c, quiet()); err == nil || !strings.Contains(err.Error(), "is not a socket") {
		t.Errorf("a file in the way: %v", err)
	}
	if _, err := Listen(Config{Path: path + strings.Repeat("x", 200), Setting: "--socket"}, quiet()); err == nil || !strings.Contains(err.Error(), "too long") {
		t.Errorf("a long path: %v", err)
	}
	if _, err := Listen(Config{Path: filepath.Join(path, "below"), Setting: "--socket"}, quiet()); err == nil || !strings.Contains(err.Error(), "directory") {
		t.Errorf("no directory: %v", err)
	}
}
