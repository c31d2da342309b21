package config

import (
	"bytes"
	"fmt"
	"reflect"

	"go.yaml.in/yaml/v3"

	"github.com/fared/fared/daemon/config/internal/model"
)

// Text returns a resolved configuration as a file that Parse reads back to an equal one, except for passwords and keys.
// It omits keys that have their default. Equal configurations give equal bytes.
func (c *Config) Text() string {
	bare := clone(c) // has the derived values that absent keys would get
	strip(reflect.ValueOf(bare).Elem())
	derive(bare, func(string) bool { return false })
	root := encode(reflect.ValueOf(c).Elem(), reflect.ValueOf(bare).Elem())
	var buf bytes.Buffer
	enc := yaml.NewEncoder(&buf)
	enc.SetIndent(2)
	if err := enc.Encode(root); err != nil {
		panic(fmt.Sprintf("config: cannot encode a tree of plain nodes: %v", err)) // cannot happen: a bytes.Buffer never fails
	}
	return buf.String()
}

// strip clears the derived keys.
func strip(v reflect.Value) {
	for _, f := range model.Fields(v.Type()) {
		switch fv := v.Field(f.Index); {
		case f.Derived != "":
			fv.SetZero()
		case f.Object != nil && f.List:
			for i := range fv.Len() {
				strip(fv.Index(i))
			}
		case f.Object != nil && !f.Optional:
			strip(fv)
		}
	}
}

// encode encodes a struct; bare contains the derived values.
func encode(v, bare reflect.Value) *yaml.Node {
	n := &yaml.Node{Kind: yaml.MappingNode}
	for _, f := range model.Fields(v.Type()) {
		fv, bv := v.Field(f.Index), bare.Field(f.Index)
		var value *yaml.Node
		switch {
		case f.Object != nil && f.List:
			value = &yaml.Node{Kind: yaml.SequenceNode}
			for i := range fv.Len() {
				value.Content = append(value.Content, encode(fv.Index(i), bv.Index(i)))
			}
		case f.Object != nil && f.Optional:
			if fv.IsNil() {
				continue
			}
			value = encode(fv.Elem(), bv.Elem())
		case f.Object != nil:
			value = encode(fv, bv)
		case absent(&f, fv, bv):
			continue
		case f.List:
			value = &yaml.Node{Kind: yaml.SequenceNode, Style: yaml.FlowStyle}
			for i := range fv.Len() {
				value.Content = append(value.Content, scalar(f.Scalar, fv.Index(i)))
			}
		default:
			value = scalar(f.Scalar, fv)
		}
		if f.Object != nil && len(value.Content) == 0 {
			continue
		}
		n.Content = append(n.Content, &yaml.Node{Kind: yaml.ScalarNode, Value: f.Key}, value)
	}
	return n
}

// absent reports whether a key would get its value if it were omitted.
func absent(f *model.Field, v, bare reflect.Value) bool {
	want := reflect.New(f.Type).Elem()
	if f.Derived != "" {
		want.Set(bare)
	} else if f.Default != "" {
		setDefault(f, want)
	}
	return reflect.DeepEqual(v.Interface(), want.Interface())
}

// scalar encodes a value, with quotes where YAML would interpret it as another type.
func scalar(s *model.Scalar, v reflect.Value) *yaml.Node {
	n := &yaml.Node{Kind: yaml.ScalarNode, Value: s.Format(v)}
	if s.JSON == "string" {
		n.SetString(n.Value)
	}
	return n
}
