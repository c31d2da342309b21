package config

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Error is one thing that is wrong with a configuration, where, and what would be right.
type Error struct {
	File         string // "" when the configuration came from no file
	Line, Column int    // from 1; 0 when the configuration came from no file
	Path         string // of the value, such as planes[0].sub_ports[1].device; "document" for the whole
	Wrong        string // what is wrong
	Right        string // what would be right
}

// Error draws file:line:column: path: what is wrong, what would be right.
func (e Error) Error() string {
	text := fmt.Sprintf("%s: %s, %s", e.Path, e.Wrong, e.Right)
	if e.Line > 0 {
		text = fmt.Sprintf("%d:%d: %s", e.Line, e.Column, text)
		if e.File != "" {
			text = e.File + ":" + text
		}
	}
	return text
}

// Errors is everything that is wrong with a configuration, sorted by position. It is never empty when returned as an error.
type Errors []Error

// Error draws one line an error.
func (e Errors) Error() string {
	lines := make([]string, len(e))
	for i := range e {
		lines[i] = e[i].Error()
	}
	return strings.Join(lines, "\n")
}

// Unwrap lets errors.As find the single ones.
func (e Errors) Unwrap() []error {
	out := make([]error, len(e))
	for i := range e {
		out[i] = e[i]
	}
	return out
}

// documentPath is the path of errors about the file as a whole.
const documentPath = "document"

// position is a place in a file, from 1.
type position struct{ line, column int }

// problems collects errors and knows where things are.
type problems struct {
	file   string
	places map[string]position // of every value that was written, by path; "" is the document
	broken map[string]bool     // paths whose value is in error already
	errs   Errors
}

// at reports an error at a position.
func (p *problems) at(pos position, path, wrong, right string) {
	if path == "" {
		path = documentPath
	}
	p.errs = append(p.errs, Error{File: p.file, Line: pos.line, Column: pos.column, Path: path, Wrong: wrong, Right: right})
}

// add reports an error at the value of a path or, when it was not written, at what it would be in. It says nothing about a value
// that is in error already, or is inside one.
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

// fail marks a value as broken and reports why.
func (p *problems) fail(pos position, path, wrong, right string) {
	p.at(pos, path, wrong, right)
	p.broken[path] = true
}

// written says whether a value was written, and could be read.
func (p *problems) written(path string) bool {
	_, ok := p.places[path]
	return ok && !p.broken[path]
}

// result returns the errors in order, nil when there are none.
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

// join makes the path of a key of an object.
func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}

// item makes the path of an element of a list.
func item(path string, i int) string { return fmt.Sprintf("%s[%d]", path, i) }

// parent takes the last key or index off a path.
func parent(path string) string {
	return path[:max(strings.LastIndexAny(path, ".["), 0)]
}
