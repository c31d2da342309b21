package main

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"strings"
)

// mutant is one small fault in one file: With replaces the bytes from Start to End.
type mutant struct {
	File       string // absolute path
	Start, End int    // byte offsets
	With       string
	Operator   string // the kind of fault, e.g. "boundary"
	Line, Col  int    // of the mutated code
	// atLine and atCol are the position for coverage: the expressions of a case belong to none of its blocks, and run
	// with the switch.
	atLine, atCol int
}

// Operators of binary expressions and of assignments, each with its faults. Order comparisons have two: the boundary
// and the opposite.
var (
	boundaries = map[token.Token]token.Token{token.LSS: token.LEQ, token.LEQ: token.LSS, token.GTR: token.GEQ, token.GEQ: token.GTR}
	opposites  = map[token.Token]token.Token{
		token.LSS: token.GEQ, token.GEQ: token.LSS, token.GTR: token.LEQ, token.LEQ: token.GTR, token.EQL: token.NEQ, token.NEQ: token.EQL,
		token.LAND: token.LOR, token.LOR: token.LAND,
	}
	arithmetic = map[token.Token]token.Token{
		token.ADD: token.SUB, token.SUB: token.ADD, token.MUL: token.QUO, token.QUO: token.MUL, token.REM: token.MUL,
		token.SHL: token.SHR, token.SHR: token.SHL, token.AND: token.OR, token.OR: token.AND, token.XOR: token.OR,
		token.ADD_ASSIGN: token.SUB_ASSIGN, token.SUB_ASSIGN: token.ADD_ASSIGN, token.MUL_ASSIGN: token.QUO_ASSIGN,
		token.QUO_ASSIGN: token.MUL_ASSIGN, token.OR_ASSIGN: token.AND_ASSIGN, token.AND_ASSIGN: token.OR_ASSIGN,
		token.SHL_ASSIGN: token.SHR_ASSIGN, token.SHR_ASSIGN: token.SHL_ASSIGN, token.INC: token.DEC, token.DEC: token.INC,
	}
)

// mutantsOf returns every mutant of a Go file, in source order. Generated files have none.
func mutantsOf(path string, src []byte) ([]mutant, error) {
	fset := token.NewFileSet()
	file, err := parser.ParseFile(fset, path, src, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	if ast.IsGenerated(file) {
		return nil, nil
	}
	f := &finder{path: path, src: src, fset: fset, cases: casesOf(file)}
	for _, decl := range file.Decls {
		if fn, ok := decl.(*ast.FuncDecl); ok && fn.Body != nil && !isText(fn) {
			f.function(fn.Type, fn.Body)
		}
	}
	return f.found, nil
}

// isText reports whether a function only formats a value for people. Its faults change texts, not behavior.
func isText(fn *ast.FuncDecl) bool {
	switch fn.Name.Name {
	case "String", "GoString", "Error", "LogValue":
		return fn.Recv != nil
	}
	return false
}

type finder struct {
	path  string
	src   []byte
	fset  *token.FileSet
	found []mutant
	cases []caseSpan
}

// caseSpan is the span of a case's expressions, and the position of its switch or select.
type caseSpan struct{ from, to, of token.Pos }

// casesOf returns the spans of all cases of a file.
func casesOf(file *ast.File) (spans []caseSpan) {
	ast.Inspect(file, func(n ast.Node) bool {
		var body *ast.BlockStmt
		switch n := n.(type) {
		case *ast.SwitchStmt:
			body = n.Body
		case *ast.TypeSwitchStmt:
			body = n.Body
		case *ast.SelectStmt:
			body = n.Body
		default:
			return true
		}
		for _, clause := range body.List {
			switch c := clause.(type) {
			case *ast.CaseClause:
				spans = append(spans, caseSpan{c.Case, c.Colon, n.Pos()})
			case *ast.CommClause:
				spans = append(spans, caseSpan{c.Case, c.Colon, n.Pos()})
			}
		}
		return true
	})
	return spans
}

func (f *finder) offset(p token.Pos) int { return f.fset.Position(p).Offset }

func (f *finder) text(n ast.Node) string { return string(f.src[f.offset(n.Pos()):f.offset(n.End())]) }

// add records a mutant unless it equals the code.
func (f *finder) add(operator string, from, to token.Pos, with string) {
	at, start, end := f.fset.Position(from), f.offset(from), f.offset(to)
	if string(f.src[start:end]) != with {
		counted := at
		for _, c := range f.cases { // outer cases come before inner ones
			if from >= c.from && from < c.to {
				counted = f.fset.Position(c.of)
			}
		}
		f.found = append(f.found, mutant{f.path, start, end, with, operator, at.Line, at.Column, counted.Line, counted.Column})
	}
}

// function adds the mutants of one function; function literals inside are visited with their result types.
func (f *finder) function(typ *ast.FuncType, body *ast.BlockStmt) {
	ast.Inspect(body, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.FuncLit:
			f.function(n.Type, n.Body)
			return false
		case *ast.CallExpr:
			return !f.isWording(n)
		case *ast.BinaryExpr:
			f.binary(n)
		case *ast.UnaryExpr:
			if n.Op == token.NOT {
				f.add("negate", n.Pos(), n.X.Pos(), "")
			}
		case *ast.IncDecStmt:
			f.swap("arithmetic", n.TokPos, n.Tok, arithmetic)
		case *ast.AssignStmt:
			f.swap("arithmetic", n.TokPos, n.Tok, arithmetic)
		case *ast.IfStmt:
			f.add("never", n.Cond.Pos(), n.Cond.End(), "false && ("+f.text(n.Cond)+")")
		case *ast.ReturnStmt:
			f.zero(typ, n)
		case *ast.BlockStmt:
			f.statements(n.List)
		case *ast.CaseClause:
			f.statements(n.Body)
		case *ast.CommClause:
			f.statements(n.Body)
		}
		return true
	})
}

func (f *finder) binary(n *ast.BinaryExpr) {
	if isString(n.X) || isString(n.Y) {
		return
	}
	f.swap("boundary", n.OpPos, n.Op, boundaries)
	f.swap("negate", n.OpPos, n.Op, opposites)
	f.swap("arithmetic", n.OpPos, n.Op, arithmetic)
}

func isString(e ast.Expr) bool {
	l, ok := e.(*ast.BasicLit)
	return ok && l.Kind == token.STRING
}

func (f *finder) swap(operator string, pos token.Pos, tok token.Token, with map[token.Token]token.Token) {
	if other, ok := with[tok]; ok {
		f.add(operator, pos, pos+token.Pos(len(tok.String())), other.String())
	}
}

// statements adds the removal of each statement whose removal usually leaves a program that compiles.
func (f *finder) statements(list []ast.Stmt) {
	for _, s := range list {
		switch s := s.(type) {
		case *ast.ExprStmt:
			if call, ok := s.X.(*ast.CallExpr); !ok || f.isWording(call) || isNamed(call, "panic") {
				continue
			}
		case *ast.AssignStmt:
			if s.Tok == token.DEFINE || allBlank(s.Lhs) {
				continue
			}
			// The right side stays used, because variables could otherwise be unused.
			if s.Tok == token.ASSIGN && len(s.Lhs) == len(s.Rhs) {
				f.add("remove", s.Pos(), s.End(), strings.Repeat("_, ", len(s.Lhs)-1)+"_ = "+string(f.src[f.offset(s.Rhs[0].Pos()):f.offset(s.End())]))
				continue
			}
		case *ast.IncDecStmt, *ast.SendStmt:
		case *ast.BranchStmt:
			if s.Tok != token.BREAK && s.Tok != token.CONTINUE || s.Label != nil {
				continue
			}
		default:
			continue
		}
		f.add("remove", s.Pos(), s.End(), "")
	}
}

func allBlank(list []ast.Expr) bool {
	for _, e := range list {
		if id, ok := e.(*ast.Ident); !ok || id.Name != "_" {
			return false
		}
	}
	return true
}

// zero adds a return of zero values in place of other values.
func (f *finder) zero(typ *ast.FuncType, ret *ast.ReturnStmt) {
	if typ.Results == nil || len(ret.Results) == 0 {
		return
	}
	var zeros []string
	for _, field := range typ.Results.List {
		for range max(1, len(field.Names)) {
			zeros = append(zeros, "*new("+f.text(field.Type)+")")
		}
	}
	if len(zeros) != len(ret.Results) {
		return // all results come from one call: "return f()"
	}
	other := false
	for i, e := range ret.Results {
		if isZero(f.text(e)) || f.isError(e) {
			zeros[i] = f.text(e) // the operator "never" on an error's condition already covers dropped errors
			continue
		}
		other = true
	}
	if other {
		f.add("zero", ret.Results[0].Pos(), ret.Results[len(ret.Results)-1].End(), strings.Join(zeros, ", "))
	}
}

func isZero(text string) bool {
	switch text {
	case "nil", "0", "false", `""`:
		return true
	}
	return strings.HasSuffix(text, "{}") && !strings.Contains(text, "(")
}

func (f *finder) isError(e ast.Expr) bool {
	if call, ok := e.(*ast.CallExpr); ok {
		return f.isWording(call)
	}
	text := f.text(e)
	return text == "err" || strings.HasPrefix(text, "err") || strings.HasPrefix(text, "Err")
}

// Functions that write texts for people: log lines and errors. Their arguments have no mutants.
var (
	wordings = map[string]bool{"fmt.Errorf": true, "errors.New": true, "status.Errorf": true, "status.Error": true, "panic": true, "slog.Any": true, "slog.String": true}
	levels   = map[string]bool{"Debug": true, "Info": true, "Warn": true, "Error": true, "Debugf": true, "Infof": true, "Warnf": true, "Errorf": true, "Log": true, "Logf": true, "LogAttrs": true, "Printf": true, "Println": true}
	// Calls that reserve memory: without them, or with other sizes, only the duration differs.
	reserves = map[string]bool{"slices.Grow": true, "slices.Clip": true, "runtime.KeepAlive": true}
)

// isWording reports whether a call writes a log line or an error text, or only reserves memory.
func (f *finder) isWording(call *ast.CallExpr) bool {
	name := f.text(call.Fun)
	if wordings[name] || reserves[name] {
		return true
	}
	sel, ok := call.Fun.(*ast.SelectorExpr)
	if !ok || !levels[sel.Sel.Name] {
		return false
	}
	owner := strings.ToLower(f.text(sel.X))
	return strings.HasSuffix(owner, "log") || strings.HasSuffix(owner, "logger") || strings.HasSuffix(owner, "logger()") ||
		strings.HasSuffix(owner, "log()") || strings.Contains(owner, "log.with") || strings.HasSuffix(owner, "slog")
}

func isNamed(call *ast.CallExpr, name string) bool {
	id, ok := call.Fun.(*ast.Ident)
	return ok && id.Name == name
}

// apply returns the source with the fault.
func (m *mutant) apply(src []byte) []byte {
	return bytes.Join([][]byte{src[:m.Start], []byte(m.With), src[m.End:]}, nil)
}

// diff returns the lines that the fault changes, before and after.
func (m *mutant) diff(src []byte) string {
	first := bytes.LastIndexByte(src[:m.Start], '\n') + 1
	last := len(src)
	if i := bytes.IndexByte(src[m.End:], '\n'); i >= 0 {
		last = m.End + i
	}
	before, after := string(src[first:last]), string(src[first:m.Start])+m.With+string(src[m.End:last])
	prefixed := func(sign, text string) string { return sign + strings.ReplaceAll(text, "\n", "\n"+sign) }
	return fmt.Sprintf("%s\n%s\n", prefixed("    -", before), prefixed("    +", after))
}
