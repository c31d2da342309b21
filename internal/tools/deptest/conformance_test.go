package deptest

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var (
	namedTest = regexp.MustCompile("`([a-z0-9/-]+)\\.((?:Test|Fuzz|Benchmark)[A-Za-z0-9]+)`")
	namedFile = regexp.MustCompile("`([a-z0-9/]+\\.go)`")
)

// TestConformanceNamesWhatExists checks that every test and file that docs/conformance.md names is in the repository,
// and that every row of its tables names a test.
func TestConformanceNamesWhatExists(t *testing.T) {
	const root = "../../.."
	page, err := os.ReadFile(filepath.Join(root, "docs/conformance.md"))
	if err != nil {
		t.Fatal(err)
	}
	rows := 0
	for n, line := range strings.Split(string(page), "\n") {
		tests := namedTest.FindAllStringSubmatch(line, -1)
		if strings.HasPrefix(line, "| ") && !strings.HasSuffix(line, "| shown by |") {
			if rows++; len(tests) == 0 {
				t.Errorf("line %d: no test is named", n+1)
			}
		}
		for _, m := range tests {
			if !hasFunction(t, filepath.Join(root, m[1]), m[2]) {
				t.Errorf("line %d: there is no %s in %s", n+1, m[2], m[1])
			}
		}
		for _, m := range namedFile.FindAllStringSubmatch(line, -1) {
			if _, err := os.Stat(filepath.Join(root, m[1])); err != nil {
				t.Errorf("line %d: %v", n+1, err)
			}
		}
	}
	if rows < 30 {
		t.Fatalf("only %d rows: this test has lost its subject", rows)
	}
}

func hasFunction(t *testing.T, folder, name string) bool {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(folder, "*_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(text), "\nfunc "+name+"(") {
			return true
		}
	}
	return false
}
