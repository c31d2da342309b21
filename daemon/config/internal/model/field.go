// Package model describes the configuration's Go types to the decoder, the JSON schema and the documentation: the keys
// of an object (field.go) and the syntax of a scalar type (scalar.go, enum.go).
package model

import (
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"sync"
)

// Field is one key of an object.
type Field struct {
	Index    int    // in the Go struct
	Name     string // of the Go field
	Key      string // in the file
	Type     reflect.Type
	Scalar   *Scalar      // of the field or, if List, of its elements; nil for objects
	Object   reflect.Type // the struct of the field or, if List, of its elements; nil for scalars
	List     bool
	Optional bool   // an object behind a pointer, which is nil if absent
	Default  string // in the syntax of the file; "" means none
	Derived  string // the rule of a default that depends on other keys; "" means none
	Min, Max string // in the syntax of the file; "" means no bound
	MinItems int
	MaxItems int
	Unit     string
	Reload   string
	Required bool
	Refused  string // a word that is not permitted, and the reason: "word: reason"; "" means none
}

// described has the result of fieldsOf by type: a configuration of some planes asks for it some hundred times.
var described sync.Map

// Fields returns the keys of a struct type in declaration order; callers do not modify them. It panics on an invalid
// tag: that is a mistake in the type, found by the first test.
func Fields(t reflect.Type) []Field {
	if known, ok := described.Load(t); ok {
		return known.([]Field)
	}
	out := fieldsOf(t)
	described.Store(t, out)
	return out
}

func fieldsOf(t reflect.Type) []Field {
	var out []Field
	for i := range t.NumField() {
		sf := t.Field(i)
		key := sf.Tag.Get("yaml")
		if key == "-" || key == "" {
			continue
		}
		f := Field{
			Index: i, Name: sf.Name, Key: key, Type: sf.Type,
			Default: sf.Tag.Get("default"), Derived: sf.Tag.Get("derived"), Min: sf.Tag.Get("min"), Max: sf.Tag.Get("max"),
			Unit: sf.Tag.Get("unit"), Reload: sf.Tag.Get("reload"), Required: sf.Tag.Get("required") == "true",
			Refused: sf.Tag.Get("refused"),
		}
		elem := sf.Type
		switch {
		case elem.Kind() == reflect.Slice:
			f.List, elem = true, elem.Elem()
			least, most, ok := strings.Cut(sf.Tag.Get("items"), "..")
			var err1, err2 error
			f.MinItems, err1 = strconv.Atoi(least)
			f.MaxItems, err2 = strconv.Atoi(most)
			if !ok || err1 != nil || err2 != nil {
				panic(fmt.Sprintf("model: %s.%s: a list needs a tag like items:\"1..64\"", t, sf.Name))
			}
		case elem.Kind() == reflect.Pointer:
			f.Optional, elem = true, elem.Elem()
		}
		if f.Scalar = scalarOf(elem, sf.Tag.Get("enum")); f.Scalar == nil {
			if elem.Kind() != reflect.Struct {
				panic(fmt.Sprintf("model: %s.%s: cannot write a %s", t, sf.Name, elem))
			}
			f.Object = elem
		}
		if f.Unit == "" && f.Scalar != nil {
			f.Unit = f.Scalar.Unit
		}
		out = append(out, f)
	}
	return out
}

// Defaults returns the texts of a default: one for a scalar, one per element for a list in the form "[a, b]", which may
// be "[]"; nil if there is none.
func (f *Field) Defaults() []string {
	if f.Default == "" {
		return nil
	}
	if !f.List {
		return []string{f.Default}
	}
	if f.Default == "[]" {
		return []string{}
	}
	return strings.Split(strings.Trim(f.Default, "[]"), ", ")
}

// Range formats the range for display: "3s to 65535s", "" if there is none.
func (f *Field) Range() string {
	switch {
	case f.Min != "" && f.Max != "":
		return f.Min + " to " + f.Max
	case f.Min != "":
		return "at least " + f.Min
	case f.Max != "":
		return "at most " + f.Max
	}
	return ""
}

// Outside reports whether a value of the field's scalar type lies below or above the field's range.
func (f *Field) Outside(v reflect.Value) (below, above bool) {
	if f.Scalar == nil || f.Scalar.Compare == nil {
		return false, false
	}
	bound := func(text string) reflect.Value {
		b := reflect.New(v.Type()).Elem()
		if p := f.Scalar.Parse(text, b); p != nil {
			panic(fmt.Sprintf("model: %s: bound %s: %s", f.Key, text, p.Wrong))
		}
		return b
	}
	if f.Min != "" {
		below = f.Scalar.Compare(v, bound(f.Min)) < 0
	}
	if f.Max != "" {
		above = f.Scalar.Compare(v, bound(f.Max)) > 0
	}
	return below, above
}
