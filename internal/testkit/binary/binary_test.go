package binary

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fared/fared/internal/testkit/gate"
)

func TestBuiltBinaryRuns(t *testing.T) {
	gate.Slow(t, gate.Models, "links the program, which the gate has done")
	t.Setenv(Environment, "")
	path := Fared(t)
	out, err := exec.Command(path, "version").CombinedOutput()
	if err != nil || !strings.HasPrefix(string(out), "fared ") {
		t.Errorf("%s version: %v\n%s", path, err, out)
	}
	for _, command := range [][]string{{Lab(t), "version"}, {path, "topo", "check", "--help"}} {
		if out, err := exec.Command(command[0], command[1:]...).CombinedOutput(); err != nil {
			t.Errorf("%q: %v\n%s", command, err, out)
		}
	}
	if again := Fared(t); again != path {
		t.Errorf("the second binary is %s, the first one %s", again, path)
	}
}

func TestGivenBinary(t *testing.T) {
	dir := t.TempDir()
	program, text := filepath.Join(dir, "program"), filepath.Join(dir, "text")
	for file, mode := range map[string]os.FileMode{program: 0o755, text: 0o644} {
		if err := os.WriteFile(file, nil, mode); err != nil {
			t.Fatal(err)
		}
	}
	for path, want := range map[string]string{
		program:                      "",
		text:                         "is not a program",
		dir:                          "is not a program",
		filepath.Join(dir, "absent"): "no such file",
		"bin/fared":                  "is not an absolute path",
	} {
		t.Setenv(Environment, path)
		got, lab, err := Paths()
		if want == "" {
			if err != nil || got != path || lab != filepath.Join(dir, "fared-lab") {
				t.Errorf("%s: %s, %s, %v", path, got, lab, err)
			}
		} else if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "unset it") {
			t.Errorf("%s: %v, want %q and the remedy", path, err, want)
		}
	}
}
