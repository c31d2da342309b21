package netnstest

import (
	"os/exec"
	"strings"
	"sync"
	"testing"
)

// Python returns the path of the interpreter behind python3, and skips the test if there is none. A wrapper of pyenv
// takes ten times as long to start.
func Python(t testing.TB) string {
	t.Helper()
	Tools(t, "python3")
	path, err := interpreter()
	if err != nil {
		t.Fatalf("python3: %v", err)
	}
	return path
}

var interpreter = sync.OnceValues(func() (string, error) {
	out, err := exec.Command("python3", "-c", "import sys; print(sys.executable)").Output()
	return strings.TrimSpace(string(out)), err
})
