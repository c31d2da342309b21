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

// helper matches packages whose reason to exist is their doc comment alone: those of internal folders, and tests.
var helper = regexp.MustCompile(`(^|/)internal/|^interop(/|$)|(^|/)[a-z]+test$`)

// TestArchitectureNamesEveryPackage checks that the table of docs/architecture.md has one row for each package, at most
// one for internal ones and tests, which need a doc comment instead, and none for others.
func TestArchitectureNamesEveryPackage(t *testing.T) {
	page, err := os.ReadFile(filepath.Join("../../..", "docs/architecture.md"))
	if err != nil {
		t.Fatal(err)
	}
	var rows []string
	for _, m := range packageRow.FindAllStringSubmatch(string(page), -1) {
		rows = append(rows, m[1])
	}
	var packages []string
	listed := goList(t, "-f", "{{.ImportPath}}\t{{len .GoFiles}}\t{{.Doc}}", "./...")
	for line := range strings.Lines(strings.ReplaceAll(string(listed), module+"/", "")) {
		field := strings.SplitN(strings.TrimSuffix(line, "\n"), "\t", 3)
		packages = append(packages, field[0])
		if helper.MatchString(field[0]) && field[1] != "0" && field[2] == "" {
			t.Errorf("%s has no doc comment, the reason to exist of a helper", field[0])
		}
	}
	if len(packages) < 50 {
		t.Fatalf("only %d packages listed: this test has lost its subject", len(packages))
	}
	for _, p := range packages {
		if n := len(slices.DeleteFunc(slices.Clone(rows), func(r string) bool { return r != p })); n > 1 || n == 0 && !helper.MatchString(p) {
			t.Errorf("%s has %d rows in the table of docs/architecture.md, want 1: its reason to exist in one line", p, n)
		}
	}
	for _, r := range rows {
		if !slices.Contains(packages, r) {
			t.Errorf("the table of docs/architecture.md has a row for %s, which is not a package", r)
		}
	}
}
