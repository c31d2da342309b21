package netns

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
)

func needRoot(t *testing.T) {
	t.Helper()
	n, err := New()
	if err != nil {
		t.Skipf("making a network namespace: %v", err)
	}
	n.Close()
}

func current(t *testing.T) (dev, ino uint64) {
	t.Helper()
	n, err := Current()
	if err != nil {
		t.Error(err)
	}
	defer n.Close()
	return n.dev, n.ino
}

// TestDo checks that a function runs in the namespace, and the caller outside it, and that an error and the end of the
// goroutine are returned.
func TestDo(t *testing.T) {
	needRoot(t)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	_, home := current(t)
	n, err := New()
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	if n.ino == home {
		t.Fatal("New returned the current namespace")
	}
	if here, err := n.Is("/proc/thread-self/ns/net"); here || err != nil {
		t.Errorf("the new namespace is the current one: %v, %v", here, err)
	}
	if here, err := n.Is(fmt.Sprintf("/proc/self/fd/%d", n.FD())); !here || err != nil {
		t.Errorf("the new namespace is not itself: %v, %v", here, err)
	}
	if _, err := n.Is("fared-no-such-netns"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a missing namespace: %v", err)
	}
	wrong := errors.New("wrong")
	for range 50 {
		if err := n.Do(func() error {
			runtime.Gosched()
			if _, ino := current(t); ino != n.ino {
				t.Error("Do calls the function outside the namespace")
			}
			return wrong
		}); err != wrong {
			t.Errorf("Do returned %v", err)
		}
		if _, ino := current(t); ino != home {
			t.Fatal("the caller is in another namespace")
		}
		for range 4 {
			there := make(chan uint64)
			go func() {
				runtime.LockOSThread()
				defer runtime.UnlockOSThread()
				_, ino := current(t)
				there <- ino
			}()
			if ino := <-there; ino != home {
				t.Fatal("a thread of the process stays in the other namespace")
			}
		}
	}
	if err := n.Do(func() error { runtime.Goexit(); return nil }); err == nil {
		t.Error("no error although the function ended its goroutine")
	}
	own, err := Current()
	if err != nil {
		t.Fatal(err)
	}
	defer own.Close()
	tid, err := os.Readlink("/proc/thread-self")
	if err != nil {
		t.Fatal(err)
	}
	if err := own.Do(func() error {
		if at, err := os.Readlink("/proc/thread-self"); err != nil || at != tid {
			t.Errorf("Do changed the thread (%s, was %s, %v) although the namespace is the current one", at, tid, err)
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
}

// TestIn checks names, paths, and the errors for a missing file and for another kind of namespace.
func TestIn(t *testing.T) {
	needRoot(t)
	called := 0
	count := func() error { called++; return nil }
	if err := In("", count); err != nil {
		t.Error(err)
	}
	if err := In("/proc/self/ns/net", count); err != nil {
		t.Error(err)
	}
	if called != 2 {
		t.Errorf("%d calls", called)
	}
	if err := In("fared-no-such-netns", count); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), "fared-no-such-netns") {
		t.Errorf("missing: %v", err)
	}
	if err := In("/proc/self/ns/uts", count); err == nil || !strings.Contains(err.Error(), "not a network namespace") {
		t.Errorf("another kind: %v", err)
	}
	if called != 2 {
		t.Error("the function was called in spite of an error")
	}
	for name, want := range map[string]string{"": "/proc/self/ns/net", "a": "/run/netns/a", "/x/../y": "/y"} {
		if got := Path(name); got != filepath.Clean(want) {
			t.Errorf("Path(%q) = %q", name, got)
		}
	}
}

// TestID checks that a namespace has one identity on all threads, and that another one has another.
func TestID(t *testing.T) {
	needRoot(t)
	n, err := New()
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	id := func(in func(func() error) error) (id string) {
		t.Helper()
		if err := in(func() (err error) {
			id, err = ID()
			return err
		}); err != nil {
			t.Fatal(err)
		}
		return id
	}
	here := func(f func() error) error { return f() }
	if a, b := id(n.Do), id(n.Do); a != b {
		t.Errorf("%q and %q", a, b)
	}
	if a, b := id(here), id(n.Do); a == b || a == "" || b == "" {
		t.Errorf("two namespaces have %q and %q", a, b)
	}
	if boot, cookie, _ := strings.Cut(id(here), "/"); len(boot) != 36 || cookie == "" {
		t.Errorf("%q is no boot id and cookie", id(here))
	}
}

// TestSysfs checks that a mount shows the devices of its namespace alone.
func TestSysfs(t *testing.T) {
	needRoot(t)
	n, err := New()
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	s, err := n.Sysfs()
	if err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(filepath.Join(s.Root(), "class/net"))
	if err != nil || len(entries) != 1 || entries[0].Name() != "lo" {
		t.Error(entries, err)
	}
	if mtu, err := os.ReadFile(filepath.Join(s.Root(), "class/net/lo/mtu")); err != nil || string(mtu) != "65536\n" {
		t.Error(string(mtu), err)
	}
	root := s.Root()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(root, "class")); err == nil {
		t.Error("the mount outlives Close")
	}
}
