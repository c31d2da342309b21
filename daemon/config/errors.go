package config

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Error is one mistake in a configuration, with its position and its remedy.
type Error struct {
	File         string // "" if the configuration has no file
	Line, Column int    // from 1
	Path         string // path of the value, such as planes[0].sub_ports[1].device; "document" for the whole file
	Wrong        string // the mistake
	Right        string // the remedy
}

// Error returns file:line:column: path: mistake, remedy.
func (e Error) Error() string {
	text := fmt.Sprintf("%d:%d: %s: %s, %s", e.Line, e.Column, e.Path, e.Wrong, e.Right)
	if e.File != "" {
		text = e.File + ":" + text
	}
	return text
}

// Errors lists all mistakes in a configuration, sorted by position. It is never empty when returned as an error.
type Errors []Error

// Error returns one line per mistake.
func (e Errors) Error() string {
	lines := make([]string, len(e))
	for i := range e {
		lines[i] = e[i].Error()
	}
	return strings.Join(lines, "\n")
}

// Unwrap lets errors.As find the individual errors.
func (e Errors) Unwrap() []error {
	out := make([]error, len(e))
	for i := range e {
		out[i] = e[i]
	}
	return out
}

// documentPath is the path of errors that concern the whole file.
const documentPath = "document"

// position is a position in a file, from 1.
type position struct{ line, column int }

// problems collects errors and resolves their positions.
type problems struct {
	file   string
	places map[string]position // of every value in the file, by path; "" is the document
	broken map[string]bool     // paths of values that already have an error
	errs   Errors
}

// at reports an error at a position.
func (p *problems) at(pos position, path, wrong, right string) {
	if path == "" {
		path = documentPath
	}
	p.errs = append(p.errs, Error{File: p.file, Line: pos.line, Column: pos.column, Path: path, Wrong: wrong, Right: right})
}

// add reports an error at the value of a path or, if the file does not contain it, at the innermost enclosing value. It
// ignores a value that already has an error, or is inside such a value.
func (p *problems) add(path, wrong, right string) {
	for q := path; ; q = parent(q) {
		if p.broken[q] {
			return
		}
		if q == "" {
			break
		}
	}
	q := path
	for ; q != ""; q = parent(q) {
		if _, ok := p.places[q]; ok {
			break
		}
	}
	p.at(p.places[q], path, wrong, right)
}

// fail marks a value as broken and reports the error.
func (p *problems) fail(pos position, path, wrong, right string) {
	p.at(pos, path, wrong, right)
	p.broken[path] = true
}

// written reports whether the file contains a value, and it could be decoded.
func (p *problems) written(path string) bool {
	_, ok := p.places[path]
	return ok && !p.broken[path]
}

// partial reports whether the value of a path, or a part of it, has an error, so that a conclusion from a missing part
// would mislead.
func (p *problems) partial(path string) bool {
	for at := range p.broken {
		if rest, ok := strings.CutPrefix(at, path); ok && (rest == "" || rest[0] == '.' || rest[0] == '[') {
			return true
		}
	}
	return false
}

// result returns the errors in order, or nil if there are none.
func (p *problems) result() error {
	if len(p.errs) == 0 {
		return nil
	}
	slices.SortStableFunc(p.errs, func(a, b Error) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column), cmp.Compare(a.Path, b.Path),
			cmp.Compare(a.Wrong, b.Wrong))
	})
	return p.errs
}

// join returns the path of a key of an object.
func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}

// item returns the path of an element of a list.
func item(path string, i int) string { return fmt.Sprintf("%s[%d]", path, i) }

// parent removes the last key or index from a path.
func parent(path string) string {
	return path[:max(strings.LastIndexAny(path, ".["), 0)]
}
