package cbuild

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/fared/fared/internal/testkit/netnstest"
)

// TestMake checks that a second call makes nothing again, and that what it makes runs.
func TestMake(t *testing.T) {
	const program = "tests/plain/dump"
	path := filepath.Join(Make(t, ".", program), program)
	first, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	Make(t, ".", program)
	if second, err := os.Stat(path); err != nil || !second.ModTime().Equal(first.ModTime()) {
		t.Errorf("%s was made again: %v", program, err)
	}
	if out, err := exec.Command(path, "../../slotfile/testdata/v2.slots").Output(); err != nil || len(out) == 0 {
		t.Errorf("%s: %v", program, err)
	}
}

// TestChecksum checks that a changed source, another name and a new file have a folder of their own, and a Go file does
// not.
func TestChecksum(t *testing.T) {
	netnstest.Tools(t, "gcc")
	lib := t.TempDir()
	seen := map[string]string{}
	for _, step := range []struct {
		name, text string
		same       bool
	}{{"a.c", "int a;", false}, {"a.c", "int b;", false}, {"b.h", "int b;", false}, {"a_test.go", "package a", true}} {
		if err := os.WriteFile(filepath.Join(lib, step.name), []byte(step.text), 0o600); err != nil {
			t.Fatal(err)
		}
		sum, err := checksum(lib)
		if err != nil {
			t.Fatal(err)
		}
		if before, found := seen[sum]; found != step.same {
			t.Errorf("%s: %q has the checksum of %q, want the same: %v", step.name, step.text, before, step.same)
		}
		seen[sum] = step.text
	}
}
