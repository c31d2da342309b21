package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"strconv"

	"github.com/invopop/jsonschema"

	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/daemon/config/internal/model"
)

// Keys in addition to those of JSON schema: the range of a string, the unit of a number, the kind of change that a reload may make, and the rule
// that gives an absent key its value.
const (
	extraMinimum = "x-minimum"
	extraMaximum = "x-maximum"
	extraUnit    = "x-unit"
	extraType    = "x-type"
	extraReload  = "x-reload"
	extraDerived = "x-default-rule"
)

// makeSchema returns the types as a JSON schema, draft 2020-12, with one definition per object.
func makeSchema(doc comments) ([]byte, error) {
	m := maker{doc: doc, defs: jsonschema.Definitions{}}
	root, err := m.object(reflect.TypeFor[config.Config]())
	if err != nil {
		return nil, err
	}
	root.Version = jsonschema.Version
	root.Title = "fared configuration"
	root.Definitions = m.defs
	raw, err := json.Marshal(root)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	if err := json.Indent(&out, raw, "", "  "); err != nil {
		return nil, err
	}
	out.WriteByte('\n')
	return out.Bytes(), nil
}

type maker struct {
	doc  comments
	defs jsonschema.Definitions
}

func (m *maker) object(t reflect.Type) (*jsonschema.Schema, error) {
	text, err := m.doc.of(t.Name())
	if err != nil {
		return nil, err
	}
	s := &jsonschema.Schema{Type: "object", Description: text, Properties: jsonschema.NewProperties(), AdditionalProperties: jsonschema.FalseSchema}
	for _, f := range model.Fields(t) {
		p, err := m.property(t, &f)
		if err != nil {
			return nil, err
		}
		s.Properties.Set(f.Key, p)
		if f.Required {
			s.Required = append(s.Required, f.Key)
		}
	}
	return s, nil
}

func (m *maker) property(t reflect.Type, f *model.Field) (*jsonschema.Schema, error) {
	text, err := m.doc.of(t.Name() + "." + f.Name)
	if err != nil {
		return nil, err
	}
	var s *jsonschema.Schema
	if f.Object != nil {
		name := f.Object.Name()
		if m.defs[name] == nil {
			m.defs[name] = &jsonschema.Schema{} // reserved, in case the type contains itself
			def, err := m.object(f.Object)
			if err != nil {
				return nil, err
			}
			m.defs[name] = def
		}
		s = &jsonschema.Schema{Ref: "#/$defs/" + name}
	} else if s, err = scalar(f); err != nil {
		return nil, fmt.Errorf("%s.%s: %w", t.Name(), f.Name, err)
	}
	if f.List {
		least, most := uint64(f.MinItems), uint64(f.MaxItems)
		list := &jsonschema.Schema{Type: "array", Items: s, MaxItems: &most}
		if least > 0 {
			list.MinItems = &least
		}
		s = list
	}
	s.Description = text
	if s.Default, err = defaultOf(f); err != nil {
		return nil, fmt.Errorf("%s.%s: %w", t.Name(), f.Name, err)
	}
	extra(s, extraReload, f.Reload)
	extra(s, extraDerived, f.Derived)
	return s, nil
}

func scalar(f *model.Field) (*jsonschema.Schema, error) {
	s := &jsonschema.Schema{Type: f.Scalar.JSON, Pattern: f.Scalar.Pattern}
	for _, w := range f.Scalar.Words {
		s.Enum = append(s.Enum, w)
	}
	extra(s, extraType, f.Scalar.Name)
	extra(s, extraUnit, f.Unit)
	if f.Scalar.JSON == "integer" {
		var err error
		if s.Minimum, err = integer(f.Min); err == nil {
			s.Maximum, err = integer(f.Max)
		}
		return s, err
	}
	extra(s, extraMinimum, f.Min)
	extra(s, extraMaximum, f.Max)
	return s, nil
}

// integer converts a bound such as 0x8f to JSON; "" stays "".
func integer(text string) (json.Number, error) {
	if text == "" {
		return "", nil
	}
	n, err := strconv.ParseInt(text, 0, 64)
	return json.Number(strconv.FormatInt(n, 10)), err
}

// defaultOf converts the default tag to JSON; nil if there is none.
func defaultOf(f *model.Field) (any, error) {
	texts := f.Defaults()
	if texts == nil {
		return nil, nil
	}
	values := make([]any, len(texts))
	for i, text := range texts {
		var err error
		switch f.Scalar.JSON {
		case "integer":
			values[i], err = integer(text)
		case "boolean":
			values[i], err = strconv.ParseBool(text)
		default:
			values[i] = text
		}
		if err != nil {
			return nil, err
		}
	}
	if f.List {
		return values, nil
	}
	return values[0], nil
}

func extra(s *jsonschema.Schema, key, value string) {
	if value == "" {
		return
	}
	if s.Extras == nil {
		s.Extras = map[string]any{}
	}
	s.Extras[key] = value
}
