package nupa

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestMapFileRefuses maps what is no memory: nothing is made or changed there, and the error names the reason.
func TestMapFileRefuses(t *testing.T) {
	fifo := filepath.Join(t.TempDir(), "fifo")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	foreign := filepath.Join(t.TempDir(), "foreign")
	if err := os.WriteFile(foreign, nil, 0o400); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		path string
		want error
		text string
	}{
		{"/dev/fared-no-device", os.ErrNotExist, "there is no such device"},
		{"/dev/../dev/fared-no-device", os.ErrNotExist, "there is no such device"},
		{"/sys/kernel/fared-no-device", os.ErrNotExist, "there is no such device"},
		{"/sys/fared-no-folder/resource2", os.ErrNotExist, ""},
		{"/dev/null", ErrFile, `of the kind "mem"`},
		{fifo, ErrFile, "neither a file nor a device"},
	} {
		_, existed := os.Stat(test.path)
		if _, _, err := mapFile(Config{File: test.path, Size: planeSize, Channels: 8}); !errors.Is(err, test.want) || !strings.Contains(err.Error(), test.text) {
			t.Errorf("%s: got %v, want %v with %q", test.path, err, test.want, test.text)
		}
		if _, err := os.Stat(test.path); existed != nil && err == nil {
			t.Errorf("%s: made a file", test.path)
			os.Remove(test.path)
		}
	}
	if os.Getuid() == 0 {
		return // root may open it
	}
	if _, _, err := mapFile(Config{File: foreign}); !errors.Is(err, os.ErrPermission) || !strings.Contains(err.Error(), "user, group and mode") {
		t.Errorf("got %v", err)
	}
}

// TestIdentityNamesTheInode has two files in one file system: locks of one do not meet those of the other, as with two
// nodes of one device.
func TestIdentityNamesTheInode(t *testing.T) {
	dir := t.TempDir()
	one, two := mapKernel(t, filepath.Join(dir, "one"), 1), mapKernel(t, filepath.Join(dir, "two"), 1)
	if one.identity() == two.identity() {
		t.Error("two inodes, one identity")
	}
	if same := mapKernel(t, filepath.Join(dir, "one"), 1); same.identity() != one.identity() {
		t.Error("one inode, two identities")
	}
}
