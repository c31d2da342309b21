package main

import (
	"bytes"
	"encoding/json"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const root = "../../.."

// TestDocument checks the document against the rules of OpenVEX 0.2.0 that scanners rely on.
func TestDocument(t *testing.T) {
	var out bytes.Buffer
	if err := run(&out, "0.1.0", "v3.0.0", 1_800_000_000, ""); err != nil {
		t.Fatal(err)
	}
	var d map[string]any
	if err := json.Unmarshal(out.Bytes(), &d); err != nil {
		t.Fatal(err)
	}
	if d["@context"] != "https://openvex.dev/ns/v0.2.0" || d["version"] != 1.0 || d["timestamp"] != "2027-01-15T08:00:00Z" || d["@id"] == "" || d["author"] == "" {
		t.Errorf("%s", out.String())
	}
	statements := d["statements"].([]any)
	if len(statements) != len(advisories) || len(statements) < 8 {
		t.Errorf("%d statements", len(statements))
	}
	for _, s := range statements {
		s := s.(map[string]any)
		name := s["vulnerability"].(map[string]any)["name"].(string)
		p := s["products"].([]any)[0].(map[string]any)
		sub := p["subcomponents"].([]any)[0].(map[string]any)["@id"]
		if !regexp.MustCompile(`^GHSA(-[2-9a-z]{4}){3}$`).MatchString(name) || p["@id"] != "pkg:golang/github.com/fared/fared@v0.1.0" || sub != "pkg:golang/"+library+"@v3.0.0" {
			t.Errorf("%s: %v", name, p)
		}
		reason := s["justification"]
		if s["status"] != "not_affected" || reason != string(notReached) && reason != string(notControlled) || s["impact_statement"] == "" {
			t.Errorf("%s: %v", name, s)
		}
	}
	if err := run(&out, "", "v3.0.0", 0, ""); err == nil {
		t.Error("no error without a version")
	}
}

// TestAdvisoriesAreShown checks that every advisory's test exists, and that docs/security.md has the table.
func TestAdvisoriesAreShown(t *testing.T) {
	seen := map[string]bool{}
	for _, a := range advisories {
		if seen[a.id] {
			t.Errorf("%s is listed twice", a.id)
		}
		seen[a.id] = true
		dir, test, _ := strings.Cut(a.shownBy, ".")
		files, err := filepath.Glob(filepath.Join(root, dir, "*_test.go"))
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: no tests in %s", a.id, dir)
		}
		if !slices.ContainsFunc(files, func(f string) bool {
			text, err := os.ReadFile(f)
			return err == nil && strings.Contains(string(text), "func "+test+"(")
		}) {
			t.Errorf("%s: no test %s", a.id, a.shownBy)
		}
	}
	text, err := os.ReadFile(filepath.Join(root, "docs/security.md"))
	if err != nil {
		t.Fatal(err)
	}
	if want, err := replaceTable(string(text)); err != nil || want != string(text) {
		t.Errorf("docs/security.md is stale: run 'make generate' and commit (%v)", err)
	}
	if _, err := replaceTable("no table"); err == nil {
		t.Error("no error for a text without the table")
	}
}

// TestFeaturesAreNotUsed checks that no source file of fared enables BMP, MRT, RPKI or GoBGP's own API, or imports
// their packages.
func TestFeaturesAreNotUsed(t *testing.T) {
	calls := []string{"AddBmp", "EnableMrt", "AddRpki", "EnableRpki", "GrpcListenAddress", "GrpcOption"}
	files, gobgp := 0, 0
	err := filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if e.IsDir() && (strings.HasPrefix(e.Name(), ".") && path != root || e.Name() == "out") {
			return filepath.SkipDir
		}
		if !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
		if err != nil {
			return err
		}
		files++
		uses := false
		for _, i := range f.Imports {
			uses = uses || strings.Contains(i.Path.Value, library)
			if p := strings.Trim(i.Path.Value, `"`); slices.Contains([]string{library + "/pkg/packet/bmp", library + "/pkg/packet/mrt", library + "/pkg/packet/rtr"}, p) {
				t.Errorf("%s imports %s", path, p)
			}
		}
		if !uses {
			return nil
		}
		gobgp++
		ast.Inspect(f, func(n ast.Node) bool {
			if s, ok := n.(*ast.SelectorExpr); ok && slices.Contains(calls, s.Sel.Name) {
				t.Errorf("%s uses %s", path, s.Sel.Name)
			}
			return true
		})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if files < 100 || gobgp == 0 {
		t.Errorf("%d files, %d of them with the library", files, gobgp)
	}
}
