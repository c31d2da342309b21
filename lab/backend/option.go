package backend

import (
	"fmt"
	"regexp"
	"strings"
)

// OptionError is an error whose text names options by the fields of structs. A command has other names for them: see
// Named.
type OptionError struct {
	format string // with fields in braces
	args   []any
}

// NewOptionError returns an error with a text as of fmt.Sprintf, in which braces mark the names of fields.
func NewOptionError(format string, args ...any) *OptionError { return &OptionError{format, args} }

var field = regexp.MustCompile(`\{[A-Za-z]+\}`)

// Error returns the text with the names of fields.
func (e *OptionError) Error() string { return e.text(func(field string) string { return field }) }

func (e *OptionError) text(name func(field string) string) string {
	format := field.ReplaceAllStringFunc(e.format, func(s string) string { return strings.ReplaceAll(name(strings.Trim(s, "{}")), "%", "%%") })
	return fmt.Sprintf(format, e.args...)
}

// Named returns an error that wraps err, with the names that a command has for options instead of the fields.
func Named(err error, name func(field string) string) error {
	text := err.Error()
	var walk func(error)
	walk = func(err error) {
		if e, ok := any(err).(*OptionError); ok { // not errors.As: walk visits each error of the tree
			text = strings.ReplaceAll(text, e.Error(), e.text(name))
		}
		switch e := any(err).(type) {
		case interface{ Unwrap() error }:
			if inner := e.Unwrap(); inner != nil {
				walk(inner)
			}
		case interface{ Unwrap() []error }:
			for _, inner := range e.Unwrap() {
				walk(inner)
			}
		}
	}
	walk(err)
	return &named{text, err}
}

// named is an error with another text.
type named struct {
	text string
	err  error
}

func (n *named) Error() string { return n.text }
func (n *named) Unwrap() error { return n.err }
