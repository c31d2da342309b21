package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"strconv"

	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/daemon/config/internal/model"
)

// schema is the part of JSON schema, draft 2020-12, that describes the configuration. Empty fields are left out.
type schema struct {
	Version              string             `json:"$schema,omitempty"`
	Ref                  string             `json:"$ref,omitempty"`
	Definitions          map[string]*schema `json:"$defs,omitempty"`
	Items                *schema            `json:"items,omitempty"`
	Properties           schemaProperties   `json:"properties,omitempty"`
	AdditionalProperties *bool              `json:"additionalProperties,omitempty"`
	Type                 string             `json:"type,omitempty"`
	Enum                 []string           `json:"enum,omitempty"`
	Maximum              json.Number        `json:"maximum,omitempty"`
	Minimum              json.Number        `json:"minimum,omitempty"`
	Pattern              string             `json:"pattern,omitempty"`
	MaxItems             *int               `json:"maxItems,omitempty"`
	MinItems             int                `json:"minItems,omitempty"`
	Required             []string           `json:"required,omitempty"`
	Title                string             `json:"title,omitempty"`
	Description          string             `json:"description,omitempty"`
	Default              any                `json:"default,omitempty"`

	// Keys in addition to those of JSON schema: the rule that gives an absent key its value, the range of a string, the
	// kind of change that a reload may make, the scalar's name and its unit.
	DefaultRule string `json:"x-default-rule,omitempty"`
	Most        string `json:"x-maximum,omitempty"`
	Least       string `json:"x-minimum,omitempty"`
	Reload      string `json:"x-reload,omitempty"`
	TypeName    string `json:"x-type,omitempty"`
	Unit        string `json:"x-unit,omitempty"`
}

// schemaProperties are the keys of an object, in the order of the Go type.
type schemaProperties []schemaProperty

type schemaProperty struct {
	key    string
	schema *schema
}

// MarshalJSON implements json.Marshaler. A map would sort the keys.
func (p schemaProperties) MarshalJSON() ([]byte, error) {
	out := []byte{'{'}
	for i, e := range p {
		value, err := json.Marshal(e.schema)
		if err != nil {
			return nil, err
		}
		if i > 0 {
			out = append(out, ',')
		}
		out = append(append(strconv.AppendQuote(out, e.key), ':'), value...)
	}
	return append(out, '}'), nil
}

// makeSchema returns the types as a JSON schema, draft 2020-12, with one definition per object.
func makeSchema(doc comments) ([]byte, error) {
	m := maker{doc: doc, defs: map[string]*schema{}}
	root, err := m.object(reflect.TypeFor[config.Config]())
	if err != nil {
		return nil, err
	}
	root.Version = "https://json-schema.org/draft/2020-12/schema"
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
	defs map[string]*schema
}

func (m *maker) object(t reflect.Type) (*schema, error) {
	text, err := m.doc.of(t.Name())
	if err != nil {
		return nil, err
	}
	s := &schema{Type: "object", Description: text, AdditionalProperties: new(bool)} // false: no unknown keys
	for _, f := range model.Fields(t) {
		p, err := m.property(t, &f)
		if err != nil {
			return nil, err
		}
		s.Properties = append(s.Properties, schemaProperty{f.Key, p})
		if f.Required {
			s.Required = append(s.Required, f.Key)
		}
	}
	return s, nil
}

func (m *maker) property(t reflect.Type, f *model.Field) (*schema, error) {
	text, err := m.doc.of(t.Name() + "." + f.Name)
	if err != nil {
		return nil, err
	}
	var s *schema
	if f.Object != nil {
		name := f.Object.Name()
		if m.defs[name] == nil {
			m.defs[name] = &schema{} // reserved, in case the type contains itself
			def, err := m.object(f.Object)
			if err != nil {
				return nil, err
			}
			m.defs[name] = def
		}
		s = &schema{Ref: "#/$defs/" + name}
	} else if s, err = scalar(f); err != nil {
		return nil, fmt.Errorf("%s.%s: %w", t.Name(), f.Name, err)
	}
	if f.List {
		s = &schema{Type: "array", Items: s, MinItems: f.MinItems, MaxItems: &f.MaxItems}
	}
	s.Description = text
	if s.Default, err = defaultOf(f); err != nil {
		return nil, fmt.Errorf("%s.%s: %w", t.Name(), f.Name, err)
	}
	s.Reload, s.DefaultRule = f.Reload, f.Derived
	return s, nil
}

func scalar(f *model.Field) (*schema, error) {
	s := &schema{Type: f.Scalar.JSON, Pattern: f.Scalar.Pattern, Enum: f.Scalar.Words, TypeName: f.Scalar.Name, Unit: f.Unit}
	if f.Scalar.JSON == "integer" {
		var err error
		if s.Minimum, err = integer(f.Min); err == nil {
			s.Maximum, err = integer(f.Max)
		}
		return s, err
	}
	s.Least, s.Most = f.Min, f.Max
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
