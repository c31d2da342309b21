// Package binary gives tests the programs fared and fared-lab, as files that `make build` could have made. A run of
// many packages sets FARED_BINARY to one fared, with its fared-lab in the same folder, for all of them; without the
// variable each test process asks the go command, which builds the programs once and keeps them in its cache.
package binary

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// Environment is the variable with the absolute path of the fared under test. Empty means that the sources of this
// module are built.
const Environment = "FARED_BINARY"

// Fared returns the path of the fared under test, which must not be changed or removed, and which finds the fared-lab
// under test. It fails the test if there is none.
func Fared(t testing.TB) string {
	t.Helper()
	fared, _ := both(t)
	return fared
}

// Lab returns the path of the fared-lab under test, as Fared.
func Lab(t testing.TB) string {
	t.Helper()
	_, lab := both(t)
	return lab
}

func both(t testing.TB) (fared, lab string) {
	t.Helper()
	fared, lab, err := Paths()
	if err != nil {
		t.Fatal(err)
	}
	return fared, lab
}

// Paths returns the paths of Fared and Lab for TestMain, which has no test.
func Paths() (fared, lab string, err error) {
	fared = os.Getenv(Environment)
	if fared == "" {
		paths, err := built()
		return paths[0], paths[1], err
	}
	lab = filepath.Join(filepath.Dir(fared), "fared-lab")
	return fared, lab, given(fared)
}

// given returns an error with the remedy unless path is the absolute path of a program.
func given(path string) error {
	const remedy = "set it to the absolute path of a binary from make build, or unset it to let the tests build one"
	if !filepath.IsAbs(path) {
		return fmt.Errorf("%s=%q is not an absolute path: %s", Environment, path, remedy)
	}
	if info, err := os.Stat(path); err != nil {
		return fmt.Errorf("%s: %w: %s", Environment, err, remedy)
	} else if !info.Mode().IsRegular() || info.Mode()&0o111 == 0 {
		return fmt.Errorf("%s=%q is not a program: %s", Environment, path, remedy)
	}
	return nil
}

// built has the paths in the cache of the go command, which has a folder for each program: PATH gets both, so that they
// find each other.
var built = sync.OnceValues(func() (paths [2]string, err error) {
	for i, name := range []string{"fared", "fared-lab"} {
		if paths[i], err = cached(name); err != nil {
			return paths, err
		}
	}
	return paths, os.Setenv("PATH", strings.Join([]string{filepath.Dir(paths[0]), filepath.Dir(paths[1]), os.Getenv("PATH")}, string(filepath.ListSeparator)))
})

// cached returns the path of a program in the cache of the go command, which removes old ones. `go run` puts what it
// linked into the cache, and starts it from there the next time (Go 1.24): the first run prints a temporary path, and
// the second one that of the cache.
func cached(name string) (string, error) {
	for range 2 {
		cmd := exec.Command("go", "run", "-trimpath", "-tags", "grpcnotrace", "-exec", "echo", "github.com/fared/fared/cmd/"+name)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if err != nil {
			return "", fmt.Errorf("%v: %w\n%s", cmd, err, stderr.Bytes())
		}
		path := string(bytes.TrimSpace(out))
		if _, err := os.Stat(path); err == nil {
			return path, nil
		}
	}
	return "", errors.New("the go command keeps no binary in its cache: run make build, and set " + Environment)
}
