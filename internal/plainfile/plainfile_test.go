package plainfile

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// victim is a file that another user wants to be changed.
const victim = "content"

// trapped returns names that lead to other files, and the victim.
func trapped(t *testing.T) (names map[string]string, target string) {
	t.Helper()
	dir := t.TempDir()
	target = filepath.Join(dir, "victim")
	if err := os.WriteFile(target, []byte(victim), 0o600); err != nil {
		t.Fatal(err)
	}
	names = map[string]string{}
	for name, lay := range map[string]func(string) error{
		"symbolic link":                   func(at string) error { return os.Symlink(target, at) },
		"symbolic link to a missing file": func(at string) error { return os.Symlink(filepath.Join(dir, "missing"), at) },
		"hard link":                       func(at string) error { return os.Link(target, at) },
		"FIFO":                            func(at string) error { return unix.Mkfifo(at, 0o600) },
	} {
		names[name] = filepath.Join(dir, name)
		if err := lay(names[name]); err != nil {
			t.Fatal(err)
		}
	}
	return names, target
}

func unchanged(t *testing.T, target string) {
	t.Helper()
	if b, err := os.ReadFile(target); err != nil || string(b) != victim {
		t.Errorf("the victim contains %q: %v", b, err)
	}
	if _, err := os.Lstat(filepath.Join(filepath.Dir(target), "missing")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the target of a link was created: %v", err)
	}
}

func TestOpenFollowsNoLink(t *testing.T) {
	for _, flag := range []int{os.O_RDONLY, os.O_WRONLY, os.O_CREATE | os.O_RDWR, os.O_CREATE | os.O_WRONLY | os.O_TRUNC, os.O_WRONLY | os.O_APPEND} {
		names, target := trapped(t)
		for what, name := range names {
			if file, err := Open(name, flag, 0o600); !errors.Is(err, ErrNotPlain) {
				t.Errorf("%s, flags %#x: %v, %v", what, flag, file, err)
			}
		}
		unchanged(t, target)
		if _, err := Open(filepath.Dir(target), flag, 0o600); err == nil {
			t.Errorf("a directory is opened with flags %#x", flag)
		}
	}
}

func TestOpenPlain(t *testing.T) {
	name := filepath.Join(t.TempDir(), "f")
	if _, err := Open(name, os.O_RDONLY, 0); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a missing file: %v", err)
	}
	for _, c := range []struct {
		flag  int
		write string
		want  string
	}{
		{os.O_CREATE | os.O_WRONLY, "first", "first"},
		{os.O_WRONLY | os.O_APPEND, " second", "first second"},
		{os.O_CREATE | os.O_WRONLY | os.O_TRUNC, "third", "third"},
	} {
		file, err := Open(name, c.flag, 0o640)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := file.WriteString(c.write); err != nil {
			t.Fatal(err)
		}
		if err := file.Close(); err != nil {
			t.Fatal(err)
		}
		if b, err := os.ReadFile(name); err != nil || string(b) != c.want {
			t.Errorf("flags %#x: %q, %v", c.flag, b, err)
		}
	}
	if info, err := os.Stat(name); err != nil || info.Mode() != 0o640 {
		t.Errorf("mode %v: %v", info.Mode(), err)
	}
}

func TestReplace(t *testing.T) {
	names, target := trapped(t)
	names["missing file"] = filepath.Join(t.TempDir(), "new")
	for what, name := range names {
		file, err := Replace(name, os.O_WRONLY, 0o600)
		if err != nil {
			t.Errorf("%s: %v", what, err)
			continue
		}
		if _, err := file.WriteString("x"); err != nil {
			t.Error(err)
		}
		file.Close()
		if info, err := os.Lstat(name); err != nil || !info.Mode().IsRegular() || info.Size() != 1 {
			t.Errorf("%s: %v, %v", what, info, err)
		}
	}
	unchanged(t, target)
}
