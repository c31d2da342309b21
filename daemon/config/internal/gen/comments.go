package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"strings"
)

// comments holds the doc comments of struct types ("Plane") and their fields ("Plane.Name"), each on one line.
type comments map[string]string

func readComments(path string) (comments, error) {
	f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ParseComments)
	if err != nil {
		return nil, err
	}
	out := comments{}
	ast.Inspect(f, func(n ast.Node) bool {
		decl, ok := n.(*ast.GenDecl)
		if !ok {
			return true
		}
		for _, spec := range decl.Specs {
			t, ok := spec.(*ast.TypeSpec)
			if !ok {
				continue
			}
			s, ok := t.Type.(*ast.StructType)
			if !ok {
				continue
			}
			out[t.Name.Name] = oneLine(decl.Doc)
			for _, field := range s.Fields.List {
				for _, name := range field.Names {
					out[t.Name.Name+"."+name.Name] = oneLine(field.Doc)
				}
			}
		}
		return false
	})
	return out, nil
}

func oneLine(c *ast.CommentGroup) string { return strings.Join(strings.Fields(c.Text()), " ") }

// of returns a comment. A missing comment is an error, because its key would have no description.
func (c comments) of(name string) (string, error) {
	if text := c[name]; text != "" {
		return text, nil
	}
	return "", fmt.Errorf("%s: %s has no doc comment", typesFile, name)
}
