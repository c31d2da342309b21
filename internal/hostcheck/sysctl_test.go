package hostcheck

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/testkit/netnstest"
)

// TestWriteSysctl checks that a value goes to the second folder where the first is read-only, as in a container, and
// that the second does not hide the error of the first.
func TestWriteSysctl(t *testing.T) {
	netnstest.Require(t)
	runtime.LockOSThread() // the thread, and its mounts, end with the test
	if err := errors.Join(unix.Unshare(unix.CLONE_FS|unix.CLONE_NEWNS), unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")); err != nil {
		t.Fatal(err)
	}
	const name = "kernel"
	protected, writable := t.TempDir(), t.TempDir()
	previous := procSys
	t.Cleanup(func() { procSys = previous })
	procSys = []string{protected, writable}
	for _, dir := range procSys {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("1"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	read := func(dir string, want uint64) {
		t.Helper()
		if text, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(text) != strconv.FormatUint(want, 10) {
			t.Errorf("%q, %v; want %d", text, err, want)
		}
	}
	if err := WriteSysctl(name, 2); err != nil {
		t.Fatal(err)
	}
	read(protected, 2)
	read(writable, 1)
	if err := errors.Join(unix.Mount(protected, protected, "", unix.MS_BIND, ""), unix.Mount("", protected, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, "")); err != nil {
		t.Fatal(err)
	}
	defer func() { // before the folder is removed
		if err := unix.Unmount(protected, 0); err != nil {
			t.Error(err)
		}
	}()
	if err := WriteSysctl(name, 3); err != nil {
		t.Fatal(err)
	}
	read(protected, 2)
	read(writable, 3)
	procSys = []string{protected, filepath.Join(writable, "none")}
	if err := WriteSysctl(name, 4); !errors.Is(err, unix.EROFS) {
		t.Errorf("%v, want that of the first folder", err)
	}
	procSys = []string{filepath.Join(writable, "none"), writable}
	if err := WriteSysctl(name, 4); !errors.Is(err, unix.ENOENT) {
		t.Errorf("%v, want that of the first folder", err)
	}
	read(writable, 3)
}
