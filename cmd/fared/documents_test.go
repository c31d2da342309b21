package main

import (
	"go/scanner"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/fared/fared/internal/testkit/binary"
)

// TestNamedDocumentsExist checks that every document that a message, a unit, an alert or a manual page names is in the
// packages: docs/ is installed as /usr/share/doc/fared, and the manual pages are those of the commands and of
// packaging/.
func TestNamedDocumentsExist(t *testing.T) {
	var files []string
	for _, pattern := range []string{"*.go", "../fared-lab/*.go", "../internal/cli/*.go", "../../systemd/*.service", "../../packaging/fared.[57]", "../../monitoring/*.yml", "../../systemd/*.default"} {
		found, err := filepath.Glob(pattern)
		if err != nil || len(found) == 0 {
			t.Fatalf("%s: %d files, %v", pattern, len(found), err)
		}
		files = append(files, found...)
	}
	pages := filepath.Join(t.TempDir(), "man1")
	must(t, "man", pages)
	if out, err := exec.Command(binary.Lab(t), "man", pages).CombinedOutput(); err != nil {
		t.Fatalf("fared-lab man: %v\n%s", err, out)
	}
	document := regexp.MustCompile(`/usr/share/doc/fared/([\w./-]+\.(?:md|yaml|json|yml))`)
	page := regexp.MustCompile(`\b(fared[\w.-]*) ?\(([1-8])\)`)
	documents, manuals := 0, 0
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range document.FindAllStringSubmatch(string(text), -1) {
			documents++
			if _, err := os.Stat(filepath.Join("../../docs", m[1])); err != nil {
				t.Errorf("%s names %s: %v", file, m[0], err)
			}
		}
		for _, m := range page.FindAllStringSubmatch(string(text), -1) {
			manuals++
			dir := "../../packaging"
			if m[2] == "1" {
				dir = pages
			}
			if _, err := os.Stat(filepath.Join(dir, m[1]+"."+m[2])); err != nil {
				t.Errorf("%s names %s: %v", file, m[0], err)
			}
		}
	}
	if documents < 20 || manuals < 8 {
		t.Errorf("only %d documents and %d manual pages are named", documents, manuals)
	}
}

// TestMessagesNameInstalledDocuments checks that no string of a program names a document by its place in the sources,
// where a server has none.
func TestMessagesNameInstalledDocuments(t *testing.T) {
	source := regexp.MustCompile(`(^|[^/\w])docs/[\w/-]+\.md`)
	literals := 0
	for _, folder := range []string{"cmd", "daemon", "dataplane", "fare", "wecmp", "topo", "lab", "traffic", "transport", "internal/hostcheck", "internal/firewall", "client"} {
		err := filepath.WalkDir(filepath.Join("../..", folder), func(path string, _ fs.DirEntry, err error) error {
			if err != nil || filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go") || strings.Contains(path, "/gen/") {
				return err
			}
			text, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			files := token.NewFileSet()
			var s scanner.Scanner
			s.Init(files.AddFile(path, -1, len(text)), text, nil, 0)
			for {
				at, kind, literal := s.Scan()
				switch kind {
				case token.EOF:
					return nil
				case token.STRING:
					if literals++; source.MatchString(literal) {
						t.Errorf("%s: %s names a document of the sources: write /usr/share/doc/fared/...", files.Position(at), literal)
					}
				}
			}
		})
		if err != nil {
			t.Error(err)
		}
	}
	if literals < 1000 {
		t.Errorf("only %d strings", literals)
	}
}
