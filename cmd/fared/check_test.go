package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestCheckPrintsLinesForPrograms checks that each error, including the first, is a line in the format of docs/configuration.md, and that no line begins with "fared: ".
func TestCheckPrintsLinesForPrograms(t *testing.T) {
	form := regexp.MustCompile(`^(.+):(\d+):(\d+): \S+: .+, .+$`)
	good, err := os.ReadFile("../../examples/server-8gpu.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string][]string{
		"one error":  {"as: 4200000001", "as: none"},
		"two errors": {"as: 4200000001\n", "as: none\nrole2: x\n"},
	} {
		file := filepath.Join(t.TempDir(), "fared.yaml")
		text := strings.Replace(string(good), change[0], change[1], 1)
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		o := fared(t, "check", "--config", file)
		lines := strings.Split(strings.TrimSuffix(o.err, "\n"), "\n")
		n := map[string]int{"one error": 1, "two errors": 2}[name]
		if o.code != exitUsage || len(lines) != n+1 || strings.Contains("\n"+o.err, "\nfared: ") || !explains(o.err) {
			t.Fatalf("%s: exit %d\n%s", name, o.code, o.err)
		}
		for _, line := range lines[:n] {
			if m := form.FindStringSubmatch(line); m == nil || m[1] != file {
				t.Errorf("%s: line %q is not file:line:column: path: what, remedy", name, line)
			}
		}
	}
}
