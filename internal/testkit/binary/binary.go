// Package binary gives tests the program fared, as a file that `make build` could have made. A run of many packages sets FARED_BINARY to one
// binary for all of them; without the variable each test process asks the go command, which builds the binary once and keeps it in its cache.
package binary

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
)

// Environment is the variable with the absolute path of the binary under test. Empty means that the sources of this module are built.
const Environment = "FARED_BINARY"

// Fared returns the path of the binary under test, which must not be changed or removed. It fails the test if there is none.
func Fared(t testing.TB) string {
	t.Helper()
	path, err := Path()
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// Path is Fared for TestMain, which has no test.
func Path() (string, error) {
	if path := os.Getenv(Environment); path != "" {
		return path, given(path)
	}
	return built()
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

// built returns the path of the binary in the cache of the go command, which removes old ones. `go run` puts what it linked into the cache, and
// starts it from there the next time (Go 1.24): the first run prints a temporary path, and the second one that of the cache.
var built = sync.OnceValues(func() (string, error) {
	for range 2 {
		cmd := exec.Command("go", "run", "-trimpath", "-tags", "grpcnotrace", "-exec", "echo", "github.com/fared/fared/cmd/fared")
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
})
