// Package model describes the configuration's Go types to the decoder, the JSON schema and the documentation: what the keys
// of an object are (field.go) and how a scalar type is written (scalar.go, enum.go).
package model

import (
	"fmt"
	"reflect"
	"strconv"
	"strings"
)

// Field is one key of an object.
type Field struct {
	Index    int    // in the Go struct
	Name     string // of the Go field
	Key      string // in the file
	Type     reflect.Type
	Scalar   *Scalar      // of the field or, when List, of its elements; nil for objects
	Object   reflect.Type // the struct of the field or, when List, of its elements; nil for scalars
	List     bool
	Optional bool   // an object behind a pointer: absent is nil
	Default  string // as a file writes it; "" = none
	Derived  string // the rule behind a default that depends on other keys; "" = none
	Min, Max string // as a file writes them; "" = no bound
	MinItems int
	MaxItems int
	Unit     string
	Reload   string
	Required bool
}

// Fields returns the keys of a struct type in declaration order. It panics on a tag that makes no sense: that is a mistake in
// the type, found by the first test.
func Fields(t reflect.Type) []Field {
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
				panic(fmt.Sprintf("model: %s.%s: no way to write a %s", t, sf.Name, elem))
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

// Defaults returns the texts of a default: one for a scalar, one an element for a list written "[a, b]", which may be "[]"; nil
// when there is none.
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

// Range draws the range for people: "3s to 65535s", "" when there is none.
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

// Outside says whether a value of the field's scalar type lies below or above the field's range.
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
