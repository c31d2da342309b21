package deptest

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var packageRow = regexp.MustCompile("(?m)^\\| `([a-z0-9/-]+)` \\| ")

// TestArchitectureNamesEveryPackage checks that the table of docs/architecture.md has one row for each package, and
// none for others.
func TestArchitectureNamesEveryPackage(t *testing.T) {
	page, err := os.ReadFile(filepath.Join("../../..", "docs/architecture.md"))
	if err != nil {
		t.Fatal(err)
	}
	var rows []string
	for _, m := range packageRow.FindAllStringSubmatch(string(page), -1) {
		rows = append(rows, m[1])
	}
	packages := strings.Fields(strings.ReplaceAll(string(goList(t, "./...")), module+"/", ""))
	if len(packages) < 50 {
		t.Fatalf("only %d packages listed: this test has lost its subject", len(packages))
	}
	for _, p := range packages {
		if n := len(slices.DeleteFunc(slices.Clone(rows), func(r string) bool { return r != p })); n != 1 {
			t.Errorf("%s has %d rows in the table of docs/architecture.md, want 1: its reason to exist in one line", p, n)
		}
	}
	for _, r := range rows {
		if !slices.Contains(packages, r) {
			t.Errorf("the table of docs/architecture.md has a row for %s, which is not a package", r)
		}
	}
}
