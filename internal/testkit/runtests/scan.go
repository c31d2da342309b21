package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/fared/fared/internal/testkit/gate"
)

// A pkg is a package with tests, and its declarations.
type pkg struct {
	path  string // import path without that of the module
	dir   string
	facts gate.Package
	tests []test
}

// A test is a function that a test binary runs: a test, an example, or a fuzzer with its seeds.
type test struct {
	name   string
	slow   []gate.Part // of the test or of some of its subtests
	needed bool
	plain  bool // runs without the race detector
}

// listed is a package as go list describes it.
type listed struct {
	ImportPath, Dir                    string
	Module                             struct{ Path string }
	GoFiles, TestGoFiles, XTestGoFiles []string
}

// scan returns the packages with tests that the patterns name, and their declarations. Every declaration without a
// meaning is an error.
func scan(patterns []string) ([]pkg, error) {
	args := append([]string{"list", "-json=ImportPath,Dir,Module,GoFiles,TestGoFiles,XTestGoFiles"}, patterns...)
	out, err := exec.Command("go", args...).Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w", withStderr(err))
	}
	var pkgs []pkg
	var errs []error
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var l listed
		if err := dec.Decode(&l); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, err
		}
		p, err := l.scan()
		errs = append(errs, err)
		if len(p.tests) > 0 {
			pkgs = append(pkgs, p)
		}
	}
	return pkgs, errors.Join(errs...)
}

// withStderr returns err with the text that a program wrote to stderr.
func withStderr(err error) error {
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return fmt.Errorf("%w\n%s", err, exit.Stderr)
	}
	return err
}

// scan reads the declarations of the package's test files.
func (l listed) scan() (pkg, error) {
	p := pkg{path: strings.TrimPrefix(strings.TrimPrefix(l.ImportPath, l.Module.Path), "/"), dir: l.Dir}
	s := scanner{files: token.NewFileSet(), pkg: &p}
	var goroutine token.Pos
	testFiles := slices.Concat(l.TestGoFiles, l.XTestGoFiles)
	for _, name := range slices.Concat(l.GoFiles, testFiles) {
		file, err := parser.ParseFile(s.files, filepath.Join(l.Dir, name), nil, parser.SkipObjectResolution)
		if err != nil {
			return p, err
		}
		goroutine = cmp.Or(goroutine, firstGoroutine(file))
		if slices.Contains(testFiles, name) {
			s.file(file)
		}
	}
	if p.facts.NoGoroutine && goroutine.IsValid() {
		s.refuse(goroutine, "the package declares NoGoroutine and starts a goroutine here")
	}
	slices.SortFunc(p.tests, func(a, b test) int { return cmp.Compare(a.name, b.name) })
	return p, errors.Join(s.errs...)
}

// firstGoroutine returns the place of the first statement that starts a goroutine, or an invalid place. Methods named
// Go, such as those of sync.WaitGroup and errgroup.Group, start one.
func firstGoroutine(file *ast.File) token.Pos {
	var first token.Pos
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.GoStmt:
			first = cmp.Or(first, n.Pos())
		case *ast.CallExpr:
			if s, ok := n.Fun.(*ast.SelectorExpr); ok && s.Sel.Name == "Go" {
				first = cmp.Or(first, n.Pos())
			}
		}
		return true
	})
	return first
}

// A scanner collects the declarations of a package.
type scanner struct {
	files *token.FileSet
	pkg   *pkg
	errs  []error
}

// refuse adds an error at a place in the sources.
func (s *scanner) refuse(at token.Pos, format string, args ...any) {
	s.errs = append(s.errs, fmt.Errorf("%s: %s", s.files.Position(at), fmt.Sprintf(format, args...)))
}

// file reads one test file.
func (s *scanner) file(file *ast.File) {
	local := gateName(file)
	for _, decl := range file.Decls {
		f, isFunc := decl.(*ast.FuncDecl)
		if isFunc && f.Recv == nil && isTest(f.Name.Name) {
			t := test{name: f.Name.Name}
			s.calls(f, local, &t)
			s.pkg.tests = append(s.pkg.tests, t)
			continue
		}
		s.calls(decl, local, nil)
		if vars, ok := decl.(*ast.GenDecl); ok {
			s.blanks(vars, local)
		}
	}
}

// blanks reads the literals of gate.Package that the blank identifier is declared by.
func (s *scanner) blanks(vars *ast.GenDecl, local string) {
	for _, spec := range vars.Specs {
		v, ok := spec.(*ast.ValueSpec)
		if !ok || v.Names[0].Name != "_" || len(v.Values) == 0 {
			continue
		}
		if lit, ok := v.Values[0].(*ast.CompositeLit); ok && member(lit.Type, local) == "Package" {
			s.facts(lit)
		}
	}
}

// member returns the name after the selector of package gate, which the file imports as local, or "".
func member(e ast.Expr, local string) string {
	sel, ok := e.(*ast.SelectorExpr)
	if !ok {
		return ""
	}
	if x, ok := sel.X.(*ast.Ident); !ok || x.Name != local || local == "" {
		return ""
	}
	return sel.Sel.Name
}

// gateName returns the name under which a file imports package gate, or "".
func gateName(file *ast.File) string {
	for _, spec := range file.Imports {
		if p, err := strconv.Unquote(spec.Path.Value); err == nil && strings.HasSuffix(p, "internal/testkit/gate") {
			if spec.Name != nil {
				return spec.Name.Name
			}
			return path.Base(p)
		}
	}
	return ""
}

// isTest reports whether a test binary runs the function of this name.
func isTest(name string) bool {
	for _, prefix := range []string{"Test", "Fuzz", "Example"} {
		if rest, ok := strings.CutPrefix(name, prefix); ok {
			return name != "TestMain" && (rest == "" || rest[0] < 'a' || rest[0] > 'z')
		}
	}
	return false
}

// calls reads the declarations below n into t, or into the package if t is nil.
func (s *scanner) calls(n ast.Node, local string, t *test) {
	if local == "" {
		return
	}
	ast.Inspect(n, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok {
			return true
		}
		switch name := member(call.Fun, local); {
		case name == "", name == "Parts", name == "Runs":
		case t == nil:
			s.refuse(call.Pos(), "gate.%s stands outside of a test function, where runtests does not see whose declaration it is", name)
		default:
			s.declare(call, name, local, t)
		}
		return true
	})
}

// declare reads one call.
func (s *scanner) declare(call *ast.CallExpr, name, local string, t *test) {
	switch name {
	case "Needed":
		t.needed = true
	case "WithoutRaceDetector":
		t.plain = true
	case "Slow", "Count":
		if len(call.Args) < 2 || member(call.Args[1], local) == "" {
			s.refuse(call.Pos(), "gate.%s names its part by a constant of package gate", name)
			return
		}
		if part := gate.Part(strings.ToLower(member(call.Args[1], local))); !slices.Contains(t.slow, part) {
			t.slow = append(t.slow, part)
		}
	}
}

// facts reads a literal of gate.Package.
func (s *scanner) facts(lit *ast.CompositeLit) {
	if s.pkg.facts != (gate.Package{}) {
		s.refuse(lit.Pos(), "a second gate.Package of this package")
	}
	for _, e := range lit.Elts {
		field, ok := e.(*ast.KeyValueExpr)
		if !ok {
			s.refuse(e.Pos(), "gate.Package is written with the names of its fields")
			continue
		}
		text := ""
		if v, ok := field.Value.(*ast.BasicLit); ok {
			text, _ = strconv.Unquote(v.Value)
		}
		switch name := field.Key.(*ast.Ident).Name; {
		case name == "NoGoroutine":
			s.pkg.facts.NoGoroutine = true
		case text == "":
			s.refuse(field.Pos(), "%s is a reason in a string literal", name)
		case name == "WithoutRaceDetector":
			s.pkg.facts.WithoutRaceDetector = text
		case name == "Computes":
			s.pkg.facts.Computes = text
		case name == "HostNetwork":
			s.pkg.facts.HostNetwork = text
		}
	}
}
