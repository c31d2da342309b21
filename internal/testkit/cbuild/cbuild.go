// Package cbuild gives tests the libraries and programs that the Makefiles below lib make. All tests and runs on the
// same sources share them.
package cbuild

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/testkit/netnstest"
)

// Make makes targets of the Makefile in a folder below lib: ".", "softdev" or "nccl". It returns the value of OUT, to
// which the targets are relative; without targets it makes what users install. A test must not change the files. It is
// skipped without gcc and make.
func Make(t testing.TB, folder string, targets ...string) string {
	t.Helper()
	netnstest.Tools(t, "gcc", "make")
	p, err := shared()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.make(folder, targets); err != nil {
		t.Fatal(err)
	}
	return p.out
}

// place is the folder of lib, and the one that receives what is made of its present sources.
type place struct{ lib, out string }

// shared is the place of the module's sources: out/c/CHECKSUM in its root.
var shared = sync.OnceValues(func() (place, error) {
	root, err := moduleRoot()
	if err != nil {
		return place{}, err
	}
	lib := filepath.Join(root, "lib")
	sum, err := checksum(lib)
	if err != nil {
		return place{}, err
	}
	p := place{lib, filepath.Join(root, "out", "c", sum)}
	return p, os.MkdirAll(p.out, 0o755)
})

// moduleRoot returns the folder with go.mod above the working directory, which go test sets to that of the package.
func moduleRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		}
		if filepath.Dir(dir) == dir {
			return "", errors.New("no go.mod above the working directory: tests of C run in the module's sources")
		}
		dir = filepath.Dir(dir)
	}
}

// checksum covers the compiler's version and every file below lib but those of Go, so that what an older source made is
// never used.
func checksum(lib string) (string, error) {
	h := sha256.New()
	version, err := exec.Command("gcc", "--version").Output()
	if err != nil {
		return "", fmt.Errorf("gcc --version: %w", err)
	}
	h.Write(version)
	err = filepath.WalkDir(lib, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() || strings.HasSuffix(path, ".go") {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		fmt.Fprintf(h, "%q %d ", path, len(text))
		h.Write(text)
		return nil
	})
	return hex.EncodeToString(h.Sum(nil)[:8]), err
}

// make runs make while no other process does.
func (p place) make(folder string, targets []string) error {
	lock, err := os.OpenFile(filepath.Join(p.out, "lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return err
	}
	defer lock.Close() // it ends the lock
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("%s: %w", lock.Name(), err)
	}
	args := []string{"-C", filepath.Join(p.lib, folder), "CC=gcc", "OUT=" + p.out}
	for _, target := range targets {
		args = append(args, filepath.Join(p.out, target))
	}
	cmd := exec.Command("make", args...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%v: %w\n%s", cmd, err, out)
	}
	return nil
}
