package deptest

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

var decisionHeadings = []string{"## Context", "## Decision", "## Measurements", "## Consequences"}

// TestDecisionsAreComplete checks that every record in docs/adr has the four headings, is numbered without a gap, has a
// row in the index, and names tests that exist.
func TestDecisionsAreComplete(t *testing.T) {
	const root = "../../.."
	index, err := os.ReadFile(filepath.Join(root, "docs/adr/README.md"))
	if err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(root, "docs/adr/[0-9]*.md"))
	if err != nil {
		t.Fatal(err)
	}
	for i, file := range files {
		name := filepath.Base(file)
		number := name[:4]
		if want := []byte{'0', '0', byte('0' + (i+1)/10), byte('0' + (i+1)%10)}; number != string(want) {
			t.Errorf("%s: record %s follows, want number %s", name, number, want)
		}
		if row := "| [" + number + "](" + name + ") | "; !strings.Contains(string(index), "\n"+row) {
			t.Errorf("%s: the index has no row %q", name, row)
		}
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var headings []string
		for line := range strings.Lines(string(text)) {
			if strings.HasPrefix(line, "## ") {
				headings = append(headings, strings.TrimSpace(line))
			}
		}
		if !slices.Equal(headings, decisionHeadings) {
			t.Errorf("%s: headings %q, want %q", name, headings, decisionHeadings)
		}
		tests := namedTest.FindAllStringSubmatch(string(text), -1)
		for _, m := range tests {
			if !hasFunction(t, filepath.Join(root, m[1]), m[2]) {
				t.Errorf("%s: there is no %s in %s", name, m[2], m[1])
			}
		}
	}
	if len(files) < 12 {
		t.Fatalf("only %d records: this test has lost its subject", len(files))
	}
}
